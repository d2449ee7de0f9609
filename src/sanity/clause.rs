//! The table of assertions: what each says, which clause it follows from, and what breaks for a runtime otherwise.

/// How binding an assertion is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The specification says MUST, or a runtime cannot work otherwise.
    Required,
    /// The specification says SHOULD, or the plugin's own documentation promises it.
    Recommended,
    /// Good to know.
    Informational,
}

impl Level {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Level::Required => "required",
            Level::Recommended => "recommended",
            Level::Informational => "informational",
        }
    }
}

/// Something that holds for a plugin that conforms.
#[derive(Clone, Copy, Debug)]
pub struct Assertion {
    pub id: &'static str,
    pub level: Level,
    /// The section of SPEC.md (1.1.0) or of another document.
    pub clause: &'static str,
    /// What holds.
    pub text: &'static str,
    /// What breaks otherwise.
    pub why: &'static str,
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
const OWN: &str = "the plugin's documentation";

const MISREAD: &str = "runtimes cannot read the answer";
const LEAK: &str = "the node fills up with what nobody will remove";
const STUCK: &str = "the runtime repeats DEL for ever, and the container is never gone";
const CHOICE: &str = "runtimes choose the version to speak by it";
const BLIND: &str = "a wrong call looks like one that was carried out";
const WORDS: &str = "operators and runtimes cannot tell what was wrong";
const LIE: &str = "what the runtime passes on to its users is not what the container has";
const ISOLATION: &str = "one container's end breaks another's network";
const TRAFFIC: &str = "the container has no network";

macro_rules! table {
    ($($id:literal $level:ident $clause:ident $text:literal $why:ident;)*) => {
        &[$(Assertion { id: $id, level: Level::$level, clause: $clause, text: $text, why: $why },)*]
    };
}

/// All assertions, by areas.
pub const TABLE: &[Assertion] = table! {
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

    "delegation.ipam-missing" Required DELEGATION "ADD fails where the IPAM plugin is not in CNI_PATH" BLIND;
    "delegation.ipam-missing-leaves-nothing" Recommended DELEGATION "and leaves nothing on the node" LEAK;
    "delegation.ipam-full" Required DELEGATION "ADD fails where the IPAM plugin has no address" BLIND;
    "delegation.ipam-full-leaves-nothing" Recommended DELEGATION "and leaves nothing on the node" LEAK;

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
    "del.second-container" Required DEL "DEL of one of several containers succeeds" STUCK;
    "del.second-container-keeps-first" Required DEL "and leaves the others as they are" ISOLATION;
    "del.several-leave-nothing" Recommended DEL "when all are gone the node is as before" LEAK;

    "gc.succeeds" Required GC "GC succeeds without attachments" STUCK;
    "gc.silent" Recommended GC "and prints nothing" MISREAD;
    "gc.twice" Required GC "and does so again" STUCK;
    "gc.setup" Required GC "two attachments can be made of two addresses" TRAFFIC;
    "gc.collects" Required GC "GC succeeds with one of two attachments valid" STUCK;
    "gc.keeps-valid" Required GC "the valid one is whole afterwards" ISOLATION;
    "gc.releases-stale" Recommended GC "the address of the other can be given out again" LEAK;
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

/// The assertion of an id.
pub fn find(id: &str) -> Option<&'static Assertion> {
    TABLE.iter().find(|assertion| assertion.id == id)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of the cases.
    const CASES: &str = concat!(
        include_str!("cases/protocol.rs"),
        include_str!("cases/results.rs"),
        include_str!("cases/lifecycle.rs"),
        include_str!("cases/ipam.rs"),
        include_str!("cases/chained.rs"),
        include_str!("cases/housekeeping.rs"),
        include_str!("cases/faults.rs"),
    );

    #[test]
    fn every_id_is_there_once_and_used() {
        for (i, assertion) in TABLE.iter().enumerate() {
            let id = assertion.id;
            assert!(!TABLE[..i].iter().any(|other| other.id == id), "{id} is there twice");
            assert!(CASES.contains(&format!("\"{id}\"")), "no case uses {id}");
        }
        assert!(TABLE.len() >= 130, "{}", TABLE.len());
    }
}
