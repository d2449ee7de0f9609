//! The requests of plugins.

use std::cell::RefCell;
use std::pin::pin;
use std::rc::Rc;

use futures::future::{Either, join_all, select, try_join_all};
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_local;

use super::super::family::{self, DhcpLease};
use super::super::passing::PassedDescriptors;
use super::super::record::{DhcpRecord, DhcpRecordStore};
use super::super::rpc::{DaemonRequest, DaemonVerb, DhcpLeaseKey};
use super::super::sandbox::{InterfaceError, LeaseSandbox};
use super::super::socket;
use super::super::timing::{NEVER, boot_time_now};
use super::options::DaemonOptions;
use super::registry::{LeasePhase, LeaseRegistry, LeaseTaskHandle};
use super::sockets::LeaseSockets;
use super::task::LeaseTask;
use crate::cni::CniResult;
use crate::error::{Error, Result};
use crate::log;
use crate::netlink::MacAddress;

impl LeaseRegistry {
    /// The leases on disk, with their namespaces. For the start, while opening those of processes is permitted.
    pub(super) fn open_recorded_leases(
        options: &DaemonOptions,
        records: &DhcpRecordStore,
    ) -> Vec<(DhcpRecord, Rc<LeaseSandbox>)> {
        records.remove_temporary_files();
        let open = |record: DhcpRecord| {
            let path = options.prefixed_path(&record.netns);
            match LeaseSandbox::from_record(path.clone(), record.netns_id) {
                Ok(sandbox) => Some((record, sandbox.into())),
                Err(InterfaceError::Gone(why)) => {
                    log::write_line(format_args!("{}: {why}; the lease is forgotten", record.key));
                    records.remove_record(&record.key).unwrap_or_else(log::warn);
                    None
                }
                Err(error) => {
                    log::write_line(format_args!("{}: {}", record.key, Error::from(error)));
                    let sandbox = LeaseSandbox::without_opening(path, record.netns_id);
                    Some((record, sandbox.into()))
                }
            }
        };
        records.load_all().into_iter().filter_map(open).collect()
    }

    /// Resumes these leases.
    pub(super) fn resume_leases(self: &Rc<Self>, recorded: Vec<(DhcpRecord, Rc<LeaseSandbox>)>) {
        for (record, sandbox) in recorded {
            let phase = record.lease.clone().map_or(LeasePhase::Searching, |l| LeasePhase::Bound(l.into()));
            let (task, _) = self.register_task(record, sandbox, phase);
            spawn_local(task.resume_lease());
        }
    }

    /// Serves a plugin's request. `hangup` ends when the plugin has stopped waiting.
    pub(super) async fn serve_request(
        self: &Rc<Self>,
        request: &DaemonRequest,
        passed: PassedDescriptors,
        hangup: impl Future<Output = ()>,
    ) -> Result<Option<CniResult>> {
        match request.verb {
            DaemonVerb::Add => {
                let path = self.options.prefixed_path(&request.netns);
                let sandbox = Rc::new(LeaseSandbox::from_passed(path, passed)?);
                return self.acquire_leases(request, &sandbox, hangup).await.map(Some);
            }
            DaemonVerb::Check => {
                for family in &request.families {
                    self.check_lease(request, &request.key.with_family(*family)).await?;
                }
            }
            DaemonVerb::Del => {
                self.release_matching(&|key| key.is_same_attachment(&request.key)).await;
            }
            DaemonVerb::Gc => self.release_matching(&|key| request.is_stale(key)).await,
            DaemonVerb::Status => {}
        }
        Ok(None)
    }

    /// Acquires all requested leases, or none.
    async fn acquire_leases(
        self: &Rc<Self>,
        request: &DaemonRequest,
        sandbox: &Rc<LeaseSandbox>,
        hangup: impl Future<Output = ()>,
    ) -> Result<CniResult> {
        let begun = RefCell::new(Vec::new());
        let keys = request.families.iter().map(|family| request.key.with_family(*family));
        let adds = keys.map(|key| self.acquire_one_lease(request, sandbox, key, &begun));
        let outcome = match select(pin!(try_join_all(adds)), pin!(hangup)).await {
            Either::Left((outcome, _)) => outcome,
            Either::Right(_) => Err(Error::internal("context canceled")),
        };
        if outcome.is_err() {
            join_all(begun.take().iter().map(LeaseTaskHandle::release_lease)).await;
        }
        outcome.map(|leases| family::combined_result(&leases, request.priority))
    }

