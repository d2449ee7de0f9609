//! Rules as iptables on top of `nf_tables` stores them, from and to the words of iptables-save.
//!
//! | words | expressions |
//! | --- | --- |
//! | `-s`, `-d`, `-i`, `-o`, `-p` | `payload` or `meta`, `bitwise` for a prefix, `cmp` |
//! | `-m` | `match` of `nft_compat`; releases since 1.8.8 write ports and marks as `payload` and `meta` |
//! | `-j ACCEPT`, `DROP`, `RETURN`, a chain | `immediate` with a verdict |
//! | `-j` of another target | `target` of `nft_compat` |
//!
//! Every release of iptables prints what is written here, so a prefix is always a `bitwise`, and a
//! port a `match`. Both forms are read.

use std::net::IpAddr;

use ipnet::IpNet;

use super::extensions::{IptablesMatch, IptablesTarget};
use super::table::require_interface_name;
use crate::netlink::IpFamily;
use crate::netlink::nftables::{
    LoadedField, NftRule, PacketField, RuleExpression, TransportProtocol,
};
use cni::ip::host_net;

/// The word that stands for expressions which are not decoded. No rule of this program contains it,
/// so a rule with such expressions never counts as one of ours.
const OTHER: &str = "(other)";

/// A value, and whether packets match if they have this value (true) or another one (false).
type NegatableValue<T> = Option<(bool, T)>;

/// A rule between words and expressions.
#[derive(Debug, Default, PartialEq, Eq)]
struct DecodedRule {
    from: NegatableValue<IpNet>,
    to: NegatableValue<IpNet>,
    iif: NegatableValue<String>,
    oif: NegatableValue<String>,
    proto: Option<TransportProtocol>,
    matches: Vec<IptablesMatch>,
    target: Option<IptablesTarget>,
}

/// The rule with these words; `None` if a word has no expression here, or iptables may refuse the
/// words. An administrator has written some of them.
pub(super) fn encode_rule(words: &[String], family: IpFamily) -> Option<NftRule> {
    let DecodedRule { from, to, iif, oif, proto, matches, target } = parse_words(words, family)?;
    let mut rule = NftRule::new();
    for (field, condition) in [(PacketField::Iifname, iif), (PacketField::Oifname, oif)] {
        if let Some((is_equal, name)) = condition {
            rule = rule.match_interface(field, is_equal, &name);
        }
    }
    if let Some(proto) = proto {
        rule = rule.match_equal(PacketField::L4proto, proto);
    }
    if let Some((is_equal, net)) = from {
        rule = if is_equal { rule.saddr_in(net) } else { rule.saddr_not_in(net) };
    }
    if let Some((is_equal, net)) = to {
        rule = if is_equal { rule.daddr_in(net) } else { rule.daddr_not_in(net) };
    }
    for one in &matches {
        rule = rule.with_match(&one.to_extension(), proto);
    }
    rule = rule.count_packets();
    Some(match target {
        None => rule,
        Some(IptablesTarget::Verdict(verdict)) => rule.with_verdict(&verdict),
        Some(target) => rule.with_target(&target.to_extension(family)?),
    })
}

/// The words of a rule with these expressions.
pub(super) fn decode_rule(expressions: &[RuleExpression], family: IpFamily) -> Vec<String> {
    let mut rule = DecodedRule::default();
    let (mut field, mut mask) = (None, None);
    let mut is_known = true;
    for expression in expressions {
        is_known &= match expression {
            RuleExpression::Load(loaded) => {
                (field, mask) = (Some(*loaded), None);
                true
            }
            RuleExpression::Bitwise { mask: bits, xor } => {
                mask = Some(bits.clone());
                xor.iter().all(|byte| *byte == 0)
            }
            RuleExpression::Compare { is_equal, value } => field
                .and_then(|field| {
                    rule.add_condition(family, field, mask.as_deref(), *is_equal, value)
                })
                .is_some(),
            RuleExpression::Match(extension) => {
                let decoded = IptablesMatch::from_extension(extension, rule.proto);
                let is_decoded = decoded.is_some();
                rule.matches.extend(decoded);
                is_decoded
            }
            RuleExpression::Target(extension) => {
                rule.target = IptablesTarget::from_extension(extension, family);
                rule.target.is_some()
            }
            RuleExpression::Counter => true,
            RuleExpression::Verdict(verdict) => {
                rule.target = Some(IptablesTarget::Verdict(verdict.clone()));
                true
            }
            RuleExpression::Other => false,
        };
    }
    let mut words = rule.to_words();
    if !is_known {
        words.insert(0, OTHER.to_owned());
    }
    words
}

