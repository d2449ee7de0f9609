//! The request of a call: the network's configuration and its version.

use super::call::{CallEnvironment, CniVerb};
use crate::config::NetworkConfig;
use crate::error::{Error, ErrorCode, Result};
use crate::version::{SpecVersion, VersionNumber, nearest_supported, quoted_list};

/// What is the same in the requests of all plugins.
#[derive(Clone, Debug)]
pub struct DecodedRequest {
    /// `CNI_COMMAND`.
    pub verb: CniVerb,
    /// The common keys of the configuration.
    pub config: NetworkConfig,
    /// The version of the request, and so of the result.
    pub version: SpecVersion,
}

impl DecodedRequest {
    /// Decodes the request of a call for a plugin with these versions. DEL and GC go on without
    /// what does not decode, and `warn` gets the reason.
    pub fn decode(
        env: &CallEnvironment,
        stdin: &[u8],
        supported: &[SpecVersion],
        warn: &dyn Fn(&str),
    ) -> Result<DecodedRequest> {
        let command = &env.command;
        let verb = CniVerb::parse(command);
        let unknown = || {
            Error::new(ErrorCode::INVALID_ENVIRONMENT, format!("unknown CNI_COMMAND: {command}"))
                .with_details("the commands are ADD, CHECK, DEL, GC, STATUS and VERSION")
        };
        // The configuration is read first, as in the reference; without a valid command, the error
        // reports both.
        let mut config = NetworkConfig::parse(stdin)
            .map_err(|e| if verb.is_none() { e.with_details(unknown().to_string()) } else { e })?;
        let Some(verb) = verb else { return Err(unknown()) };
        if config.json.get_present_member("plugins").is_some() {
            warn(
                "the configuration is a list (\"plugins\"), but a plugin gets one entry; cnitool \
                 runs a list",
            );
        }
        match config.read_version() {
            Err(error) if verb == CniVerb::Del => warn(&absent_key_warning(&error)),
            read => read?,
        }
        let written = &config.cni_version;
        let version = match verb {
            CniVerb::Check => version_for_verb(verb, SpecVersion::V0_4_0, written, supported)?,
            CniVerb::Gc | CniVerb::Status => {
                version_for_verb(verb, SpecVersion::V1_1_0, written, supported)?
            }
            // ADD had another version than this one.
            CniVerb::Del => supported_version(written, supported).unwrap_or_else(|error| {
                warn(&format!("{error}; DEL goes on as with {}", SpecVersion::NEWEST));
                SpecVersion::NEWEST
            }),
            CniVerb::Add | CniVerb::Version => supported_version(written, supported)?,
        };
        config.read_common(
            verb.only_removes().then_some(&|error| warn(&absent_key_warning(error))),
        )?;
        Ok(DecodedRequest { verb, config, version })
    }
}

/// The warning of a key that counts as absent because it does not decode.
pub fn absent_key_warning(error: &Error) -> String {
    format!("ignored a key of the configuration: {error}")
}

/// The warning of a DEL whose `prevResult` does not decode.
pub fn no_prev_result_warning(error: &Error) -> String {
    format!("DEL continues without prevResult: {error}")
}

/// The comparison is exact: `1.0` is not `1.0.0`.
fn supported_version(text: &str, supported: &[SpecVersion]) -> Result<SpecVersion> {
    SpecVersion::parse_exact(text).filter(|v| supported.contains(v)).ok_or_else(|| {
        let written = if text.is_empty() { SpecVersion::V0_1_0.as_str() } else { text };
        let list = quoted_list(supported);
        let write = nearest_supported(written, supported)
            .map_or(String::new(), |near| format!("; write \"{near}\""));
        Error::new(ErrorCode::INCOMPATIBLE_VERSION, "incompatible CNI versions")
            .with_details(format!("config is \"{written}\", plugin supports {list}{write}"))
    })
}

/// The checks for a verb of version `since` and later, in the reference's order.
fn version_for_verb(
    verb: CniVerb,
    since: SpecVersion,
    text: &str,
    supported: &[SpecVersion],
) -> Result<SpecVersion> {
    let refuse = |part: &str| {
        let msg = format!("{part} version does not allow {}", verb.as_str());
        Err(Error::new(ErrorCode::INCOMPATIBLE_VERSION, msg))
    };
    let wanted: VersionNumber = text.parse()?;
    if wanted < since.into() {
        return refuse("config");
    }
    if !supported.iter().any(|v| VersionNumber::from(*v) >= wanted) {
        return refuse("plugin");
    }
    supported_version(text, supported)
}
