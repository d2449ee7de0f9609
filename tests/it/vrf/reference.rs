//! The reference's vrf (1.1.1) compared with cnibox.

use std::path::Path;

use serde_json::{Value, json};

use super::Pod;
use crate::lane::{self, needs};
use crate::support::compare::{self, assert_same};
use crate::support::node::Call;

fn call(pod: &Pod, program: Option<&Path>, verb: &str, keys: &Value) -> Call {
    let prev = json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0"}]});
    let base = json!({"cniVersion": "1.0.0", "prevResult": prev});
    let call = pod.call(verb, "eth0", &crate::support::net::merged(&base, keys));
    match program {
        Some(dir) => call.program(dir.join("vrf")),
        None => call,
    }
}

fn pod() -> Pod {
    let pod = Pod::new();
    for line in [
        "ip addr add 10.0.0.2/24 dev eth0",
        "ip addr add fd00:1::2/64 dev eth0 nodad",
        "ip route add 10.10.10.0/24 via 10.0.0.1 src 10.0.0.2",
        "ip route add default via 10.0.0.1 metric 100",
        "ip route add fd00:2::/64 via fd00:1::9",
    ] {
        pod.container.sh(line);
    }
    pod
}

fn state(pod: &Pod, table: u64) -> String {
    let mut lines = vec![format!("{:?} {:?}", pod.table("blue"), pod.members("blue"))];
    for family in ["-4", "-6"] {
        lines.extend(pod.routes(family, &table.to_string()));
        lines.extend(pod.routes(family, "main"));
    }
    lines.extend(crate::support::net::addresses(&pod.container.ip("addr show dev eth0")));
    lines.join("\n")
}

#[test]
fn members_tables_and_routes_equal_the_references() {
    needs!(lane::VRF);
    let Some(peer) = compare::peer("parity of vrf") else { return };
    for table in [0, 1001] {
        let keys = json!({"vrfname": "blue", "table": table});
        let run = |program| {
            let pod = pod();
            let result = call(&pod, program, "ADD", &keys).result();
            (result["interfaces"].clone(), state(&pod, table.max(1)))
        };
        let (ours, theirs) = (run(None), run(Some(peer.as_path())));
        assert_eq!(ours.0, theirs.0);
        // 1.1.1 does not restore routes; later releases do.
        let comparable = |text: &str| -> String {
            let lost = |line: &&str| line.contains(" dev ") && !line.contains("proto kernel");
            text.lines().filter(|line| !lost(line)).collect::<Vec<_>>().join("\n")
        };
        assert_same("vrf", &comparable(&ours.1), &comparable(&theirs.1));
        assert!(ours.1.contains("10.10.10.0/24") && ours.1.contains("fd00:2::/64"));
    }
}

#[test]
fn each_deletes_what_the_other_has_added() {
    needs!(lane::VRF);
    let Some(peer) = compare::peer("DEL across of vrf") else { return };
    let keys = json!({"vrfname": "blue"});
    for (adds, deletes) in [(None, Some(peer.as_path())), (Some(peer.as_path()), None)] {
        let pod = pod();
        call(&pod, adds, "ADD", &keys).result();
        call(&pod, deletes, "DEL", &keys).ok();
        assert_eq!(pod.table("blue"), None);
        assert!(!pod.container.sh("ip link show eth0").contains("master"));
        call(&pod, adds, "DEL", &keys).ok();
        call(&pod, deletes, "ADD", &keys).result();
        call(&pod, None, "CHECK", &keys).ok();
    }
}
