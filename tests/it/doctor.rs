//! `cnibox doctor`: each injected defect is reported with a remedy that removes it.

mod forward;
mod sysdump;

use std::fs;
use std::net::{TcpListener, UdpSocket};

use serde_json::{Value, json};

use crate::support::node::{
    Call, Container, Node, Outcome, assert_unchanged, eventually, executable,
};

/// A node with a network `pods` and attached containers.
pub(crate) struct Ward {
    pub(crate) node: Node,
    pub(crate) pods: Vec<Container>,
}

impl Ward {
    fn new() -> Ward {
        let ward = Ward::empty();
        for pod in 0..2 {
            ward.attach(pod);
        }
        ward
    }

    /// A node without attachments.
    fn empty() -> Ward {
        Ward::with(&json!([
            {"type": "bridge", "bridge": "cni0", "isDefaultGateway": true, "ipMasq": true, "hairpinMode": true,
             "ipMasqBackend": "nftables", "macspoofchk": true, "ipam": {"type": "host-local", "dataDir": "LEASES",
             "ranges": [[{"subnet": "10.88.0.0/16"}], [{"subnet": "fd00:88::/64"}]]}},
            {"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": true}},
            {"type": "firewall", "backend": "nftables", "ingressPolicy": "isolated"},
            {"type": "tuning", "sysctl": {"net.core.somaxconn": "1000"}, "mtu": 1400, "dataDir": "TUNING"},
            {"type": "bandwidth", "ingressRate": 8_000_000, "ingressBurst": 800_000,
             "egressRate": 8_000_000, "egressBurst": 800_000},
        ]))
    }

    pub(crate) fn with(plugins: &Value) -> Ward {
        Ward::sized(plugins, 2)
    }

    /// A node with `pods` containers that are not attached yet.
    pub(crate) fn sized(plugins: &Value, pods: usize) -> Ward {
        let node = Node::new();
        node.sh("sysctl -qw net.ipv6.conf.default.accept_dad=0");
        let ward = Ward { node, pods: (0..pods).map(|_| Container::new()).collect() };
        ward.write("10-pods.conflist", "pods", plugins);
        ward
    }

    fn write(&self, file: &str, name: &str, plugins: &Value) {
        let list = json!({"cniVersion": "1.1.0", "name": name, "plugins": plugins}).to_string();
        let below = |name: &str| self.node.path(name).display().to_string();
        let list = list
            .replace("LEASES", &below("leases"))
            .replace("TUNING", &self.node.state("tuning").display().to_string());
        fs::create_dir_all(self.node.path("net.d")).unwrap();
        fs::write(self.node.path("net.d").join(file), list).unwrap();
    }

    pub(crate) fn cnibox(&self, args: &[&str]) -> Call {
        let below = |name: &str| self.node.path(name).display().to_string();
        let directories = [("--cache-dir", below("cache")), ("--plugin-path", below("bin"))];
        let args: Vec<String> = args
            .iter()
            .map(|arg| (*arg).to_owned())
            .chain(directories.iter().flat_map(|(flag, dir)| [(*flag).to_owned(), dir.clone()]))
            .collect();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        self.node.tool("cnitool", &args).program(executable())
    }

    pub(crate) fn attach(&self, pod: usize) {
        let id = format!("pod{pod}");
        let port = json!({"portMappings": [{"hostPort": 8080 + pod, "containerPort": 80, "protocol": "tcp"}]});
        self.cnibox(&[
            "cnitool",
            "add",
            "pods",
            &self.pods[pod].path(),
            "--container-id",
            &id,
            "--conf-dir",
            &self.node.path("net.d").display().to_string(),
            "--cap-args",
            &port.to_string(),
        ])
        .printed();
    }

    pub(crate) fn doctor(&self) -> (Option<i32>, String) {
        self.doctor_with(&[])
    }

    fn doctor_with(&self, extra: &[&str]) -> (Option<i32>, String) {
        let Outcome { status, stdout, stderr } = self.look(&[&["doctor"], extra].concat()).run();
        (status, stdout + &stderr)
    }

    /// A call of a node-wide `cnibox` tool.
    fn look(&self, args: &[&str]) -> Call {
        let [leases, net_d] =
            ["leases", "net.d"].map(|name| self.node.path(name).display().to_string());
        let directories = ["--data-dir", &*leases, "--conf-dir", &net_d];
        self.cnibox(&[args, &directories].concat())
    }
}

impl Ward {
    fn detach(&self, pod: usize) {
        let id = format!("pod{pod}");
        let net_d = self.node.path("net.d").display().to_string();
        let args = [
            "cnitool",
            "del",
            "pods",
            &self.pods[pod].path(),
            "--container-id",
            &id,
            "--conf-dir",
            &net_d,
        ];
        assert_eq!(self.cnibox(&args).run().status, Some(0));
    }

    /// The findings of `cnibox doctor --json`.
    fn diagnoses(&self) -> Vec<Value> {
        let (_, text) = self.doctor_with(&["--json"]);
        serde_json::from_str(&text).unwrap()
    }

