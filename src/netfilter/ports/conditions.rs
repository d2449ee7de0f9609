//! `conditionsV4` and `conditionsV6` with nftables: additional conditions of all mappings, in the
//! syntax of nft.
//!
//! Supported are addresses and interfaces, each with `==`, `!=` or no operator, any number of them
//! in sequence:
//!
//! ```text
//! ip saddr 192.0.2.0/24        ip daddr != 10.0.0.1        ip saddr { 10.0.0.0/8, 192.0.2.7 }
//! ip6 saddr 2001:db8::/32      iifname "eth0"
//! ```

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::netfilter::backend::IpFamily;
use crate::netlink::nftables::{NftRule, PacketField};
use cni::ip::host_net;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum MappingCondition {
    Source(IpNet),
    NotSource(IpNet),
    Destination(IpNet),
    NotDestination(IpNet),
    Interface(String),
    NotInterface(String),
}

impl MappingCondition {
    fn add_to_rule(&self, rule: NftRule) -> NftRule {
        match self {
            MappingCondition::Source(net) => rule.saddr_in(*net),
            MappingCondition::NotSource(net) => rule.saddr_not_in(*net),
            MappingCondition::Destination(net) => rule.daddr_in(*net),
            MappingCondition::NotDestination(net) => rule.daddr_not_in(*net),
            MappingCondition::Interface(name) => {
                rule.match_equal(PacketField::Iifname, name.as_str())
            }
            MappingCondition::NotInterface(name) => {
                rule.match_unequal(PacketField::Iifname, name.as_str())
            }
        }
    }
}

/// The alternatives for each family: a mapping applies if all conditions of one alternative match,
/// or if there is no alternative.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MappingConditions {
    v4: Vec<Vec<MappingCondition>>,
    v6: Vec<Vec<MappingCondition>>,
}

/// Why conditions are refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConditionRefusal {
    /// This word is not supported.
    Word(String),
    /// There are too many alternatives.
    TooMany,
}

impl From<&str> for ConditionRefusal {
    fn from(word: &str) -> ConditionRefusal {
        ConditionRefusal::Word(word.to_owned())
    }
}

impl MappingConditions {
    /// Parses the words for both families, with at most `most` alternatives each, which lists
    /// multiply.
    pub fn parse(
        v4: &[String],
        v6: &[String],
        most: usize,
    ) -> Result<MappingConditions, (IpFamily, ConditionRefusal)> {
        let of = |family, words| parse_conditions(family, words, most).map_err(|why| (family, why));
        Ok(MappingConditions { v4: of(IpFamily::V4, v4)?, v6: of(IpFamily::V6, v6)? })
    }

    pub(super) fn has_conditions_for(&self, family: IpFamily) -> bool {
        !self.alternatives_of(family).is_empty()
    }

    fn alternatives_of(&self, family: IpFamily) -> &[Vec<MappingCondition>] {
        if family == IpFamily::V4 { &self.v4 } else { &self.v6 }
    }

    /// The beginning of a rule for each alternative.
    pub(super) fn rule_beginnings(&self, family: IpFamily) -> Vec<NftRule> {
        self.alternatives_of(family)
            .iter()
            .map(|alternative| {
                alternative
                    .iter()
                    .fold(NftRule::new(), |rule, condition| condition.add_to_rule(rule))
            })
            .collect()
    }
}

/// Parses the conditions of a family. A word may consist of several words of nft, as in `["ip saddr
/// 10.0.0.1"]`.
fn parse_conditions(
    family: IpFamily,
    words: &[String],
    most: usize,
) -> Result<Vec<Vec<MappingCondition>>, ConditionRefusal> {
    let text = words.join(" ").replace('{', " { ").replace('}', " } ").replace(',', " ");
    let mut tokens = text.split_whitespace();
    let mut all = Vec::new();
    while let Some(word) = tokens.next() {
        let field = match (word, family) {
            ("ip", IpFamily::V4) | ("ip6", IpFamily::V6) => tokens.next().unwrap_or(word),
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
        let parsed = values.into_iter().map(|value| parse_condition(family, field, not, value));
        let parsed: Vec<_> = parsed.collect::<Result<_, _>>()?;
        // One value of a list has to match; if the list is negated, none may match.
        let choices: Vec<_> = if not { vec![&*parsed] } else { parsed.chunks(1).collect() };
        if all.is_empty() {
            all.push(Vec::new());
        }
        if all.len().saturating_mul(choices.len()) > most {
            return Err(ConditionRefusal::TooMany);
        }
        all = all
            .into_iter()
            .flat_map(|known| -> Vec<_> {
                choices.iter().map(|choice| [&known, *choice].concat()).collect()
            })
            .collect();
    }
    Ok(all)
}

fn parse_condition(
    family: IpFamily,
    field: &str,
    not: bool,
    value: &str,
) -> Result<MappingCondition, ConditionRefusal> {
    if field == "iifname" {
        let name = value.trim_matches('"').to_owned();
        return match not {
            _ if name.is_empty() || name.len() > 15 || name.contains('*') => Err(value.into()),
            true => Ok(MappingCondition::NotInterface(name)),
            false => Ok(MappingCondition::Interface(name)),
        };
    }
    let net = value
        .parse::<IpNet>()
        .map(|net| net.trunc())
        .or_else(|_| value.parse::<IpAddr>().map(host_net));
    let net = net.ok().filter(|net| IpFamily::of_address(net.addr()) == family);
    let net = net.ok_or_else(|| ConditionRefusal::from(value))?;
    match (field, not) {
        ("saddr", false) => Ok(MappingCondition::Source(net)),
        ("saddr", true) => Ok(MappingCondition::NotSource(net)),
        ("daddr", false) => Ok(MappingCondition::Destination(net)),
        ("daddr", true) => Ok(MappingCondition::NotDestination(net)),
        _ => Err(field.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(words: &[&str]) -> Result<Vec<Vec<MappingCondition>>, ConditionRefusal> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        parse_conditions(IpFamily::V4, &words, 8)
    }

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn conditions_in_sequence_form_one_rule() {
        let one = vec![
            MappingCondition::NotSource(net("10.1.2.0/24")),
            MappingCondition::Interface("eth0".to_owned()),
            MappingCondition::Destination(net("192.0.2.1/32")),
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
        let eth0 = MappingCondition::Interface("eth0".to_owned());
        let each = [a, b].map(|net| vec![eth0.clone(), MappingCondition::Source(net)]);
        assert_eq!(v4(&words), Ok(each.to_vec()));
        let words = ["ip", "saddr", "!=", "{", "10.0.0.0/8", ",192.0.2.7", "}"];
        assert_eq!(v4(&words), Ok(vec![[a, b].map(MappingCondition::NotSource).to_vec()]));
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
        assert_eq!(v4(&[two; 4]), Err(ConditionRefusal::TooMany));
        let excluded = "ip saddr != { 10.0.0.0/8, 192.0.2.7 }";
        assert_eq!(v4(&[excluded; 9]).unwrap().len(), 1);
    }
}
