//! Mutants: calls of delegated plugins.

use super::{Row, rows};

/// The mutants of this file.
pub(super) const ALL: &[&[Row]] = &[V1_1_0];

const V1_1_0: &[Row] = rows! { "1.1.0"
    "ptp" "ADD" "delegation.ipam.refuses-del" r#"run; status=$?; sed -i '/"CNI_COMMAND":"DEL"/d' /run/recorder/calls; exit $status"#;
    "ptp" "ADD" "delegation.containerid" "CNI_CONTAINERID=other run";
    "ptp" "ADD" "delegation.args" "unset CNI_ARGS; run";
    "ptp" "ADD" "delegation.path" "CNI_PATH=/run/nowhere:$CNI_PATH run";
    "ptp" "ADD" "delegation.path-later" "CNI_PATH=${CNI_PATH%%:*} run";
    "ptp" "ADD" "delegation.path-first" "CNI_PATH=/run/recorder run";
    "ptp" "ADD" "delegation.path-only" "CNI_PATH=$CNI_PATH:/run/recorder run";
    "ptp" "ADD" "delegation.type-path" r#"case $in in *../second*) in=$(echo "$in" | sed 's,\.\./second/,,') ;; esac; run"#;
    "ptp" "ADD" "delegation.type-path-not-run" r#"case $in in *../second*) in=$(echo "$in" | sed 's,\.\./second/,,'); CNI_PATH=/run/second run ;; *) run ;; esac"#;
    "ptp" "ADD" "delegation.version" r#"in=$(echo "$in" | sed 's/"cniVersion":"1.1.0"/"cniVersion":"1.0.0"/'); run"#;
    "ptp" "ADD" "delegation.name" r#"in=$(echo "$in" | sed 's/"name":"sanity"/"name":"other"/'); run"#;
    "ptp" "ADD" "delegation.configuration" r#"in=$(echo "$in" | sed 's/"ipMasq":true/"ipMasq":false/'); run"#;
    "ptp" "ADD" "delegation.stderr" "run 2>/dev/null";
    "ptp" "ADD" "delegation.message" "bend 's/no room/failed/'";
    "ptp" "ADD" "delegation.details" "bend 's/at the inn//'";
    "ptp" "ADD" "delegation.code" "bend 's/111/999/'";
    "ptp" "ADD" "delegation.ipam.section" r#"in=$(echo "$in" | sed 's/"key":\[1,2\]/"key":[1]/'); run"#;
    "ptp" "ADD" "delegation.ipam.add" r#"in=$(echo "$in" | sed 's/sanity-recorder/host-local/'); run"#;
    "ptp" "ADD" "delegation.ipam.add-once" "run >/dev/null; CNI_COMMAND=DEL run >/dev/null; run";
    "ptp" "ADD" "delegation.ipam.addresses" "bend 's,10.88.0.77/16,10.88.0.78/16,'";
    "ptp" "ADD" "delegation.ipam.addresses-set" "run; status=$?; inside ip addr flush dev eth0; exit $status";
    "ptp" "ADD" "delegation.ipam.routes" "bend 's,10.123.0.0/16,10.124.0.0/16,'";
    "ptp" "ADD" "delegation.ipam.routes-set" "run; status=$?; inside ip route del 10.123.0.0/16; exit $status";
    "ptp" "ADD" "delegation.ipam.dns" "bend 's/10.1.2.3/10.1.2.4/'";
    "ptp" "CHECK" "delegation.ipam.check" "exit 0";
    "ptp" "CHECK" "delegation.ipam.check-fails" "run; exit 0";
    "ptp" "DEL" "delegation.netns" "CNI_NETNS=/run/netns/outside run";
    "ptp" "DEL" "delegation.ipam.del" "exit 0";
    "ptp" "DEL" "delegation.ipam.del-fails" "run; exit 0";
    "ptp" "DEL" "delegation.ipam.del-no-netns" r#"[ -n "$CNI_NETNS" ] || exit 0; run"#;
    "ptp" "DEL" "delegation.ifname" "CNI_IFNAME=eth7 run";
    "ptp" "GC" "delegation.ipam.gc" "exit 0";
    "ptp" "GC" "delegation.ipam.gc-fails" "run; exit 0";
    "ptp" "GC" "delegation.ipam.gc-attachments" r#"in=$(echo "$in" | sed 's/"containerID":"valid"/"containerID":"other"/'); run"#;
    "ptp" "STATUS" "delegation.ipam.status" "exit 0";
    "ptp" "STATUS" "delegation.ipam.status-fails" "run; exit 0";
    "ptp" "ADD" "delegation.ipam.refuses" "run || exit 0";
    "bridge" "ADD" "delegation.ipam.garbage" "run || exit 0";
    "bridge" "ADD" "delegation.ipam.silent" "run || exit 0";
    "bridge" "ADD" "delegation.ipam.silent-failure" "run || exit 0";
    "bridge" "ADD" "delegation.ipam.killed" "run || exit 0";
    "macvlan" "ADD" "delegation.ipam.no-address" "run || exit 0";
    "macvlan" "ADD" "delegation.ipam.unusable" "run || exit 0";
    "tap" "ADD" "delegation.ipam.leaves-nothing" "run || { touch /run/left.$$; exit 1; }";
    "flannel" "ADD" "delegation.flannel.add" "exit 1";
    "flannel" "ADD" "delegation.flannel.own-keys" r#"in=$(echo "$in" | sed 's/"hairpinMode":true/"hairpinMode":false/'); run"#;
    "flannel" "ADD" "delegation.flannel.subnet" "sed -i 's/10.88.3.1/10.88.4.1/' /run/subnet.env; run";
    "flannel" "ADD" "delegation.flannel.route" "sed -i 's,NETWORK=10.88.0.0/16,NETWORK=10.99.0.0/16,' /run/subnet.env; run";
    "flannel" "ADD" "delegation.flannel.mtu" "sed -i 's/1400/1300/' /run/subnet.env; run";
    "flannel" "ADD" "delegation.flannel.masquerade" "sed -i 's/IPMASQ=false/IPMASQ=true/' /run/subnet.env; run";
    "flannel" "ADD" "delegation.flannel.result" "bend 's,10.88.0.77,10.88.0.78,'";
    "flannel" "DEL" "delegation.flannel.del" "exit 0";
    "flannel" "DEL" "delegation.flannel.del-twice" "[ -e /run/once ] && exit 1; touch /run/once; run";
    "flannel" "ADD" "delegation.flannel.refuses" "run || exit 0";
    "flannel" "DEL" "delegation.flannel.leaves-nothing" "run; touch /run/left.$$";
};
