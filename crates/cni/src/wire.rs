//! The error object on stdout (spec, section "Error"): encoding and decoding.

use serde::{Deserialize, Serialize};

use super::version::SpecVersion;
use crate::error::{Error, ErrorCode};
use crate::json::{self, Json};

#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct ErrorObject {
    #[serde(rename = "cniVersion", skip_deserializing)]
    version: SpecVersion,
    code: u32,
    msg: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    details: String,
}

/// The output and the exit of a failed plugin.
#[derive(Debug)]
pub struct PluginFailure<'a> {
    /// Its stdout.
    pub stdout: &'a [u8],
    /// Its stderr.
    pub stderr: &'a [u8],
    /// `exit status 1`, `signal: killed`, or why it could not be started.
    pub exit: &'a str,
}

/// The error of a failed plugin, from its error object or else from its stderr and exit status.
pub fn decode_plugin_error(failure: &PluginFailure<'_>) -> Error {
    let PluginFailure { stdout, stderr, exit } = failure;
    if stdout.is_empty() {
        let msg = if stderr.is_empty() {
            format!("netplugin failed with no error message: {exit}")
        } else {
            format!("netplugin failed: {:?}: {exit}", String::from_utf8_lossy(stderr))
        };
        return Error::from_other_plugin(ErrorCode::UNKNOWN, msg, "");
    }
    match Json::parse(stdout).and_then(|json| json.decode()) {
        Ok(ErrorObject { code, mut msg, details, .. }) => {
            if msg.is_empty() {
                msg = format!("netplugin failed with code {code} and no message: {exit}");
            }
            Error::from_other_plugin(ErrorCode(code), msg, details)
        }
        Err(why) => {
            let stdout = String::from_utf8_lossy(stdout);
            let msg = format!(
                "netplugin failed but error parsing its diagnostic message {stdout:?}: {why}"
            );
            Error::from_other_plugin(ErrorCode::UNKNOWN, msg, "")
        }
    }
}

/// The text of the error object, indented by four spaces, without a newline at the end. Empty
/// `details` are left out.
pub fn error_text(error: &Error, version: SpecVersion) -> String {
    let (msg, details) = (error.message().to_owned(), error.details().to_owned());
    json::encode_pretty(&ErrorObject { version, code: error.code().0, msg, details })
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(stdout: &str, stderr: &str) -> Error {
        decode_plugin_error(&PluginFailure {
            stdout: stdout.as_bytes(),
            stderr: stderr.as_bytes(),
            exit: "exit status 1",
        })
    }

    #[test]
    fn messages_round_trip() {
        let error = Error::from_other_plugin(ErrorCode(105), "no <address>", "try later");
        let text = error_text(&error, SpecVersion::V0_4_0);
        assert!(text.starts_with("{\n    \"cniVersion\": \"0.4.0\",\n    \"code\": 105,\n"));
        assert!(text.contains("no \\u003caddress\\u003e") && text.ends_with("\"try later\"\n}"));
        assert_eq!(failure(&text, ""), error);
    }

    #[test]
    fn failures_without_a_message_are_described() {
        assert_eq!(
            failure("", "").message(),
            "netplugin failed with no error message: exit status 1"
        );
        assert_eq!(failure("", "boo\n").message(), "netplugin failed: \"boo\\n\": exit status 1");
        assert_eq!(failure("{\"code\":7}", "").code(), ErrorCode(7));
        assert!(failure("{\"code\":7}", "").message().contains("code 7"));
        let garbage = failure("oops", "");
        let start = "netplugin failed but error parsing its diagnostic message \"oops\": ";
        assert!(garbage.message().starts_with(start), "{garbage}");
    }
}
