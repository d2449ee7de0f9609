//! The configuration for the plugin that does the work: `delegate` of the request, filled up with
//! what the daemon says.

use std::net::Ipv4Addr;

use ipnet::{IpNet, Ipv4Net};

use crate::cni::json::{self, Json};
use crate::cni::{NetConf, Route};
use crate::error::{Context, Error, Result};

use super::subnet::SubnetEnv;

/// In place of the node's subnet, for DEL and GC: host-local looks at no range then, but wants one.
const UNKNOWN: IpNet = IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(192, 0, 2, 0), 24));

/// What the work is handed to.
#[derive(Debug)]
pub(super) struct Derived {
    pub(super) plugin: String,
    pub(super) json: Json,
}

impl Derived {
    /// Fills up `delegate`. Without the daemon's word (`None`) the result serves for DEL and GC, which
    /// need neither ranges nor routes.
    pub(super) fn from(net: &NetConf, env: Option<&SubnetEnv>) -> Result<Derived> {
        let mut delegate = Members::of(net, "delegate")?;
        let plugin = match delegate.get("type") {
            None => "bridge".to_owned(),
            Some(Json::String(plugin)) => plugin.clone(),
            Some(_) => {
                let msg = "'delegate' dictionary, if present, must have (string) 'type' field";
                return Err(Error::config(msg));
            }
        };
        for key in ["name", "ipam"] {
            if delegate.get(key).is_some() {
                return Err(Error::config(format!(
                    "'delegate' dictionary must not have '{key}' field, it'll be set by flannel"
                )));
            }
        }
        if plugin == "flannel" {
            return Err(Error::config("flannel cannot hand its work to flannel"));
        }
        if let Some(runtime) = net.json.get_present("runtimeConfig") {
            delegate.set("runtimeConfig", runtime.clone());
        }
        // What a user may ask of the addresses and of name resolution.
        for key in ["args", "dns"] {
            if let Some(value) = net.json.get_present(key) {
                delegate.set_default(key, value.clone());
            }
        }
        delegate.set("name", net.name.as_str().into());
        delegate.set_default("type", plugin.as_str().into());
        delegate.set_default("ipMasq", Json::Bool(env.is_none_or(|env| !env.masquerades)));
        if let Some(env) = env {
            delegate.set_default("mtu", Json::Number(env.mtu.into()));
        }
        if plugin == "bridge" {
            delegate.set_default("isGateway", Json::Bool(true));
        }
        if !net.cni_version.is_empty() {
            delegate.set("cniVersion", net.cni_version.as_str().into());
        }
        let (ipam, routes) = ipam(net, env).context(|| "failed to assemble Delegate IPAM")?;
        delegate.set("ipam", Json::Object(ipam.0));
        let mut json = Json::Object(delegate.0).normalised().sorted();
        // The keys of a route have an order of their own.
        place_routes(&mut json, routes);
        Ok(Derived { plugin, json })
    }

    /// The bytes to send.
    pub(super) fn text(&self) -> Result<String> {
        json::compact(&self.json)
    }
}

/// The members of an object; unlike elsewhere, keys are compared to the letter.
struct Members(Vec<(String, Json)>);

impl Members {
    fn of(net: &NetConf, key: &str) -> Result<Members> {
        match net.json.get_present(key) {
            None => Ok(Members(Vec::new())),
            Some(Json::Object(members)) => Ok(Members(members.clone())),
            Some(other) => {
                let msg = format!("failed to load netconf: {key} is of type {}", other.go_type());
                Err(Error::new(crate::error::Code::DECODE, msg))
            }
        }
    }

    fn get(&self, key: &str) -> Option<&Json> {
        self.0.iter().rfind(|(k, _)| k == key).map(|(_, value)| value)
    }

    fn set(&mut self, key: &str, value: Json) {
        self.0.retain(|(k, _)| k != key);
        self.0.push((key.to_owned(), value));
    }

    fn set_default(&mut self, key: &str, value: Json) {
        if self.get(key).is_none() {
            self.set(key, value);
        }
    }
}

/// `ipam` of the delegate, and its routes: those of the request, then the pod networks.
fn ipam(net: &NetConf, env: Option<&SubnetEnv>) -> Result<(Members, Vec<Json>)> {
    let mut ipam = Members::of(net, "ipam")?;
    ipam.set_default("type", "host-local".into());
    let subnets = env.map_or(&[UNKNOWN][..], |env| env.subnets.as_slice());
    let range = |subnet: &IpNet| {
        let subnet = Json::String(subnet.to_string());
        Json::Array(vec![Json::Object(vec![("subnet".to_owned(), subnet)])])
    };
    ipam.set("ranges", Json::Array(subnets.iter().map(range).collect()));
    let given = match ipam.get("routes") {
        None | Some(Json::Null) => Vec::new(),
        Some(routes) => routes
            .decode::<Vec<Route>>()
            .context(|| "failed to read IPAM routes: failed to parse ipam.routes")?,
    };
    let networks = env.map(|env| env.networks.as_slice()).unwrap_or_default();
    let routes = given.into_iter().chain(networks.iter().copied().map(Route::to));
    let routes = routes.map(|route| Json::encode(&route)).collect();
    ipam.set("routes", Json::Null);
    Ok((ipam, routes))
}

