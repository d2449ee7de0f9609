//! Tables, chains, sets and maps: constants that name an object and describe how to create it;
//! elements.

use std::fmt;

use nix::libc;

use super::super::attribute::{AttributeBuilder, ReplyAttribute};
use super::super::request::NetlinkRequest;
use super::flavour::SetFlavour;
use super::message_type;
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::userdata::{key_expression, write_comment, write_userdata};
use super::value::{ElementKey, ValueType, byte_order, length_of_types, type_number};
use crate::netlink;

/// Priority of chains that translate destinations; `dstnat` in nft.
pub const DSTNAT: i32 = NF_IP_PRI_NAT_DST;
/// Priority of chains that translate sources; `srcnat` in nft.
pub const SRCNAT: i32 = NF_IP_PRI_NAT_SRC;
/// Priority of filters; `filter` in nft.
pub const FILTER: i32 = NF_IP_PRI_FILTER;
/// Priority of filters in the bridge family; `filter` in nft: `NF_BR_PRI_FILTER_BRIDGED`, which
/// [`libc`] lacks.
pub const BRIDGE_FILTER: i32 = -200;
/// Priority before connection tracking; `raw` in nft.
pub const RAW: i32 = NF_IP_PRI_RAW;

/// The family of a table: the traffic that its chains see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TableFamily {
    /// IPv4 and IPv6.
    Inet = NFPROTO_INET as isize,
    Ip = NFPROTO_IPV4 as isize,
    Ip6 = NFPROTO_IPV6 as isize,
    /// Frames that a bridge forwards.
    Bridge = NFPROTO_BRIDGE as isize,
    /// Frames of one link.
    Netdev = NFPROTO_NETDEV as isize,
}

impl From<netlink::IpFamily> for TableFamily {
    fn from(family: netlink::IpFamily) -> TableFamily {
        match family {
            netlink::IpFamily::V4 => TableFamily::Ip,
            netlink::IpFamily::V6 => TableFamily::Ip6,
        }
    }
}

impl fmt::Display for TableFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TableFamily::Inet => "inet",
            TableFamily::Ip => "ip",
            TableFamily::Ip6 => "ip6",
            TableFamily::Bridge => "bridge",
            TableFamily::Netdev => "netdev",
        })
    }
}

/// The name of a table, with the settings for creating it.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NftTable<'a> {
    pub(super) family: TableFamily,
    pub(super) name: &'a str,
    pub(super) comment: Option<&'a str>,
}

impl<'a> NftTable<'a> {
    /// A table of any family.
    pub const fn new(family: TableFamily, name: &'a str) -> NftTable<'a> {
        NftTable { family, name, comment: None }
    }

    /// A table for both IP families.
    pub const fn new_inet(name: &'a str) -> NftTable<'a> {
        NftTable::new(TableFamily::Inet, name)
    }

    /// Adds a comment (Linux 5.10).
    pub const fn with_comment(self, text: &'a str) -> NftTable<'a> {
        NftTable { comment: Some(text), ..self }
    }

    /// The regular chain `name` of this table. [`NftChain::at_filter_hook`] and
    /// [`NftChain::at_nat_hook`] make it a base chain.
    pub const fn named_chain(self, name: &'a str) -> NftChain<'a> {
        NftChain { table: self, name, base: None, comment: None }
    }

    pub const fn named_set(self, name: &'a str, key: &'a [ValueType]) -> NftSet<'a> {
        NftSet { table: self, name, key, data: None, flavour: SetFlavour::Plain }
    }

    /// The map `name` of this table from `key` to `data`.
    pub const fn value_map(
        self,
        name: &'a str,
        key: &'a [ValueType],
        data: &'a [ValueType],
    ) -> NftSet<'a> {
        NftSet { data: Some(MapDataType::Values(data)), ..self.named_set(name, key) }
    }

    /// The map `name` of this table from `key` to a verdict.
    pub const fn verdict_map(self, name: &'a str, key: &'a [ValueType]) -> NftSet<'a> {
        NftSet { data: Some(MapDataType::Verdict), ..self.named_set(name, key) }
    }
}

impl fmt::Display for NftTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.family, self.name)
    }
}

