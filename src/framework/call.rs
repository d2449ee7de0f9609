//! A call of a plugin, and the table of the applets of this executable.

use std::fmt;
use std::process::ExitCode;

use ipnet::IpNet;

use super::turn::AttachmentTurn;
use crate::attachment::{AttachmentId, HostPairEnd};
use crate::cni::json::keys::DecodedKeys;
use crate::cni::{CniResult, ContainerId, InterfaceName, SpecVersion};
use crate::error::{Error, ErrorCode, Result};
use crate::log;
use crate::repairs::RepairFindings;

/// A call by a runtime or by a plugin that delegates.
#[derive(Clone, Debug)]
pub struct PluginCall<'a> {
    /// The `CNI_*` variables.
    pub env: CallEnvironment,
    /// The bytes of standard input; delegates get the same bytes.
    pub stdin: &'a [u8],
    pub table: AppletTable,
    pub caller: PluginCaller,
    /// The turn of the attachment; calls of delegates share it.
    pub turn: AttachmentTurn,
}

impl PluginCall<'_> {
    /// Whether this call has the turn, or its caller, also in another process.
    pub(super) fn has_turn(&self, owner: AttachmentId<'_>) -> bool {
        self.turn.is_taken() || self.env.turn == owner.instance_id()
    }

    /// Warns, unless a plugin that calls this one has warned already.
    pub(super) fn warn_once(&self, warning: impl fmt::Display) {
        if self.caller == PluginCaller::Runtime { log::warn(warning) } else { log::debug(warning) }
    }

    /// Whether `cnibox gc` ends the attachment.
    pub(super) fn is_collected(&self) -> bool {
        self.caller == PluginCaller::Collector
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PluginCaller {
    /// The runtime, by starting a process.
    Runtime,
    /// `cnibox lint`, in its process: STATUS restores nothing.
    Lint,
    /// `cnibox gc`, in its process, for an attachment that has ended. It holds the attachment's lock, and removes
    /// leases and record itself.
    Collector,
    /// Another plugin of this executable, in its process, after its own checks. With the host's end of the attachment's
    /// veth pair, if the plugin has created one.
    Plugin(Option<HostPairEnd>),
}

#[derive(Clone, Copy, Debug)]
pub struct AppletTable {
    pub applets: &'static [Applet],
}

impl AppletTable {
    /// The applet of exactly this name.
    pub fn find_applet(&self, name: &str) -> Option<&'static Applet> {
        self.applets.iter().find(|applet| applet.name == name)
    }

    /// The applet of an executable with this file name: the applet of exactly this name, else the plugin with the
    /// longest name that the file name ends in after a hyphen, as in `buildkit-cni-bridge`.
    pub fn find_by_file_name(&self, name: &str) -> Option<&'static Applet> {
        let is_end = |applet: &&Applet| {
            let start = name.strip_suffix(applet.name);
            applet.kind != AppletKind::Tool && start.is_some_and(|start| start.ends_with('-'))
        };
        let longest = || self.applets.iter().filter(is_end).max_by_key(|applet| applet.name.len());
        self.find_applet(name).or_else(longest)
    }

    /// The plugin of an executable with this file name.
    pub fn find_plugin(&self, name: &str) -> Option<BuiltinPlugin> {
        self.find_by_file_name(name).and_then(Applet::as_plugin)
    }

    pub fn plugin_names(&self) -> impl Iterator<Item = &'static str> {
        self.applets.iter().filter(|applet| applet.kind != AppletKind::Tool).map(|applet| applet.name)
    }
}

/// An applet: the program that the executable runs under one name.
#[derive(Debug)]
pub struct Applet {
    /// The file name of the applet.
    pub name: &'static str,
    pub kind: AppletKind,
    /// One line of description.
    pub about: &'static str,
    pub main: AppletMain,
}

impl Applet {
    /// The applet of a command-line tool.
    pub const fn for_tool(name: &'static str, about: &'static str, main: ToolFunction) -> Applet {
        Applet { name, kind: AppletKind::Tool, about, main: AppletMain::Tool(main) }
    }

    pub fn as_plugin(&self) -> Option<BuiltinPlugin> {
        if let AppletMain::Plugin(plugin) = self.main { Some(plugin) } else { None }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AppletKind {
    /// A plugin that creates an interface.
    Interface,
    /// A plugin that manages addresses, called by others.
    Ipam,
    /// A plugin that changes the interface of the plugins before it in a list.
    Chained,
    Tool,
}

impl fmt::Display for AppletKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(["interface", "ipam", "chained", "tool"][*self as usize])
    }
}

