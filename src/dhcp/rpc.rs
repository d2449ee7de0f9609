//! The requests of the plugin to the daemon and the replies: one of each per connection, each a
//! JSON object on one line. `docs/dhcp-daemon.md` has the format.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::family::{DhcpFamily, DhcpRouteConfig};
use super::v4::option::{Dhcp4Options, pairs};
use cni::error::{Error, ErrorCode, ErrorContext, Result};
use cni::json::{self, Json};
use cni::sort::sort_items;
use cni::{CniResult, SpecVersion};

/// The version of requests and replies.
pub const VERSION: u32 = 1;
/// The longest line that is read, in bytes.
pub const LONGEST: u64 = 1 << 20;

/// The operation of a request.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum DaemonVerb {
    /// Acquires leases for an interface.
    Add,
    /// Verifies the leases of an interface.
    Check,
    /// Releases the leases of an interface.
    Del,
    /// Releases the leases of all attachments of a network that are not valid.
    Gc,
    /// Verifies that the daemon serves requests.
    #[default]
    Status,
}

/// The owner of a lease.
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[serde(rename_all = "camelCase", default)]
pub struct DhcpLeaseKey {
    pub container_id: String,
    pub network: String,
    /// The interface in the container.
    pub ifname: String,
    /// The family of the lease. Requests have `families` instead.
    pub family: DhcpFamily,
}

impl DhcpLeaseKey {
    /// The key of the same attachment's lease of a family.
    #[must_use]
    pub fn with_family(&self, family: DhcpFamily) -> DhcpLeaseKey {
        DhcpLeaseKey { family, ..self.clone() }
    }

    pub fn is_same_attachment(&self, other: &DhcpLeaseKey) -> bool {
        *self == other.with_family(self.family)
    }

    /// The default client identifier (option 61). It is the reference's, so that servers keep the
    /// address of a container when one plugin replaces the other.
    pub fn client_id(&self) -> Vec<u8> {
        let text = self.with_family(DhcpFamily::V4).to_string();
        let text = &text.as_bytes()[..text.len().min(254)];
        [&[0], text].concat()
    }
}