/// The hook of a base chain, by its number in `linux/netfilter.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetfilterHook {
    Prerouting = libc::NF_INET_PRE_ROUTING as isize,
    Input = libc::NF_INET_LOCAL_IN as isize,
    Forward = libc::NF_INET_FORWARD as isize,
    Output = libc::NF_INET_LOCAL_OUT as isize,
    Postrouting = libc::NF_INET_POST_ROUTING as isize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BaseChain<'a> {
    kind: &'static str,
    hook: u32,
    priority: i32,
    /// The link of a chain at the hook ingress.
    device: Option<&'a str>,
}

/// The name of a chain, with the settings for creating it.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NftChain<'a> {
    pub table: NftTable<'a>,
    pub name: &'a str,
    base: Option<BaseChain<'a>>,
    comment: Option<&'a str>,
}

impl<'a> NftChain<'a> {
    /// `type filter hook .. priority ..`
    pub const fn at_filter_hook(self, hook: NetfilterHook, priority: i32) -> NftChain<'a> {
        NftChain {
            base: Some(BaseChain { kind: "filter", hook: hook as u32, priority, device: None }),
            ..self
        }
    }

    /// `type filter hook ingress device ".." priority ..`, in a table of the family netdev, which
    /// sees all frames, or inet (Linux 5.10), which sees packets.
    pub const fn at_ingress_of(self, device: &'a str, priority: i32) -> NftChain<'a> {
        let is_inet = matches!(self.table.family, TableFamily::Inet);
        let hook = if is_inet { NF_INET_INGRESS } else { NF_NETDEV_INGRESS };
        let base = BaseChain { kind: "filter", hook, priority, device: Some(device) };
        NftChain { base: Some(base), ..self }
    }

    /// `type nat hook .. priority ..`
    pub const fn at_nat_hook(self, hook: NetfilterHook, priority: i32) -> NftChain<'a> {
        NftChain {
            base: Some(BaseChain { kind: "nat", hook: hook as u32, priority, device: None }),
            ..self
        }
    }

    /// Whether this is a chain of [`NftChain::at_ingress_of`].
    pub fn is_at_device(&self) -> bool {
        self.base.is_some_and(|base| base.device.is_some())
    }

    /// Adds a comment (Linux 5.10).
    pub const fn with_comment(self, text: &'a str) -> NftChain<'a> {
        NftChain { comment: Some(text), ..self }
    }
}

impl fmt::Display for NftChain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.table, self.name)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum MapDataType<'a> {
    Values(&'a [ValueType]),
    Verdict,
}

/// A set, or a map: a set whose elements have data.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NftSet<'a> {
    pub table: NftTable<'a>,
    pub(super) name: &'a str,
    pub(super) key: &'a [ValueType],
    pub(super) data: Option<MapDataType<'a>>,
    pub(super) flavour: SetFlavour,
}

impl fmt::Display for NftSet<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.data.is_some() { "map" } else { "set" };
        write!(f, "{kind} {} {}", self.table, self.name)
    }
}

/// A table, chain or set, encoded for messages to the kernel.
#[derive(Debug)]
pub struct NftObject {
    /// `NFT_MSG_NEW..` with the attributes that name the object; `NFT_MSG_GET..` and
    /// `NFT_MSG_DEL..` are the next two types.
    pub(super) request: NetlinkRequest,
    /// The other attributes for creating the object.
    pub(super) settings: AttributeBuilder,
    /// Kind and name, for errors.
    pub(super) text: String,
}

impl From<NftTable<'_>> for NftObject {
    fn from(table: NftTable<'_>) -> NftObject {
        let mut settings = AttributeBuilder::new();
        // Clears `dormant`, but not of a table of others, which has no comment of ours.
        table.comment.map(|_| settings.put_u32_be(NFTA_TABLE_FLAGS, 0));
        write_comment(&mut settings, NFTA_TABLE_USERDATA, table.comment);
        let request = table_request(NFT_MSG_NEWTABLE, table);
        NftObject { request, settings, text: format!("table {table}") }
    }
}

impl From<NftChain<'_>> for NftObject {
    fn from(chain: NftChain<'_>) -> NftObject {
        let mut settings = AttributeBuilder::new();
        if let Some(BaseChain { kind, hook, priority, device }) = chain.base {
            settings.put_nested(NFTA_CHAIN_HOOK, |list| {
                list.put_u32_be(NFTA_HOOK_HOOKNUM, hook).put_u32_be(NFTA_HOOK_PRIORITY, priority);
                // As the kernel lists them, for `is_at_hook`; of the two, it reads the first.
                if let Some(device) = device {
                    list.put_text(NFTA_HOOK_DEV, device);
                    list.put_nested(NFTA_HOOK_DEVS, |all| all.put_text(NFTA_DEVICE_NAME, device));
                }
                list
            });
            settings.put_text(NFTA_CHAIN_TYPE, kind);
        }
        write_comment(&mut settings, NFTA_CHAIN_USERDATA, chain.comment);
        let mut request = table_request(NFT_MSG_NEWCHAIN, chain.table);
        request.body.put_text(NFTA_CHAIN_NAME, chain.name);
        NftObject { request, settings, text: format!("chain {chain}") }
    }
}

