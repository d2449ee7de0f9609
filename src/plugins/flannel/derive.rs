//! The delegate's configuration: `delegate` of the request, completed from the subnet file.

use std::net::Ipv4Addr;

use ipnet::{IpNet, Ipv4Net};

use super::subnet::SubnetEnv;
use cni::error::{Error, ErrorCode, ErrorContext, Result};
use cni::json::Json;
use cni::sort::sort_by;
use cni::{NetworkConfig, ResultRoute};

/// The subnet for DEL and GC if the subnet file is missing: host-local requires a range, but does
/// not use it for these verbs.
const PLACEHOLDER: IpNet = IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(192, 0, 2, 0), 24));

/// The delegate's configuration, with keys in the order of the reference. Without `env` it serves
/// DEL and GC only, which need neither ranges nor routes.
pub(super) fn derive_config(net: &NetworkConfig, env: Option<&SubnetEnv>) -> Result<Json> {
    let mut delegate = DelegateMembers::from_request(net, "delegate")?;
    let plugin = match delegate.find_value("type") {
        None => "bridge".to_owned(),
        Some(Json::String(plugin)) => plugin.clone(),
        Some(_) => {
            let msg = "'delegate' dictionary, if present, must have (string) 'type' field";
            return Err(Error::config(msg));
        }
    };
    if let Some(key) = ["name", "ipam"].into_iter().find(|key| delegate.find_value(key).is_some()) {
        return Err(Error::config(format!(
            "'delegate' dictionary must not have '{key}' field, it'll be set by flannel"
        )));
    }
    if plugin == "flannel" {
        return Err(Error::config("flannel cannot delegate to flannel"));
    }
    if let Some(runtime) = requested_value(net, "runtimeConfig") {
        delegate.set_value("runtimeConfig", runtime);
    }
    for key in ["args", "dns"] {
        if let Some(value) = requested_value(net, key) {
            delegate.set_default(key, value);
        }
    }
    delegate.set_value("name", net.name.as_str().into());
    delegate.set_default("type", plugin.as_str().into());
    delegate.set_default("ipMasq", Json::Bool(env.is_none_or(|env| !env.masquerades)));
    if let Some(env) = env {
        delegate.set_default("mtu", Json::Number(env.mtu.into()));
    }
    if plugin == "bridge" {
        delegate.set_default("isGateway", Json::Bool(true));
    }
    if !net.cni_version.is_empty() {
        delegate.set_value("cniVersion", net.cni_version.as_str().into());
    }
    delegate
        .set_value("ipam", derive_ipam(net, env).context(|| "failed to assemble Delegate IPAM")?);
    Ok(delegate.into_sorted_object())
}

/// `ipam` of the delegate, with the node's subnets, and the routes of the request, then those to
/// the pod networks.
fn derive_ipam(net: &NetworkConfig, env: Option<&SubnetEnv>) -> Result<Json> {
    let mut ipam = DelegateMembers::from_request(net, "ipam")?;
    ipam.set_default("type", "host-local".into());
    let subnets = env.map_or(&[PLACEHOLDER][..], |env| env.subnets.as_slice());
    ipam.set_value(
        "ranges",
        Json::Array(
            subnets
                .iter()
                .map(|subnet| {
                    let subnet = Json::String(subnet.to_string());
                    Json::Array(vec![Json::Object(vec![("subnet".to_owned(), subnet)])])
                })
                .collect(),
        ),
    );
    let mut routes: Vec<ResultRoute> = match ipam.find_value("routes") {
        None | Some(Json::Null) => Vec::new(),
        Some(routes) => {
            routes.decode().context(|| "failed to read IPAM routes: failed to parse ipam.routes")?
        }
    };
    routes.extend(
        env.iter().flat_map(|env| &env.networks).copied().map(ResultRoute::for_destination),
    );
    ipam.set_value("routes", Json::Array(routes.iter().map(Json::encode).collect()));
    Ok(ipam.into_sorted_object())
}

/// The value of a key of the request as the reference prints it.
fn requested_value(net: &NetworkConfig, key: &str) -> Option<Json> {
    net.json
        .get_present_member(key)
        .map(|value| value.clone().with_normalised_numbers().with_sorted_keys())
}

/// The members of an object; unlike elsewhere, keys are case-sensitive.
struct DelegateMembers(Vec<(String, Json)>);

impl DelegateMembers {
    fn from_request(net: &NetworkConfig, key: &str) -> Result<DelegateMembers> {
        match requested_value(net, key) {
            None => Ok(DelegateMembers(Vec::new())),
            Some(Json::Object(members)) => Ok(DelegateMembers(members)),
            Some(other) => {
                let error = Error::new(ErrorCode::DECODE, other.wrong_type_message("an object"));
                Err(error.context("failed to load netconf").with_details(format!("in \"{key}\"")))
            }
        }
    }

    fn find_value(&self, key: &str) -> Option<&Json> {
        self.0.iter().rfind(|(k, _)| k == key).map(|(_, value)| value)
    }

    fn set_value(&mut self, key: &str, value: Json) {
        self.0.retain(|(k, _)| k != key);
        self.0.push((key.to_owned(), value));
    }

    fn set_default(&mut self, key: &str, value: Json) {
        if self.find_value(key).is_none() {
            self.set_value(key, value);
        }
    }

