//! A network of a node: its configuration, calls for it, and results without random parts.

use serde_json::{Value, json};

use crate::support::node::{Call, Container, Node, Snapshot, assert_unchanged, eventually};

/// The addresses of the first container of [`Net::dual`], and the gateways.
pub(crate) const FIRST: [&str; 2] = ["10.1.2.2", "2001:db8:1::2"];
pub(crate) const SECOND: [&str; 2] = ["10.1.2.3", "2001:db8:1::3"];
pub(crate) const GATEWAYS: [&str; 2] = ["10.1.2.1", "2001:db8:1::1"];

/// A network and its node.
pub(crate) struct Net<'n> {
    pub(crate) node: &'n Node,
    pub(crate) plugin: &'static str,
    pub(crate) version: &'static str,
    pub(crate) conf: Value,
}

impl<'n> Net<'n> {
    /// The network `net` of `plugin`, with `keys` merged over the common ones.
    pub(crate) fn new(
        node: &'n Node,
        plugin: &'static str,
        version: &'static str,
        keys: &Value,
    ) -> Net<'n> {
        let common = json!({"cniVersion": version, "name": "net", "type": plugin});
        Net { node, plugin, version, conf: merged(&common, keys) }
    }

    /// The same network with other keys; `null` removes a key.
    pub(crate) fn with(&self, keys: &Value) -> Net<'n> {
        let Net { node, plugin, version, .. } = *self;
        Net { node, plugin, version, conf: merged(&self.conf, keys) }
    }

    /// A call for the container id `id`, without a namespace.
    pub(crate) fn call(&self, verb: &str, id: &str) -> Call {
        self.node.call(self.plugin, verb).id(id).conf(&self.conf)
    }

    /// A call for `container` with the id `c1`.
    pub(crate) fn on(&self, verb: &str, container: &Container) -> Call {
        self.call(verb, "c1").netns(&container.path())
    }

    /// Runs ADD of `container` as `c1`; returns the result.
    #[track_caller]
    pub(crate) fn add(&self, container: &Container) -> Value {
        self.on("ADD", container).result()
    }

    /// Runs DEL of `container` as `c1`.
    #[track_caller]
    pub(crate) fn del(&self, container: &Container) {
        self.on("DEL", container).ok();
    }

    /// A CHECK call for `container` with the `prevResult` `prev`.
    pub(crate) fn check(&self, container: &Container, prev: &Value) -> Call {
        self.with(&json!({"prevResult": prev})).on("CHECK", container)
    }

    /// Asserts that CHECK fails with this message and repairs nothing.
    #[track_caller]
    pub(crate) fn check_finds(&self, container: &Container, prev: &Value, msg: &str) {
        let before = (self.node.snapshot(), container.snapshot(self.node));
        let error = self.check(container, prev).error();
        assert_eq!(error.brief(), (999, msg));
        assert_unchanged(&before.0, &self.node.snapshot());
        assert_unchanged(&before.1, &container.snapshot(self.node));
    }

    /// Asserts that ADD fails with this code and message and changes neither the host nor the
    /// container.
    #[track_caller]
    pub(crate) fn add_is_refused(&self, container: &Container, code: u64, msg: &str) {
        self.is_refused(&self.on("ADD", container), container, (code, msg));
    }

    /// As [`Net::add_is_refused`], for any call.
    #[track_caller]
    pub(crate) fn is_refused(&self, call: &Call, container: &Container, brief: (u64, &str)) {
        let before = (self.node.snapshot(), container.snapshot(self.node));
        let error = call.error();
        assert_eq!(error.brief(), brief, "{}", self.conf);
        assert_unchanged(&before.0, &self.node.snapshot());
        assert_unchanged(&before.1, &container.snapshot(self.node));
    }

    /// The addresses leased in this network.
    pub(crate) fn leases(&self) -> Vec<String> {
        self.node.leases("net")
    }
}

/// A host-local configuration of 10.1.2.0/24 and `2001:db8:1::/64` with default routes.
pub(crate) fn dual_ipam(node: &Node) -> Value {
    let mut ipam = node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"]);
    ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
    ipam
}

