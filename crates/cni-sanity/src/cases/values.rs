//! Invalid values: ADD with each fails, and leaves nothing.

use super::{Check, Result, Subject, leftovers};
use crate::assertion::{Assertion, BLIND, Level};
use crate::spec::OWN;
use crate::world;

/// The assertion about all values.
const LEAVES_NOTHING: &str = "values.leave-nothing";

/// A value that must be refused.
#[derive(Debug)]
pub struct Wrong {
    pub assertion: Assertion,
    /// Members of the configuration, in JSON, that replace the valid ones.
    members: &'static str,
    /// The value of `CNI_ARGS`.
    args: &'static str,
}

macro_rules! wrong {
    ($($id:literal $text:literal $members:literal $($args:literal)?;)*) => {
        &[$(Wrong {
            assertion: Assertion { id: $id, level: Level::Recommended, clauses: OWN, text: $text, why: BLIND },
            members: $members,
            args: concat!($($args)?),
        },)*]
    };
}

pub const TABLE: &[Wrong] = wrong! {
    "values.bridge.mtu-text" "an mtu that is text is refused" r#"{"mtu": "big"}"#;
    "values.bridge.mtu-too-small" "an mtu below what the kernel takes is refused" r#"{"mtu": 10}"#;
    "values.bridge.masquerade-text" "ipMasq that is text is refused" r#"{"ipMasq": "yes"}"#;
    "values.bridge.hairpin-and-promisc" "hairpinMode together with promiscMode is refused" r#"{"hairpinMode": true, "promiscMode": true}"#;
    "values.bridge.vlan-negative" "a negative vlan is refused" r#"{"vlan": -1}"#;
    "values.bridge.vlan-too-large" "a vlan above 4094 is refused" r#"{"vlan": 4095}"#;
    "values.bridge.trunk-backwards" "a trunk whose minID is above its maxID is refused" r#"{"vlanTrunk": [{"minID": 10, "maxID": 5}]}"#;
    "values.bridge.name-too-long" "a bridge name of more than 15 bytes is refused" r#"{"bridge": "a-name-that-is-too-long"}"#;
    "values.bridge.name-slash" "a bridge name with a slash is refused" r#"{"bridge": "a/b"}"#;
    "values.bridge.no-bridge" "a link that is no bridge is not used as one" r#"{"bridge": "eth0"}"#;
    "values.bridge.mac" "a mac that is none is refused" r#"{"capabilities": {"mac": true}, "runtimeConfig": {"mac": "none"}}"#;
    "values.ptp.mtu-text" "an mtu that is text is refused" r#"{"mtu": "big"}"#;
    "values.ptp.mtu-too-small" "an mtu below what the kernel takes is refused" r#"{"mtu": 10}"#;
    "values.ptp.masquerade-text" "ipMasq that is text is refused" r#"{"ipMasq": "yes"}"#;
    "values.macvlan.mode" "a mode that is none is refused" r#"{"mode": "sideways"}"#;
    "values.macvlan.master" "a master that is not there is refused" r#"{"master": "nowhere0"}"#;
    "values.macvlan.mtu-above-master" "an mtu above the master's is refused" r#"{"mtu": 9000}"#;
    "values.macvlan.mtu-negative" "a negative mtu is refused" r#"{"mtu": -1}"#;
    "values.macvlan.mac" "a mac that is none is refused" r#"{"capabilities": {"mac": true}, "runtimeConfig": {"mac": "none"}}"#;
    "values.ipvlan.mode" "a mode that is none is refused" r#"{"mode": "sideways"}"#;
    "values.ipvlan.master" "a master that is not there is refused" r#"{"master": "nowhere0"}"#;
    "values.ipvlan.mtu-above-master" "an mtu above the master's is refused" r#"{"mtu": 9000}"#;
    "values.vlan.id-negative" "a negative vlanId is refused" r#"{"vlanId": -1}"#;
    "values.vlan.id-too-large" "a vlanId above 4094 is refused" r#"{"vlanId": 4095}"#;
    "values.vlan.master" "a master that is not there is refused" r#"{"master": "nowhere0"}"#;
    "values.vlan.mtu-above-master" "an mtu above the master's is refused" r#"{"mtu": 9000}"#;
    "values.host-device.no-device" "a configuration that names no device is refused" r#"{"device": ""}"#;
    "values.host-device.device" "a device that is not there is refused" r#"{"device": "nowhere0"}"#;
    "values.host-device.hwaddr" "a hwaddr that is none is refused" r#"{"device": "", "hwaddr": "none"}"#;
    "values.host-device.pci" "a pciBusID that is not there is refused" r#"{"device": "", "pciBusID": "0000:ff:1f.7"}"#;
    "values.bond.mode" "a mode that is none is refused" r#"{"mode": "sideways"}"#;
    "values.bond.one-link" "a single link is refused" r#"{"links": [{"name": "spare0"}]}"#;
    "values.bond.link" "a link that is not there is refused" r#"{"links": [{"name": "spare0"}, {"name": "nowhere0"}]}"#;
    "values.bond.mtu-above-links" "an mtu above that of the links is refused" r#"{"mtu": 9000}"#;
    "values.bond.miimon" "a miimon that is no number is refused" r#"{"miimon": "often"}"#;
    "values.bond.fail-over-mac" "a failOverMac above 2 is refused" r#"{"failOverMac": 3}"#;
    "values.bond.tlb" "tlbDynamicLb with another mode than balance-tlb and balance-alb is refused" r#"{"tlbDynamicLb": 1}"#;
    "values.tap.mtu-text" "an mtu that is text is refused" r#"{"mtu": "big"}"#;
    "values.tap.mac" "a mac that is none is refused" r#"{"capabilities": {"mac": true}, "runtimeConfig": {"mac": "none"}}"#;
    "values.tap.bridge" "a bridge that is not there is refused" r#"{"bridge": "nowhere0"}"#;
    "values.host-local.no-range" "a configuration without a range is refused" r#"{"ipam": {"type": "host-local"}}"#;
    "values.host-local.subnet" "a subnet that is none is refused" r#"{"ipam": {"type": "host-local", "ranges": [[{"subnet": "none"}]]}}"#;
    "values.host-local.host-bits" "a subnet with bits of a host is refused" r#"{"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.5/16"}]]}}"#;
    "values.host-local.too-small" "a subnet without room for a container is refused" r#"{"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/32"}]]}}"#;
    "values.host-local.start-outside" "a rangeStart outside the subnet is refused" r#"{"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16", "rangeStart": "10.99.0.1"}]]}}"#;
    "values.host-local.end-outside" "a rangeEnd outside the subnet is refused" r#"{"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16", "rangeEnd": "10.99.0.1"}]]}}"#;
    "values.host-local.gateway" "a gateway that is none is refused" r#"{"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16", "gateway": "none"}]]}}"#;
    "values.host-local.overlap" "ranges of a set that overlap are refused" r#"{"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}, {"subnet": "10.88.1.0/24"}]]}}"#;
    "values.host-local.overlap-of-sets" "sets of ranges that overlap are refused" r#"{"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}], [{"subnet": "10.88.1.0/24"}]]}}"#;
    "values.host-local.families" "a set with both families is refused" r#"{"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}, {"subnet": "fd88::/64"}]]}}"#;
    "values.host-local.empty-set" "a set without a range is refused" r#"{"ipam": {"type": "host-local", "ranges": [[]]}}"#;
    "values.host-local.route" "a route whose dst is none is refused" r#"{"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}]], "routes": [{"dst": "none"}]}}"#;
    "values.host-local.resolv-conf" "a resolvConf that is not there is refused" r#"{"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}]], "resolvConf": "/run/nowhere"}}"#;
    "values.host-local.request-outside" "a requested address outside the ranges is refused" r"{}" "IP=10.99.0.1";
    "values.host-local.request" "a requested address that is none is refused" r"{}" "IP=none";
    "values.host-local.request-gateway" "a requested address that is the gateway's is refused" r"{}" "IP=10.88.0.1";
    "values.static.address" "an address that is none is refused" r#"{"ipam": {"type": "static", "addresses": [{"address": "none"}]}}"#;
    "values.static.no-prefix" "an address without a prefix length is refused" r#"{"ipam": {"type": "static", "addresses": [{"address": "10.88.0.5"}]}}"#;
    "values.static.gateway" "a gateway that is none is refused" r#"{"ipam": {"type": "static", "addresses": [{"address": "10.88.0.5/16", "gateway": "none"}]}}"#;
    "values.static.route" "a route whose dst is none is refused" r#"{"ipam": {"type": "static", "addresses": [{"address": "10.88.0.5/16"}], "routes": [{"dst": "none"}]}}"#;
    "values.static.request" "a requested address that is none is refused" r"{}" "IP=none";
    "values.portmap.host-port-text" "a hostPort that is text is refused" r#"{"runtimeConfig": {"portMappings": [{"hostPort": "http", "containerPort": 80, "protocol": "tcp"}]}}"#;
    "values.portmap.host-port-too-large" "a hostPort above 65535 is refused" r#"{"runtimeConfig": {"portMappings": [{"hostPort": 70000, "containerPort": 80, "protocol": "tcp"}]}}"#;
    "values.portmap.container-port-zero" "containerPort 0 is refused" r#"{"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 0, "protocol": "tcp"}]}}"#;
    "values.portmap.container-port-too-large" "a containerPort above 65535 is refused" r#"{"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 70000, "protocol": "tcp"}]}}"#;
    "values.portmap.protocol" "a protocol that is none is refused" r#"{"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "none"}]}}"#;
    "values.portmap.host-ip" "a hostIP that is none is refused" r#"{"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": "none"}]}}"#;
    "values.portmap.mark-bit" "a markMasqBit above 31 is refused" r#"{"markMasqBit": 32}"#;
    "values.portmap.mark-twice" "markMasqBit together with externalSetMarkChain is refused" r#"{"markMasqBit": 5, "externalSetMarkChain": "MARK-IT"}"#;
    "values.tuning.sysctl-outside" "a kernel parameter that is not of the network is refused" r#"{"sysctl": {"kernel.hostname": "sanity"}}"#;
    "values.tuning.sysctl-path" "a kernel parameter that leads out of net is refused" r#"{"sysctl": {"net/../kernel/hostname": "sanity"}}"#;
    "values.tuning.sysctl-unknown" "a kernel parameter that is not there is refused" r#"{"sysctl": {"net.ipv4.conf.eth0.nothing": "1"}}"#;
    "values.tuning.sysctl-value" "a value that the kernel does not take is refused" r#"{"sysctl": {"net.ipv4.conf.eth0.arp_filter": "many"}}"#;
    "values.tuning.mac" "a mac that is none is refused" r#"{"mac": "none"}"#;
    "values.tuning.mtu" "an mtu below what the kernel takes is refused" r#"{"mtu": 10}"#;
    "values.tuning.promisc-text" "promisc that is text is refused" r#"{"promisc": "yes"}"#;
    "values.bandwidth.no-burst" "a rate without a burst is refused" r#"{"ingressBurst": 0}"#;
    "values.bandwidth.no-rate" "a burst without a rate is refused" r#"{"egressRate": 0}"#;
    "values.bandwidth.burst-too-large" "a burst above 4 GiB is refused" r#"{"ingressBurst": 40000000000}"#;
    "values.bandwidth.rate-negative" "a negative rate is refused" r#"{"ingressRate": -8000}"#;
    "values.bandwidth.rate-text" "a rate that is text is refused" r#"{"ingressRate": "8M"}"#;
    "values.firewall.ingress-policy" "an ingressPolicy that is none is refused" r#"{"ingressPolicy": "none"}"#;
    "values.sbr.table-text" "a table that is text is refused" r#"{"table": "main"}"#;
    "values.route-override.dst" "a dst that is none is refused" r#"{"addroutes": [{"dst": "none"}]}"#;
    "values.route-override.no-dst" "a route without dst is refused" r#"{"addroutes": [{"gw": "10.88.0.1"}]}"#;
    "values.route-override.gw" "a gw that no subnet contains is refused" r#"{"addroutes": [{"dst": "10.204.0.0/16", "gw": "192.0.2.1"}]}"#;
    "values.route-override.taken" "a second default route is refused" r#"{"addroutes": [{"dst": "0.0.0.0/0", "gw": "10.88.0.9"}]}"#;
    "values.route-override.flush-text" "flushroutes that is text is refused" r#"{"flushroutes": "yes"}"#;
    "values.tc-redirect-tap.uid" "a TC_REDIRECT_TAP_UID that is no number is refused" r"{}" "TC_REDIRECT_TAP_UID=root";
    "values.egress.policy" "a policy that is no verdict is refused" r#"{"policy": "some"}"#;
    "values.egress.profile" "a profile that is none is refused" r#"{"profile": "none"}"#;
    "values.egress.to" "a network that is none is refused" r#"{"allow": [{"to": ["10.0.0/8"]}]}"#;
    "values.egress.ports" "a service that is none is refused" r#"{"allow": [{"to": ["10.0.0.0/8"], "ports": ["tcp/http"]}]}"#;
    "values.egress.key" "an unknown key of an entry is refused" r#"{"allow": [{"to": ["10.0.0.0/8"], "port": ["tcp/443"]}]}"#;
    "values.egress.serve" "a served service that is none is refused" r#"{"serve": ["tcp/http"]}"#;
    "values.egress.no-directory" "EGRESS_POLICY without policyDir is refused" r"{}" "EGRESS_POLICY=web";
    "values.egress.no-file" "EGRESS_POLICY without such a file is refused" r#"{"policyDir": "/run/cni/policies"}"# "EGRESS_POLICY=web";
    "values.vrf.no-name" "a configuration without vrfname is refused" r#"{"vrfname": ""}"#;
    "values.vrf.name-too-long" "a vrfname of more than 15 bytes is refused" r#"{"vrfname": "a-name-that-is-too-long"}"#;
    "values.dhcp.no-daemon" "ADD without a daemon is refused" r"{}";
    "values.flannel.no-subnet-file" "ADD without the daemon's file is refused" r"{}";
    "values.flannel.delegate-name" "a delegate with a name is refused" r#"{"subnetFile": "/run/subnet.env", "delegate": {"name": "other"}}"#;
    "values.flannel.delegate-text" "a delegate that is no object is refused" r#"{"subnetFile": "/run/subnet.env", "delegate": "bridge"}"#;
};

