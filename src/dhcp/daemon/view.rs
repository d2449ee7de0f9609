//! The way to the namespace of a lease: how it is lost, kept, let go and found again
//! (`docs/decisions/0028-dhcp-namespaces.md`).

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures::future::{Either, select};
use tokio::time::sleep;

use super::super::family::DhcpLease;
use super::super::interface;
use super::super::record::DhcpRecord;
use super::super::sandbox::{InterfaceError, LeaseSandbox, NamespaceNumber};
use super::super::socket;
use super::super::timing::boot_time_now;
use super::occupants;
use super::registry::{LeasePhase, LeaseTaskRequest};
use super::sockets::LeaseSockets;
use super::task::{LeaseTask, LeaseTaskEnd};
use cni::error::Error;

/// The first wait for a namespace that is out of view, doubled up to the longest one.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(300);

impl LeaseTask {
    /// Looks whether the path leads to the namespace. If it does not, the descriptor is the way to
    /// it, and keeps it alive: until no process has been seen in it for a while, if the daemon
    /// sees the processes of containers.
    pub(super) async fn verify_view(&mut self) -> Result<(), InterfaceError> {
        if let Some(sandbox) = self.successor.clone() {
            // An error says nothing about it.
            drop(self.verify_sandbox(&sandbox).await);
            self.successor = Some(sandbox).filter(|sandbox| sandbox.is_open());
        }
        self.verify_sandbox(&Rc::clone(&self.sandbox)).await
    }

    async fn verify_sandbox(&self, sandbox: &LeaseSandbox) -> Result<(), InterfaceError> {
        let why = match sandbox.verify_path() {
            Err(InterfaceError::OutOfView(why)) => why,
            verified => return verified,
        };
        if sandbox.note_lost() {
            self.log_line(&format_args!("{why}; an open descriptor leads to its namespace"));
        }
        if !self.registry.sees_processes() {
            return Ok(());
        }
        let known = sandbox.occupant();
        let found =
            self.registry.visit_namespace(sandbox, || occupants::find_in_namespace(known)).await?;
        let occupant = found.map_err(|cause| Error::io("look for processes", &cause))?;
        if sandbox.note_occupant(occupant, boot_time_now()) {
            sandbox.let_go();
        }
        Ok(())
    }

    /// Waits until something leads to the namespace again; `false` after a request to release the
    /// lease. The end of the namespace is proved only by the kernel.
    pub(super) async fn wait_for_view(&mut self) -> Result<bool, LeaseTaskEnd> {
        self.sockets = LeaseSockets::default();
        let (mut wait, mut said) = (FIRST_WAIT, String::new());
        loop {
            let error = match self.return_to_view().await {
                Ok(()) => {
                    self.log_line(&"the namespace is in view");
                    return Ok(true);
                }
                Err(error) => self.error_unless_gone(error)?,
            };
            if matches!(*self.phase.borrow(), LeasePhase::Acquiring) {
                return Err(LeaseTaskEnd::Failed(error));
            }
            // The end of a namespace is known a little after the last descriptor is closed.
            if wait > FIRST_WAIT && said != error.message() {
                error.message().clone_into(&mut said);
                self.log_line(&format_args!(
                    "the namespace is out of view, and the lease is not renewed: {said}"
                ));
            }
            let requested = match select(pin!(self.requested.recv()), pin!(sleep(wait))).await {
                Either::Left((request, _)) => Some(request),
                Either::Right(_) => None,
            };
            match requested {
                None => wait = LONGEST_WAIT.min(wait * 2),
                Some(Some(LeaseTaskRequest::Follow(sandbox))) => self.successor = Some(sandbox),
                Some(Some(LeaseTaskRequest::Leave)) => self.successor = None,
                Some(Some(LeaseTaskRequest::Release) | None) => return Ok(false),
            }
        }
    }

    async fn return_to_view(&mut self) -> Result<(), InterfaceError> {
        if let Some(sandbox) = self.successor.take() {
            return self.move_to(sandbox).await;
        }
        if self.record.netns_number.is_some_and(NamespaceNumber::has_ended) {
            return Err(InterfaceError::Gone("its network namespace has ended".to_owned()));
        }
        self.sandbox.reopen()?;
        self.verify_interface().await
    }

    /// Verifies that the namespace that was opened for a record is the recorded one, and has the
    /// interface. Without a recorded cookie (before Linux 5.14) the interface must have the
    /// recorded Ethernet address, or the leased address.
    pub(super) async fn verify_interface(&mut self) -> Result<(), InterfaceError> {
        let look = |ifname: &str| {
            let found = interface::find_interface(ifname)?;
            Ok::<_, InterfaceError>((found, socket::ip_addresses(ifname)?))
        };
        let (found, addresses) = self.run_in_namespace(look).await??;
        let leased = self.record.lease.as_ref().map(DhcpLease::ip_address);
        let is_known =
            found.mac == self.record.mac || leased.is_some_and(|ip| addresses.contains(&ip));
        if self.record.netns_cookie.is_none() && !is_known {
            self.sandbox.let_go();
            let name = &self.record.key.ifname;
            let why = format!("{name} is not known by its Ethernet or IP address");
            return Err(InterfaceError::OutOfView(why));
        }
        let before = self.record.clone();
        self.record.note_interface(&self.sandbox, &found);
        // As in `socket::client_mac`.
        if !self.record.address_removed && !leased.is_some_and(|ip| addresses.contains(&ip)) {
            self.record.mac = before.mac;
        }
        if self.record != before {
            self.save_record();
        }
        Ok(())
    }

    /// Handles another ADD of the attachment. As the first container may live, the lease moves to
    /// the other namespace only when the first one has ended, or nothing leads to it.
    pub(super) async fn follow(&mut self, sandbox: Rc<LeaseSandbox>) {
        if sandbox.id != self.sandbox.id {
            self.successor = Some(sandbox);
        } else if let Err(error) = self.move_to(sandbox).await {
            self.log_line(&Error::from(error));
        }
    }

    /// Continues with the lease in another namespace.
    pub(super) async fn move_to(
        &mut self,
        sandbox: Rc<LeaseSandbox>,
    ) -> Result<(), InterfaceError> {
        let mut record = DhcpRecord { netns_cookie: None, ifindex: None, ..self.record.clone() };
        let found =
            self.registry.run_in_namespace(&sandbox, &record, interface::find_interface).await??;
        record.note_interface(&sandbox, &found);
        *self.machine.mac_mut() = found.mac;
        self.sockets = LeaseSockets::default();
        self.registry.replace_sandbox(&record.key, &self.phase.subscribe(), &sandbox);
        if record.netns_id != self.record.netns_id {
            self.log_line(&format_args!("the lease goes on in {}", sandbox.netns));
        }
        self.sandbox = sandbox;
        self.record = record;
        self.save_record();
        Ok(())
    }
}
