//! The table `inet cnibox_portmap`.
//!
//! Only packets to local addresses of the host are looked up, for any port. The chains never
//! change; containers are elements, and only mappings with conditions are rules, in the chain
//! `conditional`:
//!
//! | map | element | |
//! | --- | --- | --- |
//! | `any4`, `any6` | protocol . port : address . port | a port on every local address |
//! | `host4`, `host6` | address . protocol . port : address . port | on one address; takes precedence over `any` |
//! | `mapped4`, `mapped6` | container : goto `from-..` | containers whose clients' source is translated |
//! | `local4`, `local6` | address | addresses of the host to which clients have connected; filled by packets |
//! | `attachments` | hash . hash : count | the number of an attachment's elements above |
//!
//! The chain `from-10.1.2.0/24` translates the source of clients in that subnet and of the host's
//! loopback addresses, `from-all` the source of all clients. Such a chain is created with the first
//! element that jumps to it. Clients of addresses that are not the host's, such as those of
//! Services, keep their source when another program leads them to the container: the address to
//! which a client has connected is in `local4` or `local6`, where `hostports` adds it, only if it is
//! the host's. No mark tells the connections apart, as other programs save, restore and compare
//! marks as a whole.
//!
//! `::1` is not looked up: no packet with that source or destination can leave the host, so its
//! translation would only hide the host's own services.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net};

use super::SourceTranslation;
use crate::netfilter::layout::{FixedRule, TableLayout};
use crate::netlink::nftables::{
    DSTNAT, NetfilterHook, NftChain, NftRule, NftSet, NftTable, PacketField, PacketVerdict, SRCNAT,
    SetElement, ValueType,
};

pub(super) const TABLE: NftTable<'_> = NftTable::new_inet("cnibox_portmap")
    .with_comment("host ports of containers, by cnibox portmap");

const HOSTPORTS: NftChain<'_> = TABLE.named_chain("hostports");
/// The rules of mappings with conditions, with their owners' comments.
pub(super) const CONDITIONAL: NftChain<'_> = TABLE.named_chain("conditional");
const PREROUTING: NftChain<'_> =
    TABLE.named_chain("prerouting").at_nat_hook(NetfilterHook::Prerouting, DSTNAT);
const OUTPUT: NftChain<'_> = TABLE.named_chain("output").at_nat_hook(NetfilterHook::Output, DSTNAT);
const POSTROUTING: NftChain<'_> =
    TABLE.named_chain("postrouting").at_nat_hook(NetfilterHook::Postrouting, SRCNAT);

/// The prefix of the names of chains that elements jump to.
const FROM: &str = "from-";

const PORT: [ValueType; 2] = [ValueType::InetProto, ValueType::InetService];
const PORT4: [ValueType; 3] = [ValueType::Ipv4Addr, ValueType::InetProto, ValueType::InetService];
const PORT6: [ValueType; 3] = [ValueType::Ipv6Addr, ValueType::InetProto, ValueType::InetService];
const TO4: [ValueType; 2] = [ValueType::Ipv4Addr, ValueType::InetService];
const TO6: [ValueType; 2] = [ValueType::Ipv6Addr, ValueType::InetService];

/// One element for each attachment: its instance hash, in two halves of the length of interface
/// names.
pub(super) const ATTACHMENTS: NftSet<'_> =
    TABLE.value_map("attachments", &[ValueType::IfName, ValueType::IfName], &[ValueType::Mark]);

