//! Keys of one plugin that undo the work of an earlier plugin of the list.

use ipnet::IpNet;

use super::keys::mistake_error;
use crate::iface::mtu::{LEAST_OF_IPV6, REMEDY_OF_IPV6};
use crate::sysctl;
use cni::error::Error;
use cni::json::Json;
use cni::runtime::PluginConfig;

/// Probable mistakes in the configuration of a plugin that follows the plugins `before`, each with
/// its key. `subnets` are the subnets of the addresses so far.
pub(super) fn find_conflicts(
    conf: &PluginConfig,
    before: &[PluginConfig],
    subnets: &[IpNet],
) -> Vec<(&'static str, Error)> {
    let mut found = Vec::new();
    let has_v6 = subnets.iter().any(|subnet| subnet.addr().is_ipv6());
    if let Some(Json::Number(mtu)) = conf.json().get_present_member("mtu")
        && let Some(mtu) = mtu.as_u64().filter(|mtu| (1..LEAST_OF_IPV6.into()).contains(mtu))
        && has_v6
    {
        let msg = format!("with mtu {mtu} the interface has no IPv6 address");
        found.push(("mtu", mistake_error(msg, REMEDY_OF_IPV6)));
    }
    if conf.plugin_type == "tuning" {
        found.extend(mac_key(conf).and_then(|key| Some((key, mac_change_conflict(before)?))));
    }
    let is_behind = |plugin: &str| before.iter().any(|conf| conf.plugin_type == plugin);
    if conf.plugin_type == "tuning" && is_behind("egress") {
        let msg = "the policy of \"egress\" is for the MAC address before tuning changes it";
        found.extend(
            mac_key(conf).map(|key| (key, mistake_error(msg, "put \"tuning\" before \"egress\""))),
        );
    }
    if conf.plugin_type == "tuning" && is_behind("tc-redirect-tap") {
        let mtu = conf.json().get_present_member("mtu").map(|_| "mtu");
        found.extend(mtu.or_else(|| mac_key(conf)).map(|key| {
            let msg =
                "the machine behind \"tc-redirect-tap\" keeps the MTU and the MAC from before";
            (key, mistake_error(msg, "put \"tuning\" before \"tc-redirect-tap\""))
        }));
    }
    found
}

/// A note on portmap: packets of a container to its own mapped port stay on the bridge where
/// bridged packets pass iptables, and a port of a bridge without hairpin mode returns no packet to
/// its sender.
pub(super) fn unreachable_own_ports(conf: &PluginConfig, before: &[PluginConfig]) -> Option<Error> {
    let is_on = |conf: &PluginConfig, key: &str| {
        conf.json().get_present_member(key) == Some(&Json::Bool(true))
    };
    let bridge = before.iter().find(|conf| conf.plugin_type == "bridge")?;
    let maps =
        conf.plugin_type == "portmap" && conf.capabilities.get("portMappings") == Some(&true);
    let is_promiscuous = is_on(bridge, "promiscMode");
    (maps
        && !is_on(bridge, "hairpinMode")
        && (sysctl::read_value("net/bridge/bridge-nf-call-iptables").is_ok_and(|on| on == "1")))
    .then(|| {
        let msg = "on this node: a container does not reach its own mapped ports, because bridged \
                   packets pass iptables (sysctl net.bridge.bridge-nf-call-iptables)";
        let how = if is_promiscuous { "replace \"promiscMode\" by" } else { "add" };
        mistake_error(
            msg,
            format!("if it must reach them, {how} \"hairpinMode\": true in \"bridge\""),
        )
    })
}

/// The key from which tuning takes a MAC.
fn mac_key(conf: &PluginConfig) -> Option<&'static str> {
    if conf
        .json()
        .get_present_member("mac")
        .is_some_and(|mac| mac.as_str().is_some_and(|mac| !mac.is_empty()))
    {
        return Some("mac");
    }
    (conf.capabilities.get("mac") == Some(&true)).then_some("capabilities")
}

/// The conflict of an earlier plugin with a MAC that tuning sets.
fn mac_change_conflict(before: &[PluginConfig]) -> Option<Error> {
    let remedy = |plugin: &str| {
        format!("bridge, macvlan and dummy take a MAC themselves: give it to \"{plugin}\"")
    };
    if let Some(first) = before.iter().find(|conf| conf.ipam_type == "dhcp") {
        let msg = "the DHCP lease is for the MAC before tuning changes it";
        return Some(mistake_error(msg, remedy(&first.plugin_type)));
    }
    let first = before.iter().find(|conf| {
        conf.plugin_type == "bridge"
            && conf.json().get_present_member("macspoofchk") == Some(&Json::Bool(true))
    })?;
    let msg = "\"macspoofchk\" drops the frames of a MAC that tuning sets";
    Some(mistake_error(msg, remedy(&first.plugin_type)))
}
