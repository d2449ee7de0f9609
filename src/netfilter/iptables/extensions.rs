//! The matches and targets of iptables: words, and the structures of `linux/netfilter/xt_*.h`,
//! which `nft_compat` passes to the extensions of the kernel.

use std::net::{IpAddr, SocketAddr};

use crate::netlink::IpFamily;
use crate::netlink::nftables::{CompatExtension, PacketVerdict, TransportProtocol, XtExtension};

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
/// The offset of `match_flags` in `struct xt_conntrack_mtinfo3`, after addresses, times, protocol
/// and ports.
const CONNTRACK_FLAGS: usize = 128 + 8 + 10;
/// `NF_NAT_RANGE_MAP_IPS | NF_NAT_RANGE_PROTO_SPECIFIED`
const TO_ADDRESS_AND_PORT: u32 = 1 | 2;
/// `NF_NAT_RANGE_PROTO_RANDOM_FULLY`
const FULLY_RANDOM: u32 = 1 << 4;

/// The option of `MASQUERADE` for random ports.
pub const RANDOM_FULLY: &str = "--random-fully";

const fn xt_match(name: &'static str, revision: u32, module: &'static str) -> XtExtension {
    XtExtension { name, revision, is_target: false, module }
}

const fn xt_target(name: &'static str, revision: u32, module: &'static str) -> XtExtension {
    XtExtension { is_target: true, ..xt_match(name, revision, module) }
}

