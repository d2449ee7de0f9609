//! The kernel parameters of a configuration: their keys, their files, writing and comparing them.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use crate::cni::IfName;
use crate::error::{Error, Result};
use crate::iface::verify::IN_CONTAINER;
use crate::sysctl;

/// What stands for the container's interface in a key.
const IFNAME: &str = "IFNAME";

/// The `sysctl` object: keys as they are written, in the order of the document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Sysctls(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Sysctls {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Sysctls, D::Error> {
        d.deserialize_map(InOrder)
    }
}

struct InOrder;

impl<'de> Visitor<'de> for InOrder {
    type Value = Sysctls;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Sysctls, A::Error> {
        let mut pairs = Vec::new();
        while let Some(pair) = map.next_entry()? {
            pairs.push(pair);
        }
        Ok(Sysctls(pairs))
    }
}

/// A parameter to be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parameter {
    /// The key as the configuration has it.
    pub(super) written: String,
    /// The paths that the key may mean, the likeliest first: see [`meanings`].
    pub(super) meanings: Vec<String>,
    pub(super) value: String,
}

impl Sysctls {
    /// The parameters in their order; parameters of `args` override, or come last. A parameter that is given twice
    /// is an error, in whatever spelling.
    pub(super) fn resolve(&self, args: &Sysctls, ifname: &IfName) -> Result<Vec<Parameter>> {
        let mut all = parameters(self, ifname)?;
        for parameter in parameters(args, ifname)? {
            match all.iter_mut().find(|known| known.meanings[0] == parameter.meanings[0]) {
                Some(known) => *known = parameter,
                None => all.push(parameter),
            }
        }
        Ok(all)
    }
}

fn parameters(sysctls: &Sysctls, ifname: &IfName) -> Result<Vec<Parameter>> {
    let mut all: Vec<Parameter> = Vec::with_capacity(sysctls.0.len());
    for (written, value) in &sysctls.0 {
        let (written, value) = (written.clone(), value.clone());
        let meanings = meanings(&written, ifname)?;
        if let Some(twin) = all.iter().find(|known| known.meanings[0] == meanings[0]) {
            return Err(Error::config("duplicated sysctl keys are not allowed")
                .with_details(format!("\"{}\" and \"{written}\"", twin.written)));
        }
        all.push(Parameter { written, meanings, value });
    }
    Ok(all)
}

/// The paths below `/proc/sys` that a key can mean. The reference makes every dot a slash. Where
/// that leads nowhere, because of a dot in the name of an interface, sysctl(8) is followed: the
/// first of the two separates, and the other one stands for itself.
fn meanings(written: &str, ifname: &IfName) -> Result<Vec<String>> {
    let separated = written.replace('.', "/");
    let by_sysctl = match written.find(['.', '/']) {
        Some(at) if written[at..].starts_with('.') => written
            .chars()
            .map(|c| match c {
                '.' => '/',
                '/' => '.',
                other => other,
            })
            .collect(),
        _ => written.to_owned(),
    };
    let mut paths = Vec::with_capacity(1);
    for text in [separated, by_sysctl] {
        let path = text.replacen(IFNAME, ifname.as_str(), 1);
        let segments: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let sound = segments.len() > 1
            && segments[0] == "net"
            && !segments.iter().any(|part| matches!(*part, "." | ".."));
        if !sound && paths.is_empty() {
            let msg = format!("invalid net sysctl key: \"{path}\"");
            return Err(Error::config(msg).with_details("only keys below \"net\" can be set"));
        }
        let path = segments.join("/");
        if sound && !paths.contains(&path) {
            paths.push(path);
        }
    }
    Ok(paths)
}

/// A parameter that is there, in the calling thread's namespace.
#[derive(Debug)]
pub(super) struct Found<'a> {
    pub(super) key: &'a str,
    value: &'a str,
    /// The value before; `None` if the parameter is write-only.
    former: Option<String>,
}

impl Parameter {
    /// Finds it among the calling thread's, and reads it.
    pub(super) fn find(&self) -> Result<Found<'_>> {
        let there = self.meanings.iter().find(|key| sysctl::exists(key));
        // Reading a parameter that does not exist is the error to be reported.
        let key = there.or(self.meanings.first()).map_or("", String::as_str);
        Ok(Found { key, value: &self.value, former: sysctl::read_if_readable(key)? })
    }
}

