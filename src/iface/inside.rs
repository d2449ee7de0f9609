//! The inside of a container: its namespace and a netlink socket in it.

use crate::error::{Context, Error, Result};
use crate::log;
use crate::netlink::{Link, Netlink};
use crate::netns::Netns;
use crate::sysctl;

#[derive(Debug)]
pub struct Inside<'a> {
    pub netns: &'a Netns,
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
    pub value: &'static str,
    /// What if it cannot be set.
    pub on_failure: OnFailure,
}

impl<'a> Inside<'a> {
    /// Enters `netns`.
    pub fn enter(netns: &'a Netns) -> Result<Inside<'a>> {
        Ok(Inside { netns, netlink: Netlink::open_in(netns)? })
    }

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
        let remedy =
            "run DEL first, as an earlier ADD was not followed by one, or CNI_IFNAME is taken";
        Err(Error::internal(msg).with_details(remedy))
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
