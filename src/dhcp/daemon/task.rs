//! One lease: a task that performs the actions of the client's state machine in the container's
//! namespace.

use std::fmt::Display;
use std::pin::pin;
use std::rc::Rc;

use futures::future::{Either, select};
use nix::errno::Errno;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::super::family::{DhcpFamily, DhcpLease};
use super::super::interface::{self, DhcpLeaseChange};
use super::super::machine::{ClientAction, StateMachine};
use super::super::record::DhcpRecord;
use super::super::sandbox::{InterfaceError, LeaseSandbox};
use super::super::timing::{NEVER, boot_time_now};
use super::registry::{LeasePhase, LeaseRegistry, LeaseTaskRequest};
use super::sockets::LeaseSockets;
use crate::stderr;
use cni::error::Error;

/// Why the task ends without a request.
pub(super) enum LeaseTaskEnd {
    /// The namespace or the interface has ended for certain.
    Gone(String),
    /// No lease was acquired.
    Failed(Error),
}

pub(super) struct LeaseTask {
    pub(super) registry: Rc<LeaseRegistry>,
    pub(super) record: DhcpRecord,
    pub(super) sandbox: Rc<LeaseSandbox>,
    /// The namespace of a later ADD, where the lease goes on when `sandbox` has ended.
    pub(super) successor: Option<Rc<LeaseSandbox>>,
    /// For plugins that wait; dropped at the end of the task.
    pub(super) phase: watch::Sender<LeasePhase>,
    pub(super) requested: mpsc::UnboundedReceiver<LeaseTaskRequest>,
    pub(super) machine: Box<dyn StateMachine>,
    pub(super) sockets: LeaseSockets,
    /// The last error, for the plugin that waits.
    pub(super) trouble: Option<Error>,
}

impl LeaseTask {
    /// Acquires a lease and maintains it.
    pub(super) async fn acquire_lease(mut self) {
        match self.prepare_interface().await {
            Ok(()) => self.run_until_end().await,
            Err(error) => self.end_task(Err(LeaseTaskEnd::Failed(error.into()))),
        }
    }

    /// Maintains a lease from the disk.
    pub(super) async fn resume_lease(mut self) {
        if self.sandbox.is_open()
            && let Err(error) = self.verify_interface().await
        {
            match self.error_unless_gone(error) {
                Ok(error) => self.log_line(&error),
                Err(end) => return self.end_task(Err(end)),
            }
        }
        self.run_until_end().await;
    }

    async fn prepare_interface(&mut self) -> Result<(), InterfaceError> {
        let found = self.run_in_namespace(interface::bring_up).await??;
        self.record.note_interface(&self.sandbox, &found);
        // The time limit does not include the wait for the carrier.
        let (options, now) = (&self.registry.options, boot_time_now());
        let limit = now + options.limit;
        self.machine = self.record.state_machine(options.timing, options.broadcast, now, limit);
        Ok(())
    }

