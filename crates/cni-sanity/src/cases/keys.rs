//! Keys of configurations: the effect of each on the container.

use std::cell::Cell;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use serde_json::{Value, json};

use super::{Answer, Attachment, Check, Netns, Result, Subject, results};
use crate::assertion::{Assertion, LIE, Level};
use crate::observe::{self, Link};
use crate::spec::OWN;
use crate::traffic::{LIMIT, MOMENT, pings, tcp, udp};
use crate::world::{self, NODE, OUTSIDE};

/// A key of a configuration, and the test of its effect.
#[derive(Debug)]
pub struct Key {
    pub assertion: Assertion,
    /// Members of the configuration, in JSON.
    members: &'static str,
    /// The value of `CNI_ARGS`.
    args: &'static str,
    holds: fn(&Seen<'_>) -> Result<bool>,
}

macro_rules! keys {
    ($($id:literal $text:literal $members:literal $($args:literal)? => $holds:expr;)*) => {
        &[$(Key {
            assertion: Assertion { id: $id, level: Level::Recommended, clauses: OWN, text: $text, why: LIE },
            members: $members,
            args: concat!($($args)?),
            holds: $holds,
        },)*]
    };
}

/// The subject, its attachment and the state after ADD.
pub struct Seen<'a> {
    subject: &'a Subject<'a>,
    at: &'a Attachment,
    result: &'a Value,
    is_deleted: Cell<bool>,
}

const MAC: &str = "02:00:5e:00:53:07";

