//! The keys of `ipam`.

use std::path::PathBuf;

use serde::Deserialize;

use super::family::{DhcpFamily, DhcpRouteConfig};
use super::v4::option::{
    CLIENT_ID, DOMAIN, Dhcp4Options, HOST_NAME, LEASE_TIME, MAX_SIZE, MESSAGE_TYPE, MTU,
    NAME_SERVERS, OVERLOAD, PARAMETERS, RELAY, REQUESTED, ROUTERS, SEARCH, SERVER, SUBNET_MASK,
    USER_CLASS, VENDOR_CLASS,
};
use crate::framework::CallContext;
use cni::ResultRoute;
use cni::error::{Error, ErrorCode, Result};
use cni::json::Json;

/// The directory for sockets of a daemon that is started on demand.
pub(super) const DIRECTORY: &str = "/run/cni";
/// The default socket of the daemon.
pub(super) const SOCKET: &str = "/run/cni/dhcp.sock";

/// The options that are requested by default: those of the reference, and those that complete the
/// result without an effect on the container's routes.
const DEFAULTS: [u8; 6] = [ROUTERS, SUBNET_MASK, NAME_SERVERS, DOMAIN, SEARCH, MTU];
/// The options that are requested with `skipDefault` and without an option of the configuration.
const LIBRARY_DEFAULTS: [u8; 4] = [SUBNET_MASK, ROUTERS, DOMAIN, NAME_SERVERS];

/// Options of the protocol itself, with padding (0) and the end mark (255).
const RESERVED: [u8; 10] =
    [0, REQUESTED, LEASE_TIME, OVERLOAD, MESSAGE_TYPE, SERVER, PARAMETERS, MAX_SIZE, RELAY, 255];

/// The names of options in a configuration.
const NAMES: [(&str, u8); 6] = [
    ("dhcp-client-identifier", CLIENT_ID),
    ("subnet-mask", SUBNET_MASK),
    ("routers", ROUTERS),
    ("host-name", HOST_NAME),
    ("user-class", USER_CLASS),
    ("vendor-class-identifier", VENDOR_CLASS),
];

/// The keys of a network.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct DhcpConfig {
    ipam: Option<Json>,
    /// A key of interface plugins: their default routes are omitted after a change of the lease.
    #[serde(rename = "defaultRoute")]
    default_route: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DhcpIpamConfig {
    daemon_socket_path: String,
    /// Whether ADD starts the daemon if none is running.
    pub start_daemon: bool,
    request: Vec<RequestedOption>,
    provide: Vec<ProvidedOption>,
    /// The metric of routes; 0 leaves the choice to the kernel.
    pub priority: u32,
    /// Routes in addition to those of servers.
    pub routes: Vec<ResultRoute>,
    family: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RequestedOption {
    option: String,
    skip_default: bool,
}

/// An option to send.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ProvidedOption {
    option: String,
    value: String,
    from_arg: String,
}

impl DhcpConfig {
    /// `ipam` of a DEL or GC, which need the socket only.
    pub fn ipam_for_removal(&self, cx: &CallContext<'_>) -> Result<DhcpIpamConfig> {
        cx.decode_part(self.ipam.as_ref())
    }

    pub fn route_config(&self, ipam: &DhcpIpamConfig) -> DhcpRouteConfig {
        DhcpRouteConfig { added: ipam.routes.clone(), default_route: self.default_route }
    }

    /// `ipam`; an error if the configuration has none.
    pub fn required_ipam(&self) -> Result<DhcpIpamConfig> {
        self.ipam.as_ref().ok_or_else(|| Error::config("IPAM config missing 'ipam' key"))?.decode()
    }
}

impl DhcpIpamConfig {
    /// The socket of the daemon.
    pub fn socket_path(&self) -> PathBuf {
        let path = self.daemon_socket_path.as_str();
        if path.is_empty() { SOCKET.into() } else { path.into() }
    }

    pub fn lease_families(&self) -> Result<Vec<DhcpFamily>> {
        match self.family.as_deref() {
            None | Some("ipv4") => Ok(vec![DhcpFamily::V4]),
            Some("ipv6") => Ok(vec![DhcpFamily::V6]),
            Some("both") => Ok(DhcpFamily::ALL.to_vec()),
            Some(other) => {
                let msg = format!("\"family\" of \"ipam\" is \"{other}\"");
                let error = Error::new(ErrorCode::UNSUPPORTED_FIELD, msg);
                Err(error.with_details("it can be \"ipv4\", \"ipv6\" or \"both\""))
            }
        }
    }

