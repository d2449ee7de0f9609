//! Packets with loopback addresses of the host are dropped unless they come from the host itself.
//!
//! Mappings on 127.0.0.1 require `route_localnet` on the interface towards the container, with
//! which the kernel accepts packets with loopback addresses from the wire. A separate table,
//! independent of the back end of the mappings, drops them:
//!
//! ```text
//! table inet cnibox_localhost {
//!     chain prerouting {
//!         type filter hook prerouting priority raw
//!         iifname != "lo" ip daddr 127.0.0.0/8 drop
//!         iifname != "lo" ip saddr 127.0.0.0/8 drop
//!     }
//! }
//! ```
//!
//! At priority raw no address is translated yet: replies to connections from the host to a mapping
//! on 127.0.0.1 still have their masqueraded address, and connections that a rule redirects from an
//! address of the host to 127.0.0.1 still have that address. So both are accepted, whichever
//! program translates them. On a kernel without `nf_tables` the two rules are in table `raw` of
//! iptables. They remain after the last mapping, as `route_localnet` does. After a flush the next
//! ADD of any plugin but loopback restores them.

use std::net::Ipv4Addr;

use ipnet::{IpNet, Ipv4Net};
use serde::Deserialize;

use super::backend::{FilterFeature, IpFamily, PacketFilter};
use super::iptables::{self, ChainScope};
use super::layout::{self, HandoverCount, RestorableState, RuleComparison, TableLayout};
use crate::attachment::{REPAIR_REMEDY, RecordStore, decode_part};
use crate::netlink::nftables::{NetfilterHook, NftChain, NftRule, NftTable, PacketField, RAW};
use cni::error::{Error, ErrorContext, Result};

const TABLE: NftTable<'_> = NftTable::new_inet("cnibox_localhost")
    .with_comment("cnibox: loopback addresses are the host's own, also with route_localnet");
const PREROUTING: NftChain<'_> =
    TABLE.named_chain("prerouting").at_filter_hook(NetfilterHook::Prerouting, RAW);

const LOOPBACK: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8);

/// The table of iptables whose chains have the same priority.
const RAW_TABLE: &str = "raw";

const TO: &str = "to loopback addresses from outside";
const FROM: &str = "from loopback addresses outside";

const LAYOUT: TableLayout = TableLayout {
    chains: &[(
        PREROUTING,
        &[
            (TO, || from_outside().daddr_in(IpNet::V4(LOOPBACK)).drop()),
            (FROM, || from_outside().saddr_in(IpNet::V4(LOOPBACK)).drop()),
        ],
    )],
    ..TableLayout::new(TABLE)
};

fn from_outside() -> NftRule {
    NftRule::new().match_unequal(PacketField::Iifname, "lo")
}

fn iptables_rules() -> [iptables::IptablesRule; 2] {
    [("-d", TO), ("-s", FROM)].map(|(side, comment)| {
        let words = [side, &LOOPBACK.to_string(), "!", "-i", "lo"];
        iptables::IptablesRule::new("PREROUTING")
            .with_words(&words)
            .with_comment(comment)
            .with_target("DROP")
    })
}

/// The feature. The rules are required while there are mappings on 127.0.0.1, and stay after the
/// last mapping.
pub const FEATURE: FilterFeature = FilterFeature {
    check: |filter, _, part| {
        let is_open = decode_part::<LocalnetRecord>(part).is_some_and(|record| record.localnet);
        if is_open { require_closed(filter) } else { Ok(()) }
    },
    restore: restore_iptables_rules,
    hand_over: &[("loopback addresses", hand_over)],
    ..FilterFeature::new(RestorableState {
        kept: MAPPINGS,
        layouts: &[LAYOUT],
        needs_table: |_| is_needed(),
        restore: |change| {
            if is_needed() {
                change.batch.ensure_object(TABLE);
            }
        },
    })
};

const MAPPINGS: RecordStore = RecordStore("portmap");

/// The field of such a record that is needed here.
#[derive(Deserialize)]
struct LocalnetRecord {
    localnet: bool,
}

fn is_needed() -> bool {
    MAPPINGS.has_restorable_part::<LocalnetRecord>(&|kept| kept.content.localnet)
}

/// Creates the rules unless they exist.
pub fn close_to_containers(filter: &PacketFilter) -> Result<()> {
    if filter.is_localhost_closed.get() {
        return Ok(());
    }
    let closed = match filter.nft_socket_if_present()? {
        Some(_) => Ok(filter.own_tables()?.change_tables(&[LAYOUT], &[], &mut |_, _| Ok(()))?),
        None => filter.default_iptables(IpFamily::V4).and_then(|tables| {
            tables.update_table(RAW_TABLE, ChainScope::All, &|table| {
                for rule in iptables_rules() {
                    table.insert_unique(0, rule);
                }
            })
        }),
    };
    closed.context(|| "close the host's loopback addresses to containers")
}

/// For the ADD of any plugin that connects the container: restores the rules if a flush has deleted
/// them, and with them those of all tables. Opens no socket on a host without port mappings.
/// Without `nf_tables` only mappings of a container restore them.
pub fn restore_if_flushed(filter: &PacketFilter) -> Result<()> {
    if !MAPPINGS.is_used() {
        return Ok(());
    }
    let Some(nft) = filter.nft_socket_if_present()? else { return Ok(()) };
    let is_whole = LAYOUT.find_difference(nft, RuleComparison::RuleSet)?.is_none();
    filter.is_localhost_closed.set(is_whole);
    if !is_whole && is_needed() { close_to_containers(filter) } else { Ok(()) }
}

/// Fails if rules are missing; not if only the reference plugins have mappings.
pub fn require_closed(filter: &PacketFilter) -> Result<()> {
    if !is_needed() {
        return Ok(());
    }
    if let Some(nft) = filter.nft_socket_if_present()? {
        return LAYOUT.require_whole(nft, RuleComparison::ByComment);
    }
    let table = filter.default_iptables(IpFamily::V4)?.read_table(RAW_TABLE, ChainScope::All)?;
    match iptables_rules().into_iter().find(|rule| !table.has_rule(rule)) {
        None => Ok(()),
        Some(rule) => {
            let msg =
                format!("rule{} is missing in iptables table {RAW_TABLE}", rule.quoted_words());
            Err(Error::internal(msg).with_details(REPAIR_REMEDY))
        }
    }
}

/// Without `nf_tables`: restores the rules in iptables.
fn restore_iptables_rules(filter: &PacketFilter) -> Result<()> {
    if filter.nft_socket_if_present()?.is_some() || require_closed(filter).is_ok() {
        return Ok(());
    }
    close_to_containers(filter)
}

/// Deletes the table, which the reference does not have.
fn hand_over(filter: &PacketFilter) -> Result<HandoverCount> {
    filter.query_nft(&|nft| layout::hand_over(nft, TABLE, &|_, _| Ok(HandoverCount::default())))
}
