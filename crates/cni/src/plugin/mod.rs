//! The skeleton of a plugin: a type that implements [`Plugin`], and [`main`].
//!
//! The skeleton reads the request, chooses the version of the specification, decodes the plugin's
//! keys, prints the result or the error object, and takes care of what each plugin has to:
//!
//! * DEL and GC work although the configuration has become wrong since ADD: a key that does not
//!   decode counts as absent, keys that do not decode without it as their default; DEL also takes
//!   an unsupported version as the newest, and an unreadable `prevResult` as none;
//! * a container in the plugin's own namespace is refused by ADD, and is gone for DEL: the process
//!   whose id is in `CNI_NETNS` has ended, and its id may belong to a process of the host;
//! * the result has the layout of the request's version;
//! * an ADD whose result is lost, because the version cannot represent it or it cannot be written,
//!   is undone by DEL;
//! * a panic is an error with code 999. What ADD did before it stays until DEL.
//!
//! Warnings go through [`log`]; [`main`] writes them to stderr if the program has no logger.
//!
//! ```
//! use cnibox_cni::plugin::{self, Attachment, CallEnvironment, Network, Plugin};
//! use cnibox_cni::{CniResult, Result, ValidAttachment};
//!
//! /// Returns the result of the previous plugin with another name server.
//! struct NameServer;
//!
//! #[derive(Default, serde::Deserialize)]
//! struct Keys {
//!     nameserver: String,
//! }
//!
//! impl Plugin for NameServer {
//!     const NAME: &'static str = "name-server";
//!     type Keys = Keys;
//!
//!     fn add(network: &Network<Keys>, attachment: &Attachment) -> Result<CniResult> {
//!         let mut result = attachment.require_prev_result()?.clone();
//!         result.dns.nameservers = vec![network.keys.nameserver.clone()];
//!         Ok(result)
//!     }
//!
//!     fn check(_: &Network<Keys>, _: &Attachment) -> Result<()> {
//!         Ok(())
//!     }
//!
//!     fn del(_: &Network<Keys>, _: &Attachment) -> Result<()> {
//!         Ok(())
//!     }
//! }
//!
//! // fn main() -> std::process::ExitCode { plugin::main::<NameServer>() }
//! # fn main() -> Result<()> {
//! # let env = CallEnvironment {
//! #     command: "ADD".into(), container_id: "c1".into(), netns: "/run/netns/a".into(), ifname: "eth0".into(),
//! #     path: "/opt/cni/bin".into(),
//! #     ..CallEnvironment::default()
//! # };
//! let request = br#"{"cniVersion": "1.1.0", "name": "pods", "type": "name-server", "nameserver": "10.0.0.53",
//!     "prevResult": {"cniVersion": "1.1.0"}}"#;
//! let result = plugin::run::<NameServer>(&env, request)?.unwrap_or_default();
//! assert_eq!(result.dns.nameservers, ["10.0.0.53"]);
//! # Ok(())
//! # }
//! ```

mod call;
#[doc(hidden)]
pub mod process;
#[doc(hidden)]
pub mod request;
#[cfg(test)]
mod tests;

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::process::ExitCode;

use serde::de::DeserializeOwned;

use self::process::{print_outcome, print_versions, read_stdin, run_guarded, start_log};
#[doc(hidden)]
pub use self::request::{DecodedRequest, absent_key_warning, no_prev_result_warning};
use crate::args::CniArgPairs;
use crate::config::{NetworkConfig, ValidAttachment};
use crate::error::{Error, ErrorCode, Result};
use crate::exec::{PluginCommand, execute_plugin, find_plugin, read_result, split_path};
use crate::names::{ContainerId, InterfaceName};
use crate::result::CniResult;
use crate::version::SpecVersion;

pub use self::call::{CallEnvironment, CniVerb};

/// A CNI plugin.
pub trait Plugin {
    /// The `type` of configurations, and the name of the executable.
    const NAME: &'static str;
    /// The supported versions of the specification.
    const VERSIONS: &'static [SpecVersion] = &SpecVersion::ALL;
    /// The plugin's own keys of the configuration. DEL and GC get the default if the keys do not
    /// decode at all, for example because one that ADD requires is missing. Keys match in any
    /// case, but not with `#[serde(flatten)]`, which also ends the decoding of single keys.
    type Keys: DeserializeOwned + Default;

    /// Attaches the container, and returns the result for the next plugin and the runtime. On
    /// failure nothing is left.
    fn add(network: &Network<Self::Keys>, attachment: &Attachment) -> Result<CniResult>;