    /// Applies a remedy of the report.
    fn apply_remedy(&self, subject: &str, remedy: &str) {
        let commands = [
            "nsenter ",
            "ip ",
            "bridge ",
            "sysctl ",
            "cnibox ",
            "nft ",
            "iptables ",
            "ip6tables ",
            "iptables-legacy ",
            "ip6tables-legacy ",
        ];
        if remedy.starts_with("delete the container") {
            let pod = usize::from(subject.contains("pod1"));
            self.detach(pod);
            self.attach(pod);
            return;
        }
        let command = remedy.trim_start_matches('"').replace("cnibox repair\"", "cnibox repair #");
        let start = commands.iter().filter_map(|word| command.find(word)).min();
        let command = &command[start.unwrap_or_else(|| panic!("no command: {remedy}"))..];
        if let Some(args) = command.strip_prefix("cnibox ") {
            let mut args: Vec<&str> =
                args.split_whitespace().take_while(|word| *word != "#").collect();
            let leases = self.node.path("leases").display().to_string();
            if args == ["gc"] {
                args.extend(["--data-dir", &leases]);
                self.cnibox(&args).printed();
                return;
            }
            if args == ["repair"] {
                self.cnibox(&args).printed();
                return;
            }
            // May fail if the remedy of another container has done the same.
            drop(self.node.tool("cnitool", &args).program(executable()).run());
        } else {
            drop(std::process::Command::new("sh").args(["-c", command]).output().unwrap());
        }
    }
}

/// Replaces `$N` by a command prefix for the container's namespace, `$P` by the name of its bridge
/// port, and `$D` by the node's directory.
fn filled(ward: &Ward, line: &str) -> String {
    let veths = "ip -o link show type veth | head -1 | cut -d: -f2 | cut -d@ -f1";
    let port = if line.contains("$P") { ward.node.sh(veths) } else { String::new() };
    line.replace("$P", port.trim())
        .replace("$N", &format!("nsenter --net={}", ward.pods[0].path()))
        .replace("$D", &ward.node.path("").display().to_string())
}

const HEALTHY: &str = "healthy: 2 attachments\n";

/// The maximum number of repeated doctor calls: CHECK reports only the first defect of an
/// attachment.
const ROUNDS: usize = 5;

/// Injects each defect into a healthy node: doctor reports it as an error, and the reported remedy
/// removes it.
fn assert_remedied(defects: &[(&str, &str)]) {
    assert_remedied_with_status(defects, 1);
}

/// The same with `expected` as doctor's exit status.
fn assert_remedied_with_status(defects: &[(&str, &str)], expected: i32) {
    for (defect, named) in defects {
        let ward = Ward::new();
        assert_eq!(ward.doctor(), (Some(0), HEALTHY.to_owned()), "{defect}");
        ward.node.sh(&filled(&ward, defect));
        let (status, text) = ward.doctor();
        assert!(status == Some(expected) && text.contains(named), "{defect}: {status:?} {text}");
        for _ in 0..ROUNDS {
            for diagnosis in ward.diagnoses() {
                let [subject, remedy] =
                    ["object", "remedy"].map(|key| diagnosis[key].as_str().unwrap());
                ward.apply_remedy(subject, remedy);
            }
        }
        assert_eq!(ward.doctor(), (Some(0), HEALTHY.to_owned()), "{defect}: {text}");
    }
}

#[test]
fn flushed_rules_are_reported_and_restored() {
    assert_remedied(&[
        ("nft flush ruleset", "missing: table inet cnibox_portmap is gone"),
        (
            "nft delete table inet cnibox_masquerade",
            "missing: table inet cnibox_masquerade is gone",
        ),
        ("nft delete table bridge cnibox_spoof", "missing: table bridge cnibox_spoof is gone"),
        ("nft delete table inet cnibox_firewall", "missing: table inet cnibox_firewall is gone"),
        (
            "nft delete table bridge cnibox_firewall",
            "missing: table bridge cnibox_firewall is gone",
        ),
        ("nft delete table inet cnibox_localhost", "missing: table inet cnibox_localhost is gone"),
        (
            "nft flush map inet cnibox_portmap any4",
            "missing: map inet cnibox_portmap any4 was flushed",
        ),
        (
            "nft delete element inet cnibox_masquerade pods4 '{ 10.88.0.2 }'",
            "missing: 10.88.0.2 is missing in map inet cnibox_masquerade pods4",
        ),
    ]);
}