#[derive(Clone, Copy, Debug)]
pub enum AppletMain {
    /// A CNI plugin: environment and standard input in, JSON out.
    Plugin(BuiltinPlugin),
    Tool(ToolFunction),
}

/// The main function of a tool; its arguments are those after its name.
pub type ToolFunction = fn(Vec<String>, AppletTable) -> ExitCode;

/// A plugin of this executable, as functions.
#[derive(Clone, Copy, Debug)]
pub struct BuiltinPlugin {
    pub kind: AppletKind,
    /// The supported versions of the specification.
    pub versions: &'static [SpecVersion],
    /// Whether ADD connects the container to anything; then ADD and DEL have the [turn](super::turn).
    pub connects: bool,
    /// Runs a verb. ADD alone has a result.
    pub run: PluginFunction,
    /// [`Plugin::repair`](super::Plugin::repair); the verb of the call is ignored.
    pub repair: fn(&PluginCall<'_>, &mut RepairFindings) -> Result<()>,
    /// The keys of the configuration that the plugin reads.
    pub keys: fn() -> DecodedKeys,
    /// [`Plugin::examine`](super::Plugin::examine); the verb of the call is ignored.
    pub examine: fn(&PluginCall<'_>, &mut ConfigRemarks) -> Result<()>,
    pub services: &'static [PluginService],
}

pub type PluginFunction = fn(&PluginCall<'_>) -> Result<Option<CniResult>>;

/// Findings about a configuration that works.
#[derive(Debug, Default)]
pub struct ConfigRemarks {
    /// Probable mistakes; the details have the remedy.
    pub warnings: Vec<Error>,
    /// The subnets of its addresses.
    pub subnets: Vec<IpNet>,
}

/// A service or tool of a plugin, started as the plugin with an argument: `dhcp daemon`.
#[derive(Clone, Copy, Debug)]
pub struct PluginService {
    pub name: &'static str,
    /// The main function; its arguments are those after the name of the service.
    pub main: fn(Vec<String>) -> ExitCode,
}

/// `CNI_COMMAND`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CniVerb {
    Add,
    Check,
    Del,
    /// Remove resources that no valid attachment owns.
    Gc,
    /// Report whether ADD would succeed.
    Status,
    /// List the supported versions.
    Version,
}

impl CniVerb {
    const ALL: [CniVerb; 6] =
        [CniVerb::Add, CniVerb::Check, CniVerb::Del, CniVerb::Gc, CniVerb::Status, CniVerb::Version];

    /// The verb in the environment's upper case.
    pub fn as_str(self) -> &'static str {
        ["ADD", "CHECK", "DEL", "GC", "STATUS", "VERSION"][self as usize]
    }

    /// The verb of this name.
    pub fn parse(text: &str) -> Option<CniVerb> {
        CniVerb::ALL.into_iter().find(|verb| verb.as_str() == text)
    }
}

/// The variables of a call; an unset variable is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallEnvironment {
    /// `CNI_COMMAND`.
    pub command: String,
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// `CNI_NETNS`.
    pub netns: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
    /// `CNI_ARGS`.
    pub args: String,
    /// `CNI_PATH`: directories of plugins, separated by colons.
    pub path: String,
    /// `CNI_NETNS_OVERRIDE`: the container may be in the plugin's own namespace.
    pub netns_override: String,
    /// `CNIBOX_TURN`: the [instance](crate::attachment::AttachmentId::instance_id) of the attachment whose lock the
    /// caller holds, if the caller is also a plugin of this program.
    pub turn: String,
}

impl CallEnvironment {
    /// The variables of this process.
    pub fn from_process() -> CallEnvironment {
        CallEnvironment::from_lookup(|name| std::env::var_os(name).unwrap_or_default().to_string_lossy().into_owned())
    }

    /// The variables, looked up by name with `var`.
    pub fn from_lookup(var: impl Fn(&str) -> String) -> CallEnvironment {
        CallEnvironment {
            command: var("CNI_COMMAND"),
            container_id: var("CNI_CONTAINERID"),
            netns: var("CNI_NETNS"),
            ifname: var("CNI_IFNAME"),
            args: var("CNI_ARGS"),
            path: var("CNI_PATH"),
            netns_override: var("CNI_NETNS_OVERRIDE"),
            turn: var("CNIBOX_TURN"),
        }
    }

