//! The assertions: the text of each, the clause that it follows from, and the consequence of a violation for a runtime.

use super::cases::{keys, values};

/// How binding an assertion is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// A MUST of the specification, or a condition without which runtimes do not work.
    Required,
    /// A SHOULD of the specification, or a promise of the plugin's documentation.
    Recommended,
    /// Worth knowing.
    Informational,
}

impl Level {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Level::Required => "required",
            Level::Recommended => "recommended",
            Level::Informational => "informational",
        }
    }
}

/// A property of a conforming plugin.
#[derive(Debug)]
pub struct Assertion {
    pub id: &'static str,
    pub level: Level,
    /// The section of SPEC.md (1.1.0) or of another document.
    pub clause: &'static str,
    /// The property.
    pub text: &'static str,
    /// The consequence of a violation.
    pub why: &'static str,
}

impl Assertion {
    /// The second part of the id, the type of the plugin in the assertions of one type.
    pub fn kind(&self) -> &'static str {
        self.id.split('.').nth(1).unwrap_or_default()
    }
}

const VERSION: &str = "SPEC 2, VERSION: probe plugin version support";
const PARAMETERS: &str = "SPEC 2, Parameters";
const ADD: &str = "SPEC 2, ADD: Add container to network";
const DEL: &str = "SPEC 2, DEL: Remove container from network";
const CHECK: &str = "SPEC 2, CHECK: Check container's networking is as expected";
const GC: &str = "SPEC 2, GC: Clean up any stale resources";
const STATUS: &str = "SPEC 2, STATUS: Check plugin status";
const CONF: &str = "SPEC 1, Network configuration format";
const DELEGATION: &str = "SPEC 4, Plugin Delegation";
const SUCCESS: &str = "SPEC 5, ADD Success";
const DELEGATED: &str = "SPEC 5, Delegated plugins (IPAM)";
const ERROR: &str = "SPEC 5, Error";
const OLD: &str = "SPEC 0.2.0, Result";
pub const OWN: &str = "the plugin's documentation";

const MISREAD: &str = "runtimes cannot read the answer";
const LEAK: &str = "the node fills up with what nobody will remove";
const STUCK: &str = "the runtime repeats DEL for ever, and the container is never gone";
const CHOICE: &str = "runtimes choose the version to speak by it";
pub const BLIND: &str = "a wrong call looks like one that was carried out";
const WORDS: &str = "operators and runtimes cannot tell what was wrong";
pub const LIE: &str = "what the runtime passes on to its users is not what the container has";
const ISOLATION: &str = "one container's end breaks another's network";
pub const TRAFFIC: &str = "the container has no network";

macro_rules! table {
    ($($id:literal $level:ident $clause:ident $text:literal $why:ident;)*) => {
        &[$(Assertion { id: $id, level: Level::$level, clause: $clause, text: $text, why: $why },)*]
    };
}