    pub(super) async fn run_in_namespace<T: Send + 'static>(
        &self,
        work: impl FnOnce(&str) -> T + Send + 'static,
    ) -> Result<T, InterfaceError> {
        self.registry.run_in_namespace(&self.sandbox, &self.record, work).await
    }

    async fn run_until_end(mut self) {
        let mut ended = self.maintain_lease().await;
        while let Err(LeaseTaskEnd::Gone(why)) = &ended
            && let Some(sandbox) = self.successor.take()
        {
            self.log_line(why);
            ended = match self.move_to(sandbox).await {
                Ok(()) => self.maintain_lease().await,
                Err(error) => Err(LeaseTaskEnd::Gone(Error::from(error).to_string())),
            };
        }
        self.sockets = LeaseSockets::default();
        if ended.is_ok() {
            self.release_lease().await;
        }
        self.end_task(ended);
    }

    fn end_task(self, ended: Result<(), LeaseTaskEnd>) {
        let phase = match ended {
            Ok(()) => LeasePhase::Over,
            Err(LeaseTaskEnd::Gone(why)) => {
                self.log_line(&format_args!("{why}; the lease is forgotten"));
                LeasePhase::Over
            }
            Err(LeaseTaskEnd::Failed(error)) => {
                self.log_line(&error);
                LeasePhase::Failed(error)
            }
        };
        self.phase.send_replace(phase);
        if let Err(error) = self.registry.remove_lease(&self.record.key, &self.phase.subscribe()) {
            self.log_line(&error);
        }
    }

    /// Runs the state machine until a request to release the lease.
    async fn maintain_lease(&mut self) -> Result<(), LeaseTaskEnd> {
        loop {
            if !self.sandbox.is_open() && !self.wait_for_view().await? {
                return Ok(());
            }
            if boot_time_now() >= self.machine.next_deadline() {
                if let Err(error) = self.wait_link_local().await {
                    self.error_unless_gone(error)?;
                }
                let actions = self.machine.handle_timeout(boot_time_now());
                self.perform_actions(actions).await?;
            }
            self.sockets.close_unneeded(&self.machine.needed_sockets());
            let until_deadline = self.machine.next_deadline().saturating_sub(boot_time_now());
            let wait = until_deadline.min(self.sandbox.look_interval());
            let received = {
                let requested = pin!(self.requested.recv());
                let received = pin!(timeout(wait, self.sockets.receive_packet()));
                match select(requested, received).await {
                    Either::Left((request, _)) => Err(request),
                    Either::Right((received, _)) => Ok(received),
                }
            };
            let received = match received {
                Ok(received) => received,
                Err(Some(LeaseTaskRequest::Follow(sandbox))) => {
                    self.follow(sandbox).await;
                    continue;
                }
                Err(Some(LeaseTaskRequest::Leave)) => {
                    self.successor = None;
                    continue;
                }
                // Or the channel is closed, because another task has replaced this one in the
                // registry.
                Err(Some(LeaseTaskRequest::Release) | None) => return Ok(()),
            };
            let actions = match received {
                Ok(Ok((source, bytes))) => {
                    self.machine.handle_packet(boot_time_now(), source, &bytes)
                }
                Ok(Err(cause)) => {
                    self.sockets = LeaseSockets::default();
                    self.trouble = Some(Error::io(&self.record.key.ifname, &cause));
                    Vec::new()
                }
                Err(_) => {
                    if let Err(error) = self.verify_view().await {
                        self.error_unless_gone(error)?;
                    }
                    Vec::new()
                }
            };
            self.perform_actions(actions).await?;
            // Other tasks must run, however much is received.
            tokio::task::yield_now().await;
        }
    }

    async fn perform_actions(&mut self, actions: Vec<ClientAction>) -> Result<(), LeaseTaskEnd> {
        for action in actions {
            let done = match action {
                ClientAction::Broadcast(message) => self.send_broadcast(message).await,
                ClientAction::Unicast(message, server) => self.send_unicast(message, server).await,
                ClientAction::Multicast(message) => self.send_multicast(message).await,
                ClientAction::Probe(address) => self.send_probe(address).await,
                ClientAction::Bound(lease) => self.handle_bound(lease).await,
                ClientAction::Lost(why) => self.handle_lost(why).await,
                ClientAction::TimeIsUp => {
                    return Err(LeaseTaskEnd::Failed(self.time_limit_error()));
                }
                ClientAction::Unusable(flaw) => {
                    return Err(LeaseTaskEnd::Failed(Error::internal(flaw.to_string())));
                }
                ClientAction::Refused(why) => Err(Error::internal(why).into()),
                ClientAction::Note(text) => {
                    self.log_line(&text);
                    Ok(())
                }
            };
            if let Err(error) = done {
                // The state machine tries again after its timeout.
                let error = self.error_unless_gone(error)?;
                self.log_line(&error);
                self.trouble = Some(error);
            }
        }
        Ok(())
    }

    async fn handle_bound(&mut self, lease: DhcpLease) -> Result<(), InterfaceError> {
        let old = self.record.lease.replace(lease.clone());
        let changed = old.as_ref().is_none_or(|old| old.differs_on_link(&lease));
        let first = matches!(*self.phase.borrow(), LeasePhase::Acquiring);
        let mut applied = Ok(true);
        if changed && !first {
            applied = self.apply_change(old, Some(lease.clone())).await;
        }
        self.record.address_removed = false;
        if first || changed {
            let left = match lease.expiry_time() {
                NEVER => "for ever".to_owned(),
                expires => format!("for {} s", expires.saturating_sub(boot_time_now()).as_secs()),
            };
            self.log_line(&format_args!("{} from {} {left}", lease.ip_net(), lease.server_text()));
        }
        self.save_record();
        self.phase.send_replace(LeasePhase::Bound(Box::new(lease)));
        applied.map(drop)
    }

    async fn handle_lost(&mut self, why: &'static str) -> Result<(), InterfaceError> {
        let old = self.record.lease.take();
        self.log_line(&why);
        self.phase.send_replace(LeasePhase::Searching);
        let applied = self.apply_change(old, None).await;
        self.record.address_removed |= matches!(applied, Ok(true));
        self.save_record();
        applied.map(drop)
    }

    async fn apply_change(
        &self,
        old: Option<DhcpLease>,
        new: Option<DhcpLease>,
    ) -> Result<bool, InterfaceError> {
        let DhcpRecord { priority, address_removed, .. } = self.record;
        let routes = self.record.routes.clone();
        let change = DhcpLeaseChange { old, new, priority, routes, address_removed };
        Ok(self.run_in_namespace(move |ifname| change.apply_to_interface(ifname)).await??)
    }

    async fn release_lease(&mut self) {
        let Some(release) = self.machine.release_message() else { return };
        let address = release.released_address();
        match self.run_in_namespace(move |ifname| interface::send_release(ifname, release)).await {
            Ok(Ok(())) => self.log_line(&format_args!("released {address}")),
            Ok(Err(error)) => self.log_line(&error),
            Err(error) => self.log_line(&Error::from(error)),
        }
    }

    /// The error, or the end of the task if the namespace or the interface has ended.
    pub(super) fn error_unless_gone(&self, error: InterfaceError) -> Result<Error, LeaseTaskEnd> {
        match error {
            InterfaceError::Gone(why) => Err(LeaseTaskEnd::Gone(why)),
            InterfaceError::OutOfView(why) => Ok(Error::internal(why)),
            InterfaceError::Io(e) if e.raw_os_error() == Some(Errno::ENODEV as i32) => {
                let name = &self.record.key.ifname;
                Err(LeaseTaskEnd::Gone(format!("interface {name} does not exist any more")))
            }
            InterfaceError::Io(cause) => Ok(Error::io(&self.record.key.ifname, &cause)),
            InterfaceError::Failed(error) => Ok(error),
        }
    }

    fn time_limit_error(&self) -> Error {
        let seconds = self.registry.options.limit.as_secs_f64();
        let why = self.trouble.as_ref().map(|e| format!("; {e}")).unwrap_or_default();
        let v = if self.record.key.family == DhcpFamily::V6 { "v6" } else { "" };
        let details = format!("no DHCP{v} server gave an address in {seconds} s{why}");
        Error::internal("no more tries").with_details(details)
    }

    pub(super) fn save_record(&self) {
        if let Err(error) = self.registry.records.save_record(&self.record) {
            self.log_line(&error);
        }
    }

    pub(super) fn log_line(&self, what: &dyn Display) {
        stderr::write_line(format_args!("{}: {what}", self.record.key));
    }
}