pub const TABLE: &[Key] = keys! {
    "keys.bridge.mtu" "mtu is that of the interface" r#"{"mtu": 1400}"# => |seen| Ok(seen.link()?.mtu == 1400);
    "keys.bridge.mtu-of-host-end" "mtu is that of the host's end" r#"{"mtu": 1400}"# => |seen| Ok(seen.port()?.mtu == 1400);
    "keys.bridge.port" "the host's end is a port of the bridge" r"{}" => |seen| Ok(seen.port()?.master == Some(world::index("sanity0")?));
    "keys.bridge.bridge-up" "the bridge is up" r"{}" => |_| Ok(node_link("sanity0")?.up);
    "keys.bridge.gateway-address" "isGateway gives the bridge the gateway's address" r"{}" => |_| node_has("address 10.88.0.1/16 of sanity0");
    "keys.bridge.gateway-address6" "and of IPv6 that of the other family" r"{}" => |_| node_has("address fd88::1/64 of sanity0");
    "keys.bridge.no-gateway" "without it the bridge has no address" r#"{"bridge": "sanity1", "isGateway": false, "ipMasq": false}"# => |_| node_has("/16 of sanity1").map(|has| !has);
    "keys.bridge.default-gateway" "isDefaultGateway gives the container a default route" r#"{"isDefaultGateway": true, "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}]]}}"# => |seen| seen.has_default_route("10.88.0.1");
    "keys.bridge.no-ipam" "without ipam the interface is there without an address" r#"{"ipam": {}, "isGateway": false, "ipMasq": false}"# => |seen| Ok(seen.link()?.name == "eth0" && seen.has_no_address());
    "keys.bridge.no-ipam-up" "and up" r#"{"ipam": {}, "isGateway": false, "ipMasq": false}"# => |seen| Ok(seen.link()?.up);
    "keys.bridge.hairpin" "hairpinMode is that of the port" r#"{"hairpinMode": true}"# => |seen| Ok(seen.port_file("hairpin_mode")? == "1");
    "keys.bridge.no-hairpin" "which is off otherwise" r"{}" => |seen| Ok(seen.port_file("hairpin_mode")? == "0");
    "keys.bridge.promisc" "promiscMode is that of the bridge" r#"{"promiscMode": true}"# => |_| Ok(node_link("sanity0")?.promisc);
    "keys.bridge.mac" "a mac in runtimeConfig is the interface's" r#"{"capabilities": {"mac": true}, "runtimeConfig": {"mac": "02:00:5e:00:53:07"}}"# => |seen| seen.has_mac();
    "keys.bridge.mac-of-args" "a mac in args.cni is the interface's" r#"{"args": {"cni": {"mac": "02:00:5e:00:53:07"}}}"# => |seen| seen.has_mac();
    "keys.bridge.mac-of-cni-args" "MAC in CNI_ARGS is the interface's" r"{}" "IgnoreUnknown=1;MAC=02:00:5e:00:53:07" => |seen| seen.has_mac();
    "keys.bridge.dns" "dns is in the result" r#"{"dns": {"nameservers": ["10.1.2.3"]}}"# => |seen| Ok(seen.has_dns());
    "keys.bridge.no-masquerade" "without ipMasq the source address stays" r#"{"name": "sanity-plain", "ipMasq": false}"# => |seen| Ok(!seen.pings(MOMENT)?);
    "keys.ptp.mtu" "mtu is that of the interface" r#"{"mtu": 1400}"# => |seen| Ok(seen.link()?.mtu == 1400);
    "keys.ptp.mtu-of-host-end" "mtu is that of the host's end" r#"{"mtu": 1400}"# => |seen| Ok(seen.port()?.mtu == 1400);
    "keys.ptp.host-route" "the node has a route to the container" r"{}" => |seen| seen.has_host_routes();
    "keys.ptp.dns" "dns is in the result" r#"{"dns": {"nameservers": ["10.1.2.3"]}}"# => |seen| Ok(seen.has_dns());
    "keys.ptp.no-masquerade" "without ipMasq the source address stays" r#"{"name": "sanity-plain", "ipMasq": false}"# => |seen| Ok(!seen.pings(MOMENT)?);
    "keys.macvlan.mode-bridge" "mode bridge is the link's" r#"{"mode": "bridge"}"# => |seen| seen.detail("Mode(Bridge)");
    "keys.macvlan.mode-private" "mode private is the link's" r#"{"mode": "private"}"# => |seen| seen.detail("Mode(Private)");
    "keys.macvlan.mode-vepa" "mode vepa is the link's" r#"{"mode": "vepa"}"# => |seen| seen.detail("Mode(Vepa)");
    "keys.macvlan.mode-passthru" "mode passthru is the link's" r#"{"mode": "passthru"}"# => |seen| seen.detail("Mode(Passthrough)");
    "keys.macvlan.mode-default" "without a mode it is bridge" r#"{"mode": ""}"# => |seen| seen.detail("Mode(Bridge)");
    "keys.macvlan.master-default" "without a master it is that of the default route" r#"{"master": ""}"# => |seen| Ok(seen.link()?.kind == "macvlan" && seen.pings(LIMIT)?);
    "keys.macvlan.mtu" "mtu is that of the interface" r#"{"mtu": 1400}"# => |seen| Ok(seen.link()?.mtu == 1400);
    "keys.macvlan.mac" "a mac in runtimeConfig is the interface's" r#"{"capabilities": {"mac": true}, "runtimeConfig": {"mac": "02:00:5e:00:53:07"}}"# => |seen| seen.has_mac();
    "keys.macvlan.no-ipam" "without ipam the interface is there without an address" r#"{"ipam": {}}"# => |seen| Ok(seen.link()?.up && seen.has_no_address());
    "keys.ipvlan.mode-l2" "mode l2 is the link's" r#"{"mode": "l2"}"# => |seen| seen.detail("Mode(L2)");
    "keys.ipvlan.mode-l3" "mode l3 is the link's" r#"{"mode": "l3"}"# => |seen| seen.detail("Mode(L3)");
    "keys.ipvlan.mode-l3s" "mode l3s is the link's" r#"{"mode": "l3s"}"# => |seen| seen.detail("Mode(L3S)");
    "keys.ipvlan.master-default" "without a master it is that of the default route" r#"{"master": ""}"# => |seen| Ok(seen.link()?.kind == "ipvlan");
    "keys.ipvlan.mtu" "mtu is that of the interface" r#"{"mtu": 1400}"# => |seen| Ok(seen.link()?.mtu == 1400);
    "keys.vlan.id" "vlanId is the link's" r#"{"vlanId": 7}"# => |seen| seen.detail("Id(7)");
    "keys.vlan.mtu" "mtu is that of the interface" r#"{"mtu": 1400}"# => |seen| Ok(seen.link()?.mtu == 1400);
    "keys.dummy.kind" "the interface is a dummy" r"{}" => |seen| Ok(seen.link()?.kind == "dummy");
    "keys.host-device.moved" "the device is not on the node any more" r"{}" => |_| Ok(world::index("spare0").is_err());
    "keys.host-device.back" "after DEL it is there again under its name" r"{}" => |seen| seen.del().map(|()| world::index("spare0").is_ok());
    "keys.host-device.no-ipam" "without ipam it is in the container without an address" r#"{"ipam": {}}"# => |seen| Ok(seen.link()?.up && seen.has_no_address());
    "keys.bond.kind" "the interface is a bond" r"{}" => |seen| Ok(seen.link()?.kind == "bond");
    "keys.bond.mode" "mode is that of the bond" r#"{"mode": "balance-xor"}"# => |seen| seen.detail("Mode(BalanceXor)");
    "keys.bond.miimon" "miimon as a text is that of the bond" r#"{"miimon": "70"}"# => |seen| seen.detail("MiiMon(70)");
    "keys.bond.mtu" "mtu is that of the bond" r#"{"mtu": 1400}"# => |seen| Ok(seen.link()?.mtu == 1400);
    "keys.bond.moved" "the links are not on the node any more" r"{}" => |_| Ok(world::index("spare0").is_err() && world::index("other0").is_err());
    "keys.bond.back" "after DEL they are there again under their names" r"{}" => |seen| seen.del().map(|()| world::index("spare0").is_ok() && world::index("other0").is_ok());
    "keys.bond.no-ipam" "without ipam the bond is up without an address" r#"{"ipam": {}}"# => |seen| Ok(seen.link()?.up && seen.has_no_address());
    "keys.tap.kind" "the interface is a tap" r"{}" => |seen| Ok(seen.link()?.kind == "tun");
    "keys.tap.mtu" "mtu is that of the interface" r#"{"mtu": 1400}"# => |seen| Ok(seen.link()?.mtu == 1400);
    "keys.tap.mac" "mac is that of the interface" r#"{"mac": "02:00:5e:00:53:07"}"# => |seen| seen.has_mac();
    "keys.tap.owner" "owner is that of the tap" r#"{"owner": 7, "group": 8}"# => |seen| seen.detail(&number_of_tun(1, 7));
    "keys.tap.group" "group is that of the tap" r#"{"owner": 7, "group": 8}"# => |seen| seen.detail(&number_of_tun(2, 8));
    "keys.tap.no-ipam" "without ipam the interface is there without an address" r#"{"ipam": {}}"# => |seen| Ok(seen.link()?.name == "eth0" && seen.has_no_address());
    "keys.loopback.address4" "127.0.0.1 is in the container" r"{}" => |seen| seen.inside("address 127.0.0.1/8 of lo");
    "keys.loopback.address6" "::1 is in the container" r"{}" => |seen| seen.inside("address ::1/128 of lo");
    "keys.host-local.data-dir" "dataDir is where leases are" r#"{"ipam": {"type": "host-local", "dataDir": "/var/lib/cni/own", "ranges": [[{"subnet": "10.88.0.0/16"}]]}}"# => |_| node_has("file /var/lib/cni/own/");
    "keys.host-local.subnet" "subnet beside type is a range" r#"{"ipam": {"type": "host-local", "subnet": "10.86.0.0/16"}}"# => |seen| Ok(seen.is_only_in("10.86."));
    "keys.host-local.range-start" "addresses begin at rangeStart" r#"{"name": "sanity-start", "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16", "rangeStart": "10.88.9.9"}]]}}"# => |seen| Ok(seen.has("10.88.9.9"));
    "keys.host-local.default-gateway" "the gateway is the subnet's first address" r"{}" => |seen| Ok(seen.has_gateway("10.88.0.1"));
    "keys.host-local.default-gateway6" "and of IPv6 as well" r"{}" => |seen| Ok(seen.has_gateway("fd88::1"));
    "keys.host-local.gateway" "gateway is in the result" r#"{"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16", "gateway": "10.88.0.254"}]]}}"# => |seen| Ok(results::gateways(seen.result) == [ip("10.88.0.254")]);
    "keys.host-local.gateway-kept" "the gateway's address is not given out" r#"{"name": "sanity-thirty", "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.85.0.0/30"}]]}}"# => |seen| Ok(seen.has("10.85.0.2") && !seen.again()?.succeeded());
    "keys.host-local.routes" "routes are in the result" r#"{"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}]], "routes": [{"dst": "10.99.0.0/16", "gw": "10.88.0.9"}, {"dst": "fd99::/48"}, {"dst": "10.100.0.0/16"}]}}"# => |seen| Ok(["10.99.0.0/16", "fd99::/48", "10.100.0.0/16"].iter().all(|dst| seen.result.to_string().contains(dst)));
    "keys.host-local.resolv-conf" "what resolvConf says is in the result" r#"{"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}]], "resolvConf": "/run/resolv.conf"}}"# => |seen| Ok(seen.has_dns());
    "keys.host-local.second-range" "when a range is full the set's next one is used" r#"{"name": "sanity-two", "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.85.0.0/30"}, {"subnet": "10.85.1.0/30"}]]}}"# => |seen| Ok(seen.again()?.json.is_some_and(|next| next.to_string().contains("10.85.1.2")));
    "keys.host-local.sequence" "a released address is not the next to be given out" r#"{"name": "sanity-next"}"# => |seen| {
        seen.del()?;
        Ok(seen.again()?.json.is_some_and(|next| results::addresses(&next) != results::addresses(seen.result)))
    };
    "keys.host-local.networks-apart" "another network has addresses of its own" r#"{"name": "sanity-apart"}"# => |seen| Ok(seen.has("10.88.0.2"));
    "keys.host-local.request" "IP in CNI_ARGS is given out" r"{}" "IP=10.88.0.77" => |seen| Ok(seen.has("10.88.0.77"));
    "keys.host-local.request-of-runtime" "ips in runtimeConfig are given out" r#"{"capabilities": {"ips": true}, "runtimeConfig": {"ips": ["10.88.0.78"]}}"# => |seen| Ok(seen.has("10.88.0.78"));
    "keys.host-local.request-of-args" "ips in args.cni are given out" r#"{"args": {"cni": {"ips": ["10.88.0.79"]}}}"# => |seen| Ok(seen.has("10.88.0.79"));
    "keys.host-local.request-taken" "a requested address that is taken is refused" r#"{"args": {"cni": {"ips": ["10.88.0.80"]}}}"# => |seen| Ok(!seen.again()?.succeeded());
    "keys.static.gateway" "gateway is in the result" r"{}" => |seen| Ok(seen.has_gateway("10.88.0.1"));
    "keys.static.routes" "routes are in the result" r"{}" => |seen| Ok(seen.result.to_string().contains("0.0.0.0/0"));
    "keys.static.dns" "dns of ipam is in the result" r#"{"ipam": {"type": "static", "addresses": [{"address": "10.88.0.5/16"}], "dns": {"nameservers": ["10.1.2.3"]}}}"# => |seen| Ok(seen.has_dns());
    "keys.static.request" "IP in CNI_ARGS is given out" r#"{"ipam": {"type": "static"}}"# "IP=10.88.0.77/16" => |seen| Ok(seen.has("10.88.0.77"));
    "keys.static.request-gateway" "with GATEWAY beside it" r#"{"ipam": {"type": "static"}}"# "IP=10.88.0.77/16;GATEWAY=10.88.0.9" => |seen| Ok(results::gateways(seen.result) == [ip("10.88.0.9")]);
    "keys.static.request-of-runtime" "ips in runtimeConfig are given out" r#"{"ipam": {"type": "static"}, "capabilities": {"ips": true}, "runtimeConfig": {"ips": ["10.88.0.78/16"]}}"# => |seen| Ok(seen.has("10.88.0.78"));
    "keys.static.request-of-args" "ips in args.cni are given out" r#"{"ipam": {"type": "static"}, "args": {"cni": {"ips": ["10.88.0.79/16"]}}}"# => |seen| Ok(seen.has("10.88.0.79"));
    "keys.portmap.none" "without mappings the result is passed on" r#"{"runtimeConfig": {}}"# => |seen| Ok(results::addresses(seen.result).len() == 2);
    "keys.portmap.host-ip" "with hostIP the mapping is of that address" r#"{"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": "10.89.0.2"}]}}"# => |seen| Ok(seen.maps_from_outside()?.is_some());
    "keys.portmap.other-host-ip" "and of no other" r#"{"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": "10.89.0.99"}]}}"# => |seen| seen.is_closed();
    "keys.portmap.source-address" "the container sees the address of the other host" r"{}" => |seen| Ok(seen.maps_from_outside()? == Some(OUTSIDE[0]));
    "keys.portmap.from-node" "the node reaches its own port" r"{}" => |seen| Ok(seen.maps(&world::node(), NODE[0], LIMIT)?.is_some());
    "keys.portmap.from-localhost" "the node reaches it by 127.0.0.1 as well" r"{}" => |seen| Ok(seen.maps(&world::node(), ip("127.0.0.1"), LIMIT)?.is_some());
    "keys.portmap.hairpin" "the container reaches itself by the node's port" r"{}" => |seen| Ok(seen.maps(&seen.at.netns, NODE[0], LIMIT)?.is_some());
    "keys.portmap.no-snat" "without snat the port is mapped as well" r#"{"snat": false}"# => |seen| Ok(seen.maps_from_outside()?.is_some());
    "keys.portmap.stops" "after DEL the port is closed" r"{}" => |seen| seen.del().and_then(|()| seen.is_closed());
    "keys.portmap.udp-stops" "that of UDP as well" r"{}" => |seen| seen.del().and_then(|()| Ok(!udp(&world::outside(), SocketAddr::new(NODE[0], 8081), &seen.at.netns, 81, MOMENT)?));
    "keys.tuning.mac" "mac is that of the interface" r#"{"mac": "02:00:5e:00:53:07"}"# => |seen| seen.has_mac();
    "keys.tuning.mac-in-result" "and in the result" r#"{"mac": "02:00:5e:00:53:07"}"# => |seen| Ok(seen.result.to_string().contains(MAC));
    "keys.tuning.mac-of-runtime" "a mac in runtimeConfig is the interface's" r#"{"capabilities": {"mac": true}, "runtimeConfig": {"mac": "02:00:5e:00:53:07"}}"# => |seen| seen.has_mac();
    "keys.tuning.promisc" "promisc is that of the interface" r#"{"promisc": true}"# => |seen| Ok(seen.link()?.promisc);
    "keys.tuning.allmulti" "allmulti is that of the interface" r#"{"allmulti": true}"# => |seen| Ok(seen.link()?.allmulti);
    "keys.tuning.queue" "txQLen is that of the interface" r#"{"txQLen": 77}"# => |seen| Ok(seen.link()?.queue == 77);
    "keys.tuning.mtu-back" "DEL puts the MTU back" r"{}" => |seen| seen.del().and_then(|()| Ok(seen.link()?.mtu == 1500));
    "keys.tuning.promisc-back" "DEL puts promisc back" r#"{"promisc": true}"# => |seen| seen.del().and_then(|()| Ok(!seen.link()?.promisc));
    "keys.tuning.two-sysctls" "several kernel parameters are set" r#"{"sysctl": {"net.ipv4.conf.eth0.arp_filter": "1", "net.ipv4.conf.eth0.log_martians": "1"}}"# => |seen| Ok(seen.sysctl("arp_filter")? == "1" && seen.sysctl("log_martians")? == "1");
    "keys.bandwidth.none" "without rates the interface has no shaper" r#"{"ingressRate": 0, "ingressBurst": 0, "egressRate": 0, "egressBurst": 0}"# => |_| node_has("qdisc tbf of ").map(|has| !has);
    "keys.bandwidth.ingress" "ingressRate alone shapes the host's end" r#"{"egressRate": 0, "egressBurst": 0}"# => |_| node_has("qdisc tbf of ");
    "keys.bandwidth.egress" "egressRate is shaped on an interface of its own" r#"{"ingressRate": 0, "ingressBurst": 0}"# => |_| Ok(node_has(" ifb ")? && node_has("qdisc tbf of ")?);
    "keys.bandwidth.of-runtime" "bandwidth in runtimeConfig shapes" r#"{"ingressRate": null, "ingressBurst": null, "egressRate": null, "egressBurst": null, "capabilities": {"bandwidth": true}, "runtimeConfig": {"bandwidth": {"ingressRate": 8000000, "ingressBurst": 800000}}}"# => |_| node_has("qdisc tbf of ");
    "keys.sbr.table" "a table of its own has the default route" r"{}" => |seen| seen.inside("by eth0 table 100");
    "keys.sbr.table-key" "table is the table that the rule leads to" r#"{"table": 500}"# => |seen| seen.inside("Table(500)");
    "keys.route-override.implied-gateway" "a route without gw is through the gateway of the result" r"{}" => |seen| seen.inside("\"10.203.7.0\"/24 via \"10.88.0.1\"");
    "keys.route-override.gw" "gw is the route's gateway" r#"{"addroutes": [{"dst": "10.204.0.0/16", "gw": "10.88.0.9"}]}"# => |seen| seen.inside("\"10.204.0.0\"/16 via \"10.88.0.9\"");
    "keys.route-override.table" "table is the route's" r#"{"addroutes": [{"dst": "10.204.0.0/16", "gw": "10.88.0.9", "table": 77}]}"# => |seen| seen.inside("by eth0 table 77");
    "keys.route-override.flushgateway" "flushgateway deletes the default routes" r#"{"flushgateway": true}"# => |seen| seen.inside("\"\"/0 via").map(|has| !has);
    "keys.route-override.flushgateway-in-result" "and in the result" r#"{"flushgateway": true}"# => |seen| Ok(!seen.result.to_string().contains("/0\""));
    "keys.route-override.flushroutes" "flushroutes leaves the subnets only" r#"{"flushroutes": true, "addroutes": []}"# => |seen| Ok(!seen.inside("\"\"/0 via")? && seen.inside("\"10.88.0.0\"/16 via \"\" by eth0")?);
    "keys.route-override.delroutes" "delroutes deletes a route" r#"{"delroutes": [{"dst": "::/0"}]}"# => |seen| Ok(!seen.inside("route IPv6 \"\"/0")? && seen.has_default_route("10.88.0.1")?);
    "keys.route-override.args" "args.cni has precedence" r#"{"args": {"cni": {"flushgateway": true}}}"# => |seen| seen.inside("\"\"/0 via").map(|has| !has);
    "keys.route-override.back" "DEL puts the deleted routes back" r#"{"flushgateway": true}"# => |seen| seen.del().and_then(|()| seen.has_default_route("10.88.0.1"));
    "keys.tc-redirect-tap.name" "TC_REDIRECT_TAP_NAME is the name of the device" r"{}" "TC_REDIRECT_TAP_NAME=vm0" => |seen| Ok(seen.inside_link("vm0")?.kind == "tun");
    "keys.tc-redirect-tap.owner" "TC_REDIRECT_TAP_UID and TC_REDIRECT_TAP_GID are its owners" r"{}" "TC_REDIRECT_TAP_NAME=vm0;TC_REDIRECT_TAP_UID=7;TC_REDIRECT_TAP_GID=8" => |seen| Ok([7_u32, 8].iter().all(|id| seen.inside_link("vm0").is_ok_and(|link| link.detail.contains(&format!("{:?}", id.to_ne_bytes())))));
    "keys.egress.policy" "policy allow allows what no entry names" r#"{"policy": "allow", "allow": null}"# => |seen| seen.connects(8443, LIMIT);
    "keys.egress.deny" "deny of an address has precedence over the network around it" r#"{"deny": [{"to": ["10.89.0.1"]}]}"# => |seen| seen.connects(443, MOMENT).map(|does| !does);
    "keys.egress.ports" "an entry without ports is about all services" r#"{"allow": [{"to": ["10.89.0.1"]}]}"# => |seen| seen.connects(8443, LIMIT);
    "keys.egress.profile" "the profile sandbox denies private addresses" r#"{"profile": "sandbox", "allow": null}"# => |seen| seen.connects(443, MOMENT).map(|does| !does);
    "keys.egress.nothing" "without a policy nothing is allowed" r#"{"allow": null}"# => |seen| seen.connects(443, MOMENT).map(|does| !does);
    "keys.egress.of-runtime" "egressPolicy in runtimeConfig must allow as well" r#"{"capabilities": {"egressPolicy": true}, "runtimeConfig": {"egressPolicy": {"allow": [{"to": ["10.89.0.1"], "ports": ["tcp/8443"]}]}}}"# => |seen| seen.connects(443, MOMENT).map(|does| !does);
    "keys.egress.of-args" "and that in args.cni" r#"{"args": {"cni": {"egressPolicy": {"allow": [{"to": ["10.89.0.1"], "ports": ["tcp/8443"]}]}}}}"# => |seen| seen.connects(443, MOMENT).map(|does| !does);
    "keys.egress.of-cni-args" "and the file that EGRESS_POLICY in CNI_ARGS names" r#"{"policyDir": "/run/cni/policies"}"# "IgnoreUnknown=1;EGRESS_POLICY=none" => |seen| seen.connects(443, MOMENT).map(|does| !does);
    "keys.egress.serve" "serve lets the container answer clients" r#"{"serve": ["tcp/80"]}"# => |seen| seen.answers(LIMIT);
    "keys.egress.replies" "for TCP it does so without serve" r"{}" => |seen| seen.answers(LIMIT);
    "keys.egress.published" "nor does it need serve for its mapped ports" r#"{"capabilities": {"portMappings": true}, "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}}"# => |seen| seen.answers(LIMIT);
    "keys.vrf.up" "the VRF is up" r"{}" => |seen| Ok(seen.inside_link("blue")?.up);
    "keys.vrf.table" "table is the VRF's" r#"{"vrfname": "green", "table": 77}"# => |seen| Ok(seen.inside_link("green")?.detail.contains("TableId(77)"));
    "keys.vrf.routes" "the routes of the interface are in its table" r#"{"vrfname": "green", "table": 77}"# => |seen| seen.inside("by eth0 table 77");
};

