//! Other software on the node that changes packets and links of containers.

use std::path::Path;

use super::attachments::RoutedNetwork;
use super::forward;
use crate::netfilter::PacketFilter;
use crate::netfilter::iptables::IptablesFlavour;
use crate::netlink::nftables::{NftSocket, NftTable, TableFamily};
use crate::netlink::{self, Link, Netlink};
use crate::sysctl;
use crate::tool::finding::Finding;
use cni::files;
use cni::json::Json;
use cni::runtime::{NetworkList, PluginConfig};

/// The state files of systemd-networkd, named by the indexes of links.
const NETWORKD: &str = "/run/systemd/netif/links";

/// The state files of `NetworkManager`, named by the indexes of links.
const NETWORK_MANAGER: &str = "/run/NetworkManager/devices";

/// The first chain of kube-proxy with iptables.
const SERVICES: &str = "KUBE-SERVICES";

/// Whether iptables sees bridged packets; absent until the module `br_netfilter` is loaded.
const BRIDGE_NF: &str = "net/bridge/bridge-nf-call-iptables";

/// Defects of these networks that other software causes. Data that cannot be read is not a defect.
pub(super) fn examine_networks(networks: &[RoutedNetwork<'_>]) -> Vec<Finding> {
    let mut findings = Vec::new();
    if networks.is_empty() {
        return findings;
    }
    let filter = PacketFilter::new();
    if let Ok(nft) = NftSocket::open() {
        findings.extend(forward::find_dropping_chains(&nft, networks));
        let services = NftTable::new(TableFamily::Ip, "nat").named_chain(SERVICES);
        findings.extend(unseen_services(
            networks,
            nft.has_object(services).unwrap_or_default(),
            &filter,
        ));
    }
    findings.extend(other_flavour(&filter));
    findings.extend(legacy_forward(networks, &filter));
    if let Ok(host) = Netlink::open() {
        for name in networks.iter().flat_map(|(list, _)| bridge_names(list)) {
            if let Ok(Some(link)) = host.find_link(name) {
                findings.extend(find_link_managers(&link));
            }
        }
    }
    findings
}

/// Legacy iptables whose policy drops packets, without a rule that names the network's interfaces.
fn legacy_forward(networks: &[RoutedNetwork<'_>], filter: &PacketFilter) -> Vec<Finding> {
    let chain = |(family, program): (netlink::IpFamily, &str)| {
        let lines = filter.list_legacy_chain(family, "filter", "FORWARD")?;
        let is_dropping = lines.iter().any(|line| line.starts_with("-P FORWARD DROP"));
        let names = |name: &str| lines.iter().any(|line| line.split(' ').any(|word| word == name));
        let is_hit = |(list, _): &&RoutedNetwork<'_>| {
            !list.plugins.iter().any(accepts_in_iptables) && !bridge_names(list).any(names)
        };
        let (list, _) = networks.iter().filter(|_| is_dropping).find(is_hit)?;
        let subject = format!("chain FORWARD of {program}");
        let problem = format!(
            "drops forwarded packets that no rule accepts (as Docker and UFW configure), and \
             names no interface of network {}",
            list.name
        );
        let link = bridge_names(list).next().unwrap_or("veth+");
        let chain = if names("DOCKER-USER") { "DOCKER-USER" } else { "FORWARD" };
        let remedy = forward::accept_by_iptables(program, chain, link);
        Some(Finding::new_warning(subject, problem, remedy))
    };
    let families =
        [(netlink::IpFamily::V4, "iptables-legacy"), (netlink::IpFamily::V6, "ip6tables-legacy")];
    families.into_iter().filter_map(chain).collect()
}

/// Another flavour of iptables than the node's `iptables`, in which kubelet has its rules: rules
/// that people and other programs add are beside kube-proxy's, not among them.
fn other_flavour(filter: &PacketFilter) -> Option<Finding> {
    let program = match filter.node_flavour() {
        IptablesFlavour::Default => return None,
        IptablesFlavour::Nft => "iptables-nft",
        IptablesFlavour::Legacy => "iptables-legacy",
    };
    let problem = format!(
        "kubelet has its rules in {program}, which cnibox uses, too, and \"iptables\" is another one"
    );
    let remedy = format!("update-alternatives --set iptables $(command -v {program})");
    Some(Finding::new_note("node", problem, remedy))
}

/// Rules of kube-proxy that bridged packets bypass.
fn unseen_services(
    networks: &[RoutedNetwork<'_>],
    on_nft: bool,
    filter: &PacketFilter,
) -> Option<Finding> {
    let is_bridged = networks.iter().any(|(list, _)| bridge_names(list).next().is_some());
    let in_legacy = || {
        let lines = filter.list_legacy_chain(netlink::IpFamily::V4, "nat", "PREROUTING");
        lines.is_some_and(|lines| lines.iter().any(|line| line.contains(SERVICES)))
    };
    (is_bridged
        && (on_nft || in_legacy())
        && !(sysctl::read_value(BRIDGE_NF).is_ok_and(|value| value == "1")))
    .then(|| {
        let key = BRIDGE_NF.replace('/', ".");
        let problem = format!(
            "{key} is not 1: between containers of a bridge, replies of services bypass the rules \
             of kube-proxy"
        );
        Finding::new_error("node", problem, format!("modprobe br_netfilter; sysctl -w {key}=1"))
    })
}

/// Whether the plugin is firewall with the back end iptables, whose rules accept the packets of its
/// containers.
fn accepts_in_iptables(plugin: &PluginConfig) -> bool {
    let backend = plugin.json().get_present_member("backend").and_then(Json::as_str);
    plugin.plugin_type == "firewall" && backend != Some("nftables")
}

pub(super) fn bridge_names(list: &NetworkList) -> impl Iterator<Item = &str> {
    let bridges = list.plugins.iter().filter(|plugin| plugin.plugin_type == "bridge");
    bridges.map(|plugin| {
        plugin.json().get_present_member("bridge").and_then(Json::as_str).unwrap_or("cni0")
    })
}

/// Managers of the link that remove addresses and routes that are not in their own configuration.
fn find_link_managers(link: &Link) -> Vec<Finding> {
    let Link { name, index, .. } = link;
    let value = |dir: &str, key: &str| {
        let state = files::read_text(&Path::new(dir).join(index.to_string()), 64 << 10).ok()?;
        state.lines().find_map(|line| line.strip_prefix(key)).map(str::to_owned)
    };
    let finding = |manager: &str, file: &str, content: &str, reload: &str| {
        let problem = format!("{manager}, and may remove its addresses and routes");
        let remedy = format!("printf '{content}' > {file} && {reload}");
        Finding::new_warning(format!("link \"{name}\""), problem, remedy)
    };
    let networkd = value(NETWORKD, "ADMIN_STATE=").filter(|state| state != "unmanaged");
    let networkd = networkd.map(|state| {
        finding(
            &format!("systemd-networkd manages it ({state})"),
            &format!("/etc/systemd/network/05-{name}.network"),
            &format!("[Match]\\nName={name}\\n[Link]\\nUnmanaged=yes\\n"),
            "networkctl reload",
        )
    });
    let network_manager = value(NETWORK_MANAGER, "managed=").filter(|managed| managed == "true");
    let network_manager = network_manager.map(|_| {
        finding(
            "NetworkManager manages it",
            &format!("/etc/NetworkManager/conf.d/{name}.conf"),
            &format!("[keyfile]\\nunmanaged-devices+=interface-name:{name}\\n"),
            "nmcli general reload",
        )
    });
    networkd.into_iter().chain(network_manager).collect()
}
