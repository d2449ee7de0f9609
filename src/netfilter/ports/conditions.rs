//! `conditionsV4` and `conditionsV6` with nftables: additional conditions of all mappings, in the syntax of nft.
//!
//! Supported are addresses and interfaces, each with `==`, `!=` or no operator, any number of them in sequence:
//!
//! ```text
//! ip saddr 192.0.2.0/24        ip daddr != 10.0.0.1        ip saddr { 10.0.0.0/8, 192.0.2.7 }
//! ip6 saddr 2001:db8::/32      iifname "eth0"
//! ```

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::cni::ip::host_net;
use crate::netfilter::backend::Family;
use crate::netlink::nftables::{Field, Rule};

/// A condition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Condition {
    Source(IpNet),
    NotSource(IpNet),
    Destination(IpNet),
    NotDestination(IpNet),
    Interface(String),
    NotInterface(String),
}

impl Condition {
    fn add_to(&self, rule: Rule) -> Rule {
        match self {
            Condition::Source(net) => rule.saddr_in(*net),
            Condition::NotSource(net) => rule.saddr_not_in(*net),
            Condition::Destination(net) => rule.daddr_in(*net),
            Condition::NotDestination(net) => rule.daddr_not_in(*net),
            Condition::Interface(name) => rule.eq(Field::Iifname, name.as_str()),
            Condition::NotInterface(name) => rule.ne(Field::Iifname, name.as_str()),
        }
    }
}

/// The alternatives for each family: a mapping applies if all conditions of one of them match, or if there is none.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    v4: Vec<Vec<Condition>>,
    v6: Vec<Vec<Condition>>,
}

/// Why conditions are refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// This word is not supported.
    Word(String),
    /// There are too many alternatives.
    TooMany,
}

impl From<&str> for Refusal {
    fn from(word: &str) -> Refusal {
        Refusal::Word(word.to_owned())
    }
}

impl Conditions {
    /// Parses the words for both families, with at most `most` alternatives each, which lists multiply.
    pub fn parse(
        v4: &[String],
        v6: &[String],
        most: usize,
    ) -> Result<Conditions, (Family, Refusal)> {
        let of = |family, words| parse(family, words, most).map_err(|why| (family, why));
        Ok(Conditions { v4: of(Family::V4, v4)?, v6: of(Family::V6, v6)? })
    }

    /// Whether mappings of the family have conditions.
    pub(super) fn are_for(&self, family: Family) -> bool {
        !self.of(family).is_empty()
    }

    fn of(&self, family: Family) -> &[Vec<Condition>] {
        if family == Family::V4 { &self.v4 } else { &self.v6 }
    }

    /// The beginning of a rule for each alternative.
    pub(super) fn rules(&self, family: Family) -> Vec<Rule> {
        let rule = |alternative: &Vec<Condition>| {
            alternative.iter().fold(Rule::new(), |rule, condition| condition.add_to(rule))
        };
        self.of(family).iter().map(rule).collect()
    }
}

/// Parses the conditions of a family. A word may consist of several words of nft, as in `["ip saddr 10.0.0.1"]`.
fn parse(family: Family, words: &[String], most: usize) -> Result<Vec<Vec<Condition>>, Refusal> {
    let text = words.join(" ").replace('{', " { ").replace('}', " } ").replace(',', " ");
    let mut tokens = text.split_whitespace();
    let mut all = Vec::new();
    while let Some(word) = tokens.next() {
        let field = match (word, family) {
            ("ip", Family::V4) | ("ip6", Family::V6) => tokens.next().unwrap_or(word),
            ("iifname", _) => word,
            _ => return Err(word.into()),
        };
        let mut value = tokens.next().ok_or(word)?;
        let not = matches!(value, "!=" | "ne");
        if matches!(value, "==" | "eq" | "!=" | "ne") {
            value = tokens.next().ok_or(word)?;
        }
        let mut values = vec![value];
        if value == "{" {
            values = tokens.by_ref().take_while(|token| *token != "}").collect();
        }
        if values.is_empty() {
            return Err(word.into());
        }
        let parsed = values.into_iter().map(|value| condition(family, field, not, value));
        let parsed: Vec<_> = parsed.collect::<Result<_, _>>()?;
        // One value of a list has to match; if the list is negated, none may match.
        let choices: Vec<_> = if not { vec![&*parsed] } else { parsed.chunks(1).collect() };
        if all.is_empty() {
            all.push(Vec::new());
        }
        if all.len().saturating_mul(choices.len()) > most {
            return Err(Refusal::TooMany);
        }
        let extend = |known: Vec<Condition>| -> Vec<_> {
            choices.iter().map(|choice| [&known, *choice].concat()).collect()
        };
        all = all.into_iter().flat_map(extend).collect();
    }
    Ok(all)
}

