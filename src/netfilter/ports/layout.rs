//! The table `inet cnibox_portmap`.
//!
//! Only packets to an address of the host itself are looked at, whatever port they are for. The
//! chains never change; containers come and go as elements, and only mappings with conditions of
//! their own as rules, in the chain `conditional`:
//!
//! | map | element | |
//! | --- | --- | --- |
//! | `any4`, `any6` | protocol . port : address . port | a port on every local address |
//! | `host4`, `host6` | address . protocol . port : address . port | on one; it wins over `any` |
//! | `mapped4`, `mapped6` | container : goto `from-..` | containers whose clients' source is translated |
//! | `attachments` | hash . hash : count | the number of an attachment's elements above |
//!
//! The chain `from-10.1.2.0/24` translates the source of clients in that subnet and of the host's
//! loopback addresses, `from-all` the source of all clients; a chain comes with the first element that leads to it.

use std::net::Ipv4Addr;

use ipnet::{IpNet, Ipv4Net};

use super::{Snat, Target};
use crate::netfilter::backend::Family;
use crate::netfilter::layout::Layout;
use crate::netlink::nftables::{
    CT_STATUS_DNAT, Chain, DSTNAT, Element, Field, Hook, Rule, SRCNAT, Set, Table, Type, Verdict,
};

pub(super) const TABLE: Table<'_> =
    Table::inet("cnibox_portmap").comment("host ports of containers, by cnibox portmap");

const HOSTPORTS: Chain<'_> = TABLE.chain("hostports");
/// The rules of mappings that have conditions, with their owners' comments.
pub(super) const CONDITIONAL: Chain<'_> = TABLE.chain("conditional");
const PREROUTING: Chain<'_> = TABLE.chain("prerouting").nat(Hook::Prerouting, DSTNAT);
const OUTPUT: Chain<'_> = TABLE.chain("output").nat(Hook::Output, DSTNAT);
const POSTROUTING: Chain<'_> = TABLE.chain("postrouting").nat(Hook::Postrouting, SRCNAT);

/// What the names of chains begin with that elements lead to.
const FROM: &str = "from-";

const PORT: [Type; 2] = [Type::InetProto, Type::InetService];
const PORT4: [Type; 3] = [Type::Ipv4Addr, Type::InetProto, Type::InetService];
const PORT6: [Type; 3] = [Type::Ipv6Addr, Type::InetProto, Type::InetService];
const TO4: [Type; 2] = [Type::Ipv4Addr, Type::InetService];
const TO6: [Type; 2] = [Type::Ipv6Addr, Type::InetService];

/// One element for each attachment: its instance hash, in two halves that fit names.
pub(super) const ATTACHMENTS: Set<'_> =
    TABLE.map("attachments", &[Type::IfName, Type::IfName], &[Type::Mark]);

/// The maps of a family.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sets {
    pub(super) any: Set<'static>,
    pub(super) host: Set<'static>,
    pub(super) mapped: Set<'static>,
}

const V4: Sets = Sets {
    any: TABLE.map("any4", &PORT, &TO4),
    host: TABLE.map("host4", &PORT4, &TO4),
    mapped: TABLE.vmap("mapped4", &[Type::Ipv4Addr]),
};

const V6: Sets = Sets {
    any: TABLE.map("any6", &PORT, &TO6),
    host: TABLE.map("host6", &PORT6, &TO6),
    mapped: TABLE.vmap("mapped6", &[Type::Ipv6Addr]),
};

impl Sets {
    pub(super) fn of(family: Family) -> Sets {
        match family {
            Family::V4 => V4,
            Family::V6 => V6,
        }
    }

    /// All that rules use, with elements of containers.
    pub(super) fn all() -> impl Iterator<Item = Set<'static>> {
        [V4, V6].into_iter().flat_map(|s| [s.any, s.host, s.mapped])
    }
}

/// The table as it has to be.
pub(super) fn layout() -> Layout {
    let entry = || {
        let rule = Rule::new().daddr_is_local().jump(HOSTPORTS.name);
        vec![rule.comment("only what is sent to this host")]
    };
    let conditional = Rule::new().verdict(&Verdict::CONTINUE).comment("mappings with conditions");
    Layout {
        table: TABLE,
        sets: Sets::all().chain([ATTACHMENTS]).collect(),
        chains: vec![
            (CONDITIONAL, vec![conditional]),
            (HOSTPORTS, translate()),
            (PREROUTING, entry()),
            (OUTPUT, entry()),
            (POSTROUTING, masquerade()),
        ],
        subnet: from_rules,
    }
}

fn translate() -> Vec<Rule> {
    let (proto, port) = (Field::L4proto, Field::Dport);
    vec![
        Rule::new().jump(CONDITIONAL.name).comment("under conditions"),
        Rule::new().dnat_by(&[Field::IpDaddr, proto, port], V4.host).comment("one address"),
        Rule::new().dnat_by(&[proto, port], V4.any).comment("any address"),
        Rule::new().dnat_by(&[Field::Ip6Daddr, proto, port], V6.host).comment("one IPv6 address"),
        Rule::new().dnat_by(&[proto, port], V6.any).comment("any IPv6 address"),
    ]
}

fn masquerade() -> Vec<Rule> {
    let mapped = || Rule::new().any_of(Field::CtStatus, CT_STATUS_DNAT);
    vec![
        mapped().vmap(&[Field::IpDaddr], V4.mapped).comment("by container"),
        mapped().vmap(&[Field::Ip6Daddr], V6.mapped).comment("by IPv6 container"),
    ]
}

/// The chain for the clients of a container; none if they keep their source.
pub(super) fn from(snat: Snat, target: &Target) -> Option<String> {
    match snat {
        Snat::Never => None,
        Snat::WhereNeeded => Some(from_net(target.net)),
        Snat::Always => Some(format!("{FROM}all")),
    }
}

/// nft takes no colons in names.
fn from_net(net: IpNet) -> String {
    format!("{FROM}{}", net.trunc()).replace(':', "_")
}

/// The rules of such a chain.
fn from_rules(chain: &str) -> Option<Vec<Rule>> {
    let clients = chain.strip_prefix(FROM)?;
    if clients == "all" {
        return Some(vec![Rule::new().masquerade().comment("all clients")]);
    }
    let net: IpNet = clients.replace('_', ":").parse().ok()?;
    let loopback = Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8).into();
    let nets = [net].into_iter().chain(net.addr().is_ipv4().then_some(loopback));
    let rule = |net: IpNet| Rule::new().saddr_in(net).masquerade().comment(net.to_string());
    Some(nets.map(rule).collect())
}

/// Whose source is translated in such a chain, as ADD was told.
pub(super) fn snat_of(element: &Element) -> Option<Snat> {
    let all = element.leads_to()?.strip_prefix(FROM)? == "all";
    Some(if all { Snat::Always } else { Snat::WhereNeeded })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_named_after_the_clients() {
        let chain = |snat, net: &str| from(snat, &Target { net: net.parse().unwrap(), via: None });
        let four = chain(Snat::WhereNeeded, "10.1.2.3/24").unwrap();
        let six = chain(Snat::WhereNeeded, "2001:db8::5/64").unwrap();
        let all = chain(Snat::Always, "10.1.2.3/24").unwrap();
        assert_eq!([&four, &six, &all], ["from-10.1.2.0/24", "from-2001_db8__/64", "from-all"]);
        assert_eq!(
            [four, six, all].map(|chain| from_rules(&chain).map(|r| r.len())),
            [Some(2), Some(1), Some(1)]
        );
        assert!(from_rules("postrouting").is_none() && chain(Snat::Never, "::/0").is_none());
    }
}
