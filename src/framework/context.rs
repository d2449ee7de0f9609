//! The context of a call: configuration, netlink in the host's namespace, `CNI_ARGS`.

use std::cell::{Cell, OnceCell};

use serde::de::DeserializeOwned;

use super::call::{PluginCall, PluginCaller};
use super::rollback::Rollback;
use crate::attachment::HostVeth;
use crate::netfilter::backend::FilterFeature;
use crate::netfilter::masquerade::{self, MasqueradeOptions};
use crate::netfilter::reconcile::require_serviceable;
use crate::netfilter::{AttachmentId, PacketFilter, RuleBackend};
use crate::netlink::Netlink;
use cni::args::CniArgPairs;
use cni::error::{Error, ErrorContext, Result};
use cni::json::Json;
use cni::plugin::{CniVerb, DecodedRequest, absent_key_warning};
use cni::{CniResult, NetworkConfig, SpecVersion, ValidAttachment};

/// Warns of a key that counts as absent because it does not decode.
fn warn_absent_key(error: &Error) {
    warn!("{}", absent_key_warning(error));
}

/// What an ADD that has the turn knows of the attachment's record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum KnownRecord {
    #[default]
    Unknown,
    Absent,
    /// Written by an earlier plugin of the list, for the same container.
    Current,
}

#[derive(Debug)]
pub struct CallContext<'a> {
    /// The configuration's common keys.
    pub net: NetworkConfig,
    /// The version of the request, and so of the result.
    pub version: SpecVersion,
    pub(super) verb: CniVerb,
    pub(super) call: &'a PluginCall<'a>,
    host: OnceCell<Netlink>,
    filter: PacketFilter,
    end: Cell<Option<HostVeth>>,
    pub(super) record: Cell<KnownRecord>,
    /// The attachments that GC treats as valid although the runtime does not list them.
    pub(super) unlisted: OnceCell<Vec<ValidAttachment>>,
}