impl From<NftSet<'_>> for NftObject {
    fn from(set: NftSet<'_>) -> NftObject {
        let mut settings = AttributeBuilder::new();
        let flags = if set.data.is_some() { NFT_SET_MAP } else { 0 };
        settings.put_u32_be(NFTA_SET_FLAGS, flags | set.flavour.flags(set.key));
        set.flavour.write_settings(set.key, &mut settings);
        settings.put_u32_be(NFTA_SET_KEY_TYPE, type_number(set.key));
        settings.put_u32_be(NFTA_SET_KEY_LEN, length_of_types(set.key));
        // The byte orders, by which nft prints keys and data.
        let mut userdata = Vec::new();
        write_userdata(0, &byte_order(set.key).to_ne_bytes(), &mut userdata);
        if let Some(data) = set.data {
            let (number, length, byteorder) = match data {
                MapDataType::Values(types) => {
                    (type_number(types), length_of_types(types), byte_order(types))
                }
                MapDataType::Verdict => (NFT_DATA_VERDICT, 0, 0),
            };
            settings.put_u32_be(NFTA_SET_DATA_TYPE, number).put_u32_be(NFTA_SET_DATA_LEN, length);
            write_userdata(1, &byteorder.to_ne_bytes(), &mut userdata);
        }
        if set.key.contains(&ValueType::DiscoveryTarget) {
            write_userdata(3, &key_expression(set.key), &mut userdata);
        }
        settings.put_bytes(NFTA_SET_USERDATA, &userdata);
        let mut request = table_request(NFT_MSG_NEWSET, set.table);
        request.body.put_text(NFTA_SET_NAME, set.name);
        NftObject { request, settings, text: set.to_string() }
    }
}

pub(super) fn table_request(message: u16, table: NftTable<'_>) -> NetlinkRequest {
    let mut request = NetlinkRequest::new_netfilter(message_type(message), table.family as u8);
    request.body.put_text(NFTA_TABLE_NAME, table.name);
    request
}

pub(super) fn rule_request(message: u16, chain: NftChain<'_>) -> NetlinkRequest {
    let mut request = table_request(message, chain.table);
    request.body.put_text(NFTA_RULE_CHAIN, chain.name);
    request
}

pub(super) fn element_request(message: u16, set: NftSet<'_>) -> NetlinkRequest {
    let mut request = table_request(message, set.table);
    request.body.put_text(NFTA_SET_ELEM_LIST_SET, set.name);
    request
}

/// The verdict on a packet: `NF_*` or `NFT_*`, and the chain of a jump.
#[must_use]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PacketVerdict {
    pub(super) code: c_int,
    pub(super) chain: Option<String>,
}

impl PacketVerdict {
    /// Ends this base chain; later chains can still drop the packet.
    pub const ACCEPT: PacketVerdict = PacketVerdict { code: NF_ACCEPT, chain: None };
    pub const DROP: PacketVerdict = PacketVerdict { code: NF_DROP, chain: None };
    /// Continues with the next rule.
    pub const CONTINUE: PacketVerdict = PacketVerdict { code: NFT_CONTINUE, chain: None };
    /// Returns to the calling chain.
    pub const RETURN: PacketVerdict = PacketVerdict { code: NFT_RETURN, chain: None };

    /// Continues in another chain, and returns.
    pub fn jump_to(chain: impl Into<String>) -> PacketVerdict {
        PacketVerdict { code: NFT_JUMP, chain: Some(chain.into()) }
    }

    /// Continues in another chain, without returning.
    pub fn go_to(chain: impl Into<String>) -> PacketVerdict {
        PacketVerdict { code: NFT_GOTO, chain: Some(chain.into()) }
    }