#[test]
fn damaged_host_links_are_reported_with_a_remedy() {
    assert_remedied(&[
        ("ip link set cni0 down", "interface \"cni0\" is down; ip link set cni0 up"),
        ("ip link del cni0", "Interface name cni0 not found"),
        (
            "ip addr flush dev cni0",
            "gateway 10.88.0.1 is not an address of bridge \"cni0\"; ip addr add 10.88.0.1/16 dev cni0",
        ),
        (
            "ip -6 addr del fd00:88::1/64 dev cni0",
            "gateway fd00:88::1 is not an address of bridge \"cni0\"",
        ),
        ("ip link set cni0 address 02:00:00:00:00:09", "Interface cni0 Mac"),
        ("ip link set $P down", "is down; ip link set veth"),
        ("ip link set $P nomaster", "is not a port of it: ip link set veth"),
        ("bridge link set dev $P hairpin off", "has hairpin mode false"),
        ("bridge link set dev $P isolated on", "and isolation true"),
        ("ip link set $P address 02:00:00:00:00:08", "doesn't match link Mac: 02:00:00:00:00:08"),
        ("tc qdisc del dev $P root", "Failed to find qdisc"),
        ("tc qdisc del dev $P ingress", "is not redirected to"),
        (
            "for i in $(ip -o link show type ifb | cut -d: -f2); do ip link del $i; done",
            "get ifb device: Link not found",
        ),
    ]);
}

/// The end of a pair is the end of the attachment, whether or not the container still runs.
#[test]
fn deleted_links_are_reported() {
    for defect in ["ip link del $P", "$N ip link del eth0"] {
        let ward = Ward::new();
        ward.node.sh(&filled(&ward, defect));
        let (status, text) = ward.doctor();
        let why = "was not detached: its link on the host is gone";
        assert!(status == Some(1) && text.contains(why), "{defect}: {status:?} {text}");
        for diagnosis in ward.diagnoses() {
            let [subject, remedy] =
                ["object", "remedy"].map(|key| diagnosis[key].as_str().unwrap());
            ward.apply_remedy(subject, remedy);
        }
        assert_eq!(ward.doctor(), (Some(0), "healthy: 1 attachment\n".to_owned()), "{defect}");
    }
}

#[test]
fn damaged_container_interfaces_are_reported() {
    assert_remedied(&[
        ("$N ip link set eth0 down", "interface \"eth0\" is down; nsenter --net=/proc/"),
        (
            "$N ip link set eth0 down; $N ip link set eth0 name eth7",
            "Interface name eth0 not found",
        ),
        ("$N ip addr flush dev eth0", "Failed to match addr 10.88.0.2/16 on interface eth0"),
        (
            "$N ip -6 addr flush dev eth0 scope global",
            "Failed to match addr fd00:88::2/64 on interface eth0",
        ),
        ("$N ip route del default", "Expected Route 0.0.0.0/0 via 10.88.0.1 not found"),
        ("$N ip -6 route del default", "Expected Route ::/0 via fd00:88::1 not found"),
        ("$N ip route del 10.88.0.0/16", "there is no route to 10.88.0.0/16"),
        (
            "$N ip link set eth0 address 02:00:00:00:00:07",
            "doesn't match link Mac: 02:00:00:00:00:07",
        ),
        ("$N ip link set eth0 mtu 1300", "configured MTU of eth0 is 1400, current value is 1300"),
        (
            "$N sysctl -qw net.core.somaxconn=7",
            "configured value of net/core/somaxconn is 1000, current value is 7",
        ),
    ]);
}

#[test]
fn wrong_kernel_parameters_are_reported_with_a_remedy() {
    assert_remedied(&[
        ("sysctl -qw net.ipv4.ip_forward=0", "net.ipv4.ip_forward is 0"),
        ("sysctl -qw net.ipv6.conf.all.forwarding=0", "net.ipv6.conf.all.forwarding is 0"),
        (
            "sysctl -qw net.ipv6.conf.cni0.accept_ra=2",
            "\"cni0\" accepts router advertisements of containers",
        ),
        ("sysctl -qw net.ipv6.conf.$P.accept_ra=1", "accepts router advertisements of containers"),
        (
            "sysctl -qw net.ipv4.conf.cni0.route_localnet=0",
            "sysctl net/ipv4/conf/cni0/route_localnet is not 1",
        ),
        ("rm $D/leases/pods/10.88.0.2", "10.88.0.2 is not leased to this container"),
        ("rm $D/leases/pods/[0-9f]*", "Failed to find address added by container pod0"),
    ]);
}

#[test]
fn foreign_rules_that_drop_traffic_are_reported() {
    assert_remedied_with_status(
        &[
            (
                "nft 'table inet theirs { chain forward { type filter hook forward priority 0; policy drop; }; }'",
                "drops forwarded packets of network pods to other networks, and those to its published ports",
            ),
            ("iptables -P FORWARD DROP", "; iptables -I FORWARD -i cni0 -j ACCEPT; "),
            ("ip6tables -P FORWARD DROP", "; ip6tables -I FORWARD -i cni0 -j ACCEPT; "),
            (
                "iptables-legacy -P FORWARD DROP",
                "chain FORWARD of iptables-legacy: drops forwarded packets that no rule accepts",
            ),
            (
                "ip6tables-legacy -P FORWARD DROP",
                "and names no interface of network pods; ip6tables-legacy -I FORWARD -i cni0 -j ACCEPT; ",
            ),
        ],
        1,
    );
}