impl DecodedRule {
    /// Adds the condition that a field, after a mask, has or does not have this value.
    fn add_condition(
        &mut self,
        family: IpFamily,
        field: LoadedField,
        mask: Option<&[u8]>,
        is_equal: bool,
        value: &[u8],
    ) -> Option<()> {
        let name = || Some((is_equal, decode_interface(value)?));
        match field {
            LoadedField::Iifname => self.iif = Some(name()?),
            LoadedField::Oifname => self.oif = Some(name()?),
            LoadedField::L4proto => {
                self.proto = Some(TransportProtocol::from(*value.first().filter(|_| is_equal)?));
            }
            LoadedField::Source { .. } => {
                self.from = Some((is_equal, decode_prefix(family, value, mask)?));
            }
            LoadedField::Destination { .. } => {
                self.to = Some((is_equal, decode_prefix(family, value, mask)?));
            }
            LoadedField::Dport => {
                let port = value.try_into().ok().map(u16::from_be_bytes).filter(|_| is_equal)?;
                self.matches.push(IptablesMatch::Dport(self.proto?, port));
            }
            LoadedField::Mark => {
                let word = |bytes: &[u8]| bytes.try_into().ok().map(u32::from_ne_bytes);
                let mask = mask.map_or(Some(u32::MAX), word)?;
                let value = word(value).filter(|_| is_equal)?;
                self.matches.push(IptablesMatch::Mark { value, mask });
            }
        }
        Some(())
    }

    fn to_words(&self) -> Vec<String> {
        let mut words = Vec::new();
        let mut condition = |option: &str, condition: NegatableValue<String>| {
            if let Some((is_equal, value)) = condition {
                words.extend((!is_equal).then(|| "!".to_owned()));
                words.extend([option.to_owned(), value]);
            }
        };
        let text =
            |net: &NegatableValue<IpNet>| net.map(|(is_equal, net)| (is_equal, net.to_string()));
        condition("-s", text(&self.from));
        condition("-d", text(&self.to));
        condition("-i", self.iif.clone());
        condition("-o", self.oif.clone());
        condition("-p", self.proto.map(|proto| (true, proto.to_string())));
        words.extend(self.matches.iter().flat_map(IptablesMatch::to_words));
        words.extend(self.target.iter().flat_map(IptablesTarget::to_words));
        words
    }
}

/// The name of an interface as iptables prints it: a `+` stands for the rest of a name without its
/// NUL.
fn decode_interface(value: &[u8]) -> Option<String> {
    let end = value.iter().position(|byte| *byte == 0);
    let name = str::from_utf8(&value[..end.unwrap_or(value.len())]).ok()?;
    Some(if end.is_none() { format!("{name}+") } else { name.to_owned() })
}

/// A prefix by the leading bytes of its address, which have the prefix length if there is no mask.
fn decode_prefix(family: IpFamily, value: &[u8], mask: Option<&[u8]>) -> Option<IpNet> {
    let addr = |bytes: &[u8]| {
        let mut all = [0; 16];
        all.get_mut(..bytes.len())?.copy_from_slice(bytes);
        let v4: [u8; 4] = all[..4].try_into().ok()?;
        Some(if family == IpFamily::V4 { IpAddr::from(v4) } else { IpAddr::from(all) })
    };
    let whole = vec![0xff; value.len()];
    IpNet::with_netmask(addr(value)?, addr(mask.unwrap_or(&whole))?).ok()
}

/// Reads words that iptables reads in the same way: each option once, and addresses of the family.
fn parse_words(words: &[String], family: IpFamily) -> Option<DecodedRule> {
    let mut rule = DecodedRule::default();
    let mut words = words.iter().map(String::as_str);
    while let Some(first) = words.next() {
        let is_equal = first != "!";
        let word = if is_equal { first } else { words.next()? };
        let value = words.next()?;
        match word {
            "-s" => set_once(&mut rule.from, (is_equal, parse_prefix(value, family)?))?,
            "-d" => set_once(&mut rule.to, (is_equal, parse_prefix(value, family)?))?,
            "-i" => set_once(&mut rule.iif, (is_equal, parse_interface(value)?))?,
            "-o" => set_once(&mut rule.oif, (is_equal, parse_interface(value)?))?,
            _ if !is_equal => return None,
            "-p" => {
                let known =
                    [TransportProtocol::Tcp, TransportProtocol::Udp, TransportProtocol::Sctp];
                let proto = known.into_iter().find(|l4| l4.to_string() == value)?;
                set_once(&mut rule.proto, proto)?;
            }
            "-m" => {
                let (option, argument) = (words.next()?, words.next()?);
                rule.matches
                    .push(IptablesMatch::parse_option(value, option, argument, rule.proto)?);
            }
            "-j" => {
                let rest: Vec<&str> = words.by_ref().collect();
                rule.target = Some(IptablesTarget::parse_words(value, &rest)?);
            }
            _ => return None,
        }
    }
    Some(rule)
}