    /// The verdict in data.
    pub(super) fn parse_data(data: ReplyAttribute<'_>) -> Option<PacketVerdict> {
        let verdict = data.find_nested(NFTA_DATA_VERDICT)?;
        let code = verdict.find_nested(NFTA_VERDICT_CODE)?.to_u32_be()?.cast_signed();
        Some(PacketVerdict {
            code,
            chain: verdict.find_nested(NFTA_VERDICT_CHAIN).map(ReplyAttribute::to_text),
        })
    }

    /// The chain of a jump or goto.
    pub fn target_chain(&self) -> Option<&str> {
        self.chain.as_deref()
    }

    pub(super) fn write_data<'a>(
        &self,
        list: &'a mut AttributeBuilder,
    ) -> &'a mut AttributeBuilder {
        list.put_nested(NFTA_DATA_VERDICT, |verdict| {
            verdict.put_u32_be(NFTA_VERDICT_CODE, self.code);
            match &self.chain {
                Some(chain) => verdict.put_text(NFTA_VERDICT_CHAIN, chain),
                None => verdict,
            }
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElementData {
    /// The data of an element of a [map of values](NftTable::value_map).
    Values(ElementKey),
    /// The data of an element of a [verdict map](NftTable::verdict_map).
    Verdict(PacketVerdict),
}

/// The comment of [sentinels](NftSet::sentinel_element), which no owner of elements uses.
pub(super) const SENTINEL: &str = "cnibox: not flushed";

impl NftSet<'static> {
    /// The element with this key, without data.
    pub fn element_with_key(self, key: impl Into<ElementKey>) -> SetElement {
        SetElement { set: self, key: key.into(), data: None, comment: None }
    }

    /// An element that no packet matches: while it exists, the set has not been flushed.
    pub fn sentinel_element(self) -> SetElement {
        let unmatched = |types: &[ValueType]| {
            ElementKey(types.iter().map(|part| part.unmatched_value()).collect())
        };
        let data = self.data.map(|data| match data {
            MapDataType::Values(types) => ElementData::Values(unmatched(types)),
            MapDataType::Verdict => ElementData::Verdict(PacketVerdict::CONTINUE),
        });
        SetElement { data, ..self.element_with_key(unmatched(self.key)).with_comment(SENTINEL) }
    }
}

/// An element of a set or map, made by [`NftSet::element_with_key`].
#[must_use]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetElement {
    pub set: NftSet<'static>,
    pub key: ElementKey,
    /// `None` for an element of a set.
    pub data: Option<ElementData>,
    pub comment: Option<String>,
}

impl SetElement {
    /// Adds the data of an element of a map of values.
    pub fn with_values(mut self, value: impl Into<ElementKey>) -> SetElement {
        self.data = Some(ElementData::Values(value.into()));
        self
    }

    /// Adds the data of an element of a verdict map.
    pub fn with_verdict(mut self, verdict: PacketVerdict) -> SetElement {
        self.data = Some(ElementData::Verdict(verdict));
        self
    }

    pub fn with_comment(mut self, text: impl Into<String>) -> SetElement {
        self.comment = Some(text.into());
        self
    }

    /// The chain of a `jump` or `goto`.
    pub fn target_chain(&self) -> Option<&str> {
        let Some(ElementData::Verdict(verdict)) = &self.data else { return None };
        verdict.chain.as_deref()
    }

    /// A request for this element with its key, and if `whole` also with data and comment.
    pub(super) fn to_request(&self, message: u16, whole: bool) -> NetlinkRequest {
        let mut request = element_request(message, self.set);
        request.body.put_nested(NFTA_SET_ELEM_LIST_ELEMENTS, |list| {
            list.put_nested(NFTA_LIST_ELEM, |elem| {
                elem.put_nested(NFTA_SET_ELEM_KEY, |d| write_value(d, &self.key.to_bytes()));
                if !whole {
                    return elem;
                }
                if let Some(data) = &self.data {
                    elem.put_nested(NFTA_SET_ELEM_DATA, |d| match data {
                        ElementData::Values(values) => write_value(d, &values.to_bytes()),
                        ElementData::Verdict(verdict) => verdict.write_data(d),
                    });
                }
                write_comment(elem, NFTA_SET_ELEM_USERDATA, self.comment.as_deref())
            })
        });
        request
    }
}

impl fmt::Display for SetElement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.key.fmt(f)
    }
}

pub(super) fn write_value<'a>(
    list: &'a mut AttributeBuilder,
    bytes: &[u8],
) -> &'a mut AttributeBuilder {
    list.put_bytes(NFTA_DATA_VALUE, bytes)
}
