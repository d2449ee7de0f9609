//! The configuration of egress. Its unknown keys are errors, as the specification permits: a
//! misspelled `deny` would open what it was meant to refuse.

use std::path::PathBuf;

use serde::Deserialize;

use crate::framework::{CallContext, ConfigRemarks};
use crate::netfilter::egress::limits::PolicyLimits;
use crate::netfilter::egress::lint::find_idle_entries;
use crate::netfilter::egress::policy::{EgressPolicy, PolicyEntry, PolicyScene};
use crate::netfilter::egress::source::{
    key_error, named_policy, require_keys, require_unrepeated, resembles_policy_key,
    unknown_key_error,
};
use cni::config::Args;
use cni::error::{Error, Result};
use cni::json::Json;
use cni::json::keys::{DecodedKeys, is_comment};
use cni::json::place::JsonValuePath;
use cni::runtime::{NetworkList, PluginConfig};

/// Keys that Multus writes into each plugin of a list, for a device of the pod, and one of the
/// specification.
const OF_OTHERS: [&str; 3] = ["deviceID", "ipMasq", "pciBusID"];

/// The key of policies that do not come from the plugin's own keys.
const GIVEN_POLICY: &str = "egressPolicy";

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EgressConfig {
    policy: Option<String>,
    allow: Option<Vec<PolicyEntry>>,
    deny: Option<Vec<PolicyEntry>>,
    profile: Option<String>,
    serve: Option<Vec<String>>,
    limits: PolicyLimits,
    /// `enforce` or `audit`, with which what the policies refuse passes, and is only noted.
    mode: String,
    /// What the container gets for what is refused: `reject`, a reset of TCP or an ICMP error, or
    /// `drop`, nothing.
    refuse: String,
    /// The directory of named policies, below `/etc/cni`, `/run/cni` or `/var/lib/cni`; only root
    /// can write there.
    policy_dir: PathBuf,
    runtime_config: EgressRuntimeConfig,
    args: Args<EgressArgs>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct EgressRuntimeConfig {
    egress_policy: Option<EgressPolicy>,
    port_mappings: Vec<PublishedPort>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PublishedPort {
    container_port: u16,
    /// `tcp`, `udp` or `sctp`. Default: `tcp`.
    protocol: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct EgressArgs {
    egress_policy: Option<EgressPolicy>,
}

impl EgressConfig {
    /// The policy of the configuration's own keys; `None` without any. `serve` alone is none.
    fn own_policy(&self) -> Option<EgressPolicy> {
        let EgressConfig { policy, allow, deny, profile, .. } = self;
        let is_absent = policy.is_none() && allow.is_none() && deny.is_none() && profile.is_none();
        (!is_absent).then(|| EgressPolicy {
            policy: policy.clone().unwrap_or_default(),
            allow: allow.clone().unwrap_or_default(),
            deny: deny.clone().unwrap_or_default(),
            profile: profile.clone().unwrap_or_default(),
            ..self.own_services()
        })
    }

    /// `serve`, as a policy that allows nothing.
    fn own_services(&self) -> EgressPolicy {
        EgressPolicy { serve: self.serve.clone().unwrap_or_default(), ..EgressPolicy::default() }
    }

    /// Examines the values, and policies of at most `most` networks for entries without effect.
    pub(super) fn examine(
        &self,
        cx: &CallContext<'_>,
        most: usize,
        remarks: &mut ConfigRemarks,
    ) -> Result<()> {
        self.is_silent()?;
        self.limits()?;
        if self.is_audited()? {
            let problem = "the policies refuse nothing: mode is \"audit\"";
            remarks.warnings.push(Error::config(problem).with_details(
                "\"cnibox egress learn\" prints the policy that would do; then leave \"mode\" out",
            ));
        }
        if let Some(policy) = self.own_policy() {
            let scene = PolicyScene::default();
            policy.compile(&scene)?;
            remarks.warnings.extend(find_idle_entries(&policy, &scene, most)?);
        } else {
            self.own_services().compile(&PolicyScene::default())?;
            if !cx.net.wants_capability(GIVEN_POLICY) && self.policy_dir.as_os_str().is_empty() {
                let problem = "the container can reach nothing: the configuration has no policy";
                let remedy = "add \"allow\", \"profile\" or \"policy\"";
                remarks.warnings.push(Error::config(problem).with_details(remedy));
            }
        }
        Ok(())
    }

    /// The policies of all sources; with none of them the empty policy, which allows nothing. The
    /// last one is of the file, if there is one.
    pub(super) fn policies(
        &self,
        cx: &CallContext<'_>,
    ) -> Result<(Vec<EgressPolicy>, Option<PathBuf>)> {
        require_known_keys(&cx.net.json)?;
        let (named, file) = named_policy(cx.raw_args(), &self.policy_dir)?.unzip();
        let given =
            [self.runtime_config.egress_policy.clone(), self.args.cni.egress_policy.clone(), named];
        let mut policies: Vec<EgressPolicy> =
            self.own_policy().into_iter().chain(given.into_iter().flatten()).collect();
        if policies.is_empty() {
            policies.push(EgressPolicy::default());
        }
        Ok((policies, file))
    }

    /// Whether the configuration's own policy has names.
    pub(super) fn has_names(&self) -> bool {
        self.own_policy().is_some_and(|policy| policy.has_names())
    }

    /// Whether the policies are only audited.
    pub(super) fn is_audited(&self) -> Result<bool> {
        is_second_choice("mode", &self.mode, ["enforce", "audit"])
    }

    /// Whether what is refused gets no answer.
    pub(super) fn is_silent(&self) -> Result<bool> {
        is_second_choice("refuse", &self.refuse, ["reject", "drop"])
    }

    /// The limits that hold whatever the policies are.
    pub(super) fn limits(&self) -> Result<PolicyLimits> {
        self.limits.compile()?;
        Ok(self.limits.clone())
    }

    /// The services that are served whatever the policies are, as in [`EgressPolicy::serve`]: those
    /// of published ports, and `serve` if it belongs to no policy.
    pub(super) fn published(&self) -> Result<Vec<String>> {
        let mut services = Vec::new();
        if self.own_policy().is_none() {
            let own = self.own_services();
            own.compile(&PolicyScene::default())?;
            services = own.serve;
        }
        services.extend(self.runtime_config.port_mappings.iter().map(|port| {
            let proto = if port.protocol.is_empty() { "tcp" } else { &port.protocol };
            format!("{}/{}", proto.to_ascii_lowercase(), port.container_port)
        }));
        Ok(services)
    }
}

/// Whether the value of a key is the second of two, the first of which is the default.
fn is_second_choice(key: &str, value: &str, choices: [&str; 2]) -> Result<bool> {
    match choices.iter().position(|choice| *choice == value) {
        Some(at) => Ok(at == 1),
        None if value.is_empty() => Ok(false),
        None => Err(Error::config(format!("{key} {value:?}: unknown value")).with_details(
            format!("write \"{}\" or \"{}\", or leave the key out", choices[0], choices[1]),
        )),
    }
}

/// Fails if the configuration has an unknown or repeated key where a policy may be; of repeated
/// objects the parser has made one. What others write is left: keys common to all plugins, those
/// with a domain, such as `cni.dev/attachments`, comments, and values of runtimes and pods for other
/// plugins, unless their keys resemble that of a policy.
pub(super) fn require_known_keys(config: &Json) -> Result<()> {
    let Json::Object(members) = config else { return Ok(()) };
    let policy = DecodedKeys::of_type::<EgressPolicy>();
    let own = policy.clone().with_member("policyDir", DecodedKeys::Any);
    let own = own.with_member("mode", DecodedKeys::Any).with_member("refuse", DecodedKeys::Any);
    let common = PluginConfig::common_keys();
    let is_common = |name: &str| {
        common.member_keys(name).is_some()
            || NetworkList::KEYS.contains(&name)
            || OF_OTHERS.contains(&name)
            || name.contains('.')
            || is_comment(name)
    };
    let root = JsonValuePath::default();
    for (at, (name, value)) in members.iter().enumerate() {
        if let Some(known) = own.member_keys(name) {
            require_unrepeated(members, at, &root)?;
            require_keys(value, known, &JsonValuePath::root_member(name))?;
        } else if !is_common(name) {
            return Err(unknown_key_error(name, &root, &own));
        }
    }
    let none = DecodedKeys::Any;
    for (place, key, below) in [
        ("capabilities", GIVEN_POLICY, &none),
        ("runtimeConfig", GIVEN_POLICY, &policy),
        ("args", "cni", &none),
        ("args.cni", GIVEN_POLICY, &policy),
    ] {
        require_open_keys(config, place, key, below)?;
    }
    Ok(())
}

/// Checks an object that has values for other plugins, too, and the keys `below` its own `key`.
fn require_open_keys(config: &Json, place: &str, key: &str, below: &DecodedKeys) -> Result<()> {
    let found = place.split('.').try_fold(config, |json, key| json.get_present_member(key));
    let Some(Json::Object(members)) = found else { return Ok(()) };
    let at = JsonValuePath::parse(place);
    for (name, value) in members {
        // Runtimes compare the names of capabilities exactly.
        let is_own = name == key || (place != "capabilities" && name.eq_ignore_ascii_case(key));
        if is_own && *value != Json::Null {
            require_keys(value, below, &at.join_path(&JsonValuePath::root_member(name)))?;
        }
        if !is_own && (resembles_policy_key(name) || (place == "args" && has_policy(value))) {
            let error = key_error(format!("unknown key \"{name}\""), &at);
            return Err(error.with_details(
                "the policy of a container is \"egressPolicy\", as capability, in \
                 \"runtimeConfig\" or in \"args\": {\"cni\": { ... }}",
            ));
        }
    }
    Ok(())
}

fn has_policy(json: &Json) -> bool {
    let Json::Object(members) = json else { return false };
    members.iter().any(|(name, _)| resembles_policy_key(name))
}
