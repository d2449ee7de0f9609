//! What DEL has to know: the configuration that ADD handed on, kept as a file.
//!
//! The reference keeps it in `<dataDir>/<container>`, so that only one interface of a container can
//! have one. So do we for the first; `.cnibox/<container>` beside it tells which interface that is
//! and, in a second line, the namespace that the interface is in.
//! For any other the configuration is in `.cnibox/<container>:<interface>`.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::attachment::Owner;
use crate::attachment::backup::{sweep, temporary_of};
use crate::cni::json::Json;
use crate::cni::names::is_identifier;
use crate::error::{Error, Result};
use crate::files::atomic::{Durability, Writer};
use crate::files::dir;
use crate::netns::NetnsId;

/// The folder for what the reference does not know.
const OWN: &str = ".cnibox";

/// All records of a data directory.
#[derive(Debug)]
pub(super) struct Records {
    dir: PathBuf,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) container_id: String,
    /// `None` in a record of the reference.
    pub(super) ifname: Option<String>,
    /// Where the interface is, if that was noted.
    pub(super) place: Option<Place>,
    /// The configuration; anything at all after a crash of the reference.
    pub(super) conf: Vec<u8>,
    path: PathBuf,
}

/// The namespace that an attachment was made in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    netns: NetnsId,
    path: String,
}

/// What is noted beside a container's first record.
#[derive(Debug)]
struct Note {
    ifname: String,
    place: Option<Place>,
}

impl Place {
    /// The namespace at `path`. One that nothing pins is left out: it cannot be told from a later one.
    pub(super) fn at(path: &str) -> Option<Place> {
        let netns = NetnsId::at(Path::new(path)).filter(|netns| netns.ctime != 0)?;
        Some(Place { netns, path: path.to_owned() })
    }

    /// The path, if the same namespace is there still.
    pub(super) fn path(&self) -> Option<&str> {
        (Place::at(&self.path).as_ref() == Some(self)).then_some(&self.path)
    }

    fn parse(line: &str) -> Option<Place> {
        let mut words = line.splitn(4, ' ');
        let mut number = || words.next()?.parse::<u64>().ok();
        let (dev, ino) = (u32::try_from(number()?).ok()?, u32::try_from(number()?).ok()?);
        let netns = NetnsId { dev, ino, ctime: number()? };
        Some(Place { netns, path: words.next()?.to_owned() })
    }
}

impl Note {
    fn text(ifname: &str, place: Option<&Place>) -> String {
        match place {
            Some(Place { netns: NetnsId { dev, ino, ctime }, path }) => {
                format!("{ifname}\n{dev} {ino} {ctime} {path}")
            }
            None => ifname.to_owned(),
        }
    }

    fn parse(text: &str) -> Note {
        let (ifname, place) = text.split_once('\n').unwrap_or((text, ""));
        Note { ifname: ifname.to_owned(), place: Place::parse(place) }
    }
}

impl Record {
    fn read(path: PathBuf, id: &str, note: Option<Note>) -> Result<Option<Record>> {
        let Some(conf) = read(&path)? else { return Ok(None) };
        let (ifname, place) = note.map(|note| (note.ifname, note.place)).unzip();
        let (container_id, place) = (id.to_owned(), place.flatten());
        Ok(Some(Record { container_id, ifname, place, conf, path }))
    }

    /// The configuration, if it is one.
    pub(super) fn json(&self) -> Result<Json, String> {
        Json::parse(&self.conf).and_then(|json| match json {
            Json::Object(_) => Ok(json),
            other => Err(format!("{} is not an object", other.go_type())),
        })
    }

    /// The network that it is of, if it is the configuration of a plugin.
    pub(super) fn network(&self) -> Option<String> {
        let json = self.json().ok()?;
        json.get_present("type")?.as_str().filter(|plugin| !plugin.is_empty())?;
        Some(json.get_present("name")?.as_str()?.to_owned())
    }

    /// Whether the record can be of an attachment to `network`. A record that a crash has broken is known by
    /// its note; without a note only an empty record is removed, because nothing is lost with it.
    fn may_be_of(&self, network: &str) -> bool {
        match self.network() {
            Some(name) => name == network,
            None => self.conf.is_empty() || (self.ifname.is_some() && self.json().is_err()),
        }
    }
}

impl Records {
    pub(super) fn at(dir: &Path) -> Records {
        Records { dir: dir.to_owned() }
    }

    fn first(&self, id: &str) -> PathBuf {
        self.dir.join(id)
    }

    fn note(&self, id: &str) -> PathBuf {
        self.dir.join(OWN).join(id)
    }

    /// Not the name of a container: those have no colon.
    fn other(&self, id: &str, ifname: &str) -> PathBuf {
        self.dir.join(OWN).join(format!("{id}:{ifname}"))
    }

