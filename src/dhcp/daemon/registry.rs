//! All leases of the daemon, and the state that their tasks share.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::panic::resume_unwind;
use std::rc::Rc;

use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use super::super::family::DhcpLease;
use super::super::record::{DhcpRecord, DhcpRecordStore};
use super::super::rpc::DhcpLeaseKey;
use super::super::sandbox::{self, InterfaceError, LeaseSandbox};
use super::super::socket;
use super::options::DaemonOptions;
use cni::error::{Error, Result};

/// The maximum number of threads in containers' namespaces.
const VISITS: usize = 16;

/// The state of a lease for plugins.
pub(super) enum LeasePhase {
    /// The first lease is being acquired.
    Acquiring,
    Bound(Box<DhcpLease>),
    /// The lease was lost, and another one is being acquired.
    Searching,
    /// No lease was acquired.
    Failed(Error),
    /// The lease was released, or its container does not exist any more.
    Over,
}

/// The state that all tasks share.
pub(super) struct LeaseRegistry {
    pub(super) options: DaemonOptions,
    pub(super) records: DhcpRecordStore,
    pub(super) leases: RefCell<HashMap<DhcpLeaseKey, LeaseTaskHandle>>,
    visits: Semaphore,
    /// Whether the processes of all plugins were visible so far; `None` before the first one.
    sees_plugins: Cell<Option<bool>>,
}

pub(super) enum LeaseTaskRequest {
    Release,
    /// Another ADD of the attachment has set its interface up in this namespace.
    Follow(Rc<LeaseSandbox>),
    /// That ADD was undone.
    Leave,
}

/// The channels to and from the task of a lease.
#[derive(Clone)]
pub(super) struct LeaseTaskHandle {
    pub(super) sandbox: Rc<LeaseSandbox>,
    /// The processes that have repeated the ADD.
    pub(super) repeated: Rc<RefCell<HashSet<u32>>>,
    pub(super) requests: mpsc::UnboundedSender<LeaseTaskRequest>,
    /// Closed at the end of the task.
    pub(super) phase: watch::Receiver<LeasePhase>,
}

impl LeaseTaskHandle {
    /// Waits until there is a lease, or until it is certain that there will be none.
    pub(super) async fn wait_for_lease(&self) -> Result<DhcpLease> {
        let mut phase = self.phase.clone();
        let done = phase.wait_for(|phase| !matches!(phase, LeasePhase::Acquiring)).await;
        match done.as_deref() {
            Ok(LeasePhase::Bound(lease)) => Ok(DhcpLease::clone(lease)),
            Ok(LeasePhase::Failed(error)) => Err(error.clone()),
            Ok(_) => {
                Err(Error::internal("context canceled").with_details("the lease was released"))
            }
            // The task has panicked.
            Err(_) => Err(Error::internal("the lease's task has failed")),
        }
    }

    /// Undoes the ADD that this process has repeated; `false` if there was none.
    pub(super) fn undo_repeated(&self, process: u32) -> bool {
        self.repeated.borrow_mut().remove(&process)
            && self.requests.send(LeaseTaskRequest::Leave).is_ok()
    }

    /// Requests the release of the lease, and waits for the end of the task.
    pub(super) async fn release_lease(&self) {
        let mut phase = self.phase.clone();
        // This fails if the task has ended, which is no error.
        self.requests.send(LeaseTaskRequest::Release).ok();
        while phase.changed().await.is_ok() {}
    }
}

impl LeaseRegistry {
    pub(super) fn new(options: DaemonOptions, records: DhcpRecordStore) -> LeaseRegistry {
        let visits = Semaphore::new(VISITS);
        LeaseRegistry {
            options,
            records,
            leases: RefCell::default(),
            visits,
            sees_plugins: Cell::new(None),
        }
    }

    /// Notes whether a plugin is among the processes that the daemon sees.
    pub(super) fn note_plugin(&self, is_visible: bool) {
        self.sees_plugins.set(Some(is_visible && self.sees_plugins.get() != Some(false)));
    }

    /// Whether the daemon sees the processes of containers: it sees those of the runtime.
    pub(super) fn sees_processes(&self) -> bool {
        self.sees_plugins.get() == Some(true)
    }

    pub(super) fn find_handle(&self, key: &DhcpLeaseKey) -> Option<LeaseTaskHandle> {
        self.leases.borrow().get(key).cloned()
    }

