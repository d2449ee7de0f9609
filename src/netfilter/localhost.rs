//! Packets with loopback addresses of the host are dropped unless they come from the host itself.
//!
//! Mappings on 127.0.0.1 require `route_localnet` on the interface towards the container, with which the kernel
//! accepts packets with loopback addresses from the wire. A separate table, independent of the back end of the
//! mappings, drops them:
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
//! At priority raw no address is translated yet: replies to connections from the host to a mapping on 127.0.0.1
//! still have their masqueraded address, and connections that a rule redirects from an address of the host to
//! 127.0.0.1 still have that address. So both are accepted, whichever program translates them. On a kernel without
//! `nf_tables` the two rules are in table `raw` of iptables. They remain after the last mapping, as
//! `route_localnet` does. After a flush the next ADD of any plugin but loopback restores them.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use serde::Deserialize;

use super::backend::{Family, Feature, PacketFilter};
use super::iptables::{self, Scope};
use super::layout::{self, HandedOver, Layout, Restorable};
use crate::attachment::Kept;
use crate::error::{Context, Result};
use crate::netlink::nftables::{Chain, Field, Hook, RAW, Rule, Table};

const TABLE: Table<'_> = Table::inet("cnibox_localhost")
    .comment("cnibox: loopback addresses are the host's own, also with route_localnet");
const PREROUTING: Chain<'_> = TABLE.chain("prerouting").filter(Hook::Prerouting, RAW);

const LOOPBACK: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8);

/// The table of iptables whose chains have the same priority.
const RAW_TABLE: &str = "raw";

const TO: &str = "to loopback addresses from outside";
const FROM: &str = "from loopback addresses outside";

fn layout() -> Layout {
    let outside = || Rule::new().ne(Field::Iifname, "lo");
    let to = outside().daddr_in(LOOPBACK.into()).drop().comment(TO);
    let from = outside().saddr_in(LOOPBACK.into()).drop().comment(FROM);
    let chains = vec![(PREROUTING, vec![to, from])];
    Layout { table: TABLE, sets: Vec::new(), chains, additions: &[], subnet: |_| None }
}

fn iptables_rules() -> [iptables::Rule; 2] {
    [("-d", TO), ("-s", FROM)].map(|(side, comment)| {
        let words = [side, &LOOPBACK.to_string(), "!", "-i", "lo"];
        iptables::Rule::new("PREROUTING").with(&words).comment(comment).target("DROP")
    })
}

/// Required while there are mappings on 127.0.0.1; stays after the last one.
pub(super) const FEATURE: Feature = Feature {
    state: Restorable {
        kept: MAPPINGS,
        layouts: || vec![layout()],
        restore: |change| {
            if is_needed() {
                change.batch.ensure(TABLE);
            }
        },
    },
    heal: |_, _| Ok(None),
    remove: |_, _, _| Ok(()),
    hand_over: &[("loopback addresses", hand_over)],
};

/// The records of port mappings.
const MAPPINGS: Kept = Kept("portmap");

/// The part of such a record that is needed here.
#[derive(Deserialize)]
struct Mappings {
    localnet: bool,
}

fn is_needed() -> bool {
    MAPPINGS.living::<Mappings>().iter().any(|kept| kept.content.localnet)
}

/// Ensures the rules.
pub fn close(filter: &PacketFilter) -> Result<()> {
    if filter.is_localhost_closed.get() {
        return Ok(());
    }
    let closed = match filter.nft_if_present()? {
        Some(_) => Ok(filter.tables()?.change(&[layout()], &[], &mut |_, _| Ok(()))?),
        None => filter.iptables(Family::V4).and_then(|tables| {
            tables.update(RAW_TABLE, Scope::All, &|table| {
                for rule in iptables_rules() {
                    table.insert_unique(0, rule);
                }
            })
        }),
    };
    closed.context(|| "close the host's loopback addresses to containers")
}

/// For the ADD of any plugin that connects the container: restores the rules if a flush has deleted them, and with them
/// those of all tables. Opens no socket on a host without port mappings. Without `nf_tables` only mappings of a container
/// restore them.
pub fn restore_if_flushed(filter: &PacketFilter) -> Result<()> {
    if !MAPPINGS.is_used() {
        return Ok(());
    }
    let has_damage = filter.ask(&|nft| layout().has_damage(nft).map(Some))?;
    filter.is_localhost_closed.set(has_damage == Some(false));
    if has_damage == Some(true) && is_needed() { close(filter) } else { Ok(()) }
}

/// The first missing rule; `None` if only the reference plugins have mappings.
pub fn damage(filter: &PacketFilter) -> Result<Option<String>> {
    if let Some(nft) = filter.nft_if_present()? {
        return Ok(layout().damage(nft, &is_needed)?);
    }
    if !is_needed() {
        return Ok(None);
    }
    let table = filter.iptables(Family::V4)?.read(RAW_TABLE, Scope::All)?;
    let missing = iptables_rules().into_iter().find(|rule| !table.has(rule));
    Ok(missing.map(|rule| format!("rule{} is missing in iptables table {RAW_TABLE}", rule.text())))
}

/// Deletes the table, which the reference does not have.
fn hand_over(filter: &PacketFilter) -> Result<HandedOver> {
    filter.ask(&|nft| layout::hand_over(nft, TABLE, &|_, _| Ok(HandedOver::default())))
}