    /// Keeps the configuration of an attachment, in the place of what was kept for it.
    pub(super) fn save(&self, owner: &Owner<'_>, conf: &[u8], place: Option<&Place>) -> Result<()> {
        let (id, ifname) = (owner.id, owner.ifname);
        dir::ensure(&self.dir, 0o700)?;
        dir::ensure(&self.dir.join(OWN), 0o700)?;
        let (other, first) = (self.other(id, ifname), self.first(id));
        let temporary = temporary_of(&self.dir.join(OWN), owner);
        let synced =
            |path: &Path| Writer::new(&temporary, Durability::Synced).replace(path, conf, 0o600);
        let is_own = |note: Option<Note>| note.is_some_and(|note| note.ifname == ifname);
        let free = !other.exists() && (!first.exists() || is_own(self.read_note(id)?));
        if !free {
            return Ok(synced(&other)?);
        }
        synced(&first)?;
        // Without the note the record serves any interface, as the reference's does.
        let note = self.note(id);
        Ok(Writer::new(&temporary, Durability::Volatile).replace(
            &note,
            Note::text(ifname, place).as_bytes(),
            0o600,
        )?)
    }

    /// The record of an attachment to `network`.
    pub(super) fn find(&self, id: &str, ifname: &str, network: &str) -> Result<Option<Record>> {
        dir::require_own(&self.dir)?;
        if let found @ Some(_) =
            Record::read(self.other(id, ifname), id, Some(Note::parse(ifname)))?
        {
            return Ok(found);
        }
        let note = self.read_note(id)?;
        if note.as_ref().is_some_and(|note| note.ifname != ifname) {
            return Ok(None);
        }
        let found = Record::read(self.first(id), id, note)?;
        Ok(found.filter(|record| record.may_be_of(network)))
    }

    pub(super) fn list(&self) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        dir::require_own(&self.dir)?;
        for name in names(&self.dir)?.into_iter().filter(|name| is_identifier(name)) {
            records.extend(Record::read(self.first(&name), &name, self.read_note(&name)?)?);
        }
        for name in names(&self.dir.join(OWN))? {
            let Some((id, ifname)) = name.split_once(':') else { continue };
            records.extend(Record::read(self.other(id, ifname), id, Some(Note::parse(ifname)))?);
        }
        Ok(records)
    }

    /// Forgets an attachment. The record goes last: as long as it is there, DEL can be repeated.
    pub(super) fn remove(&self, record: &Record) -> Result<()> {
        if record.path == self.first(&record.container_id) {
            remove(&self.note(&record.container_id))?;
        }
        remove(&record.path)
    }

    /// Removes what killed commands left, but for the attachments that are valid.
    pub(super) fn sweep(&self, network: &str, valid: &[Owner<'_>]) {
        sweep(&self.dir.join(OWN), network, valid);
    }

    /// The same for one attachment.
    pub(super) fn sweep_one(&self, owner: &Owner<'_>) -> Result<()> {
        remove(&temporary_of(&self.dir.join(OWN), owner))
    }

    /// Of which interface the container's first record is.
    fn read_note(&self, id: &str) -> Result<Option<Note>> {
        let note = read(&self.note(id))?;
        Ok(note.map(|bytes| Note::parse(&String::from_utf8_lossy(&bytes))))
    }
}

fn names(dir: &Path) -> Result<Vec<String>> {
    let failed = |e| Error::io(format_args!("read {}", dir.display()), &e);
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let name = |entry: std::io::Result<fs::DirEntry>| {
        Ok(entry.map_err(failed)?.file_name().to_string_lossy().into_owned())
    };
    entries.map(name).collect()
}