    /// The lease of a task is in another namespace from now on.
    pub(super) fn replace_sandbox(
        &self,
        key: &DhcpLeaseKey,
        phase: &watch::Receiver<LeasePhase>,
        sandbox: &Rc<LeaseSandbox>,
    ) {
        if let Some(handle) = self.leases.borrow_mut().get_mut(key)
            && handle.phase.same_channel(phase)
        {
            handle.sandbox = Rc::clone(sandbox);
        }
    }

    /// Removes the lease of a task that has ended.
    pub(super) fn remove_lease(
        &self,
        key: &DhcpLeaseKey,
        phase: &watch::Receiver<LeasePhase>,
    ) -> Result<()> {
        let mut leases = self.leases.borrow_mut();
        match leases.get(key) {
            // The record is that of a newer task.
            Some(handle) if !handle.phase.same_channel(phase) => return Ok(()),
            _ => drop(leases.remove(key)),
        }
        self.records.remove_record(key)
    }

    /// Runs `work` with the interface's present name in the container's namespace. Runs nothing in
    /// a namespace with another cookie than the recorded one.
    pub(super) async fn run_in_namespace<T: Send + 'static>(
        &self,
        sandbox: &LeaseSandbox,
        record: &DhcpRecord,
        work: impl FnOnce(&str) -> T + Send + 'static,
    ) -> Result<T, InterfaceError> {
        let (ifname, index, mac, cookie) =
            (record.key.ifname.clone(), record.ifindex, record.mac, record.netns_cookie);
        self.visit_namespace(sandbox, move || {
            sandbox::require_cookie(cookie)?;
            Ok(work(&socket::current_name(&ifname, index, mac)?))
        })
        .await?
    }

    /// Runs `work` in the namespace, on one of at most [`VISITS`] threads.
    pub(super) async fn visit_namespace<T: Send + 'static>(
        &self,
        sandbox: &LeaseSandbox,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, InterfaceError> {
        let _permit = self.visits.acquire().await;
        let (done, ended) = oneshot::channel::<()>();
        let visit = sandbox
            .open_namespace()?
            .spawn_inside(move || {
                let value = work();
                drop(done);
                value
            })
            .map_err(Error::from)?;
        // The thread drops the channel at its end, also when it could not enter the namespace.
        ended.await.ok();
        Ok(visit.join().unwrap_or_else(|panic| resume_unwind(panic)).map_err(Error::from)?)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::options::parse_arguments;
    use super::*;
    use crate::dhcp::family::DhcpFamily;
    use crate::options::ParsedCommandLine;

    fn registry(dir: &Path) -> LeaseRegistry {
        let records = DhcpRecordStore::open_or_create(&dir.join("dhcp.sock")).unwrap();
        let Ok(ParsedCommandLine::Work(line)) = parse_arguments(Vec::new()) else {
            panic!("no defaults")
        };
        LeaseRegistry::new(DaemonOptions::from_command_line(&line).unwrap(), records)
    }

    #[test]
    fn one_hidden_plugin_makes_the_view_incomplete() {
        let dir = tempfile::tempdir().unwrap();
        let registry = registry(dir.path());
        assert!(!registry.sees_processes());
        for (is_visible, expected) in [(true, true), (true, true), (false, false), (true, false)] {
            registry.note_plugin(is_visible);
            assert_eq!(registry.sees_processes(), expected);
        }
    }

    #[test]
    fn the_end_of_a_replaced_task_keeps_the_lease_of_the_newer() {
        let dir = tempfile::tempdir().unwrap();
        let registry = registry(dir.path());
        let (container_id, network, ifname) = ("c1".to_owned(), "n".to_owned(), "eth0".to_owned());
        let key = DhcpLeaseKey { container_id, network, ifname, family: DhcpFamily::V4 };
        let (requests, _requested) = mpsc::unbounded_channel();
        let [(_older, ended), (_newer, phase)] =
            [(); 2].map(|()| watch::channel(LeasePhase::Acquiring));
        let sandbox = Rc::new(LeaseSandbox::closed("/x", "/x".into(), (1, 2)));
        let newer =
            LeaseTaskHandle { sandbox, repeated: Rc::default(), requests, phase: phase.clone() };
        registry.leases.borrow_mut().insert(key.clone(), newer);
        registry.remove_lease(&key, &ended).unwrap();
        assert!(registry.find_handle(&key).is_some());
        registry.remove_lease(&key, &phase).unwrap();
        assert!(registry.find_handle(&key).is_none());
    }
}
