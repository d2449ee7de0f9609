//! Changes of the records of attachments, by inotify(7).

use std::collections::BTreeSet;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};

use crate::attachment::file::{
    ATTACHMENTS, DIR, create_directory, instance_of_file, record_directory,
};
use crate::netfilter::egress::RECORDS;
use cni::error::{Error, Result};
use cni::files::FileOperationContext;

/// What has changed since the last look.
#[derive(Debug, PartialEq, Eq)]
pub enum RecordChanges {
    /// Perhaps the records of these [instances](crate::attachment::AttachmentId::instance_id).
    Of(BTreeSet<String>),
    /// Perhaps any record.
    All,
}

/// Watches the records and the links by which egress policies list them. Both directories exist
/// from then on.
#[derive(Debug)]
pub struct RecordWatch {
    inotify: Inotify,
    /// The parent directory of all records, which Landlock knows by its inode.
    root: WatchDescriptor,
}

impl RecordWatch {
    /// Begins to watch. Records that are read afterwards are not older than the next changes.
    pub fn start() -> Result<RecordWatch> {
        let parent = Path::new(DIR);
        let flags = InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK;
        let inotify = Inotify::init(flags).during("watch", parent)?;
        let is_gone = AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF;
        // A record is renamed to its place; a link is created.
        let is_changed =
            AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVE | AddWatchFlags::IN_DELETE;
        for directory in [RECORDS.0, ATTACHMENTS].map(record_directory) {
            create_directory(&directory)?;
            inotify.add_watch(&directory, is_changed | is_gone).during("watch", &directory)?;
        }
        let root = inotify.add_watch(parent, is_gone).during("watch", parent)?;
        Ok(RecordWatch { inotify, root })
    }

    /// The changes since the last call, without waiting.
    ///
    /// Fails if the parent directory of all records is gone: this process may not write to another
    /// one.
    pub fn read_changes(&mut self) -> Result<RecordChanges> {
        let mut changed = BTreeSet::new();
        let mut is_complete = true;
        loop {
            let events = match self.inotify.read_events() {
                Err(Errno::EAGAIN) => break,
                Err(Errno::EINTR) => continue,
                events => events.during("watch", Path::new(DIR))?,
            };
            for event in &events {
                if event.wd == self.root {
                    return Err(Error::internal(format!("{DIR} was deleted")));
                }
                is_complete &= note_event(event, &mut changed);
            }
        }
        if is_complete {
            return Ok(RecordChanges::Of(changed));
        }
        *self = RecordWatch::start()?;
        Ok(RecordChanges::All)
    }
}

/// Notes the instance of an event. Returns false if events were lost, or a directory is gone.
fn note_event(event: &InotifyEvent, changed: &mut BTreeSet<String>) -> bool {
    let is_lost = AddWatchFlags::IN_Q_OVERFLOW
        | AddWatchFlags::IN_DELETE_SELF
        | AddWatchFlags::IN_MOVE_SELF
        | AddWatchFlags::IN_IGNORED;
    if let Some(instance) = event.name.as_deref().and_then(instance_of_file) {
        changed.insert(instance.to_owned());
    }
    !event.mask.intersects(is_lost)
}

#[cfg(test)]
mod tests {
    use super::*;

    impl RecordWatch {
        /// Loses the changes of records from now on, until the next look.
        pub(in super::super) fn lose_changes(&self) {
            let directory = record_directory(RECORDS.0);
            // The descriptor of a directory that is watched already is the same again.
            let watched = self.inotify.add_watch(&directory, AddWatchFlags::IN_CREATE).unwrap();
            self.inotify.rm_watch(watched).unwrap();
        }
    }

    #[test]
    fn after_a_loss_any_record_may_have_changed() {
        let mut watch = RecordWatch::start().unwrap();
        assert!(matches!(watch.read_changes().unwrap(), RecordChanges::Of(_)));
        watch.lose_changes();
        assert_eq!(watch.read_changes().unwrap(), RecordChanges::All);
        assert!(matches!(watch.read_changes().unwrap(), RecordChanges::Of(_)));
    }

    fn event(mask: AddWatchFlags, name: Option<&str>) -> InotifyEvent {
        // The descriptor has no constructor.
        let inotify = Inotify::init(InitFlags::empty()).unwrap();
        let wd = inotify.add_watch("/", AddWatchFlags::IN_DELETE_SELF).unwrap();
        InotifyEvent { wd, mask, cookie: 0, name: name.map(Into::into) }
    }

    #[test]
    fn events_name_instances_and_losses_are_noticed() {
        let mut changed = BTreeSet::new();
        for (mask, name, is_complete) in [
            (AddWatchFlags::IN_CREATE, Some("a-b.json"), true),
            (AddWatchFlags::IN_MOVED_TO, Some("c-d.json"), true),
            (AddWatchFlags::IN_CREATE, Some(".tmp-c-d"), true),
            (AddWatchFlags::IN_CREATE, Some("other"), true),
            (AddWatchFlags::IN_Q_OVERFLOW, None, false),
            (AddWatchFlags::IN_DELETE_SELF, None, false),
            (AddWatchFlags::IN_IGNORED, None, false),
        ] {
            assert_eq!(note_event(&event(mask, name), &mut changed), is_complete, "{mask:?}");
        }
        assert_eq!(changed, BTreeSet::from(["a-b".to_owned(), "c-d".to_owned()]));
    }
}