    /// The options of every message; `args` is `CNI_ARGS`. They are DHCP options of IPv4, except
    /// for the client identifier.
    pub fn message_options(&self, args: &str) -> Result<Dhcp4Options> {
        if !self.lease_families()?.contains(&DhcpFamily::V4) {
            self.require_no_options()?;
        }
        let mut options = Dhcp4Options::new();
        for ProvidedOption { option, value, from_arg } in &self.provide {
            let code = option_code(option)?;
            if RESERVED.contains(&code) {
                let msg = format!("option \"{option}\" cannot be provided");
                return Err(Error::config(msg).with_details("it belongs to the protocol itself"));
            }
            // Lenient: every pair with a `=`, whatever its key.
            let mut pairs = args.split(';').rev().filter_map(|pair| pair.split_once('='));
            let (value, origin) = match pairs.find(|(key, _)| *key == from_arg) {
                Some((_, value)) => (value, format!(" from CNI_ARGS \"{from_arg}\"")),
                None if value.is_empty() => continue,
                None => (value.as_str(), String::new()),
            };
            if value.len() > 255 {
                let msg = format!("value too long for option \"{option}\"{origin}: \"{value}\"");
                return Err(Error::config(msg));
            }
            options.insert(code, value.as_bytes().to_vec());
        }
        options.insert(PARAMETERS, self.parameter_request_list()?);
        Ok(options)
    }

    /// The configuration cannot set options of DHCPv6, which has other numbers.
    fn require_no_options(&self) -> Result<()> {
        let key = match () {
            () if !self.request.is_empty() => "request",
            () if !self
                .provide
                .iter()
                .all(|provide| option_code(&provide.option) == Ok(CLIENT_ID)) =>
            {
                "provide"
            }
            () => return Ok(()),
        };
        let msg = format!("\"{key}\" of \"ipam\" is about options of IPv4");
        let remedy = "leave it out where \"family\" is \"ipv6\"; \"dhcp-client-identifier\" is \
                      provided to both";
        Err(Error::config(msg).with_details(remedy))
    }

    fn parameter_request_list(&self) -> Result<Vec<u8>> {
        let named = self.request.iter().filter(|request| !request.option.is_empty());
        let mut codes =
            named.map(|request| option_code(&request.option)).collect::<Result<Vec<u8>>>()?;
        if !self.request.iter().any(|request| request.skip_default) {
            codes.extend(DEFAULTS);
        } else if codes.is_empty() {
            codes.extend(LIBRARY_DEFAULTS);
        }
        let mut unique = Vec::with_capacity(codes.len());
        for code in codes {
            if !unique.contains(&code) {
                unique.push(code);
            }
        }
        // The length of an option is at most 255, one less than there are codes.
        unique.truncate(255);
        Ok(unique)
    }
}

