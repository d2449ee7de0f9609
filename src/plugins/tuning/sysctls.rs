//! The kernel parameters of a configuration: parsing of keys, writing and comparison of values.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use crate::iface::verify::IN_CONTAINER;
use crate::sysctl;
use cni::InterfaceName;
use cni::error::{Error, Result};

/// The placeholder of the container's interface in a key.
const IFNAME: &str = "IFNAME";

/// The object `sysctl`: keys as written, in the order of the document.
#[derive(Debug, Default)]
pub(super) struct ConfiguredSysctls(Vec<(String, String)>);

impl<'de> Deserialize<'de> for ConfiguredSysctls {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<ConfiguredSysctls, D::Error> {
        d.deserialize_map(SysctlsVisitor)
    }
}

struct SysctlsVisitor;

impl<'de> Visitor<'de> for SysctlsVisitor {
    type Value = ConfiguredSysctls;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ConfiguredSysctls, A::Error> {
        let mut pairs = Vec::new();
        while let Some(pair) = map.next_entry()? {
            pairs.push(pair);
        }
        Ok(ConfiguredSysctls(pairs))
    }
}

/// A parameter to be set.
#[derive(Debug)]
pub(super) struct KernelParameter {
    /// The key as written in the configuration.
    pub(super) written: String,
    /// The candidates for the parameter's path, the most likely first: see [`candidate_paths`].
    pub(super) paths: Vec<String>,
    pub(super) value: String,
}

impl KernelParameter {
    /// Whether the interface loses its IPv6 addresses by the parameter.
    pub(super) fn disables_ipv6(&self, ifname: &str) -> bool {
        let is_key = |path: &String| {
            ["all", ifname].iter().any(|of| *path == format!("net/ipv6/conf/{of}/disable_ipv6"))
        };
        self.value.trim() != "0" && self.paths.iter().any(is_key)
    }
}

impl ConfiguredSysctls {
    /// The parameters in order; parameters of `args` override, or are appended. A key that occurs
    /// twice, in whatever spelling, is an error.
    pub(super) fn merge_parameters(
        &self,
        args: &ConfiguredSysctls,
        ifname: &InterfaceName,
    ) -> Result<Vec<KernelParameter>> {
        let mut all = self.parse_parameters(ifname)?;
        for parameter in args.parse_parameters(ifname)? {
            match all.iter_mut().find(|known| known.paths[0] == parameter.paths[0]) {
                Some(known) => *known = parameter,
                None => all.push(parameter),
            }
        }
        Ok(all)
    }

    fn parse_parameters(&self, ifname: &InterfaceName) -> Result<Vec<KernelParameter>> {
        let mut all: Vec<KernelParameter> = Vec::with_capacity(self.0.len());
        for (written, value) in &self.0 {
            let paths = candidate_paths(written, ifname)?;
            if let Some(twin) = all.iter().find(|known| known.paths[0] == paths[0]) {
                return Err(Error::config("duplicated sysctl keys are not allowed")
                    .with_details(format!("\"{}\" and \"{written}\"", twin.written)));
            }
            all.push(KernelParameter { written: written.clone(), paths, value: value.clone() });
        }
        Ok(all)
    }
}

/// The candidates for a key's path below `/proc/sys`. The reference replaces every dot by a slash.
/// The second candidate follows sysctl(8), because names of interfaces may contain dots: the first
/// of the two characters is the separator, and the other one is part of the names.
fn candidate_paths(written: &str, ifname: &InterfaceName) -> Result<Vec<String>> {
    let is_dotted = written.chars().find(|c| ['.', '/'].contains(c)) == Some('.');
    let by_sysctl = if is_dotted {
        written
            .chars()
            .map(|c| match c {
                '.' => '/',
                '/' => '.',
                other => other,
            })
            .collect()
    } else {
        written.to_owned()
    };
    let path = |text: &str| {
        let path = text.replacen(IFNAME, ifname.as_str(), 1);
        let segments: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let is_below_net = segments.len() > 1 && segments[0] == "net";
        let is_valid = is_below_net && !segments.iter().any(|part| matches!(*part, "." | ".."));
        if is_valid { Ok(segments.join("/")) } else { Err(path) }
    };
    let mut paths = vec![path(&written.replace('.', "/")).map_err(|path| {
        Error::config(format!("invalid net sysctl key: \"{path}\""))
            .with_details("only keys below \"net\" can be set")
    })?];
    paths.extend(path(&by_sysctl).ok().filter(|other| *other != paths[0]));
    Ok(paths)
}