    /// Fails unless the attachment is as ADD made it.
    fn check(network: &Network<Self::Keys>, attachment: &Attachment) -> Result<()>;

    /// Detaches the container. Succeeds if there is nothing to do: a runtime repeats DEL, also
    /// without a namespace.
    fn del(network: &Network<Self::Keys>, attachment: &Attachment) -> Result<()>;

    /// Removes what belongs to attachments of this network that are not in `valid`. Not called
    /// without a list; a list that is `null`, as libcni writes an empty one, is empty.
    fn gc(network: &Network<Self::Keys>, valid: &[ValidAttachment]) -> Result<()> {
        let _ = (network, valid);
        Ok(())
    }

    /// Fails, with code 50 or 51, if an ADD would fail now.
    fn status(network: &Network<Self::Keys>) -> Result<()> {
        let _ = network;
        Ok(())
    }
}

/// The remedy for a missing `prevResult`.
#[doc(hidden)]
pub const PREV_RESULT_REMEDY: &str =
    "it needs an interface: put it after an interface plugin, such as bridge or ptp, in a list";

/// A network as its configuration says, for one call.
#[derive(Clone, Debug)]
pub struct Network<K> {
    /// The plugin's own keys.
    pub keys: K,
    /// The keys of all plugins.
    pub config: NetworkConfig,
    /// The version of the request. The result is converted to it.
    pub version: SpecVersion,
    /// The variables of the call.
    pub env: CallEnvironment,
    request: Vec<u8>,
}

impl<K> Network<K> {
    /// `CNI_ARGS`, for a plugin that reads the keys `known`. See [`CniArgPairs::parse`].
    ///
    /// ```
    /// # use cnibox_cni::plugin::{Network, NoKeys};
    /// # fn example(network: &Network<NoKeys>) -> cnibox_cni::Result<Option<String>> {
    /// network.parse_args(&["K8S_POD_NAME"])?.parse_value("K8S_POD_NAME", |name| Ok(name.to_owned()))
    /// # }
    /// ```
    pub fn parse_args(&self, known: &[&str]) -> Result<CniArgPairs> {
        CniArgPairs::parse(&self.env.args, known)
    }

    /// Runs the IPAM plugin of the configuration with this verb and the request of this call (spec,
    /// section 4). Only ADD has a result. Without an IPAM plugin it is empty.
    ///
    /// ```
    /// # use cnibox_cni::plugin::{CniVerb, Network, NoKeys};
    /// # fn example(network: &Network<NoKeys>) -> cnibox_cni::Result<()> {
    /// let addresses = network.run_ipam(CniVerb::Add)?.unwrap_or_default().ips;
    /// # Ok(())
    /// # }
    /// ```
    pub fn run_ipam(&self, verb: CniVerb) -> Result<Option<CniResult>> {
        match self.config.ipam_type.as_str() {
            "" => Ok((verb == CniVerb::Add).then(CniResult::default)),
            ipam => self.run_delegate(ipam, verb, &self.request),
        }
    }

    /// Runs another plugin of `CNI_PATH` with this verb and this configuration, which has a name
    /// and a version (spec, section 4), without a deadline. Only ADD has a result. After a failed
    /// ADD the caller runs the delegate's DEL.
    ///
    /// ```
    /// # use cnibox_cni::plugin::{CniVerb, Network, NoKeys};
    /// # fn example(network: &Network<NoKeys>) -> cnibox_cni::Result<()> {
    /// let name = &network.config.name;
    /// let bridge = format!(r#"{{"cniVersion": "{}", "name": "{name}", "type": "bridge"}}"#, network.version);
    /// let result = network.run_delegate("bridge", CniVerb::Add, bridge.as_bytes())?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn run_delegate(
        &self,
        plugin: &str,
        verb: CniVerb,
        config: &[u8],
    ) -> Result<Option<CniResult>> {
        let path = find_plugin(plugin, &split_path(&self.env.path))?;
        let env = self.env.with_verb(verb);
        let env = env.to_variables().map(|(name, value)| (name, value.to_owned())).to_vec();
        let call = &PluginCommand { path: &path, env, stdin: config, deadline: None };
        let stdout = execute_plugin(call)
            .map_err(|error| error.context(format_args!("from the plugin {plugin}")))?;
        (verb == CniVerb::Add).then(|| read_result(&stdout, self.version)).transpose()
    }
}

