//! Names in egress policies: which names a policy allows, and with which services.
//!
//! An address to which an allowed name leads is allowed like a single address of `allow`, as long as
//! the resolver of the node says so ([`resolved`](super::resolved)). It never opens what is private
//! or special, the host, or other containers: a name's owner decides where the name leads.

use std::cmp::Reverse;
use std::net::IpAddr;

use super::compile::{ServiceRange, combine_services, merge_services};
use cni::error::{Error, Result};
use idna::punycode;

/// The maximum lengths of a name and of a label in it (RFC 1035, section 2.3.4).
const LONGEST_NAME: usize = 253;
const LONGEST_LABEL: usize = 63;

/// One name, or all names below one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePattern {
    /// In lower case, without the final dot.
    name: String,
    /// Written `*.name`: names below `name`, at any depth, and not `name` itself.
    is_wildcard: bool,
}

impl NamePattern {
    /// Whether a text that is no network is meant as a name.
    pub(super) fn is_meant(text: &str) -> bool {
        !text.contains(['/', ':'])
            && text.contains('.')
            && !text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
    }

    /// Parses `api.example.org` or `*.example.org`, in any case; letters beyond ASCII are encoded
    /// as in questions.
    pub(super) fn parse(text: &str) -> Result<NamePattern> {
        let labels: Option<Vec<String>> = text.split('.').map(encode_label).collect();
        let lower = labels.map(|labels| labels.join(".")).ok_or_else(|| {
            Error::config("a name with other characters than letters, digits and hyphens")
                .with_details("write the form that \"idn2 NAME\" prints, such as xn--mnchen-3ya.de")
        })?;
        let (is_wildcard, name) = match lower.strip_prefix("*.") {
            Some(below) => (true, below),
            None => (false, lower.as_str()),
        };
        let name = name.strip_suffix('.').unwrap_or(name);
        if name.contains('*') {
            return Err(Error::config("\"*\" is not at the beginning of the name").with_details(
                "write *.example.org for all names below example.org, or each name for itself",
            ));
        }
        if !(is_wildcard || name.contains('.'))
            || name.len() > LONGEST_NAME
            || !name.split('.').all(is_label)
        {
            return Err(Error::config("not a name").with_details(
                "a name has a dot, and labels of letters, digits and hyphens, of at most 63 \
                 characters each and 253 in all, like api.example.org",
            ));
        }
        Ok(NamePattern { name: name.to_owned(), is_wildcard })
    }

    /// Whether it is the name, or the name is below it; `name` is in lower case, without the final
    /// dot.
    pub fn matches(&self, name: &str) -> bool {
        match name.strip_suffix(&self.name) {
            Some("") => !self.is_wildcard,
            Some(before) => self.is_wildcard && before.ends_with('.'),
            None => false,
        }
    }
}

/// A label in lower case, and as Punycode if it has letters beyond ASCII (RFC 5890, section 2.3.2.1).
/// `None` for signs, marks and presentation forms, which only tables of Unicode normalize; of the
/// other letters that occur in names, the small one is the normalized one.
fn encode_label(label: &str) -> Option<String> {
    let lower: String = label.chars().flat_map(char::to_lowercase).collect();
    if lower.is_ascii() {
        return Some(lower);
    }
    let is_letter = |c: char| c.is_ascii() || c.is_alphabetic() && c < '\u{f900}';
    let encoded = lower.chars().all(is_letter).then(|| punycode::encode_str(&lower))??;
    Some(format!("xn--{encoded}"))
}

fn is_label(label: &str) -> bool {
    let is_known = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    !label.is_empty()
        && label.len() <= LONGEST_LABEL
        && label.bytes().all(is_known)
        && !label.starts_with('-')
        && !label.ends_with('-')
}

/// What one policy says about names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameTable {
    /// The names of `allow` with their services: a name before the patterns that match it, and of
    /// those the longest one first. The first that matches a name decides.
    entries: Vec<(NamePattern, Vec<ServiceRange>)>,
    /// The single addresses of `deny`, with their services: no name leads there.
    denied: Vec<(IpAddr, Vec<ServiceRange>)>,
    /// Whether the policy allows name service as such: then other names are answered, too, without
    /// opening anything.
    answers_all: bool,
}

impl NameTable {
    /// The services of each entry.
    pub(super) fn all_services(&self) -> impl Iterator<Item = &[ServiceRange]> {
        self.entries.iter().map(|(_, services)| services.as_slice())
    }

