//! The records of attachments: the delegate's configuration of ADD, for CHECK and DEL.
//!
//! The reference writes `<dataDir>/<container>`, so only one interface of a container can have a
//! record. The first interface's record is the same here; the note `.cnibox/<container>` beside it
//! has two lines: the interface, and the device number, inode number, change time in nanoseconds
//! and path of its network namespace. The records of further interfaces are
//! `.cnibox/<container>:<interface>`.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::attachment::AttachmentId;
use crate::attachment::backup::{remove_temporaries, temporary_path};
use crate::files::{dir, trust};
use crate::netns::NetnsIdentity;
use cni::error::{Error, Result};
use cni::files::atomic::{AtomicWriter, Durability};
use cni::files::{self, FileOperationContext, remove_file};
use cni::json::Json;
use cni::names::is_identifier;

/// The directory beside the reference's records.
const OWN: &str = ".cnibox";
/// Limit of a record's size in bytes: the maximum of a request, and what is added from the subnet
/// file.
const MAX_BYTES: usize = 17 << 20;

/// All records of a data directory.
#[derive(Debug)]
pub(super) struct DelegateRecordStore {
    dir: PathBuf,
}

#[derive(Debug, PartialEq)]
pub(super) struct DelegateRecord {
    pub(super) container_id: String,
    pub(super) note: AttachmentNote,
    /// The configuration, which is malformed after a crash of the reference.
    pub(super) conf: Vec<u8>,
    path: PathBuf,
    /// The path of the note of a first interface.
    note_path: Option<PathBuf>,
}

/// Missing in a record of the reference.
#[derive(Debug, Default, PartialEq)]
pub(super) struct AttachmentNote {
    pub(super) ifname: Option<String>,
    pub(super) sandbox: Option<RecordedNamespace>,
}

/// The network namespace of an attachment.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RecordedNamespace {
    path: String,
    netns: NetnsIdentity,
}

impl RecordedNamespace {
    /// The namespace at `path`; `None` if nothing pins it: it cannot be distinguished from a later
    /// one.
    pub(super) fn from_path(path: &str) -> Option<RecordedNamespace> {
        let netns = NetnsIdentity::at_path(Path::new(path)).filter(|netns| netns.ctime != 0)?;
        Some(RecordedNamespace { path: path.to_owned(), netns })
    }

    /// The path, if the same namespace is still there.
    pub(super) fn present_path(&self) -> Option<&str> {
        (RecordedNamespace::from_path(&self.path).as_ref() == Some(self)).then_some(&self.path)
    }
}

impl AttachmentNote {
    fn parse_lines(text: &str) -> AttachmentNote {
        let (ifname, sandbox) = text.split_once('\n').unwrap_or((text, ""));
        let sandbox = || {
            let mut words = sandbox.splitn(4, ' ');
            let (dev, ino) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
            let netns = NetnsIdentity { dev, ino, ctime: words.next()?.parse().ok()? };
            Some(RecordedNamespace { path: words.next()?.to_owned(), netns })
        };
        AttachmentNote { ifname: Some(ifname.to_owned()), sandbox: sandbox() }
    }
}

impl DelegateRecord {
    /// Removes the record: after its note, so that DEL can be repeated as long as the record
    /// exists.
    pub(super) fn remove_files(&self) -> Result<()> {
        self.note_path.as_deref().map_or(Ok(()), remove_file)?;
        Ok(remove_file(&self.path)?)
    }

    /// The configuration, if it is an object.
    pub(super) fn parse_config(&self) -> Result<Json> {
        let why = match Json::parse(&self.conf) {
            Ok(json @ Json::Object(_)) => return Ok(json),
            Ok(other) => other.wrong_type_message("an object"),
            Err(why) => why.to_string(),
        };
        Err(Error::internal(format!("failed to parse netconf: {why}"))
            .with_details(format!("the record of {}", self.container_id)))
    }

    /// The network of the attachment, if the record has the configuration of a plugin.
    pub(super) fn network_name(&self) -> Option<String> {
        let json = self.parse_config().ok()?;
        json.get_present_member("type")?.as_str().filter(|plugin| !plugin.is_empty())?;
        Some(json.get_present_member("name")?.as_str()?.to_owned())
    }

    /// Whether the record may be of this attachment. The note proves that a malformed record is
    /// ours; without a note only an empty record may be removed, because it has no information.
    fn may_belong_to(&self, owner: &AttachmentId<'_>) -> bool {
        let ifname = self.note.ifname.as_deref();
        ifname.is_none_or(|ifname| ifname == owner.ifname)
            && match self.network_name() {
                Some(name) => name == owner.network,
                None => self.conf.is_empty() || (ifname.is_some() && self.parse_config().is_err()),
            }
    }
}