/// Calls ADD with each value of the plugin's type, in one container: no call may change anything.
pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let at = subject.container()?;
    std::fs::write("/run/subnet.env", SUBNET)?;
    let asks = |wrong: &&Wrong| subject.asks(wrong.assertion.id) || subject.asks(LEAVES_NOTHING);
    let own = TABLE.iter().filter(|wrong| wrong.assertion.kind() == subject.kind.name).filter(asks);
    let own: Vec<&Wrong> = own.collect();
    let add = |subject: &Subject<'_>, wrong: &Wrong| {
        subject.prepare()?;
        subject.call("ADD", &at, at.prev.as_ref()).env("CNI_ARGS", wrong.args).run()
    };
    let del = |subject: &Subject<'_>| subject.run("DEL", &at, at.prev.as_ref());
    // Objects that the first calls create for all later calls, such as chains, a bridge or a log,
    // are no leak.
    subject.run("ADD", &at, at.prev.as_ref())?;
    del(subject)?;
    if let Some(wrong) = own.first() {
        let subject = subject.with(serde_json::from_str(wrong.members)?);
        add(&subject, wrong)?;
        del(&subject)?;
    }
    for wrong in own {
        let subject = subject.with(serde_json::from_str(wrong.members)?);
        subject.prepare()?;
        let (before, inside) = (world::snapshot()?, at.netns.snapshot()?);
        let added = check.fails(wrong.assertion.id, add(&subject, wrong))?;
        // The DEL that follows each ADD.
        del(&subject)?;
        if !added.succeeded() {
            let mut left = leftovers(&before)?;
            left.extend(at.netns.snapshot()?.without(&inside));
            check.that(LEAVES_NOTHING, left.is_empty(), || {
                format!("{}: {}", wrong.assertion.id, left.join("; "))
            });
        }
    }
    Ok(())
}

/// The file that flannel's daemon writes.
pub const SUBNET: &str = "\
FLANNEL_NETWORK=10.88.0.0/16
FLANNEL_SUBNET=10.88.3.1/24
FLANNEL_MTU=1400
FLANNEL_IPMASQ=false
";
