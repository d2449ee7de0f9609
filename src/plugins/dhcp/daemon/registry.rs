//! All leases of the daemon, and what their tasks share.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use super::super::family::Lease;
use super::super::interface::{Interface, InterfaceError};
use super::super::record::Records;
use super::super::rpc::Key;
use super::options::Options;
use crate::error::{Code, Error, Result};

/// How many threads work in containers' namespaces at once.
const VISITS: usize = 16;

/// The state of a lease, as plugins see it.
#[derive(Clone, Debug)]
pub(super) enum Phase {
    /// The first lease is being acquired.
    Acquiring,
    /// There is a lease.
    Bound(Box<Lease>),
    /// The lease was lost, and another is being acquired.
    Searching,
    /// No lease was acquired.
    Failed(Error),
    /// The lease was released, or its container is gone.
    Over,
}

/// A command to the task of a lease.
#[derive(Debug)]
pub(super) enum Command {
    /// Release the lease and end; then report through the channel.
    Release(oneshot::Sender<()>),
}

/// What is shared by all tasks.
pub(super) struct Registry {
    pub(super) options: Options,
    pub(super) records: Records,
    pub(super) leases: RefCell<HashMap<Key, Handle>>,
    pub(super) last: Cell<u64>,
    visits: Semaphore,
}

/// The channels to and from the task of a lease.
#[derive(Clone)]
pub(super) struct Handle {
    pub(super) number: u64,
    pub(super) netns: String,
    pub(super) commands: mpsc::UnboundedSender<Command>,
    pub(super) phase: watch::Receiver<Phase>,
}

impl Registry {
    pub(super) fn new(options: Options, records: Records) -> Registry {
        let visits = Semaphore::new(VISITS);
        Registry { options, records, leases: RefCell::default(), last: Cell::new(0), visits }
    }

    /// Runs `work` in a container's namespace, on one of few threads.
    pub(super) async fn visit<T: Send + 'static>(
        &self,
        interface: &Interface,
        id: Option<(u64, u64)>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, InterfaceError> {
        let _permit = self.visits.acquire().await;
        let (done, outcome) = oneshot::channel();
        // A caller that has stopped waiting does not need the outcome.
        let visit = interface.visit(id, move || drop(done.send(work())))?;
        match outcome.await {
            Ok(value) => Ok(value),
            // The thread ends without an outcome when it could not enter.
            Err(_) => match visit.join().map_err(Error::from) {
                Err(error) => Err(error.into()),
                Ok(()) => Err(Error::internal("the visit had no outcome").into()),
            },
        }
    }

    /// Forgets the lease of a task that has ended.
    pub(super) fn forget(&self, key: &Key, number: u64) -> Result<()> {
        let mut leases = self.leases.borrow_mut();
        match leases.get(key) {
            // The next task has begun already; the record is of that task.
            Some(handle) if handle.number != number => return Ok(()),
            _ => drop(leases.remove(key)),
        }
        self.records.remove(key)
    }

    pub(super) fn handle(&self, key: &Key) -> Option<Handle> {
        self.leases.borrow().get(key).cloned()
    }

    pub(super) fn keys(&self, wanted: impl Fn(&Key) -> bool) -> Vec<Key> {
        self.leases.borrow().keys().filter(|key| wanted(key)).cloned().collect()
    }
}

/// Waits until there is a lease, or there will be none.
pub(super) async fn settled(mut phase: watch::Receiver<Phase>) -> Result<Lease> {
    let over = || Error::internal("context canceled").with_details("the lease was released");
    let done = phase.wait_for(|phase| !matches!(phase, Phase::Acquiring)).await;
    match done.as_deref() {
        Ok(Phase::Bound(lease)) => Ok(Lease::clone(lease)),
        Ok(Phase::Failed(error)) => Err(error.clone()),
        Ok(_) => Err(over()),
        // The task has panicked.
        Err(_) => Err(Error::new(Code::INTERNAL, "the lease's task has failed")),
    }
}

/// Has the task release its lease, and waits for the end of the task.
pub(super) async fn request_release(handle: &Handle) {
    let (told, done) = oneshot::channel();
    if handle.commands.send(Command::Release(told)).is_ok() {
        // A task that has ended by itself drops the channel.
        drop(done.await);
    }
}
