//! What a plugin may use besides its request.

use std::cell::OnceCell;

use super::call::Call;
use crate::cni::args::Args;
use crate::cni::{CniResult, NetConf, SpecVersion};
use crate::error::Result;
use crate::netlink::Netlink;

/// The surroundings of one call.
#[derive(Debug)]
pub struct Cx<'a> {
    /// The configuration's common keys.
    pub net: NetConf,
    /// The version of the request, and so of the result.
    pub version: SpecVersion,
    pub(super) call: &'a Call<'a>,
    host: OnceCell<Netlink>,
}

impl<'a> Cx<'a> {
    pub(super) fn new(call: &'a Call<'a>, net: NetConf, version: SpecVersion) -> Cx<'a> {
        Cx { net, version, call, host: OnceCell::new() }
    }

    /// Netlink in the namespace the plugin was started in, opened on first use.
    pub fn host(&self) -> Result<&Netlink> {
        if let Some(host) = self.host.get() {
            return Ok(host);
        }
        let opened = Netlink::open()?;
        Ok(self.host.get_or_init(|| opened))
    }

    /// `CNI_ARGS`. Only plugins that document a key of theirs parse it: others accept anything.
    pub fn args(&self) -> Result<Args> {
        Args::parse(&self.call.env.args)
    }

    /// Completes the result of an interface plugin: the configuration's `dns` replaces that of
    /// IPAM, and the MTU is told only in 1.1.0, which has a key for it.
    pub fn finish(&self, result: &mut CniResult) {
        if self.version < SpecVersion::V1_1_0 {
            for interface in &mut result.interfaces {
                interface.mtu = 0;
            }
        }
        result.dns = std::mem::take(&mut result.dns).overridden_by(&self.net.dns);
    }
}
