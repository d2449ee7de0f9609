//! The table `inet cnibox_portmap`.
//!
//! Only packets to an address of the host itself are looked at, whatever port they are for. The
//! chains never change; containers come and go as elements, and only mappings with conditions of
//! their own as rules, in the chain `conditional`:
//!
//! | set or map | element | |
//! | --- | --- | --- |
//! | `any4`, `any6` | protocol . port : address . port | a port on every local address |
//! | `host4`, `host6` | address . protocol . port : address . port | on one; it wins over `any` |
//! | `snat4`, `snat6` | sources . container | clients whose source is translated on the way to it |
//! | `waiting4`, `waiting6` | address . protocol . port . number : address . port | what a container wants of a port that it has in another network; made with the first such element, used by no rule |
//! | `attachments` | hash . hash : count | how many elements above are whose |

use crate::netfilter::backend::Family;
use crate::netlink::nftables::{
    Batch, CT_STATUS_DNAT, Chain, DSTNAT, Field, Hook, Nft, Rule, SRCNAT, Set, Table, Type,
};
use crate::netlink::{self};

const TABLE: Table<'_> =
    Table::inet("cnibox_portmap").comment("host ports of containers, by cnibox portmap");

const HOSTPORTS: Chain<'_> = TABLE.chain("hostports");
/// The rules of mappings that have conditions, with their owners' comments.
pub(super) const CONDITIONAL: Chain<'_> = TABLE.chain("conditional");
const PREROUTING: Chain<'_> = TABLE.chain("prerouting").nat(Hook::Prerouting, DSTNAT);
const OUTPUT: Chain<'_> = TABLE.chain("output").nat(Hook::Output, DSTNAT);
const POSTROUTING: Chain<'_> = TABLE.chain("postrouting").nat(Hook::Postrouting, SRCNAT);

const PORT: [Type; 2] = [Type::InetProto, Type::InetService];
const PORT4: [Type; 3] = [Type::Ipv4Addr, Type::InetProto, Type::InetService];
const PORT6: [Type; 3] = [Type::Ipv6Addr, Type::InetProto, Type::InetService];
const TURN4: [Type; 4] = [Type::Ipv4Addr, Type::InetProto, Type::InetService, Type::Mark];
const TURN6: [Type; 4] = [Type::Ipv6Addr, Type::InetProto, Type::InetService, Type::Mark];
const TO4: [Type; 2] = [Type::Ipv4Addr, Type::InetService];
const TO6: [Type; 2] = [Type::Ipv6Addr, Type::InetService];

/// One element for each attachment: its instance hash, in two halves that fit names.
pub(super) const ATTACHMENTS: Set<'_> =
    TABLE.map("attachments", &[Type::IfName, Type::IfName], &[Type::Mark]);

/// The sets and maps of a family.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sets {
    pub(super) any: Set<'static>,
    pub(super) host: Set<'static>,
    pub(super) snat: Set<'static>,
    pub(super) waiting: Set<'static>,
}

const V4: Sets = Sets {
    any: TABLE.map("any4", &PORT, &TO4),
    host: TABLE.map("host4", &PORT4, &TO4),
    snat: TABLE.set("snat4", &[Type::Ipv4Addr, Type::Ipv4Addr]).interval(),
    waiting: TABLE.map("waiting4", &TURN4, &TO4),
};

const V6: Sets = Sets {
    any: TABLE.map("any6", &PORT, &TO6),
    host: TABLE.map("host6", &PORT6, &TO6),
    snat: TABLE.set("snat6", &[Type::Ipv6Addr, Type::Ipv6Addr]).interval(),
    waiting: TABLE.map("waiting6", &TURN6, &TO6),
};

impl Sets {
    pub(super) fn of(family: Family) -> Sets {
        match family {
            Family::V4 => V4,
            Family::V6 => V6,
        }
    }

    /// The family that one of them is of.
    pub(super) fn family_of(set: Set<'_>) -> Family {
        if [V4.any, V4.host, V4.snat].contains(&set) { Family::V4 } else { Family::V6 }
    }

    /// All that rules use, with elements of containers.
    pub(super) fn all() -> impl Iterator<Item = Set<'static>> {
        [V4, V6].into_iter().flat_map(|s| [s.any, s.host, s.snat])
    }

    /// Whether keys of `set` are ports.
    pub(super) fn is_ports(set: Set<'_>) -> bool {
        [V4.any, V6.any, V4.host, V6.host].contains(&set)
    }
}

fn chains() -> [(Chain<'static>, Vec<Rule>); 4] {
    let entry = || {
        let rule = Rule::new().daddr_is_local().jump(HOSTPORTS.name());
        vec![rule.comment("only what is sent to this host")]
    };
    [
        (HOSTPORTS, translate()),
        (PREROUTING, entry()),
        (OUTPUT, entry()),
        (POSTROUTING, masquerade()),
    ]
}

fn translate() -> Vec<Rule> {
    let (proto, port) = (Field::L4proto, Field::Dport);
    vec![
        Rule::new().jump(CONDITIONAL.name()).comment("under conditions"),
        Rule::new().dnat_by(&[Field::IpDaddr, proto, port], V4.host).comment("one address"),
        Rule::new().dnat_by(&[proto, port], V4.any).comment("any address"),
        Rule::new().dnat_by(&[Field::Ip6Daddr, proto, port], V6.host).comment("one IPv6 address"),
        Rule::new().dnat_by(&[proto, port], V6.any).comment("any IPv6 address"),
    ]
}

fn masquerade() -> Vec<Rule> {
    let mapped = || Rule::new().any_of(Field::CtStatus, CT_STATUS_DNAT);
    let v4 = mapped().in_set(&[Field::IpSaddr, Field::IpDaddr], V4.snat).masquerade();
    let v6 = mapped().in_set(&[Field::Ip6Saddr, Field::Ip6Daddr], V6.snat).masquerade();
    vec![v4.comment("so that answers come back"), v6.comment("so that IPv6 answers come back")]
}

/// Whether all chains have their rules.
pub(super) fn is_whole(nft: &Nft) -> netlink::Result<bool> {
    for (chain, rules) in chains() {
        let found = nft.dump_rules(chain)?;
        let comments = found.iter().map(|rule| rule.comment.as_deref());
        if !comments.eq(rules.iter().map(Rule::comment_text)) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether the table is there.
pub(super) fn is_there(nft: &Nft) -> netlink::Result<bool> {
    nft.has_table(TABLE)
}

/// Deletes the table with everything in it.
pub(super) fn remove(batch: &mut Batch) {
    batch.del_table(TABLE);
}

/// The first trouble with the chains, in words.
pub(super) fn damage(nft: &Nft) -> netlink::Result<Option<String>> {
    for (chain, rules) in chains() {
        let found = nft.dump_rules(chain)?;
        for rule in &rules {
            if !found.iter().any(|f| f.comment.as_deref() == rule.comment_text()) {
                let comment = rule.comment_text().unwrap_or_default();
                return Ok(Some(format!("rule \"{comment}\" is missing in chain {chain}")));
            }
        }
    }
    Ok(None)
}

/// Makes what is missing; the chains get their rules anew.
pub(super) fn build(batch: &mut Batch) {
    batch.ensure_table(TABLE).ensure_set(ATTACHMENTS);
    for set in Sets::all() {
        batch.ensure_set(set);
    }
    batch.ensure_chain(CONDITIONAL);
    for (chain, rules) in chains() {
        batch.ensure_chain(chain).flush_chain(chain);
        for rule in &rules {
            batch.append_rule(chain, rule);
        }
    }
}
