//! The requests of plugins: they start the task of a lease, look at it, or end it.

use std::cell::RefCell;
use std::pin::pin;
use std::rc::Rc;

use futures::future::{Either, join_all, select, try_join_all};
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_local;

use super::super::family::{self, Lease};
use super::super::interface::{self, Interface};
use super::super::record::Record;
use super::super::rpc::{Key, Request, Verb};
use super::registry::{Handle, Phase, Registry, request_release, settled};
use super::task::LeaseTask;
use crate::cni::CniResult;
use crate::error::{Error, Result};
use crate::log;
use crate::netlink::Mac;

impl Registry {
    /// Resumes the leases on disk.
    pub(super) fn resume(self: &Rc<Self>) -> usize {
        self.records.sweep();
        let records = self.records.load_all();
        let count = records.len();
        for record in records {
            let phase = record.lease.clone().map_or(Phase::Searching, |l| Phase::Bound(l.into()));
            let task = self.task(record, phase);
            spawn_local(task.resume());
        }
        count
    }

    /// Serves a plugin's request. `hangup` ends when the plugin has stopped waiting.
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

    /// Acquires all requested leases, or none.
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
            join_all(begun.take().iter().map(request_release)).await;
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
            address_removed: false,
            lease: None,
        };
        let task = self.task(record, Phase::Acquiring);
        spawn_local(task.acquire());
        let Some(handle) = self.handle(&key) else {
            return Err(Error::internal("context canceled"));
        };
        begun.borrow_mut().push(handle.clone());
        settled(handle.phase).await
    }

    /// The lease of an ADD that is repeated. A lease whose interface is gone, or that is of another
    /// namespace, is released first.
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
        request_release(&handle).await;
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

    /// Whether the interface of a lease exists.
    async fn is_present(&self, key: &Key) -> bool {
        let Some(record) = self.records.load(key) else { return false };
        let netns = self.options.prefixed(&record.netns);
        let interface = Interface { netns, ifname: key.ifname.clone() };
        let ifname = key.ifname.clone();
        let looked = self
            .visit(&interface, Some(record.netns_id), move || interface::mac_address(&ifname))
            .await;
        matches!(looked, Ok(Ok(Some(_))))
    }

    async fn release_all(&self, wanted: impl Fn(&Key) -> bool) {
        join_all(self.keys(wanted).iter().map(|key| self.release(key))).await;
    }

    async fn release(&self, key: &Key) {
        let Some(handle) = self.handle(key) else { return };
        request_release(&handle).await;
        // A task that has panicked did not forget its lease.
        if let Err(error) = self.forget(key, handle.number) {
            log::warn(error);
        }
    }

    fn task(self: &Rc<Self>, record: Record, phase: Phase) -> LeaseTask {
        let number = self.last.get() + 1;
        self.last.set(number);
        let (commands, inbox) = mpsc::unbounded_channel();
        let (told, phase) = watch::channel(phase);
        let (key, netns) = (record.key.clone(), record.netns.clone());
        self.leases.borrow_mut().insert(key, Handle { number, netns, commands, phase });
        LeaseTask { registry: Rc::clone(self), number, record, phase: told, commands: inbox }
    }
}