/// A parameter of the calling thread's namespace.
#[derive(Debug)]
pub(super) struct PresentParameter<'a> {
    pub(super) key: &'a str,
    value: &'a str,
    /// The present value; `None` if the parameter is write-only.
    former: Option<String>,
}

impl KernelParameter {
    /// Finds and reads the parameter in the calling thread's namespace.
    pub(super) fn find_in_namespace(&self) -> Result<PresentParameter<'_>> {
        let existing = self.paths.iter().find(|path| sysctl::key_exists(path));
        // The error for a missing parameter is that of reading it.
        let key = existing.or(self.paths.first()).map_or("", String::as_str);
        Ok(PresentParameter { key, value: &self.value, former: sysctl::read_if_readable(key)? })
    }
}

impl PresentParameter<'_> {
    /// Sets the value. A parameter that cannot be written may have the value already. It is read
    /// now, because an earlier parameter of the list may have changed this one.
    pub(super) fn write_value(&self) -> Result<()> {
        sysctl::write_value(self.key, self.value).or_else(|e| {
            if sysctl::read_value(self.key).is_ok_and(|now| now == self.value) {
                Ok(())
            } else {
                Err(e)
            }
        })
    }

    /// Whether the parameter is `key` of IPv6 on the interface, and 0.
    pub(super) fn switches_off(&self, ifname: &InterfaceName, key: &str) -> bool {
        self.value == "0" && self.key == format!("net/ipv6/conf/{ifname}/{key}")
    }

    /// Restores the original value, if it is known.
    pub(super) fn restore_value(&self) -> Result<()> {
        match &self.former {
            Some(former) if sysctl::read_value(self.key)? != *former => {
                sysctl::write_value(self.key, former)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn verify_value(&self) -> Result<()> {
        let PresentParameter { key, value, former } = self;
        match former {
            Some(found) if !is_same_value(value, found) => Err(Error::internal(format!(
                "Error: Tuning configured value of {key} is {value}, current value is {found}"
            ))
            .with_details(format!("{IN_CONTAINER}sysctl -w {key}={value}"))),
            _ => Ok(()),
        }
    }
}

/// Whether the kernel prints this value for the configured one: it separates numbers by tabs, and
/// prints them in decimal without leading zeros.
fn is_same_value(configured: &str, printed: &str) -> bool {
    let words = |text| str::split_whitespace(text).collect::<Vec<_>>();
    let (left, right) = (words(configured), words(printed));
    left.len() == right.len()
        && left
            .iter()
            .zip(&right)
            .all(|(l, r)| l == r || parse_number(l).is_some_and(|n| parse_number(r) == Some(n)))
}

/// A number as the kernel parses it: hexadecimal with the prefix `0x`, octal with a leading 0.
fn parse_number(text: &str) -> Option<i128> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let (digits, base) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&digits[2..], 16),
        [b'0', _, ..] => (&digits[1..], 8),
        _ => (digits, 10),
    };
    // The standard library's parser also accepts a sign.
    let is_plain = digits.bytes().all(|b| b.is_ascii_hexdigit());
    let number = i128::from_str_radix(digits, base).ok().filter(|_| is_plain)?;
    Some(if text.starts_with('-') { -number } else { number })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni::json::Json;

    fn eth0() -> InterfaceName {
        InterfaceName::parse("eth0").unwrap()
    }

    fn sysctls(text: &str) -> ConfiguredSysctls {
        Json::parse(text.as_bytes()).unwrap().decode().unwrap()
    }

    #[test]
    fn keys_are_read_as_by_the_reference_and_sysctl() {
        let dotted = InterfaceName::parse("eth0.100").unwrap();
        let of = |key: &str, ifname: &InterfaceName| candidate_paths(key, ifname).unwrap();
        assert_eq!(of("net.ipv4.ip_forward", &eth0()), ["net/ipv4/ip_forward"]);
        assert_eq!(of("net/ipv4/ip_forward", &eth0()), ["net/ipv4/ip_forward"]);
        assert_eq!(of("/net//ipv4/ip_forward/", &eth0()), ["net/ipv4/ip_forward"]);
        assert_eq!(
            of("net.ipv4.conf.IFNAME.arp_notify", &dotted)[0],
            "net/ipv4/conf/eth0.100/arp_notify"
        );
        assert_eq!(
            of("net/ipv4/conf/IFNAME/IFNAME", &eth0()),
            ["net/ipv4/conf/eth0/IFNAME"],
            "only the first is replaced"
        );
        for key in ["net/ipv4/conf/eth0.100/arp_notify", "net.ipv4.conf.eth0/100.arp_notify"] {
            assert_eq!(
                of(key, &eth0()),
                ["net/ipv4/conf/eth0/100/arp_notify", "net/ipv4/conf/eth0.100/arp_notify"]
            );
        }
        assert_eq!(of("net/ipv4/conf/all.arp_notify", &eth0())[0], "net/ipv4/conf/all/arp_notify");
    }

    #[test]
    fn keys_outside_of_net_are_refused() {
        for (key, shown) in [
            ("kernel.hostname", "kernel/hostname"),
            ("net", "net"),
            ("net.", "net/"),
            ("", ""),
            ("IFNAME.x", "eth0/x"),
            ("../net/x", "///net/x"),
        ] {
            let result = candidate_paths(key, &eth0());
            if key == "../net/x" {
                assert_eq!(result.unwrap(), ["net/x"]);
                continue;
            }
            let error = result.unwrap_err();
            assert_eq!(error.message(), format!("invalid net sysctl key: \"{shown}\""));
        }
        for key in ["net/../kernel/hostname", "net/ipv4/../../kernel/hostname", "net/./x"] {
            for path in candidate_paths(key, &eth0()).unwrap() {
                assert!(!path.split('/').any(|part| part.starts_with('.')), "{key}: {path}");
            }
        }
    }

    #[test]
    fn order_is_kept_and_arguments_override() {
        let conf = sysctls(r#"{"net.b":"1","net.a":"2","net.c":"3"}"#);
        let args = sysctls(r#"{"net.0":"5","net/a":"4"}"#);
        let all = conf.merge_parameters(&args, &eth0()).unwrap();
        let pairs: Vec<_> = all.iter().map(|p| (p.paths[0].as_str(), p.value.as_str())).collect();
        assert_eq!(pairs, [("net/b", "1"), ("net/a", "4"), ("net/c", "3"), ("net/0", "5")]);
    }

    #[test]
    fn duplicate_keys_are_refused_in_any_spelling() {
        for text in [
            r#"{"net.a":"1","net.a":"2"}"#,
            r#"{"net.a.b":"1","net/a/b":"1"}"#,
            r#"{"net.IFNAME":"1","net.eth0":"1"}"#,
        ] {
            let error =
                sysctls(text).merge_parameters(&ConfiguredSysctls::default(), &eth0()).unwrap_err();
            assert_eq!(error.message(), "duplicated sysctl keys are not allowed", "{text}");
        }
    }

    #[test]
    fn values_are_compared_as_the_kernel_prints_them() {
        assert!(is_same_value("1024 65000", "1024\t65000"));
        assert!(
            is_same_value("0x10", "16") && is_same_value("010", "8") && is_same_value("-1", "-1")
        );
        assert!(is_same_value(" cubic ", "cubic") && is_same_value("", ""));
        assert!(
            !is_same_value("1", "2") && !is_same_value("1", "1 2") && !is_same_value("1 2", "1")
        );
        assert!(!is_same_value("a", "A") && !is_same_value("+1", "1") && !is_same_value("-", "0"));
    }
}
