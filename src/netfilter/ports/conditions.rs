//! `conditionsV4` and `conditionsV6` with nftables: additional conditions of all mappings, in the syntax of nft.
//!
//! Supported are addresses and interfaces, each with `==`, `!=` or no operator, any number of them in sequence:
//!
//! ```text
//! ip saddr 192.0.2.0/24        ip daddr != 10.0.0.1        ip saddr { 10.0.0.0/8, 192.0.2.7 }
//! ip6 saddr 2001:db8::/32      iifname "eth0"
//! ```

use std::mem;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::cni::ip::host_net;
use crate::netfilter::backend::Family;
use crate::netlink::nftables::{Field, Rule};

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

/// Parses the conditions of a family into alternatives: a mapping applies if one of these rules matches, or if there
/// is none. Lists multiply the alternatives, of which at most `most` are accepted. A word may consist of several
/// words of nft, as in `["ip saddr 10.0.0.1"]`.
pub fn parse(family: Family, words: &[String], most: usize) -> Result<Vec<Rule>, Refusal> {
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
        // One value of a list has to match; if the list is negated, none may match.
        let choices: Vec<&[&str]> = if not { vec![&values] } else { values.chunks(1).collect() };
        if all.is_empty() {
            all.push(Rule::new());
        }
        if values.is_empty() {
            return Err(word.into());
        } else if all.len().saturating_mul(choices.len()) > most {
            return Err(Refusal::TooMany);
        }
        for rule in mem::take(&mut all) {
            for choice in &choices {
                let add = |rule, value: &&str| with(rule, family, field, not, value);
                all.push(choice.iter().try_fold(rule.clone(), add)?);
            }
        }
    }
    Ok(all)
}

/// Adds a condition to a rule.
fn with(rule: Rule, family: Family, field: &str, not: bool, value: &str) -> Result<Rule, Refusal> {
    if field == "iifname" {
        let name = value.trim_matches('"');
        return match not {
            _ if name.is_empty() || name.len() > 15 || name.contains('*') => Err(value.into()),
            true => Ok(rule.ne(Field::Iifname, name)),
            false => Ok(rule.eq(Field::Iifname, name)),
        };
    }
    let addr = || value.parse::<IpAddr>().map(host_net);
    let net = value.parse::<IpNet>().map(|net| net.trunc()).or_else(|_| addr());
    let net = net.ok().filter(|net| Family::of(net.addr()) == family);
    let net = net.ok_or_else(|| Refusal::from(value))?;
    match (field, not) {
        ("saddr", false) => Ok(rule.saddr_in(net)),
        ("saddr", true) => Ok(rule.saddr_not_in(net)),
        ("daddr", false) => Ok(rule.daddr_in(net)),
        ("daddr", true) => Ok(rule.daddr_not_in(net)),
        _ => Err(field.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(words: &[&str]) -> Result<Vec<Rule>, Refusal> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        parse(Family::V4, &words, 8)
    }

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn conditions_in_sequence_form_one_rule() {
        let one = Rule::new().saddr_not_in(net("10.1.2.0/24")).eq(Field::Iifname, "eth0");
        let one = one.daddr_in(net("192.0.2.1/32"));
        let words =
            ["ip", "saddr", "!=", "10.1.2.3/24", "iifname", "\"eth0\"", "ip daddr 192.0.2.1"];
        assert_eq!(v4(&words), Ok(vec![one]));
        assert_eq!(v4(&[]), Ok(vec![]));
    }

    #[test]
    fn lists_are_alternatives_unless_negated() {
        let (a, b) = (net("10.0.0.0/8"), net("192.0.2.7/32"));
        let words = ["iifname eth0", "ip saddr { 10.0.0.0/8, 192.0.2.7 }"];
        let each = [a, b].map(|net| Rule::new().eq(Field::Iifname, "eth0").saddr_in(net));
        assert_eq!(v4(&words), Ok(each.to_vec()));
        let words = ["ip", "saddr", "!=", "{", "10.0.0.0/8", ",192.0.2.7", "}"];
        assert_eq!(v4(&words), Ok(vec![Rule::new().saddr_not_in(a).saddr_not_in(b)]));
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
