//! The inside of a container: its namespace and a netlink socket in it.

use crate::error::{Context, Result};
use crate::log;
use crate::netlink::{Link, Netlink, Opener};
use crate::netns::Netns;
use crate::sysctl;

/// An entered namespace.
#[derive(Debug)]
pub struct Inside<'a> {
    /// The namespace.
    pub netns: &'a Netns,
    /// Netlink in it.
    pub netlink: Netlink,
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

    /// Enters `netns` and sets kernel parameters there in the same visit: a visit is a thread,
    /// which costs more than all the rest of it.
    pub fn enter_and_set(netns: &'a Netns, settings: &[Setting]) -> Result<Inside<'a>> {
        let opener = Opener::here()?;
        let (socket, set) = netns.run(|| (opener.open(), settings.iter().try_for_each(apply)))?;
        set?;
        Ok(Inside { netns, netlink: Netlink::from_socket(socket?)? })
    }

    /// The link of this name.
    pub fn link(&self, ifname: &str) -> Result<Link> {
        Ok(self.netlink.require_link(ifname)?)
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
