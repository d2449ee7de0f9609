//! One lease: a task that drives the client's states with the sockets of its container.

use std::net::SocketAddrV6;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures::future::{Either, select};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use super::super::family::{Family, Lease};
use super::super::interface::{self, Change, Interface, InterfaceError};
use super::super::machine::{Action, Failure, StateMachine};
use super::super::record::Record;
use super::super::release;
use super::super::timing::{BootTime, NEVER, now};
use super::super::v4::lease::Flaw;
use super::registry::{Command, Phase, Registry};
use super::sockets::{Event, Sockets};
use crate::error::{Code, Error};
use crate::log;
use crate::netlink::Mac;

/// How often the task of a lease looks whether the namespace still exists, and at the clock, which
/// advances while the node is suspended.
const LIVENESS_INTERVAL: Duration = Duration::from_secs(30);

/// Why the task ends.
enum End {
    Released(Option<oneshot::Sender<()>>),
    Gone(String),
    Failed(Error),
}

/// A task without its lease's state.
pub(super) struct LeaseTask {
    pub(super) registry: Rc<Registry>,
    pub(super) number: u64,
    pub(super) record: Record,
    pub(super) phase: watch::Sender<Phase>,
    pub(super) commands: mpsc::UnboundedReceiver<Command>,
}

/// A task with its lease's state.
pub(super) struct Running {
    pub(super) task: LeaseTask,
    pub(super) interface: Interface,
    pub(super) machine: Box<dyn StateMachine>,
    pub(super) sockets: Sockets,
    /// The multicast address of DHCPv6 servers, with the interface's index as its scope.
    pub(super) servers: Option<SocketAddrV6>,
    /// The last error, for the plugin that waits.
    trouble: Option<Error>,
}

impl LeaseTask {
    /// Acquires a lease and maintains it.
    pub(super) async fn acquire(mut self) {
        let interface = self.interface();
        let prepared = self.visit_first(&interface).await;
        let (netns_id, mac) = match prepared {
            Ok(found) => found,
            Err(trouble) => return self.end(End::Failed(trouble.into())),
        };
        self.record.netns_id = netns_id;
        self.record.mac = mac;
        let limit = now() + self.registry.options.limit;
        let machine = self.machine(limit);
        self.run(interface, machine).await;
    }

    /// Resumes a lease from the disk.
    pub(super) async fn resume(self) {
        let interface = self.interface();
        let machine = self.machine(NEVER);
        let ifname = interface.ifname.clone();
        let id = Some(self.record.netns_id);
        let looked =
            self.registry.visit(&interface, id, move || interface::mac_address(&ifname)).await;
        match looked {
            Ok(Ok(None)) => {
                let what = format!("there is no {} any more", interface.ifname);
                return self.end(End::Gone(what));
            }
            Err(InterfaceError::Gone(what)) => return self.end(End::Gone(what)),
            Err(InterfaceError::Failed(e)) | Ok(Err(e)) => self.say(&e),
            Ok(Ok(Some(_))) => {}
        }
        self.run(interface, machine).await;
    }

    async fn visit_first(
        &self,
        interface: &Interface,
    ) -> Result<((u64, u64), Mac), InterfaceError> {
        let id = interface.open(None)?.identity().map_err(Error::from)?;
        let (ifname, family) = (interface.ifname.clone(), self.record.key.family);
        let prepare = move || interface::prepare(&ifname, family);
        let mac = self.registry.visit(interface, Some(id), prepare).await??;
        Ok((id, mac))
    }

    async fn run(self, interface: Interface, machine: Box<dyn StateMachine>) {
        let sockets = Sockets::default();
        let mut running =
            Running { task: self, interface, machine, sockets, servers: None, trouble: None };
        let end = running.keep().await;
        running.sockets = Sockets::default();
        if matches!(end, End::Released(_)) {
            running.release().await;
        }
        running.task.end(end);
    }

