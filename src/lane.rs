//! The kernel features that a test needs, and the lane in which a test runs if this kernel lacks
//! them.
//!
//! The suite has two lanes: the machine's own kernel, and Debian's kernel under QEMU
//! (`scripts/vm.sh`). A test that needs a link kind or filter that some kernels lack begins with
//!
//! ```text
//! needs!(lane::DUMMY, lane::VLAN);
//! ```
//!
//! and returns there if the kernel lacks one of them: the test is printed as skipped, and its name
//! is appended to the file that `CNIBOX_SKIPPED` names, which lists the tests of the second lane.
//! The second lane (`CNIBOX_LANE=vm`) skips nothing: a test that no lane can run fails. With
//! `CNIBOX_LANE=list` tests only report missing features. `scripts/lanes.sh` drives both lanes.
//!
//! Unit tests and integration tests share this module.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "only tests use it")]

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread::Thread;
use std::time::Instant;

use nix::sched::{CloneFlags, unshare};

/// A feature that a kernel may lack.
#[derive(Clone, Copy, Debug)]
pub struct KernelFeature {
    /// The name in the list of skipped tests.
    pub name: &'static str,
    /// A shell script that succeeds in a fresh network namespace if the kernel has the feature.
    probe: &'static str,
}

pub const DUMMY: KernelFeature = KernelFeature { name: "dummy", probe: "ip link add p type dummy" };
pub const VRF: KernelFeature =
    KernelFeature { name: "vrf", probe: "ip link add p type vrf table 9" };
pub const VLAN: KernelFeature = KernelFeature {
    name: "8021q",
    probe: "ip link add p type veth peer q && ip link add link p name p.5 type vlan id 5",
};
pub const IPVLAN: KernelFeature = KernelFeature {
    name: "ipvlan",
    probe: "ip link add p type veth peer q && ip link add link p name i type ipvlan mode l2",
};
pub const BOND: KernelFeature =
    KernelFeature { name: "bonding", probe: "ip link add name p type bond" };
/// Of Linux 5.12.
pub const BOND_VLAN_SRCMAC: KernelFeature = KernelFeature {
    name: "vlan+srcmac of bonding",
    probe: "ip link add name p type bond mode 802.3ad xmit_hash_policy vlan+srcmac",
};
/// Of Linux 5.11: until then the kernel neither reads nor reports the length.
pub const MACVLAN_QUEUE: KernelFeature = KernelFeature {
    name: "queue lengths of macvlan",
    probe: "ip link add p type veth peer q && ip link add link p name m type macvlan bcqueuelen 3 \
            && ip -d link show m | grep 'bcqueuelen 3 '",
};
/// Of Linux 5.11: `nft_reject_inet` at the hook ingress.
pub const REJECT_AT_INGRESS: KernelFeature = KernelFeature {
    name: "reject at ingress",
    probe: "nft 'add table inet t; add chain inet t c { type filter hook ingress device lo priority 0; }; \
            add rule inet t c reject with icmpx type admin-prohibited'",
};
pub const BRIDGE_VLAN: KernelFeature =
    KernelFeature { name: "bridge VLANs", probe: "ip link add p type bridge vlan_filtering 1" };
/// nft 1.0.6 converts the byte order of the one byte of `meta l4proto`, which Linux 6.12.117 refuses.
pub const NFT_L4PROTO_IN_CONCATENATIONS: KernelFeature = KernelFeature {
    name: "meta l4proto in concatenations of this nft",
    probe: "nft 'add table inet t; add chain inet t c; \
            add rule inet t c ip daddr . meta l4proto . th dport { 10.0.0.0/8 . tcp . 1-5 }'",
};
/// Of Linux 5.18: until then the kernel waits for ever for a master if its namespace and that of its
/// VLAN end at the same time (`netdev_run_todo`).
pub const VLAN_ENDS_WITH_MASTER: KernelFeature = KernelFeature {
    name: "ends of VLANs beside their masters",
    probe: "printf '5.18\\n%s\\n' \"$(uname -r)\" | sort -V -C",
};
/// Of Linux 5.14: until then a namespace is known by its inode, which another one may get.
pub const NETNS_COOKIE: KernelFeature = KernelFeature {
    name: "cookies of network namespaces",
    probe: "printf '5.14\\n%s\\n' \"$(uname -r)\" | sort -V -C",
};
/// The VM's network cards exist for tests; a machine's own cards must not be moved.
pub const CARDS: KernelFeature = KernelFeature {
    name: "spare network cards",
    probe: "[ \"$CNIBOX_LANE\" = vm ] && modprobe -a e1000 virtio_net && ls -d \
            /sys/bus/pci/devices/*/net /sys/bus/pci/devices/*/virtio*/net",
};

