//! `subnet.env`: what flannel's daemon says about this node.

use std::fs;
use std::path::Path;

use ipnet::IpNet;

use crate::cni::ip::parse_cidr;
use crate::error::{Code, Error, Result, io_text};
use crate::log;

/// The node's share of the pod networks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SubnetEnv {
    /// The pod networks, IPv4 first.
    pub(super) networks: Vec<IpNet>,
    /// This node's subnets, IPv4 first.
    pub(super) subnets: Vec<IpNet>,
    pub(super) mtu: u32,
    /// Whether the daemon masquerades.
    pub(super) masquerades: bool,
}

/// The lines as they are read; later ones win.
#[derive(Default)]
struct Lines {
    networks: [Vec<IpNet>; 2],
    subnets: [Option<IpNet>; 2],
    mtu: Option<u32>,
    masquerades: Option<bool>,
}

impl SubnetEnv {
    /// Reads the file. Code 11 if the daemon has not written it yet.
    pub(super) fn read(path: &Path) -> Result<SubnetEnv> {
        let name = path.display();
        let text =
            fs::read(path).map_err(|e| (Code::TRY_AGAIN, format!("open {name}: {}", io_text(&e))));
        let parsed = text.and_then(|bytes| {
            let lines = parse(&String::from_utf8_lossy(&bytes)).map_err(|e| (Code::INTERNAL, e))?;
            lines
                .complete()
                .map_err(|missing| (Code::TRY_AGAIN, format!("{name} is missing {missing}")))
        });
        parsed.map_err(|(code, why)| {
            // Users search for this text, full stop included.
            let msg = format!(
                "failed to load flannel 'subnet.env' file: {why}. Check the flannel pod log for this node."
            );
            Error::new(code, msg)
        })
    }
}

impl Lines {
    /// The names of the keys that are missing, if there are any.
    fn complete(self) -> Result<SubnetEnv, String> {
        let mut missing = Vec::new();
        if self.networks.iter().all(Vec::is_empty) {
            missing.extend(["FLANNEL_NETWORK", "FLANNEL_IPV6_NETWORK"]);
        }
        if self.subnets.iter().all(Option::is_none) {
            missing.extend(["FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET"]);
        }
        if self.mtu.is_none() {
            missing.push("FLANNEL_MTU");
        }
        if self.masquerades.is_none() {
            missing.push("FLANNEL_IPMASQ");
        }
        match (self.mtu, self.masquerades) {
            (Some(mtu), Some(masquerades)) if missing.is_empty() => Ok(SubnetEnv {
                networks: self.networks.concat(),
                subnets: self.subnets.into_iter().flatten().collect(),
                mtu,
                masquerades,
            }),
            _ => Err(missing.join(", ")),
        }
    }
}

fn parse(text: &str) -> Result<Lines, String> {
    let mut lines = Lines::default();
    for line in text.split('\n') {
        let line = line.strip_suffix('\r').unwrap_or(line);
        let (key, value) = match line.split_once('=') {
            Some((key, value)) => (key, Ok(value)),
            None => (line, Err(format!("line \"{line}\" has no value"))),
        };
        match key {
            "FLANNEL_NETWORK" => lines.networks[0] = networks(value?)?,
            "FLANNEL_IPV6_NETWORK" => lines.networks[1] = networks(value?)?,
            "FLANNEL_SUBNET" => lines.subnets[0] = Some(parse_cidr(value?)?.trunc()),
            "FLANNEL_IPV6_SUBNET" => lines.subnets[1] = Some(parse_cidr(value?)?.trunc()),
            "FLANNEL_MTU" => lines.mtu = Some(number(value?)?),
            "FLANNEL_IPMASQ" => lines.masquerades = Some(flag(value?)),
            _ => {}
        }
    }
    Ok(lines)
}

fn networks(text: &str) -> Result<Vec<IpNet>, String> {
    let mut networks = Vec::new();
    for cidr in text.split(',') {
        let network = parse_cidr(cidr)?.trunc();
        if !networks.contains(&network) {
            networks.push(network);
        }
    }
    Ok(networks)
}

/// A decimal number, with the wording of the reference's parser.
fn number(text: &str) -> Result<u32, String> {
    let refuse = |why: &str| format!("strconv.ParseUint: parsing {text:?}: {why}");
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(refuse("invalid syntax"));
    }
    text.parse().map_err(|_| refuse("value out of range"))
}

