//! One lease: a task that drives the client's states with the sockets of its container.

use std::net::SocketAddrV6;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures::future::{Either, select};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use super::super::place::{self, Change, Place, Trouble};
use super::super::protocol::client::{Failure, Output};
use super::super::protocol::family::{Claim, Client, Family, Lease, Machine};
use super::super::protocol::lease::Flaw;
use super::super::protocol::timing::{NEVER, now};
use super::super::record::Record;
use super::super::release;
use super::ears::{Ears, Heard};
use super::registry::Registry;
use crate::error::{Code, Error};
use crate::log;
use crate::netlink::Mac;

/// How often a sleeping lease looks whether its namespace is still there, and at the clock, which
/// goes on while the node sleeps.
const GLANCE: Duration = Duration::from_secs(30);

/// How far a lease is.
#[derive(Clone, Debug)]
pub(super) enum Phase {
    /// The first is looked for.
    Acquiring,
    /// There is one.
    Bound(Box<Lease>),
    /// It was lost, another one is looked for.
    Searching,
    /// None was had.
    Failed(Error),
    /// It was given back, or its container is gone.
    Over,
}

/// What others want of a lease.
#[derive(Debug)]
pub(super) enum Order {
    /// Give it back and end; then tell.
    Release(oneshot::Sender<()>),
}

/// Why the task ends.
enum End {
    Released(Option<oneshot::Sender<()>>),
    Gone(String),
    Failed(Error),
}

/// The task's own.
pub(super) struct Keeper {
    pub(super) registry: Rc<Registry>,
    pub(super) number: u64,
    pub(super) record: Record,
    pub(super) phase: watch::Sender<Phase>,
    pub(super) orders: mpsc::UnboundedReceiver<Order>,
}

/// A keeper with its lease's state.
pub(super) struct Running {
    pub(super) keeper: Keeper,
    pub(super) place: Place,
    pub(super) machine: Machine,
    pub(super) ears: Ears,
    /// Where the servers of IPv6 are, as the open socket sees it.
    pub(super) servers: Option<SocketAddrV6>,
    /// The last thing that went wrong, for whoever waits.
    trouble: Option<Error>,
}

impl Keeper {
    /// Gets a lease and keeps it.
    pub(super) async fn acquire(mut self) {
        let place = self.place();
        let prepared = self.visit_first(&place).await;
        let (netns_id, mac) = match prepared {
            Ok(found) => found,
            Err(trouble) => return self.end(End::Failed(trouble.into())),
        };
        self.record.netns_id = netns_id;
        self.record.mac = mac;
        let limit = now() + self.registry.options.limit;
        let machine = Machine::new(self.client(), None, now(), limit);
        self.run(place, machine).await;
    }

    /// Goes on with a lease from the disk.
    pub(super) async fn resume(self) {
        let place = self.place();
        let machine = Machine::new(self.client(), self.record.lease.clone(), now(), NEVER);
        let ifname = place.ifname.clone();
        let id = Some(self.record.netns_id);
        let looked = self.registry.visit(&place, id, move || place::look(&ifname)).await;
        match looked {
            Ok(Ok(None)) => {
                let what = format!("there is no {} any more", place.ifname);
                return self.end(End::Gone(what));
            }
            Err(Trouble::Gone(what)) => return self.end(End::Gone(what)),
            Err(Trouble::Failed(e)) | Ok(Err(e)) => self.say(&e),
            Ok(Ok(Some(_))) => {}
        }
        self.run(place, machine).await;
    }

    async fn visit_first(&self, place: &Place) -> Result<((u64, u64), Mac), Trouble> {
        let id = place.open(None)?.identity().map_err(Error::from)?;
        let (ifname, family) = (place.ifname.clone(), self.record.key.family);
        let prepare = move || place::prepare(&ifname, family);
        let mac = self.registry.visit(place, Some(id), prepare).await??;
        Ok((id, mac))
    }

    async fn run(self, place: Place, machine: Machine) {
        let ears = Ears::default();
        let mut running =
            Running { keeper: self, place, machine, ears, servers: None, trouble: None };
        let end = running.keep().await;
        running.ears = Ears::default();
        if let End::Released(_) = &end
            && let Some(claim) = running.machine.claim()
        {
            running.release(claim).await;
        }
        running.keeper.end(end);
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
        // Orders that came while it ended are fulfilled as well.
        self.orders.close();
        let mut waiting: Vec<_> = told.into_iter().collect();
        while let Ok(Order::Release(told)) = self.orders.try_recv() {
            waiting.push(told);
        }
        for told in waiting {
            // Who has gone need not be told.
            told.send(()).ok();
        }
    }

    fn place(&self) -> Place {
        let netns = self.registry.options.prefixed(&self.record.netns);
        Place { netns, ifname: self.record.key.ifname.clone() }
    }

    fn client(&self) -> Client {
        let options = &self.registry.options;
        self.record.client(options.timing, options.broadcast)
    }

    fn say(&self, what: &dyn std::fmt::Display) {
        log::line(format_args!("{}: {what}", self.record.key));
    }
}

