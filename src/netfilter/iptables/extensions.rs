//! The matches and targets of iptables: words, and the structures of `linux/netfilter/xt_*.h`, which `nft_compat` passes to the
//! extensions of the kernel.

use std::net::{IpAddr, SocketAddr};

use crate::netlink::Family;
use crate::netlink::nftables::{Extension, L4, Verdict};

/// The verdict of another program that iptables has no word for.
const OTHER: &str = "(other)";

/// The maximum number of ports in a rule: `XT_MULTI_PORTS`.
const MULTIPORT: usize = 15;
/// The maximum length of a comment with its NUL: `XT_MAX_COMMENT_LEN`.
const COMMENT: usize = 256;
/// `XT_MULTIPORT_DESTINATION`
const DESTINATION: u8 = 1;
/// `1 << RTN_LOCAL`, in `struct xt_addrtype_info_v1`.
const TO_LOCAL: u16 = 1 << 2;
/// `XT_CONNTRACK_STATE`
const BY_STATE: u16 = 1;
/// The states of connections in the order of iptables-save: `XT_CONNTRACK_STATE_*`.
const STATES: [(&str, u16); 7] = [
    ("INVALID", 1),
    ("NEW", 8),
    ("RELATED", 4),
    ("ESTABLISHED", 2),
    ("UNTRACKED", 256),
    ("SNAT", 64),
    ("DNAT", 128),
];
/// The offset of `match_flags` in `struct xt_conntrack_mtinfo3`, after addresses, times, protocol and ports.
const CONNTRACK_FLAGS: usize = 128 + 8 + 10;
/// `NF_NAT_RANGE_MAP_IPS | NF_NAT_RANGE_PROTO_SPECIFIED`
const TO_ADDRESS_AND_PORT: u32 = 1 | 2;

/// A match of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Match {
    Comment(String),
    Dports(Vec<u16>),
    ToLocal,
    State(u16),
    Mark { value: u32, mask: u32 },
    Dport(L4, u16),
}

/// What a rule does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Verdict(Verdict),
    Masquerade,
    Dnat(SocketAddr),
    SetMark { value: u32, mask: u32 },
}

impl Match {
    /// The words after `-m`.
    pub(super) fn words(&self) -> Vec<String> {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        match self {
            Match::Comment(text) => words(&["-m", "comment", "--comment", text]),
            Match::Dports(ports) => {
                let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
                words(&["-m", "multiport", "--dports", &ports.join(",")])
            }
            Match::ToLocal => words(&["-m", "addrtype", "--dst-type", "LOCAL"]),
            Match::State(states) => {
                let set = STATES.iter().filter(|(_, bit)| states & bit != 0);
                let names: Vec<&str> = set.map(|(name, _)| *name).collect();
                words(&["-m", "conntrack", "--ctstate", &names.join(",")])
            }
            Match::Mark { value, mask } => words(&["-m", "mark", "--mark", &marked(*value, *mask)]),
            Match::Dport(proto, port) => {
                words(&["-m", &proto.to_string(), "--dport", &port.to_string()])
            }
        }
    }

    /// The match with the name after `-m`, the next option, and its value.
    pub(super) fn parse(name: &str, option: &str, value: &str, proto: Option<L4>) -> Option<Match> {
        Some(match (name, option) {
            ("comment", "--comment") => {
                Match::Comment(Some(value).filter(|text| text.len() < COMMENT)?.to_owned())
            }
            ("multiport", "--dports") => {
                let ports: Vec<u16> =
                    value.split(',').map(|port| port.parse().ok()).collect::<Option<_>>()?;
                Match::Dports(Some(ports).filter(|ports| ports.len() <= MULTIPORT)?)
            }
            ("addrtype", "--dst-type") if value == "LOCAL" => Match::ToLocal,
            ("conntrack", "--ctstate") => {
                let bit = |name| STATES.iter().find(|(known, _)| *known == name);
                let bits: Option<Vec<u16>> =
                    value.split(',').map(|name| Some(bit(name)?.1)).collect();
                Match::State(bits?.into_iter().fold(0, |all, bit| all | bit))
            }
            ("mark", "--mark") => {
                let (value, mask) = parse_mark(value)?;
                Match::Mark { value, mask }
            }
            (name, "--dport") => {
                let proto = proto.filter(|proto| proto.to_string() == name)?;
                Match::Dport(proto, value.parse().ok()?)
            }
            _ => return None,
        })
    }

