//! The requests of plugins.

use std::cell::{OnceCell, RefCell};
use std::pin::pin;
use std::rc::Rc;

use futures::future::{Either, join_all, select, try_join_all};
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_local;

use super::super::family::{self, DhcpLease};
use super::super::interface;
use super::super::passing::PassedDescriptors;
use super::super::record::{DhcpRecord, DhcpRecordStore};
use super::super::rpc::{DaemonRequest, DaemonVerb, DhcpLeaseKey};
use super::super::sandbox::{InterfaceError, LeaseSandbox};
use super::super::socket;
use super::super::timing::{NEVER, boot_time_now};
use super::occupants;
use super::options::DaemonOptions;
use super::registry::{LeasePhase, LeaseRegistry, LeaseTaskHandle, LeaseTaskRequest};
use super::sockets::LeaseSockets;
use super::task::LeaseTask;
use crate::netlink::MacAddress;
use cni::CniResult;
use cni::error::{Error, Result};

impl LeaseRegistry {
    /// The leases on disk, with their namespaces. For the start, while opening those of processes
    /// is permitted. A namespace that is not found now is looked for by the task of its lease.
    pub(super) fn open_recorded_leases(
        options: &DaemonOptions,
        records: &DhcpRecordStore,
    ) -> Vec<(DhcpRecord, Rc<LeaseSandbox>)> {
        records.remove_temporary_files();
        let threads = OnceCell::new();
        let open = |record: DhcpRecord| {
            let path = options.prefixed_path(&record.netns);
            let sandbox = LeaseSandbox::closed(&record.netns, path, record.netns_id);
            if sandbox.reopen().is_err()
                && let Some(thread) =
                    threads.get_or_init(occupants::all_namespaces).get(&record.netns_id)
                && let Err(error) = sandbox.reopen_through(&thread.join(occupants::NAMESPACE))
            {
                debug!("{}", Error::from(error));
            }
            (record, Rc::new(sandbox))
        };
        records.load_all().into_iter().map(open).collect()
    }

    pub(super) fn resume_leases(self: &Rc<Self>, recorded: Vec<(DhcpRecord, Rc<LeaseSandbox>)>) {
        for (record, sandbox) in recorded {
            let phase =
                record.lease.clone().map_or(LeasePhase::Searching, |l| LeasePhase::Bound(l.into()));
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
                let sandbox = Rc::new(LeaseSandbox::from_passed(&request.netns, path, passed)?);
                return self.acquire_leases(request, &sandbox, hangup).await.map(Some);
            }
            DaemonVerb::Check => {
                for family in &request.families {
                    self.check_lease(request, &request.key.with_family(*family)).await?;
                }
            }
            DaemonVerb::Del => {
                self.release_matching(&|key| key.is_same_attachment(&request.key), request.process)
                    .await;
            }
            DaemonVerb::Gc => self.release_matching(&|key| request.is_stale(key), None).await,
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
        outcome.map(|leases| family::combined_result(&leases, request.priority, &request.routes))
    }

    async fn acquire_one_lease(
        self: &Rc<Self>,
        request: &DaemonRequest,
        sandbox: &Rc<LeaseSandbox>,
        key: DhcpLeaseKey,
        begun: &RefCell<Vec<LeaseTaskHandle>>,
    ) -> Result<DhcpLease> {
        if let Some(lease) = self.existing_lease(request, sandbox, &key).await? {
            return Ok(lease);
        }
        let handle = self.start_task(new_record(request, sandbox, key), sandbox);
        begun.borrow_mut().push(handle.clone());
        handle.wait_for_lease().await
    }

    /// The lease of a repeated ADD, whose interface is set up first. Also in another namespace,
    /// because the container of the first may live. A task without a valid lease is ended.
    async fn existing_lease(
        &self,
        request: &DaemonRequest,
        sandbox: &Rc<LeaseSandbox>,
        key: &DhcpLeaseKey,
    ) -> Result<Option<DhcpLease>> {
        let Some(handle) = self.find_handle(key) else { return Ok(None) };
        let is_valid = |lease: &DhcpLease| lease.expiry_time() > boot_time_now();
        let Some(lease) = handle.wait_for_lease().await.ok().filter(is_valid) else {
            handle.release_lease().await;
            return Ok(None);
        };
        handle.repeated.borrow_mut().extend(request.process);
        let record = new_record(request, sandbox, key.clone());
        self.run_in_namespace(sandbox, &record, interface::bring_up).await??;
        // This fails if the task has ended meanwhile.
        let is_followed =
            handle.requests.send(LeaseTaskRequest::Follow(Rc::clone(sandbox))).is_ok();
        Ok(is_followed.then_some(lease))
    }

    fn start_task(
        self: &Rc<Self>,
        record: DhcpRecord,
        sandbox: &Rc<LeaseSandbox>,
    ) -> LeaseTaskHandle {
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
            return Err(
                Error::internal(msg).with_details(format!("prevResult has {}", known.join(", ")))
            );
        }
        let record = self.records.load_record(key).ok_or_else(missing)?;
        match self.run_in_namespace(&handle.sandbox, &record, socket::mac_address).await {
            Ok(Ok(_)) => Ok(()),
            Err(InterfaceError::OutOfView(why)) => {
                let msg = format!("the namespace of the lease for {key} is out of view");
                Err(Error::internal(msg).with_details(why))
            }
            _ => Err(missing()),
        }
    }

    /// Releases the leases of `wanted`. A DEL of the process that has repeated the ADD rolls that
    /// one back.
    async fn release_matching(&self, wanted: &dyn Fn(&DhcpLeaseKey) -> bool, process: Option<u32>) {
        let leases = self.leases.borrow().clone();
        let leases = leases.iter().filter(|(key, _)| wanted(key));
        let release = async |(key, handle): (&DhcpLeaseKey, &LeaseTaskHandle)| {
            if process.is_some_and(|process| handle.undo_repeated(process)) {
                return;
            }
            handle.release_lease().await;
            // A task that has panicked did not remove its lease.
            if let Err(error) = self.remove_lease(key, &handle.phase) {
                warn!("could not remove the record of a lease: {error}");
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
        let (requests, requested) = mpsc::unbounded_channel();
        let (sender, phase) = watch::channel(phase);
        let handle = LeaseTaskHandle {
            sandbox: Rc::clone(&sandbox),
            repeated: Rc::default(),
            requests,
            phase,
        };
        self.leases.borrow_mut().insert(record.key.clone(), handle.clone());
        let (timing, broadcast) = (self.options.timing, self.options.broadcast);
        let task = LeaseTask {
            registry: Rc::clone(self),
            phase: sender,
            requested,
            machine: record.state_machine(timing, broadcast, boot_time_now(), NEVER),
            record,
            sandbox,
            successor: None,
            sockets: LeaseSockets::default(),
            trouble: None,
        };
        (task, handle)
    }
}

/// The record of an ADD, without a lease.
fn new_record(request: &DaemonRequest, sandbox: &LeaseSandbox, key: DhcpLeaseKey) -> DhcpRecord {
    DhcpRecord {
        key,
        netns: sandbox.netns.clone(),
        netns_id: sandbox.id,
        netns_cookie: None,
        netns_number: None,
        ifindex: None,
        mac: MacAddress([0; 6]),
        options: request.options.clone(),
        priority: request.priority,
        routes: request.routes.clone(),
        address_removed: false,
        lease: None,
    }
}