    async fn acquire_one_lease(
        self: &Rc<Self>,
        request: &DaemonRequest,
        sandbox: &Rc<LeaseSandbox>,
        key: DhcpLeaseKey,
        begun: &RefCell<Vec<LeaseTaskHandle>>,
    ) -> Result<DhcpLease> {
        let handle = match self.reusable_handle(request, sandbox, &key).await {
            Some(handle) => handle,
            None => self.start_task(request, sandbox, key),
        };
        begun.borrow_mut().push(handle.clone());
        handle.wait_for_lease().await
    }

    /// The task of a repeated ADD. A lease in another namespace, or without its interface, is released first.
    async fn reusable_handle(
        &self,
        request: &DaemonRequest,
        now: &LeaseSandbox,
        key: &DhcpLeaseKey,
    ) -> Option<LeaseTaskHandle> {
        let handle = self.find_handle(key)?;
        if handle.netns == request.netns
            && handle.sandbox.id == now.id
            && handle.wait_for_lease().await.is_ok()
            && self.has_interface(&handle, key).await
        {
            return Some(handle);
        }
        handle.release_lease().await;
        None
    }

    fn start_task(
        self: &Rc<Self>,
        request: &DaemonRequest,
        sandbox: &Rc<LeaseSandbox>,
        key: DhcpLeaseKey,
    ) -> LeaseTaskHandle {
        let record = DhcpRecord {
            key,
            netns: request.netns.clone(),
            netns_id: sandbox.id,
            netns_cookie: None,
            mac: MacAddress([0; 6]),
            options: request.options.clone(),
            priority: request.priority,
            address_removed: false,
            lease: None,
        };
        let (task, handle) = self.register_task(record, Rc::clone(sandbox), LeasePhase::Acquiring);
        spawn_local(task.acquire_lease());
        handle
    }

    async fn check_lease(&self, request: &DaemonRequest, key: &DhcpLeaseKey) -> Result<()> {
        let missing = || {
            Error::internal(format!("no lease for {key}"))
                .with_details("it was never acquired, was released, or lost its interface")
        };
        let handle = self.find_handle(key).ok_or_else(missing)?;
        let address = match &*handle.phase.borrow() {
            LeasePhase::Bound(lease) => lease.ip_address(),
            LeasePhase::Searching => {
                let msg = format!("the lease for {key} was lost");
                return Err(Error::internal(msg).with_details("another one is being acquired"));
            }
            _ => return Err(missing()),
        };
        if !request.addresses.is_empty() && !request.addresses.contains(&address) {
            let msg = format!("the lease for {key} has the address {address}");
            let known: Vec<_> = request.addresses.iter().map(ToString::to_string).collect();
            return Err(Error::internal(msg).with_details(format!("prevResult has {}", known.join(", "))));
        }
        if self.has_interface(&handle, key).await { Ok(()) } else { Err(missing()) }
    }

    /// Whether the interface of a lease exists.
    async fn has_interface(&self, handle: &LeaseTaskHandle, key: &DhcpLeaseKey) -> bool {
        let Some(record) = self.records.load_record(key) else { return false };
        let mac = self.run_in_namespace(&handle.sandbox, &record, socket::mac_address).await;
        matches!(mac, Ok(Ok(_)))
    }

    async fn release_matching(&self, wanted: &dyn Fn(&DhcpLeaseKey) -> bool) {
        let leases = self.leases.borrow().clone();
        let leases = leases.iter().filter(|(key, _)| wanted(key));
        let release = async |(key, handle): (&DhcpLeaseKey, &LeaseTaskHandle)| {
            handle.release_lease().await;
            // A task that has panicked did not remove its lease.
            if let Err(error) = self.remove_lease(key, &handle.phase) {
                log::warn(error);
            }
        };
        join_all(leases.map(release)).await;
    }

    /// A new task, which is registered but not started.
    fn register_task(
        self: &Rc<Self>,
        record: DhcpRecord,
        sandbox: Rc<LeaseSandbox>,
        phase: LeasePhase,
    ) -> (LeaseTask, LeaseTaskHandle) {
        let (release, released) = mpsc::unbounded_channel();
        let (sender, phase) = watch::channel(phase);
        let netns = record.netns.clone();
        let handle = LeaseTaskHandle { netns, sandbox: Rc::clone(&sandbox), release, phase };
        self.leases.borrow_mut().insert(record.key.clone(), handle.clone());
        let (timing, broadcast) = (self.options.timing, self.options.broadcast);
        let task = LeaseTask {
            registry: Rc::clone(self),
            phase: sender,
            released,
            machine: record.state_machine(timing, broadcast, boot_time_now(), NEVER),
            record,
            sandbox,
            sockets: LeaseSockets::default(),
            trouble: None,
        };
        (task, handle)
    }
}