    pub(super) fn extension(&self) -> Extension {
        let mut info = Info::default();
        let (name, revision) = match self {
            Match::Comment(text) => {
                info.0.extend(text.as_bytes());
                info.0.resize(COMMENT, 0);
                ("comment", 0)
            }
            // struct xt_multiport_v1
            Match::Dports(ports) => {
                info.0.extend([DESTINATION, u8::try_from(ports.len()).unwrap_or_default()]);
                info.u16(ports).zeros(2 * (MULTIPORT - ports.len()) + MULTIPORT + 1);
                ("multiport", 1)
            }
            // struct xt_addrtype_info_v1
            Match::ToLocal => {
                info.u16(&[0, TO_LOCAL]).u32(0);
                ("addrtype", 1)
            }
            // struct xt_conntrack_mtinfo3
            Match::State(states) => {
                info.zeros(CONNTRACK_FLAGS).u16(&[BY_STATE, 0, *states]).zeros(2 + 8);
                ("conntrack", 3)
            }
            // struct xt_mark_mtinfo1
            Match::Mark { value, mask } => {
                info.u32(*value).u32(*mask).zeros(1);
                ("mark", 1)
            }
            // struct xt_sctp_info; SCTP_DEST_PORTS
            Match::Dport(L4::Sctp, port) => {
                info.u16(&[*port, *port, 0, 0]).zeros(256 + 4);
                info.0.extend([[u8::MAX, 0, 0]; 4].concat());
                info.zeros(4).u32(2).u32(0);
                ("sctp", 0)
            }
            // struct xt_tcp and struct xt_udp
            Match::Dport(proto, port) => {
                info.u16(&[0, u16::MAX, *port, *port]).zeros(4);
                (if *proto == L4::Tcp { "tcp" } else { "udp" }, 0)
            }
        };
        info.extension(name, revision)
    }

    /// The match that this extension is.
    pub(super) fn of(extension: &Extension, proto: Option<L4>) -> Option<Match> {
        let info = &extension.info;
        let short = |at: usize| Some(u16::from_ne_bytes(*info.get(at..)?.first_chunk()?));
        let word = |at: usize| Some(u32::from_ne_bytes(*info.get(at..)?.first_chunk()?));
        let decoded = match extension.name.as_str() {
            "comment" => {
                let end = info.iter().position(|byte| *byte == 0)?;
                return Some(Match::Comment(String::from_utf8_lossy(&info[..end]).into_owned()));
            }
            "multiport" => {
                let count = usize::from(*info.get(1)?);
                Match::Dports((0..count).map(|at| short(2 + 2 * at)).collect::<Option<_>>()?)
            }
            "addrtype" => Match::ToLocal,
            "conntrack" => Match::State(short(CONNTRACK_FLAGS + 4)?),
            "mark" => Match::Mark { value: word(0)?, mask: word(4)? },
            "tcp" | "udp" => Match::Dport(proto?, short(4)?),
            "sctp" => Match::Dport(proto?, short(0)?),
            _ => return None,
        };
        // Other contents of the structure have other words.
        (decoded.extension() == *extension).then_some(decoded)
    }
}

impl Target {
    /// The words from `-j`.
    pub(super) fn words(&self) -> Vec<String> {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        match self {
            Target::Verdict(verdict) => match (verdict, verdict.chain()) {
                (verdict, Some(chain)) => {
                    let is_goto = *verdict == Verdict::goto(chain);
                    words(&[if is_goto { "-g" } else { "-j" }, chain])
                }
                (&Verdict::ACCEPT, _) => words(&["-j", "ACCEPT"]),
                (&Verdict::DROP, _) => words(&["-j", "DROP"]),
                (&Verdict::RETURN, _) => words(&["-j", "RETURN"]),
                _ => words(&["-j", OTHER]),
            },
            Target::Masquerade => words(&["-j", "MASQUERADE"]),
            Target::Dnat(to) => words(&["-j", "DNAT", "--to-destination", &to.to_string()]),
            Target::SetMark { value, mask } => {
                words(&["-j", "MARK", "--set-xmark", &format!("{value:#x}/{mask:#x}")])
            }
        }
    }

    /// The target with the name after `-j` and the words after that.
    pub(super) fn parse(name: &str, rest: &[&str]) -> Option<Target> {
        Some(match (name, rest) {
            ("ACCEPT", []) => Target::Verdict(Verdict::ACCEPT),
            ("DROP", []) => Target::Verdict(Verdict::DROP),
            ("RETURN", []) => Target::Verdict(Verdict::RETURN),
            ("MASQUERADE", []) => Target::Masquerade,
            ("DNAT", ["--to-destination", to]) => Target::Dnat(to.parse().ok()?),
            ("MARK", ["--set-xmark", text]) => {
                let (value, mask) = parse_mark(text)?;
                Target::SetMark { value, mask }
            }
            // The targets of iptables are modules, in capitals; chains of this program and of administrators are
            // not the names of targets.
            (chain, []) if !TARGETS.contains(&chain) => Target::Verdict(Verdict::jump(chain)),
            _ => return None,
        })
    }

