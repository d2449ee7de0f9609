//! The inside of a container: its namespace and a netlink socket in it.

use std::sync::mpsc;

use crate::error::{Context, Error, Result};
use crate::log;
use crate::netlink::{self, Link, Netlink, Opener, Socket};
use crate::netns::{Netns, Visit};
use crate::sysctl;

/// An entered namespace.
#[derive(Debug)]
pub struct Inside<'a> {
    /// The namespace.
    pub netns: &'a Netns,
    /// Netlink in it.
    pub netlink: Netlink,
}

/// A namespace that is being entered while other work goes on.
#[derive(Debug)]
pub struct Entering<'a> {
    netns: &'a Netns,
    socket: mpsc::Receiver<netlink::Result<Socket>>,
    visitor: Visitor,
}

/// A thread in a namespace that sets kernel parameters there while other work goes on.
#[derive(Debug)]
pub struct Visitor {
    orders: mpsc::Sender<Vec<Setting>>,
    visit: Visit<Result<()>>,
}

/// What to do when a kernel parameter cannot be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFailure {
    /// The interface works without it.
    GoOn,
    /// The interface would not work.
    Fail,
}

/// A kernel parameter to set.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Path below `/proc/sys`.
    pub key: String,
    /// The value.
    pub value: &'static str,
    /// What if it cannot be set.
    pub on_failure: OnFailure,
}

impl<'a> Inside<'a> {
    /// Enters `netns`.
    pub fn enter(netns: &'a Netns) -> Result<Inside<'a>> {
        Ok(Inside { netns, netlink: Netlink::open_in(netns)? })
    }

    /// Begins to enter `netns`, which takes a thread and so, done in its turn, more time than
    /// anything else but the kernel's making of a link.
    pub fn begin(netns: &'a Netns) -> Result<Entering<'a>> {
        let opener = Opener::here()?;
        let (orders, inbox) = mpsc::channel::<Vec<Setting>>();
        let (outbox, socket) = mpsc::channel();
        let visit = netns.visit(move || {
            // Who does not wait for it does not need it.
            drop(outbox.send(opener.open()));
            inbox.iter().flatten().try_for_each(|setting| apply(&setting))
        })?;
        Ok(Entering { netns, socket, visitor: Visitor { orders, visit } })
    }

    /// Sets kernel parameters.
    pub fn set(&self, settings: &[Setting]) -> Result<()> {
        if settings.is_empty() {
            return Ok(());
        }
        self.netns.run(|| settings.iter().try_for_each(apply))?
    }

    /// Refuses a name for a new link that is taken.
    pub fn require_free(&self, ifname: &str) -> Result<()> {
        if self.netlink.link(ifname)?.is_none() {
            return Ok(());
        }
        let msg = format!("container already has an interface \"{ifname}\"");
        let remedy = "an earlier ADD was not followed by DEL, or CNI_IFNAME is taken";
        Err(Error::internal(msg).with_details(remedy))
    }

    /// The link of this name.
    pub fn link(&self, ifname: &str) -> Result<Link> {
        Ok(self.netlink.require_link(ifname)?)
    }
}

impl<'a> Entering<'a> {
    /// Has kernel parameters set in the namespace, without waiting for it.
    pub fn set(&self, settings: Vec<Setting>) {
        self.visitor.set(settings);
    }

    /// Waits until the namespace is entered. What is made in it then can be deleted again,
    /// whatever fails later.
    pub fn open(self) -> Result<(Inside<'a>, Visitor)> {
        let Ok(socket) = self.socket.recv() else {
            // The thread has ended without coming so far.
            self.visitor.finish()?;
            return Err(Error::internal("enter network namespace: the thread has vanished"));
        };
        let netlink = Netlink::from_socket(socket?, self.netns)?;
        Ok((Inside { netns: self.netns, netlink }, self.visitor))
    }

    /// Waits until the namespace is entered and all parameters are set.
    pub fn finish(self) -> Result<Inside<'a>> {
        let (inside, visitor) = self.open()?;
        visitor.finish()?;
        Ok(inside)
    }
}

impl Visitor {
    /// Has kernel parameters set in the namespace, without waiting for it.
    pub fn set(&self, settings: Vec<Setting>) {
        // A thread that has ended has its reason, which `finish` learns.
        drop(self.orders.send(settings));
    }

    /// Waits until all parameters are set.
    pub fn finish(self) -> Result<()> {
        drop(self.orders);
        self.visit.join()?
    }
}

fn apply(setting: &Setting) -> Result<()> {
    let set = match setting.on_failure {
        OnFailure::GoOn => sysctl::write(&setting.key, setting.value),
        // Where it has the value already, it need not be writable.
        OnFailure::Fail => sysctl::ensure(&setting.key, setting.value).map(drop),
    };
    match set {
        Err(error) if setting.on_failure == OnFailure::GoOn => {
            log::debug(error);
            Ok(())
        }
        other => other.context(|| "configure the interface"),
    }
}

impl Setting {
    /// A parameter the interface can do without.
    pub fn optional(key: String, value: &'static str) -> Setting {
        Setting { key, value, on_failure: OnFailure::GoOn }
    }

    /// A parameter the interface needs.
    pub fn required(key: String, value: &'static str) -> Setting {
        Setting { key, value, on_failure: OnFailure::Fail }
    }
}