/// Tests each key of the plugin's type in a new container.
pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    fs::write("/run/resolv.conf", "nameserver 10.1.2.3\n")?;
    fs::create_dir_all("/run/cni/policies")?;
    fs::write("/run/cni/policies/none.json", "{}")?;
    let asks = |key: &&Key| subject.asks(key.assertion.id) || subject.asks("keys.del");
    for key in TABLE.iter().filter(|key| key.assertion.kind() == subject.kind.name).filter(asks) {
        let subject = &subject.with(serde_json::from_str(key.members)?);
        let at = subject.container()?;
        let added = subject.call("ADD", &at, at.prev.as_ref()).env("CNI_ARGS", key.args).run()?;
        let seen = added.result().map(|result| Seen {
            subject,
            at: &at,
            result,
            is_deleted: Cell::new(false),
        });
        let holds = seen.as_ref().is_some_and(|seen| (key.holds)(seen).unwrap_or(false));
        check.of(key.assertion.id, &added, holds);
        let deleted = subject.end(&at, added.result());
        if seen.is_some_and(|seen| seen.is_deleted.get()) {
            deleted?;
        } else {
            check.succeeds("keys.del", deleted)?;
        }
    }
    Ok(())
}

impl Seen<'_> {
    fn inside_link(&self, name: &str) -> Result<Link> {
        let link = self.at.netns.link(name)?;
        link.ok_or_else(|| format!("{name} is not in the container").into())
    }

    /// The container's interface.
    fn link(&self) -> Result<Link> {
        self.inside_link(self.at.ifname)
    }

    fn has_mac(&self) -> Result<bool> {
        Ok(self.link()?.mac == MAC)
    }

    fn detail(&self, text: &str) -> Result<bool> {
        Ok(self.link()?.detail.contains(text))
    }

    /// The host's end of the container's interface.
    fn port(&self) -> Result<Link> {
        let is_host = |one: &&Value| one["sandbox"].as_str().unwrap_or_default().is_empty();
        let ends = results::list(self.result, "interfaces").filter(is_host);
        let mut links = ends.filter_map(|end| node_link(end["name"].as_str()?).ok());
        links.find(|link| link.kind == "veth").ok_or_else(|| "the result names no end".into())
    }

    fn port_file(&self, name: &str) -> Result<String> {
        let path = format!("/sys/class/net/{}/brport/{name}", self.port()?.name);
        Ok(fs::read_to_string(path)?.trim().to_owned())
    }

    fn sysctl(&self, name: &str) -> Result<String> {
        let path = format!("/proc/sys/net/ipv4/conf/{}/{name}", self.at.ifname);
        self.at.netns.run(|| Ok(fs::read_to_string(path)?.trim().to_owned()))
    }

    /// Whether a line of the container's snapshot contains this text.
    fn inside(&self, text: &str) -> Result<bool> {
        Ok(self.at.netns.snapshot()?.has(text))
    }

    fn has_default_route(&self, gateway: &str) -> Result<bool> {
        let routes = self.at.netns.run(observe::routes)?;
        Ok(routes.iter().any(|route| route.dst.is_none() && route.gateway == Some(ip(gateway))))
    }

    fn has_host_routes(&self) -> Result<bool> {
        let snapshot = world::snapshot()?;
        let addresses = results::addresses(self.result);
        Ok(addresses.iter().all(|(ip, _)| snapshot.has(&format!("\"{ip}\"/"))))
    }

    fn has(&self, address: &str) -> bool {
        results::addresses(self.result).iter().any(|(known, _)| *known == ip(address))
    }

    fn has_gateway(&self, address: &str) -> bool {
        results::gateways(self.result).contains(&ip(address))
    }

    fn has_no_address(&self) -> bool {
        results::addresses(self.result).is_empty()
    }

    fn is_only_in(&self, start: &str) -> bool {
        let addresses = results::addresses(self.result);
        addresses.len() == 1 && addresses.iter().all(|(ip, _)| ip.to_string().starts_with(start))
    }

    fn has_dns(&self) -> bool {
        self.result["dns"]["nameservers"] == json!(["10.1.2.3"])
    }

    /// ADD of another container.
    fn again(&self) -> Result<Answer> {
        let call = self.subject.call("ADD", self.at, self.at.prev.as_ref());
        call.env("CNI_CONTAINERID", "sanity-2").run()
    }

    fn del(&self) -> Result<()> {
        self.is_deleted.set(true);
        self.subject.run("DEL", self.at, Some(self.result)).map(drop)
    }

    /// The source address that the container sees when a namespace connects to port 8080 of an
    /// address.
    fn maps(&self, from: &Netns, to: IpAddr, limit: Duration) -> Result<Option<IpAddr>> {
        tcp(from, SocketAddr::new(to, 8080), &self.at.netns, 80, limit)
    }

    fn maps_from_outside(&self) -> Result<Option<IpAddr>> {
        self.maps(&world::outside(), NODE[0], LIMIT)
    }

    fn is_closed(&self) -> Result<bool> {
        Ok(self.maps(&world::outside(), NODE[0], MOMENT)?.is_none())
    }

    /// Whether the container reaches this TCP port of the other host.
    fn connects(&self, port: u16, limit: Duration) -> Result<bool> {
        let to = SocketAddr::new(OUTSIDE[0], port);
        Ok(tcp(&self.at.netns, to, &world::outside(), port, limit)?.is_some())
    }

    /// Whether the node reaches TCP port 80 of the container.
    fn answers(&self, limit: Duration) -> Result<bool> {
        let (ip, _) = results::addresses(self.result)
            .into_iter()
            .find(|(ip, _)| ip.is_ipv4())
            .ok_or("no address")?;
        Ok(tcp(&world::node(), SocketAddr::new(ip, 80), &self.at.netns, 80, limit)?.is_some())
    }

    /// Whether the other host, which has no route to the container, answers an echo request.
    fn pings(&self, limit: Duration) -> Result<bool> {
        pings(&self.at.netns, OUTSIDE[0], limit)
    }
}

/// A number among the attributes of a tap, as `netlink-packet-route` prints it: 1 is
/// `IFLA_TUN_OWNER` of `linux/if_link.h`, and 2 `IFLA_TUN_GROUP`.
fn number_of_tun(kind: u16, number: u32) -> String {
    format!("kind: {kind}, value: {:?}", number.to_ne_bytes())
}

fn node_link(name: &str) -> Result<Link> {
    world::node().link(name)?.ok_or_else(|| format!("{name} is not on the node").into())
}

fn node_has(text: &str) -> Result<bool> {
    Ok(world::snapshot()?.has(text))
}

/// Parses the literal of an address.
fn ip(text: &str) -> IpAddr {
    text.parse().unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
}
