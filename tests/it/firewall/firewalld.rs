//! firewalld, simulated by a D-Bus service on a private bus.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use serde_json::json;

use super::{VERSIONS, assert_same, net, prev, rules};
use crate::support::net::Net;
use crate::support::node::{Call, Container, Node, eventually};

/// Keeps sources in memory and logs each change and query to a file.
const SERVICE: &str = r#"
import sys, dbus, dbus.service
from dbus.mainloop.glib import DBusGMainLoop
from gi.repository import GLib
DBusGMainLoop(set_as_default=True)
bus = dbus.bus.BusConnection(sys.argv[1])
name = dbus.service.BusName("org.fedoraproject.FirewallD1", bus)
Z = "org.fedoraproject.FirewallD1.zone"
class E(dbus.DBusException):
    _dbus_error_name = "org.fedoraproject.FirewallD1.Exception"
class F(dbus.service.Object):
    sources = {}
    def note(self, *words):
        with open(sys.argv[2], "a") as f:
            f.write(" ".join(words) + "\n")
    @dbus.service.method(Z, in_signature="ss", out_signature="s")
    def addSource(self, zone, source):
        self.note("add", zone, source)
        if zone == "nozone":
            raise E("INVALID_ZONE: " + zone)
        if self.sources.get(source, zone) != zone:
            raise E("ZONE_CONFLICT: '%s' already bound to a zone" % source)
        if source in self.sources:
            raise E("ZONE_ALREADY_SET: '%s' already bound to '%s'" % (source, zone))
        self.sources[source] = zone
        return zone
    @dbus.service.method(Z, in_signature="ss", out_signature="s")
    def removeSource(self, zone, source):
        self.note("remove", zone, source)
        if self.sources.pop(source, None) is None:
            raise E("UNKNOWN_SOURCE: '%s' is not in any zone" % source)
        return zone
    @dbus.service.method(Z, in_signature="s", out_signature="as")
    def getSources(self, zone):
        if zone == "nozone":
            raise E("INVALID_ZONE: " + zone)
        return dbus.Array([s for s in self.sources if self.sources[s] == zone], signature="s")
    @dbus.service.method(Z, in_signature="ss", out_signature="b")
    def querySource(self, zone, source):
        return self.sources.get(source) == zone
    @dbus.service.method("org.fedoraproject.FirewallD1")
    def reload(self):
        self.sources.clear()
F(bus, "/org/fedoraproject/FirewallD1")
print("ready", flush=True)
GLib.MainLoop().run()
"#;

const BUS: &str = r#"<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>session</type><listen>unix:path=SOCKET</listen>
<policy context="default"><allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/><allow own="*"/><allow user="*"/></policy>
</busconfig>"#;

/// The remedy for the zone `nozone`.
const NEW_ZONE: &str = "firewall-cmd --permanent --new-zone=nozone && firewall-cmd --reload; or ";

/// A private bus with a firewalld; both are terminated on drop.
pub(crate) struct Firewalld<'n> {
    node: &'n Node,
    address: String,
    processes: Vec<Child>,
    container: Container,
}

impl Drop for Firewalld<'_> {
    fn drop(&mut self) {
        for process in &mut self.processes {
            drop(process.kill());
            drop(process.wait());
        }
    }
}

impl<'n> Firewalld<'n> {
    /// Starts the bus; prints a skip notice and returns `None` if the required programs are
    /// missing.
    pub(crate) fn start(node: &'n Node) -> Option<Firewalld<'n>> {
        let imports = Command::new("/usr/bin/python3").args(["-c", "import dbus, gi"]).output();
        let has_python = imports.is_ok_and(|output| output.status.success());
        if !has_python || Command::new("dbus-daemon").arg("--version").output().is_err() {
            let strict = std::env::var("CNIBOX_TEST_STRICT").is_ok_and(|value| value == "1");
            assert!(!strict, "install dbus, python3-dbus and python3-gi");
            println!("SKIP firewalld: install dbus, python3-dbus and python3-gi");
            return None;
        }
        let socket = node.path("bus").display().to_string();
        let config = node.path("bus.conf");
        fs::write(&config, BUS.replace("SOCKET", &socket)).unwrap();
        let address = format!("unix:path={socket}");
        let mut firewalld =
            Firewalld { node, address, processes: Vec::new(), container: Container::new() };
        firewalld.spawn(
            "dbus-daemon",
            &["--nofork", "--print-address", &format!("--config-file={}", config.display())],
        );
        Some(firewalld)
    }

    fn spawn(&mut self, program: &str, args: &[&str]) {
        let mut command = Command::new(program);
        let mut child = command.args(args).stdout(Stdio::piped()).spawn().unwrap();
        // The first line is the readiness notification.
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "{program} did not start");
        self.processes.push(child);
    }