/// Assertions by area; `cases/keys.rs` and `cases/values.rs` have those about one key of one plugin, beside the
/// configuration.
const TABLE: &[Assertion] = table! {
    "version.succeeds" Required VERSION "VERSION succeeds" CHOICE;
    "version.json" Required VERSION "VERSION prints a JSON object" CHOICE;
    "version.cni-version" Required VERSION "the answer has a cniVersion of three numbers" CHOICE;
    "version.supported" Required VERSION "the answer lists supportedVersions" CHOICE;
    "version.supported-form" Required VERSION "each supported version is three numbers" CHOICE;
    "version.supported-unique" Recommended VERSION "no supported version is listed twice" CHOICE;
    "version.supports-configured" Required VERSION "the versions that are tested are listed" CHOICE;
    "version.includes-own" Recommended VERSION "the answer's own cniVersion is among the supported ones" CHOICE;
    "version.current" Informational VERSION "1.1.0 is supported" CHOICE;
    "version.no-other-variable" Required VERSION "VERSION needs no variable but CNI_COMMAND" CHOICE;
    "version.no-stdin" Required VERSION "VERSION does without stdin" CHOICE;
    "version.any-stdin" Recommended VERSION "VERSION does not mind what is on stdin" CHOICE;

    "env.containerid.missing" Required PARAMETERS "ADD without CNI_CONTAINERID fails" BLIND;
    "env.containerid.code" Recommended ERROR "its code is 4" WORDS;
    "env.containerid.named" Recommended ERROR "its message names the variable" WORDS;
    "env.containerid.path" Required PARAMETERS "a container id with a path in it is refused" BLIND;
    "env.containerid.first" Recommended PARAMETERS "a container id begins with a letter or a digit" BLIND;
    "env.netns.missing" Required PARAMETERS "ADD without CNI_NETNS fails" BLIND;
    "env.netns.code" Recommended ERROR "its code is 4" WORDS;
    "env.netns.named" Recommended ERROR "its message names the variable" WORDS;
    "env.netns.nowhere" Required PARAMETERS "ADD for a namespace that is not there fails" BLIND;
    "env.netns.no-namespace" Required PARAMETERS "ADD for a file that is no namespace fails" BLIND;
    "env.ifname.missing" Required PARAMETERS "ADD without CNI_IFNAME fails" BLIND;
    "env.ifname.code" Recommended ERROR "its code is 4" WORDS;
    "env.ifname.named" Recommended ERROR "its message names the variable" WORDS;
    "env.ifname.too-long" Required PARAMETERS "an interface name of more than 15 bytes is refused" BLIND;
    "env.ifname.slash" Required PARAMETERS "an interface name with a slash is refused" BLIND;
    "env.ifname.blank" Recommended PARAMETERS "an interface name with a blank is refused" BLIND;
    "env.ifname.dots" Required PARAMETERS "the interface name .. is refused" BLIND;
    "env.command.unknown" Required PARAMETERS "an unknown CNI_COMMAND fails" BLIND;
    "env.command.unknown-code" Recommended ERROR "its code is 4" WORDS;
    "env.command.case" Recommended PARAMETERS "add is not ADD" BLIND;
    "env.command.check-early" Required PARAMETERS "CHECK is refused before 0.4.0" CHOICE;
    "env.command.check-early-code" Recommended ERROR "its code is 1" CHOICE;
    "env.command.gc-early" Required PARAMETERS "GC is refused before 1.1.0" CHOICE;
    "env.command.gc-early-code" Recommended ERROR "its code is 1, or 4 where the verb is not known" CHOICE;
    "env.command.status-early" Required PARAMETERS "STATUS is refused before 1.1.0" CHOICE;
    "env.command.status-early-code" Recommended ERROR "its code is 1, or 4 where the verb is not known" CHOICE;
    "env.check.containerid" Required PARAMETERS "CHECK without CNI_CONTAINERID fails" BLIND;
    "env.del.containerid" Required PARAMETERS "DEL without CNI_CONTAINERID fails" BLIND;
    "env.del.ifname" Required PARAMETERS "DEL without CNI_IFNAME fails" BLIND;

    "stdin.cut-off" Required CONF "a configuration that ends too early is refused" BLIND;
    "stdin.cut-off-code" Recommended ERROR "its code is 6" WORDS;
    "stdin.no-json" Required CONF "a configuration that is no JSON is refused" BLIND;
    "stdin.no-json-code" Recommended ERROR "its code is 6" WORDS;
    "stdin.no-object" Required CONF "a configuration that is no object is refused" BLIND;
    "stdin.no-object-code" Recommended ERROR "its code is 6" WORDS;
    "stdin.empty" Required CONF "no configuration at all is refused" BLIND;
    "stdin.empty-code" Recommended ERROR "its code is 6" WORDS;
    "conf.name-missing" Required CONF "a configuration without a name is refused" BLIND;
    "conf.name-code" Recommended ERROR "its code is 7" WORDS;
    "conf.name-path" Required CONF "a network name with a path in it is refused" BLIND;
    "conf.name-type" Required CONF "a network name that is a number is refused" BLIND;
    "conf.version-unknown" Required CONF "a later version than is known is refused" BLIND;
    "conf.version-code" Required ERROR "its code is 1" CHOICE;
    "conf.version-old" Required CONF "a version that never was is refused" BLIND;
    "conf.version-form" Required CONF "a version that is no version is refused" BLIND;
    "conf.version-type" Required CONF "a version that is a number is refused" BLIND;
    "conf.prev-result-garbage" Recommended CONF "a prevResult that is no result is refused" BLIND;

    "error.stdout" Required ERROR "an error is told on stdout" WORDS;
    "error.object" Required ERROR "as a JSON object" WORDS;
    "error.code" Required ERROR "with a code that is a number" WORDS;
    "error.msg" Required ERROR "with a msg" WORDS;
    "error.details" Required ERROR "details, if there are any, are text" WORDS;
    "error.cni-version" Recommended ERROR "with the cniVersion" MISREAD;
    "error.cni-version-known" Required ERROR "which is one of the specification" MISREAD;

    "result.json" Required SUCCESS "ADD prints a JSON object and nothing else" MISREAD;
    "result.cni-version" Required SUCCESS "the result has the cniVersion of the configuration" MISREAD;
    "result.dns" Required SUCCESS "dns is an object of lists and a domain" MISREAD;
    "result.no-error" Required SUCCESS "the result has no keys of an error" MISREAD;
    "result.no-ip4" Required SUCCESS "from 0.3.0 on there is no ip4 nor ip6" MISREAD;
    "result.interfaces-list" Required SUCCESS "interfaces is a list" MISREAD;
    "result.ips-list" Required SUCCESS "ips is a list" MISREAD;
    "result.routes" Required SUCCESS "each route has a dst, and a gw that is an address" MISREAD;
    "result.interface.name" Required SUCCESS "each interface has a name" MISREAD;
    "result.interface.mac" Required SUCCESS "a mac is six bytes" MISREAD;
    "result.interface.sandbox" Required SUCCESS "a sandbox is CNI_NETNS" MISREAD;
    "result.interface.mtu" Recommended SUCCESS "an mtu is a number, and came with 1.1.0" MISREAD;
    "result.ip.address" Required SUCCESS "each address has its prefix length" MISREAD;
    "result.ip.version" Required SUCCESS "before 1.0.0 each address has its version, \"4\" or \"6\"" MISREAD;
    "result.ip.no-version" Required SUCCESS "from 1.0.0 on no address has a version" MISREAD;
    "result.ip.gateway" Required SUCCESS "a gateway is an address" MISREAD;
    "result.ip.interface" Required SUCCESS "an address points into the list of interfaces" MISREAD;
    "result.ip.in-sandbox" Required SUCCESS "an address of the container points to an interface in it" LIE;
    "result.old.no-ips" Required OLD "before 0.3.0 there are no ips" MISREAD;
    "result.old.no-interfaces" Required OLD "before 0.3.0 there are no interfaces" MISREAD;
    "result.old.ip4" Required OLD "ip4 has an IPv4 address with its prefix length" MISREAD;
    "result.old.ip6" Required OLD "ip6 has an IPv6 address with its prefix length" MISREAD;
    "result.old.gateway" Required OLD "a gateway is an address of the family" MISREAD;
    "result.old.routes" Required OLD "each route has a dst, and a gw that is an address" MISREAD;
    "result.names-interface" Required SUCCESS "the interface in the container is in the result" LIE;
    "result.names-addresses" Required SUCCESS "every address of the interface is in the result" LIE;
    "result.has-addresses" Required DELEGATED "the addresses of IPAM are in the result" LIE;

    "kernel.interface" Required ADD "the interface CNI_IFNAME is in the container" TRAFFIC;
    "kernel.up" Required ADD "it is up" TRAFFIC;
    "kernel.no-other-interface" Recommended ADD "no other interface came into the container" LIE;
    "kernel.address" Required ADD "each address of the result is on it" LIE;
    "kernel.mac" Required SUCCESS "its address is the mac of the result" LIE;
    "kernel.mtu" Recommended SUCCESS "its MTU is the mtu of the result" LIE;
    "kernel.host-interface" Required SUCCESS "interfaces without a sandbox are on the node" LIE;
    "kernel.route" Required SUCCESS "each route of the result is in the container" LIE;

    "add.succeeds" Required ADD "ADD succeeds" TRAFFIC;
    "add.again-after-del" Required ADD "ADD succeeds again after DEL" TRAFFIC;
    "add.interface-exists" Required ADD "ADD fails where an interface of the name is in the container" ISOLATION;
    "add.interface-exists-keeps" Required ADD "and leaves that interface as it is" ISOLATION;
    "add.failure-leaves-nothing" Recommended ADD "an ADD that fails leaves nothing on the node" LEAK;
    "add.second-interface" Required PARAMETERS "a container can have several interfaces of a network" TRAFFIC;
    "add.second-interface-address" Required DELEGATED "each with addresses of its own" ISOLATION;
    "add.second-container" Required ADD "a second container can be attached" TRAFFIC;
    "add.second-container-address" Required DELEGATED "with addresses of its own" ISOLATION;
    "add.netns-missing" Required ADD "ADD for a namespace that is not there fails" BLIND;
    "add.netns-missing-leaves-nothing" Recommended ADD "and leaves nothing on the node" LEAK;

    "add.ipam-missing" Required DELEGATION "ADD fails where the IPAM plugin is not in CNI_PATH" BLIND;
    "add.ipam-missing-leaves-nothing" Recommended DELEGATION "and leaves nothing on the node" LEAK;
    "add.ipam-full" Required DELEGATION "ADD fails where the IPAM plugin has no address" BLIND;
    "add.ipam-full-leaves-nothing" Recommended DELEGATION "and leaves nothing on the node" LEAK;

    "delegation.containerid" Required DELEGATION "CNI_CONTAINERID is handed on" LIE;
    "delegation.netns" Required DELEGATION "CNI_NETNS is handed on" LIE;
    "delegation.ifname" Required DELEGATION "CNI_IFNAME is handed on" LIE;
    "delegation.args" Required DELEGATION "CNI_ARGS are handed on" LIE;
    "delegation.path" Required DELEGATION "CNI_PATH is handed on" LIE;
    "delegation.version" Required DELEGATION "the cniVersion of the configuration is handed on" MISREAD;
    "delegation.name" Required DELEGATION "the name of the network is handed on" ISOLATION;
    "delegation.configuration" Recommended DELEGATION "the whole configuration is handed on" BLIND;
    "delegation.prev-result" Recommended DELEGATION "prevResult is handed on" BLIND;
    "delegation.stderr" Recommended DELEGATION "what the delegate writes to stderr is on stderr" WORDS;
    "delegation.message" Recommended DELEGATION "the message of a delegate that fails is told" WORDS;
    "delegation.details" Recommended DELEGATION "and its details" WORDS;
    "delegation.code" Informational DELEGATION "and its code" WORDS;
    "delegation.path-later" Required DELEGATION "every folder of CNI_PATH is searched" TRAFFIC;
    "delegation.path-first" Required DELEGATION "the first folder that has the plugin counts" BLIND;
    "delegation.path-only" Required DELEGATION "no other folder is searched" BLIND;
    "delegation.type-path" Required DELEGATION "a type with a path in it is refused" BLIND;
    "delegation.type-path-not-run" Required DELEGATION "and what is there is not run" BLIND;
    "delegation.ipam.add" Required DELEGATED "ADD asks the IPAM plugin" TRAFFIC;
    "delegation.ipam.add-once" Required DELEGATED "once" LEAK;
    "delegation.ipam.section" Required DELEGATED "with the whole section ipam" BLIND;
    "delegation.ipam.addresses" Required DELEGATED "its addresses are in the result" LIE;
    "delegation.ipam.addresses-set" Required DELEGATED "and on the interface" TRAFFIC;
    "delegation.ipam.routes" Required DELEGATED "its routes are in the result" LIE;
    "delegation.ipam.routes-set" Required DELEGATED "and in the container" TRAFFIC;
    "delegation.ipam.dns" Recommended DELEGATED "its dns is in the result" LIE;
    "delegation.ipam.check" Required DELEGATION "CHECK asks the IPAM plugin" BLIND;
    "delegation.ipam.check-fails" Required DELEGATION "CHECK fails where the IPAM plugin's does" BLIND;
    "delegation.ipam.del" Required DELEGATION "DEL asks the IPAM plugin" LEAK;
    "delegation.ipam.del-no-netns" Required DELEGATION "DEL without CNI_NETNS as well" LEAK;
    "delegation.ipam.del-fails" Recommended DELEGATION "DEL fails where the IPAM plugin's does" LEAK;
    "delegation.ipam.gc" Required DELEGATION "GC asks the IPAM plugin" LEAK;
    "delegation.ipam.gc-attachments" Required DELEGATION "with the attachments that are valid" ISOLATION;
    "delegation.ipam.gc-fails" Recommended DELEGATION "GC fails where the IPAM plugin's does" LEAK;
    "delegation.ipam.status" Recommended DELEGATION "STATUS asks the IPAM plugin" BLIND;
    "delegation.ipam.status-fails" Recommended DELEGATION "STATUS fails where the IPAM plugin's does" BLIND;
    "delegation.ipam.refuses" Required DELEGATION "ADD fails where the IPAM plugin's does" BLIND;
    "delegation.ipam.refuses-del" Recommended DELEGATION "and asks it for DEL then" LEAK;
    "delegation.ipam.garbage" Required DELEGATED "ADD fails where the IPAM plugin prints no JSON" BLIND;
    "delegation.ipam.silent" Required DELEGATED "ADD fails where the IPAM plugin prints nothing" BLIND;
    "delegation.ipam.silent-failure" Required DELEGATION "ADD fails where the IPAM plugin fails without a word" BLIND;
    "delegation.ipam.killed" Required DELEGATION "ADD fails where a signal ends the IPAM plugin" BLIND;
    "delegation.ipam.no-address" Recommended DELEGATED "ADD fails where the IPAM plugin has no address" BLIND;
    "delegation.ipam.unusable" Required ADD "ADD fails where a route of the IPAM plugin cannot be set" LIE;
    "delegation.ipam.unusable-del" Recommended ADD "and asks it for DEL then" LEAK;
    "delegation.ipam.leaves-nothing" Recommended ADD "an ADD that fails for its IPAM plugin leaves nothing" LEAK;
    "delegation.flannel.add" Required OWN "ADD asks the delegate, once" TRAFFIC;
    "delegation.flannel.type" Required OWN "type is the delegate's" TRAFFIC;
    "delegation.flannel.own-keys" Recommended OWN "keys in delegate are handed on" LIE;
    "delegation.flannel.ipam" Recommended OWN "the addresses are host-local's" LIE;
    "delegation.flannel.subnet" Recommended OWN "of the node's subnet" ISOLATION;
    "delegation.flannel.route" Recommended OWN "with a route to the cluster's network" TRAFFIC;
    "delegation.flannel.mtu" Recommended OWN "the MTU is the daemon's" TRAFFIC;
    "delegation.flannel.masquerade" Recommended OWN "ipMasq is on where the daemon does not masquerade" TRAFFIC;
    "delegation.flannel.result" Required OWN "the result is the delegate's" LIE;
    "delegation.flannel.del" Required OWN "DEL asks the delegate, without the daemon's file as well" LEAK;
    "delegation.flannel.del-twice" Required DEL "a second DEL succeeds" STUCK;
    "delegation.flannel.refuses" Required DELEGATION "ADD fails where the delegate's does" BLIND;
    "delegation.flannel.refuses-del" Recommended DELEGATION "and asks it for DEL then" LEAK;
    "delegation.flannel.leaves-nothing" Recommended DEL "nothing is left after DEL" LEAK;

    "process.unknown-key" Required CONF "keys that it does not know do not matter" CHOICE;
    "process.unicode" Required CONF "text of any script may be in the configuration" CHOICE;
    "process.large" Recommended CONF "a configuration of a megabyte is read" CHOICE;
    "process.deep" Recommended CONF "a configuration of a hundred levels is read" CHOICE;
    "process.labels" Required CONF "args.labels do not matter" TRAFFIC;
    "process.unknown-capability" Required CONF "a capability that it does not know does not matter" TRAFFIC;
    "process.name-characters" Required CONF "a name may have letters, digits, dots, dashes and underscores" TRAFFIC;
    "process.dns" Required CONF "a configuration may have dns" TRAFFIC;
    "process.two-documents" Recommended CONF "two configurations at once are refused" BLIND;
    "process.null" Required CONF "null is no configuration" BLIND;
    "process.zeros" Required CONF "nor are zeros" BLIND;
    "process.text" Required CONF "nor is a text" BLIND;
    "process.white-space" Required CONF "white space around the configuration does not matter" TRAFFIC;
    "process.containerid-long" Required PARAMETERS "a container id may have 64 characters" TRAFFIC;
    "process.containerid-characters" Required PARAMETERS "it may have dots, dashes and underscores" TRAFFIC;
    "process.unknown-variable" Required PARAMETERS "variables that it does not know do not matter" CHOICE;
    "process.kubernetes-args" Required PARAMETERS "CNI_ARGS may be kubelet's" TRAFFIC;
    "process.ifname-longest" Required PARAMETERS "an interface name may have 15 bytes" TRAFFIC;
    "process.folder-gone" Recommended PARAMETERS "the working directory may be gone" TRAFFIC;
    "process.no-stderr" Recommended PARAMETERS "stderr may be closed" TRAFFIC;
    "process.umask" Recommended OWN "no file of its state can be written by everybody, whatever the umask" ISOLATION;
    "process.umask-closed" Recommended OWN "a umask of 0777 does not matter" TRAFFIC;
    "process.no-orphans" Recommended PARAMETERS "no process of its is left" LEAK;
    "process.netns-of-node" Recommended PARAMETERS "the node's own namespace is refused" ISOLATION;
    "process.netns-of-thread" Required PARAMETERS "the namespace may be a path below /proc" TRAFFIC;
    "process.netns-of-thread-named" Required SUCCESS "which is then the sandbox" LIE;

    "values.leave-nothing" Recommended ADD "an ADD that refuses a value leaves nothing" LEAK;
    "keys.del" Required DEL "DEL succeeds, whatever keys the configuration has" STUCK;

    "damage.none" Required CHECK "CHECK succeeds where nothing is damaged" STUCK;
    "damage.address-gone" Required CHECK "CHECK fails where an address of the result is gone" BLIND;
    "damage.route-gone" Required CHECK "CHECK fails where a route of the result is gone" BLIND;
    "damage.other-kind" Recommended CHECK "CHECK fails where another interface has the name" BLIND;
    "damage.bridge-gone" Recommended CHECK "CHECK fails where the bridge is gone" BLIND;
    "damage.address-other" Required CHECK "CHECK fails where the result has another address" BLIND;
    "damage.route-other" Required CHECK "CHECK fails where the result has another route" BLIND;
    "damage.mac-other" Recommended CHECK "CHECK fails where the result has another mac" BLIND;
    "damage.interface-other" Required CHECK "CHECK fails where the result has another interface" BLIND;
    "damage.del" Required DEL "DEL succeeds whatever is damaged" STUCK;
    "damage.forged-interface" Required DEL "DEL does not delete the node's uplink, whatever prevResult says" ISOLATION;
    "damage.forged-keeps-container" Required DEL "nor what is another container's" ISOLATION;
    "damage.forged-keeps-node" Required DEL "nor what is the node's" ISOLATION;
    "damage.forged-keeps-traffic" Required DEL "nor another container's masquerading" ISOLATION;
    "damage.garbage" Required DEL "DEL with a prevResult that is none does not crash" STUCK;
    "damage.tuning.sysctl" Recommended OWN "CHECK fails where the kernel parameter has another value" BLIND;
    "damage.tuning.mtu" Recommended OWN "CHECK fails where the MTU is another" BLIND;
    "damage.bandwidth.qdisc" Recommended OWN "CHECK fails where the shaper is gone" BLIND;
    "damage.sbr.rule" Recommended OWN "CHECK fails where the rule is gone" BLIND;
    "damage.vrf.gone" Recommended OWN "CHECK fails where the VRF is gone" BLIND;
    "damage.portmap.flushed" Recommended OWN "CHECK fails where the rules of the ports are gone" BLIND;
    "damage.firewall.flushed" Recommended OWN "CHECK fails where the rules are gone" BLIND;
    "damage.flushed.del" Required DEL "DEL succeeds after all rules of the packet filter were flushed" STUCK;
    "damage.flushed.add" Required ADD "ADD succeeds then" TRAFFIC;
    "damage.flushed.traffic" Recommended OWN "and does what it is for" TRAFFIC;
    "damage.flushed.leaves-nothing" Recommended DEL "DEL leaves nothing of it" LEAK;

    "check.succeeds" Required CHECK "CHECK succeeds where all is as ADD made it" STUCK;
    "check.silent" Recommended CHECK "and prints nothing" MISREAD;
    "check.no-prev-result" Recommended CHECK "CHECK without a prevResult fails" BLIND;
    "check.interface-gone" Required CHECK "CHECK fails where the interface is gone, or down for lo" BLIND;
    "check.after-del" Recommended CHECK "CHECK fails after DEL" BLIND;

    "del.succeeds" Required DEL "DEL succeeds" STUCK;
    "del.silent" Recommended DEL "and prints nothing" MISREAD;
    "del.removes-interface" Required DEL "the interface is gone" LEAK;
    "del.leaves-nothing" Recommended DEL "the node is as before ADD" LEAK;
    "del.leaves-nothing-inside" Recommended DEL "the container is as before ADD" LEAK;
    "del.twice" Required DEL "a second DEL succeeds" STUCK;
    "del.no-prev-result" Recommended DEL "DEL without a prevResult succeeds" STUCK;
    "del.never-added" Recommended DEL "DEL of what was never added succeeds" STUCK;
    "del.no-netns" Recommended DEL "DEL without CNI_NETNS succeeds" STUCK;
    "del.no-netns-releases" Recommended DEL "and releases the addresses" LEAK;
    "del.netns-gone" Recommended DEL "DEL for a namespace that is gone succeeds" STUCK;
    "del.netns-gone-twice" Recommended DEL "and does so again" STUCK;
    "del.netns-gone-leaves-nothing" Recommended DEL "and leaves nothing on the node" LEAK;
    "del.interface-gone" Required DEL "DEL succeeds where the interface is gone" STUCK;
    "del.after-failed-add" Recommended DEL "DEL succeeds after an ADD that failed" STUCK;
    "del.second-interface" Required DEL "DEL of one of several interfaces succeeds" STUCK;
    "del.second-interface-keeps-first" Required DEL "and leaves the others as they are" ISOLATION;
    "del.other-interface" Required DEL "DEL of an interface that was never added succeeds" STUCK;
    "del.other-interface-keeps-first" Required DEL "and leaves the others as they are" ISOLATION;
    "del.second-container" Required DEL "DEL of one of several containers succeeds" STUCK;
    "del.second-container-keeps-first" Required DEL "and leaves the others as they are" ISOLATION;
    "del.several-leave-nothing" Recommended DEL "when all are gone the node is as before" LEAK;

    "gc.succeeds" Required GC "GC succeeds without attachments" STUCK;
    "gc.silent" Recommended GC "and prints nothing" MISREAD;
    "gc.twice" Required GC "and does so again" STUCK;
    "gc.setup" Required GC "two attachments can be made of two addresses" TRAFFIC;
    "gc.collects" Required GC "GC succeeds with one of two attachments valid" STUCK;
    "gc.no-list" Informational GC "without a list GC releases nothing" ISOLATION;
    "gc.keeps-valid" Required GC "the valid one is whole afterwards" ISOLATION;
    "gc.releases-stale" Recommended GC "the address of the other can be given out again, though its container has a valid interface of another name" LEAK;
    "status.succeeds" Required STATUS "STATUS succeeds where ADD works" STUCK;
    "status.silent" Recommended STATUS "and prints nothing" MISREAD;
    "status.ipam-missing" Recommended STATUS "STATUS fails where the IPAM plugin is missing" BLIND;

    "ipam.no-interfaces" Required DELEGATED "an IPAM plugin's result has no interfaces" MISREAD;
    "ipam.both-families" Recommended OWN "addresses of both families were asked for and are in the result" LIE;
    "ipam.second-container" Required DELEGATED "a second container gets addresses" TRAFFIC;
    "ipam.unique" Required DELEGATED "no address is given out twice" ISOLATION;
    "ipam.second-interface" Required DELEGATED "a second interface gets addresses" TRAFFIC;
    "ipam.unique-by-interface" Required DELEGATED "other ones than the first" ISOLATION;
    "ipam.del-keeps-other-interface" Required DEL "DEL of one interface keeps the addresses of the other" ISOLATION;
    "ipam.del-keeps-others" Required DEL "DEL of one container keeps the addresses of another" ISOLATION;
    "ipam.range" Recommended OWN "an address is from the range" LIE;
    "ipam.full" Required DELEGATED "ADD fails when all addresses are given out" ISOLATION;
    "ipam.reused" Required DELEGATED "a released address is given out again" LEAK;
    "ipam.concurrent" Recommended DELEGATED "sixteen at once get addresses" TRAFFIC;
    "ipam.concurrent-unique" Required DELEGATED "each its own" ISOLATION;

    "chained.keeps-interfaces" Required ADD "interfaces of prevResult are in the result" LIE;
    "chained.keeps-addresses" Required ADD "addresses of prevResult are in the result" LIE;
    "chained.keeps-routes" Required ADD "routes of prevResult are in the result" LIE;
    "chained.del-keeps-the-others" Required DEL "DEL leaves alone what plugins before it made" ISOLATION;
    "chained.add-after-del" Recommended DEL "ADD succeeds again after DEL while the interface is there" LEAK;
    "chained.no-prev-result" Recommended ADD "ADD without a prevResult fails" BLIND;

    "faults.killed-add.del" Recommended DEL "DEL succeeds after an ADD that was killed" STUCK;
    "faults.killed-add.leaves-nothing" Recommended DEL "and leaves nothing of it" LEAK;
    "faults.killed-del.del" Recommended DEL "DEL succeeds after a DEL that was killed" STUCK;
    "faults.killed-del.leaves-nothing" Recommended DEL "and leaves nothing" LEAK;
    "faults.killed.add" Required ADD "ADD succeeds after all that" TRAFFIC;
    "faults.full-output.add" Recommended SUCCESS "ADD fails where nobody can get its result" LIE;
    "faults.full-output.del" Recommended DEL "DEL succeeds after it" STUCK;
    "faults.full-output.leaves-nothing" Recommended DEL "and leaves nothing" LEAK;
    "faults.full-disk.add" Required ADD "ADD tells whether it succeeded where there is no room for state" BLIND;
    "faults.full-disk.del" Recommended DEL "DEL succeeds after it" STUCK;
    "faults.full-disk.leaves-nothing" Recommended DEL "and leaves nothing" LEAK;
    "faults.crowd.add" Recommended ADD "64 containers can be attached at once" TRAFFIC;
    "faults.crowd.del" Recommended DEL "and detached at once" STUCK;
    "faults.crowd.leaves-nothing" Recommended DEL "which leaves nothing" LEAK;

    "portmap.tcp4" Recommended OWN "a TCP port of the node leads to the container over IPv4" TRAFFIC;
    "portmap.udp4" Recommended OWN "a UDP port over IPv4" TRAFFIC;
    "portmap.tcp6" Recommended OWN "a TCP port over IPv6" TRAFFIC;
    "portmap.udp6" Recommended OWN "a UDP port over IPv6" TRAFFIC;
    "portmap.only-mapped" Recommended OWN "no other port does" ISOLATION;
    "tuning.sysctl" Recommended OWN "the kernel parameter is set in the container" LIE;
    "tuning.mtu" Recommended OWN "the MTU is set" LIE;
    "bandwidth.qdisc" Recommended OWN "the interface has a shaper" LIE;
    "sbr.rule" Recommended OWN "a rule has packets from the container's address take their own table" TRAFFIC;
    "vrf.master" Recommended OWN "the interface is in the VRF" TRAFFIC;

    "traffic.gateway4" Required OWN "the gateway answers over IPv4" TRAFFIC;
    "traffic.gateway6" Required OWN "the gateway answers over IPv6" TRAFFIC;
    "traffic.masquerade4" Recommended OWN "with ipMasq another host answers over IPv4" TRAFFIC;
    "traffic.masquerade6" Recommended OWN "with ipMasq another host answers over IPv6" TRAFFIC;
    "traffic.from-node4" Required OWN "the container answers the node over IPv4" TRAFFIC;
    "traffic.from-node6" Required OWN "the container answers the node over IPv6" TRAFFIC;
    "traffic.uplink4" Required OWN "a host on the master's network answers over IPv4" TRAFFIC;
    "traffic.uplink6" Required OWN "a host on the master's network answers over IPv6" TRAFFIC;
    "traffic.containers4" Required OWN "containers of a network reach each other over IPv4" TRAFFIC;
    "traffic.containers6" Required OWN "containers of a network reach each other over IPv6" TRAFFIC;
    "traffic.after-neighbours-del" Required OWN "the gateway still answers when a neighbour is gone" ISOLATION;
    "traffic.loopback4" Required OWN "127.0.0.1 answers" TRAFFIC;
    "traffic.loopback6" Required OWN "::1 answers" TRAFFIC;
};

