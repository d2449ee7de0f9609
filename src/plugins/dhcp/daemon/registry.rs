//! All leases of the daemon, and what plugins ask about them.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::pin::pin;
use std::rc::Rc;

use futures::future::{Either, join_all, select, try_join_all};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::spawn_local;

use super::super::place::{self, Place, Trouble};
use super::super::protocol::family::{self, Lease};
use super::super::record::{Record, Records};
use super::super::wire::{Key, Request, Verb};
use super::keeper::{Keeper, Order, Phase};
use super::options::Options;
use crate::cni::CniResult;
use crate::error::{Code, Error, Result};
use crate::log;
use crate::netlink::Mac;

/// How many threads are in containers' namespaces at once.
const VISITS: usize = 16;

/// What is shared by all tasks.
pub(super) struct Registry {
    pub(super) options: Options,
    pub(super) records: Records,
    leases: RefCell<HashMap<Key, Handle>>,
    last: Cell<u64>,
    visits: Semaphore,
}

/// A lease's task from outside.
#[derive(Clone)]
struct Handle {
    number: u64,
    netns: String,
    orders: mpsc::UnboundedSender<Order>,
    phase: watch::Receiver<Phase>,
}

impl Registry {
    pub(super) fn new(options: Options, records: Records) -> Registry {
        let visits = Semaphore::new(VISITS);
        Registry { options, records, leases: RefCell::default(), last: Cell::new(0), visits }
    }

    /// Goes on with the leases on disk.
    pub(super) fn resume(self: &Rc<Self>) -> usize {
        self.records.sweep();
        let records = self.records.load_all();
        let count = records.len();
        for record in records {
            let phase = record.lease.clone().map_or(Phase::Searching, |l| Phase::Bound(l.into()));
            let keeper = self.keeper(record, phase);
            spawn_local(keeper.resume());
        }
        count
    }

    /// Has `work` done in a container's namespace, by one of few threads.
    pub(super) async fn visit<T: Send + 'static>(
        &self,
        place: &Place,
        id: Option<(u64, u64)>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Trouble> {
        let _permit = self.visits.acquire().await;
        let (done, outcome) = oneshot::channel();
        // Who has stopped waiting does not need it.
        let visit = place.visit(id, move || drop(done.send(work())))?;
        match outcome.await {
            Ok(value) => Ok(value),
            // The thread ends without an outcome when it could not enter.
            Err(_) => match visit.join().map_err(Error::from) {
                Err(error) => Err(error.into()),
                Ok(()) => Err(Error::internal("the visit had no outcome").into()),
            },
        }
    }

    /// Does what a plugin asks for. `hangup` ends when the plugin does not wait any more.
    pub(super) async fn serve(
        self: &Rc<Self>,
        request: &Request,
        hangup: impl Future<Output = ()>,
    ) -> Result<Option<CniResult>> {
        match request.verb {
            Verb::Add => self.add(request, hangup).await.map(Some),
            Verb::Check => self.check(request).await.map(|()| None),
            Verb::Del => {
                self.release_all(|key| key.is_beside(&request.key)).await;
                Ok(None)
            }
            Verb::Gc => {
                self.release_all(|key| request.is_stale(key)).await;
                Ok(None)
            }
            Verb::Status => Ok(None),
        }
    }

    /// A task has ended.
    pub(super) fn forget(&self, key: &Key, number: u64) -> Result<()> {
        let mut leases = self.leases.borrow_mut();
        match leases.get(key) {
            // Another one has begun already; the record is that one's.
            Some(handle) if handle.number != number => return Ok(()),
            _ => drop(leases.remove(key)),
        }
        self.records.remove(key)
    }

    /// All leases that are asked for, or none.
    async fn add(
        self: &Rc<Self>,
        request: &Request,
        hangup: impl Future<Output = ()>,
    ) -> Result<CniResult> {
        let begun = RefCell::new(Vec::new());
        let adds = request.keys().map(|key| self.add_one(request, key, &begun));
        let outcome = match select(pin!(try_join_all(adds)), pin!(hangup)).await {
            Either::Left((outcome, _)) => outcome,
            Either::Right(_) => Err(Error::internal("context canceled")),
        };
        if outcome.is_err() {
            join_all(begun.take().iter().map(order_release)).await;
        }
        outcome.map(|leases| family::result(&leases, request.priority))
    }