    /// The table of these entries, of which equal names may occur several times.
    pub(super) fn new(
        allowed: Vec<(NamePattern, Vec<ServiceRange>)>,
        denied: Vec<(IpAddr, Vec<ServiceRange>)>,
        answers_all: bool,
    ) -> NameTable {
        let mut entries: Vec<(NamePattern, Vec<ServiceRange>)> = Vec::new();
        for (pattern, services) in allowed {
            match entries.iter_mut().find(|(known, _)| *known == pattern) {
                Some((_, known)) => known.extend(services),
                None => entries.push((pattern, services)),
            }
        }
        for (_, services) in &mut entries {
            *services = merge_services(std::mem::take(services));
        }
        entries.retain(|(_, services)| !services.is_empty());
        entries.sort_by_key(|(pattern, _)| (pattern.is_wildcard, Reverse(pattern.name.len())));
        NameTable { entries, denied, answers_all }
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The services that are allowed where the name leads; `None` if the policy does not have it.
    pub(super) fn services_of(&self, name: &str) -> Option<&[ServiceRange]> {
        self.entry_of(name).map(|(_, services)| services)
    }

    /// The pattern that decides about the name, with its services.
    pub(super) fn entry_of(&self, name: &str) -> Option<(&NamePattern, &[ServiceRange])> {
        let entry = self.entries.iter().find(|(pattern, _)| pattern.matches(name));
        entry.map(|(pattern, services)| (pattern, services.as_slice()))
    }

    /// Whether containers with this policy get an answer about the name.
    pub(super) fn answers(&self, name: &str) -> bool {
        self.answers_all || self.services_of(name).is_some()
    }

    /// Whether `deny` has the address with one of these services.
    pub(super) fn denies(&self, addr: IpAddr, services: &[ServiceRange]) -> bool {
        self.denied.iter().any(|(denied, of)| {
            *denied == addr
                && !combine_services(of, services, |denied, wanted| denied && wanted).is_empty()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_the_names_below_them_are_told_apart() {
        let matches = |pattern: &str, name| NamePattern::parse(pattern).unwrap().matches(name);
        for (pattern, name, is_match) in [
            ("api.example.org", "api.example.org", true),
            ("API.Example.ORG.", "api.example.org", true),
            ("api.example.org", "xapi.example.org", false),
            ("api.example.org", "x.api.example.org", false),
            ("api.example.org", "example.org", false),
            ("*.example.org", "api.example.org", true),
            ("*.example.org", "a.b.example.org", true),
            ("*.example.org", "example.org", false),
            ("*.example.org", "badexample.org", false),
            ("*.internal", "db.internal", true),
            ("MÜNCHEN.de", "xn--mnchen-3ya.de", true),
            ("*.пример.рф", "api.xn--e1afmkfd.xn--p1ai", true),
            ("ΌΣΟΣ.gr", "xn--0xahb7a.gr", true),
            ("faß.de", "xn--fa-hia.de", true),
            ("例え.テスト", "xn--r8jz45g.xn--zckzah", true),
            ("\u{212a}elvin.org", "kelvin.org", true),
        ] {
            assert_eq!(matches(pattern, name), is_match, "{pattern} {name}");
        }
    }

    #[test]
    fn what_is_no_name_is_refused_with_a_remedy() {
        let long = format!("{}.org", "a".repeat(64));
        let longer = ["a".repeat(60).as_str(); 5].join(".");
        for text in [
            "mu\u{308}nchen.de",
            "ﬁx.org",
            "l·l.cat",
            "例え。テスト",
            "mün chen.de",
            "*ü.de",
            "*",
            "a.*.org",
            "*a.org",
            "-a.org",
            "a-.org",
            "a..org",
            "*.",
            ".org",
            "a b.org",
            &long,
            &longer,
        ] {
            let error = NamePattern::parse(text).unwrap_err();
            assert!(!error.details().is_empty(), "{text}");
        }
    }

    #[test]
    fn the_most_specific_pattern_decides() {
        let of = |ports: [u16; 1]| ports.map(|port| ServiceRange::of_port(6, port)).to_vec();
        let entry = |text, port| (NamePattern::parse(text).unwrap(), of([port]));
        let table = NameTable::new(
            vec![
                entry("*.org", 1),
                entry("*.example.org", 2),
                entry("api.example.org", 3),
                entry("api.example.org", 4),
            ],
            Vec::new(),
            false,
        );
        let services = |name| table.services_of(name).map(<[_]>::to_vec);
        assert_eq!(services("api.example.org"), Some(merge_services([of([3]), of([4])].concat())));
        assert_eq!(services("www.example.org"), Some(of([2])));
        assert_eq!(services("a.org"), Some(of([1])));
        assert_eq!(services("example.com"), None);
    }
}