impl std::fmt::Display for DhcpLeaseKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{}", self.container_id, self.network, self.ifname)?;
        // Interface names contain no spaces, so the file names that are derived from this are
        // unique.
        if self.family == DhcpFamily::V6 { f.write_str(" (ipv6)") } else { Ok(()) }
    }
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DaemonRequest {
    pub version: u32,
    pub verb: DaemonVerb,
    /// The attachment; GC uses the network only.
    #[serde(default)]
    pub key: DhcpLeaseKey,
    /// ADD: the absolute path of the container's namespace.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub netns: String,
    /// ADD and CHECK: the families of the leases; DEL and GC are about all leases.
    #[serde(default)]
    pub families: Vec<DhcpFamily>,
    /// ADD: options of every message.
    #[serde(default, skip_serializing_if = "Dhcp4Options::is_empty", with = "pairs")]
    pub options: Dhcp4Options,
    /// ADD: the metric of routes; 0 leaves the choice to the kernel.
    #[serde(default)]
    pub priority: u32,
    /// ADD: what the configuration says about routes.
    #[serde(default, skip_serializing_if = "DhcpRouteConfig::is_default")]
    pub routes: DhcpRouteConfig,
    /// CHECK: the addresses of the attachment in `prevResult`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
    /// GC: the valid attachments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub valid: Vec<ValidDhcpAttachment>,
    /// The process that sent the request, as far as the daemon sees it.
    #[serde(skip)]
    pub process: Option<u32>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ValidDhcpAttachment {
    pub container_id: String,
    /// The interface in the container.
    pub ifname: String,
}

impl DaemonRequest {
    pub fn new(verb: DaemonVerb, key: DhcpLeaseKey) -> DaemonRequest {
        DaemonRequest { version: VERSION, verb, key, ..DaemonRequest::default() }
    }

    /// GC: whether a lease is of this network and not of a valid attachment.
    pub fn is_stale(&self, key: &DhcpLeaseKey) -> bool {
        key.network == self.key.network
            && !self
                .valid
                .iter()
                .any(|v| v.container_id == key.container_id && v.ifname == key.ifname)
    }

    pub fn encode_line(&self) -> Result<String> {
        Ok(json::encode_compact(self)? + "\n")
    }

    pub fn decode_line(line: &[u8]) -> Result<DaemonRequest> {
        let json = Json::parse(line).context(|| "the request is not JSON")?;
        let version = json.get_present_member("version").map(Json::decode::<u32>).transpose()?;
        if version != Some(VERSION) {
            let version = version.map_or("none".to_owned(), |version| version.to_string());
            let msg = format!("the request has version {version}, this daemon has {VERSION}");
            return Err(Error::new(ErrorCode::INCOMPATIBLE_VERSION, msg)
                .with_details("restart the daemon with the executable of the plugin"));
        }
        let mut request: DaemonRequest =
            json.decode().map_err(|e: Error| e.context("read the request"))?;
        sort_items(&mut request.families);
        request.families.dedup();
        if request.families.is_empty()
            && matches!(request.verb, DaemonVerb::Add | DaemonVerb::Check)
        {
            return Err(Error::new(ErrorCode::DECODE, "read the request: \"families\" is empty"));
        }
        Ok(request)
    }
}

#[derive(Debug, Default, Deserialize, Serialize)]
pub struct DaemonReply {
    pub version: u32,
    /// ADD: the result, in the newest version of CNI.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    result: Option<Json>,
    /// The error of a failed request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<DaemonReplyError>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct DaemonReplyError {
    code: u32,
    msg: String,
    details: String,
}

impl DaemonReply {
    pub fn from_outcome(outcome: Result<Option<CniResult>>) -> DaemonReply {
        let mut answer = DaemonReply { version: VERSION, ..DaemonReply::default() };
        match outcome {
            Ok(result) => answer.result = result.map(|result| result.to_json()),
            Err(e) => {
                let (msg, details) = (e.message().to_owned(), e.details().to_owned());
                answer.error = Some(DaemonReplyError { code: e.code().0, msg, details });
            }
        }
        answer
    }

    pub fn encode_line(&self) -> Result<String> {
        Ok(json::encode_compact(self)? + "\n")
    }

    /// Decodes a line: the result of an ADD, or the error.
    pub fn decode_line(line: &[u8]) -> Result<Option<CniResult>> {
        let json = Json::parse(line)?;
        let answer: DaemonReply = json.decode()?;
        if let Some(DaemonReplyError { code, msg, details }) = answer.error {
            return Err(Error::new(ErrorCode(code), msg).with_details(details));
        }
        answer.result.map(|json| CniResult::decode(&json, SpecVersion::NEWEST)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> DhcpLeaseKey {
        let family = DhcpFamily::V4;
        DhcpLeaseKey {
            container_id: "c".into(),
            network: "n".into(),
            ifname: "eth0".into(),
            family,
        }
    }

    #[test]
    fn requests_round_trip() {
        let mut request = DaemonRequest::new(DaemonVerb::Add, key());
        request.families = vec![DhcpFamily::V4];
        request.options.insert(12, vec![0, 255]);
        request.netns = "/x".into();
        let line = request.encode_line().unwrap();
        assert_eq!(
            line,
            "{\"version\":1,\"verb\":\"add\",\"key\":{\"containerId\":\"c\",\"network\":\"n\",\"\
             ifname\":\"eth0\",\"family\":\"ipv4\"},\"netns\":\"/x\",\"families\":[\"ipv4\"],\"\
             options\":[[12,[0,255]]],\"priority\":0}\n"
        );
        let read = DaemonRequest::decode_line(line.as_bytes()).unwrap();
        assert_eq!((read.options, read.key, read.verb), (request.options, key(), DaemonVerb::Add));
    }

    #[test]
    fn other_versions_and_nonsense_are_refused() {
        for (line, code) in [
            ("x", ErrorCode::DECODE),
            ("{}", ErrorCode::INCOMPATIBLE_VERSION),
            (r#"{"version":0,"verb":"add"}"#, ErrorCode::INCOMPATIBLE_VERSION),
            (r#"{"version":2,"verb":"add"}"#, ErrorCode::INCOMPATIBLE_VERSION),
            (r#"{"version":1,"verb":"add"}"#, ErrorCode::DECODE),
            (r#"{"version":1,"verb":"check","families":[]}"#, ErrorCode::DECODE),
            (r#"{"version":1,"verb":"add","families":["ipv5"]}"#, ErrorCode::DECODE),
            (r#"{"version":1,"verb":"new"}"#, ErrorCode::DECODE),
            (r#"{"version":1}"#, ErrorCode::DECODE),
        ] {
            assert_eq!(
                DaemonRequest::decode_line(line.as_bytes()).unwrap_err().code(),
                code,
                "{line}"
            );
        }
    }

    #[test]
    fn families_are_deduplicated() {
        let families = |line: &str| DaemonRequest::decode_line(line.as_bytes()).unwrap().families;
        for wanted in [vec![DhcpFamily::V4], vec![DhcpFamily::V6], DhcpFamily::ALL.to_vec()] {
            let request = DaemonRequest {
                families: wanted.clone(),
                ..DaemonRequest::new(DaemonVerb::Add, key())
            };
            assert_eq!(families(&request.encode_line().unwrap()), wanted);
        }
        let twice = r#"{"version":1,"verb":"add","families":["ipv6","ipv4","ipv6"]}"#;
        assert_eq!(families(twice), DhcpFamily::ALL);
        assert_eq!(families(r#"{"version":1,"verb":"del"}"#), []);
    }

    #[test]
    fn keys_of_one_attachment() {
        let other = key().with_family(DhcpFamily::V6);
        assert_ne!(other, key());
        assert!(
            other.is_same_attachment(&key())
                && key().is_same_attachment(&other)
                && key().is_same_attachment(&key())
        );
        assert!(!DhcpLeaseKey { ifname: "eth1".into(), ..key() }.is_same_attachment(&other));
        assert_eq!(
            (key().to_string(), other.to_string()),
            ("c/n/eth0".into(), "c/n/eth0 (ipv6)".into())
        );
        assert_eq!(other.client_id(), key().client_id());
    }

    #[test]
    fn replies_round_trip() {
        let result = CniResult::new();
        let line = DaemonReply::from_outcome(Ok(Some(result.clone()))).encode_line().unwrap();
        assert_eq!(DaemonReply::decode_line(line.as_bytes()).unwrap(), Some(result));
        let line = DaemonReply::from_outcome(Ok(None)).encode_line().unwrap();
        assert_eq!(line, "{\"version\":1}\n");
        assert_eq!(DaemonReply::decode_line(line.as_bytes()).unwrap(), None);
        let error = Error::new(ErrorCode(11), "no").with_details("because");
        let line = DaemonReply::from_outcome(Err(error.clone())).encode_line().unwrap();
        assert_eq!(DaemonReply::decode_line(line.as_bytes()).unwrap_err(), error);
        assert!(
            DaemonReply::decode_line(b"").is_err()
                && DaemonReply::decode_line(b"HTTP/1.0 200").is_err()
        );
    }

    #[test]
    fn client_ids_are_the_references() {
        assert_eq!(key().client_id(), b"\0c/n/eth0");
        let long = DhcpLeaseKey { container_id: "x".repeat(300), ..key() };
        assert_eq!(long.client_id().len(), 255);
    }
}
