//! One lease: a task that performs the actions of the client's state machine in the container's namespace.

use std::fmt::Display;
use std::pin::pin;
use std::rc::Rc;

use futures::future::{Either, select};
use nix::errno::Errno;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::super::family::{Family, Lease};
use super::super::interface::{self, Change};
use super::super::machine::{Action, StateMachine};
use super::super::record::Record;
use super::super::sandbox::{InterfaceError, Sandbox};
use super::super::socket;
use super::super::timing::{NEVER, now};
use super::registry::{Phase, Registry};
use super::sockets::Sockets;
use crate::error::Error;
use crate::log;
use crate::netns;

/// Why the task ends without a request.
enum End {
    /// The namespace or the interface does not exist any more.
    Gone(String),
    /// No lease was acquired.
    Failed(Error),
}

/// The task of one lease.
pub(super) struct LeaseTask {
    pub(super) registry: Rc<Registry>,
    pub(super) record: Record,
    pub(super) sandbox: Rc<Sandbox>,
    /// For plugins that wait; dropped at the end of the task.
    pub(super) phase: watch::Sender<Phase>,
    /// Requests to release the lease.
    pub(super) released: mpsc::UnboundedReceiver<()>,
    pub(super) machine: Box<dyn StateMachine>,
    pub(super) sockets: Sockets,
    /// The last error, for the plugin that waits.
    pub(super) trouble: Option<Error>,
}

impl LeaseTask {
    /// Acquires a lease and maintains it.
    pub(super) async fn acquire(mut self) {
        match self.prepare().await {
            Ok(()) => self.run().await,
            Err(error) => self.end(Err(End::Failed(error.into()))),
        }
    }

    /// Maintains a lease from the disk.
    pub(super) async fn resume(mut self) {
        if let Err(error) = self.recognize().await {
            match self.unless_gone(error) {
                Ok(error) => self.say(&error),
                Err(end) => return self.end(Err(end)),
            }
        }
        self.run().await;
    }

    /// Verifies that the recorded namespace has the interface. A record of release 0.2.0 has no cookie: the interface must
    /// have the recorded Ethernet address, or the leased address.
    async fn recognize(&mut self) -> Result<(), InterfaceError> {
        let look = |ifname: &str| {
            let cookie = netns::current_cookie().map_err(Error::from)?;
            Ok::<_, InterfaceError>((cookie, socket::mac(ifname)?, socket::addresses(ifname)?))
        };
        let (cookie, mac, addresses) = self.visit(look).await??;
        let leased = self.record.lease.as_ref().map(Lease::address);
        let known = mac == self.record.mac || leased.is_some_and(|ip| addresses.contains(&ip));
        if self.record.netns_cookie.is_some() {
            return Ok(());
        }
        if !known {
            let name = &self.record.key.ifname;
            let why = format!("{name} is not known by its Ethernet or IP address");
            return Err(InterfaceError::Gone(why));
        }
        self.record.netns_cookie = cookie;
        self.save();
        Ok(())
    }

    async fn prepare(&mut self) -> Result<(), InterfaceError> {
        let prepare = |ifname: &str| {
            let cookie = netns::current_cookie().map_err(Error::from)?;
            Ok::<_, InterfaceError>((cookie, interface::prepare(ifname)?))
        };
        (self.record.netns_cookie, self.record.mac) = self.visit(prepare).await??;
        // The time limit does not include the wait for the carrier.
        let (options, now) = (&self.registry.options, now());
        let limit = now + options.limit;
        self.machine = self.record.machine(options.timing, options.broadcast, now, limit);
        Ok(())
    }

