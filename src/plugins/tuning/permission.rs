//! Which kernel parameters may be set: the node's allowlist, and the safe profile.

use std::fs;
use std::io::ErrorKind;

use regex_lite::Regex;

use super::sysctls::Parameter;
use crate::cni::IfName;
use crate::error::{Error, Result};

/// Expressions that the node's administrator allows, one a line; without the file all are.
const ALLOWLIST: &str = "/etc/cni/tuning/allowlist.conf";

/// The safe profile: parameters that the kernel keeps for each network namespace, bounded in what
/// they cost, and without a say in what others are sent. Those of an interface are the
/// container's own only.
const SAFE: [&str; 41] = [
    "net/core/somaxconn",
    "net/ipv4/icmp_echo_ignore_all",
    "net/ipv4/icmp_echo_ignore_broadcasts",
    "net/ipv4/ip_default_ttl",
    "net/ipv4/ip_local_port_range",
    "net/ipv4/ip_local_reserved_ports",
    "net/ipv4/ip_unprivileged_port_start",
    "net/ipv4/ping_group_range",
    "net/ipv4/tcp_ecn",
    "net/ipv4/tcp_fin_timeout",
    "net/ipv4/tcp_keepalive_intvl",
    "net/ipv4/tcp_keepalive_probes",
    "net/ipv4/tcp_keepalive_time",
    "net/ipv4/tcp_max_syn_backlog",
    "net/ipv4/tcp_mtu_probing",
    "net/ipv4/tcp_notsent_lowat",
    "net/ipv4/tcp_retries1",
    "net/ipv4/tcp_retries2",
    "net/ipv4/tcp_rmem",
    "net/ipv4/tcp_sack",
    "net/ipv4/tcp_slow_start_after_idle",
    "net/ipv4/tcp_syn_retries",
    "net/ipv4/tcp_synack_retries",
    "net/ipv4/tcp_syncookies",
    "net/ipv4/tcp_timestamps",
    "net/ipv4/tcp_tw_reuse",
    "net/ipv4/tcp_window_scaling",
    "net/ipv4/tcp_wmem",
    "net/ipv4/conf/IFNAME/accept_redirects",
    "net/ipv4/conf/IFNAME/accept_source_route",
    "net/ipv4/conf/IFNAME/arp_accept",
    "net/ipv4/conf/IFNAME/arp_notify",
    "net/ipv4/conf/IFNAME/disable_policy",
    "net/ipv4/conf/IFNAME/rp_filter",
    "net/ipv4/conf/IFNAME/secure_redirects",
    "net/ipv4/conf/IFNAME/send_redirects",
    "net/ipv6/conf/IFNAME/accept_ra",
    "net/ipv6/conf/IFNAME/accept_redirects",
    "net/ipv6/conf/IFNAME/disable_ipv6",
    "net/ipv6/neigh/IFNAME/base_reachable_time_ms",
    "net/ipv6/neigh/IFNAME/retrans_time_ms",
];

/// The `profile` of a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Profile {
    /// Whatever the allowlist allows.
    Any,
    /// Only what is in [`SAFE`].
    Safe,
}

impl Profile {
    pub(super) fn parse(text: &str) -> Result<Profile> {
        match text {
            "" => Ok(Profile::Any),
            "safe" => Ok(Profile::Safe),
            other => Err(Error::config(format!("unknown profile \"{other}\""))
                .with_details("the only profile is \"safe\"; without one, the allowlist decides")),
        }
    }

    /// Leaves of each parameter the meanings that are safe; an error for the first without any.
    pub(super) fn restrict(self, parameters: &mut [Parameter], ifname: &IfName) -> Result<()> {
        if self == Profile::Any {
            return Ok(());
        }
        let safe = SAFE.map(|key| key.replacen("IFNAME", ifname.as_str(), 1));
        for Parameter { written, meanings, .. } in parameters {
            meanings.retain(|key| safe.contains(key));
            if meanings.is_empty() {
                return Err(Error::config(format!(
                    "Sysctl {written} is not allowed by the profile \"safe\""
                )));
            }
        }
        Ok(())
    }
}