    fn serve(&mut self) {
        let (address, log) = (self.address.clone(), self.node.path("log").display().to_string());
        self.spawn("/usr/bin/python3", &["-c", SERVICE, &address, &log]);
    }

    /// Starts the distribution's firewalld in the node's namespace with its own configuration.
    /// Prints a skip notice and returns `false` if firewalld is not installed: a test must not
    /// install a service that would change the firewall of the machine.
    pub(crate) fn serve_itself(&mut self) -> bool {
        let dir = self.node.path("firewalld");
        fs::create_dir_all(&dir).unwrap();
        let log = self.node.path("firewalld.log");
        let spawned = Command::new("firewalld")
            .args(["--nofork", "--nopid", "--system-config"])
            .arg(&dir)
            .arg("--log-file")
            .arg(&log)
            .env("DBUS_SYSTEM_BUS_ADDRESS", &self.address)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let Ok(process) = spawned else {
            println!("SKIP: firewalld is not installed");
            return false;
        };
        self.processes.push(process);
        let status = net(self.node, "1.1.0", &json!({"backend": "firewalld"}));
        eventually("firewalld starts", || self.call(&status, "STATUS", "").run().status == Some(0));
        true
    }

    fn call(&self, net: &Net<'_>, verb: &str, id: &str) -> Call {
        let call = net.call(verb, id).env("DBUS_SYSTEM_BUS_ADDRESS", &self.address);
        call.netns(&self.container.path())
    }

    /// As `firewall-cmd --reload`.
    pub(crate) fn reload(&self) {
        self.send("reload");
    }

    /// As `firewall-cmd --set-default-zone=trusted`.
    pub(crate) fn trust_all_interfaces(&self) {
        self.send("setDefaultZone string:trusted");
    }

    /// Writes `firewalld.conf`, which firewalld reads when it starts and when it reloads.
    pub(crate) fn configure(&self, line: &str) {
        let dir = self.node.path("firewalld");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("firewalld.conf"), format!("{line}\n")).unwrap();
    }

    /// Calls a method with arguments of `dbus-send`; returns the reply.
    pub(crate) fn send(&self, call: &str) -> String {
        let bus = &self.address;
        self.node.sh(&format!(
            "dbus-send --bus={bus} --print-reply --dest=org.fedoraproject.FirewallD1 \
             /org/fedoraproject/FirewallD1 org.fedoraproject.FirewallD1.{call}"
        ))
    }

    /// The logged calls since the previous `told`.
    fn told(&self) -> Vec<String> {
        let text = fs::read_to_string(self.node.path("log")).unwrap_or_default();
        drop(fs::remove_file(self.node.path("log")));
        text.lines().map(ToOwned::to_owned).collect()
    }
}

const ADDED: [&str; 2] = ["add trusted 10.1.2.2/32", "add trusted 2001:db8:1::2/128"];
const REMOVED: [&str; 2] = ["remove trusted 10.1.2.2/32", "remove trusted 2001:db8:1::2/128"];

#[test]
fn addresses_become_sources_of_the_zone() {
    let node = Node::new();
    let Some(mut firewalld) = Firewalld::start(&node) else { return };
    firewalld.serve();
    for backend in ["firewalld", ""] {
        for version in VERSIONS {
            let net = net(&node, version, &json!({"backend": backend}));
            let call = |verb: &str| firewalld.call(&net, verb, "c1");
            assert_eq!(call("ADD").result(), prev(version, &super::IPS));
            assert_eq!(firewalld.told(), ADDED);
            call("ADD").result();
            call("CHECK").ok();
            firewalld.told();
            call("DEL").ok();
            assert_eq!(firewalld.told(), REMOVED);
            call("DEL").ok();
            let error = call("CHECK").error();
            let msg = "expected address 10.1.2.2/32 in trusted zone not found";
            assert_eq!(error.brief(), (999, msg));
            firewalld.told();
        }
    }
    let status = net(&node, "1.1.0", &json!({"backend": "firewalld"}));
    firewalld.call(&status, "STATUS", "").ok();
}

