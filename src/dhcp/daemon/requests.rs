//! The requests of plugins.

use std::cell::RefCell;
use std::pin::pin;
use std::rc::Rc;

use futures::future::{Either, join_all, select, try_join_all};
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_local;

use super::super::family::{self, Lease};
use super::super::passing::Passed;
use super::super::record::{Record, Records};
use super::super::rpc::{Key, Request, Verb};
use super::super::sandbox::{InterfaceError, Sandbox};
use super::super::socket;
use super::super::timing::{NEVER, now};
use super::options::Options;
use super::registry::{Handle, Phase, Registry};
use super::sockets::Sockets;
use super::task::LeaseTask;
use crate::cni::CniResult;
use crate::error::{Error, Result};
use crate::log;
use crate::netlink::Mac;

impl Registry {
    /// The leases on disk, with their namespaces. For the start, while opening those of processes is permitted.
    pub(super) fn recorded(options: &Options, records: &Records) -> Vec<(Record, Rc<Sandbox>)> {
        records.sweep();
        let open = |record: Record| {
            let path = options.prefixed(&record.netns);
            match Sandbox::recorded(path.clone(), record.netns_id) {
                Ok(sandbox) => Some((record, sandbox.into())),
                Err(InterfaceError::Gone(why)) => {
                    log::line(format_args!("{}: {why}; the lease is forgotten", record.key));
                    records.remove(&record.key).unwrap_or_else(log::warn);
                    None
                }
                Err(error) => {
                    log::line(format_args!("{}: {}", record.key, Error::from(error)));
                    let sandbox = Sandbox::unopened(path, record.netns_id);
                    Some((record, sandbox.into()))
                }
            }
        };
        records.load_all().into_iter().filter_map(open).collect()
    }

    /// Resumes these leases.
    pub(super) fn resume(self: &Rc<Self>, recorded: Vec<(Record, Rc<Sandbox>)>) {
        for (record, sandbox) in recorded {
            let phase = record.lease.clone().map_or(Phase::Searching, |l| Phase::Bound(l.into()));
            let (task, _) = self.task(record, sandbox, phase);
            spawn_local(task.resume());
        }
    }

    /// Serves a plugin's request. `hangup` ends when the plugin has stopped waiting.
    pub(super) async fn serve(
        self: &Rc<Self>,
        request: &Request,
        passed: Passed,
        hangup: impl Future<Output = ()>,
    ) -> Result<Option<CniResult>> {
        match request.verb {
            Verb::Add => {
                let path = self.options.prefixed(&request.netns);
                let sandbox = Rc::new(Sandbox::received(path, passed)?);
                return self.add(request, &sandbox, hangup).await.map(Some);
            }
            Verb::Check => {
                for family in &request.families {
                    self.check(request, &request.key.of(*family)).await?;
                }
            }
            Verb::Del => self.release_all(&|key| key.is_beside(&request.key)).await,
            Verb::Gc => self.release_all(&|key| request.is_stale(key)).await,
            Verb::Status => {}
        }
        Ok(None)
    }

    /// Acquires all requested leases, or none.
    async fn add(
        self: &Rc<Self>,
        request: &Request,
        sandbox: &Rc<Sandbox>,
        hangup: impl Future<Output = ()>,
    ) -> Result<CniResult> {
        let begun = RefCell::new(Vec::new());
        let keys = request.families.iter().map(|family| request.key.of(*family));
        let adds = keys.map(|key| self.add_one(request, sandbox, key, &begun));
        let outcome = match select(pin!(try_join_all(adds)), pin!(hangup)).await {
            Either::Left((outcome, _)) => outcome,
            Either::Right(_) => Err(Error::internal("context canceled")),
        };
        if outcome.is_err() {
            join_all(begun.take().iter().map(Handle::release)).await;
        }
        outcome.map(|leases| family::result(&leases, request.priority))
    }

