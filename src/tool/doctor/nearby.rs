//! What other software on the node does to packets and links of containers.

use std::fs;
use std::net::IpAddr;

use super::diagnosis::Diagnosis;
use crate::netfilter::PacketFilter;
use crate::netlink::nftables::{DroppingChain, Family, Hook, Nft, RuleInfo, Table};
use crate::netlink::{self, Link, Netlink};
use crate::runtime::{Json, NetworkList, PluginConf};
use crate::sysctl;

/// The state files of systemd-networkd, by the indexes of links.
const NETWORKD: &str = "/run/systemd/netif/links";

/// Those of `NetworkManager`.
const NETWORK_MANAGER: &str = "/run/NetworkManager/devices";

/// Where kube-proxy with iptables begins.
const SERVICES: &str = "KUBE-SERVICES";

/// Whether iptables sees what a bridge passes on; not there while the module is not loaded.
const BRIDGE_NF: &str = "net/bridge/bridge-nf-call-iptables";

/// What is wrong for these networks and their addresses. What cannot be read is not known, and no mistake.
pub(super) fn examine(networks: &[(&NetworkList, Vec<IpAddr>)]) -> Vec<Diagnosis> {
    let mut found = Vec::new();
    if networks.is_empty() {
        return found;
    }
    let filter = PacketFilter::new();
    if let Ok(nft) = Nft::open() {
        let chains = nft.dropping_chains(Hook::Forward).unwrap_or_default();
        for chain in chains.iter().filter(|chain| !chain.table.starts_with("cnibox_")) {
            let rules =
                nft.look(Table::new(chain.family, &chain.table), &[]).unwrap_or_default().rules;
            let is_hit =
                |(list, ips): &&(&NetworkList, Vec<IpAddr>)| is_hit(&rules, chain, list, ips);
            found.extend(networks.iter().find(is_hit).map(|(list, _)| dropped(chain, list)));
        }
        let services = Table::new(Family::Ip, "nat").chain(SERVICES);
        found.extend(unseen_services(networks, nft.has(services).unwrap_or_default(), &filter));
    }
    found.extend(legacy_forward(networks, &filter));
    if let Ok(host) = Netlink::open() {
        for name in networks.iter().flat_map(|(list, _)| bridges(list)) {
            if let Ok(Some(link)) = host.link(name) {
                found.extend(by_networkd(&link));
                found.extend(by_network_manager(&link));
            }
        }
    }
    found
}

/// The policy of the old iptables, where no rule names the network's interfaces.
fn legacy_forward(
    networks: &[(&NetworkList, Vec<IpAddr>)],
    filter: &PacketFilter,
) -> Vec<Diagnosis> {
    let chain = |(family, program): (netlink::Family, &str)| {
        let lines = filter.legacy_chain(family, "filter", "FORWARD")?;
        let is_dropping = lines.iter().any(|line| line.starts_with("-P FORWARD DROP"));
        let names = |name: &str| lines.iter().any(|line| line.split(' ').any(|word| word == name));
        let is_hit = |(list, _): &&(&NetworkList, Vec<IpAddr>)| {
            !list.plugins.iter().any(accepts_in_iptables) && !bridges(list).any(names)
        };
        let (list, _) = networks.iter().filter(|_| is_dropping).find(is_hit)?;
        let subject = format!("chain FORWARD of {program}");
        Some(Diagnosis::warning(subject, drops(list), format!("{program} -P FORWARD ACCEPT")))
    };
    let families =
        [(netlink::Family::V4, "iptables-legacy"), (netlink::Family::V6, "ip6tables-legacy")];
    families.into_iter().filter_map(chain).collect()
}

/// kube-proxy's rules that what passes a bridge does not see.
fn unseen_services(
    networks: &[(&NetworkList, Vec<IpAddr>)],
    on_nft: bool,
    filter: &PacketFilter,
) -> Option<Diagnosis> {
    let is_bridged = networks.iter().any(|(list, _)| bridges(list).next().is_some());
    let in_legacy = || {
        let lines = filter.legacy_chain(netlink::Family::V4, "nat", "PREROUTING");
        lines.is_some_and(|lines| lines.iter().any(|line| line.contains(SERVICES)))
    };
    let is_seen = || sysctl::read(BRIDGE_NF).is_ok_and(|value| value == "1");
    (is_bridged && (on_nft || in_legacy()) && !is_seen()).then(|| {
        let key = BRIDGE_NF.replace('/', ".");
        let problem = format!(
            "{key} is not 1: between containers of a bridge, answers of services bypass the rules of kube-proxy"
        );
        Diagnosis::error("node", problem, format!("modprobe br_netfilter; sysctl -w {key}=1"))
    })
}

/// Whether packets of the network's containers come to the chain's policy, as far as its table tells: no rule
/// names the network's interfaces.
fn is_hit(rules: &[RuleInfo], chain: &DroppingChain, list: &NetworkList, ips: &[IpAddr]) -> bool {
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
    let is_named = rules.iter().any(|rule| rule.values.iter().any(|value| is_ours(value)));
    is_of_family && !is_accepted && !is_named
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
    let cure = match (is_of_iptables(chain), family) {
        (true, Family::Ip6) => "ip6tables -P FORWARD ACCEPT".to_owned(),
        (true, _) => "iptables -P FORWARD ACCEPT".to_owned(),
        (false, _) => format!("nft add chain {family} {table} {name} '{{ policy accept; }}'"),
    };
    Diagnosis::warning(subject, drops(list), cure)
}

fn drops(list: &NetworkList) -> String {
    format!(
        "drops forwarded packets that no rule accepts, as docker and UFW have it, and names no interface of network {}",
        list.name
    )
}

fn bridges(list: &NetworkList) -> impl Iterator<Item = &str> {
    let bridges = list.plugins.iter().filter(|plugin| plugin.plugin_type == "bridge");
    bridges
        .map(|plugin| plugin.json().get_present("bridge").and_then(Json::as_str).unwrap_or("cni0"))
}

/// A link that systemd-networkd takes for its own: it removes addresses and routes that are not in its files.
fn by_networkd(link: &Link) -> Option<Diagnosis> {
    let Link { name, index, .. } = link;
    let state = fs::read_to_string(format!("{NETWORKD}/{index}")).ok()?;
    let state = state.lines().find_map(|line| line.strip_prefix("ADMIN_STATE="))?;
    (state != "unmanaged").then(|| {
        let file = format!("/etc/systemd/network/05-{name}.network");
        let cure = format!(
            "printf '[Match]\\nName={name}\\n[Link]\\nUnmanaged=yes\\n' > {file} && networkctl reload"
        );
        managed(name, &format!("systemd-networkd manages it ({state})"), cure)
    })
}

/// The same of `NetworkManager`.
fn by_network_manager(link: &Link) -> Option<Diagnosis> {
    let Link { name, index, .. } = link;
    let state = fs::read_to_string(format!("{NETWORK_MANAGER}/{index}")).ok()?;
    state.lines().any(|line| line == "managed=true").then(|| {
        let file = format!("/etc/NetworkManager/conf.d/{name}.conf");
        let cure = format!(
            "printf '[keyfile]\\nunmanaged-devices+=interface-name:{name}\\n' > {file} && nmcli general reload"
        );
        managed(name, "NetworkManager manages it", cure)
    })
}

fn managed(name: &str, who: &str, cure: String) -> Diagnosis {
    let problem = format!("{who}, and may remove its addresses and routes");
    Diagnosis::warning(format!("link \"{name}\""), problem, cure)
}