/// The maps of each family.
pub(super) const ANY: [NftSet<'_>; 2] =
    [TABLE.value_map("any4", &PORT, &TO4), TABLE.value_map("any6", &PORT, &TO6)];
pub(super) const HOST: [NftSet<'_>; 2] =
    [TABLE.value_map("host4", &PORT4, &TO4), TABLE.value_map("host6", &PORT6, &TO6)];
pub(super) const MAPPED: [NftSet<'_>; 2] = [
    TABLE.verdict_map("mapped4", &[ValueType::Ipv4Addr]),
    TABLE.verdict_map("mapped6", &[ValueType::Ipv6Addr]),
];

/// In seconds. A connection is looked up right after its address was added, unless a program that
/// receives packets in between (`queue`) is slow.
const LOCAL_TIMEOUT: u32 = 10;
/// As many as a node has, on `kube-ipvs0` too.
const MOST_LOCAL: u32 = 65536;

/// The addresses of the host to which clients have connected.
const LOCAL: [NftSet<'_>; 2] = [
    TABLE.named_set("local4", &[ValueType::Ipv4Addr]).filled_by_packets(MOST_LOCAL, LOCAL_TIMEOUT),
    TABLE.named_set("local6", &[ValueType::Ipv6Addr]).filled_by_packets(MOST_LOCAL, LOCAL_TIMEOUT),
];

const OWN: &str = "no container has ::1";

/// The fields of a port; with an address of the host in front they are those of a port on one
/// address.
const BY_PORT: [PacketField; 2] = [PacketField::L4proto, PacketField::Dport];
const BY_PORT4: [PacketField; 3] = [PacketField::IpDaddr, PacketField::L4proto, PacketField::Dport];
const BY_PORT6: [PacketField; 3] =
    [PacketField::Ip6Daddr, PacketField::L4proto, PacketField::Dport];

const ENTRY_RULE: FixedRule =
    ("only what is sent to this host", || NftRule::new().daddr_is_local().jump_to(HOSTPORTS.name));

pub(super) const LAYOUT: TableLayout = TableLayout {
    sets: &[ANY[0], HOST[0], MAPPED[0], ANY[1], HOST[1], MAPPED[1], ATTACHMENTS],
    packet_filled_sets: &LOCAL,
    chains: &[
        (
            CONDITIONAL,
            &[("mappings with conditions", || {
                NftRule::new().with_verdict(&PacketVerdict::CONTINUE)
            })],
        ),
        (
            HOSTPORTS,
            &[
                ("own address", || NftRule::new().update_set(&[PacketField::IpDaddr], LOCAL[0])),
                ("own IPv6 address", || {
                    NftRule::new().update_set(&[PacketField::Ip6Daddr], LOCAL[1])
                }),
                ("under conditions", || NftRule::new().jump_to(CONDITIONAL.name)),
                ("one address", || NftRule::new().dnat_by_map(&BY_PORT4, HOST[0])),
                ("any address", || NftRule::new().dnat_by_map(&BY_PORT, ANY[0])),
                ("one IPv6 address", || NftRule::new().dnat_by_map(&BY_PORT6, HOST[1])),
                ("any IPv6 address", || NftRule::new().dnat_by_map(&BY_PORT, ANY[1])),
            ],
        ),
        (PREROUTING, &[ENTRY_RULE]),
        (
            OUTPUT,
            &[
                (OWN, || NftRule::new().daddr_is(Ipv6Addr::LOCALHOST.into()).return_to_caller()),
                ENTRY_RULE,
            ],
        ),
        (
            POSTROUTING,
            &[
                ("by container, for an own address", || {
                    let own = NftRule::new().match_dnat();
                    let own = own.in_set(&[PacketField::CtOriginalIpDaddr], LOCAL[0]);
                    own.verdict_by_map(&[PacketField::IpDaddr], MAPPED[0])
                }),
                ("by IPv6 container, for an own address", || {
                    let own = NftRule::new().match_dnat();
                    let own = own.in_set(&[PacketField::CtOriginalIp6Daddr], LOCAL[1]);
                    own.verdict_by_map(&[PacketField::Ip6Daddr], MAPPED[1])
                }),
            ],
        ),
    ],
    subnet: Some(client_chain_rules),
    ..TableLayout::new(TABLE)
};

/// The chain for the clients of a container; `None` if their source is not translated. nft accepts
/// no colons in names.
pub(super) fn client_chain_name(snat: SourceTranslation, target: IpNet) -> Option<String> {
    match snat {
        SourceTranslation::Never => None,
        SourceTranslation::WhereNeeded => {
            Some(format!("{FROM}{}", target.trunc()).replace(':', "_"))
        }
        SourceTranslation::Always => Some(format!("{FROM}all")),
    }
}

fn client_chain_rules(chain: &str) -> Option<Vec<NftRule>> {
    let clients = chain.strip_prefix(FROM)?;
    if clients == "all" {
        return Some(vec![NftRule::new().masquerade().with_comment("all clients")]);
    }
    let net: IpNet = clients.replace('_', ":").parse().ok()?;
    let loopback = Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8).into();
    let nets = [net].into_iter().chain(net.addr().is_ipv4().then_some(loopback));
    Some(
        nets.map(|net| NftRule::new().saddr_in(net).masquerade().with_comment(net.to_string()))
            .collect(),
    )
}

/// The parameter of ADD that an element of `mapped4` or `mapped6` was created with.
pub(super) fn snat_of_element(element: &SetElement) -> Option<SourceTranslation> {
    let all = element.target_chain()?.strip_prefix(FROM)? == "all";
    Some(if all { SourceTranslation::Always } else { SourceTranslation::WhereNeeded })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_named_after_the_clients() {
        let chain = |snat, net: &str| client_chain_name(snat, net.parse().unwrap());
        let four = chain(SourceTranslation::WhereNeeded, "10.1.2.3/24").unwrap();
        let six = chain(SourceTranslation::WhereNeeded, "2001:db8::5/64").unwrap();
        let all = chain(SourceTranslation::Always, "10.1.2.3/24").unwrap();
        assert_eq!([&four, &six, &all], ["from-10.1.2.0/24", "from-2001_db8__/64", "from-all"]);
        assert_eq!(
            [four, six, all].map(|chain| client_chain_rules(&chain).map(|r| r.len())),
            [Some(2), Some(1), Some(1)]
        );
        assert!(
            client_chain_rules("postrouting").is_none()
                && chain(SourceTranslation::Never, "::/0").is_none()
        );
    }
}
