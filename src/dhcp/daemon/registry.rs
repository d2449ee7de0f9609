//! All leases of the daemon, and the state that their tasks share.

use std::cell::RefCell;
use std::collections::HashMap;
use std::panic::resume_unwind;
use std::rc::Rc;

use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use super::super::family::Lease;
use super::super::record::{Record, Records};
use super::super::rpc::Key;
use super::super::sandbox::{self, InterfaceError, Sandbox};
use super::options::Options;
use crate::error::{Error, Result};

/// The maximum number of threads in containers' namespaces.
const VISITS: usize = 16;

/// The state of a lease for plugins.
pub(super) enum Phase {
    /// The first lease is being acquired.
    Acquiring,
    /// There is a lease.
    Bound(Box<Lease>),
    /// The lease was lost, and another one is being acquired.
    Searching,
    /// No lease was acquired.
    Failed(Error),
    /// The lease was released, or its container does not exist any more.
    Over,
}

/// The state that all tasks share.
pub(super) struct Registry {
    pub(super) options: Options,
    pub(super) records: Records,
    pub(super) leases: RefCell<HashMap<Key, Handle>>,
    visits: Semaphore,
}

/// The channels to and from the task of a lease.
#[derive(Clone)]
pub(super) struct Handle {
    /// The path of the namespace, as in the record.
    pub(super) netns: String,
    pub(super) sandbox: Rc<Sandbox>,
    pub(super) release: mpsc::UnboundedSender<()>,
    /// Closed at the end of the task.
    pub(super) phase: watch::Receiver<Phase>,
}

impl Handle {
    /// Waits until there is a lease, or there will not be one.
    pub(super) async fn lease(&self) -> Result<Lease> {
        let mut phase = self.phase.clone();
        let done = phase.wait_for(|phase| !matches!(phase, Phase::Acquiring)).await;
        match done.as_deref() {
            Ok(Phase::Bound(lease)) => Ok(Lease::clone(lease)),
            Ok(Phase::Failed(error)) => Err(error.clone()),
            Ok(_) => {
                Err(Error::internal("context canceled").with_details("the lease was released"))
            }
            // The task has panicked.
            Err(_) => Err(Error::internal("the lease's task has failed")),
        }
    }

    /// Requests the release of the lease, and waits for the end of the task.
    pub(super) async fn release(&self) {
        let mut phase = self.phase.clone();
        // This fails if the task has ended.
        self.release.send(()).ok();
        while phase.changed().await.is_ok() {}
    }
}

impl Registry {
    pub(super) fn new(options: Options, records: Records) -> Registry {
        let visits = Semaphore::new(VISITS);
        Registry { options, records, leases: RefCell::default(), visits }
    }

    pub(super) fn handle(&self, key: &Key) -> Option<Handle> {
        self.leases.borrow().get(key).cloned()
    }

    /// Removes the lease of a task that has ended.
    pub(super) fn forget(&self, key: &Key, phase: &watch::Receiver<Phase>) -> Result<()> {
        let mut leases = self.leases.borrow_mut();
        match leases.get(key) {
            // The record is that of a newer task.
            Some(handle) if !handle.phase.same_channel(phase) => return Ok(()),
            _ => drop(leases.remove(key)),
        }
        self.records.remove(key)
    }

    /// Runs `work` with the interface's name in the container's namespace, on one of at most [`VISITS`] threads. Runs nothing
    /// in a namespace with another cookie than the recorded one.
    pub(super) async fn visit<T: Send + 'static>(
        &self,
        sandbox: &Sandbox,
        record: &Record,
        work: impl FnOnce(&str) -> T + Send + 'static,
    ) -> Result<T, InterfaceError> {
        let _permit = self.visits.acquire().await;
        let (done, ended) = oneshot::channel::<()>();
        let (ifname, cookie) = (record.key.ifname.clone(), record.netns_cookie);
        let work = move || {
            let value = sandbox::require_cookie(cookie).map(|()| work(&ifname));
            drop(done);
            value
        };
        let visit = sandbox.open()?.visit(work).map_err(Error::from)?;
        // The thread drops the channel at its end, also when it could not enter the namespace.
        ended.await.ok();
        visit.join().unwrap_or_else(|panic| resume_unwind(panic)).map_err(Error::from)?
    }
}
