//! A call of a plugin, and the table of the applets of this executable.

use std::fmt;
use std::process::ExitCode;

use ipnet::IpNet;

use super::turn::AttachmentTurn;
use crate::attachment::{AttachmentId, HostVeth};
use crate::repairs::RepairFindings;
use cni::error::{Error, Result};
use cni::json::keys::DecodedKeys;
use cni::plugin::CallEnvironment;
use cni::{CniResult, SpecVersion};

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
    /// `CNIBOX_TURN`: the [instance](AttachmentId::instance_id) of the attachment whose lock the
    /// calling process holds, if it is a plugin of this program; else empty.
    pub turn_of_caller: String,
}

/// The variable of [`PluginCall::turn_of_caller`].
pub const TURN_VARIABLE: &str = "CNIBOX_TURN";

impl<'a> PluginCall<'a> {
    /// A call by a runtime.
    pub fn new(env: CallEnvironment, stdin: &'a [u8], table: AppletTable) -> PluginCall<'a> {
        let (caller, turn) = (PluginCaller::Runtime, AttachmentTurn::default());
        PluginCall { env, stdin, table, caller, turn, turn_of_caller: String::new() }
    }

    /// Whether this call or its caller has the turn; the caller may be another process.
    pub(super) fn has_turn(&self, owner: AttachmentId<'_>) -> bool {
        self.turn.is_taken() || self.turn_of_caller == owner.instance_id()
    }

    /// Warns, unless a plugin that calls this one has warned already.
    pub(super) fn warn_once(&self, warning: impl fmt::Display) {
        if self.caller == PluginCaller::Runtime { warn!("{warning}") } else { debug!("{warning}") }
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
    /// `cnibox gc`, in its process, for an attachment that has ended. It holds the attachment's
    /// lock, and removes leases and record itself.
    Collector,
    /// Another plugin of this executable, in its process, after its own checks. With the host's end
    /// of the attachment's veth pair, if the plugin has created one.
    Plugin(Option<HostVeth>),
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

    /// The applet of an executable with this file name: the applet of exactly this name, else the
    /// plugin with the longest name that the file name ends in after a hyphen, as in
    /// `buildkit-cni-bridge`.
    pub fn find_by_file_name(&self, name: &str) -> Option<&'static Applet> {
        self.find_applet(name).or_else(|| {
            self.applets
                .iter()
                .filter(|applet| {
                    let start = name.strip_suffix(applet.name);
                    applet.kind != AppletKind::Tool
                        && start.is_some_and(|start| start.ends_with('-'))
                })
                .max_by_key(|applet| applet.name.len())
        })
    }

    /// The plugin of an executable with this file name.
    pub fn find_plugin(&self, name: &str) -> Option<BuiltinPlugin> {
        self.find_by_file_name(name).and_then(Applet::as_plugin)
    }

    pub fn plugin_names(&self) -> impl Iterator<Item = &'static str> {
        self.applets
            .iter()
            .filter(|applet| applet.kind != AppletKind::Tool)
            .map(|applet| applet.name)
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
    /// Whether ADD connects the container to anything; then ADD and DEL have the
    /// [turn](super::turn).
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
