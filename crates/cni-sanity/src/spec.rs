//! The clauses of SPEC.md 1.1.0 that bind plugins or runtimes, in the order of SPEC.md and in words
//! of this project. Assertions follow from them; a clause without an assertion has a reason.

/// How strongly a clause binds, by the words of RFC 2119 in its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Force {
    /// The words must, required and shall.
    Must,
    /// The words should and recommended.
    Should,
    /// A definition without any of these words, or a source beside SPEC.md.
    Plain,
}

impl Force {
    pub fn name(self) -> &'static str {
        match self {
            Force::Must => "must",
            Force::Should => "should",
            Force::Plain => "-",
        }
    }
}

#[derive(Debug)]
pub struct Clause {
    /// The section's number, the verb or subject, and a word.
    pub id: &'static str,
    pub section: &'static str,
    pub force: Force,
    pub text: &'static str,
    /// The reason for which no assertion tests the clause; empty if an assertion tests it.
    pub untested: &'static str,
}

/// The plugin's own documentation, instead of a clause.
pub const OWN: &str = "own";

const RUNTIME: &str = "it binds the runtime";
const ADMINISTRATOR: &str = "it binds whoever writes the configuration";
const AUTHORS: &str = "it binds later editions of the specification";
const DHCP: &str = "it needs a DHCP server that vanishes; the plugin's own tests have one";
const OWN_KEYS: &str = "which keys a plugin does not support is its own matter";

macro_rules! clauses {
    ($($section:literal { $($id:literal $force:ident $text:literal $($untested:ident)?;)* })*) => {
        &[$($(Clause {
            id: $id,
            section: $section,
            force: Force::$force,
            text: $text,
            untested: clauses!(@reason $($untested)?),
        },)*)*]
    };
    (@reason) => { "" };
    (@reason $untested:ident) => { $untested };
}

