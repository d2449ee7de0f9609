//! The error object on stdout, in both directions.

use serde::Deserialize;

use super::json::{self, Json};
use super::version::SpecVersion;
use crate::error::{Code, Error};

/// The error object: `cniVersion`, `code`, `msg`, `details` (left out when empty).
pub fn error_json(error: &Error, version: SpecVersion) -> Json {
    let mut members = vec![
        ("cniVersion".to_owned(), version.as_str().into()),
        ("code".to_owned(), Json::Integer(error.code().0.into())),
        ("msg".to_owned(), error.msg().into()),
    ];
    if !error.details().is_empty() {
        members.push(("details".to_owned(), error.details().into()));
    }
    Json::Object(members)
}

#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct Wire {
    code: u32,
    msg: String,
    details: String,
}

/// How a plugin that failed ended, for messages.
#[derive(Debug)]
pub struct Failure<'a> {
    /// Its stdout.
    pub stdout: &'a [u8],
    /// Its stderr.
    pub stderr: &'a [u8],
    /// `exit status 1`, `signal: killed`, or why it could not be started.
    pub exit: &'a str,
}

/// The error of a failed plugin, from its error object or else from its stderr and exit status.
pub fn error_of(failure: &Failure<'_>) -> Error {
    let Failure { stdout, stderr, exit } = failure;
    if stdout.is_empty() {
        let msg = if stderr.is_empty() {
            format!("netplugin failed with no error message: {exit}")
        } else {
            format!("netplugin failed: {:?}: {exit}", String::from_utf8_lossy(stderr))
        };
        return Error::foreign(Code::UNKNOWN, msg, "");
    }
    match Json::parse(stdout).and_then(|json| json.decode::<Wire>().map_err(|e| e.to_string())) {
        // A code alone is no message for anyone.
        Ok(Wire { code, msg, details }) if msg.is_empty() => {
            let msg = format!("netplugin failed with code {code} and no message: {exit}");
            Error::foreign(Code(code), msg, details)
        }
        Ok(Wire { code, msg, details }) => Error::foreign(Code(code), msg, details),
        Err(why) => {
            let said = String::from_utf8_lossy(stdout);
            let msg = format!(
                "netplugin failed but error parsing its diagnostic message {said:?}: {why}"
            );
            Error::foreign(Code::UNKNOWN, msg, "")
        }
    }
}

/// The error object as it is printed: indented by four blanks, no newline at the end.
pub fn error_text(error: &Error, version: SpecVersion) -> String {
    json::pretty(&error_json(error, version)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(stdout: &str, stderr: &str) -> Error {
        error_of(&Failure {
            stdout: stdout.as_bytes(),
            stderr: stderr.as_bytes(),
            exit: "exit status 1",
        })
    }

    #[test]
    fn round_trip() {
        let error = Error::foreign(Code(105), "no <address>", "try later");
        let text = error_text(&error, SpecVersion::V0_4_0);
        assert!(text.starts_with("{\n    \"cniVersion\": \"0.4.0\",\n    \"code\": 105,\n"));
        assert!(text.contains("no \\u003caddress\\u003e") && text.ends_with("\"try later\"\n}"));
        assert_eq!(failure(&text, ""), error);
    }

    #[test]
    fn plugins_that_say_little() {
        assert_eq!(failure("", "").msg(), "netplugin failed with no error message: exit status 1");
        assert_eq!(failure("", "boo\n").msg(), "netplugin failed: \"boo\\n\": exit status 1");
        assert_eq!(failure("{\"code\":7}", "").code(), Code(7));
        assert!(failure("{\"code\":7}", "").msg().contains("code 7"));
        let garbage = failure("oops", "");
        let start = "netplugin failed but error parsing its diagnostic message \"oops\": ";
        assert!(garbage.msg().starts_with(start), "{garbage}");
    }
}
