//! Mutants: VERSION, parameters, configurations, errors, and the form of results.

use super::{Row, rows};

/// The mutants of this file.
pub(super) const ALL: &[&[Row]] = &[V1_1_0, V0_2_0, V0_3_1, V0_4_0, V1_0_0];

const V0_2_0: &[Row] = rows! { "0.2.0"
    "host-local" "ADD" "result.old.no-ips" r#"bend '1s/{/{"ips": [],/'"#;
    "host-local" "ADD" "result.old.ip4" "bend 's,10.88.0.[0-9]*/16,fd88::9/64,'";
};

const V0_3_1: &[Row] = rows! { "0.3.1"
    "loopback" "CHECK" "env.command.check-early" "exit 0";
};

const V0_4_0: &[Row] = rows! { "0.4.0"
    "host-local" "ADD" "result.ip.version" r#"bend 's/"version": "4"/"version": "6"/'"#;
};

const V1_0_0: &[Row] = rows! { "1.0.0"
    "loopback" "VERSION" "version.supports-configured" r#"bend 's/,"1.0.0"//'"#;
    "loopback" "VERSION" "version.supports-configured" "exit 1";
    "loopback" "ADD" "error.code-reserved" r#"bend 's/"code": 7/"code": 77/'"#;
    "loopback" "ADD" "result.json" "run; echo added" "5.json";
    "host-local" "ADD" "ipam.no-index" r#"bend 's/"address"/"interface": 0, "address"/'"#;
    "loopback" "VERSION" "version.succeeds" "exit 1";
    "loopback" "VERSION" "version.json" "echo hello";
    "loopback" "VERSION" "version.cni-version" r#"bend 's/"cniVersion":"[^"]*"/"cniVersion":"new"/'"#;
    "loopback" "VERSION" "version.includes-own" r#"bend 's/"cniVersion":"[^"]*"/"cniVersion":"0.0.7"/'"#;
    "loopback" "VERSION" "version.supported-unique" r#"bend 's/"0.1.0"/"0.1.0","0.1.0"/'"#;
    "loopback" "VERSION" "version.supported-form" r#"bend 's/"0.1.0"/"0.1"/'"#;
    "loopback" "VERSION" "version.supported" r#"bend 's/,"supportedVersions".*/}/'"#;
    "loopback" "VERSION" "version.current" r#"bend 's/,"1.1.0"//'"#;
    "loopback" "VERSION" "version.no-other-variable" r#"[ -n "$CNI_PATH" ] || exit 1; run"#;
    "loopback" "VERSION" "version.no-stdin" r#"[ -n "$in" ] || exit 1; run"#;
    "loopback" "VERSION" "version.any-stdin" "case $in in no*) exit 1 ;; esac; run";
    "loopback" "ADD" "env.containerid.missing" r#"[ -n "$CNI_CONTAINERID" ] || export CNI_CONTAINERID=x; run"#;
    "loopback" "ADD" "env.netns.missing" r#"[ -n "$CNI_NETNS" ] || export CNI_NETNS=/run/netns/protocol; run"#;
    "loopback" "ADD" "env.ifname.missing" r#"[ -n "$CNI_IFNAME" ] || export CNI_IFNAME=lo; run"#;
    "loopback" "ADD" "env.ifname.too-long" "[ ${#CNI_IFNAME} -le 15 ] || export CNI_IFNAME=lo; run";
    "loopback" "ADD" "env.ifname.slash" "case $CNI_IFNAME in */*) export CNI_IFNAME=lo ;; esac; run";
    "loopback" "ADD" "env.ifname.blank" r"case $CNI_IFNAME in *\ *) export CNI_IFNAME=lo ;; esac; run";
    "loopback" "ADD" "env.ifname.dots" "case $CNI_IFNAME in ..) export CNI_IFNAME=lo ;; esac; run";
    "loopback" "ADD" "env.containerid.path" "case $CNI_CONTAINERID in */*) export CNI_CONTAINERID=x ;; esac; run";
    "loopback" "ADD" "env.containerid.first" "case $CNI_CONTAINERID in -*) export CNI_CONTAINERID=x ;; esac; run";
    "loopback" "ADD" "env.netns.nowhere" r#"[ -e "$CNI_NETNS" ] || export CNI_NETNS=/run/netns/protocol; [ -n "$CNI_NETNS" ] && run"#;
    "loopback" "ADD" "env.netns.no-namespace" "case $CNI_NETNS in /etc*) export CNI_NETNS=/run/netns/protocol ;; esac; run";
    "loopback" "NONSENSE" "env.command.unknown" "exit 0";
    "loopback" "GC" "env.command.gc-early" "exit 0";
    "loopback" "STATUS" "env.command.status-early-code" "exit 1";
    "loopback" "add" "env.command.case" "CNI_COMMAND=ADD run";
    "loopback" "ADD" "env.containerid.code" r#"bend 's/"code": 4/"code": 104/'"#;
    "loopback" "ADD" "env.containerid.named" "bend 's/CNI_CONTAINERID/it/'";
    "loopback" "ADD" "env.netns.named" "bend 's/CNI_NETNS/it/'";
    "loopback" "ADD" "env.ifname.named" "bend 's/CNI_IFNAME/it/'";
    "loopback" "CHECK" "env.check.containerid" r#"[ -n "$CNI_CONTAINERID" ] || exit 0; run"#;
    "loopback" "DEL" "env.del.containerid" r#"[ -n "$CNI_CONTAINERID" ] || exit 0; run"#;
    "loopback" "DEL" "env.del.ifname" r#"[ -n "$CNI_IFNAME" ] || exit 0; run"#;
    "loopback" "ADD" "error.stdout" r#"out=$(run); status=$?; [ $status = 0 ] && echo "$out" || echo "$out" >&2; exit $status"#;
    "loopback" "ADD" "error.object" r#"out=$(run); status=$?; [ $status = 0 ] || out=failed; echo "$out"; exit $status"#;
    "loopback" "ADD" "error.msg" r#"bend 's/"msg"/"text"/'"#;
    "loopback" "ADD" "error.code" r#"bend 's/"code": \([0-9]*\)/"code": "\1"/'"#;
    "loopback" "ADD" "error.cni-version" r#"out=$(run); status=$?; [ $status = 0 ] || out=$(echo "$out" | sed /cniVersion/d); echo "$out"; exit $status"#;
    "loopback" "ADD" "error.cni-version-known" r#"out=$(run); status=$?; [ $status = 0 ] || out=$(echo "$out" | sed 's/"cniVersion": "[^"]*"/"cniVersion": "7"/'); echo "$out"; exit $status"#;
    "loopback" "ADD" "error.details" r#"bend 's/"msg": "[^"]*"/&, "details": 7/'"#;
    "loopback" "ADD" "env.containerid.missing" "run; exit 0";
    "loopback" "ADD" "env.netns.missing" "run || kill -9 $$";
    "loopback" "ADD" "stdin.cut-off" r#"[ "$in" != '{' ] || exit 0; run"#;
    "loopback" "ADD" "stdin.no-json" "case $in in no*) exit 0 ;; esac; run";
    "loopback" "ADD" "stdin.no-object" "case $in in '['*) exit 0 ;; esac; run";
    "loopback" "ADD" "stdin.empty" r#"[ -n "$in" ] || exit 0; run"#;
    "loopback" "ADD" "stdin.cut-off-code" r#"bend 's/"code": 6/"code": 106/'"#;
    "loopback" "ADD" "conf.name-missing" r#"case $in in *'"name"'*) run ;; *) exit 0 ;; esac"#;
    "loopback" "ADD" "conf.name-code" r#"bend 's/"code": 7/"code": 107/'"#;
    "loopback" "ADD" "conf.name-path" "case $in in *../up*) exit 0 ;; esac; run";
    "loopback" "ADD" "conf.name-type" r#"case $in in *'"name":7'*) exit 0 ;; esac; run"#;
    "loopback" "ADD" "conf.version-unknown" "case $in in *9.9.9*) exit 0 ;; esac; run";
    "loopback" "ADD" "conf.version-code" r#"bend 's/"code": 1,/"code": 101,/'"#;
    "loopback" "ADD" "conf.version-old" "case $in in *0.0.9*) exit 0 ;; esac; run";
    "loopback" "ADD" "conf.version-form" r#"case $in in *'"one"'*) exit 0 ;; esac; run"#;
    "loopback" "ADD" "conf.version-type" r#"case $in in *'"cniVersion":1,'*) exit 0 ;; esac; run"#;
    "loopback" "CHECK" "conf.prev-result-garbage" "case $in in *9.9.9*) exit 0 ;; esac; run";
    "loopback" "ADD" "result.cni-version" r#"bend 's/"cniVersion": "[^"]*"/"cniVersion": "0.4.0"/'"#;
    "loopback" "ADD" "result.json" "echo adding; run";
    "loopback" "ADD" "result.no-error" r#"bend '1s/{/{"code": 0,/'"#;
    "host-local" "ADD" "result.ip.no-version" r#"bend 's/"address"/"version": "4", "address"/'"#;
    "host-local" "ADD" "result.no-ip4" r#"bend '1s/{/{"ip4": {},/'"#;
    "host-local" "ADD" "result.ip.address" r#"bend 's,/16",",'"#;
    "host-local" "ADD" "result.ip.gateway" r#"bend 's/"gateway": "[^"]*"/"gateway": "none"/'"#;
    "host-local" "ADD" "result.routes" r#"bend 's,"dst": "0.0.0.0/0","dst": "default",'"#;
    "host-local" "ADD" "result.dns" r#"bend '1s/{/{"dns": [],/;s/"dns": {}/"dns2": {}/'"#;
    "ptp" "ADD" "result.ip.interface" r#"bend 's/"interface": [0-9]*/"interface": 77/'"#;
    "ptp" "ADD" "result.interface.mac" r#"bend 's/"mac": "[^"]*"/"mac": "none"/'"#;
    "ptp" "ADD" "result.interface.sandbox" r#"bend 's,"sandbox": "[^"]*","sandbox": "/run/netns/other",'"#;
    "ptp" "ADD" "result.names-interface" r#"bend 's/"name": "eth/"name": "net/'"#;
    "ptp" "ADD" "result.names-addresses" "run; status=$?; inside ip addr add 10.55.0.1/24 dev eth0; exit $status";
    "ptp" "ADD" "result.has-addresses" r#"in=$(printf '%s' "$in" | sed 's/,\[{"subnet":"fd88::\/64"}\]//'); run"#;
};

const V1_1_0: &[Row] = rows! { "1.1.0"
    "loopback" "VERSION" "version.echo" r#"bend 's/"cniVersion":"1.1.0"/"cniVersion":"1.0.0"/'"#;
    "ptp" "ADD" "result.ip.gateway-family" r#"bend 's/"gateway": "10.88.0.1"/"gateway": "fd88::1"/'"#;
    "portmap" "CHECK" "stdin.check" "case $in in no*) exit 0 ;; esac; run";
    "portmap" "GC" "stdin.gc" "case $in in no*) exit 0 ;; esac; run";
    "portmap" "STATUS" "stdin.status" "exit 0";
};
