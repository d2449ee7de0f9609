//! The host's 127.0.0.0/8, closed to everybody but the host itself.
//!
//! Mappings on 127.0.0.1 need `route_localnet` on the interface towards the container, and with that
//! the kernel takes packets for, and from, loopback addresses from the wire. A table of its own, whatever
//! the back end of the mappings is, drops them:
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
//! At that priority no address is translated yet: answers to connections that the host opened to a
//! mapping on 127.0.0.1 still have the address that they were masqueraded with, and connections that
//! a rule redirects from an address of the host to 127.0.0.1 still have that address. Both pass, whoever
//! made the rule. On a kernel without `nf_tables` the same two rules are in table `raw` of iptables.
//! They stay when the last mapping goes, as `route_localnet` does.

use std::net::Ipv4Addr;

use ipnet::{IpNet, Ipv4Net};
use serde::Deserialize;

use super::backend::{Family, PacketFilter};
use super::handed_over::{HandedOver, replace_table};
use super::iptables::{self, Iptables};
use super::layout::{self, Change, Feature, Layout};
use crate::attachment::Kept;
use crate::error::{Context, Error, Result};
use crate::netlink::nftables::{Chain, Field, Hook, Nft, RAW, Rule, Table};

const TABLE: Table<'_> = Table::inet("cnibox_localhost")
    .comment("cnibox: loopback addresses are the host's own, also with route_localnet");
const PREROUTING: Chain<'_> = TABLE.chain("prerouting").filter(Hook::Prerouting, RAW);

const LOOPBACK: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8);

/// The table of iptables whose chains have the same priority.
const RAW_TABLE: &str = "raw";

const TO: &str = "to loopback addresses from outside";
const FROM: &str = "from loopback addresses outside";

fn rules() -> [Rule; 2] {
    let (net, outside) = (IpNet::from(LOOPBACK), || Rule::new().ne(Field::Iifname, "lo"));
    [outside().daddr_in(net).drop().comment(TO), outside().saddr_in(net).drop().comment(FROM)]
}

fn iptables_rules() -> [iptables::Rule; 2] {
    [("-d", TO), ("-s", FROM)].map(|(side, comment)| {
        let words = [side.to_owned(), LOOPBACK.to_string(), "!".into(), "-i".into(), "lo".into()];
        iptables::Rule::new("PREROUTING", words).comment(comment).target("DROP")
    })
}

/// For [`super::heal`]: it is needed as long as there are mappings on 127.0.0.1.
pub(super) const FEATURE: Feature = Feature { kept: MAPPINGS, layouts: || vec![layout()], restore };

/// Of port mappings.
const MAPPINGS: Kept = Kept::of("portmap");

/// What matters here of such a record.
#[derive(Deserialize)]
struct Mappings {
    localnet: bool,
}

fn restore(change: &mut Change<'_>) {
    if is_needed() {
        change.batch.ensure(TABLE);
    }
}

fn is_needed() -> bool {
    MAPPINGS.living::<Mappings>().iter().any(|kept| kept.content.localnet)
}

fn layout() -> Layout {
    let chains = vec![(PREROUTING, rules().into())];
    Layout { table: TABLE, sets: Vec::new(), chains, subnet: |_| None }
}

/// Closes 127.0.0.0/8; where it is closed, that is one look.
pub fn close(filter: &PacketFilter) -> Result<()> {
    let closed = match filter.nft_if_present()? {
        Some(nft) => layout::change(nft, &[layout()], &[], |_, _| Ok(())).map_err(Error::from),
        None => Iptables::require(Family::V4).and_then(|tables| {
            tables.update(RAW_TABLE, &|table| {
                for rule in iptables_rules() {
                    table.insert_unique(rule);
                }
            })
        }),
    };
    closed.context(|| "close the host's loopback addresses to containers")
}

/// What is wrong with it. Where only the reference plugins have mappings it is not needed.
pub fn damage(filter: &PacketFilter) -> Result<Option<String>> {
    if let Some(nft) = filter.nft_if_present()? {
        return Ok(layout().damage(nft, is_needed)?);
    }
    if !is_needed() {
        return Ok(None);
    }
    let table = Iptables::require(Family::V4)?.read(RAW_TABLE)?;
    let missing = iptables_rules().into_iter().find(|rule| !table.has(rule));
    Ok(missing.map(|rule| format!("rule{} is missing in iptables table {RAW_TABLE}", rule.text())))
}

/// Deletes the table: the reference plugins leave those addresses open.
pub(super) fn hand_over(nft: &Nft) -> Result<HandedOver> {
    replace_table(nft, TABLE, &|_, _| Ok(HandedOver::default()))
}
