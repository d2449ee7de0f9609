//! The backup of an interface's original attributes, which DEL restores. The file has the
//! reference's format with more keys, which the reference ignores.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::ser::{PrettyFormatter, Serializer};

use super::attributes::InterfaceAttributes;
use crate::attachment::AttachmentId;
use crate::attachment::backup::{self, BackupFile};
use crate::framework::Failures;
use cni::error::{Error, Result};
use cni::files;
use cni::json::Json;

/// The content of a backup.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct TuningBackup {
    /// The attributes before the first ADD.
    #[serde(flatten)]
    pub(super) original: InterfaceAttributes,
    #[serde(flatten)]
    pub(super) extra: TuningBackupExtra,
}

/// The keys that the reference does not have.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct TuningBackupExtra {
    /// The network of the attachment.
    #[serde(skip_serializing_if = "String::is_empty")]
    network: String,
    /// [`AttachmentId::instance_id`]: the name of the file is ambiguous.
    #[serde(skip_serializing_if = "String::is_empty")]
    attachment: String,
    /// The attributes that ADD has set.
    #[serde(skip_serializing_if = "InterfaceAttributes::is_empty")]
    set: InterfaceAttributes,
    /// Whether a DEL could not restore all attributes.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) tried: bool,
}

impl TuningBackup {
    /// Reads the backup; fails if the file is malformed.
    pub(super) fn read_file(file: &BackupFile) -> Result<Option<TuningBackup>> {
        file.read_content()?.as_deref().map(TuningBackup::parse).transpose()
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<TuningBackup> {
        let malformed = |why: &str| Error::internal(format!("the backup cannot be read: {why}"));
        let json = Json::parse(bytes).map_err(|e| malformed(e.message()))?;
        let decode = || Ok(TuningBackup { original: json.decode()?, extra: json.decode()? });
        decode().map_err(|e: Error| malformed(e.message()))
    }

    /// Whether the backup may be of the owner's interface: the names of two attachments' files can
    /// be equal. The network is not compared, as container and interface identify an
    /// attachment, and networks are renamed.
    pub(super) fn may_belong_to(&self, owner: &AttachmentId<'_>) -> bool {
        let attachment = &self.extra.attachment;
        attachment.is_empty() || interface_part(attachment) == interface_part(&owner.instance_id())
    }

    /// The backup of an interface that has the attributes `now` and is to get the attributes
    /// `wanted`.
    ///
    /// Attributes that an earlier ADD has set are not original: where the interface has the
    /// attributes that ADD set, the earlier backup is kept. Where the interface has others, the
    /// earlier backup is of another interface, of an earlier container with the same id.
    pub(super) fn renew_backup(
        earlier: Option<TuningBackup>,
        owner: &AttachmentId<'_>,
        now: &InterfaceAttributes,
        wanted: &InterfaceAttributes,
    ) -> TuningBackup {
        let TuningBackup { mut original, extra: TuningBackupExtra { mut set, .. } } =
            earlier.unwrap_or_default();
        renew_attribute(&mut original.mac, &mut set.mac, now.mac, wanted.mac);
        renew_attribute(&mut original.promisc, &mut set.promisc, now.promisc, wanted.promisc);
        renew_attribute(&mut original.mtu, &mut set.mtu, now.mtu, wanted.mtu);
        renew_attribute(&mut original.allmulti, &mut set.allmulti, now.allmulti, wanted.allmulti);
        renew_attribute(&mut original.txqlen, &mut set.txqlen, now.txqlen, wanted.txqlen);
        let (network, attachment) = (owner.network.to_owned(), owner.instance_id());
        TuningBackup {
            original,
            extra: TuningBackupExtra { network, attachment, set, tried: false },
        }
    }

    /// Replaces the content of `file`.
    pub(super) fn write_file(&self, file: &BackupFile) -> Result<()> {
        let mut text = Vec::new();
        let formatter = PrettyFormatter::with_indent(b" ");
        self.serialize(&mut Serializer::with_formatter(&mut text, formatter))
            .map_err(|e| Error::internal(format!("encode the backup: {e}")))?;
        Ok(file.write_content(&text)?)
    }

    /// Removes the backups of `network` below `dir`, except for those of `valid` attachments.
    pub(super) fn remove_stale(
        dir: &Path,
        network: &str,
        valid: &[AttachmentId<'_>],
    ) -> Result<()> {
        let mut failures = Failures::new();
        backup::remove_temporaries(dir, network, valid);
        let valid: Vec<_> = valid.iter().map(|owner| BackupFile::new(dir, owner)).collect();
        for (path, content) in backup::read_backups(dir)? {
            // The owner of a malformed backup is unknown.
            let is_ours = TuningBackup::parse(&content).is_ok_and(|b| b.extra.network == network);
            if is_ours && !valid.iter().any(|file| file.path == path) {
                failures.keep_error(files::remove_file(&path).map_err(Error::from));
            }
        }
        failures.into_result()
    }
}

/// The part of an [`AttachmentId::instance_id`] without the network.
fn interface_part(instance: &str) -> Option<&str> {
    Some(instance.rsplit_once('-')?.1)
}

/// Updates the original value of an attribute, and the value that ADD has `set`.
fn renew_attribute<T: PartialEq + Copy>(
    original: &mut Option<T>,
    set: &mut Option<T>,
    now: Option<T>,
    wanted: Option<T>,
) {
    if wanted.is_some() {
        // The reference does not record `set`, which mostly equals `wanted`.
        let is_tuned = now == set.or(wanted);
        *original = original.filter(|_| is_tuned).or(now);
        *set = wanted;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const OWNER: AttachmentId<'_> = AttachmentId { network: "net", ifname: "eth0", id: "c1" };

    fn mtu(mtu: u32) -> InterfaceAttributes {
        InterfaceAttributes { mtu: Some(mtu), ..InterfaceAttributes::default() }
    }

    #[test]
    fn the_backup_extends_the_references_format() {
        let dir = tempfile::tempdir().unwrap();
        let file = BackupFile::new(dir.path(), &OWNER);
        let original = InterfaceAttributes {
            mac: "02:00:00:00:00:0A".parse().ok(),
            promisc: Some(false),
            mtu: Some(1500),
            allmulti: Some(false),
            txqlen: Some(1000),
        };
        let backup = TuningBackup::renew_backup(None, &OWNER, &original, &original.clone());
        backup.write_file(&file).unwrap();
        let text = fs::read_to_string(dir.path().join("c1_eth0.json")).unwrap();
        let expected = "{\n \"mac\": \"02:00:00:00:00:0a\",\n \"promisc\": false,\n \"mtu\": \
                        1500,\n \"allmulti\": false,\n \"txQLen\": 1000,\n \"network\": \
                        \"net\",\n \"attachment\": \"";
        assert!(text.starts_with(expected), "{text}");
        assert_eq!(TuningBackup::read_file(&file).unwrap(), Some(backup));
    }

    #[test]
    fn backups_of_release_0_2_0_are_read() {
        let text = r#"{"mac":"02:00:00:00:00:0a","mtu":1500,"network":"net","attachment":"x",
            "set":{"mac":"02:00:00:00:00:0b","mtu":1400},"tried":true}"#;
        let TuningBackup { original, extra } = TuningBackup::parse(text.as_bytes()).unwrap();
        assert_eq!(
            original,
            InterfaceAttributes { mac: "02:00:00:00:00:0a".parse().ok(), ..mtu(1500) }
        );
        let set = InterfaceAttributes { mac: "02:00:00:00:00:0b".parse().ok(), ..mtu(1400) };
        let expected =
            TuningBackupExtra { network: "net".into(), attachment: "x".into(), set, tried: true };
        assert_eq!(extra, expected);
    }

    #[test]
    fn files_of_the_reference_are_read_and_others_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = BackupFile::new(dir.path(), &OWNER);
        file.write_content(b"{\n \"mtu\": 1500,\n \"txQLen\": 0\n}").unwrap();
        let original = InterfaceAttributes { txqlen: Some(0), ..mtu(1500) };
        let backup = TuningBackup { original, ..TuningBackup::default() };
        assert_eq!(TuningBackup::read_file(&file).unwrap(), Some(backup));
        for broken in ["", "{", "[]", r#"{"mac":"x"}"#, r#"{"mtu":"1"}"#] {
            file.write_content(broken.as_bytes()).unwrap();
            let error = TuningBackup::read_file(&file).unwrap_err();
            assert!(error.message().starts_with("the backup cannot be read"), "{broken}: {error}");
        }
    }

    #[test]
    fn values_of_an_earlier_add_are_not_original() {
        let renewed = |earlier, now, wanted| {
            TuningBackup::renew_backup(earlier, &OWNER, &mtu(now), &mtu(wanted)).original.mtu
        };
        let first = TuningBackup::renew_backup(None, &OWNER, &mtu(1500), &mtu(1400));
        assert_eq!(first.original, mtu(1500));
        assert_eq!(renewed(Some(first.clone()), 1400, 1400), Some(1500), "the same again");
        assert_eq!(renewed(Some(first.clone()), 1400, 1300), Some(1500), "another value");
        assert_eq!(renewed(Some(first.clone()), 9000, 1300), Some(9000), "another interface");
        assert_eq!(
            renewed(Some(first.clone()), 1500, 1400),
            Some(1500),
            "killed before it was set"
        );
        let reference = TuningBackup { original: mtu(1500), ..TuningBackup::default() };
        assert_eq!(renewed(Some(reference.clone()), 1400, 1400), Some(1500));
        assert_eq!(renewed(Some(reference), 9000, 1400), Some(9000));
        let queue = InterfaceAttributes { txqlen: Some(7), ..InterfaceAttributes::default() };
        let both = TuningBackup::renew_backup(Some(first), &OWNER, &queue, &queue.clone());
        assert_eq!(both.original, InterfaceAttributes { mtu: Some(1500), ..queue });
        assert_eq!(both.extra.set.mtu, Some(1400));
    }
}