#[test]
fn a_real_firewalld_adds_and_removes_the_addresses() {
    let node = Node::new();
    let Some(mut firewalld) = Firewalld::start(&node) else { return };
    if !firewalld.serve_itself() {
        return;
    }
    let sources = || {
        let query = "zone.querySource string:trusted string:";
        let of = |addr: &str| firewalld.send(&format!("{query}{addr}")).contains("boolean true");
        ["10.1.2.2/32", "2001:db8:1::2/128"].map(of)
    };
    let net = net(&node, "1.1.0", &json!({"backend": ""}));
    firewalld.call(&net, "ADD", "c1").result();
    assert_eq!(sources(), [true; 2]);
    firewalld.call(&net, "ADD", "c1").result();
    firewalld.call(&net, "CHECK", "c1").ok();
    let nowhere = net.with(&json!({"firewalldZone": "nozone",
        "prevResult": prev("1.1.0", &["10.1.2.9/24"])}));
    let error = firewalld.call(&nowhere, "ADD", "c2").error();
    assert!(error.details.starts_with(NEW_ZONE), "{error:?}");
    assert_eq!(sources(), [true; 2], "c1 keeps its own");
    firewalld.reload();
    assert_eq!(sources(), [false; 2], "a reload forgets them");
    let other = net.with(&json!({"prevResult": prev("1.1.0", &["10.1.2.3/24"])}));
    firewalld.call(&other, "ADD", "c3").result();
    assert_eq!(sources(), [true; 2]);
    firewalld.call(&other, "DEL", "c3").ok();
    firewalld.call(&net.with(&json!({"prevResult": null})), "DEL", "c1").ok();
    assert_eq!(sources(), [false; 2]);
    firewalld.call(&net, "DEL", "c1").ok();
}

#[test]
fn add_restores_sources_after_a_reload() {
    let node = Node::new();
    let Some(mut firewalld) = Firewalld::start(&node) else { return };
    firewalld.serve();
    let first = net(&node, "1.1.0", &json!({"backend": "firewalld", "firewalldZone": "internal"}));
    let status = || firewalld.call(&first, "STATUS", "");
    firewalld.call(&first, "ADD", "c1").result();
    status().ok();
    let second = first.with(&json!({"prevResult": prev("1.1.0", &["10.1.2.3/24"])}));
    let repair = node.cnibox(&["repair"]).env("DBUS_SYSTEM_BUS_ADDRESS", &firewalld.address);
    for heals in ["ADD", "repair", "STATUS"] {
        firewalld.reload();
        let error = firewalld.call(&first, "CHECK", "c1").error();
        assert!(error.details.contains("cnibox repair"), "{error:?}");
        firewalld.told();
        if heals == "ADD" {
            firewalld.call(&second, "ADD", "c2").result();
            let told = firewalld.told();
            let is_told = |line: &str| told.contains(&line.replace("trusted", "internal"));
            assert!(ADDED.into_iter().all(is_told), "{told:?}");
        } else if heals == "repair" {
            assert!(repair.run().stdout.contains("in firewalld's zone internal\n"));
        } else {
            status().ok();
        }
        firewalld.call(&first, "CHECK", "c1").ok();
        firewalld.call(&second, "CHECK", "c2").ok();
    }
    // A reload does not restore deleted sources.
    firewalld.call(&first, "DEL", "c1").ok();
    firewalld.reload();
    firewalld.told();
    assert!(repair.run().stdout.contains("10.1.2.3/32"));
    assert_eq!(firewalld.told(), ["add internal 10.1.2.3/32"]);
    firewalld.call(&second, "DEL", "c2").ok();
    firewalld.reload();
    assert_eq!(repair.run().stdout, "nothing was missing\n");
}