/// Only `true` is true to the reference; a person who writes `1` means the same.
fn flag(text: &str) -> bool {
    let meant = matches!(text.trim(), "1" | "t" | "T" | "TRUE" | "True" | "true" | "yes" | "on");
    if meant && text != "true" {
        log::warn(format_args!("FLANNEL_IPMASQ={text} is taken for true"));
    }
    meant
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUAL: &str = "FLANNEL_NETWORK=10.1.0.0/16,192.168.0.0/16,10.1.9.9/16\r\n\
        FLANNEL_SUBNET=10.1.17.1/24\nFLANNEL_IPV6_NETWORK=fc00::/48\n# comment\n\n\
        FLANNEL_IPV6_SUBNET=fc00::1/64\nFLANNEL_MTU=1472\nFLANNEL_IPMASQ=true\nOTHER\n";

    fn read(text: &str) -> Result<SubnetEnv> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        SubnetEnv::read(file.path()).map_err(|error| {
            let msg = error.msg().replace(&file.path().display().to_string(), "FILE");
            Error::new(error.code(), msg)
        })
    }

    fn refusal(text: &str) -> (Code, String) {
        let error = read(text).unwrap_err();
        let msg = error.msg();
        let why = msg.strip_prefix("failed to load flannel 'subnet.env' file: ").unwrap();
        let why = why.strip_suffix(". Check the flannel pod log for this node.").unwrap();
        (error.code(), why.to_owned())
    }

    #[test]
    fn both_families() {
        let env = read(DUAL).unwrap();
        let texts = |nets: &[IpNet]| nets.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(texts(&env.networks), ["10.1.0.0/16", "192.168.0.0/16", "fc00::/48"]);
        assert_eq!(texts(&env.subnets), ["10.1.17.0/24", "fc00::/64"]);
        assert_eq!((env.mtu, env.masquerades), (1472, true));
    }

    #[test]
    fn what_is_missing_is_named() {
        let all = "FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK, FLANNEL_SUBNET, FLANNEL_IPV6_SUBNET, \
                   FLANNEL_MTU, FLANNEL_IPMASQ";
        assert_eq!(refusal("FOO=bar"), (Code::TRY_AGAIN, format!("FILE is missing {all}")));
        let (code, why) =
            refusal("FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.1.1/24\n MTU=3");
        assert_eq!(
            (code, why.as_str()),
            (Code::TRY_AGAIN, "FILE is missing FLANNEL_MTU, FLANNEL_IPMASQ")
        );
        let gone = SubnetEnv::read(Path::new("/nowhere/subnet.env")).unwrap_err();
        assert!(gone.msg().contains("open /nowhere/subnet.env: no such file or directory. Check"));
        assert_eq!(gone.code(), Code::TRY_AGAIN);
    }

    #[test]
    fn what_makes_no_sense_is_quoted() {
        for (line, why) in [
            ("FLANNEL_MTU", "line \"FLANNEL_MTU\" has no value"),
            ("FLANNEL_MTU=x", "strconv.ParseUint: parsing \"x\": invalid syntax"),
            ("FLANNEL_MTU=", "strconv.ParseUint: parsing \"\": invalid syntax"),
            ("FLANNEL_MTU=+1", "strconv.ParseUint: parsing \"+1\": invalid syntax"),
            (
                "FLANNEL_MTU=4294967296",
                "strconv.ParseUint: parsing \"4294967296\": value out of range",
            ),
            ("FLANNEL_SUBNET=10.1.1.1", "invalid CIDR address: 10.1.1.1"),
            ("FLANNEL_NETWORK=10.1.0.0/16,", "invalid CIDR address: "),
        ] {
            assert_eq!(
                refusal(&format!("{DUAL}{line}")),
                (Code::INTERNAL, why.to_owned()),
                "{line}"
            );
        }
    }

    #[test]
    fn later_lines_win_and_words_mean_what_they_say() {
        let masquerades = |value: &str| {
            read(&format!("{DUAL}FLANNEL_IPMASQ={value}\nFLANNEL_MTU=0")).unwrap().masquerades
        };
        for (value, expected) in [
            ("false", false),
            ("1", true),
            ("TRUE", true),
            ("true ", true),
            ("", false),
            ("0", false),
        ] {
            assert_eq!(masquerades(value), expected, "{value:?}");
        }
    }
}