impl DelegateRecordStore {
    /// The records in the directory `dir`, which is created if it is missing. Fails if others could
    /// write there.
    pub(super) fn create_in_directory(dir: &Path) -> Result<DelegateRecordStore> {
        Ok(DelegateRecordStore { dir: trust::create_data_dir(dir, 0o700)? })
    }

    pub(super) fn from_trusted_directory(dir: &Path) -> DelegateRecordStore {
        DelegateRecordStore { dir: dir.to_owned() }
    }

    fn own_directory(&self) -> PathBuf {
        self.dir.join(OWN)
    }

    fn note_path(&self, id: &str) -> PathBuf {
        self.own_directory().join(id)
    }

    /// Never the path of a note: container ids have no colon.
    fn further_record_path(&self, id: &str, ifname: &str) -> PathBuf {
        self.own_directory().join(format!("{id}:{ifname}"))
    }

    /// The record of the container's first interface.
    fn read_first_record(&self, id: &str) -> Result<Option<DelegateRecord>> {
        let path = self.dir.join(id);
        let Some(conf) = read_if_present(&path)? else { return Ok(None) };
        let note_path = self.note_path(id);
        let note = read_if_present(&note_path)?;
        let note = note.map(|note| AttachmentNote::parse_lines(&String::from_utf8_lossy(&note)));
        let (note, note_path) = (note.unwrap_or_default(), Some(note_path));
        Ok(Some(DelegateRecord { container_id: id.to_owned(), note, conf, path, note_path }))
    }

    /// The record of a further interface of the container.
    fn read_further_record(&self, id: &str, ifname: &str) -> Result<Option<DelegateRecord>> {
        let path = self.further_record_path(id, ifname);
        let note = AttachmentNote { ifname: Some(ifname.to_owned()), sandbox: None };
        Ok(read_if_present(&path)?.map(|conf| DelegateRecord {
            container_id: id.to_owned(),
            note,
            conf,
            path,
            note_path: None,
        }))
    }

    /// Writes the record of an attachment, replacing an earlier one.
    pub(super) fn save_record(
        &self,
        owner: &AttachmentId<'_>,
        conf: &[u8],
        sandbox: Option<RecordedNamespace>,
    ) -> Result<()> {
        dir::ensure_directory(&self.dir, 0o700)?;
        dir::ensure_directory(&self.own_directory(), 0o700)?;
        let temporary = temporary_path(&self.own_directory(), owner);
        let further = self.further_record_path(owner.id, owner.ifname);
        let is_first = !further.exists()
            && self
                .read_first_record(owner.id)?
                .as_ref()
                .is_none_or(|first| first.note.ifname.as_deref() == Some(owner.ifname));
        let path = if is_first { self.dir.join(owner.id) } else { further };
        AtomicWriter::new(&temporary, Durability::Synced).replace_file(&path, conf, 0o600)?;
        if is_first {
            // Without the note the record is valid for any interface, like the reference's.
            let line = |RecordedNamespace { path, netns: NetnsIdentity { dev, ino, ctime } }| {
                format!("\n{dev} {ino} {ctime} {path}")
            };
            let note = owner.ifname.to_owned() + &sandbox.map(line).unwrap_or_default();
            let path = self.note_path(owner.id);
            let writer = AtomicWriter::new(&temporary, Durability::Volatile);
            writer.replace_file(&path, note.as_bytes(), 0o600)?;
        }
        Ok(())
    }

    pub(super) fn find_record(&self, owner: &AttachmentId<'_>) -> Result<Option<DelegateRecord>> {
        dir::require_own_directory(&self.dir)?;
        if let Some(further) = self.read_further_record(owner.id, owner.ifname)? {
            return Ok(Some(further));
        }
        Ok(self.read_first_record(owner.id)?.filter(|record| record.may_belong_to(owner)))
    }

    /// All readable records. An unreadable record only causes a warning, so that GC handles the
    /// others.
    pub(super) fn list_records(&self) -> Result<Vec<DelegateRecord>> {
        let (first, further) =
            (list_file_names(&self.dir)?, list_file_names(&self.own_directory())?);
        let first =
            first.iter().filter(|name| is_identifier(name)).map(|id| self.read_first_record(id));
        let further = further.iter().filter_map(|name| name.split_once(':'));
        let further = further.map(|(id, ifname)| self.read_further_record(id, ifname));
        Ok(first
            .chain(further)
            .filter_map(|found| {
                found.inspect_err(|error| warn!("skipped a record: {error}")).unwrap_or_default()
            })
            .collect())
    }

