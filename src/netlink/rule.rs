//! Policy rules: which routing table a packet is looked up in.

use ipnet::IpNet;
use nix::libc::{RTM_DELRULE, RTM_GETRULE, RTM_NEWRULE};
use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::rule::{RuleAction, RuleAttribute, RuleHeader, RuleMessage};

use super::Netlink;
use super::error::Result;
use super::family::Family;
use super::link::unless_absent;
use super::packet::{Attr, Packet, attrs, ip};
use super::route::RT_TABLE_MAIN;

/// Length of `struct fib_rule_hdr`.
const HEADER_LEN: usize = 12;
/// `FIB_RULE_INVERT`: the rule is for what does not match.
const FIB_RULE_INVERT: u32 = 2;
/// `FRA_SRC`; libc has none of these.
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
pub struct Rule {
    /// The family of the packets.
    pub family: Family,
    /// Where the packets come from; `None` is anywhere.
    pub src: Option<IpNet>,
    pub table: u32,
    /// Lower ones are asked first. `None` lets the kernel put a new rule in front of the others.
    pub priority: Option<u32>,
    /// Whether the rule looks at nothing but the source: no interface, mark, port, other action.
    pub plain: bool,
}

impl Rule {
    /// Packets from exactly this address go to `table`.
    pub fn from_host(addr: std::net::IpAddr, table: u32) -> Rule {
        let src = Some(IpNet::from(addr));
        Rule { family: Family::of(addr), src, table, priority: None, plain: true }
    }

    fn message(&self) -> RuleMessage {
        let mut message = RuleMessage::default();
        message.header.family = Family::wire(Some(self.family));
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

    pub(super) fn parse(body: &[u8]) -> Option<Rule> {
        let header = RuleHeader::parse(body).ok()?;
        let family = match header.family {
            AddressFamily::Inet => Family::V4,
            AddressFamily::Inet6 => Family::V6,
            // The kernel lists the rules of multicast routing as well.
            _ => return None,
        };
        let plain = header.action == RuleAction::ToTable
            && header.dst_len == 0
            && header.tos == 0
            && header.flags.bits() & FIB_RULE_INVERT == 0;
        let table = u32::from(header.table);
        let mut rule = Rule { family, src: None, table, priority: None, plain };
        for attr in attrs(body.get(HEADER_LEN..)?) {
            rule.read(attr, header.src_len);
        }
        Some(rule)
    }

    fn read(&mut self, attr: Attr<'_>, src_len: u8) {
        match attr.kind {
            FRA_SRC => self.src = ip(attr.value).and_then(|ip| IpNet::new(ip, src_len).ok()),
            FRA_PRIORITY => self.priority = attr.u32(),
            FRA_TABLE => self.table = attr.u32().unwrap_or(self.table),
            // Always told; -1 suppresses nothing.
            FRA_SUPPRESS_PREFIXLEN | FRA_SUPPRESS_IFGROUP => {
                self.plain &= attr.u32() == Some(u32::MAX);
            }
            FRA_L3MDEV => self.plain &= attr.u8() == Some(0),
            FRA_PROTOCOL | FRA_PAD => {}
            // Whatever it is, it narrows the rule.
            _ => self.plain = false,
        }
    }
}

impl std::fmt::Display for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
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
    /// The rules of both families, those asked first in front of each.
    pub fn dump_rules(&self) -> Result<Vec<Rule>> {
        let bodies = self
            .dump(&Packet::new(RTM_GETRULE, &RuleMessage::default()))
            .map_err(|e| e.doing("list", || "rules".to_owned()))?;
        Ok(bodies.iter().filter_map(|body| Rule::parse(body)).collect())
    }

    /// Adds a rule; fails with [`is_exists`](super::Error::is_exists) if there is such a one.
    pub fn add_rule(&self, rule: &Rule) -> Result<()> {
        let message = Packet::new(RTM_NEWRULE, &rule.message());
        self.ack(message, NLM_F_CREATE | NLM_F_EXCL)
            .map_err(|e| e.doing("add rule", || rule.to_string()))
    }

    /// Deletes the first rule that has all that `rule` says; `false` if there was none.
    pub fn del_rule(&self, rule: &Rule) -> Result<bool> {
        let deleted = self.ack(Packet::new(RTM_DELRULE, &rule.message()), 0);
        unless_absent(deleted.map_err(|e| e.doing("delete rule", || rule.to_string())))
    }
}