/// Every parameter must be on the allowlist, if the node has one: the key as it is written or
/// with dots in place of slashes.
pub(super) fn check_allowlist(parameters: &[Parameter]) -> Result<()> {
    let Some(lines) = read_allowlist()? else { return Ok(()) };
    let allowlist: Vec<Regex> = lines.iter().map(|line| compile(line)).collect::<Result<_>>()?;
    for Parameter { written, meanings, .. } in parameters {
        let dotted = meanings.first().map(|key| key.replace('/', ".")).unwrap_or_default();
        if !allowlist.iter().any(|line| line.is_match(written) || line.is_match(&dotted)) {
            let list = lines.join(" ");
            return Err(Error::config(format!(
                "Sysctl {written} is not allowed. Only the following sysctls are allowed: [{list}]"
            ))
            .with_details(format!("the node's {ALLOWLIST} decides")));
        }
    }
    Ok(())
}

fn read_allowlist() -> Result<Option<Vec<String>>> {
    match fs::read_to_string(ALLOWLIST) {
        Ok(text) => {
            let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
            Ok(Some(lines.map(ToOwned::to_owned).collect()))
        }
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(format_args!("read {ALLOWLIST}"), &e)),
    }
}

fn compile(line: &str) -> Result<Regex> {
    Regex::new(line).map_err(|e| {
        Error::config(format!("{ALLOWLIST} has an invalid expression \"{line}\": {e}"))
    })
}

#[cfg(test)]
mod tests {
    use super::super::sysctls::Sysctls;
    use super::*;
    use crate::cni::json::Json;

    fn restricted(key: &str, ifname: &str) -> Result<Vec<String>> {
        let ifname = IfName::parse(ifname).unwrap();
        let json = format!(r#"{{"{key}":"1"}}"#);
        let sysctls: Sysctls = Json::parse(json.as_bytes()).unwrap().decode().unwrap();
        let mut parameters = sysctls.resolve(&Sysctls::default(), &ifname).unwrap();
        Profile::Safe.restrict(&mut parameters, &ifname)?;
        Ok(parameters.remove(0).meanings)
    }

    #[test]
    fn safe_is_what_is_named_and_of_the_own_interface() {
        assert_eq!(restricted("net.core.somaxconn", "eth0").unwrap(), ["net/core/somaxconn"]);
        for key in ["net.ipv4.conf.IFNAME.arp_notify", "net/ipv4/conf/eth0.5/arp_notify"] {
            let found = restricted(key, "eth0.5").unwrap();
            assert_eq!(found, ["net/ipv4/conf/eth0.5/arp_notify"], "{key}");
        }
        for key in [
            "net.core.rmem_max",
            "net.ipv4.ip_forward",
            "net.ipv4.conf.all.arp_notify",
            "net.ipv4.conf.eth1.arp_notify",
            "net.ipv4.route.flush",
            "net.netfilter.nf_conntrack_max",
        ] {
            let error = restricted(key, "eth0").unwrap_err();
            let msg = format!("Sysctl {key} is not allowed by the profile \"safe\"");
            assert_eq!(error.msg(), msg);
        }
    }

    #[test]
    fn profiles() {
        assert_eq!(Profile::parse("").unwrap(), Profile::Any);
        assert_eq!(Profile::parse("safe").unwrap(), Profile::Safe);
        assert!(Profile::parse("Safe").is_err());
    }

    #[test]
    fn expressions_are_those_of_the_reference() {
        for (line, key, matches) in [
            (r"^net\.ipv4\.conf\.all\.[a-z_]*$", "net.ipv4.conf.all.log_martians", true),
            (r"^net\.ipv4\.conf\.all\.[a-z]*$", "net.ipv4.conf.all.log_martians", false),
            ("martians", "net.ipv4.conf.all.log_martians", true),
            ("(?i)NET", "net.x", true),
            (r"conf\.\w+\.(arp|rp)_", "net.ipv4.conf.IFNAME.rp_filter", true),
            ("^net.[[:alpha:]]+$", "net.ab", true),
        ] {
            assert_eq!(compile(line).unwrap().is_match(key), matches, "{line} {key}");
        }
        assert!(compile("(").unwrap_err().msg().contains("invalid expression \"(\""));
    }
}