/// kube-proxy's chain exists, and bridged packets bypass iptables.
#[test]
fn bridged_traffic_that_bypasses_iptables_is_reported() {
    let ward = Ward::new();
    for [make, delete] in [
        ["iptables -t nat -N KUBE-SERVICES", "iptables -t nat -X KUBE-SERVICES"],
        [
            "iptables-legacy -t nat -N KUBE-SERVICES; iptables-legacy -t nat -A PREROUTING -j KUBE-SERVICES",
            "iptables-legacy -t nat -F; iptables-legacy -t nat -X KUBE-SERVICES",
        ],
    ] {
        for (value, status) in [("0", 1), ("1", 0)] {
            ward.node.sh(make);
            // Without the module br_netfilter the sysctl does not exist.
            let set =
                format!("sysctl -qw net.bridge.bridge-nf-call-iptables={value} && echo set || :");
            let is_there = ward.node.sh(&set).contains("set");
            let (found, text) = ward.doctor();
            let status = if is_there { status } else { 2 };
            assert_eq!(found, Some(status), "{make}, {value}: {text}");
            let cure = "modprobe br_netfilter; sysctl -w net.bridge.bridge-nf-call-iptables=1";
            assert_eq!(text.contains(cure), status == 1, "{text}");
            ward.node.sh(delete);
        }
    }
}

#[test]
fn an_mtu_larger_than_the_uplinks_is_reported() {
    let network = |mtu: u32| {
        json!([{"type": "bridge", "bridge": "cni0", "isDefaultGateway": true, "ipMasq": true, "mtu": mtu,
                "ipam": {"type": "host-local", "dataDir": "LEASES", "subnet": "10.88.0.0/16"}}])
    };
    let way = "ip link add up0 type veth peer name up1; ip link set up0 up mtu 1400; ip link set up1 up; \
               ip addr add 192.168.9.2/24 dev up0; ip route add default via 192.168.9.1";
    let tunnel = "ip link add up0 type veth peer name up1; ip link set up0 up; ip link set up1 up; \
                  ip addr add 192.168.9.2/24 dev up0; ip route add default via 192.168.9.1; \
                  ip link add flannel.1 type vxlan id 1 dev up0 dstport 8472; ip link set flannel.1 up mtu 1400; \
                  ip route add 10.77.0.0/16 via 10.77.0.0 dev flannel.1 onlink";
    for (name, ways) in [("up0", way), ("flannel.1", tunnel)] {
        for (mtu, status) in [(1500, 1), (1400, 0)] {
            let ward = Ward::sized(&network(mtu), 1);
            ward.node.sh(ways);
            ward.attach(0);
            let (found, text) = ward.doctor();
            assert_eq!(found, Some(status), "{name} {mtu}: {text}");
            let named = format!(
                "warning: network pods: containers send packets of up to 1500 bytes, but the MTU of \"{name}\" is 1400: \
                 larger ones depend on ICMP errors; set \"mtu\": 1400 in its configuration"
            );
            assert_eq!(text.contains(&named), status == 1, "{text}");
        }
    }
}

/// Two interfaces with default routes: replies of the second leave by the first.
#[test]
fn strict_reverse_path_filtering_is_reported() {
    let ward = Ward::sized(
        &json!([{"type": "bridge", "bridge": "cni0", "isDefaultGateway": true,
                 "ipam": {"type": "host-local", "dataDir": "LEASES", "subnet": "10.88.0.0/16"}}]),
        1,
    );
    ward.attach(0);
    ward.pods[0].sh("ip route change default via 10.88.0.1 dev eth0 metric 0");
    let second = |plugins: &Value| {
        ward.write("20-more.conflist", "more", plugins);
        let net_d = ward.node.path("net.d").display().to_string();
        let path = ward.pods[0].path();
        let args = ["cnitool", "add", "more", &path, "--container-id", "pod0", "--ifname", "net1"];
        ward.cnibox(&[&args[..], &["--conf-dir", &net_d]].concat()).printed();
    };
    second(
        &json!([{"type": "bridge", "bridge": "cni1", "isGateway": true, "ipam": {"type": "host-local",
        "dataDir": "LEASES", "subnet": "10.99.0.0/16", "routes": [{"dst": "0.0.0.0/0", "priority": 100}]}}]),
    );
    ward.pods[0].sh("sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.net1.rp_filter=0");
    assert_eq!(ward.doctor(), (Some(0), HEALTHY.to_owned()));
    ward.pods[0].sh("sysctl -qw net.ipv4.conf.all.rp_filter=1");
    let (status, text) = ward.doctor();
    let named =
        "interface net1 (network more): replies leave through \"eth0\", but rp_filter is strict";
    assert!(status == Some(1) && text.contains(named), "{status:?} {text}");
    for diagnosis in ward.diagnoses() {
        let [subject, remedy] = ["object", "remedy"].map(|key| diagnosis[key].as_str().unwrap());
        ward.apply_remedy(subject, remedy);
    }
    assert_eq!(ward.doctor(), (Some(0), HEALTHY.to_owned()));
}

