//! One call of a plugin: the environment, standard input, and the other plugins of this executable.

use std::fmt;

use crate::cni::{CniResult, ContainerId, IfName};
use crate::error::{Code, Error, Result};
use crate::repairs::Repairs;

/// A call, from the process's environment or from a plugin that delegates.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    /// The `CNI_*` variables.
    pub env: Env,
    /// The bytes of standard input; delegates get the same bytes.
    pub stdin: &'a [u8],
    /// Finds other plugins of this executable.
    pub lookup: Lookup,
    /// Who makes the call.
    pub caller: Caller,
}

/// Who makes a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// The runtime, by starting a process.
    Runtime,
    /// Another plugin of this executable, in its process, after its own checks.
    Plugin,
}

/// A plugin as a function: the result of ADD, nothing for the other verbs.
pub type RunFn = fn(&Call<'_>) -> Result<Option<CniResult>>;

/// [`Plugin::repair`](super::Plugin::repair) as a function.
pub type RepairFn = fn(&Call<'_>, &mut Repairs) -> Result<()>;

/// What sort of program an applet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A plugin that makes an interface.
    Interface,
    /// A plugin that manages addresses, called by others.
    Ipam,
    /// A plugin that works on what those before it in a list made.
    Chained,
    /// A program for people.
    Tool,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Kind::Interface => "interface",
            Kind::Ipam => "ipam",
            Kind::Chained => "chained",
            Kind::Tool => "tool",
        })
    }
}

/// A plugin of this executable.
#[derive(Clone, Copy, Debug)]
pub struct OwnPlugin {
    pub kind: Kind,
    /// The plugin as a function.
    pub run: RunFn,
    /// Restores an attachment; the verb of the call is ignored.
    pub repair: RepairFn,
}

/// Finds the plugin of a name in this executable.
pub type Lookup = fn(&str) -> Option<OwnPlugin>;

/// `CNI_COMMAND`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Add,
    Check,
    Del,
    /// Remove resources that no valid attachment owns.
    Gc,
    /// Tell whether ADD could be served.
    Status,
    /// List the supported versions.
    Version,
}

impl Verb {
    const ALL: [Verb; 6] =
        [Verb::Add, Verb::Check, Verb::Del, Verb::Gc, Verb::Status, Verb::Version];

    /// The verb as the environment has it, upper case.
    pub fn as_str(self) -> &'static str {
        match self {
            Verb::Add => "ADD",
            Verb::Check => "CHECK",
            Verb::Del => "DEL",
            Verb::Gc => "GC",
            Verb::Status => "STATUS",
            Verb::Version => "VERSION",
        }
    }

    /// The verb of this name.
    pub fn parse(text: &str) -> Option<Verb> {
        Verb::ALL.into_iter().find(|verb| verb.as_str() == text)
    }

    fn is_about_one_container(self) -> bool {
        matches!(self, Verb::Add | Verb::Check | Verb::Del)
    }
}

/// The `CNI_*` variables; one that is unset is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Env {
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
    /// `CNI_NETNS_OVERRIDE`: the container may live in the plugin's own namespace.
    pub netns_override: String,
}

impl Env {
    /// The variables of this process.
    pub fn from_process() -> Env {
        Env::read(|name| std::env::var_os(name).unwrap_or_default().to_string_lossy().into_owned())
    }

    /// The variables, looked up by name with `var`.
    pub fn read(var: impl Fn(&str) -> String) -> Env {
        Env {
            command: var("CNI_COMMAND"),
            container_id: var("CNI_CONTAINERID"),
            netns: var("CNI_NETNS"),
            ifname: var("CNI_IFNAME"),
            args: var("CNI_ARGS"),
            path: var("CNI_PATH"),
            netns_override: var("CNI_NETNS_OVERRIDE"),
        }
    }

    /// The same call with another verb.
    #[must_use]
    pub fn with_verb(&self, verb: Verb) -> Env {
        Env { command: verb.as_str().to_owned(), ..self.clone() }
    }

