//! What every network configuration has in common, read from a request's standard input.

use serde::Deserialize;

use super::json::Json;
use super::names::NetworkName;
use crate::error::{Code, Error, Result};

/// The keys with a fixed meaning (spec, section 1). Plugins read their own beside these.
#[derive(Clone, Debug)]
pub struct NetConf {
    /// `name`, checked.
    pub name: NetworkName,
    /// `cniVersion` as written; empty if absent.
    pub cni_version: String,
    /// `ipam.type`; empty if there is no address management.
    pub ipam_type: String,
    /// `dns`.
    pub dns: DnsConf,
    /// The whole document.
    pub json: Json,
}

/// The `dns` key. A list that is present counts as configured even when it is empty.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct DnsConf {
    /// Name servers, in order of priority.
    pub nameservers: Option<Vec<String>>,
    /// The local domain.
    pub domain: String,
    /// Search domains, in order of priority.
    pub search: Option<Vec<String>>,
    /// Resolver options.
    pub options: Option<Vec<String>>,
}

/// An attachment that is still valid, as GC gets it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
pub struct Attachment {
    /// The container's id.
    #[serde(rename = "containerID")]
    pub container_id: String,
    /// The interface inside the container.
    pub ifname: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Common {
    ipam: IpamType,
    dns: DnsConf,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct IpamType {
    r#type: String,
}

impl DnsConf {
    /// Whether the configuration says anything, be it an empty list.
    pub fn is_configured(&self) -> bool {
        !self.domain.is_empty()
            || self.nameservers.is_some()
            || self.search.is_some()
            || self.options.is_some()
    }
}

impl NetConf {
    /// Reads the document far enough for the skeleton: JSON and name. Codes 6 and 7.
    pub fn parse(bytes: &[u8]) -> Result<NetConf> {
        let malformed =
            |why| Error::new(Code::DECODE, format!("error unmarshall network config: {why}"));
        let json = Json::parse(bytes).map_err(malformed)?;
        if !matches!(json, Json::Object(_) | Json::Null) {
            return Err(malformed(format!("{} is not an object", json.go_type())));
        }
        let name = match json.get_present("name") {
            None => "",
            Some(Json::String(name)) => name,
            Some(other) => return Err(malformed(format!("name is of type {}", other.go_type()))),
        };
        let name = NetworkName::parse(name)?;
        Ok(NetConf {
            name,
            cni_version: String::new(),
            ipam_type: String::new(),
            dns: DnsConf::default(),
            json,
        })
    }

    /// Reads the version; code 6 if it is no string.
    pub fn read_version(&mut self) -> Result<()> {
        let wrong = |t: &str| format!("decoding version from network config: type {t}");
        self.cni_version = match self.json.get_present("cniVersion") {
            None => String::new(),
            Some(Json::String(text)) => text.clone(),
            Some(other) => return Err(Error::new(Code::DECODE, wrong(other.go_type()))),
        };
        Ok(())
    }

    /// Reads the remaining common keys; code 6 if one is of the wrong type.
    pub fn read_common(&mut self) -> Result<()> {
        let common: Common = self.json.decode().map_err(|e| e.context("failed to load netconf"))?;
        self.ipam_type = common.ipam.r#type;
        self.dns = common.dns;
        Ok(())
    }

    /// Whether `capabilities` asks the runtime for the values of this name.
    pub fn wants(&self, capability: &str) -> bool {
        // Runtimes compare the name exactly.
        let is_wanted =
            |(name, value): &(String, Json)| name == capability && *value == Json::Bool(true);
        let capabilities = self.json.get_present("capabilities");
        matches!(capabilities, Some(Json::Object(members)) if members.iter().any(is_wanted))
    }

    /// The attachments GC has to keep. `None` if the request has no such key: that says nothing
    /// about what is valid. `null` is the empty list, as libcni writes it. The key of the text of
    /// 1.1.0, `cni.dev/attachments`, serves where the later one is absent.
    pub fn valid_attachments(&self) -> Result<Option<Vec<Attachment>>> {
        let keys = ["cni.dev/valid-attachments", "cni.dev/attachments"];
        match keys.iter().find_map(|key| self.json.get(key)) {
            None => Ok(None),
            Some(Json::Null) => Ok(Some(Vec::new())),
            Some(list) => list
                .decode()
                .map(Some)
                .map_err(|e| e.context("read the valid attachments of the request")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> NetConf {
        let mut conf = NetConf::parse(text.as_bytes()).unwrap();
        conf.read_version().unwrap();
        conf.read_common().unwrap();
        conf
    }

    #[test]
    fn common_keys() {
        let conf = parse(r#"{"NAME":"n","cniversion":"1.0.0","ipam":{"type":"x"},"dns":{}}"#);
        assert_eq!((conf.name.as_str(), conf.cni_version.as_str()), ("n", "1.0.0"));
        assert_eq!(conf.ipam_type, "x");
        assert!(!conf.dns.is_configured());
        assert!(parse(r#"{"name":"n","dns":{"search":[]}}"#).dns.is_configured());
    }

    #[test]
    fn codes() {
        for (text, code) in [
            ("", Code::DECODE),
            ("[]", Code::DECODE),
            (r#"{"name":7}"#, Code::DECODE),
            ("null", Code::INVALID_CONFIG),
            ("{}", Code::INVALID_CONFIG),
            (r#"{"name":null}"#, Code::INVALID_CONFIG),
            (r#"{"name":"a/b"}"#, Code::INVALID_CONFIG),
        ] {
            assert_eq!(NetConf::parse(text.as_bytes()).unwrap_err().code(), code, "{text}");
        }
        let mut conf = NetConf::parse(br#"{"name":"n","cniVersion":4}"#).unwrap();
        assert_eq!(conf.read_version().unwrap_err().code(), Code::DECODE);
    }

    #[test]
    fn attachments_absent_empty_and_given() {
        let valid = |text: &str| parse(text).valid_attachments().unwrap();
        assert_eq!(valid(r#"{"name":"n"}"#), None);
        assert_eq!(valid(r#"{"name":"n","cni.dev/valid-attachments":null}"#), Some(vec![]));
        assert_eq!(valid(r#"{"name":"n","cni.dev/attachments":[]}"#), Some(vec![]));
        let one = r#"[{"containerID":"a","ifname":"eth0"}]"#;
        let attachment = Attachment { container_id: "a".into(), ifname: "eth0".into() };
        let both =
            format!(r#"{{"name":"n","cni.dev/attachments":[],"cni.dev/valid-attachments":{one}}}"#);
        assert_eq!(valid(&both), Some(vec![attachment]));
    }
}