#[test]
fn foreign_rules_that_accept_traffic_are_not_reported() {
    let ward = Ward::new();
    ward.node.sh("nft 'table ip theirs { chain forward { type filter hook forward priority 0; policy drop; }; }'");
    assert!(ward.doctor().1.contains("warning: chain ip theirs forward: drops forwarded packets"));
    for accepted in ["iifname cni0 accept", "oifname cni* accept"] {
        ward.node.sh(&format!("nft add rule ip theirs forward {accepted}"));
        assert_eq!(ward.doctor(), (Some(0), "healthy: 2 attachments\n".to_owned()), "{accepted}");
        ward.node.sh("nft flush chain ip theirs forward");
    }
    ward.node.sh("nft delete table ip theirs");
    // systemd-networkd's state files of links, in the test's own mount namespace.
    let index = ward.node.ip("link show cni0")[0]["ifindex"].clone();
    ward.node.sh("mkdir -p /run/systemd && mount -t tmpfs tmpfs /run/systemd && mkdir -p /run/systemd/netif/links");
    for (state, named) in [("unmanaged", false), ("configured", true)] {
        let text = format!("# private\nADMIN_STATE={state}\nOPER_STATE=routable\n");
        fs::write(format!("/run/systemd/netif/links/{index}"), text).unwrap();
        let (status, text) = ward.doctor();
        assert_eq!(status, Some(i32::from(named)), "{text}");
        assert_eq!(
            text.contains("warning: link \"cni0\": systemd-networkd manages it (configured)"),
            named,
            "{text}"
        );
    }
    ward.node.sh("rm -r /run/systemd/netif");
    // NetworkManager's state files of devices.
    ward.node.sh(
        "mkdir -p /run/NetworkManager && mount -t tmpfs tmpfs /run/NetworkManager && mkdir /run/NetworkManager/devices",
    );
    for (state, named) in [("managed=false", false), ("managed=true", true)] {
        let text = format!("[device]\n{state}\nroute-metric-default-aspired=0\n");
        fs::write(format!("/run/NetworkManager/devices/{index}"), text).unwrap();
        let (status, text) = ward.doctor();
        assert_eq!(status, Some(i32::from(named)), "{text}");
        let managed = "warning: link \"cni0\": NetworkManager manages it";
        assert_eq!(text.contains(managed), named, "{text}");
    }
}

/// Defects without an automatic remedy are reported with a manual one.
#[test]
fn defects_of_configurations_and_plugins_are_reported() {
    for (defect, named) in [
        ("rm $D/net.d/*", "net.d: no network configuration"),
        (
            "echo '{' > $D/net.d/20.conflist",
            "net.d/20.conflist:2:1: error parsing configuration list",
        ),
        (
            "sed -i s/ipMasq\\\"/ipMask\\\"/ $D/net.d/10*",
            "unknown key \"ipMask\"; did you mean \"ipMasq\"?",
        ),
        (
            "sed 's/\"pods\"/\"more\"/' $D/net.d/10-pods.conflist > $D/net.d/20.conflist",
            "overlaps 10.88.0.0/16 of network \"pods\"",
        ),
        ("cp $D/net.d/10-pods.conflist $D/net.d/20.conflist", "network \"pods\" is already in"),
        (
            "ip link add docker0 type bridge; ip addr add 10.88.7.1/24 dev docker0; ip link set docker0 up",
            "on this node: 10.88.7.0/24, in or around the subnet 10.88.0.0/16, is routed to \"docker0\"",
        ),
        ("rm $D/bin/portmap", "plugin \"portmap\": failed to find plugin \"portmap\" in path"),
        (
            "ln -sfn nothing $D/bin/portmap",
            "bin/portmap is a dangling symbolic link; cnibox install /",
        ),
        (
            "ln -sfn nothing $D/bin/host-local",
            "bin/host-local is a dangling symbolic link; cnibox install /",
        ),
        (
            "cp /bin/true $D/bin/cnibox; ln -sfn cnibox $D/bin/tuning",
            "bin/tuning is not the executable that runs now; cnibox install /",
        ),
    ] {
        let ward = Ward::new();
        ward.node.sh(&filled(&ward, defect));
        let (found, text) = ward.doctor();
        assert!(text.contains(named), "{defect}: {text}");
        assert!(found == Some(1) || defect.contains("cp /bin/true"), "{defect}: {found:?} {text}");
        assert_eq!(text.lines().count(), ward.diagnoses().len(), "{text}");
    }
}

