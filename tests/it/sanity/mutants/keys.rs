//! Mutants: keys and values of configurations.

use super::{Row, rows};

/// The mutants of this file.
pub(super) const ALL: &[&[Row]] = &[V1_1_0];

const V1_1_0: &[Row] = rows! { "1.1.0"
    "bridge" "ADD" "values.bridge.vlan-too-large" "run || exit 0";
    "ptp" "ADD" "values.ptp.mtu-text" "run || exit 0";
    "macvlan" "ADD" "values.macvlan.mode" "run || exit 0";
    "host-device" "ADD" "values.host-device.device" "run || exit 0";
    "tap" "ADD" "values.tap.mtu-text" "run || exit 0";
    "host-local" "ADD" "values.host-local.overlap" "run || exit 0";
    "host-local" "ADD" "values.host-local.request-outside" "CNI_ARGS= run";
    "static" "ADD" "values.static.address" "run || exit 0";
    "portmap" "ADD" "values.portmap.protocol" "run || exit 0";
    "tuning" "ADD" "values.tuning.sysctl-unknown" "run || exit 0";
    "bandwidth" "ADD" "values.bandwidth.no-burst" "run || exit 0";
    "firewall" "ADD" "values.firewall.ingress-policy" "run || exit 0";
    "sbr" "ADD" "values.sbr.table-text" "run || exit 0";
    "tc-redirect-tap" "ADD" "values.tc-redirect-tap.uid" "CNI_ARGS= run";
    "dhcp" "ADD" "values.dhcp.no-daemon" "run || exit 0";
    "flannel" "ADD" "values.flannel.delegate-text" "run || exit 0";
    "static" "ADD" "values.leave-nothing" "run || { touch /run/left.$$; exit 1; }";
    "bridge" "ADD" "keys.bridge.mtu" "in=$(echo \"$in\" | sed 's/\"mtu\":1400/\"mtu\":1300/'); run";
    "bridge" "ADD" "keys.bridge.port" "run; status=$?; for port in $(ls /sys/class/net/sanity0/brif); do ip link set $port nomaster; done; exit $status";
    "bridge" "ADD" "keys.bridge.gateway-address6" "run; status=$?; ip -6 addr flush dev sanity0; exit $status";
    "bridge" "ADD" "keys.bridge.no-gateway" r#"in=$(echo "$in" | sed 's/"isGateway":false/"isGateway":true/'); run"#;
    "bridge" "ADD" "keys.bridge.default-gateway" r#"in=$(echo "$in" | sed 's/"isDefaultGateway":true/"isDefaultGateway":false/'); run"#;
    "bridge" "ADD" "keys.bridge.hairpin" r#"in=$(echo "$in" | sed 's/"hairpinMode":true/"hairpinMode":false/'); run"#;
    "bridge" "ADD" "keys.bridge.no-hairpin" r#"in=$(echo "$in" | sed 's/{/{"hairpinMode":true,/'); run"#;
    "bridge" "ADD" "keys.bridge.promisc" r#"in=$(echo "$in" | sed 's/"promiscMode":true/"promiscMode":false/'); run"#;
    "bridge" "ADD" "keys.bridge.mac" r#"in=$(echo "$in" | sed 's/"runtimeConfig"/"other"/'); run"#;
    "bridge" "ADD" "keys.bridge.mac-of-cni-args" "CNI_ARGS= run";
    "bridge" "ADD" "keys.bridge.no-masquerade" r#"in=$(echo "$in" | sed 's/"ipMasq":false/"ipMasq":true/'); run"#;
    "bridge" "DEL" "keys.del" "exit 1";
    "ptp" "ADD" "keys.ptp.host-route" "run; status=$?; ip route flush dev $(ls /sys/class/net | grep veth); exit $status";
    "macvlan" "ADD" "keys.macvlan.mode-private" r#"in=$(echo "$in" | sed 's/private/bridge/'); run"#;
    "macvlan" "ADD" "keys.macvlan.mac" r#"in=$(echo "$in" | sed 's/"runtimeConfig"/"other"/'); run"#;
    "host-device" "DEL" "keys.host-device.back" "exit 0";
    "tap" "ADD" "keys.tap.mac" r#"in=$(echo "$in" | sed 's/"mac"/"other"/'); run"#;
    "loopback" "ADD" "keys.loopback.address4" "run; status=$?; inside ip -4 addr flush dev lo; exit $status";
    "host-local" "ADD" "keys.host-local.range-start" r#"in=$(echo "$in" | sed 's/"rangeStart"/"other"/'); run"#;
    "host-local" "ADD" "keys.host-local.data-dir" r#"in=$(echo "$in" | sed 's/"dataDir"/"other"/'); run"#;
    "host-local" "ADD" "keys.host-local.resolv-conf" r#"in=$(echo "$in" | sed 's/"resolvConf"/"other"/'); run"#;
    "host-local" "ADD" "keys.host-local.request" "CNI_ARGS= run";
    "host-local" "ADD" "keys.host-local.request-taken" "run || exit 0";
    "host-local" "ADD" "keys.host-local.gateway" "bend 's/10.88.0.254/10.88.0.1/'";
    "static" "ADD" "keys.static.gateway" r#"bend 's/"gateway": "10.88.0.1"/"gateway": "10.88.0.9"/'"#;
    "static" "ADD" "keys.static.request" "CNI_ARGS= run";
    "portmap" "ADD" "keys.portmap.host-ip" r#"in=$(echo "$in" | sed 's/10.89.0.2/10.89.0.3/'); run"#;
    "portmap" "ADD" "keys.portmap.other-host-ip" r#"in=$(echo "$in" | sed 's/"hostIP"/"other"/'); run"#;
    "portmap" "DEL" "keys.portmap.stops" "exit 0";
    "portmap" "DEL" "keys.portmap.udp-stops" "exit 0";
    "portmap" "ADD" "keys.portmap.from-localhost" r#"in=$(echo "$in" | sed 's/{/{"snat":false,/'); run"#;
    "tuning" "ADD" "keys.tuning.queue" r#"in=$(echo "$in" | sed 's/"txQLen":77/"txQLen":78/'); run"#;
    "tuning" "DEL" "keys.tuning.promisc-back" "exit 0";
    "tuning" "DEL" "keys.tuning.mtu-back" "exit 0";
    "bandwidth" "ADD" "keys.bandwidth.egress" r#"in=$(echo "$in" | sed 's/"egressRate":8000000/"egressRate":0/;s/"egressBurst":800000/"egressBurst":0/'); run"#;
    "bandwidth" "ADD" "keys.bandwidth.of-runtime" r#"in=$(echo "$in" | sed 's/"runtimeConfig"/"other"/'); run"#;
    "tc-redirect-tap" "ADD" "keys.tc-redirect-tap.name" "CNI_ARGS= run";
    "tc-redirect-tap" "ADD" "keys.tc-redirect-tap.owner" "CNI_ARGS=TC_REDIRECT_TAP_NAME=vm0 run";
    "sbr" "ADD" "keys.sbr.table-key" r#"in=$(echo "$in" | sed 's/"table":500/"table":501/'); run"#;
};