impl KernelFeature {
    /// Whether this kernel has the feature, for a test of what happens without it.
    pub fn is_here(&self) -> bool {
        probe_features(self)
    }
}

/// Returns from the test and records it as skipped if the kernel lacks one of the features.
#[doc(hidden)]
#[macro_export]
macro_rules! needs {
    ($($feature:expr),+ $(,)?) => {
        if !$crate::lane::has_feature(&[$($feature),+]) {
            return;
        }
    };
}
pub use needs;

/// Whether this kernel has all features; if not, the running test is recorded as skipped.
pub fn has_feature(features: &[KernelFeature]) -> bool {
    let lacking: Vec<_> = features.iter().filter(|f| !probe_features(f)).map(|f| f.name).collect();
    let lane = std::env::var("CNIBOX_LANE").unwrap_or_default();
    if lacking.is_empty() {
        return lane != "list";
    }
    let thread = std::thread::current();
    let test = thread.name().expect("libtest names the thread after the test");
    let lacking = lacking.join(", ");
    assert_ne!(lane, "vm", "no lane has what {test} needs: {lacking}");
    // Bypasses libtest's capture, so that passing runs show the line.
    drop(writeln!(std::io::stderr(), "skipped: {test}: this kernel lacks {lacking}"));
    if let Some(path) = std::env::var_os("CNIBOX_SKIPPED") {
        let mut list = OpenOptions::new().create(true).append(true).open(path).unwrap();
        let executable = std::env::current_exe().unwrap();
        let entry = format!("{}\t{test}\t{lacking}\n", executable.display());
        list.write_all(entry.as_bytes()).unwrap();
    }
    false
}

/// Starts the running test's clock. Fails a test that needs no feature while `CNIBOX_LANE=list`
/// collects missing features.
pub fn begin_test() {
    let lane = std::env::var("CNIBOX_LANE").unwrap_or_default();
    assert_ne!(lane, "list", "needs nothing, and is not run");
    CLOCK.with(|_| ());
}

thread_local! {
    static CLOCK: TestClock = TestClock { begin: Instant::now(), thread: std::thread::current() };
}

/// Lives as long as the thread of a test. Then it appends a line `seconds<tab>test` to the file
/// that `CNIBOX_TIMES` names.
struct TestClock {
    begin: Instant,
    thread: Thread,
}

impl Drop for TestClock {
    fn drop(&mut self) {
        let (Some(path), Some(test)) = (std::env::var_os("CNIBOX_TIMES"), self.thread.name())
        else {
            return;
        };
        let line = format!("{:.1}\t{test}\n", self.begin.elapsed().as_secs_f64());
        let file = OpenOptions::new().create(true).append(true).open(path);
        // A panic in the destructor of a thread's value would end all tests.
        drop(file.and_then(|mut file| file.write_all(line.as_bytes())));
    }
}

fn probe_features(feature: &KernelFeature) -> bool {
    static KNOWN: Mutex<BTreeMap<&'static str, bool>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap();
    *known.entry(feature.name).or_insert_with(|| in_a_namespace(feature.probe))
}

fn in_a_namespace(script: &'static str) -> bool {
    std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let mut sh = Command::new("sh");
        sh.args(["-c", script]).stdout(Stdio::null()).stderr(Stdio::null());
        sh.status().unwrap().success()
    })
    .join()
    .unwrap()
}

/// Fails in the second lane if its kernel lacks a feature that the first may lack.
#[test]
fn some_lane_has_each_feature() {
    crate::lane::needs!(DUMMY, VRF, VLAN, IPVLAN, BOND, BRIDGE_VLAN, CARDS);
}