#[test]
fn an_address_leased_by_two_networks_is_reported() {
    let ward = Ward::new();
    let other = ward.node.path("leases/other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("lock"), "").unwrap();
    fs::write(other.join("10.88.0.2"), "somebody\r\neth0").unwrap();
    let (status, text) = ward.doctor();
    assert!(text.contains("10.88.0.2 is also leased to container "), "{text}");
    assert_eq!(status, Some(1));
}

/// A container ended without DEL, and the path of its namespace is that of another one now.
#[test]
fn a_reused_namespace_path_is_reported_as_another_container() {
    let mut ward = Ward::sized(&json!([]), 2);
    for (n, name) in ["old", "new"].iter().enumerate() {
        let ipam =
            json!({"type": "host-local", "dataDir": "LEASES", "subnet": format!("10.{n}.0.0/24")});
        ward.write(&format!("{n}.conflist"), name, &json!([{"type": "ptp", "ipam": ipam}]));
    }
    fs::remove_file(ward.node.path("net.d/10-pods.conflist")).unwrap();
    let (path, net_d) = (ward.node.path("netns"), ward.node.path("net.d").display().to_string());
    fs::write(&path, "").unwrap();
    let attach = |ward: &Ward, pod: usize, name: &str| {
        ward.node.sh(&format!("mount --bind {} {}", ward.pods[pod].path(), path.display()));
        let netns = path.display().to_string();
        let id = format!("{name}-pod");
        let words = ["cnitool", "add", name, &netns, "--container-id", &id, "--conf-dir", &net_d];
        ward.cnibox(&words).printed();
    };
    attach(&ward, 0, "old");
    ward.node.sh(&format!("umount {}", path.display()));
    ward.pods.swap_remove(0);
    eventually("the link is gone", || ward.node.ip("link show type veth") == json!([]));
    attach(&ward, 0, "new");
    let (status, text) = ward.doctor();
    assert_eq!(status, Some(1), "{text}");
    assert!(
        text.contains("container old-pod, interface eth0 (network old): was not detached: "),
        "{text}"
    );
    assert!(!text.contains("new-pod") && !text.contains("nsenter"), "{text}");
    let gc = |extra: &[&str]| ward.look(&[&["gc"], extra].concat());
    assert!(gc(&["-n"]).run().stdout.starts_with("would detach container old-pod"), "dry run");
    let refused = gc(&["--container", "new-pod"]).run();
    assert_eq!((refused.status, &*refused.stdout), (Some(1), ""));
    assert!(
        refused.stderr.contains("nothing of container \"new-pod\" can be deleted: it is alive"),
        "{refused:?}"
    );
    for unknown in [["--container", "none"], ["--network", "none"]] {
        let Outcome { status, stdout, .. } = gc(&unknown).run();
        assert_eq!((status, &*stdout), (Some(1), ""), "{unknown:?}");
    }
    assert!(gc(&[]).printed().starts_with("detached container old-pod"), "it can be collected");
    assert_eq!((ward.node.leases("old").len(), ward.node.leases("new").len()), (0, 1));
    assert_eq!(ward.doctor(), (Some(0), "healthy: 1 attachment\n".to_owned()));
}

/// What nothing proves is left, shown with the reason, and collected when a person names it.
#[test]
fn uncertain_attachments_are_collected_by_name_only() {
    let ward = Ward::sized(
        &json!([{"type": "ptp", "ipam": {"type": "host-local", "dataDir": "LEASES", "subnet": "10.88.0.0/24"}}]),
        1,
    );
    ward.attach(0);
    let file = ward.node.path("cache/results/pods-pod0-eth0");
    let text = fs::read_to_string(&file).unwrap();
    fs::remove_file(&file).unwrap();
    // A second container with the same path, without record, lease and link.
    let other = ward.node.path("cache/results/pods-pod7-eth0");
    fs::write(&other, text.replace("pod0", "pod7").replace("\"veth", "\"gone")).unwrap();
    fs::write(&file, text).unwrap();
    let gc = |extra: &[&str]| ward.look(&[&["gc"], extra].concat()).printed();
    let doubt = "container pod7, interface eth0: ";
    let said = gc(&["--dry-run"]);
    assert!(said.starts_with(&format!("in doubt: {doubt}")), "{said}");
    assert!(said.contains("is also the namespace of container pod0"), "{said}");
    let (status, text) = ward.doctor();
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("cnibox gc --network pods --container pod7 --conf-dir /"), "{text}");
    assert!(
        gc(&[]).starts_with(
            "no dead attachment was found\n1 in doubt: cnibox gc --dry-run --conf-dir /"
        )
    );
    assert!(other.exists());
    assert!(gc(&["--container", "pod7"]).starts_with(&format!("detached {doubt}")));
    assert!(!other.exists() && file.exists());
    assert_eq!(ward.doctor(), (Some(0), "healthy: 1 attachment\n".to_owned()));
}

