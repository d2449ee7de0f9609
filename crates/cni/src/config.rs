//! The keys that all network configurations have in common.

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::names::NetworkName;
use super::result::{CniResult, DnsConfig};
use super::version::{self, SpecVersion};
use crate::error::{Error, ErrorCode, Result};
use crate::json::Json;

/// The keys with a fixed meaning (spec, section 1). Plugins decode their own keys in addition.
#[derive(Clone, Debug)]
pub struct NetworkConfig {
    /// `name`, checked.
    pub name: NetworkName,
    /// `cniVersion` as written; empty if absent.
    pub cni_version: String,
    /// `ipam.type`; empty if there is no address management.
    pub ipam_type: String,
    /// `dns`; `None` if it has no value. An empty list is a value.
    pub dns: Option<DnsConfig>,
    /// The whole document.
    pub json: Json,
}

/// An attachment in the list of valid attachments of a GC request.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
pub struct ValidAttachment {
    /// The container's id.
    #[serde(rename = "containerID")]
    pub container_id: String,
    /// The interface inside the container.
    pub ifname: String,
}

/// The key `args` of a plugin that decodes its member `cni`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Args<T> {
    /// Keys for one container.
    pub cni: T,
}

/// `runtimeConfig` with the capability `mac`, or `args.cni`: the MAC of the interface.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct MacConfig {
    /// Empty if none is requested.
    pub mac: String,
}

const IN_NAME: &str = "in \"name\": write the name in double quotes";

#[derive(Default, Deserialize)]
#[serde(default)]
struct CommonConfigKeys {
    ipam: IpamTypeKey,
    dns: DnsConfig,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct IpamTypeKey {
    r#type: String,
}

impl NetworkConfig {
    /// Decodes a configuration. Codes 6 and 7.
    ///
    /// ```
    /// # use cnibox_cni::NetworkConfig;
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let network = NetworkConfig::decode(br#"{"cniVersion": "1.1.0", "name": "pods", "ipam": {"type": "static"}}"#)?;
    /// assert_eq!((network.name.as_str(), network.ipam_type.as_str()), ("pods", "static"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn decode(bytes: &[u8]) -> Result<NetworkConfig> {
        let mut config = NetworkConfig::parse(bytes)?;
        config.read_version()?;
        config.read_common(None)?;
        Ok(config)
    }

    /// Parses the document and its name. Codes 6 and 7.
    #[doc(hidden)]
    pub fn parse(bytes: &[u8]) -> Result<NetworkConfig> {
        let malformed = |error: Error| error.context("error unmarshall network config");
        let wrong = |json: &Json, what| {
            malformed(Error::new(ErrorCode::DECODE, json.wrong_type_message(what)))
        };
        let json = Json::parse(bytes).map_err(malformed)?;
        if !matches!(json, Json::Object(_) | Json::Null) {
            return Err(wrong(&json, "an object"));
        }
        let name = match json.get_present_member("name") {
            None => "",
            Some(Json::String(name)) => name,
            Some(other) => return Err(wrong(other, "a text").with_details(IN_NAME)),
        };
        let name = NetworkName::parse(name)?;
        Ok(NetworkConfig {
            name,
            cni_version: String::new(),
            ipam_type: String::new(),
            dns: None,
            json,
        })
    }

    /// Decodes the version; code 6 if it is not a string.
    #[doc(hidden)]
    pub fn read_version(&mut self) -> Result<()> {
        self.cni_version = match self.json.get_present_member("cniVersion") {
            None => String::new(),
            Some(Json::String(text)) => text.clone(),
            Some(other) => {
                let error = Error::new(ErrorCode::DECODE, other.wrong_type_message("a text"));
                let remedy = format!("in \"cniVersion\": {}", version::quoting_remedy(other));
                return Err(error
                    .context("decoding version from network config")
                    .with_details(remedy));
            }
        };
        Ok(())
    }

    /// Decodes the remaining common keys; code 6 if one is of the wrong type, or, with `report`, as
    /// if it were absent.
    #[doc(hidden)]
    pub fn read_common(&mut self, report: Option<&dyn Fn(&Error)>) -> Result<()> {
        let common: CommonConfigKeys = self.decode_keys(report)?;
        self.ipam_type = common.ipam.r#type;
        let dns = self.json.get_present_member("dns");
        let has_list = ["nameservers", "search", "options"]
            .iter()
            .any(|key| dns.is_some_and(|dns| dns.get_present_member(key).is_some()));
        self.dns = Some(common.dns).filter(|dns| has_list || !dns.domain.is_empty());
        Ok(())
    }