    fn end(mut self, end: End) {
        let told = match end {
            End::Released(told) => told,
            End::Gone(what) => {
                self.say(&format_args!("{what}; the lease is forgotten"));
                self.phase.send_replace(Phase::Over);
                None
            }
            End::Failed(error) => {
                self.say(&error);
                self.phase.send_replace(Phase::Failed(error));
                None
            }
        };
        if let Err(error) = self.registry.forget(&self.record.key, self.number) {
            self.say(&error);
        }
        self.phase.send_if_modified(|phase| {
            let going = !matches!(phase, Phase::Failed(_));
            if going {
                *phase = Phase::Over;
            }
            going
        });
        // Commands that came during the end are answered as well.
        self.commands.close();
        let mut waiting: Vec<_> = told.into_iter().collect();
        while let Ok(Command::Release(told)) = self.commands.try_recv() {
            waiting.push(told);
        }
        for told in waiting {
            // A requester that is gone needs no answer.
            told.send(()).ok();
        }
    }

    fn interface(&self) -> Interface {
        let netns = self.registry.options.prefixed(&self.record.netns);
        Interface { netns, ifname: self.record.key.ifname.clone() }
    }

    fn machine(&self, limit: BootTime) -> Box<dyn StateMachine> {
        let options = &self.registry.options;
        self.record.machine(options.timing, options.broadcast, now(), limit)
    }

    fn say(&self, what: &dyn std::fmt::Display) {
        log::line(format_args!("{}: {what}", self.record.key));
    }
}

impl Running {
    async fn keep(&mut self) -> End {
        loop {
            if now() >= self.machine.deadline() {
                if let Err(InterfaceError::Gone(what)) = self.wait_link_local().await {
                    return End::Gone(what);
                }
                let outputs = self.machine.tick(now());
                if let Some(end) = self.perform(outputs).await {
                    return end;
                }
            }
            self.sockets.trim(self.machine.listening());
            let wait = self.machine.deadline().saturating_sub(now()).min(LIVENESS_INTERVAL);
            let happened = {
                let order = pin!(self.task.commands.recv());
                let heard = pin!(timeout(wait, self.sockets.next_event()));
                match select(order, heard).await {
                    Either::Left((order, _)) => Either::Left(order),
                    Either::Right((heard, _)) => Either::Right(heard.ok()),
                }
            };
            let outputs = match happened {
                Either::Left(Some(Command::Release(told))) => return End::Released(Some(told)),
                Either::Left(None) => return End::Released(None),
                Either::Right(Some(heard)) => self.heard(heard),
                Either::Right(None) => match self.check_alive() {
                    Some(end) => return end,
                    None => Vec::new(),
                },
            };
            if let Some(end) = self.perform(outputs).await {
                return end;
            }
            // However much arrives, other tasks have their turn.
            tokio::task::yield_now().await;
        }
    }

    fn heard(&mut self, heard: Event) -> Vec<Action> {
        match heard {
            Event::Frame(frame) => self.machine.frame(now(), &frame),
            Event::Datagram(payload) => self.machine.datagram(now(), &payload),
            Event::Neighbour(frame) => self.machine.neighbour(now(), &frame),
            Event::Broken(cause) => {
                self.sockets = Sockets::default();
                self.trouble = Some(Error::io(&self.interface.ifname, &cause));
                Vec::new()
            }
        }
    }

    /// A look at the namespace from outside.
    fn check_alive(&self) -> Option<End> {
        match self.interface.open(Some(self.task.record.netns_id)) {
            Err(InterfaceError::Gone(what)) => Some(End::Gone(what)),
            _ => None,
        }
    }

    async fn perform(&mut self, outputs: Vec<Action>) -> Option<End> {
        for output in outputs {
            let done = match output {
                Action::Broadcast(message) => self.broadcast(message).await,
                Action::Unicast(message, server) => self.unicast(message, server).await,
                Action::Multicast(message) => self.multicast(message).await,
                Action::Probe(address) => self.probe(address).await,
                Action::Bound(lease) => self.bound(lease).await,
                Action::Lost(why) => self.lost(why).await,
                Action::Failed(failure) => return Some(End::Failed(self.failure(failure))),
                Action::Refused(why) => Err(Error::internal(why).into()),
                Action::Note(text) => {
                    self.task.say(&text);
                    Ok(())
                }
            };
            match done {
                Ok(()) => {}
                Err(InterfaceError::Gone(what)) => return Some(End::Gone(what)),
                Err(InterfaceError::Failed(error)) => {
                    // The machine tries again when it is time.
                    self.task.say(&error);
                    self.trouble = Some(error);
                }
            }
        }
        None
    }