/// An attachment of a container to a network.
#[derive(Clone, Debug)]
pub struct Attachment {
    /// `CNI_CONTAINERID`.
    pub container_id: ContainerId,
    /// `CNI_NETNS`: the path of the network namespace; DEL may come without, or after its end.
    pub netns: String,
    /// `CNI_IFNAME`: the interface in the container.
    pub ifname: InterfaceName,
    /// For ADD the result of the previous plugin in the list; for CHECK and DEL that of the whole
    /// list, if the runtime has it.
    pub prev_result: Option<CniResult>,
}

impl Attachment {
    /// The attachment of a call; see [`NetworkConfig::prev_result`] for `report`.
    fn of_call<K>(network: &Network<K>, report: Option<&dyn Fn(&Error)>) -> Result<Attachment> {
        let env = &network.env;
        Ok(Attachment {
            container_id: ContainerId::parse(&env.container_id)?,
            netns: env.netns.clone(),
            ifname: InterfaceName::parse(&env.ifname)?,
            prev_result: network.config.prev_result(network.version, report)?,
        })
    }

    /// The result of the previous plugin, for a plugin that needs one.
    ///
    /// ```
    /// # use cnibox_cni::plugin::Attachment;
    /// # fn example(attachment: &Attachment) -> cnibox_cni::Result<usize> {
    /// Ok(attachment.require_prev_result()?.ips.len())
    /// # }
    /// ```
    pub fn require_prev_result(&self) -> Result<&CniResult> {
        self.prev_result.as_ref().ok_or_else(|| {
            Error::config("required prevResult missing").with_details(PREV_RESULT_REMEDY)
        })
    }
}

/// How GC names the attachment.
impl From<&Attachment> for ValidAttachment {
    fn from(attachment: &Attachment) -> ValidAttachment {
        let (container_id, ifname) =
            (attachment.container_id.to_string(), attachment.ifname.to_string());
        ValidAttachment { container_id, ifname }
    }
}

/// Runs the plugin for the call of this process, and prints the result. Without `CNI_COMMAND` it
/// prints the name and the versions on stderr, as the reference plugins do.
///
/// ```no_run
/// # use cnibox_cni::plugin::{self, Attachment, Network, Plugin};
/// # use cnibox_cni::{CniResult, Result};
/// # struct MyPlugin;
/// # impl Plugin for MyPlugin {
/// #     const NAME: &'static str = "my-plugin";
/// #     type Keys = plugin::NoKeys;
/// #     fn add(_: &Network<plugin::NoKeys>, _: &Attachment) -> Result<CniResult> { Ok(CniResult::new()) }
/// #     fn check(_: &Network<plugin::NoKeys>, _: &Attachment) -> Result<()> { Ok(()) }
/// #     fn del(_: &Network<plugin::NoKeys>, _: &Attachment) -> Result<()> { Ok(()) }
/// # }
/// fn main() -> std::process::ExitCode {
///     plugin::main::<MyPlugin>()
/// }
/// ```
pub fn main<P: Plugin>() -> ExitCode {
    start_log();
    let env = CallEnvironment::from_process();
    if env.command.is_empty() {
        let versions: Vec<_> = P::VERSIONS.iter().map(|version| version.as_str()).collect();
        let supported = versions.join(", ");
        // Nobody could be told that stderr is closed.
        drop(writeln!(
            io::stderr(),
            "CNI {} plugin\nCNI protocol versions supported: {supported}",
            P::NAME
        ));
        return ExitCode::SUCCESS;
    }
    if CniVerb::parse(&env.command) == Some(CniVerb::Version) {
        return print_versions(P::VERSIONS);
    }
    let mut stdin = Vec::new();
    let read = env.require_variables().and_then(|()| read_stdin(&mut stdin));
    let outcome = read.and_then(|()| run_guarded(P::NAME, &|| run::<P>(&env, &stdin)));
    let printed = print_outcome(&outcome, &stdin);
    if printed != ExitCode::SUCCESS && outcome.is_ok() {
        // The runtime has ended, or would not know the result.
        undo_add::<P>(&env, &stdin);
    }
    printed
}