/// `base` with the keys of `extra` set, or removed where `null`.
pub(crate) fn merged(base: &Value, extra: &Value) -> Value {
    let mut all = base.as_object().unwrap().clone();
    for (key, value) in extra.as_object().unwrap() {
        all.remove(key);
        if !value.is_null() {
            all.insert(key.clone(), value.clone());
        }
    }
    all.into()
}

/// A printed result with `MAC`, `VETH` and `NETNS` in place of the values that vary between runs.
pub(crate) fn normal(text: &str, container: &Container) -> String {
    let netns = container.path();
    let word = |word| match word {
        w if is_mac(w) => "MAC",
        w if is_veth(w) => "VETH",
        w if *w == netns => "NETNS",
        w => w,
    };
    text.split('"').map(word).collect::<Vec<_>>().join("\"")
}

/// The same for a parsed result.
pub(crate) fn normal_json(result: &Value, container: &Container) -> Value {
    serde_json::from_str(&normal(&result.to_string(), container)).unwrap()
}

/// Six octets, not all zero (as those of `lo` are).
pub(crate) fn is_mac(text: &str) -> bool {
    let octets: Vec<_> = text.split(':').collect();
    let hex = |o: &&str| o.len() == 2 && o.bytes().all(|b| b"0123456789abcdef".contains(&b));
    octets.len() == 6 && octets.iter().all(hex) && text != "00:00:00:00:00:00"
}

/// `veth` and eight hexadecimal digits, as the reference generates them.
pub(crate) fn is_veth(text: &str) -> bool {
    let hex = |b| b"0123456789abcdef".contains(&b);
    text.len() == 12 && text.strip_prefix("veth").is_some_and(|rest| rest.bytes().all(hex))
}

/// Waits until the snapshot equals `before`: the kernel deletes the second end of a pair and
/// reports lost carriers with a delay.
#[track_caller]
pub(crate) fn settles(before: &Snapshot, now: impl Fn() -> Snapshot) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(2);
    while now() != *before && std::time::Instant::now() < deadline {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_unchanged(before, &now());
}

/// Waits until no veth of a container is left on the host; those of a [`wire`] may stay.
#[track_caller]
pub(crate) fn no_veth_remains(node: &Node) {
    // While the veth module is not loaded, `ip` prints empty objects for other links.
    let left = |link: &Value| link["ifname"].as_str().is_some_and(is_veth);
    eventually("a veth was left on the host", || {
        !node.ip("link show type veth").as_array().unwrap().iter().any(left)
    });
}

/// An external network and the link to it: `wire0`, a master for other links, and its peer `wire1`
/// with the [`GATEWAYS`], which is also on the host.
pub(crate) fn wire(node: &Node) {
    node.sh("ip link add wire0 type veth peer name wire1");
    node.sh("ip link set wire0 up && ip link set wire1 up");
    let [v4, v6] = GATEWAYS;
    node.sh(&format!("ip addr add {v4}/24 dev wire1 && ip addr add {v6}/64 dev wire1 nodad"));
}

/// Deletes the links of [`wire`].
pub(crate) fn unplug(node: &Node) {
    node.sh("ip link del wire0");
}

/// The addresses of an interface as `ip` prints them, without link-local ones.
pub(crate) fn addresses(listing: &Value) -> Vec<String> {
    let infos = listing[0]["addr_info"].as_array().cloned().unwrap_or_default();
    let global = infos.iter().filter(|info| info["scope"] != "link");
    let text = |info: &Value| format!("{}/{}", info["local"].as_str().unwrap(), info["prefixlen"]);
    global.map(text).collect()
}

/// The routes of one family as `dst [via gateway] [dev] ...`, including the kernel's own routes.
pub(crate) fn routes(listing: &str) -> Vec<String> {
    let clean = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut lines: Vec<_> = listing.lines().map(clean).collect();
    lines.retain(|line| !line.starts_with("fe80::/") && !line.starts_with("multicast"));
    lines.sort();
    lines
}