    /// The object, with its own keys sorted: those of a route have another order.
    fn into_sorted_object(mut self) -> Json {
        sort_by(&mut self.0, |a, b| a.0.cmp(&b.0));
        Json::Object(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni::json;

    fn derived(request: &str, env: Option<&SubnetEnv>) -> Result<String> {
        let mut net = NetworkConfig::parse(request.as_bytes()).unwrap();
        net.read_version().unwrap();
        json::encode_compact(&derive_config(&net, env)?)
    }

    fn env(networks: &[&str], subnets: &[&str], masquerades: bool) -> SubnetEnv {
        let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        SubnetEnv { networks: nets(networks), subnets: nets(subnets), mtu: 1472, masquerades }
    }

    #[test]
    fn default_delegate_is_bridge_with_host_local() {
        let one = env(&["10.1.0.0/16"], &["10.1.17.0/24"], true);
        assert_eq!(
            derived(r#"{"name":"mynet","type":"flannel"}"#, Some(&one)).unwrap(),
            r#"{"ipMasq":false,"ipam":{"ranges":[[{"subnet":"10.1.17.0/24"}]],"routes":[{"dst":"10.1.0.0/16"}],"type":"host-local"},"isGateway":true,"mtu":1472,"name":"mynet","type":"bridge"}"#
        );
        let dual = env(&["10.1.0.0/16", "fc00::/48"], &["10.1.17.0/24", "fc00::/64"], false);
        let request = r#"{"name":"n","type":"flannel","cniVersion":"1.0.0","delegate":null,
            "delegate":{"type":"ipvlan","master":"eth0","mtu":9e3,"cniVersion":"0.3.1"}}"#;
        assert_eq!(
            derived(request, Some(&dual)).unwrap(),
            r#"{"cniVersion":"1.0.0","ipMasq":true,"ipam":{"ranges":[[{"subnet":"10.1.17.0/24"}],[{"subnet":"fc00::/64"}]],"routes":[{"dst":"10.1.0.0/16"},{"dst":"fc00::/48"}],"type":"host-local"},"master":"eth0","mtu":9000,"name":"n","type":"ipvlan"}"#
        );
    }

    #[test]
    fn configured_keys_are_kept() {
        let one = env(&["10.1.0.0/16"], &["10.1.17.0/24"], true);
        let request = r#"{"name":"n","type":"flannel","capabilities":{"x":true},"prevResult":{},
            "runtimeConfig":{"mac":"c2:11:22:33:44:55"},"args":{"cni":{"ips":["10.1.17.9"]}},
            "dns":{"domain":"d"},"delegate":{"ipMasq":true,"isGateway":false,"dns":{},"b":"<&>","a":1,
            "runtimeConfig":{"gone":1}},
            "ipam":{"type":"my-ipam","unknown":{"z":1,"y":2},"ranges":"gone","routes":[
            {"gw":"10.1.17.20","dst":"192.168.244.0/24","x":1,"mtu":1300},{"dst":"10.96.0.0/12"}]}}"#;
        assert_eq!(
            derived(request, Some(&one)).unwrap(),
            r#"{"a":1,"args":{"cni":{"ips":["10.1.17.9"]}},"b":"\u003c\u0026\u003e","dns":{},"ipMasq":true,"ipam":{"ranges":[[{"subnet":"10.1.17.0/24"}]],"routes":[{"dst":"192.168.244.0/24","gw":"10.1.17.20","mtu":1300},{"dst":"10.96.0.0/12"},{"dst":"10.1.0.0/16"}],"type":"my-ipam","unknown":{"y":2,"z":1}},"isGateway":false,"mtu":1472,"name":"n","runtimeConfig":{"mac":"c2:11:22:33:44:55"},"type":"bridge"}"#
        );
    }

    #[test]
    fn del_needs_no_subnet_file() {
        assert_eq!(
            derived(r#"{"name":"n","ipam":{"dataDir":"/d"}}"#, None).unwrap(),
            r#"{"ipMasq":true,"ipam":{"dataDir":"/d","ranges":[[{"subnet":"192.0.2.0/24"}]],"routes":[],"type":"host-local"},"isGateway":true,"name":"n","type":"bridge"}"#
        );
    }

    #[test]
    fn keys_that_flannel_sets_are_refused() {
        let refusal = |keys: &str| {
            derived(&format!(r#"{{"name":"n",{keys}}}"#), None).unwrap_err().message().to_owned()
        };
        let dictionary = "'delegate' dictionary";
        for (keys, msg) in [
            (
                r#""delegate":{"type":7}"#,
                format!("{dictionary}, if present, must have (string) 'type' field"),
            ),
            (
                r#""delegate":{"type":null}"#,
                format!("{dictionary}, if present, must have (string) 'type' field"),
            ),
            (
                r#""delegate":{"name":"x"}"#,
                format!("{dictionary} must not have 'name' field, it'll be set by flannel"),
            ),
            (
                r#""delegate":{"ipam":{}}"#,
                format!("{dictionary} must not have 'ipam' field, it'll be set by flannel"),
            ),
            (r#""delegate":{"type":"flannel"}"#, "flannel cannot delegate to flannel".to_owned()),
            (
                r#""delegate":[]"#,
                "failed to load netconf: expected an object, found a list".to_owned(),
            ),
        ] {
            assert_eq!(refusal(keys), msg);
        }
        let routes = refusal(r#""ipam":{"routes":[{"dst":"x"}]}"#);
        assert!(
            routes.starts_with(
                "failed to assemble Delegate IPAM: failed to read IPAM routes: failed to parse \
                 ipam.routes: "
            ),
            "{routes}"
        );
        derived(r#"{"name":"n","delegate":{"Name":"x"}}"#, None).unwrap();
    }
}
