//! Policy rules: which routing table a packet is looked up in.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use nix::libc::{RTM_DELRULE, RTM_GETRULE, RTM_NEWRULE};
use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::rule::{RuleAction, RuleAttribute, RuleHeader, RuleMessage};

use super::attribute::{ReplyAttribute, parse_attributes};
use super::error::NetlinkResult;
use super::request::NetlinkRequest;
use super::route::RT_TABLE_MAIN;
use super::{IpFamily, Netlink};

/// Length of `struct fib_rule_hdr`.
const HEADER_LEN: usize = 12;
/// The flag of a rule for packets that do not match its conditions.
const FIB_RULE_INVERT: u32 = 2;
// Attributes, missing in libc.
const FRA_SRC: u16 = 2;
const FRA_PRIORITY: u16 = 6;
const FRA_SUPPRESS_IFGROUP: u16 = 13;
const FRA_SUPPRESS_PREFIXLEN: u16 = 14;
const FRA_TABLE: u16 = 15;
const FRA_PAD: u16 = 18;
const FRA_L3MDEV: u16 = 19;
const FRA_PROTOCOL: u16 = 21;

/// A rule that sends packets to a routing table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyRule {
    /// The family of the packets.
    pub family: IpFamily,
    /// The source of the packets; `None` for any.
    pub src: Option<IpNet>,
    pub table: u32,
    /// Rules are evaluated in ascending order. `None` inserts a new rule before the others.
    pub priority: Option<u32>,
    /// Whether the rule has no condition but the source, and no action but the lookup in the
    /// table.
    pub plain: bool,
}

impl PolicyRule {
    /// A lookup in `table` for packets from this address.
    pub fn from_host(addr: IpAddr, table: u32) -> PolicyRule {
        let src = Some(IpNet::from(addr));
        PolicyRule { family: IpFamily::of_address(addr), src, table, priority: None, plain: true }
    }

    fn to_message(&self) -> RuleMessage {
        let mut message = RuleMessage::default();
        message.header.family = IpFamily::af_number(Some(self.family)).into();
        message.header.action = RuleAction::ToTable;
        let attributes = &mut message.attributes;
        if let Some(src) = self.src {
            message.header.src_len = src.prefix_len();
            attributes.push(RuleAttribute::Source(src.addr()));
        }
        attributes.extend(self.priority.map(RuleAttribute::Priority));
        match u8::try_from(self.table) {
            Ok(table) => message.header.table = table,
            Err(_) => attributes.push(RuleAttribute::Table(self.table)),
        }
        message
    }

    pub(super) fn parse(body: &[u8]) -> Option<PolicyRule> {
        let header = RuleHeader::parse(body).ok()?;
        let family = match header.family {
            AddressFamily::Inet => IpFamily::V4,
            AddressFamily::Inet6 => IpFamily::V6,
            // The kernel also lists the rules of multicast routing.
            _ => return None,
        };
        let plain = header.action == RuleAction::ToTable
            && header.dst_len == 0
            && header.tos == 0
            && header.flags.bits() & FIB_RULE_INVERT == 0;
        let table = header.table.into();
        let mut rule = PolicyRule { family, src: None, table, priority: None, plain };
        for attr in parse_attributes(body.get(HEADER_LEN..)?) {
            rule.read_attribute(attr, header.src_len);
        }
        Some(rule)
    }

    fn read_attribute(&mut self, attr: ReplyAttribute<'_>, src_len: u8) {
        match attr.kind {
            FRA_SRC => self.src = attr.to_ip().and_then(|ip| IpNet::new(ip, src_len).ok()),
            FRA_PRIORITY => self.priority = attr.to_u32(),
            FRA_TABLE => self.table = attr.to_u32().unwrap_or(self.table),
            // Always present; -1 suppresses nothing.
            FRA_SUPPRESS_PREFIXLEN | FRA_SUPPRESS_IFGROUP => {
                self.plain &= attr.to_u32() == Some(u32::MAX);
            }
            FRA_L3MDEV => self.plain &= attr.to_u8() == Some(0),
            FRA_PROTOCOL | FRA_PAD => {}
            // Every other attribute is a condition.
            _ => self.plain = false,
        }
    }
}

impl fmt::Display for PolicyRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("from ")?;
        match self.src {
            Some(src) if src.prefix_len() == src.max_prefix_len() => write!(f, "{}", src.addr())?,
            Some(src) => write!(f, "{src}")?,
            None => f.write_str("all")?,
        }
        match self.table {
            RT_TABLE_MAIN => f.write_str(" lookup main"),
            table => write!(f, " lookup {table}"),
        }
    }
}

impl Netlink {
    /// The rules of both families, each family in the order of evaluation.
    pub fn dump_rules(&self) -> NetlinkResult<Vec<PolicyRule>> {
        let request = NetlinkRequest::new_route(RTM_GETRULE, &RuleMessage::default());
        self.socket.request_list(&request, "list", &"rules", PolicyRule::parse)
    }

    /// Adds a rule; fails with [`is_exists`](super::NetlinkError::is_exists) if the rule exists.
    pub fn add_rule(&self, rule: &PolicyRule) -> NetlinkResult<()> {
        let request = NetlinkRequest::new_route(RTM_NEWRULE, &rule.to_message());
        self.socket.request_change(&request, NLM_F_CREATE | NLM_F_EXCL, "add rule", rule)
    }

    /// Deletes the first rule that matches all fields of `rule`; `false` if there was none.
    pub fn delete_rule(&self, rule: &PolicyRule) -> NetlinkResult<bool> {
        self.socket.request_deletion(
            &NetlinkRequest::new_route(RTM_DELRULE, &rule.to_message()),
            "delete rule",
            rule,
        )
    }
}