impl Found<'_> {
    pub(super) fn write(&self) -> Result<()> {
        sysctl::write(self.key, self.value)
    }

    /// Restores the original value, if it is known.
    pub(super) fn put_back(&self) -> Result<()> {
        match &self.former {
            Some(former) if sysctl::read(self.key)? != *former => sysctl::write(self.key, former),
            _ => Ok(()),
        }
    }

    /// It has the configured value.
    pub(super) fn verify(&self) -> Result<()> {
        match &self.former {
            Some(now) if !same_value(self.value, now) => {
                let (key, value) = (self.key, self.value);
                Err(Error::internal(format!(
                    "Error: Tuning configured value of {key} is {value}, current value is {now}"
                ))
                .with_details(format!("{IN_CONTAINER}sysctl -w {key}={value}")))
            }
            _ => Ok(()),
        }
    }
}

/// Whether the kernel prints what was written: it separates numbers by tabs, and prints those
/// that were written in another base or with zeros in front in its own way.
fn same_value(configured: &str, printed: &str) -> bool {
    let (mut left, mut right) = (configured.split_whitespace(), printed.split_whitespace());
    loop {
        match (left.next(), right.next()) {
            (None, None) => return true,
            (Some(l), Some(r)) if l == r || number(l).is_some_and(|n| number(r) == Some(n)) => {}
            _ => return false,
        }
    }
}

/// A number as the kernel reads it: `0x` is hexadecimal, a leading 0 octal.
fn number(text: &str) -> Option<i128> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text),
    };
    let (digits, base) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&digits[2..], 16),
        [b'0', _, ..] => (&digits[1..], 8),
        _ => (digits, 10),
    };
    let plain = digits.bytes().all(|b| b.is_ascii_hexdigit());
    i128::from_str_radix(digits, base).ok().filter(|_| plain).map(|n| sign * n)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::json::Json;

    fn eth0() -> IfName {
        IfName::parse("eth0").unwrap()
    }

    fn sysctls(text: &str) -> Sysctls {
        Json::parse(text.as_bytes()).unwrap().decode().unwrap()
    }

    #[test]
    fn keys_become_paths_as_in_the_reference_or_sysctl() {
        let dotted = IfName::parse("eth0.100").unwrap();
        let of = |key: &str, ifname: &IfName| meanings(key, ifname).unwrap();
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
    fn no_key_leads_out_of_net() {
        for (key, shown) in [
            ("kernel.hostname", "kernel/hostname"),
            ("net", "net"),
            ("net.", "net/"),
            ("", ""),
            ("IFNAME.x", "eth0/x"),
            ("../net/x", "///net/x"),
        ] {
            let result = meanings(key, &eth0());
            if key == "../net/x" {
                assert_eq!(result.unwrap(), ["net/x"]);
                continue;
            }
            let error = result.unwrap_err();
            assert_eq!(error.msg(), format!("invalid net sysctl key: \"{shown}\""));
        }
        for key in ["net/../kernel/hostname", "net/ipv4/../../kernel/hostname", "net/./x"] {
            for path in meanings(key, &eth0()).unwrap() {
                assert!(!path.split('/').any(|part| part.starts_with('.')), "{key}: {path}");
            }
        }
    }

    #[test]
    fn order_is_the_documents_and_arguments_override() {
        let conf = sysctls(r#"{"net.b":"1","net.a":"2","net.c":"3"}"#);
        let args = sysctls(r#"{"net.0":"5","net/a":"4"}"#);
        let all = conf.resolve(&args, &eth0()).unwrap();
        let pairs: Vec<_> =
            all.iter().map(|p| (p.meanings[0].as_str(), p.value.as_str())).collect();
        assert_eq!(pairs, [("net/b", "1"), ("net/a", "4"), ("net/c", "3"), ("net/0", "5")]);
    }

    #[test]
    fn the_same_key_twice_is_refused_however_it_is_written() {
        for text in [
            r#"{"net.a":"1","net.a":"2"}"#,
            r#"{"net.a.b":"1","net/a/b":"1"}"#,
            r#"{"net.IFNAME":"1","net.eth0":"1"}"#,
        ] {
            let error = sysctls(text).resolve(&Sysctls::default(), &eth0()).unwrap_err();
            assert_eq!(error.msg(), "duplicated sysctl keys are not allowed", "{text}");
        }
    }

    #[test]
    fn values_are_compared_as_the_kernel_prints_them() {
        assert!(same_value("1024 65000", "1024\t65000"));
        assert!(same_value("0x10", "16") && same_value("010", "8") && same_value("-1", "-1"));
        assert!(same_value(" cubic ", "cubic") && same_value("", ""));
        assert!(!same_value("1", "2") && !same_value("1", "1 2") && !same_value("1 2", "1"));
        assert!(!same_value("a", "A") && !same_value("+1", "1") && !same_value("-", "0"));
    }
}