/// The code of an option by its name or number.
fn option_code(text: &str) -> Result<u8> {
    let known = NAMES.iter().find(|(name, _)| *name == text).map(|(_, code)| *code);
    let number = || text.parse().ok().filter(|_| text.bytes().all(|b| b.is_ascii_digit()));
    known.or_else(number).ok_or_else(|| {
        let names: Vec<_> = NAMES.iter().map(|(name, _)| *name).collect();
        Error::config(format!(
            "Can not parse option \"{text}\": neither a number up to 255 nor a name"
        ))
        .with_details(format!("names: {}", names.join(", ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ipam(text: &str) -> DhcpIpamConfig {
        let conf: DhcpConfig =
            Json::parse(format!(r#"{{"ipam":{text}}}"#).as_bytes()).unwrap().decode().unwrap();
        conf.required_ipam().unwrap()
    }

    fn parameters(text: &str) -> Vec<u8> {
        ipam(text).message_options("").unwrap()[&PARAMETERS].clone()
    }

    #[test]
    fn requested_options_extend_the_defaults() {
        assert_eq!(parameters("{}"), DEFAULTS);
        let two = r#"{"request":[{"option":"121"},{"option":"host-name"},{"option":"121"}]}"#;
        assert_eq!(parameters(two), [121, 12, 3, 1, 6, 15, 119, 26]);
        assert_eq!(parameters(r#"{"request":[{"skipDefault":true}]}"#), [1, 3, 15, 6]);
        let only = r#"{"request":[{"skipDefault":true,"option":"42"}]}"#;
        assert_eq!(parameters(only), [42]);
    }

    #[test]
    fn provided_options_are_sent() {
        let conf = ipam(
            r#"{"provide":[{"option":"host-name","value":"a"},{"option":"12","fromArg":"K"},
                {"option":"60","value":"v","fromArg":"NONE"},{"option":"77"},
                {"option":"61","value":"me"}]}"#,
        );
        let options = conf.message_options("x;K=b=c;IgnoreUnknown=0").unwrap();
        assert_eq!(options[&12], b"b=c");
        assert_eq!(options[&60], b"v");
        assert_eq!((options.get(&77), options[&61].as_slice()), (None, &b"me"[..]));
        assert_eq!(conf.message_options("").unwrap()[&12], b"a");
    }

    #[test]
    fn only_options_of_the_requested_family_are_accepted() {
        for (text, families) in [
            ("{}", &[DhcpFamily::V4][..]),
            (r#"{"family":"ipv4"}"#, &[DhcpFamily::V4]),
            (r#"{"family":"ipv6"}"#, &[DhcpFamily::V6]),
            (r#"{"family":"both"}"#, &DhcpFamily::ALL),
        ] {
            assert_eq!(ipam(text).lease_families().unwrap(), families);
            assert!(ipam(text).message_options("").is_ok(), "{text}");
        }
        let id = r#""provide":[{"option":"61","value":"me"}]"#;
        assert_eq!(
            ipam(&format!(r#"{{"family":"ipv6",{id}}}"#)).message_options("").unwrap()[&61],
            b"me"
        );
        for (key, text) in [
            ("provide", r#""provide":[{"option":"12","value":"me"}]"#),
            ("request", r#""request":[{"option":"23"}]"#),
        ] {
            assert!(ipam(&format!(r#"{{"family":"both",{text}}}"#)).message_options("").is_ok());
            let error =
                ipam(&format!(r#"{{"family":"ipv6",{text}}}"#)).message_options("").unwrap_err();
            assert_eq!(error.message(), format!("\"{key}\" of \"ipam\" is about options of IPv4"));
        }
    }

    #[test]
    fn invalid_options_are_refused() {
        let refusal = |text: &str, args: &str| {
            let error = ipam(text).message_options(args).unwrap_err();
            (error.code(), error.message().to_owned())
        };
        let long = "x".repeat(256);
        let (code, msg) =
            refusal(&format!(r#"{{"provide":[{{"option":"12","value":"{long}"}}]}}"#), "");
        assert_eq!(code, ErrorCode::INVALID_CONFIG);
        assert_eq!(msg, format!("value too long for option \"12\": \"{long}\""));
        let (_, msg) =
            refusal(r#"{"provide":[{"option":"12","fromArg":"K"}]}"#, &format!("K={long}"));
        assert!(msg.starts_with("value too long for option \"12\" from CNI_ARGS \"K\": "));
        for bad in ["x", "256", "-1", "+1", "", "1.0"] {
            let (_, msg) = refusal(&format!(r#"{{"provide":[{{"option":"{bad}"}}]}}"#), "");
            assert!(msg.starts_with(&format!("Can not parse option \"{bad}\": ")), "{msg}");
        }
        for reserved in ["53", "50", "54", "55", "57", "255", "0"] {
            let (_, msg) = refusal(&format!(r#"{{"provide":[{{"option":"{reserved}"}}]}}"#), "");
            assert_eq!(msg, format!("option \"{reserved}\" cannot be provided"));
        }
        assert_eq!(refusal(r#"{"family":"ipv5"}"#, "").0, ErrorCode::UNSUPPORTED_FIELD);
        let none: DhcpConfig = Json::parse(b"{}").unwrap().decode().unwrap();
        assert_eq!(none.required_ipam().unwrap_err().code(), ErrorCode::INVALID_CONFIG);
    }
}