impl<'a> CallContext<'a> {
    pub(super) fn new(call: &'a PluginCall<'a>, request: DecodedRequest) -> CallContext<'a> {
        CallContext {
            net: request.config,
            version: request.version,
            verb: request.verb,
            call,
            host: OnceCell::new(),
            filter: PacketFilter::new(),
            end: Cell::new(None),
            record: Cell::default(),
            unlisted: OnceCell::new(),
        }
    }

    /// Whether the call only removes (DEL, GC). A mistake that was made in the configuration after
    /// ADD must not prevent that.
    pub(super) fn is_removal(&self) -> bool {
        self.verb.only_removes()
    }

    /// The plugin's keys of the configuration. For DEL and GC a key that does not decode counts as
    /// absent, with a warning.
    pub(super) fn decode_keys<K: DeserializeOwned>(&self) -> Result<K> {
        self.net.decode_keys(self.is_removal().then_some(&warn_absent_key))
    }

    /// Whether the call is `cnibox gc`'s DEL of an attachment that has ended: its links are gone,
    /// links with its names are of a later container, and its leases are released by what
    /// proves their end.
    pub fn is_collected(&self) -> bool {
        self.call.is_collected()
    }

    /// Decodes a part of the configuration, absent as its default. For DEL and GC a key that does
    /// not decode counts as absent, with a warning.
    pub fn decode_part<T: Default + DeserializeOwned>(&self, part: Option<&Json>) -> Result<T> {
        let Some(json) = part else { return Ok(T::default()) };
        if self.is_removal() {
            Ok(json.decode_valid_members(&warn_absent_key).unwrap_or_default())
        } else {
            json.decode()
        }
    }

    /// The packet filter of the namespace of the plugin's process.
    pub fn packet_filter(&self) -> &PacketFilter {
        &self.filter
    }

    /// Masquerades the addresses of the result with the configured back end, else the default one.
    /// The caller has [recorded](CallContext::record_attachment) the attachment.
    pub fn masquerade_result(
        &'a self,
        configured: Option<RuleBackend>,
        owner: AttachmentId<'a>,
        result: &CniResult,
        options: &MasqueradeOptions,
        undo: &mut Rollback<'a>,
    ) -> Result<()> {
        let (filter, addrs) = (&self.filter, result.all_addresses());
        let backend = RuleBackend::choose_for_add(configured, filter, &masquerade::FEATURE);
        let registered = addrs.clone();
        undo.add_step("end masquerading", move || {
            masquerade::delete_addresses(filter, owner, &registered)
        });
        masquerade::add_addresses(filter, backend, owner, &addrs, options)
    }

    /// For STATUS: [`require_serviceable`]. `cnibox lint` changes nothing on the node.
    pub fn require_serviceable(
        &self,
        backend: Option<RuleBackend>,
        features: &[FilterFeature],
    ) -> Result<()> {
        let features = if self.call.caller == PluginCaller::Lint { &[] } else { features };
        require_serviceable(&self.filter, backend, features)
    }

    /// Netlink in the namespace of the plugin's process, opened on first use.
    pub fn host_netlink(&self) -> Result<&Netlink> {
        if let Some(host) = self.host.get() {
            return Ok(host);
        }
        let opened = Netlink::open()?;
        Ok(self.host.get_or_init(|| opened))
    }

    /// Sets the host's end of the attachment's veth pair, which the IPAM plugin and the record get.
    pub fn set_host_end(&self, end: Option<HostVeth>) {
        self.end.set(end);
    }

    /// The host's end of the attachment's veth pair, created by this plugin, else by the plugin
    /// that calls this one in the same process.
    pub fn host_end(&self) -> Option<HostVeth> {
        let of_caller = if let PluginCaller::Plugin(end) = self.call.caller { end } else { None };
        self.end.get().or(of_caller)
    }

    /// For STATUS: as [`host_netlink`](CallContext::host_netlink), but fails without the capability
    /// `CAP_NET_ADMIN`.
    pub fn usable_host_netlink(&self) -> Result<&Netlink> {
        let host = self.host_netlink().or_unavailable()?;
        host.require_net_admin().or_unavailable()?;
        Ok(host)
    }

    /// `CNI_ARGS`, for a plugin that reads its keys `known`. Plugins without documented keys do not
    /// parse `CNI_ARGS`.
    pub fn parse_args(&self, known: &[&str]) -> Result<CniArgPairs> {
        CniArgPairs::parse(&self.call.env.args, known)
    }

    /// `MAC` of `CNI_ARGS`, for a plugin that reads no other key; empty if absent.
    pub fn mac_arg(&self) -> Result<String> {
        let mac = self.parse_args(&["MAC"])?.parse_value("MAC", |text| Ok(text.to_owned()))?;
        Ok(mac.unwrap_or_default())
    }

    /// `CNI_ARGS` unparsed, for a plugin with its own syntax.
    pub fn raw_args(&self) -> &str {
        &self.call.env.args
    }

    /// Fails if a result of this version cannot represent these addresses: before 0.3.0 there is at
    /// most one of each family. `is_ipv4` is the family of each address.
    pub fn require_one_per_family(&self, is_ipv4: impl Iterator<Item = bool>) -> Result<()> {
        let (v4, v6): (Vec<bool>, Vec<bool>) = is_ipv4.partition(|is_ipv4| *is_ipv4);
        let version = self.version;
        if version >= SpecVersion::V0_3_0 || (v4.len() <= 1 && v6.len() <= 1) {
            return Ok(());
        }
        let msg = format!("CNI version {version} does not support more than 1 address per family");
        Err(Error::config(msg))
    }

    /// The MTU for interface objects of results of this version, which have one since 1.1.0. Older
    /// results are compared without it.
    pub fn reported_mtu(&self, mtu: u32) -> u32 {
        if self.version >= SpecVersion::V1_1_0 { mtu } else { 0 }
    }

    /// Completes the result of an interface plugin: removes MTUs and PCI functions that the version
    /// does not have, and replaces the IPAM plugin's `dns` by the configuration's.
    pub fn finish_result(&self, result: &mut CniResult) {
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