fn place_routes(json: &mut Json, routes: Vec<Json>) {
    let place = member(json, "ipam").and_then(|ipam| member(ipam, "routes"));
    if let Some(place) = place {
        *place = Json::Array(routes);
    }
}

fn member<'j>(json: &'j mut Json, key: &str) -> Option<&'j mut Json> {
    let Json::Object(members) = json else { return None };
    members.iter_mut().find(|(k, _)| k == key).map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn derive(request: &str, env: Option<&SubnetEnv>) -> Result<String> {
        let mut net = NetConf::parse(request.as_bytes()).unwrap();
        net.read_version().unwrap();
        Derived::from(&net, env)?.text()
    }

    fn env(networks: &[&str], subnets: &[&str], masquerades: bool) -> SubnetEnv {
        let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        SubnetEnv { networks: nets(networks), subnets: nets(subnets), mtu: 1472, masquerades }
    }

    #[test]
    fn defaults_make_a_bridge_of_host_local() {
        let one = env(&["10.1.0.0/16"], &["10.1.17.0/24"], true);
        assert_eq!(
            derive(r#"{"name":"mynet","type":"flannel"}"#, Some(&one)).unwrap(),
            r#"{"ipMasq":false,"ipam":{"ranges":[[{"subnet":"10.1.17.0/24"}]],"routes":[{"dst":"10.1.0.0/16"}],"type":"host-local"},"isGateway":true,"mtu":1472,"name":"mynet","type":"bridge"}"#
        );
        let dual = env(&["10.1.0.0/16", "fc00::/48"], &["10.1.17.0/24", "fc00::/64"], false);
        let request = r#"{"name":"n","type":"flannel","cniVersion":"1.0.0","delegate":null,
            "delegate":{"type":"ipvlan","master":"eth0","mtu":9e3,"cniVersion":"0.3.1"}}"#;
        assert_eq!(
            derive(request, Some(&dual)).unwrap(),
            r#"{"cniVersion":"1.0.0","ipMasq":true,"ipam":{"ranges":[[{"subnet":"10.1.17.0/24"}],[{"subnet":"fc00::/64"}]],"routes":[{"dst":"10.1.0.0/16"},{"dst":"fc00::/48"}],"type":"host-local"},"master":"eth0","mtu":9000,"name":"n","type":"ipvlan"}"#
        );
    }

    #[test]
    fn what_is_given_is_kept() {
        let one = env(&["10.1.0.0/16"], &["10.1.17.0/24"], true);
        let request = r#"{"name":"n","type":"flannel","capabilities":{"x":true},"prevResult":{},
            "runtimeConfig":{"mac":"c2:11:22:33:44:55"},"args":{"cni":{"ips":["10.1.17.9"]}},
            "dns":{"domain":"d"},"delegate":{"ipMasq":true,"isGateway":false,"dns":{},"b":"<&>","a":1,
            "runtimeConfig":{"gone":1}},
            "ipam":{"type":"my-ipam","unknown":{"z":1,"y":2},"ranges":"gone","routes":[
            {"gw":"10.1.17.20","dst":"192.168.244.0/24","x":1,"mtu":1300},{"dst":"10.96.0.0/12"}]}}"#;
        assert_eq!(
            derive(request, Some(&one)).unwrap(),
            r#"{"a":1,"args":{"cni":{"ips":["10.1.17.9"]}},"b":"\u003c\u0026\u003e","dns":{},"ipMasq":true,"ipam":{"ranges":[[{"subnet":"10.1.17.0/24"}]],"routes":[{"dst":"192.168.244.0/24","gw":"10.1.17.20","mtu":1300},{"dst":"10.96.0.0/12"},{"dst":"10.1.0.0/16"}],"type":"my-ipam","unknown":{"y":2,"z":1}},"isGateway":false,"mtu":1472,"name":"n","runtimeConfig":{"mac":"c2:11:22:33:44:55"},"type":"bridge"}"#
        );
    }

    #[test]
    fn without_the_daemon_there_is_enough_to_clean_up() {
        assert_eq!(
            derive(r#"{"name":"n","ipam":{"dataDir":"/d"}}"#, None).unwrap(),
            r#"{"ipMasq":true,"ipam":{"dataDir":"/d","ranges":[[{"subnet":"192.0.2.0/24"}]],"routes":[],"type":"host-local"},"isGateway":true,"name":"n","type":"bridge"}"#
        );
    }

    #[test]
    fn what_flannel_sets_itself_is_refused() {
        let refusal = |keys: &str| {
            derive(&format!(r#"{{"name":"n",{keys}}}"#), None).unwrap_err().msg().to_owned()
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
            (
                r#""delegate":{"type":"flannel"}"#,
                "flannel cannot hand its work to flannel".to_owned(),
            ),
            (
                r#""delegate":[]"#,
                "failed to load netconf: delegate is of type []interface {}".to_owned(),
            ),
        ] {
            assert_eq!(refusal(keys), msg);
        }
        let routes = refusal(r#""ipam":{"routes":[{"dst":"x"}]}"#);
        assert!(routes.starts_with("failed to assemble Delegate IPAM: failed to read IPAM routes: failed to parse ipam.routes: "), "{routes}");
        derive(r#"{"name":"n","delegate":{"Name":"x"}}"#, None).unwrap();
    }
}