    async fn add_one(
        self: &Rc<Self>,
        request: &Request,
        sandbox: &Rc<Sandbox>,
        key: Key,
        begun: &RefCell<Vec<Handle>>,
    ) -> Result<Lease> {
        let handle = match self.reusable(request, sandbox, &key).await {
            Some(handle) => handle,
            None => self.start(request, sandbox, key),
        };
        begun.borrow_mut().push(handle.clone());
        handle.lease().await
    }

    /// The task of a repeated ADD. A lease in another namespace, or without its interface, is released first.
    async fn reusable(&self, request: &Request, now: &Sandbox, key: &Key) -> Option<Handle> {
        let handle = self.handle(key)?;
        if handle.netns == request.netns
            && handle.sandbox.id == now.id
            && handle.lease().await.is_ok()
            && self.is_present(&handle, key).await
        {
            return Some(handle);
        }
        handle.release().await;
        None
    }

    fn start(self: &Rc<Self>, request: &Request, sandbox: &Rc<Sandbox>, key: Key) -> Handle {
        let record = Record {
            key,
            netns: request.netns.clone(),
            netns_id: sandbox.id,
            netns_cookie: None,
            mac: Mac([0; 6]),
            options: request.options.clone(),
            priority: request.priority,
            address_removed: false,
            lease: None,
        };
        let (task, handle) = self.task(record, Rc::clone(sandbox), Phase::Acquiring);
        spawn_local(task.acquire());
        handle
    }

    async fn check(&self, request: &Request, key: &Key) -> Result<()> {
        let missing = || {
            Error::internal(format!("no lease for {key}"))
                .with_details("it was never acquired, was released, or lost its interface")
        };
        let handle = self.handle(key).ok_or_else(missing)?;
        let address = match &*handle.phase.borrow() {
            Phase::Bound(lease) => lease.address(),
            Phase::Searching => {
                let msg = format!("the lease for {key} was lost");
                return Err(Error::internal(msg).with_details("another one is being acquired"));
            }
            _ => return Err(missing()),
        };
        if !request.addresses.is_empty() && !request.addresses.contains(&address) {
            let msg = format!("the lease for {key} is of {address}");
            let known: Vec<_> = request.addresses.iter().map(ToString::to_string).collect();
            return Err(Error::internal(msg).with_details(format!("not of {}", known.join(", "))));
        }
        if self.is_present(&handle, key).await { Ok(()) } else { Err(missing()) }
    }

    /// Whether the interface of a lease exists.
    async fn is_present(&self, handle: &Handle, key: &Key) -> bool {
        let Some(record) = self.records.load(key) else { return false };
        let mac = self.visit(&handle.sandbox, &record, socket::mac).await;
        matches!(mac, Ok(Ok(_)))
    }

    async fn release_all(&self, wanted: &dyn Fn(&Key) -> bool) {
        let leases = self.leases.borrow().clone();
        let leases = leases.iter().filter(|(key, _)| wanted(key));
        let release = async |(key, handle): (&Key, &Handle)| {
            handle.release().await;
            // A task that has panicked did not remove its lease.
            if let Err(error) = self.forget(key, &handle.phase) {
                log::warn(error);
            }
        };
        join_all(leases.map(release)).await;
    }

    /// A new task, which is registered but not started.
    fn task(
        self: &Rc<Self>,
        record: Record,
        sandbox: Rc<Sandbox>,
        phase: Phase,
    ) -> (LeaseTask, Handle) {
        let (release, released) = mpsc::unbounded_channel();
        let (sender, phase) = watch::channel(phase);
        let netns = record.netns.clone();
        let handle = Handle { netns, sandbox: Rc::clone(&sandbox), release, phase };
        self.leases.borrow_mut().insert(record.key.clone(), handle.clone());
        let (timing, broadcast) = (self.options.timing, self.options.broadcast);
        let task = LeaseTask {
            registry: Rc::clone(self),
            phase: sender,
            released,
            machine: record.machine(timing, broadcast, now(), NEVER),
            record,
            sandbox,
            sockets: Sockets::default(),
            trouble: None,
        };
        (task, handle)
    }
}