    /// The variables as a child process gets them.
    pub fn vars(&self) -> [(&'static str, &str); 7] {
        [
            ("CNI_COMMAND", &self.command),
            ("CNI_CONTAINERID", &self.container_id),
            ("CNI_NETNS", &self.netns),
            ("CNI_IFNAME", &self.ifname),
            ("CNI_ARGS", &self.args),
            ("CNI_PATH", &self.path),
            ("CNI_NETNS_OVERRIDE", &self.netns_override),
        ]
    }

    /// Whether `CNI_NETNS_OVERRIDE` is on: `1`, or `true` in any case.
    pub fn overrides_netns_check(&self) -> bool {
        self.netns_override == "1" || self.netns_override.eq_ignore_ascii_case("true")
    }

    /// Checks that the variables which the verb requires are set and valid, in the order that callers can
    /// observe. Other variables are not checked. Code 4.
    pub fn check(&self) -> Result<()> {
        let verb = Verb::parse(&self.command);
        let container = verb.is_some_and(Verb::is_about_one_container);
        let netns = matches!(verb, Some(Verb::Add | Verb::Check));
        let path = verb.is_some_and(|verb| verb != Verb::Version);
        let mut missing = Vec::new();
        if self.command.is_empty() {
            missing.push("CNI_COMMAND");
        }
        if container {
            match self.container_id.as_str() {
                "" => missing.push("CNI_CONTAINERID"),
                id => drop(ContainerId::parse(id)?),
            }
        }
        if netns && self.netns.is_empty() {
            missing.push("CNI_NETNS");
        }
        if container {
            match self.ifname.as_str() {
                "" => missing.push("CNI_IFNAME"),
                name => drop(IfName::parse(name)?),
            }
        }
        if path && self.path.is_empty() {
            missing.push("CNI_PATH");
        }
        if missing.is_empty() {
            return Ok(());
        }
        let msg = format!("required env variables [{}] missing", missing.join(","));
        Err(Error::new(Code::INVALID_ENVIRONMENT, msg))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(command: &str) -> Env {
        Env {
            command: command.into(),
            container_id: "c1".into(),
            netns: "/x".into(),
            ifname: "eth0".into(),
            path: "/bin".into(),
            ..Env::default()
        }
    }

    fn missing(env: &Env) -> String {
        env.check().map_err(|e| e.msg().to_owned()).err().unwrap_or_default()
    }

    #[test]
    fn what_each_verb_requires() {
        let none = |command: &str| Env { command: command.into(), ..Env::default() };
        let expect = |list: &str| format!("required env variables [{list}] missing");
        for verb in ["ADD", "CHECK", "DEL", "GC", "STATUS", "VERSION", "FOO"] {
            assert_eq!(missing(&env(verb)), "");
        }
        for verb in ["ADD", "CHECK"] {
            assert_eq!(
                missing(&none(verb)),
                expect("CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH")
            );
        }
        assert_eq!(missing(&none("DEL")), expect("CNI_CONTAINERID,CNI_IFNAME,CNI_PATH"));
        assert_eq!(missing(&none("GC")), expect("CNI_PATH"));
        assert_eq!(missing(&none("STATUS")), expect("CNI_PATH"));
        assert_eq!(missing(&none("VERSION")), "");
        assert_eq!(missing(&none("FOO")), "");
        assert_eq!(missing(&none("")), expect("CNI_COMMAND"));
    }

    #[test]
    fn an_invalid_value_hides_missing_ones() {
        let bad = Env { container_id: "a%".into(), path: String::new(), ..env("ADD") };
        assert_eq!(missing(&bad), "invalid characters in containerID");
        let unused = Env { container_id: "a/".into(), ..env("GC") };
        assert_eq!(missing(&unused), "");
    }

    #[test]
    fn override_values() {
        for (value, on) in [("1", true), ("TRUE", true), ("yes", false), ("0", false), ("", false)]
        {
            let env = Env { netns_override: value.into(), ..Env::default() };
            assert_eq!(env.overrides_netns_check(), on, "{value}");
        }
    }
}