/// All assertions.
pub fn all() -> impl Iterator<Item = &'static Assertion> {
    let values = values::TABLE.iter().map(|wrong| &wrong.assertion);
    TABLE.iter().chain(values).chain(keys::TABLE.iter().map(|key| &key.assertion))
}

/// The assertion with this id.
pub fn find(id: &str) -> Option<&'static Assertion> {
    all().find(|assertion| assertion.id == id)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The source of the cases.
    const CASES: &str = concat!(
        include_str!("cases/protocol.rs"),
        include_str!("cases/results.rs"),
        include_str!("cases/lifecycle.rs"),
        include_str!("cases/ipam.rs"),
        include_str!("cases/chained.rs"),
        include_str!("cases/housekeeping.rs"),
        include_str!("cases/faults.rs"),
        include_str!("cases/delegation.rs"),
        include_str!("cases/process.rs"),
        include_str!("cases/damage.rs"),
        include_str!("cases/values.rs"),
        include_str!("cases/keys.rs"),
    );

    #[test]
    fn every_id_is_unique_and_used() {
        for (i, assertion) in all().enumerate() {
            let id = assertion.id;
            assert!(!all().take(i).any(|other| other.id == id), "{id} occurs twice");
            assert!(CASES.contains(&format!("\"{id}\"")), "no case uses {id}");
        }
        assert!(all().count() >= 400, "{}", all().count());
    }
}
