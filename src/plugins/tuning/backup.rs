//! What DEL gives back to the interface. The file is the reference's, with keys more, which it
//! ignores: the network, by which GC knows what is stale, the attachment, which the file's name does
//! not always tell from others, what the interface was set to, and whether DEL has failed already.

use std::path::Path;

use serde::Serialize;
use serde_json::ser::{PrettyFormatter, Serializer};

use super::attributes::Attributes;
use crate::attachment::Owner;
use crate::attachment::backup::{self, BackupFile};
use crate::cni::json::Json;
use crate::error::{Error, Result};
use crate::files;
use crate::skel::Failures;

/// The content of a backup.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Backup {
    /// What the interface was like before.
    #[serde(flatten)]
    pub(super) original: Attributes,
    /// The network of the attachment; the reference does not tell.
    #[serde(skip_serializing_if = "String::is_empty")]
    network: String,
    /// [`Owner::instance`]; the reference does not tell.
    #[serde(skip_serializing_if = "String::is_empty")]
    attachment: String,
    /// The attributes that ADD has set.
    #[serde(skip_serializing_if = "Attributes::is_empty")]
    set: Attributes,
    /// Whether a DEL could not give all back.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) tried: bool,
}

impl Backup {
    /// Reads what `file` has; an error if that is no backup.
    pub(super) fn read(file: &BackupFile) -> Result<Option<Backup>> {
        file.read()?.map(|bytes| Backup::parse(&bytes)).transpose()
    }

    /// Whether the backup may be of `owner`, and not of another attachment whose file has the same name.
    pub(super) fn may_be_of(&self, owner: &Owner<'_>) -> bool {
        self.attachment.is_empty() || self.attachment == owner.instance()
    }

    fn parse(bytes: &[u8]) -> Result<Backup> {
        let unreadable = |why: &str| Error::internal(format!("the backup cannot be read: {why}"));
        let json = Json::parse(bytes).map_err(|why| unreadable(&why))?;
        let decode = |json: &Json| json.decode::<Attributes>();
        let set = json.get_present("set").map(decode).transpose();
        let text = |key| json.get_present(key).and_then(Json::as_str).unwrap_or("").to_owned();
        Ok(Backup {
            original: decode(&json).map_err(|e| unreadable(e.msg()))?,
            network: text("network"),
            attachment: text("attachment"),
            set: set.map_err(|e| unreadable(e.msg()))?.unwrap_or_default(),
            tried: json.get_present("tried").is_some(),
        })
    }

    /// The backup of an interface that has the attributes `now` and is to get those `wanted`.
    ///
    /// What an earlier ADD has changed is not original: where the interface has the attributes that ADD set,
    /// the earlier backup stays. Where it has others, the earlier backup is of another
    /// interface, of an earlier container with the same id.
    pub(super) fn renewed(
        earlier: Option<Backup>,
        owner: &Owner<'_>,
        now: &Attributes,
        wanted: &Attributes,
    ) -> Backup {
        let Backup { original, set, .. } = earlier.unwrap_or_default();
        let (mac, set_mac) = renew(original.mac, set.mac, now.mac, wanted.mac);
        let (promisc, set_promisc) =
            renew(original.promisc, set.promisc, now.promisc, wanted.promisc);
        let (mtu, set_mtu) = renew(original.mtu, set.mtu, now.mtu, wanted.mtu);
        let (allmulti, set_allmulti) =
            renew(original.allmulti, set.allmulti, now.allmulti, wanted.allmulti);
        let (txqlen, set_txqlen) = renew(original.txqlen, set.txqlen, now.txqlen, wanted.txqlen);
        let set = Attributes {
            mac: set_mac,
            promisc: set_promisc,
            mtu: set_mtu,
            allmulti: set_allmulti,
            txqlen: set_txqlen,
        };
        let original = Attributes { mac, promisc, mtu, allmulti, txqlen };
        let (network, attachment) = (owner.network.to_owned(), owner.instance());
        Backup { original, network, attachment, set, tried: false }
    }

    /// Puts it in place of what `file` has.
    pub(super) fn write(&self, file: &BackupFile) -> Result<()> {
        let mut text = Vec::new();
        let formatter = PrettyFormatter::with_indent(b" ");
        self.serialize(&mut Serializer::with_formatter(&mut text, formatter))
            .map_err(|e| Error::internal(format!("encode the backup: {e}")))?;
        Ok(file.write(&text)?)
    }

