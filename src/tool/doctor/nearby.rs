//! What other software on the node does to packets and links of containers.

use std::fs;
use std::net::IpAddr;

use super::diagnosis::Diagnosis;
use crate::netlink::Netlink;
use crate::netlink::nftables::{DroppingChain, Family, Hook, Nft, Table};
use crate::runtime::{Json, NetworkList, PluginConf};

/// The state files of systemd-networkd, by the indexes of links.
const NETWORKD: &str = "/run/systemd/netif/links";

/// What is wrong for these networks and their addresses. What cannot be read is not known, and no mistake.
pub(super) fn examine(networks: &[(&NetworkList, Vec<IpAddr>)]) -> Vec<Diagnosis> {
    let mut found = Vec::new();
    if networks.is_empty() {
        return found;
    }
    if let Ok(nft) = Nft::open() {
        for chain in nft.dropping_chains(Hook::Forward).unwrap_or_default() {
            let is_hit =
                |(list, ips): &&(&NetworkList, Vec<IpAddr>)| is_hit(&nft, &chain, list, ips);
            found.extend(networks.iter().find(is_hit).map(|(list, _)| dropped(&chain, list)));
        }
    }
    if let Ok(host) = Netlink::open() {
        found.extend(
            networks
                .iter()
                .flat_map(|(list, _)| bridges(list))
                .filter_map(|name| managed(&host, name)),
        );
    }
    found
}

/// Whether packets of the network's containers come to the chain's policy, as far as its table tells: no rule
/// names the network's interfaces.
fn is_hit(nft: &Nft, chain: &DroppingChain, list: &NetworkList, ips: &[IpAddr]) -> bool {
    let is_of_family = ips.iter().any(|ip| match chain.family {
        Family::Ip => ip.is_ipv4(),
        Family::Ip6 => ip.is_ipv6(),
        _ => true,
    });
    let is_accepted = is_of_iptables(chain) && list.plugins.iter().any(accepts_in_iptables);
    let names: Vec<&str> = bridges(list).collect();
    // A name is filled up with zeros; how a name begins is not. ptp's links begin with "veth".
    let is_ours = |value: &[u8]| {
        let end = value.iter().position(|byte| *byte == 0);
        let word = &value[..end.unwrap_or(value.len())];
        let is_it = |name: &&str| match end {
            Some(_) => name.as_bytes() == word,
            None => !word.is_empty() && name.as_bytes().starts_with(word),
        };
        value.starts_with(b"veth") || names.iter().any(is_it)
    };
    let look = nft.look(Table::new(chain.family, &chain.table), &[]).unwrap_or_default();
    let is_named = look.rules.iter().any(|rule| rule.values.iter().any(|value| is_ours(value)));
    is_of_family && !is_accepted && !is_named && !chain.table.starts_with("cnibox_")
}

fn is_of_iptables(chain: &DroppingChain) -> bool {
    chain.family != Family::Inet && chain.table == "filter" && chain.name == "FORWARD"
}

/// The plugin firewall with iptables: its rules accept what its containers send and get.
fn accepts_in_iptables(plugin: &PluginConf) -> bool {
    let backend = plugin.json().get_present("backend").and_then(Json::as_str);
    plugin.plugin_type == "firewall" && backend != Some("nftables")
}

fn dropped(chain: &DroppingChain, list: &NetworkList) -> Diagnosis {
    let DroppingChain { family, table, name } = chain;
    let subject = format!("chain {family} {table} {name}");
    let problem = format!(
        "drops forwarded packets that no rule accepts, as docker and UFW have it, and names no interface of network {}",
        list.name
    );
    let cure = match (is_of_iptables(chain), family) {
        (true, Family::Ip6) => "ip6tables -P FORWARD ACCEPT".to_owned(),
        (true, _) => "iptables -P FORWARD ACCEPT".to_owned(),
        (false, _) => format!("nft add chain {family} {table} {name} '{{ policy accept; }}'"),
    };
    Diagnosis::warning(subject, problem, cure)
}

fn bridges(list: &NetworkList) -> impl Iterator<Item = &str> {
    let bridges = list.plugins.iter().filter(|plugin| plugin.plugin_type == "bridge");
    bridges
        .map(|plugin| plugin.json().get_present("bridge").and_then(Json::as_str).unwrap_or("cni0"))
}

/// A link that systemd-networkd takes for its own: it removes addresses and routes that are not in its files.
fn managed(host: &Netlink, name: &str) -> Option<Diagnosis> {
    let link = host.link(name).ok()??;
    let state = fs::read_to_string(format!("{NETWORKD}/{}", link.index)).ok()?;
    let state = state.lines().find_map(|line| line.strip_prefix("ADMIN_STATE="))?;
    (state != "unmanaged").then(|| {
        let problem = format!("systemd-networkd manages it ({state}), and may remove its addresses and routes");
        let file = format!("/etc/systemd/network/05-{name}.network");
        let cure = format!(
            "printf '[Match]\\nName={name}\\n[Link]\\nUnmanaged=yes\\n' > {file} && networkctl reload"
        );
        Diagnosis::warning(format!("link \"{name}\""), problem, cure)
    })
}
