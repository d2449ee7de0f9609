//! The context of a call: configuration, netlink in the host's namespace, `CNI_ARGS`.

use std::cell::{Cell, OnceCell};

use serde::de::DeserializeOwned;

use super::call::{Call, Caller, Verb};
use crate::attachment::HostEnd;
use crate::cni::args::Args;
use crate::cni::json::Json;
use crate::cni::{Attachment, CniResult, NetConf, SpecVersion};
use crate::error::{Context, Error, Result};
use crate::log;
use crate::netfilter::PacketFilter;
use crate::netlink::Netlink;

/// Whether the call only removes.
pub(super) fn removes(call: &Call<'_>) -> bool {
    matches!(Verb::parse(&call.env.command), Some(Verb::Del | Verb::Gc))
}

/// Warns of a key that counts as absent because it does not decode.
pub(super) fn absent(error: &Error) {
    log::warn(format_args!("a key counts as absent: {error}"));
}

/// The context of one call.
#[derive(Debug)]
pub struct Cx<'a> {
    /// The configuration's common keys.
    pub net: NetConf,
    /// The version of the request, and so of the result.
    pub version: SpecVersion,
    pub(super) call: &'a Call<'a>,
    host: OnceCell<Netlink>,
    filter: PacketFilter,
    end: Cell<Option<HostEnd>>,
    /// For GC.
    pub(super) in_doubt: OnceCell<Vec<Attachment>>,
}

impl<'a> Cx<'a> {
    pub(super) fn new(call: &'a Call<'a>, net: NetConf, version: SpecVersion) -> Cx<'a> {
        let (host, end, in_doubt) = (OnceCell::new(), Cell::new(None), OnceCell::new());
        Cx { net, version, call, host, filter: PacketFilter::new(), end, in_doubt }
    }

    /// Whether the call only removes: nothing that was written wrong after ADD may keep it from that.
    pub(super) fn removes(&self) -> bool {
        removes(self.call)
    }

    /// Decodes a part of the configuration, absent as its default. For DEL and GC a key that does not decode counts as
    /// absent, with a warning.
    pub fn decode<T: Default + DeserializeOwned>(&self, part: Option<&Json>) -> Result<T> {
        let Some(json) = part else { return Ok(T::default()) };
        if self.removes() {
            Ok(json.decode_sound(&absent).unwrap_or_default())
        } else {
            json.decode()
        }
    }

    /// The packet filter of the namespace of the plugin's process.
    pub fn filter(&self) -> &PacketFilter {
        &self.filter
    }

    /// Netlink in the namespace of the plugin's process, opened on first use.
    pub fn host(&self) -> Result<&Netlink> {
        if let Some(host) = self.host.get() {
            return Ok(host);
        }
        let opened = Netlink::open()?;
        Ok(self.host.get_or_init(|| opened))
    }

    /// Sets the host's end of the attachment's veth pair, for the IPAM plugin and the record.
    pub fn set_end(&self, end: Option<HostEnd>) {
        self.end.set(end);
    }

    /// The host's end of the attachment's veth pair: of this plugin, else of the plugin that calls this one in this process.
    pub fn end(&self) -> Option<HostEnd> {
        let of_caller = match self.call.caller {
            Caller::Plugin(end) => end,
            Caller::Runtime => None,
        };
        self.end.get().or(of_caller)
    }

    /// For STATUS: as [`host`](Cx::host), and fails without the capability `CAP_NET_ADMIN`.
    pub fn usable_host(&self) -> Result<&Netlink> {
        let host = self.host().or_unavailable()?;
        host.require_admin().or_unavailable()?;
        Ok(host)
    }

    /// `CNI_ARGS`, for a plugin that reads its keys `known`. Plugins without documented keys do not parse
    /// `CNI_ARGS`.
    pub fn args(&self, known: &[&str]) -> Result<Args> {
        Args::parse(&self.call.env.args, known)
    }

    /// `MAC` of `CNI_ARGS`, for a plugin that reads no other key; empty if absent.
    pub fn mac_arg(&self) -> Result<String> {
        let mac = self.args(&["MAC"])?.get("MAC", |text| Ok(text.to_owned()))?;
        Ok(mac.unwrap_or_default())
    }

    /// `CNI_ARGS` unparsed, for a plugin with its own syntax.
    pub fn raw_args(&self) -> &str {
        &self.call.env.args
    }

    /// Fails if a result of this version cannot represent these addresses: before 0.3.0 there is at most one of each
    /// family. `is_ipv4` is the family of each address.
    pub fn require_one_per_family(&self, is_ipv4: impl Iterator<Item = bool>) -> Result<()> {
        let (v4, v6): (Vec<bool>, Vec<bool>) = is_ipv4.partition(|is_ipv4| *is_ipv4);
        let version = self.version;
        if version >= SpecVersion::V0_3_0 || (v4.len() <= 1 && v6.len() <= 1) {
            return Ok(());
        }
        let msg = format!("CNI version {version} does not support more than 1 address per family");
        Err(Error::config(msg))
    }

    /// The MTU in the interface objects of this version: the key exists since 1.1.0, and older results are compared
    /// without it.
    pub fn reported_mtu(&self, mtu: u32) -> u32 {
        if self.version >= SpecVersion::V1_1_0 { mtu } else { 0 }
    }

    /// Completes the result of an interface plugin: removes MTUs and PCI functions that the version does not have, and
    /// replaces the IPAM plugin's `dns` by the configuration's.
    pub fn finish(&self, result: &mut CniResult) {
        for interface in &mut result.interfaces {
            interface.mtu = self.reported_mtu(interface.mtu);
            if self.version < SpecVersion::V1_1_0 {
                interface.pci_id.clear();
            }
        }
        if let Some(dns) = &self.net.dns {
            result.dns = dns.clone();
        }
    }
}