pub const XT_COMMENT: XtExtension = xt_match("comment", 0, "xt_comment");
pub const XT_CONNTRACK: XtExtension = xt_match("conntrack", 3, "xt_conntrack");
pub const XT_MASQUERADE: XtExtension = xt_target("MASQUERADE", 0, "xt_MASQUERADE");
/// What port mappings need.
pub const PORT_EXTENSIONS: &[XtExtension] = EXTENSIONS.split_at(1).1;
/// What any rule needs.
pub const EXTENSIONS: &[XtExtension] = &[
    XT_CONNTRACK,
    XT_COMMENT,
    xt_match("addrtype", 1, "xt_addrtype"),
    xt_match("multiport", 1, "xt_multiport"),
    xt_match("mark", 1, "xt_mark"),
    xt_target("MARK", 2, "xt_mark"),
    xt_target("DNAT", 2, "xt_nat"),
    XT_MASQUERADE,
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum IptablesMatch {
    Comment(String),
    Dports(Vec<u16>),
    ToLocal,
    State(u16),
    Mark { value: u32, mask: u32 },
    Dport(TransportProtocol, u16),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum IptablesTarget {
    Verdict(PacketVerdict),
    Masquerade { fully_random: bool },
    Dnat(SocketAddr),
    SetMark { value: u32, mask: u32 },
}

impl IptablesMatch {
    /// The words after `-m`.
    pub(super) fn to_words(&self) -> Vec<String> {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        match self {
            IptablesMatch::Comment(text) => words(&["-m", "comment", "--comment", text]),
            IptablesMatch::Dports(ports) => {
                let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
                words(&["-m", "multiport", "--dports", &ports.join(",")])
            }
            IptablesMatch::ToLocal => words(&["-m", "addrtype", "--dst-type", "LOCAL"]),
            IptablesMatch::State(states) => {
                let set = STATES.iter().filter(|(_, bit)| states & bit != 0);
                let names: Vec<&str> = set.map(|(name, _)| *name).collect();
                words(&["-m", "conntrack", "--ctstate", &names.join(",")])
            }
            IptablesMatch::Mark { value, mask } => {
                words(&["-m", "mark", "--mark", &format_mark(*value, *mask)])
            }
            IptablesMatch::Dport(proto, port) => {
                words(&["-m", &proto.to_string(), "--dport", &port.to_string()])
            }
        }
    }

    /// The match with the name after `-m`, the next option, and its value.
    pub(super) fn parse_option(
        name: &str,
        option: &str,
        value: &str,
        proto: Option<TransportProtocol>,
    ) -> Option<IptablesMatch> {
        Some(match (name, option) {
            ("comment", "--comment") => {
                IptablesMatch::Comment(Some(value).filter(|text| text.len() < COMMENT)?.to_owned())
            }
            ("multiport", "--dports") => {
                let ports: Vec<u16> =
                    value.split(',').map(|port| port.parse().ok()).collect::<Option<_>>()?;
                IptablesMatch::Dports(Some(ports).filter(|ports| ports.len() <= MULTIPORT)?)
            }
            ("addrtype", "--dst-type") if value == "LOCAL" => IptablesMatch::ToLocal,
            ("conntrack", "--ctstate") => {
                let bit = |name| STATES.iter().find(|(known, _)| *known == name);
                let bits: Option<Vec<u16>> =
                    value.split(',').map(|name| Some(bit(name)?.1)).collect();
                IptablesMatch::State(bits?.into_iter().fold(0, |all, bit| all | bit))
            }
            ("mark", "--mark") => {
                let (value, mask) = parse_mark(value)?;
                IptablesMatch::Mark { value, mask }
            }
            (name, "--dport") => {
                let proto = proto.filter(|proto| proto.to_string() == name)?;
                IptablesMatch::Dport(proto, value.parse().ok()?)
            }
            _ => return None,
        })
    }

    pub(super) fn to_extension(&self) -> CompatExtension {
        let mut info = ExtensionInfo::default();
        let (name, revision) = match self {
            IptablesMatch::Comment(text) => {
                info.0.extend(text.as_bytes());
                info.0.resize(COMMENT, 0);
                ("comment", 0)
            }
            // struct xt_multiport_v1
            IptablesMatch::Dports(ports) => {
                info.0.extend([DESTINATION, u8::try_from(ports.len()).unwrap_or_default()]);
                info.push_u16(ports).push_zeros(2 * (MULTIPORT - ports.len()) + MULTIPORT + 1);
                ("multiport", 1)
            }
            // struct xt_addrtype_info_v1
            IptablesMatch::ToLocal => {
                info.push_u16(&[0, TO_LOCAL]).push_u32(0);
                ("addrtype", 1)
            }
            // struct xt_conntrack_mtinfo3
            IptablesMatch::State(states) => {
                info.push_zeros(CONNTRACK_FLAGS)
                    .push_u16(&[BY_STATE, 0, *states])
                    .push_zeros(2 + 8);
                ("conntrack", 3)
            }
            // struct xt_mark_mtinfo1
            IptablesMatch::Mark { value, mask } => {
                info.push_u32(*value).push_u32(*mask).push_zeros(1);
                ("mark", 1)
            }
            // struct xt_sctp_info; SCTP_DEST_PORTS
            IptablesMatch::Dport(TransportProtocol::Sctp, port) => {
                info.push_u16(&[*port, *port, 0, 0]).push_zeros(256 + 4);
                info.0.extend([[u8::MAX, 0, 0]; 4].concat());
                info.push_zeros(4).push_u32(2).push_u32(0);
                ("sctp", 0)
            }
            // struct xt_tcp and struct xt_udp
            IptablesMatch::Dport(proto, port) => {
                info.push_u16(&[0, u16::MAX, *port, *port]).push_zeros(4);
                (if *proto == TransportProtocol::Tcp { "tcp" } else { "udp" }, 0)
            }
        };
        info.into_extension(name, revision)
    }

    pub(super) fn from_extension(
        extension: &CompatExtension,
        proto: Option<TransportProtocol>,
    ) -> Option<IptablesMatch> {
        let info = &extension.info;
        let short = |at: usize| Some(u16::from_ne_bytes(*info.get(at..)?.first_chunk()?));
        let word = |at: usize| Some(u32::from_ne_bytes(*info.get(at..)?.first_chunk()?));
        let decoded = match extension.name.as_str() {
            "comment" => {
                let end = info.iter().position(|byte| *byte == 0)?;
                return Some(IptablesMatch::Comment(
                    String::from_utf8_lossy(&info[..end]).into_owned(),
                ));
            }
            "multiport" => {
                let count = usize::from(*info.get(1)?);
                IptablesMatch::Dports(
                    (0..count).map(|at| short(2 + 2 * at)).collect::<Option<_>>()?,
                )
            }
            "addrtype" => IptablesMatch::ToLocal,
            "conntrack" => IptablesMatch::State(short(CONNTRACK_FLAGS + 4)?),
            "mark" => IptablesMatch::Mark { value: word(0)?, mask: word(4)? },
            "tcp" | "udp" => IptablesMatch::Dport(proto?, short(4)?),
            "sctp" => IptablesMatch::Dport(proto?, short(0)?),
            _ => return None,
        };
        // Other contents of the structure have other words.
        (decoded.to_extension() == *extension).then_some(decoded)
    }
}

impl IptablesTarget {
    /// The words from `-j`.
    pub(super) fn to_words(&self) -> Vec<String> {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        match self {
            IptablesTarget::Verdict(verdict) => match (verdict, verdict.target_chain()) {
                (verdict, Some(chain)) => {
                    let is_goto = *verdict == PacketVerdict::go_to(chain);
                    words(&[if is_goto { "-g" } else { "-j" }, chain])
                }
                (&PacketVerdict::ACCEPT, _) => words(&["-j", "ACCEPT"]),
                (&PacketVerdict::DROP, _) => words(&["-j", "DROP"]),
                (&PacketVerdict::RETURN, _) => words(&["-j", "RETURN"]),
                _ => words(&["-j", OTHER]),
            },
            IptablesTarget::Masquerade { fully_random } => {
                words(&["-j", "MASQUERADE", RANDOM_FULLY][..2 + usize::from(*fully_random)])
            }
            IptablesTarget::Dnat(to) => words(&["-j", "DNAT", "--to-destination", &to.to_string()]),
            IptablesTarget::SetMark { value, mask } => {
                words(&["-j", "MARK", "--set-xmark", &format!("{value:#x}/{mask:#x}")])
            }
        }
    }

    /// The target with the name after `-j` and the words after that.
    pub(super) fn parse_words(name: &str, rest: &[&str]) -> Option<IptablesTarget> {
        Some(match (name, rest) {
            ("ACCEPT", []) => IptablesTarget::Verdict(PacketVerdict::ACCEPT),
            ("DROP", []) => IptablesTarget::Verdict(PacketVerdict::DROP),
            ("RETURN", []) => IptablesTarget::Verdict(PacketVerdict::RETURN),
            ("MASQUERADE", []) => IptablesTarget::Masquerade { fully_random: false },
            ("MASQUERADE", [RANDOM_FULLY]) => IptablesTarget::Masquerade { fully_random: true },
            ("DNAT", ["--to-destination", to]) => IptablesTarget::Dnat(to.parse().ok()?),
            ("MARK", ["--set-xmark", text]) => {
                let (value, mask) = parse_mark(text)?;
                IptablesTarget::SetMark { value, mask }
            }
            // The targets of iptables are modules, in capitals; chains of this program and of
            // administrators are not the names of targets.
            (chain, []) if !TARGETS.contains(&chain) => {
                IptablesTarget::Verdict(PacketVerdict::jump_to(chain))
            }
            _ => return None,
        })
    }

    /// `None` for an address of the other family.
    pub(super) fn to_extension(&self, family: IpFamily) -> Option<CompatExtension> {
        let mut info = ExtensionInfo::default();
        match self {
            IptablesTarget::Verdict(_) => None,
            // struct nf_nat_ipv4_multi_range_compat with one range, or struct nf_nat_range
            IptablesTarget::Masquerade { fully_random } => {
                let is_v4 = family == IpFamily::V4;
                if is_v4 {
                    info.push_u32(1);
                }
                info.push_u32(if *fully_random { FULLY_RANDOM } else { 0 });
                info.push_zeros(if is_v4 { 12 } else { 36 });
                Some(info.into_extension("MASQUERADE", 0))
            }
            // struct nf_nat_range2
            IptablesTarget::Dnat(to) => {
                info.push_u32(TO_ADDRESS_AND_PORT);
                for _ in ["min_addr", "max_addr"] {
                    let at = info.0.len();
                    match to.ip() {
                        IpAddr::V4(ip) => info.0.extend(ip.octets()),
                        IpAddr::V6(ip) => info.0.extend(ip.octets()),
                    }
                    info.0.resize(at + 16, 0);
                }
                info.0.extend([to.port().to_be_bytes(), to.port().to_be_bytes()].concat());
                info.push_zeros(2);
                (IpFamily::of_address(to.ip()) == family).then(|| info.into_extension("DNAT", 2))
            }
            // struct xt_mark_tginfo2
            IptablesTarget::SetMark { value, mask } => {
                info.push_u32(*value).push_u32(*mask);
                Some(info.into_extension("MARK", 2))
            }
        }
    }

    pub(super) fn from_extension(
        extension: &CompatExtension,
        family: IpFamily,
    ) -> Option<IptablesTarget> {
        let info = &extension.info;
        let word = |at: usize| Some(u32::from_ne_bytes(*info.get(at..)?.first_chunk()?));
        let decoded = match (extension.name.as_str(), extension.revision) {
            ("MASQUERADE", _) => IptablesTarget::Masquerade {
                fully_random: word(if family == IpFamily::V4 { 4 } else { 0 })? == FULLY_RANDOM,
            },
            ("DNAT", 2) => {
                let port = u16::from_be_bytes(*info.get(36..)?.first_chunk()?);
                let v4: [u8; 4] = *info.get(4..)?.first_chunk()?;
                let v6: [u8; 16] = *info.get(4..)?.first_chunk()?;
                let ip = if family == IpFamily::V4 { IpAddr::from(v4) } else { IpAddr::from(v6) };
                IptablesTarget::Dnat(SocketAddr::new(ip, port))
            }
            // struct nf_nat_ipv4_multi_range_compat
            ("DNAT", 0) if family == IpFamily::V4 => {
                let port = u16::from_be_bytes(*info.get(16..)?.first_chunk()?);
                let ip: [u8; 4] = *info.get(8..)?.first_chunk()?;
                return Some(IptablesTarget::Dnat(SocketAddr::new(IpAddr::from(ip), port)));
            }
            ("MARK", _) => IptablesTarget::SetMark { value: word(0)?, mask: word(4)? },
            _ => return None,
        };
        // Other contents of the structure have other words.
        (decoded.to_extension(family)? == *extension).then_some(decoded)
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
struct ExtensionInfo(Vec<u8>);

impl ExtensionInfo {
    fn push_u16(&mut self, values: &[u16]) -> &mut ExtensionInfo {
        self.0.extend(values.iter().flat_map(|value| value.to_ne_bytes()));
        self
    }

    fn push_u32(&mut self, value: u32) -> &mut ExtensionInfo {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn push_zeros(&mut self, count: usize) -> &mut ExtensionInfo {
        self.0.resize(self.0.len() + count, 0);
        self
    }

    /// The extension with this structure, padded to `XT_ALIGN`.
    fn into_extension(mut self, name: &str, revision: u32) -> CompatExtension {
        self.0.resize(self.0.len().next_multiple_of(8), 0);
        CompatExtension { name: name.to_owned(), revision, info: self.0 }
    }
}

/// `0x2000/0x2000`, or without a mask that covers everything.
fn format_mark(value: u32, mask: u32) -> String {
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
    fn extensions_round_trip() {
        let matches = [
            IptablesMatch::Comment("c".to_owned()),
            IptablesMatch::Dports(vec![1, 2, 65535]),
            IptablesMatch::ToLocal,
            IptablesMatch::State(4 | 2),
            IptablesMatch::Mark { value: 1, mask: 3 },
            IptablesMatch::Dport(TransportProtocol::Udp, 53),
            IptablesMatch::Dport(TransportProtocol::Sctp, 53),
        ];
        for one in matches {
            let proto = if let IptablesMatch::Dport(proto, _) = one { Some(proto) } else { None };
            assert_eq!(
                IptablesMatch::from_extension(&one.to_extension(), proto).as_ref(),
                Some(&one)
            );
            let mut other = one.to_extension();
            if other.name != "comment" {
                *other.info.last_mut().unwrap() = 1;
                other.revision = 9;
                assert_eq!(IptablesMatch::from_extension(&other, proto), None, "{other:?}");
            }
        }
        for (family, to) in [(IpFamily::V4, "10.1.2.3:80"), (IpFamily::V6, "[fd00::1]:80")] {
            for target in [
                IptablesTarget::Masquerade { fully_random: false },
                IptablesTarget::Masquerade { fully_random: true },
                IptablesTarget::Dnat(to.parse().unwrap()),
                IptablesTarget::SetMark { value: 8, mask: 8 },
            ] {
                let extension = target.to_extension(family).unwrap();
                assert_eq!(IptablesTarget::from_extension(&extension, family), Some(target));
            }
        }
    }
}