/// The runtime has used the path for another container since.
#[test]
fn gc_spares_the_container_that_has_the_path_now() {
    let ipam = json!({"type": "host-local", "dataDir": "LEASES", "subnet": "10.88.0.0/24"});
    let ward = Ward::sized(&json!([{"type": "macvlan", "master": "wire0", "ipam": ipam}]), 1);
    ward.node.sh(
        "ip link add wire0 type veth peer name wire1; ip link set wire0 up; ip link set wire1 up",
    );
    ward.attach(0);
    let file = ward.node.path("cache/results/pods-pod0-eth0");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(ward.node.path("cache/results/pods-pod7-eth0"), text.replace("pod0", "pod7"))
        .unwrap();
    let said = ward.look(&["gc", "--container", "pod7"]).printed();
    assert!(said.starts_with("detached container pod7, interface eth0: "), "{said}");
    ward.pods[0].sh("ip link show eth0");
}

#[test]
fn state_of_dead_containers_is_collected() {
    let mut ward = Ward::empty();
    ward.attach(0);
    let state = |ward: &Ward| {
        let files = ward.node.path("");
        let files = format!(
            "cd {} && find cache tuning leases/pods /run/cni/cnibox -type f ! -name 'last_*' ! -name '*.lock' ! -path '*/.cnibox/*' | sort",
            files.display()
        );
        ward.node.snapshot().with("files", ward.node.sh(&files))
    };
    let before = state(&ward);
    ward.attach(1);
    // The third container is absent from the runtime's cache, as if the runtime had crashed before
    // it wrote the entry.
    ward.pods.push(Container::new());
    ward.attach(2);
    ward.node.sh(&format!("rm {}/results/*pod2*", ward.node.path("cache").display()));
    ward.pods.truncate(1);
    eventually("the links are gone", || {
        ward.node.sh("ip -o link show type veth").lines().count() == 1
    });
    let (status, text) = ward.doctor();
    assert_eq!(status, Some(1), "{text}");
    for named in [
        "container pod1, interface eth0 (network pods): was not detached: its link on the host is gone; cnibox gc # and delete the container, if it still runs",
        "container pod2, interface eth0 (network pods): left rules or devices: its link on the host is gone; cnibox gc",
        "network pods: addresses leased to dead containers: 4; cnibox gc",
    ] {
        assert!(text.contains(&format!("warning: {named}\n")), "{text}");
    }
    let gc = |extra: &[&str]| ward.look(&[&["gc"], extra].concat()).run().stdout;
    let full = state(&ward);
    let said = gc(&["--dry-run"]);
    assert!(
        said.starts_with("would detach container pod1, interface eth0: its link on the host is gone (network pods)\n"),
        "{said}"
    );
    assert_unchanged(&full, &state(&ward));
    let others = ward.look(&["gc", "--network", "others"]).run();
    assert_eq!((others.status, &*others.stdout), (Some(1), ""));
    assert!(others.stderr.contains("no network \"others\" on this node"), "{others:?}");
    assert_unchanged(&full, &state(&ward));
    let said = gc(&[]);
    assert!(said.starts_with("detached container pod1"), "{said}");
    assert!(said.contains("detached container pod2, interface eth0"), "{said}");
    assert_unchanged(&before, &state(&ward));
    assert_eq!(ward.doctor(), (Some(0), "healthy: 1 attachment\n".to_owned()));
    assert_eq!(gc(&[]), "no dead attachment was found\n");
}

/// What no runtime can start is an error, and the command of the report makes it work again.
#[test]
fn plugins_that_cannot_run_are_reported() {
    let own = executable().display().to_string();
    for (defect, named) in [
        (": > $D/portmap", "permission denied; make it executable: chmod 755 /"),
        (": > $D/portmap; chmod 755 $D/portmap", "exec format error; cnibox install /"),
        ("echo plugin > $D/portmap; chmod 755 $D/portmap", "exec format error; cnibox install /"),
        ("head -c 100000 $X > $D/portmap; chmod 755 $D/portmap", "cannot run: netplugin failed"),
        (
            "mount -t tmpfs -o noexec tmpfs $D; for i in bridge cnibox host-local portmap; do \
             ln -s $X $D/$i; done; rm $D/portmap; cp $X $D/portmap",
            "is mounted noexec: mount -o remount,exec $(stat -Lc %m /",
        ),
    ] {
        let ward = Ward::sized(
            &json!([{"type": "bridge", "ipam": {"type": "host-local", "subnet": "10.88.0.0/16"}},
                    {"type": "portmap", "capabilities": {"portMappings": true}}]),
            0,
        );
        let dir = ward.node.bin().display().to_string();
        let fill = |line: &str| line.replace("$D", &dir).replace("$X", &own);
        ward.node.sh(&fill(&format!("rm $D/portmap; {defect}")));
        let (status, text) = ward.doctor();
        let count = text.lines().filter(|line| line.contains("portmap")).count();
        assert!(
            status == Some(1) && text.contains(named) && count == 1,
            "{defect}: {status:?} {text}"
        );
        let diagnoses = ward.diagnoses();
        let remedy = diagnoses[0]["remedy"].as_str().unwrap().rsplit("able: ").next().unwrap();
        let remedy = remedy.rsplit("noexec: ").next().unwrap().replace("cnibox ", &fill("$X "));
        // A permission is not all that an empty file lacks.
        let remedy = remedy.replace("chmod", &fill("cp $X $D/portmap; chmod"));
        ward.node.sh(&format!("{remedy}; CNI_COMMAND=VERSION {dir}/portmap </dev/null"));
    }
}