    async fn bound(&mut self, lease: Lease) -> Result<(), InterfaceError> {
        let record = &mut self.task.record;
        let old = record.lease.replace(lease.clone());
        let changed = old.as_ref().is_none_or(|old| old.differs_on_link(&lease));
        let first = matches!(*self.task.phase.borrow(), Phase::Acquiring);
        let mut applied = Ok(true);
        if changed && !first {
            applied = self.apply(old, Some(lease.clone())).await;
        }
        self.task.record.address_removed = false;
        if first || changed {
            self.say_lease(&lease);
        }
        self.save();
        self.task.phase.send_replace(Phase::Bound(Box::new(lease)));
        applied.map(drop)
    }

    async fn lost(&mut self, why: &'static str) -> Result<(), InterfaceError> {
        let old = self.task.record.lease.take();
        self.task.say(&why);
        self.task.phase.send_replace(Phase::Searching);
        let applied = self.apply(old, None).await;
        self.task.record.address_removed |= matches!(applied, Ok(true));
        self.save();
        applied.map(drop)
    }

    async fn apply(
        &mut self,
        old: Option<Lease>,
        new: Option<Lease>,
    ) -> Result<bool, InterfaceError> {
        let Record { priority, address_removed, netns_id, .. } = self.task.record;
        let ifname = self.interface.ifname.clone();
        let change = Change { ifname, old, new, priority, address_removed };
        let work = move || change.apply();
        Ok(self.task.registry.visit(&self.interface, Some(netns_id), work).await??)
    }

    fn save(&self) {
        if let Err(error) = self.task.registry.records.save(&self.task.record) {
            self.task.say(&error);
        }
    }

    fn say_lease(&self, lease: &Lease) {
        let left = match lease.expires() {
            NEVER => "for ever".to_owned(),
            expires => format!("for {} s", expires.saturating_sub(now()).as_secs()),
        };
        self.task.say(&format_args!("{} from {} {left}", lease.ip_net(), lease.server()));
    }

    async fn release(&mut self) {
        if self.machine.release().is_none() {
            return;
        }
        if let Err(trouble) = self.try_release().await {
            self.task.say(&Error::from(trouble));
        }
    }

    async fn try_release(&mut self) -> Result<(), InterfaceError> {
        let id = Some(self.task.record.netns_id);
        let registry = Rc::clone(&self.task.registry);
        let ifname = self.interface.ifname.clone();
        let found = registry.visit(&self.interface, id, move || interface::mac_address(&ifname));
        if let Some(mac) = found.await?? {
            self.machine.set_mac(mac);
        }
        let Some(release) = self.machine.release() else { return Ok(()) };
        let (ifname, address) = (self.interface.ifname.clone(), release.address());
        registry.visit(&self.interface, id, move || release::send(&ifname, release)).await??;
        self.task.say(&format_args!("released {address}"));
        Ok(())
    }

    fn failure(&self, failure: Failure) -> Error {
        match failure {
            Failure::TimeIsUp => {
                let error = Error::internal("no more tries");
                let seconds = self.task.registry.options.limit.as_secs_f64();
                let why = self.trouble.as_ref().map(|e| format!("; {e}")).unwrap_or_default();
                let server = match self.task.record.key.family {
                    Family::V4 => "DHCP",
                    Family::V6 => "DHCPv6",
                };
                error
                    .with_details(format!("no {server} server gave an address in {seconds} s{why}"))
            }
            Failure::Unusable(Flaw::NoMask) => {
                Error::internal("DHCP option Subnet Mask not found in DHCPACK")
            }
            Failure::Unusable(flaw) => {
                Error::new(Code::INTERNAL, format!("the server's answer cannot be used: {flaw}"))
            }
        }
    }
}