pub const TABLE: &[Clause] = clauses! {
    "SPEC 1, Configuration format" {
        "1.conf.object" Plain "a configuration is a JSON object with a cniVersion, a version of three numbers";
        "1.conf.name" Must "a network has a name of letters, digits, dots, dashes and underscores, without a path";
        "1.conf.name-unique" Should "no two networks of a node have the same name" ADMINISTRATOR;
        "1.conf.disable-check" Must "with disableCheck nobody calls CHECK" RUNTIME;
        "1.conf.disable-gc" Must "with disableGC nobody calls GC" RUNTIME;
        "1.conf.append" Must "plugins from other files follow those of the list" RUNTIME;
        "1.conf.merge" Must "the list and the files of the network's directory make up its plugins" RUNTIME;
        "1.conf.associate" Must "each plugin configuration belongs to one network, is validated, and is called" RUNTIME;
        "1.conf.pass-on" Must "additional keys reach the plugin unchanged" RUNTIME;
        "1.conf.type" Must "the type of a plugin, and that of its IPAM plugin, is a file name without a path";
        "1.conf.reserved" Should "configurations leave the keys to the runtime that it generates" ADMINISTRATOR;
        "1.conf.well-known" Should "ipMasq, ipam and dns mean what they mean everywhere";
        "1.conf.other" Plain "plugins define further keys, and may refuse those that they do not know";
        "1.version.highest" Must "the highest version that all support is spoken" RUNTIME;
        "1.version.compatible" Must "the format stays compatible within a major version" AUTHORS;
    }
    "SPEC 2, Parameters" {
        "2.domain" Must "plugins are executed in the runtime's own network namespace" RUNTIME;
        "2.parameter.command" Plain "CNI_COMMAND is one of the verbs of the version, in capital letters";
        "2.parameter.container-id" Must "a container id is not empty, begins with a letter or a digit, and has no path";
        "2.parameter.netns" Plain "CNI_NETNS leads to a network namespace";
        "2.parameter.ifname" Must "an interface name that cannot be used is an error";
        "2.parameter.args" Plain "CNI_ARGS are pairs, separated by semicolons";
    }
    "SPEC 2, Errors" {
        "2.exit" Must "the exit status is 0 after success, and another one after a failure";
        "2.error" Should "a failure is told by an error object";
    }
    "SPEC 2, ADD" {
        "2.add.interface" Should "ADD creates, or changes, the interface CNI_IFNAME in CNI_NETNS";
        "2.add.result" Must "ADD that succeeds prints a result";
        "2.add.prev-result" Must "a prevResult is passed on, or changed as the plugin changed the interface";
        "2.add.exists" Must "ADD fails where an interface of the name is in the container";
        "2.add.twice" Should "ADD is not called twice for the same id and interface" RUNTIME;
        "2.add.several" Plain "a container can be attached several times, each time with another interface name";
        "2.add.parameters" Must "ADD needs CNI_CONTAINERID, CNI_NETNS and CNI_IFNAME";
    }
    "SPEC 2, DEL" {
        "2.del.undo" Should "DEL deletes the interface, or undoes the changes of ADD";
        "2.del.prev-result" Must "DEL gets a prevResult" RUNTIME;
        "2.del.no-prev-result" Should "DEL without a prevResult succeeds";
        "2.del.best-effort" Should "DEL completes without an error as far as it can, whatever is missing";
        "2.del.ipam" Should "an IPAM plugin releases the addresses where the namespace is gone";
        "2.del.dhcp-release" Should "a DHCP release that fails is no error" DHCP;
        "2.del.delegate" Should "DEL releases the addresses, and cleans up, where namespace or interface are gone";
        "2.del.twice" Must "a second DEL succeeds, as does one where the interface or the changes are missing";
        "2.del.parameters" Must "DEL needs CNI_CONTAINERID and CNI_IFNAME, and does without CNI_NETNS";
    }
    "SPEC 2, CHECK" {
        "2.check.prev-result" Must "CHECK takes the expected interfaces and addresses from prevResult";
        "2.check.later-plugin" Must "CHECK allows for later plugins of the list to have changed routes and the like";
        "2.check.resources" Should "CHECK fails where an interface, address or route of prevResult is missing";
        "2.check.others" Should "CHECK fails where rules, shapers, reservations or daemons are missing";
        "2.check.unreachable" Should "CHECK fails where the plugin knows that the container cannot be reached";
        "2.check.at-once" Must "CHECK directly after ADD succeeds";
        "2.check.delegate" Should "CHECK asks the delegated plugins, and passes their errors on";
        "2.check.only-added" Must "CHECK is called between ADD and DEL only" RUNTIME;
        "2.check.disabled" Must "CHECK is not called with disableCheck" RUNTIME;
        "2.check.has-prev-result" Must "CHECK gets the result of ADD" RUNTIME;
        "2.check.parameters" Must "CHECK needs CNI_CONTAINERID, CNI_NETNS and CNI_IFNAME";
        "2.check.same" Must "CHECK gets the parameters of ADD" RUNTIME;
    }
    "SPEC 2, STATUS" {
        "2.status.ready" Must "STATUS succeeds where the plugin is ready for ADD";
        "2.status.not-ready" Must "STATUS fails where the plugin knows that it is not, and prints an error";
        "2.status.daemon" Should "STATUS fails where a daemon that ADD needs is not there";
        "2.status.exhausted" Should "STATUS fails where addresses, or the like, are used up";
        "2.status.independent" Must "no plugin relies on STATUS being called";
        "2.status.others" Should "other verbs work although STATUS failed";
        "2.status.delegate" Must "STATUS asks the delegated plugins";
        "2.status.delegate-fails" Should "STATUS fails where that of a delegated plugin does";
    }
    "SPEC 2, VERSION" {
        "2.version.output" Should "VERSION prints its result as JSON on stdout";
        "2.version.parameters" Must "VERSION needs CNI_COMMAND only";
    }
    "SPEC 2, GC" {
        "2.gc.valid" Plain "the attachments to this network in the list are valid and are kept";
        "2.gc.remove" Should "GC removes what it can of all other attachments to the network";
        "2.gc.completes" Should "GC completes without an error";
        "2.gc.continue" Should "GC goes on after an error, and reports it";
        "2.gc.delegate" Must "GC asks the delegated plugins";
        "2.gc.no-del" Must "GC does not replace DEL" RUNTIME;
        "2.gc.input" Must "GC gets a configuration with the list of valid attachments" RUNTIME;
        "2.gc.parameters" Must "GC needs CNI_COMMAND and CNI_PATH only";
        "2.gc.silent" Plain "GC that succeeds prints nothing";
    }
    "SPEC 3, Lifecycle & Ordering" {
        "3.attachment" Plain "container id and interface name together name an attachment";
        "3.netns" Must "the namespace is there before the first plugin is called" RUNTIME;
        "3.parallel" Must "operations of one container do not overlap" RUNTIME;
        "3.gc-alone" Must "GC overlaps with no ADD or DEL" RUNTIME;
        "3.concurrent" Must "plugins can be called for several containers at once";
        "3.locks" Must "plugins lock what they share";
        "3.del-follows" Must "DEL follows each ADD at some time, also one that failed" RUNTIME;
        "3.unchanged" Should "the configuration stays the same between ADD and DEL, and between attachments" RUNTIME;
    }
    "SPEC 3, Execution" {
        "3.path" Must "plugins get the list of directories with plugins" RUNTIME;
        "3.store" Must "the result of the last plugin is stored" RUNTIME;
        "3.check-same" Must "CHECK has the parameters of ADD" RUNTIME;
        "3.derive.runtime-config" Must "runtimeConfig is what the capabilities select" RUNTIME;
        "3.derive.prev-result" Must "prevResult is inserted, but for the first ADD" RUNTIME;
        "3.derive.capabilities" Must "capabilities are left out" RUNTIME;
        "3.derive.others" Should "all other keys are passed on as they are" RUNTIME;
        "3.derive.supported" Should "each capability that configuration and runtime have is inserted" RUNTIME;
    }
    "SPEC 4, Plugin Delegation" {
        "4.ipam" Must "an IPAM plugin determines addresses, gateway and routes, and returns them";
        "4.environment" Must "a delegated plugin gets the same variables";
        "4.path" Should "a delegated plugin is looked up in CNI_PATH";
        "4.configuration" Should "a delegated plugin gets the whole configuration";
        "4.stderr" Should "its stderr is written to stderr";
        "4.success" Plain "its exit status 0 and its result on stdout are its success";
        "4.verbs" Must "CHECK, DEL and GC are passed on to delegated plugins";
        "4.errors" Should "an error of a delegated plugin is an error of the plugin";
        "4.add-failed" Should "after an ADD that failed a delegated plugin gets a DEL";
    }
    "SPEC 5, ADD Success" {
        "5.json" Should "a result is JSON on stdout";
        "5.result.cni-version" Must "a result has the cniVersion of the configuration";
        "5.result.interfaces" Must "a result lists all interfaces that the attachment created";
        "5.result.sandbox" Should "the sandbox of an interface in the container is CNI_NETNS";
        "5.result.ips" Must "a result lists the addresses, each with its prefix length, gateway and interface";
        "5.result.routes" Must "a result lists the routes";
        "5.result.dns" Must "a result has the dns";
        "5.result.prev-result" Must "a result is prevResult with what the plugin changed, and equal to it where it changed nothing";
    }
    "SPEC 5, Delegated plugins (IPAM)" {
        "5.ipam" Must "the result of an IPAM plugin has no interfaces, and no addresses that point to one";
    }
    "SPEC 5, VERSION Success" {
        "5.version.cni-version" Must "VERSION's answer has the cniVersion of the input";
        "5.version.supported" Must "VERSION's answer lists the supported versions";
    }
    "SPEC 5, Error" {
        "5.error" Should "an error object has cniVersion, code, msg and details";
        "5.error.codes" Plain "codes below 100 have the meaning of the table";
        "5.error.key" Must "the message of code 2 has key and value that are not supported" OWN_KEYS;
        "5.error.variable" Must "the message of code 4 has the names of the variables";
    }
    "SPEC 0.2.0, Result" {
        "0.2.0.result" Plain "before 0.3.0 a result has ip4 and ip6";
    }
    "SPEC 0.4.0, Result" {
        "0.4.0.result" Plain "from 0.3.0 to 0.4.0 each address has its version";
    }
    "what runtimes rely on" {
        "practice" Plain "no clause of the specification";
    }
    "the plugin's documentation" {
        "own" Plain "what the plugin's documentation promises";
    }
};

/// The clause with this id.
pub fn find(id: &str) -> Option<&'static Clause> {
    TABLE.iter().find(|clause| clause.id == id)
}