/// Runs the plugin for a call: [`main`] without a process, for tests. Only ADD has a result.
///
/// ```
/// # use cnibox_cni::plugin::{self, Attachment, CallEnvironment, Network, Plugin};
/// # use cnibox_cni::{CniResult, Result};
/// # struct MyPlugin;
/// # impl Plugin for MyPlugin {
/// #     const NAME: &'static str = "my-plugin";
/// #     type Keys = plugin::NoKeys;
/// #     fn add(_: &Network<plugin::NoKeys>, _: &Attachment) -> Result<CniResult> { Ok(CniResult::new()) }
/// #     fn check(_: &Network<plugin::NoKeys>, _: &Attachment) -> Result<()> { Ok(()) }
/// #     fn del(_: &Network<plugin::NoKeys>, _: &Attachment) -> Result<()> { Ok(()) }
/// # }
/// let env = CallEnvironment { command: "STATUS".into(), path: "/opt/cni/bin".into(), ..CallEnvironment::default() };
/// let outcome = plugin::run::<MyPlugin>(&env, br#"{"cniVersion": "1.1.0", "name": "pods", "type": "my-plugin"}"#);
/// assert_eq!(outcome, Ok(None));
/// ```
pub fn run<P: Plugin>(env: &CallEnvironment, request: &[u8]) -> Result<Option<CniResult>> {
    env.require_variables()?;
    let DecodedRequest { verb, config, version } =
        DecodedRequest::decode(env, request, P::VERSIONS, &|text| log::warn!("{text}"))?;
    let network = &Network {
        keys: decode_keys(verb, &config)?,
        config,
        version,
        env: env.clone(),
        request: request.to_vec(),
    };
    match verb {
        CniVerb::Add if is_own_namespace(env)? => return Err(own_namespace_error()),
        CniVerb::Add => {
            let result = P::add(network, &Attachment::of_call(network, None)?)?;
            return result
                .convert_to(version)
                .inspect_err(|_| undo_add::<P>(env, request))
                .map(Some);
        }
        CniVerb::Check => P::check(network, &Attachment::of_call(network, None)?)?,
        CniVerb::Del => {
            let report = |error: &Error| log::warn!("{}", no_prev_result_warning(error));
            let mut attachment = Attachment::of_call(network, Some(&report))?;
            if is_own_namespace(env)? {
                attachment.netns.clear();
            }
            P::del(network, &attachment)?;
        }
        CniVerb::Gc => match network.config.valid_attachments()? {
            Some(valid) => P::gc(network, &valid)?,
            None => log::warn!("GC without \"cni.dev/valid-attachments\" removes nothing"),
        },
        CniVerb::Status => P::status(network)?,
        CniVerb::Version => {}
    }
    Ok(None)
}

/// The plugin's own keys; DEL and GC go on without those that do not decode.
fn decode_keys<K: DeserializeOwned + Default>(verb: CniVerb, config: &NetworkConfig) -> Result<K> {
    if !verb.only_removes() {
        return config.decode_keys(None);
    }
    let report = |error: &Error| log::warn!("{}", absent_key_warning(error));
    Ok(config.decode_keys(Some(&report)).unwrap_or_else(|error| {
        report(&error);
        K::default()
    }))
}

/// Whether the namespace at `CNI_NETNS` is that of this process. Fails where /proc does not show
/// the latter: the container's namespace is not believed to be another one without a proof.
fn is_own_namespace(env: &CallEnvironment) -> Result<bool> {
    const OWN: &str = "/proc/thread-self/ns/net";
    if env.overrides_netns_check() {
        return Ok(false);
    }
    let file = |path: &str| fs::metadata(path).map(|meta| (meta.dev(), meta.ino()));
    let own = file(OWN).map_err(|cause| {
        Error::io(format_args!("read {OWN}"), &cause).with_code(ErrorCode::INVALID_NETNS)
    })?;
    Ok(file(&env.netns).is_ok_and(|container| container == own))
}

/// The error of an ADD for a container in the plugin's own namespace.
#[doc(hidden)]
pub fn own_namespace_error() -> Error {
    let msg = "plugin's netns and netns from CNI_NETNS should not be the same";
    Error::new(ErrorCode::INVALID_NETNS, msg)
        .with_details("CNI_NETNS_OVERRIDE=1 allows it, for a container in the host's namespace")
}

/// Undoes an ADD whose result is lost.
fn undo_add<P: Plugin>(env: &CallEnvironment, request: &[u8]) {
    let del = env.with_verb(CniVerb::Del);
    if let Err(error) = run_guarded(P::NAME, &|| run::<P>(&del, request)) {
        log::warn!("could not undo an ADD without a result: {error}");
    }
}

/// The keys of a plugin without keys of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
pub struct NoKeys {}
