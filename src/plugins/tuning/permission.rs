//! The restrictions of kernel parameters: the node's allowlist and the profile "safe".

use std::io::ErrorKind;
use std::path::Path;

use regex_lite::Regex;

use super::sysctls::KernelParameter;
use cni::InterfaceName;
use cni::error::{Error, Result};
use cni::files;

/// Regular expressions of the keys that the administrator allows, one per line. Without the file
/// all keys are allowed.
const ALLOWLIST: &str = "/etc/cni/tuning/allowlist.conf";
/// Limit of its size in bytes, far beyond the number of all keys.
const MAX_BYTES: usize = 1 << 20;

/// The profile "safe": parameters of a network namespace that have bounded costs and no effect on
/// traffic between others. Of the parameters of interfaces only the container's own are safe.
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

/// Whether the `profile` of a configuration is "safe"; it is empty by default.
pub(super) fn is_safe_profile(profile: &str) -> Result<bool> {
    match profile {
        "" => Ok(false),
        "safe" => Ok(true),
        other => Err(Error::config(format!("unknown profile \"{other}\""))
            .with_details("the only profile is \"safe\"; without one, the allowlist decides")),
    }
}

/// Restricts the paths of each parameter to the safe ones; fails if a parameter has none.
pub(super) fn restrict_to_safe(
    parameters: &mut [KernelParameter],
    ifname: &InterfaceName,
) -> Result<()> {
    let safe = SAFE.map(|key| key.replacen("IFNAME", ifname.as_str(), 1));
    for KernelParameter { written, paths, .. } in parameters {
        paths.retain(|path| safe.contains(path));
        if paths.is_empty() {
            return Err(Error::config(format!(
                "Sysctl {written} is not allowed by the profile \"safe\""
            )));
        }
    }
    Ok(())
}

/// Fails unless the node's allowlist, if there is one, matches every parameter: the key as written,
/// or with dots instead of slashes.
pub(super) fn check_allowlist(parameters: &[KernelParameter]) -> Result<()> {
    let text = match files::read_text(Path::new(ALLOWLIST), MAX_BYTES) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        text => text.map_err(|e| Error::io(format_args!("read {ALLOWLIST}"), &e))?,
    };
    let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let allowlist: Vec<Regex> =
        lines.iter().map(|line| compile_expression(line)).collect::<Result<_>>()?;
    for KernelParameter { written, paths, .. } in parameters {
        let dotted = paths.first().map(|path| path.replace('/', ".")).unwrap_or_default();
        if !allowlist.iter().any(|line| line.is_match(written) || line.is_match(&dotted)) {
            let list = lines.join(" ");
            return Err(Error::config(format!(
                "Sysctl {written} is not allowed. Only the following sysctls are allowed: [{list}]"
            ))
            .with_details(format!(
                "add it to the node's {ALLOWLIST}, or remove it from \"sysctl\""
            )));
        }
    }
    Ok(())
}

fn compile_expression(line: &str) -> Result<Regex> {
    Regex::new(line).map_err(|e| {
        Error::config(format!("{ALLOWLIST} has an invalid expression \"{line}\": {e}"))
    })
}

#[cfg(test)]
mod tests {
    use super::super::sysctls::ConfiguredSysctls;
    use super::*;
    use cni::json::Json;

    fn restricted(key: &str, ifname: &str) -> Result<Vec<String>> {
        let ifname = InterfaceName::parse(ifname).unwrap();
        let json = format!(r#"{{"{key}":"1"}}"#);
        let sysctls: ConfiguredSysctls = Json::parse(json.as_bytes()).unwrap().decode().unwrap();
        let mut parameters =
            sysctls.merge_parameters(&ConfiguredSysctls::default(), &ifname).unwrap();
        restrict_to_safe(&mut parameters, &ifname)?;
        Ok(parameters.remove(0).paths)
    }

    #[test]
    fn the_safe_profile_permits_listed_keys_of_own_interface() {
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
            assert_eq!(error.message(), msg);
        }
    }

    #[test]
    fn only_the_profile_safe_exists() {
        assert!(
            !is_safe_profile("").unwrap()
                && is_safe_profile("safe").unwrap()
                && is_safe_profile("Safe").is_err()
        );
    }

    #[test]
    fn allowlist_expressions_have_the_references_syntax() {
        for (line, key, matches) in [
            (r"^net\.ipv4\.conf\.all\.[a-z_]*$", "net.ipv4.conf.all.log_martians", true),
            (r"^net\.ipv4\.conf\.all\.[a-z]*$", "net.ipv4.conf.all.log_martians", false),
            ("martians", "net.ipv4.conf.all.log_martians", true),
            ("(?i)NET", "net.x", true),
            (r"conf\.\w+\.(arp|rp)_", "net.ipv4.conf.IFNAME.rp_filter", true),
            ("^net.[[:alpha:]]+$", "net.ab", true),
        ] {
            assert_eq!(compile_expression(line).unwrap().is_match(key), matches, "{line} {key}");
        }
        assert!(
            compile_expression("(").unwrap_err().message().contains("invalid expression \"(\"")
        );
    }
}
