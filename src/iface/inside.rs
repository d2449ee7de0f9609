//! The inside of a container: its namespace and a netlink socket in it.

use crate::cni::IfName;
use crate::error::{Context, Error, Result};
use crate::log;
use crate::netlink::{Link, Netlink};
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

    /// Refuses to go on where an interface of this name exists.
    pub fn refuse_existing(&self, ifname: &IfName) -> Result<()> {
        if self.netlink.link(ifname.as_str())?.is_none() {
            return Ok(());
        }
        let path = self.netns.path().display();
        Err(Error::internal(format!("interface \"{ifname}\" already exists in {path}"))
            .with_details("an earlier ADD was not followed by DEL, or CNI_IFNAME is taken"))
    }

    /// The link of this name, for CHECK.
    pub fn link(&self, ifname: &str) -> Result<Link> {
        Ok(self.netlink.require_link(ifname)?)
    }

    /// Sets kernel parameters in the namespace, all in one visit.
    pub fn set(&self, settings: &[Setting]) -> Result<()> {
        if settings.is_empty() {
            return Ok(());
        }
        self.netns.run(|| settings.iter().try_for_each(apply))?
    }
}

fn apply(setting: &Setting) -> Result<()> {
    match sysctl::ensure(&setting.key, setting.value) {
        Ok(_) => Ok(()),
        Err(error) if setting.on_failure == OnFailure::GoOn => {
            log::debug(error);
            Ok(())
        }
        Err(error) => Err(error).context(|| "configure the interface"),
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