    /// The plugin's own keys. A key of the wrong type is an error with code 6, or, with `report`,
    /// as if it were absent.
    ///
    /// ```
    /// # use cnibox_cni::NetworkConfig;
    /// #[derive(serde::Deserialize)]
    /// struct Keys {
    ///     mtu: u32,
    /// }
    ///
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let network = NetworkConfig::decode(br#"{"name": "pods", "mtu": 1400}"#)?;
    /// let keys: Keys = network.decode_keys(None)?;
    /// assert_eq!(keys.mtu, 1400);
    /// # Ok(())
    /// # }
    /// ```
    pub fn decode_keys<K: DeserializeOwned>(&self, report: Option<&dyn Fn(&Error)>) -> Result<K> {
        let keys = match report {
            None => self.json.decode(),
            Some(report) => self.json.decode_valid_members(report),
        };
        keys.map_err(|e| e.context("failed to load netconf"))
    }

    /// The key `prevResult`, whose layout is that of `version`; with `report`, any result counts,
    /// and one that does not decode is as if it were absent.
    ///
    /// ```
    /// # use cnibox_cni::{NetworkConfig, SpecVersion};
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let network = NetworkConfig::decode(br#"{"name": "pods", "prevResult": {"cniVersion": "1.0.0"}}"#)?;
    /// assert!(network.prev_result(SpecVersion::V1_1_0, None)?.is_some());
    /// // The layout of 0.4.0 is another one.
    /// assert!(network.prev_result(SpecVersion::V0_4_0, None).is_err());
    /// assert!(network.prev_result(SpecVersion::V0_4_0, Some(&|_| ()))?.is_some());
    /// # Ok(())
    /// # }
    /// ```
    pub fn prev_result(
        &self,
        version: SpecVersion,
        report: Option<&dyn Fn(&Error)>,
    ) -> Result<Option<CniResult>> {
        let Some(json) = self.json.get_present_member("prevResult") else { return Ok(None) };
        match report {
            None => CniResult::decode_prev_result(json, version).map(Some),
            Some(report) => Ok(CniResult::decode(json, version).inspect_err(report).ok()),
        }
    }

    /// Whether `capabilities` requests the values of this name from the runtime.
    ///
    /// ```
    /// # use cnibox_cni::NetworkConfig;
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let network = NetworkConfig::decode(br#"{"name": "pods", "capabilities": {"mac": true}}"#)?;
    /// assert!(network.wants_capability("mac") && !network.wants_capability("ips"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn wants_capability(&self, capability: &str) -> bool {
        // Runtimes compare the name exactly.
        let is_wanted =
            |(name, value): &(String, Json)| name == capability && *value == Json::Bool(true);
        let capabilities = self.json.get_present_member("capabilities");
        matches!(capabilities, Some(Json::Object(members)) if members.iter().any(is_wanted))
    }

    /// The attachments that GC has to keep; `None` if the request has no such key. libcni writes
    /// the empty list as `null`. `cni.dev/attachments`, the key in the text of 1.1.0, is a
    /// fallback. A list that does not decode is an error: counted as absent or incomplete it
    /// would make valid attachments stale.
    ///
    /// ```
    /// # use cnibox_cni::NetworkConfig;
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let network = NetworkConfig::decode(br#"{"name": "pods",
    ///     "cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth0"}]}"#)?;
    /// let valid = network.valid_attachments()?.unwrap_or_default();
    /// assert_eq!(valid[0].container_id, "c1");
    /// # Ok(())
    /// # }
    /// ```
    pub fn valid_attachments(&self) -> Result<Option<Vec<ValidAttachment>>> {
        let keys = ["cni.dev/valid-attachments", "cni.dev/attachments"];
        match keys.iter().find_map(|key| self.json.get_member(key)) {
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

    fn parse(text: &str) -> NetworkConfig {
        NetworkConfig::decode(text.as_bytes()).unwrap()
    }

    #[test]
    fn common_keys_are_read_in_any_case() {
        let conf = parse(r#"{"NAME":"n","cniversion":"1.0.0","ipam":{"type":"x"},"dns":{}}"#);
        assert_eq!((conf.name.as_str(), conf.cni_version.as_str()), ("n", "1.0.0"));
        assert_eq!(conf.ipam_type, "x");
        assert_eq!(conf.dns, None);
        let dns = |text: &str| parse(&format!(r#"{{"name":"n","DNS":{{{text}}}}}"#)).dns;
        assert_eq!(dns(r#""Search":[]"#), Some(DnsConfig::default()));
        assert_eq!(dns(r#""search":null,"domain":"""#), None);
        assert_eq!(
            dns(r#""domain":"d""#),
            Some(DnsConfig { domain: "d".into(), ..DnsConfig::default() })
        );
    }

    #[test]
    fn invalid_configurations_have_the_right_error_code() {
        for (text, code) in [
            ("", ErrorCode::DECODE),
            ("[]", ErrorCode::DECODE),
            (r#"{"name":7}"#, ErrorCode::DECODE),
            ("null", ErrorCode::INVALID_CONFIG),
            ("{}", ErrorCode::INVALID_CONFIG),
            (r#"{"name":null}"#, ErrorCode::INVALID_CONFIG),
            (r#"{"name":"a/b"}"#, ErrorCode::INVALID_CONFIG),
        ] {
            assert_eq!(NetworkConfig::parse(text.as_bytes()).unwrap_err().code(), code, "{text}");
        }
        let mut conf = NetworkConfig::parse(br#"{"name":"n","cniVersion":4}"#).unwrap();
        assert_eq!(conf.read_version().unwrap_err().code(), ErrorCode::DECODE);
    }

    #[test]
    fn valid_attachments_may_be_absent_empty_or_given() {
        let valid = |text: &str| parse(text).valid_attachments().unwrap();
        assert_eq!(valid(r#"{"name":"n"}"#), None);
        assert_eq!(valid(r#"{"name":"n","cni.dev/valid-attachments":null}"#), Some(vec![]));
        assert_eq!(valid(r#"{"name":"n","cni.dev/attachments":[]}"#), Some(vec![]));
        let one = r#"[{"containerID":"a","ifname":"eth0"}]"#;
        let attachment = ValidAttachment { container_id: "a".into(), ifname: "eth0".into() };
        let both =
            format!(r#"{{"name":"n","cni.dev/attachments":[],"cni.dev/valid-attachments":{one}}}"#);
        assert_eq!(valid(&both), Some(vec![attachment]));
    }
}