#[test]
fn del_and_gc_know_the_owners_of_sources() {
    let node = Node::new();
    let Some(mut firewalld) = Firewalld::start(&node) else { return };
    firewalld.serve();
    let net = net(&node, "1.1.0", &json!({"backend": "firewalld", "firewalldZone": "internal"}));
    let without = net.with(&json!({"prevResult": null}));
    let zoned = |lines: [&str; 2]| lines.map(|line| line.replace("trusted", "internal"));
    firewalld.call(&net, "ADD", "c1").result();
    firewalld.call(&without, "DEL", "c2").ok();
    assert_eq!(firewalld.told(), zoned(ADDED));
    firewalld.call(&without, "DEL", "c1").ok();
    assert_eq!(firewalld.told(), zoned(REMOVED));

    let base = rules(&node);
    firewalld.call(&net, "ADD", "c1").result();
    // The next container has the same address: the late DEL of the first one must not remove the
    // source.
    firewalld.call(&net, "ADD", "c2").result();
    firewalld.told();
    firewalld.call(&net, "DEL", "c1").ok();
    assert!(firewalld.told().is_empty());
    let gc = |valid| without.with(&json!({"cni.dev/valid-attachments": valid}));
    firewalld.call(&gc(json!([{"containerID": "c2", "ifname": "eth0"}])), "GC", "").ok();
    assert!(firewalld.told().is_empty());
    firewalld.call(&gc(json!([])), "GC", "").ok();
    assert_eq!(firewalld.told(), zoned(REMOVED));
    assert_same(&base, &rules(&node));
}

#[test]
fn refusals_name_a_remedy_and_roll_back() {
    let (node, container) = (Node::new(), Container::new());
    let Some(mut firewalld) = Firewalld::start(&node) else { return };
    let conf = net(&node, "1.1.0", &json!({"backend": "firewalld"}));
    let error = firewalld.call(&conf, "STATUS", "").error();
    assert_eq!(error.brief(), (50, "firewalld is not running"));
    // On a bus without firewalld the next back end is selected.
    let auto = net(&node, "1.1.0", &json!({}));
    auto.on("ADD", &container).env("DBUS_SYSTEM_BUS_ADDRESS", &firewalld.address).result();
    assert!(node.sh("iptables-save").contains("10.1.2.2"));

    firewalld.serve();
    let other = conf.with(&json!({"firewalldZone": "work",
        "prevResult": prev("1.1.0", &["2001:db8:1::2/64"])}));
    firewalld.call(&other, "ADD", "c2").result();
    firewalld.told();
    let error = firewalld.call(&conf, "ADD", "c1").error();
    assert!(
        error.msg.starts_with(
            "failed to add the address 2001:db8:1::2/128 to trusted zone: ZONE_CONFLICT"
        ),
        "{}",
        error.msg
    );
    assert!(error.details.contains("another zone"), "{}", error.details);
    let told = firewalld.told();
    assert_eq!(told, [ADDED[0], ADDED[1], REMOVED[0]]);
    let nowhere = conf.with(&json!({"firewalldZone": "nozone"}));
    for (verb, id, code) in [("ADD", "c1", 999), ("STATUS", "", 50)] {
        let error = firewalld.call(&nowhere, verb, id).error();
        assert_eq!(error.brief(), (code, "firewalld has no zone \"nozone\""), "{verb}");
        assert!(error.details.starts_with(NEW_ZONE), "{}", error.details);
    }
}

#[test]
fn ingress_policies_work_with_firewalld() {
    let node = Node::new();
    let Some(mut firewalld) = Firewalld::start(&node) else { return };
    firewalld.serve();
    let keys = json!({"backend": "firewalld", "ingressPolicy": "isolated"});
    let net = net(&node, "1.1.0", &keys);
    firewalld.call(&net, "ADD", "c1").result();
    let saved = node.sh("iptables-save -t filter");
    assert!(saved.contains("-i br0 -o br0") && !saved.contains("CNI-FORWARD"), "{saved}");
    firewalld.call(&net, "CHECK", "c1").ok();
    firewalld.call(&net, "DEL", "c1").ok();
    let gc = net.with(&json!({"cni.dev/valid-attachments": [], "prevResult": null}));
    firewalld.call(&gc, "GC", "").ok();
    assert!(!node.sh("iptables-save -t filter").contains("-i br0"));
}