impl Running {
    async fn keep(&mut self) -> End {
        loop {
            if now() >= self.machine.deadline() {
                if let Err(Trouble::Gone(what)) = self.come_to_speak().await {
                    return End::Gone(what);
                }
                let outputs = self.machine.tick(now());
                if let Some(end) = self.perform(outputs).await {
                    return end;
                }
            }
            self.ears.trim(self.machine.listening());
            let wait = self.machine.deadline().saturating_sub(now()).min(GLANCE);
            let happened = {
                let order = pin!(self.keeper.orders.recv());
                let heard = pin!(timeout(wait, self.ears.hear()));
                match select(order, heard).await {
                    Either::Left((order, _)) => Either::Left(order),
                    Either::Right((heard, _)) => Either::Right(heard.ok()),
                }
            };
            let outputs = match happened {
                Either::Left(Some(Order::Release(told))) => return End::Released(Some(told)),
                Either::Left(None) => return End::Released(None),
                Either::Right(Some(heard)) => self.heard(heard),
                Either::Right(None) => match self.glance() {
                    Some(end) => return end,
                    None => Vec::new(),
                },
            };
            if let Some(end) = self.perform(outputs).await {
                return end;
            }
            // However much arrives, others have their turn.
            tokio::task::yield_now().await;
        }
    }

    fn heard(&mut self, heard: Heard) -> Vec<Output> {
        match heard {
            Heard::Frame(frame) => self.machine.frame(now(), &frame),
            Heard::Datagram(payload) => self.machine.datagram(now(), &payload),
            Heard::Neighbour(frame) => self.machine.neighbour(now(), &frame),
            Heard::Broken(cause) => {
                self.ears = Ears::default();
                self.trouble = Some(Error::io(&self.place.ifname, &cause));
                Vec::new()
            }
        }
    }

    /// A look at the namespace from outside.
    fn glance(&self) -> Option<End> {
        match self.place.open(Some(self.keeper.record.netns_id)) {
            Err(Trouble::Gone(what)) => Some(End::Gone(what)),
            _ => None,
        }
    }

    async fn perform(&mut self, outputs: Vec<Output>) -> Option<End> {
        for output in outputs {
            let done = match output {
                Output::Broadcast(message) => self.broadcast(message).await,
                Output::Unicast(message, server) => self.unicast(message, server).await,
                Output::Multicast(message) => self.multicast(message).await,
                Output::Probe(address) => self.probe(address).await,
                Output::Bound(lease) => self.bound(lease).await,
                Output::Lost(why) => self.lost(why).await,
                Output::Failed(failure) => return Some(End::Failed(self.failure(failure))),
                Output::Refused(why) => Err(Error::internal(why).into()),
                Output::Note(text) => {
                    self.keeper.say(&text);
                    Ok(())
                }
            };
            match done {
                Ok(()) => {}
                Err(Trouble::Gone(what)) => return Some(End::Gone(what)),
                Err(Trouble::Failed(error)) => {
                    // The machine tries again when it is time.
                    self.keeper.say(&error);
                    self.trouble = Some(error);
                }
            }
        }
        None
    }

    async fn bound(&mut self, lease: Lease) -> Result<(), Trouble> {
        let record = &mut self.keeper.record;
        let old = record.lease.replace(lease.clone());
        let changed = old.as_ref().is_none_or(|old| old.differs_on_link(&lease));
        let first = matches!(*self.keeper.phase.borrow(), Phase::Acquiring);
        let mut applied = Ok(true);
        if changed && !first {
            applied = self.apply(old, Some(lease.clone())).await;
        }
        self.keeper.record.bare = false;
        if first || changed {
            self.say_lease(&lease);
        }
        self.save();
        self.keeper.phase.send_replace(Phase::Bound(Box::new(lease)));
        applied.map(drop)
    }

    async fn lost(&mut self, why: &'static str) -> Result<(), Trouble> {
        let old = self.keeper.record.lease.take();
        self.keeper.say(&why);
        self.keeper.phase.send_replace(Phase::Searching);
        let applied = self.apply(old, None).await;
        self.keeper.record.bare |= matches!(applied, Ok(true));
        self.save();
        applied.map(drop)
    }

    async fn apply(&mut self, old: Option<Lease>, new: Option<Lease>) -> Result<bool, Trouble> {
        let Record { priority, bare, netns_id, .. } = self.keeper.record;
        let ifname = self.place.ifname.clone();
        let change = Change { ifname, old, new, priority, bare };
        let work = move || change.apply();
        Ok(self.keeper.registry.visit(&self.place, Some(netns_id), work).await??)
    }

    fn save(&self) {
        if let Err(error) = self.keeper.registry.records.save(&self.keeper.record) {
            self.keeper.say(&error);
        }
    }

    fn say_lease(&self, lease: &Lease) {
        let left = match lease.expires() {
            NEVER => "for ever".to_owned(),
            expires => format!("for {} s", expires.saturating_sub(now()).as_secs()),
        };
        self.keeper.say(&format_args!("{} from {} {left}", lease.ip_net(), lease.server()));
    }

    async fn release(&mut self, claim: Claim) {
        let mut client = self.keeper.client();
        let (ifname, address) = (self.place.ifname.clone(), claim.address());
        let work = move || {
            if let Some(mac) = place::look(&ifname)? {
                client.set_mac(mac);
            }
            release::release(&ifname, &client, &claim)
        };
        let id = Some(self.keeper.record.netns_id);
        match self.keeper.registry.visit(&self.place, id, work).await {
            Ok(Ok(())) => self.keeper.say(&format_args!("released {address}")),
            Ok(Err(error)) | Err(Trouble::Failed(error)) => self.keeper.say(&error),
            Err(Trouble::Gone(what)) => self.keeper.say(&what),
        }
    }

    fn failure(&self, failure: Failure) -> Error {
        match failure {
            Failure::TimeIsUp => {
                let error = Error::internal("no more tries");
                let seconds = self.keeper.registry.options.limit.as_secs_f64();
                let why = self.trouble.as_ref().map(|e| format!("; {e}")).unwrap_or_default();
                let server = match self.keeper.record.key.family {
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
                Error::new(Code::INTERNAL, format!("the server's answer is of no use: {flaw:?}"))
            }
        }
    }
}