fn condition(family: Family, field: &str, not: bool, value: &str) -> Result<Condition, Refusal> {
    if field == "iifname" {
        let name = value.trim_matches('"').to_owned();
        return match not {
            _ if name.is_empty() || name.len() > 15 || name.contains('*') => Err(value.into()),
            true => Ok(Condition::NotInterface(name)),
            false => Ok(Condition::Interface(name)),
        };
    }
    let addr = || value.parse::<IpAddr>().map(host_net);
    let net = value.parse::<IpNet>().map(|net| net.trunc()).or_else(|_| addr());
    let net = net.ok().filter(|net| Family::of(net.addr()) == family);
    let net = net.ok_or_else(|| Refusal::from(value))?;
    match (field, not) {
        ("saddr", false) => Ok(Condition::Source(net)),
        ("saddr", true) => Ok(Condition::NotSource(net)),
        ("daddr", false) => Ok(Condition::Destination(net)),
        ("daddr", true) => Ok(Condition::NotDestination(net)),
        _ => Err(field.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(words: &[&str]) -> Result<Vec<Vec<Condition>>, Refusal> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        parse(Family::V4, &words, 8)
    }

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn conditions_in_sequence_form_one_rule() {
        let one = vec![
            Condition::NotSource(net("10.1.2.0/24")),
            Condition::Interface("eth0".to_owned()),
            Condition::Destination(net("192.0.2.1/32")),
        ];
        let words =
            ["ip", "saddr", "!=", "10.1.2.3/24", "iifname", "\"eth0\"", "ip daddr 192.0.2.1"];
        assert_eq!(v4(&words), Ok(vec![one]));
        assert_eq!(v4(&[]), Ok(vec![]));
    }

    #[test]
    fn lists_are_alternatives_unless_negated() {
        let (a, b) = (net("10.0.0.0/8"), net("192.0.2.7/32"));
        let words = ["iifname eth0", "ip saddr { 10.0.0.0/8, 192.0.2.7 }"];
        let eth0 = Condition::Interface("eth0".to_owned());
        let each = [a, b].map(|net| vec![eth0.clone(), Condition::Source(net)]);
        assert_eq!(v4(&words), Ok(each.to_vec()));
        let words = ["ip", "saddr", "!=", "{", "10.0.0.0/8", ",192.0.2.7", "}"];
        assert_eq!(v4(&words), Ok(vec![[a, b].map(Condition::NotSource).to_vec()]));
    }

    #[test]
    fn unsupported_words_are_named() {
        for (words, word) in [
            ("tcp dport 80", "tcp"),
            ("ip protocol tcp", "tcp"),
            ("ip6 saddr ::1", "ip6"),
            ("ip saddr ::1", "::1"),
            ("ip ttl 10.0.0.1", "ttl"),
            ("iifname eth*", "eth*"),
            ("ip saddr", "ip"),
            ("ip saddr { }", "ip"),
        ] {
            assert_eq!(v4(&[words]), Err(word.into()), "{words}");
        }
    }

    #[test]
    fn the_number_of_alternatives_is_limited() {
        let two = "ip saddr { 10.0.0.0/8, 192.0.2.7 }";
        assert_eq!(v4(&[two; 3]).unwrap().len(), 8);
        assert_eq!(v4(&[two; 4]), Err(Refusal::TooMany));
        let excluded = "ip saddr != { 10.0.0.0/8, 192.0.2.7 }";
        assert_eq!(v4(&[excluded; 9]).unwrap().len(), 1);
    }
}