/// The file's content; `None` if there is no such file.
fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::IsADirectory) => Ok(None),
        Err(e) => Err(Error::io(format_args!("open {}", path.display()), &e)),
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            Err(Error::io(format_args!("remove {}", path.display()), &e))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn records() -> (tempfile::TempDir, Records) {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::at(&dir.path().join("data"));
        (dir, records)
    }

    fn found(records: &Records, id: &str, ifname: &str, network: &str) -> Option<String> {
        let record = records.find(id, ifname, network).unwrap()?;
        Some(String::from_utf8(record.conf).unwrap())
    }

    #[test]
    fn the_first_interface_has_the_references_file() {
        let (_dir, records) = records();
        records
            .save(
                &Owner { network: "n", id: "pod", ifname: "eth0" },
                br#"{"type":"x","name":"a"}"#,
                None,
            )
            .unwrap();
        records
            .save(
                &Owner { network: "n", id: "pod", ifname: "net1" },
                br#"{"type":"x","name":"b"}"#,
                None,
            )
            .unwrap();
        records
            .save(
                &Owner { network: "n", id: "pod", ifname: "eth0" },
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
        let mut all = records.list().unwrap();
        all.sort_by(|a, b| a.ifname.cmp(&b.ifname));
        let names: Vec<_> =
            all.iter().map(|r| (r.container_id.as_str(), r.ifname.as_deref())).collect();
        assert_eq!(names, [("pod", Some("eth0")), ("pod", Some("net1"))]);
        for record in &all {
            records.remove(record).unwrap();
        }
        assert_eq!(names_left(&records), (vec![".cnibox".to_owned()], Vec::new()));
    }

    #[test]
    fn what_a_killed_command_left_is_replaced_and_swept() {
        let (_dir, records) = records();
        let owner = Owner { network: "n", id: "pod", ifname: "eth0" };
        records.save(&owner, b"{}", None).unwrap();
        let temporary = temporary_of(&records.dir.join(OWN), &owner);
        let left = || fs::write(&temporary, "{").unwrap();
        left();
        records.sweep("n", &[owner]);
        records.sweep("other", &[]);
        assert!(temporary.exists());
        records.sweep("n", &[]);
        assert!(!temporary.exists());
        left();
        records.save(&owner, b"{}", None).unwrap();
        assert!(!temporary.exists());
        left();
        records.sweep_one(&owner).unwrap();
        assert!(!temporary.exists());
    }

    #[test]
    fn a_place_is_told_as_long_as_the_same_namespace_is_there() {
        let (_dir, records) = records();
        let owner = Owner { network: "a", id: "pod", ifname: "eth0" };
        let ns = fs::File::open("/proc/self/ns/net").unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&ns));
        let place = Place::at(&path).unwrap();
        records.save(&owner, br#"{"type":"x","name":"a"}"#, Some(&place)).unwrap();
        let record = records.find("pod", "eth0", "a").unwrap().unwrap();
        assert_eq!(record.place.as_ref(), Some(&place));
        assert_eq!(records.list().unwrap(), [record]);
        assert_eq!(place.path(), Some(&*path));
        let other = NetnsId { ctime: 1, ..place.netns };
        assert_eq!(Place { netns: other, path }.path(), None);
        assert_eq!(Place::parse("1 2 x /path"), None);
    }

    fn names_left(records: &Records) -> (Vec<String>, Vec<String>) {
        (names(&records.dir).unwrap(), names(&records.dir.join(OWN)).unwrap())
    }

    #[test]
    fn a_record_of_the_reference_is_any_interfaces_of_its_network() {
        let (_dir, records) = records();
        fs::create_dir(&records.dir).unwrap();
        fs::write(records.dir.join("pod"), r#"{"type":"x","name":"a"}"#).unwrap();
        assert!(found(&records, "pod", "eth0", "a").is_some());
        assert!(found(&records, "pod", "net1", "a").is_some());
        assert_eq!(found(&records, "pod", "eth0", "b"), None);
        // It may be another interface's, so it is left alone.
        records
            .save(
                &Owner { network: "n", id: "pod", ifname: "net1" },
                br#"{"type":"x","name":"a","x":1}"#,
                None,
            )
            .unwrap();
        assert_eq!(fs::read(records.dir.join("pod")).unwrap(), br#"{"type":"x","name":"a"}"#);
        assert_eq!(
            found(&records, "pod", "net1", "a").as_deref(),
            Some(r#"{"type":"x","name":"a","x":1}"#)
        );
        // An empty one tells nothing at all.
        fs::write(records.dir.join("crashed"), "").unwrap();
        assert_eq!(found(&records, "crashed", "eth0", "b").as_deref(), Some(""));
    }

    #[test]
    fn files_of_others_are_no_records() {
        let (_dir, records) = records();
        fs::create_dir(&records.dir).unwrap();
        for content in ["root:x:0", r#"{"name":"a","precious":true}"#, "{", "[]"] {
            fs::write(records.dir.join("passwd"), content).unwrap();
            assert_eq!(found(&records, "passwd", "eth0", "a"), None, "{content}");
            assert!(records.list().unwrap().iter().all(|record| record.network().is_none()));
        }
        fs::set_permissions(&records.dir, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(records.find("pod", "eth0", "a").is_err() && records.list().is_err());
    }

    #[test]
    fn nothing_is_no_trouble() {
        let (_dir, records) = records();
        assert_eq!(found(&records, "pod", "eth0", "a"), None);
        assert_eq!(records.list().unwrap(), []);
    }

    #[test]
    fn a_container_is_never_taken_for_an_interface_of_another() {
        let (_dir, records) = records();
        records.save(&Owner { network: "n", id: "pod", ifname: "eth0" }, b"{}", None).unwrap();
        records.save(&Owner { network: "n", id: "pod", ifname: "net1" }, b"{}", None).unwrap();
        assert_eq!(found(&records, "pod-net1", "eth0", "a"), None);
    }
}
