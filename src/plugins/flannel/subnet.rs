//! The subnet file `subnet.env`, which flanneld writes: the node's subnets, as `KEY=VALUE` lines.

use std::path::Path;

use ipnet::IpNet;

use cni::error::{Error, ErrorCode, Result, io_text};
use cni::files;
use cni::ip::parse_cidr;

/// Limit of the file's size in bytes: room for thousands of networks.
const MAX_BYTES: usize = 64 << 10;

/// The node's share of the pod networks.
#[derive(Debug)]
pub(super) struct SubnetEnv {
    /// The pod networks, IPv4 first.
    pub(super) networks: Vec<IpNet>,
    /// This node's subnets, IPv4 first.
    pub(super) subnets: Vec<IpNet>,
    pub(super) mtu: u32,
    /// Whether flanneld masquerades.
    pub(super) masquerades: bool,
}

impl SubnetEnv {
    /// Reads the file. Code 11 if flanneld has not written it yet, or not completely.
    pub(super) fn read_file(path: &Path) -> Result<SubnetEnv> {
        let failed = |code, why: String| {
            // The reference's text, with its full stop.
            let msg = format!(
                "failed to load flannel 'subnet.env' file: {why}. Check the flannel pod log for \
                 this node."
            );
            Error::new(code, msg)
        };
        let name = path.display();
        let text = files::read_text(path, MAX_BYTES)
            .map_err(|e| failed(ErrorCode::TRY_AGAIN, format!("open {name}: {}", io_text(&e))))?;
        parse_lines(&text)
            .map_err(|why| failed(ErrorCode::INTERNAL, why))?
            .map_err(|missing| failed(ErrorCode::TRY_AGAIN, format!("{name} is missing {missing}")))
    }
}

/// Parses the lines, of which later ones override earlier ones. The inner error lists the missing
/// keys.
fn parse_lines(text: &str) -> Result<Result<SubnetEnv, String>, String> {
    let (mut networks, mut subnets) = <([Vec<IpNet>; 2], [Option<IpNet>; 2])>::default();
    let (mut mtu, mut masquerades) = (None, None);
    for line in text.split('\n') {
        let line = line.strip_suffix('\r').unwrap_or(line);
        let (key, value) = match line.split_once('=') {
            Some((key, value)) => (key, Ok(value)),
            None => (line, Err(format!("line \"{line}\" has no value"))),
        };
        match key {
            "FLANNEL_NETWORK" => networks[0] = parse_networks(value?)?,
            "FLANNEL_IPV6_NETWORK" => networks[1] = parse_networks(value?)?,
            "FLANNEL_SUBNET" => subnets[0] = Some(parse_cidr(value?)?.trunc()),
            "FLANNEL_IPV6_SUBNET" => subnets[1] = Some(parse_cidr(value?)?.trunc()),
            "FLANNEL_MTU" => mtu = Some(parse_mtu(value?)?),
            "FLANNEL_IPMASQ" => masquerades = Some(parse_flag(value?)),
            _ => {}
        }
    }
    let networks = networks.concat();
    let subnets: Vec<IpNet> = subnets.into_iter().flatten().collect();
    let missing: Vec<&str> = [
        (networks.is_empty(), "FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK"),
        (subnets.is_empty(), "FLANNEL_SUBNET, FLANNEL_IPV6_SUBNET"),
        (mtu.is_none(), "FLANNEL_MTU"),
        (masquerades.is_none(), "FLANNEL_IPMASQ"),
    ]
    .into_iter()
    .filter_map(|(is_missing, keys)| is_missing.then_some(keys))
    .collect();
    Ok(match (mtu, masquerades) {
        (Some(mtu), Some(masquerades)) if missing.is_empty() => {
            Ok(SubnetEnv { networks, subnets, mtu, masquerades })
        }
        _ => Err(missing.join(", ")),
    })
}

fn parse_networks(text: &str) -> Result<Vec<IpNet>, String> {
    let mut networks = Vec::new();
    for cidr in text.split(',') {
        let network = parse_cidr(cidr)?.trunc();
        if !networks.contains(&network) {
            networks.push(network);
        }
    }
    Ok(networks)
}

/// A decimal number, with the error texts of Go's parser.
fn parse_mtu(text: &str) -> Result<u32, String> {
    let invalid = |why: &str| format!("strconv.ParseUint: parsing {text:?}: {why}");
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(invalid("invalid syntax"));
    }
    text.parse().map_err(|_| invalid("value out of range"))
}

/// The reference accepts `true` only, and reads any other spelling as false.
fn parse_flag(text: &str) -> bool {
    let is_set = matches!(text.trim(), "1" | "t" | "T" | "TRUE" | "True" | "true" | "yes" | "on");
    if is_set && text != "true" {
        warn!("FLANNEL_IPMASQ={text} is read as true");
    }
    is_set
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const DUAL: &str = "FLANNEL_NETWORK=10.1.0.0/16,192.168.0.0/16,10.1.9.9/16\r\n\
        FLANNEL_SUBNET=10.1.17.1/24\nFLANNEL_IPV6_NETWORK=fc00::/48\n# comment\n\n\
        FLANNEL_IPV6_SUBNET=fc00::1/64\nFLANNEL_MTU=1472\nFLANNEL_IPMASQ=true\nOTHER\n";

    fn read(text: &str) -> Result<SubnetEnv> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        SubnetEnv::read_file(file.path()).map_err(|error| {
            let msg = error.message().replace(&file.path().display().to_string(), "FILE");
            Error::new(error.code(), msg)
        })
    }

    fn refusal(text: &str) -> (ErrorCode, String) {
        let error = read(text).unwrap_err();
        let msg = error.message();
        let why = msg.strip_prefix("failed to load flannel 'subnet.env' file: ").unwrap();
        let why = why.strip_suffix(". Check the flannel pod log for this node.").unwrap();
        (error.code(), why.to_owned())
    }

    #[test]
    fn subnets_of_both_families_are_read() {
        let env = read(DUAL).unwrap();
        let texts = |nets: &[IpNet]| nets.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(texts(&env.networks), ["10.1.0.0/16", "192.168.0.0/16", "fc00::/48"]);
        assert_eq!(texts(&env.subnets), ["10.1.17.0/24", "fc00::/64"]);
        assert_eq!((env.mtu, env.masquerades), (1472, true));
    }

    #[test]
    fn missing_keys_are_listed() {
        let all = "FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK, FLANNEL_SUBNET, FLANNEL_IPV6_SUBNET, \
                   FLANNEL_MTU, FLANNEL_IPMASQ";
        assert_eq!(refusal("FOO=bar"), (ErrorCode::TRY_AGAIN, format!("FILE is missing {all}")));
        let (code, why) =
            refusal("FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.1.1/24\n MTU=3");
        assert_eq!(
            (code, why.as_str()),
            (ErrorCode::TRY_AGAIN, "FILE is missing FLANNEL_MTU, FLANNEL_IPMASQ")
        );
        let gone = SubnetEnv::read_file(Path::new("/nowhere/subnet.env")).unwrap_err();
        assert!(
            gone.message().contains("open /nowhere/subnet.env: no such file or directory. Check")
        );
        assert_eq!(gone.code(), ErrorCode::TRY_AGAIN);
    }

    #[test]
    fn invalid_values_are_quoted() {
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
                (ErrorCode::INTERNAL, why.to_owned()),
                "{line}"
            );
        }
    }

    #[test]
    fn the_last_line_wins_and_booleans_are_those_of_go() {
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