    pub(super) async fn visit<T: Send + 'static>(
        &self,
        work: impl FnOnce(&str) -> T + Send + 'static,
    ) -> Result<T, InterfaceError> {
        self.registry.visit(&self.sandbox, &self.record, work).await
    }

    async fn run(mut self) {
        let ended = self.maintain().await;
        self.sockets = Sockets::default();
        if ended.is_ok() {
            self.release().await;
        }
        self.end(ended);
    }

    fn end(self, ended: Result<(), End>) {
        let phase = match ended {
            Ok(()) => Phase::Over,
            Err(End::Gone(why)) => {
                self.say(&format_args!("{why}; the lease is forgotten"));
                Phase::Over
            }
            Err(End::Failed(error)) => {
                self.say(&error);
                Phase::Failed(error)
            }
        };
        self.phase.send_replace(phase);
        if let Err(error) = self.registry.forget(&self.record.key, &self.phase.subscribe()) {
            self.say(&error);
        }
    }

    /// Runs the state machine until a request to release the lease.
    async fn maintain(&mut self) -> Result<(), End> {
        loop {
            if now() >= self.machine.deadline() {
                if let Err(error) = self.wait_link_local().await {
                    self.unless_gone(error)?;
                }
                let actions = self.machine.tick(now());
                self.perform(actions).await?;
            }
            self.sockets.trim(&self.machine.listening());
            let wait = self.machine.deadline().saturating_sub(now()).min(self.sandbox.interval());
            let received = {
                let released = pin!(self.released.recv());
                let received = pin!(timeout(wait, self.sockets.receive()));
                match select(released, received).await {
                    // Or the channel is closed, because another task has replaced this one in the registry.
                    Either::Left(_) => return Ok(()),
                    Either::Right((received, _)) => received,
                }
            };
            let actions = match received {
                Ok(Ok((source, bytes))) => self.machine.receive(now(), source, &bytes),
                Ok(Err(cause)) => {
                    self.sockets = Sockets::default();
                    self.trouble = Some(Error::io(&self.record.key.ifname, &cause));
                    Vec::new()
                }
                Err(_) => {
                    if let Err(error) = self.sandbox.verify() {
                        self.unless_gone(error)?;
                    }
                    Vec::new()
                }
            };
            self.perform(actions).await?;
            // Other tasks must run, however much is received.
            tokio::task::yield_now().await;
        }
    }

    async fn perform(&mut self, actions: Vec<Action>) -> Result<(), End> {
        for action in actions {
            let done = match action {
                Action::Broadcast(message) => self.broadcast(message).await,
                Action::Unicast(message, server) => self.unicast(message, server).await,
                Action::Multicast(message) => self.multicast(message).await,
                Action::Probe(address) => self.probe(address).await,
                Action::Bound(lease) => self.bound(lease).await,
                Action::Lost(why) => self.lost(why).await,
                Action::TimeIsUp => return Err(End::Failed(self.time_is_up())),
                Action::Unusable(flaw) => {
                    return Err(End::Failed(Error::internal(flaw.to_string())));
                }
                Action::Refused(why) => Err(Error::internal(why).into()),
                Action::Note(text) => {
                    self.say(&text);
                    Ok(())
                }
            };
            if let Err(error) = done {
                // The state machine tries again after its timeout.
                let error = self.unless_gone(error)?;
                self.say(&error);
                self.trouble = Some(error);
            }
        }
        Ok(())
    }

    async fn bound(&mut self, lease: Lease) -> Result<(), InterfaceError> {
        let old = self.record.lease.replace(lease.clone());
        let changed = old.as_ref().is_none_or(|old| old.differs_on_link(&lease));
        let first = matches!(*self.phase.borrow(), Phase::Acquiring);
        let mut applied = Ok(true);
        if changed && !first {
            applied = self.apply(old, Some(lease.clone())).await;
        }
        self.record.address_removed = false;
        if first || changed {
            let left = match lease.expires() {
                NEVER => "for ever".to_owned(),
                expires => format!("for {} s", expires.saturating_sub(now()).as_secs()),
            };
            self.say(&format_args!("{} from {} {left}", lease.ip_net(), lease.server()));
        }
        self.save();
        self.phase.send_replace(Phase::Bound(Box::new(lease)));
        applied.map(drop)
    }

    async fn lost(&mut self, why: &'static str) -> Result<(), InterfaceError> {
        let old = self.record.lease.take();
        self.say(&why);
        self.phase.send_replace(Phase::Searching);
        let applied = self.apply(old, None).await;
        self.record.address_removed |= matches!(applied, Ok(true));
        self.save();
        applied.map(drop)
    }

    async fn apply(&self, old: Option<Lease>, new: Option<Lease>) -> Result<bool, InterfaceError> {
        let Record { priority, address_removed, .. } = self.record;
        let change = Change { old, new, priority, address_removed };
        let apply = move |ifname: &str| change.apply(ifname);
        Ok(self.visit(apply).await??)
    }

    async fn release(&mut self) {
        let Some(release) = self.machine.release() else { return };
        let address = release.address();
        let send = move |ifname: &str| interface::send(ifname, release);
        match self.visit(send).await {
            Ok(Ok(())) => self.say(&format_args!("released {address}")),
            Ok(Err(error)) => self.say(&error),
            Err(error) => self.say(&Error::from(error)),
        }
    }

    /// The error, or the end of the task if the interface does not exist any more.
    fn unless_gone(&self, error: InterfaceError) -> Result<Error, End> {
        match error {
            InterfaceError::Gone(why) => Err(End::Gone(why)),
            InterfaceError::Io(e) if e.raw_os_error() == Some(Errno::ENODEV as i32) => {
                let name = &self.record.key.ifname;
                Err(End::Gone(format!("interface {name} does not exist any more")))
            }
            InterfaceError::Io(cause) => Ok(Error::io(&self.record.key.ifname, &cause)),
            InterfaceError::Failed(error) => Ok(error),
        }
    }

    fn time_is_up(&self) -> Error {
        let seconds = self.registry.options.limit.as_secs_f64();
        let why = self.trouble.as_ref().map(|e| format!("; {e}")).unwrap_or_default();
        let v = if self.record.key.family == Family::V6 { "v6" } else { "" };
        let details = format!("no DHCP{v} server gave an address in {seconds} s{why}");
        Error::internal("no more tries").with_details(details)
    }

    fn save(&self) {
        if let Err(error) = self.registry.records.save(&self.record) {
            self.say(&error);
        }
    }

    fn say(&self, what: &dyn Display) {
        log::line(format_args!("{}: {what}", self.record.key));
    }
}
