//! The call of a plugin: the verb and the other `CNI_*` variables (spec, section 2).

use crate::error::{Error, ErrorCode, Result};
use crate::names::{ContainerId, InterfaceName};

/// `CNI_COMMAND`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CniVerb {
    /// Attach a container.
    Add,
    /// Report whether an attachment is as ADD made it.
    Check,
    /// Detach a container.
    Del,
    /// Remove resources that no valid attachment owns.
    Gc,
    /// Report whether ADD would succeed.
    Status,
    /// List the supported versions.
    Version,
}

impl CniVerb {
    const ALL: [CniVerb; 6] = [
        CniVerb::Add,
        CniVerb::Check,
        CniVerb::Del,
        CniVerb::Gc,
        CniVerb::Status,
        CniVerb::Version,
    ];

    /// The verb in the environment's upper case.
    ///
    /// ```
    /// # use cnibox_cni::plugin::CniVerb;
    /// assert_eq!(CniVerb::Status.as_str(), "STATUS");
    /// ```
    pub fn as_str(self) -> &'static str {
        ["ADD", "CHECK", "DEL", "GC", "STATUS", "VERSION"][self as usize]
    }

    /// Whether the verb only removes: DEL and GC, which go on without what does not decode.
    ///
    /// ```
    /// # use cnibox_cni::plugin::CniVerb;
    /// assert!(CniVerb::Del.only_removes() && !CniVerb::Add.only_removes());
    /// ```
    pub fn only_removes(self) -> bool {
        matches!(self, CniVerb::Del | CniVerb::Gc)
    }

    /// The verb of this name.
    ///
    /// ```
    /// # use cnibox_cni::plugin::CniVerb;
    /// assert_eq!((CniVerb::parse("GC"), CniVerb::parse("gc")), (Some(CniVerb::Gc), None));
    /// ```
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
}

impl CallEnvironment {
    /// The variables of this process.
    ///
    /// ```
    /// # use cnibox_cni::plugin::CallEnvironment;
    /// assert_eq!(CallEnvironment::from_process().command, "");
    /// ```
    pub fn from_process() -> CallEnvironment {
        CallEnvironment::from_lookup(|name| {
            std::env::var_os(name).unwrap_or_default().to_string_lossy().into_owned()
        })
    }

    /// The variables, looked up by name with `var`.
    #[doc(hidden)]
    pub fn from_lookup(var: impl Fn(&str) -> String) -> CallEnvironment {
        CallEnvironment {
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
    ///
    /// ```
    /// # use cnibox_cni::plugin::{CallEnvironment, CniVerb};
    /// assert_eq!(CallEnvironment::default().with_verb(CniVerb::Del).command, "DEL");
    /// ```
    #[must_use]
    pub fn with_verb(&self, verb: CniVerb) -> CallEnvironment {
        CallEnvironment { command: verb.as_str().to_owned(), ..self.clone() }
    }

    /// The variables for a child process.
    ///
    /// ```
    /// # use cnibox_cni::plugin::{CallEnvironment, CniVerb};
    /// let env = CallEnvironment::default().with_verb(CniVerb::Add);
    /// assert_eq!(env.to_variables()[0], ("CNI_COMMAND", "ADD"));
    /// ```
    pub fn to_variables(&self) -> [(&'static str, &str); 7] {
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
    #[doc(hidden)]
    pub fn overrides_netns_check(&self) -> bool {
        self.netns_override == "1" || self.netns_override.eq_ignore_ascii_case("true")
    }

    /// Checks that the variables which the verb requires are set and valid, in the order that
    /// callers can observe. Other variables are not checked. Code 4.
    ///
    /// ```
    /// # use cnibox_cni::plugin::{CallEnvironment, CniVerb};
    /// let error = CallEnvironment::default().with_verb(CniVerb::Gc).require_variables().unwrap_err();
    /// assert_eq!(error.message(), "required env variables [CNI_PATH] missing");
    /// ```
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
        let none = |command: &str| CallEnvironment {
            command: command.into(),
            ..CallEnvironment::default()
        };
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
    fn an_invalid_variable_is_reported_before_missing_ones() {
        let bad = CallEnvironment { container_id: "a%".into(), path: String::new(), ..env("ADD") };
        assert_eq!(missing(&bad), "invalid characters in containerID");
        let unused = CallEnvironment { container_id: "a/".into(), ..env("GC") };
        assert_eq!(missing(&unused), "");
    }

    #[test]
    fn the_override_of_the_namespace_check_is_a_boolean() {
        for (value, on) in [("1", true), ("TRUE", true), ("yes", false), ("0", false), ("", false)]
        {
            let env =
                CallEnvironment { netns_override: value.into(), ..CallEnvironment::default() };
            assert_eq!(env.overrides_netns_check(), on, "{value}");
        }
    }
}