    async fn add_one(
        self: &Rc<Self>,
        request: &Request,
        key: Key,
        begun: &RefCell<Vec<Handle>>,
    ) -> Result<Lease> {
        if let Some((handle, lease)) = self.reusable(request, &key).await {
            begun.borrow_mut().push(handle);
            return Ok(lease);
        }
        let record = Record {
            key: key.clone(),
            netns: request.netns.clone(),
            netns_id: (0, 0),
            mac: Mac([0; 6]),
            options: request.options.clone(),
            priority: request.priority,
            bare: false,
            lease: None,
        };
        let keeper = self.keeper(record, Phase::Acquiring);
        spawn_local(keeper.acquire());
        let Some(handle) = self.handle(&key) else {
            return Err(Error::internal("context canceled"));
        };
        begun.borrow_mut().push(handle.clone());
        settled(handle.phase).await
    }

    /// The lease of an ADD that is repeated. One that is not there any more, or of another
    /// namespace, is given back first.
    async fn reusable(self: &Rc<Self>, request: &Request, key: &Key) -> Option<(Handle, Lease)> {
        let handle = self.handle(key)?;
        let usable = if handle.netns == request.netns {
            settled(handle.phase.clone()).await.ok()
        } else {
            None
        };
        if let Some(lease) = usable
            && self.is_present(key).await
        {
            return Some((handle, lease));
        }
        order_release(&handle).await;
        None
    }

    async fn check(&self, request: &Request) -> Result<()> {
        for key in request.keys() {
            self.check_one(request, &key).await?;
        }
        Ok(())
    }

    async fn check_one(&self, request: &Request, key: &Key) -> Result<()> {
        let missing = || {
            Error::internal(format!("no lease for {key}"))
                .with_details("it was never given, it was released, or the interface was gone")
        };
        let handle = self.handle(key).ok_or_else(missing)?;
        let lease = match &*handle.phase.borrow() {
            Phase::Bound(lease) => lease.clone(),
            Phase::Searching => {
                let msg = format!("the lease for {key} was lost");
                return Err(Error::internal(msg).with_details("another one is looked for"));
            }
            _ => return Err(missing()),
        };
        if !request.addresses.is_empty() && !request.addresses.contains(&lease.address()) {
            let msg = format!("the lease for {key} is of {}", lease.address());
            let known: Vec<_> = request.addresses.iter().map(ToString::to_string).collect();
            return Err(Error::internal(msg).with_details(format!("not of {}", known.join(", "))));
        }
        if self.is_present(key).await { Ok(()) } else { Err(missing()) }
    }

    /// Whether the interface of a lease is there.
    async fn is_present(&self, key: &Key) -> bool {
        let Some(record) = self.records.load(key) else { return false };
        let netns = self.options.prefixed(&record.netns);
        let place = Place { netns, ifname: key.ifname.clone() };
        let ifname = key.ifname.clone();
        let looked = self.visit(&place, Some(record.netns_id), move || place::look(&ifname)).await;
        matches!(looked, Ok(Ok(Some(_))))
    }

    async fn release_all(&self, wanted: impl Fn(&Key) -> bool) {
        join_all(self.keys(wanted).iter().map(|key| self.release(key))).await;
    }

    async fn release(&self, key: &Key) {
        let Some(handle) = self.handle(key) else { return };
        order_release(&handle).await;
        // A task that has died could not do it.
        if let Err(error) = self.forget(key, handle.number) {
            log::warn(error);
        }
    }

    fn keeper(self: &Rc<Self>, record: Record, phase: Phase) -> Keeper {
        let number = self.last.get() + 1;
        self.last.set(number);
        let (orders, inbox) = mpsc::unbounded_channel();
        let (told, phase) = watch::channel(phase);
        let (key, netns) = (record.key.clone(), record.netns.clone());
        self.leases.borrow_mut().insert(key, Handle { number, netns, orders, phase });
        Keeper { registry: Rc::clone(self), number, record, phase: told, orders: inbox }
    }

    fn handle(&self, key: &Key) -> Option<Handle> {
        self.leases.borrow().get(key).cloned()
    }

    fn keys(&self, wanted: impl Fn(&Key) -> bool) -> Vec<Key> {
        self.leases.borrow().keys().filter(|key| wanted(key)).cloned().collect()
    }
}

/// Waits until there is a lease, or there will be none.
async fn settled(mut phase: watch::Receiver<Phase>) -> Result<Lease> {
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

/// Has a lease given back, and waits for it.
async fn order_release(handle: &Handle) {
    let (told, done) = oneshot::channel();
    if handle.orders.send(Order::Release(told)).is_ok() {
        // A task that has ended by itself tells nobody.
        drop(done.await);
    }
}
