//! The table `inet cnibox_portmap`.
//!
//! Only packets to local addresses of the host are looked up, for any port. The chains never change; containers are
//! elements, and only mappings with conditions are rules, in the chain `conditional`:
//!
//! | map | element | |
//! | --- | --- | --- |
//! | `any4`, `any6` | protocol . port : address . port | a port on every local address |
//! | `host4`, `host6` | address . protocol . port : address . port | on one address; takes precedence over `any` |
//! | `mapped4`, `mapped6` | container : goto `from-..` | containers whose clients' source is translated |
//! | `attachments` | hash . hash : count | the number of an attachment's elements above |
//!
//! The chain `from-10.1.2.0/24` translates the source of clients in that subnet and of the host's loopback
//! addresses, `from-all` the source of all clients. Such a chain is created with the first element that jumps to it.
//! Connections that another program led to the container, such as those to a Service address, keep their source: a
//! bit of the connection's mark, set in `hostports` and cleared in `postrouting`, tells which ones were translated
//! here. So the bit is set only while the first packet of a connection passes the host.
//!
//! `::1` is not looked up: no packet with that source or destination can leave the host, so its translation would
//! only hide the host's own services.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net};

use super::Snat;
use crate::netfilter::layout::Layout;
use crate::netlink::nftables::{
    CT_STATUS_DNAT, Chain, DSTNAT, Element, Field, Hook, Rule, SRCNAT, Set, Table, Type, Verdict,
};

pub(super) const TABLE: Table<'_> =
    Table::inet("cnibox_portmap").comment("host ports of containers, by cnibox portmap");

const HOSTPORTS: Chain<'_> = TABLE.chain("hostports");
/// The rules of mappings with conditions, with their owners' comments.
pub(super) const CONDITIONAL: Chain<'_> = TABLE.chain("conditional");
const PREROUTING: Chain<'_> = TABLE.chain("prerouting").nat(Hook::Prerouting, DSTNAT);
const OUTPUT: Chain<'_> = TABLE.chain("output").nat(Hook::Output, DSTNAT);
const POSTROUTING: Chain<'_> = TABLE.chain("postrouting").nat(Hook::Postrouting, SRCNAT);

/// The prefix of the names of chains that elements jump to.
const FROM: &str = "from-";

const PORT: [Type; 2] = [Type::InetProto, Type::InetService];
const PORT4: [Type; 3] = [Type::Ipv4Addr, Type::InetProto, Type::InetService];
const PORT6: [Type; 3] = [Type::Ipv6Addr, Type::InetProto, Type::InetService];
const TO4: [Type; 2] = [Type::Ipv4Addr, Type::InetService];
const TO6: [Type; 2] = [Type::Ipv6Addr, Type::InetService];

/// One element for each attachment: its instance hash, in two halves of the length of interface names.
pub(super) const ATTACHMENTS: Set<'_> =
    TABLE.map("attachments", &[Type::IfName, Type::IfName], &[Type::Mark]);

/// The maps of each family.
pub(super) const ANY: [Set<'_>; 2] =
    [TABLE.map("any4", &PORT, &TO4), TABLE.map("any6", &PORT, &TO6)];
pub(super) const HOST: [Set<'_>; 2] =
    [TABLE.map("host4", &PORT4, &TO4), TABLE.map("host6", &PORT6, &TO6)];
pub(super) const MAPPED: [Set<'_>; 2] =
    [TABLE.vmap("mapped4", &[Type::Ipv4Addr]), TABLE.vmap("mapped6", &[Type::Ipv6Addr])];

/// The bit of a connection's mark between its translation and the translation of its source.
const TRANSLATED: u32 = 1 << 27;

const MARK: &str = "translated here";
const UNMARK: &str = "not translated here";
const SKIP: &str = "only what was translated here";
const FORGET: &str = "the mark has served its purpose";
const OWN: &str = "no container has ::1";

pub(super) fn layout() -> Layout {
    let entry = || {
        let rule = Rule::new().daddr_is_local().jump(HOSTPORTS.name);
        rule.comment("only what is sent to this host")
    };
    let own = Rule::new().daddr(Ipv6Addr::LOCALHOST.into()).ret().comment(OWN);
    let conditional = Rule::new().verdict(&Verdict::CONTINUE).comment("mappings with conditions");
    let (proto, port) = (Field::L4proto, Field::Dport);
    let translate = vec![
        Rule::new().set_ct_mark(TRANSLATED).comment(MARK),
        Rule::new().jump(CONDITIONAL.name).comment("under conditions"),
        Rule::new().dnat_by(&[Field::IpDaddr, proto, port], HOST[0]).comment("one address"),
        Rule::new().dnat_by(&[proto, port], ANY[0]).comment("any address"),
        Rule::new().dnat_by(&[Field::Ip6Daddr, proto, port], HOST[1]).comment("one IPv6 address"),
        Rule::new().dnat_by(&[proto, port], ANY[1]).comment("any IPv6 address"),
        Rule::new().clear_ct_mark(TRANSLATED).comment(UNMARK),
    ];
    let mapped = || Rule::new().any_of(Field::CtStatus, CT_STATUS_DNAT);
    let masquerade = vec![
        Rule::new().none_of(Field::CtMark, TRANSLATED).ret().comment(SKIP),
        Rule::new().clear_ct_mark(TRANSLATED).comment(FORGET),
        mapped().vmap(&[Field::IpDaddr], MAPPED[0]).comment("by container"),
        mapped().vmap(&[Field::Ip6Daddr], MAPPED[1]).comment("by IPv6 container"),
    ];
    Layout {
        table: TABLE,
        sets: vec![ANY[0], HOST[0], MAPPED[0], ANY[1], HOST[1], MAPPED[1], ATTACHMENTS],
        chains: vec![
            (CONDITIONAL, vec![conditional]),
            (HOSTPORTS, translate),
            (PREROUTING, vec![entry()]),
            (OUTPUT, vec![own, entry()]),
            (POSTROUTING, masquerade),
        ],
        additions: &[MARK, UNMARK, SKIP, FORGET, OWN],
        subnet: from_rules,
    }
}

/// The chain for the clients of a container; `None` if their source is not translated. nft accepts no colons in
/// names.
pub(super) fn from(snat: Snat, target: IpNet) -> Option<String> {
    match snat {
        Snat::Never => None,
        Snat::WhereNeeded => Some(format!("{FROM}{}", target.trunc()).replace(':', "_")),
        Snat::Always => Some(format!("{FROM}all")),
    }
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

/// The parameter of ADD that an element of `mapped4` or `mapped6` was created with.
pub(super) fn snat_of(element: &Element) -> Option<Snat> {
    let all = element.leads_to()?.strip_prefix(FROM)? == "all";
    Some(if all { Snat::Always } else { Snat::WhereNeeded })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_named_after_the_clients() {
        let chain = |snat, net: &str| from(snat, net.parse().unwrap());
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