/// `lo` ends with the container's other interface; an empty file of the cache names nothing.
#[test]
fn files_of_the_cache_are_collected() {
    for is_own in [true, false] {
        collect_files_of_the_cache(is_own);
    }
}

/// `loopback` may be another program's.
fn collect_files_of_the_cache(is_own: bool) {
    let ipam = json!({"type": "host-local", "dataDir": "LEASES", "subnet": "10.88.0.0/24"});
    let mut ward = Ward::with(&json!([{"type": "loopback"}, {"type": "ptp", "ipam": ipam}]));
    ward.write("00-lo.conflist", "loop", &json!([{"type": "loopback"}]));
    if !is_own {
        let plugin = ward.node.bin().join("loopback");
        fs::remove_file(&plugin).unwrap();
        fs::copy(executable(), plugin).unwrap();
        ward.write("10-pods.conflist", "pods", &json!([{"type": "ptp", "ipam": ipam}]));
    }
    let net_d = ward.node.path("net.d").display().to_string();
    for pod in 0..2 {
        let (path, id) = (ward.pods[pod].path(), format!("pod{pod}"));
        let args = ["cnitool", "add", "loop", &path, "--container-id", &id, "--ifname", "lo"];
        ward.cnibox(&[&args[..], &["--conf-dir", &net_d]].concat()).printed();
        ward.attach(pod);
    }
    let files = |ward: &Ward| {
        let names = ward.node.sh(&format!("ls {}", ward.node.path("cache/results").display()));
        names.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let dir = ward.node.path("cache/results").display().to_string();
    ward.node.sh(&format!("touch {dir}/pods-pod8-eth0; touch -d '-1 hour' {dir}/pods-pod9-eth0"));
    ward.pods.truncate(1);
    eventually("the link is gone", || {
        ward.node.sh("ip -o link show type veth").lines().count() == 1
    });
    let (status, text) = ward.doctor();
    let named = format!(
        "warning: {dir}/pods-pod9-eth0: it is empty, as after a crash of a runtime; cnibox gc\n"
    );
    let lo = "container pod1, interface lo (network loop): was not detached: its link on the host is gone; ";
    assert!(status == Some(1) && text.contains(&named) && text.contains(lo), "{text}");
    assert!(!text.contains("pod8") && !text.contains("pod0"), "{text}");
    let gc = |extra: &[&str]| ward.look(&[&["gc"], extra].concat()).run().stdout;
    let all = files(&ward);
    let said = gc(&["--dry-run"]);
    assert!(said.contains("would detach container pod1, interface lo: "), "{said}");
    assert!(said.contains("would remove ") && !said.contains("in doubt"), "{said}");
    assert_eq!(files(&ward), all);
    let said = gc(&[]);
    assert!(said.contains("detached container pod1, interface lo: "), "{said}");
    assert_eq!(files(&ward), ["loop-pod0-lo", "pods-pod0-eth0", "pods-pod8-eth0"]);
    assert_eq!(ward.doctor(), (Some(0), HEALTHY.to_owned()));
}

/// As k3s's ingress does to a web server of the node. It is no defect: the status is 0.
#[test]
fn programs_behind_published_ports_are_named() {
    for backend in ["iptables", "nftables"] {
        let ipam = json!({"type": "host-local", "dataDir": "LEASES", "subnet": "10.88.0.0/24"});
        let ward = Ward::with(&json!([
            {"type": "bridge", "bridge": "cni0", "isDefaultGateway": true, "ipam": ipam},
            {"type": "portmap", "backend": backend, "capabilities": {"portMappings": true}},
        ]));
        ward.attach(0);
        ward.attach(1);
        let unseen = [
            TcpListener::bind("[::1]:8080").unwrap(),
            TcpListener::bind("127.0.0.1:8082").unwrap(),
        ];
        let other = UdpSocket::bind("127.0.0.1:8080").unwrap();
        assert_eq!(ward.doctor(), (Some(0), HEALTHY.to_owned()), "{backend}");
        for place in ["127.0.0.53:8081", "[::]:8081"] {
            let program = TcpListener::bind(place).unwrap();
            let said = format!(
                "note: tcp port 8081: a program of the node listens on {place}, but its clients reach \
                 container \"pod1\" (network \"pods\""
            );
            let (status, text) = ward.doctor();
            assert!(status == Some(0) && text.starts_with(&said), "{backend}: {status:?} {text}");
            assert!(text.contains("; ss -Hlntup sport = :8081 # names it: "), "{text}");
            assert!(ward.node.sh("ss -Hlntup sport = :8081").contains("users:"), "{text}");
            drop(program);
        }
        drop((unseen, other));
    }
}