    /// Removes the temporary files of killed processes, except for those of valid attachments.
    pub(super) fn remove_temporary_files(&self, network: &str, valid: &[AttachmentId<'_>]) {
        remove_temporaries(&self.own_directory(), network, valid);
    }

    /// Removes the temporary file of a killed process for this attachment.
    pub(super) fn remove_temporary_file(&self, owner: &AttachmentId<'_>) -> Result<()> {
        Ok(remove_file(&temporary_path(&self.own_directory(), owner))?)
    }
}

/// The names in a directory; none if the directory is missing.
fn list_file_names(dir: &Path) -> Result<Vec<String>> {
    if !dir::require_own_directory(dir)? {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(dir).during("read", dir)?;
    entries
        .map(|entry| Ok(entry.during("read", dir)?.file_name().to_string_lossy().into_owned()))
        .collect()
}

/// The content of a file; `None` if there is no such file.
fn read_if_present(path: &Path) -> Result<Option<Vec<u8>>> {
    match files::read_regular_file(path, MAX_BYTES) {
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::IsADirectory) => Ok(None),
        content => Ok(Some(content.during("open", path)?)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn records() -> (tempfile::TempDir, DelegateRecordStore) {
        let dir = tempfile::tempdir().unwrap();
        let records = DelegateRecordStore::from_trusted_directory(&dir.path().join("data"));
        (dir, records)
    }

    fn found(
        records: &DelegateRecordStore,
        id: &str,
        ifname: &str,
        network: &str,
    ) -> Option<String> {
        let record = records.find_record(&AttachmentId { network, ifname, id }).unwrap()?;
        Some(String::from_utf8(record.conf).unwrap())
    }

    #[test]
    fn the_first_interface_has_the_file_of_the_reference() {
        let (_dir, records) = records();
        records
            .save_record(
                &AttachmentId { network: "n", id: "pod", ifname: "eth0" },
                br#"{"type":"x","name":"a"}"#,
                None,
            )
            .unwrap();
        records
            .save_record(
                &AttachmentId { network: "n", id: "pod", ifname: "net1" },
                br#"{"type":"x","name":"b"}"#,
                None,
            )
            .unwrap();
        records
            .save_record(
                &AttachmentId { network: "n", id: "pod", ifname: "eth0" },
                br#"{"type":"x","name":"a","mtu":1}"#,
                None,
            )
            .unwrap();
        assert_eq!(
            fs::read(records.dir.join("pod")).unwrap(),
            br#"{"type":"x","name":"a","mtu":1}"#
        );
        assert_eq!(
            found(&records, "pod", "net1", "b").as_deref(),
            Some(r#"{"type":"x","name":"b"}"#)
        );
        assert_eq!(found(&records, "pod", "net2", "a"), None);
        let mut all = records.list_records().unwrap();
        all.sort_by(|a, b| a.note.ifname.cmp(&b.note.ifname));
        let names: Vec<_> =
            all.iter().map(|r| (r.container_id.as_str(), r.note.ifname.as_deref())).collect();
        assert_eq!(names, [("pod", Some("eth0")), ("pod", Some("net1"))]);
        for record in &all {
            record.remove_files().unwrap();
        }
        assert_eq!(names_left(&records), (vec![".cnibox".to_owned()], Vec::new()));
    }

    #[test]
    fn temporary_files_of_killed_commands_are_swept() {
        let (_dir, records) = records();
        let owner = AttachmentId { network: "n", id: "pod", ifname: "eth0" };
        records.save_record(&owner, b"{}", None).unwrap();
        let temporary = temporary_path(&records.dir.join(OWN), &owner);
        let left = || fs::write(&temporary, "{").unwrap();
        left();
        records.remove_temporary_files("n", &[owner]);
        records.remove_temporary_files("other", &[]);
        assert!(temporary.exists());
        records.remove_temporary_files("n", &[]);
        assert!(!temporary.exists());
        left();
        records.save_record(&owner, b"{}", None).unwrap();
        assert!(!temporary.exists());
        left();
        records.remove_temporary_file(&owner).unwrap();
        assert!(!temporary.exists());
    }

    #[test]
    fn the_sandbox_has_a_path_while_the_namespace_exists() {
        let (_dir, records) = records();
        let owner = AttachmentId { network: "a", id: "pod", ifname: "eth0" };
        let ns = fs::File::open("/proc/self/ns/net").unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&ns));
        let sandbox = RecordedNamespace::from_path(&path).unwrap();
        records.save_record(&owner, br#"{"type":"x","name":"a"}"#, Some(sandbox.clone())).unwrap();
        let record = records
            .find_record(&AttachmentId { network: "a", id: "pod", ifname: "eth0" })
            .unwrap()
            .unwrap();
        assert_eq!(record.note.sandbox.as_ref(), Some(&sandbox));
        assert_eq!(records.list_records().unwrap(), [record]);
        assert_eq!(sandbox.present_path(), Some(&*path));
        let other = NetnsIdentity { ctime: 1, ..sandbox.netns };
        assert_eq!(RecordedNamespace { netns: other, path }.present_path(), None);
        fs::write(records.note_path("pod"), "eth0\n4 40265").unwrap();
        let note = &records.list_records().unwrap()[0].note;
        assert_eq!((note.ifname.as_deref(), &note.sandbox), (Some("eth0"), &None), "truncated");
    }

    #[test]
    fn notes_of_release_0_2_0_are_read() {
        let netns = NetnsIdentity { dev: 4, ino: 4_026_532_265, ctime: 17 };
        let sandbox = RecordedNamespace { path: "/run/netns/a b".to_owned(), netns };
        let note = AttachmentNote { ifname: Some("eth0".to_owned()), sandbox: Some(sandbox) };
        assert_eq!(AttachmentNote::parse_lines("eth0\n4 4026532265 17 /run/netns/a b"), note);
        assert_eq!(AttachmentNote::parse_lines("eth0"), AttachmentNote { sandbox: None, ..note });
    }

    fn names_left(records: &DelegateRecordStore) -> (Vec<String>, Vec<String>) {
        (list_file_names(&records.dir).unwrap(), list_file_names(&records.dir.join(OWN)).unwrap())
    }

    #[test]
    fn a_record_of_the_reference_matches_any_interface() {
        let (_dir, records) = records();
        fs::create_dir(&records.dir).unwrap();
        fs::write(records.dir.join("pod"), r#"{"type":"x","name":"a"}"#).unwrap();
        assert!(found(&records, "pod", "eth0", "a").is_some());
        assert!(found(&records, "pod", "net1", "a").is_some());
        assert_eq!(found(&records, "pod", "eth0", "b"), None);
        // The record may be of another interface, and is kept.
        records
            .save_record(
                &AttachmentId { network: "n", id: "pod", ifname: "net1" },
                br#"{"type":"x","name":"a","x":1}"#,
                None,
            )
            .unwrap();
        assert_eq!(fs::read(records.dir.join("pod")).unwrap(), br#"{"type":"x","name":"a"}"#);
        assert_eq!(
            found(&records, "pod", "net1", "a").as_deref(),
            Some(r#"{"type":"x","name":"a","x":1}"#)
        );
        // An empty record matches any network.
        fs::write(records.dir.join("crashed"), "").unwrap();
        assert_eq!(found(&records, "crashed", "eth0", "b").as_deref(), Some(""));
    }

    #[test]
    fn other_files_are_not_records() {
        let (_dir, records) = records();
        fs::create_dir(&records.dir).unwrap();
        for content in ["root:x:0", r#"{"name":"a","precious":true}"#, "{", "[]"] {
            fs::write(records.dir.join("passwd"), content).unwrap();
            assert_eq!(found(&records, "passwd", "eth0", "a"), None, "{content}");
            assert!(
                records
                    .list_records()
                    .unwrap()
                    .iter()
                    .all(|record| record.network_name().is_none())
            );
        }
        fs::set_permissions(&records.dir, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(
            records.find_record(&AttachmentId { network: "a", id: "pod", ifname: "eth0" }).is_err()
                && records.list_records().is_err()
        );
    }

    #[test]
    fn a_record_that_cannot_be_read_does_not_hide_the_others() {
        let (_dir, records) = records();
        let owner = |id| AttachmentId { network: "n", id, ifname: "eth0" };
        records.save_record(&owner("m"), br#"{"type":"x","name":"a"}"#, None).unwrap();
        for name in ["a", "z", ".cnibox/z:net1"] {
            std::os::unix::fs::symlink("/dev/zero", records.dir.join(name)).unwrap();
        }
        let all = records.list_records().unwrap();
        assert_eq!(all.iter().map(|r| &*r.container_id).collect::<Vec<_>>(), ["m"]);
    }

    #[test]
    fn a_missing_directory_has_no_records() {
        let (_dir, records) = records();
        assert_eq!(found(&records, "pod", "eth0", "a"), None);
        assert_eq!(records.list_records().unwrap(), []);
    }

    #[test]
    fn container_ids_are_not_mistaken_for_interfaces() {
        let (_dir, records) = records();
        records
            .save_record(&AttachmentId { network: "n", id: "pod", ifname: "eth0" }, b"{}", None)
            .unwrap();
        records
            .save_record(&AttachmentId { network: "n", id: "pod", ifname: "net1" }, b"{}", None)
            .unwrap();
        assert_eq!(found(&records, "pod-net1", "eth0", "a"), None);
    }
}