/// `None` if the option was there before.
fn set_once<T>(option: &mut Option<T>, value: T) -> Option<()> {
    option.replace(value).is_none().then_some(())
}

/// Parses a prefix; `None` for the prefix of all addresses, for which iptables writes nothing, and
/// for one of the other family.
fn parse_prefix(text: &str, family: IpFamily) -> Option<IpNet> {
    text.parse::<IpNet>()
        .ok()
        .or_else(|| text.parse().ok().map(host_net))
        .filter(|net| net.prefix_len() != 0 && IpFamily::of_address(net.addr()) == family)
}

fn parse_interface(text: &str) -> Option<String> {
    require_interface_name("", text).ok().map(|()| text.to_owned())
}

#[cfg(test)]
mod tests {
    use crate::netlink::nftables::PacketVerdict;

    use super::*;

    fn split(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn words_round_trip() {
        for line in [
            "-s 10.1.2.4/32 -m comment --comment c -j CNI-X",
            "! -d 224.0.0.0/4 -m comment --comment c -j MASQUERADE",
            "-d 2001:db8::/64 -j ACCEPT",
            "-i br0 ! -o br0 -j RETURN",
            "-d 192.0.2.1/32 -p udp -m multiport --dports 53,80 -j CNI-DN-1",
            "-s 10.1.2.0/24 -p sctp -m sctp --dport 8080 -j CNI-HOSTPORT-SETMARK",
            "-p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.1.2.4:80",
            "-j DNAT --to-destination [2001:db8::4]:80",
            "-d 10.1.2.4/32 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
            "-m conntrack --ctstate DNAT -j ACCEPT",
            "-m mark --mark 0x2000/0x2000 -j MASQUERADE",
            "-j MARK --set-xmark 0x2000/0x2000",
            "-m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT",
            "-m comment --comment if",
        ] {
            let family = if line.contains("2001:") { IpFamily::V6 } else { IpFamily::V4 };
            assert_eq!(parse_words(&split(line), family).expect(line).to_words(), split(line));
        }
    }

    #[test]
    fn unknown_words_are_not_encoded() {
        for line in [
            "-s 10.0.0.0/0 -j X",
            "-i br+ -j X",
            "! -p tcp -j X",
            "-p icmp -j X",
            "-m limit --limit 3/min -j X",
            "-j REJECT",
            "-j DNAT --to-destination 10.1.2.3",
            "-j",
            // iptables refuses these.
            "-s 2001:db8::/64 -j X",
            "! -d 2001:db8::1 -j X",
            "! -s 198.51.100.0/24 ! -s 192.0.2.0/24 -j X",
            "-s 198.51.100.0/24 -d 192.0.2.1 -s 192.0.2.2 -j X",
            "-i br0 -i br1 -j X",
            "! ! -i br0 -j X",
            "-p tcp -p udp -j X",
            "-i  -j X",
            "-o sixteen_bytes_xx -j X",
            "-s 10.0.0.1 !",
            "-6 -j X",
        ] {
            assert_eq!(encode_rule(&split(line), IpFamily::V4), None, "{line}");
        }
        assert_eq!(
            encode_rule(&split("-j DNAT --to-destination [fd00::1]:80"), IpFamily::V4),
            None
        );
    }

    #[test]
    fn rules_that_cannot_be_decoded_are_not_own_rules() {
        let expressions =
            [RuleExpression::Other, RuleExpression::Verdict(PacketVerdict::jump_to("CNI-X"))];
        let words = decode_rule(&expressions, IpFamily::V4);
        assert_eq!(words, split("(other) -j CNI-X"));
        assert_eq!(encode_rule(&words, IpFamily::V4), None);
    }

    #[test]
    fn prefixes_are_read_in_both_forms() {
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        for (value, mask, family, expected) in [
            (&[10, 1, 2][..], None, IpFamily::V4, "10.1.2.0/24"),
            (&[224, 0, 0, 0], Some(&[240, 0, 0, 0][..]), IpFamily::V4, "224.0.0.0/4"),
            (&[0xff], None, IpFamily::V6, "ff00::/8"),
            (&[10, 1, 2, 4], None, IpFamily::V4, "10.1.2.4/32"),
        ] {
            assert_eq!(decode_prefix(family, value, mask), Some(net(expected)));
        }
        assert_eq!(decode_prefix(IpFamily::V4, &[1, 2, 3, 4], Some(&[255, 0, 255, 0])), None);
    }
}