    /// The same call with another verb.
    #[must_use]
    pub fn with_verb(&self, verb: CniVerb) -> CallEnvironment {
        CallEnvironment { command: verb.as_str().to_owned(), ..self.clone() }
    }

    /// The variables for a child process.
    pub fn to_variables(&self) -> [(&'static str, &str); 8] {
        [
            ("CNI_COMMAND", &self.command),
            ("CNI_CONTAINERID", &self.container_id),
            ("CNI_NETNS", &self.netns),
            ("CNI_IFNAME", &self.ifname),
            ("CNI_ARGS", &self.args),
            ("CNI_PATH", &self.path),
            ("CNI_NETNS_OVERRIDE", &self.netns_override),
            ("CNIBOX_TURN", &self.turn),
        ]
    }

    /// Whether `CNI_NETNS_OVERRIDE` is on: `1`, or `true` in any case.
    pub fn overrides_netns_check(&self) -> bool {
        self.netns_override == "1" || self.netns_override.eq_ignore_ascii_case("true")
    }

    /// Checks that the variables which the verb requires are set and valid, in the order that callers can
    /// observe. Other variables are not checked. Code 4.
    pub fn require_variables(&self) -> Result<()> {
        let verb = CniVerb::parse(&self.command);
        let container = matches!(verb, Some(CniVerb::Add | CniVerb::Check | CniVerb::Del));
        let netns = matches!(verb, Some(CniVerb::Add | CniVerb::Check));
        let path = verb.is_some_and(|verb| verb != CniVerb::Version);
        let mut missing = Vec::new();
        for (is_required, name, value) in [
            (true, "CNI_COMMAND", &self.command),
            (container, "CNI_CONTAINERID", &self.container_id),
            (netns, "CNI_NETNS", &self.netns),
            (container, "CNI_IFNAME", &self.ifname),
            (path, "CNI_PATH", &self.path),
        ] {
            match name {
                _ if !is_required => {}
                _ if value.is_empty() => missing.push(name),
                "CNI_CONTAINERID" => drop(ContainerId::parse(value)?),
                "CNI_IFNAME" => drop(InterfaceName::parse(value)?),
                _ => {}
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let msg = format!("required env variables [{}] missing", missing.join(","));
        Err(Error::new(ErrorCode::INVALID_ENVIRONMENT, msg))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(command: &str) -> CallEnvironment {
        CallEnvironment {
            command: command.into(),
            container_id: "c1".into(),
            netns: "/x".into(),
            ifname: "eth0".into(),
            path: "/bin".into(),
            ..CallEnvironment::default()
        }
    }

    fn missing(env: &CallEnvironment) -> String {
        env.require_variables().map_err(|e| e.message().to_owned()).err().unwrap_or_default()
    }

    #[test]
    fn each_verb_requires_its_variables() {
        let none = |command: &str| CallEnvironment { command: command.into(), ..CallEnvironment::default() };
        let expect = |list: &str| format!("required env variables [{list}] missing");
        for verb in ["ADD", "CHECK", "DEL", "GC", "STATUS", "VERSION", "FOO"] {
            assert_eq!(missing(&env(verb)), "");
        }
        for verb in ["ADD", "CHECK"] {
            assert_eq!(missing(&none(verb)), expect("CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH"));
        }
        assert_eq!(missing(&none("DEL")), expect("CNI_CONTAINERID,CNI_IFNAME,CNI_PATH"));
        assert_eq!(missing(&none("GC")), expect("CNI_PATH"));
        assert_eq!(missing(&none("STATUS")), expect("CNI_PATH"));
        assert_eq!(missing(&none("VERSION")), "");
        assert_eq!(missing(&none("FOO")), "");
        assert_eq!(missing(&none("")), expect("CNI_COMMAND"));
    }

    #[test]
    fn an_invalid_variable_is_reported_before_missing_ones() {
        let bad = CallEnvironment { container_id: "a%".into(), path: String::new(), ..env("ADD") };
        assert_eq!(missing(&bad), "invalid characters in containerID");
        let unused = CallEnvironment { container_id: "a/".into(), ..env("GC") };
        assert_eq!(missing(&unused), "");
    }

    #[test]
    fn the_override_of_the_namespace_check_is_a_boolean() {
        for (value, on) in [("1", true), ("TRUE", true), ("yes", false), ("0", false), ("", false)] {
            let env = CallEnvironment { netns_override: value.into(), ..CallEnvironment::default() };
            assert_eq!(env.overrides_netns_check(), on, "{value}");
        }
    }
}