    /// `None` for an address of the other family.
    pub(super) fn extension(&self, family: Family) -> Option<Extension> {
        let mut info = Info::default();
        match self {
            Target::Verdict(_) => None,
            // struct nf_nat_ipv4_multi_range_compat with one range, or struct nf_nat_range
            Target::Masquerade => {
                let is_v4 = family == Family::V4;
                info.u32(u32::from(is_v4)).zeros(if is_v4 { 16 } else { 36 });
                Some(info.extension("MASQUERADE", 0))
            }
            // struct nf_nat_range2
            Target::Dnat(to) => {
                info.u32(TO_ADDRESS_AND_PORT);
                for _ in ["min_addr", "max_addr"] {
                    let at = info.0.len();
                    match to.ip() {
                        IpAddr::V4(ip) => info.0.extend(ip.octets()),
                        IpAddr::V6(ip) => info.0.extend(ip.octets()),
                    }
                    info.0.resize(at + 16, 0);
                }
                info.0.extend([to.port().to_be_bytes(), to.port().to_be_bytes()].concat());
                info.zeros(2);
                (Family::of(to.ip()) == family).then(|| info.extension("DNAT", 2))
            }
            // struct xt_mark_tginfo2
            Target::SetMark { value, mask } => {
                info.u32(*value).u32(*mask);
                Some(info.extension("MARK", 2))
            }
        }
    }

    /// The target that this extension is.
    pub(super) fn of(extension: &Extension, family: Family) -> Option<Target> {
        let info = &extension.info;
        let word = |at: usize| Some(u32::from_ne_bytes(*info.get(at..)?.first_chunk()?));
        let decoded = match (extension.name.as_str(), extension.revision) {
            ("MASQUERADE", _) => Target::Masquerade,
            ("DNAT", 2) => {
                let port = u16::from_be_bytes(*info.get(36..)?.first_chunk()?);
                let v4: [u8; 4] = *info.get(4..)?.first_chunk()?;
                let v6: [u8; 16] = *info.get(4..)?.first_chunk()?;
                let ip = if family == Family::V4 { IpAddr::from(v4) } else { IpAddr::from(v6) };
                Target::Dnat(SocketAddr::new(ip, port))
            }
            // struct nf_nat_ipv4_multi_range_compat
            ("DNAT", 0) if family == Family::V4 => {
                let port = u16::from_be_bytes(*info.get(16..)?.first_chunk()?);
                let ip: [u8; 4] = *info.get(8..)?.first_chunk()?;
                return Some(Target::Dnat(SocketAddr::new(IpAddr::from(ip), port)));
            }
            ("MARK", _) => Target::SetMark { value: word(0)?, mask: word(4)? },
            _ => return None,
        };
        // Other contents of the structure have other words.
        (decoded.extension(family)? == *extension).then_some(decoded)
    }
}

/// The targets of iptables, for which a rule cannot jump to a chain of that name.
const TARGETS: [&str; 16] = [
    "CONNMARK",
    "CT",
    "DNAT",
    "DSCP",
    "LOG",
    "MARK",
    "MASQUERADE",
    "NETMAP",
    "NFLOG",
    "NFQUEUE",
    "QUEUE",
    "REDIRECT",
    "REJECT",
    "SNAT",
    "TCPMSS",
    "TRACE",
];

/// A structure of the kernel in host byte order.
#[derive(Default)]
struct Info(Vec<u8>);

impl Info {
    fn u16(&mut self, values: &[u16]) -> &mut Info {
        self.0.extend(values.iter().flat_map(|value| value.to_ne_bytes()));
        self
    }

    fn u32(&mut self, value: u32) -> &mut Info {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn zeros(&mut self, count: usize) -> &mut Info {
        self.0.resize(self.0.len() + count, 0);
        self
    }

    /// Pads to `XT_ALIGN`.
    fn extension(mut self, name: &str, revision: u32) -> Extension {
        self.0.resize(self.0.len().next_multiple_of(8), 0);
        Extension { name: name.to_owned(), revision, info: self.0 }
    }
}

/// `0x2000/0x2000`, or without a mask that covers everything.
fn marked(value: u32, mask: u32) -> String {
    if mask == u32::MAX { format!("{value:#x}") } else { format!("{value:#x}/{mask:#x}") }
}

fn parse_mark(text: &str) -> Option<(u32, u32)> {
    let number = |text: &str| u32::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    let (value, mask) = text.split_once('/').unwrap_or((text, "0xffffffff"));
    Some((number(value)?, number(mask)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_are_read_as_they_were_written() {
        let matches = [
            Match::Comment("c".to_owned()),
            Match::Dports(vec![1, 2, 65535]),
            Match::ToLocal,
            Match::State(4 | 2),
            Match::Mark { value: 1, mask: 3 },
            Match::Dport(L4::Udp, 53),
            Match::Dport(L4::Sctp, 53),
        ];
        for one in matches {
            let proto = if let Match::Dport(proto, _) = one { Some(proto) } else { None };
            assert_eq!(Match::of(&one.extension(), proto).as_ref(), Some(&one));
            let mut other = one.extension();
            if other.name != "comment" {
                *other.info.last_mut().unwrap() = 1;
                other.revision = 9;
                assert_eq!(Match::of(&other, proto), None, "{other:?}");
            }
        }
        for (family, to) in [(Family::V4, "10.1.2.3:80"), (Family::V6, "[fd00::1]:80")] {
            for target in [
                Target::Masquerade,
                Target::Dnat(to.parse().unwrap()),
                Target::SetMark { value: 8, mask: 8 },
            ] {
                let extension = target.extension(family).unwrap();
                assert_eq!(Target::of(&extension, family), Some(target));
            }
        }
    }
}