    /// Removes the backups of `network` below `dir` that are not of `valid` attachments.
    pub(super) fn collect(dir: &Path, network: &str, valid: &[Owner<'_>]) -> Result<()> {
        let mut failures = Failures::new();
        backup::sweep(dir, network, valid);
        let valid: Vec<_> = valid.iter().map(|owner| BackupFile::new(dir, owner)).collect();
        for (path, content) in backup::all(dir)? {
            // The owner of an unreadable backup is unknown.
            let ours = Backup::parse(&content).is_ok_and(|backup| backup.network == network);
            if ours && !valid.iter().any(|file| *file.path() == path) {
                failures.keep(files::remove_file(&path).map_err(Error::from));
            }
        }
        failures.into_result()
    }
}

/// The original value of one attribute, and the configured value.
fn renew<T: PartialEq + Copy>(
    original: Option<T>,
    set: Option<T>,
    now: Option<T>,
    wanted: Option<T>,
) -> (Option<T>, Option<T>) {
    if wanted.is_none() {
        return (original, set);
    }
    // The reference does not tell what it set: mostly the same as is wanted now.
    let is_tuned = now == set.or(wanted);
    (original.filter(|_| is_tuned).or(now), wanted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const OWNER: Owner<'_> = Owner { network: "net", ifname: "eth0", id: "c1" };

    fn mtu(mtu: u32) -> Attributes {
        Attributes { mtu: Some(mtu), ..Attributes::default() }
    }

    #[test]
    fn the_file_is_the_references_with_keys_more() {
        let dir = tempfile::tempdir().unwrap();
        let file = BackupFile::new(dir.path(), &OWNER);
        let original = Attributes {
            mac: "02:00:00:00:00:0A".parse().ok(),
            promisc: Some(false),
            mtu: Some(1500),
            allmulti: Some(false),
            txqlen: Some(1000),
        };
        let backup = Backup::renewed(None, &OWNER, &original, &original.clone());
        backup.write(&file).unwrap();
        let text = fs::read_to_string(dir.path().join("c1_eth0.json")).unwrap();
        let expected = "{\n \"mac\": \"02:00:00:00:00:0a\",\n \"promisc\": false,\n \"mtu\": 1500,\n \"allmulti\": false,\n \"txQLen\": 1000,\n \"network\": \"net\",\n \"attachment\": \"";
        assert!(text.starts_with(expected), "{text}");
        assert_eq!(Backup::read(&file).unwrap(), Some(backup));
    }

    #[test]
    fn the_references_files_are_read_and_others_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = BackupFile::new(dir.path(), &OWNER);
        file.write(b"{\n \"mtu\": 1500,\n \"txQLen\": 0\n}").unwrap();
        let original = Attributes { txqlen: Some(0), ..mtu(1500) };
        let backup = Backup { original, ..Backup::default() };
        assert_eq!(Backup::read(&file).unwrap(), Some(backup));
        for broken in ["", "{", "[]", r#"{"mac":"x"}"#, r#"{"mtu":"1"}"#] {
            file.write(broken.as_bytes()).unwrap();
            let error = Backup::read(&file).unwrap_err();
            assert!(error.msg().starts_with("the backup cannot be read"), "{broken}: {error}");
        }
    }

    #[test]
    fn what_an_earlier_add_set_is_not_original() {
        let renewed = |earlier, now, wanted| {
            Backup::renewed(earlier, &OWNER, &mtu(now), &mtu(wanted)).original.mtu
        };
        let first = Backup::renewed(None, &OWNER, &mtu(1500), &mtu(1400));
        assert_eq!(first.original, mtu(1500));
        assert_eq!(renewed(Some(first.clone()), 1400, 1400), Some(1500), "the same again");
        assert_eq!(renewed(Some(first.clone()), 1400, 1300), Some(1500), "another value");
        assert_eq!(renewed(Some(first.clone()), 9000, 1300), Some(9000), "another interface");
        assert_eq!(
            renewed(Some(first.clone()), 1500, 1400),
            Some(1500),
            "killed before it was set"
        );
        let reference = Backup { original: mtu(1500), ..Backup::default() };
        assert_eq!(renewed(Some(reference.clone()), 1400, 1400), Some(1500));
        assert_eq!(renewed(Some(reference), 9000, 1400), Some(9000));
        let queue = Attributes { txqlen: Some(7), ..Attributes::default() };
        let both = Backup::renewed(Some(first), &OWNER, &queue, &queue.clone());
        assert_eq!(both.original, Attributes { mtu: Some(1500), ..queue });
        assert_eq!(both.set.mtu, Some(1400));
    }
}
