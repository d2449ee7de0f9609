//! What the rules of the node do with a forwarded [packet](Packet): whether it is certainly dropped.
//!
//! A rule with a condition whose outcome is not known, such as a match of iptables that is not read here, may apply or
//! not: what it accepts may pass.

use nix::errno::Errno;

use super::super::attribute::{self, Attr, Attributes};
use super::super::error::Result;
use super::super::request::{NFGENMSG, Request};
use super::object::{Family, Hook, Table, Verdict, request, write_value};
use super::packet::{Known, Packet};
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::{Nft, kind};

/// The size of the registers in bytes.
const REGISTERS: usize = 64;
/// The deepest chain of jumps that the kernel allows: `NFT_JUMP_STACK_SIZE`.
const DEEPEST: usize = 16;
/// Expressions, and targets of iptables, that neither decide nor depend on anything.
const EFFECTS: [&str; 6] = ["counter", "dynset", "flow_offload", "last", "log", "objref"];
const TARGETS: [&str; 7] = ["CONNMARK", "CT", "LOG", "MARK", "NFLOG", "TCPMSS", "TRACE"];
/// The offset of the flags in iptables' `struct xt_conntrack_mtinfo3`: flags, inverted flags, and the mask of states.
const XT_FLAGS: usize = 146;
/// `XT_CONNTRACK_STATE`
const XT_STATE: u16 = 1;

/// A base chain of an IP family at the hook forward, with the rules of its table.
#[derive(Debug)]
pub struct ForwardChain {
    pub family: Family,
    pub table: String,
    pub name: String,
    /// Whether its policy is to drop.
    pub drops: bool,
    /// The rules of all chains of the table, as the kernel lists them.
    rules: Vec<Vec<u8>>,
}

impl Nft {
    /// The base chains of IP families at the hook forward, of all tables.
    pub fn forward_chains(&self) -> Result<Vec<ForwardChain>> {
        // Family 0 stands for all families.
        let request = Request::netfilter(kind(NFT_MSG_GETCHAIN), 0);
        let bodies = self.list(&request, "list chains", &"of all tables")?;
        let mut chains: Vec<_> = bodies.iter().filter_map(|body| forward_chain(body)).collect();
        for chain in &mut chains {
            let table = Table::new(chain.family, &chain.table);
            let request = self::request(NFT_MSG_GETRULE, table);
            chain.rules = self.list(&request, "list rules of table", &table)?;
        }
        Ok(chains)
    }

    /// The element of any set: its verdict, if it is known whether the set has the key.
    fn look_up(&self, chain: &ForwardChain, set: &str, registers: &Known) -> Lookup {
        let table = Table::new(chain.family, &chain.table);
        let mut wanted = request(NFT_MSG_NEWSET, table);
        wanted.kind += 1;
        wanted.body.text(NFTA_SET_NAME, set);
        let length = self.socket.one(&wanted).ok();
        let length = length.and_then(|body| find(&body, NFTA_SET_KEY_LEN)?.be32());
        let key = length.and_then(|length| registers.get(..length as usize));
        let Some(key) = key.and_then(|key| key.iter().copied().collect::<Option<Vec<u8>>>()) else {
            return Lookup::Unknown;
        };
        let mut wanted = request(NFT_MSG_GETSETELEM, table);
        wanted.body.text(NFTA_SET_ELEM_LIST_SET, set);
        wanted.body.nest(NFTA_SET_ELEM_LIST_ELEMENTS, |list| {
            list.nest(NFTA_LIST_ELEM, |elem| {
                elem.nest(NFTA_SET_ELEM_KEY, |data: &mut Attributes| write_value(data, &key))
            })
        });
        match self.socket.one(&wanted) {
            Ok(body) => {
                let element = find(&body, NFTA_SET_ELEM_LIST_ELEMENTS);
                let element = element.and_then(|list| list.nested().next());
                Lookup::Found(element.and_then(|e| verdict(e.find(NFTA_SET_ELEM_DATA)?)))
            }
            Err(failure) if failure.refusal() == Some(Errno::ENOENT) => Lookup::Absent,
            Err(_) => Lookup::Unknown,
        }
    }
}

enum Lookup {
    Found(Option<Step>),
    Absent,
    Unknown,
}

fn find(body: &[u8], kind: u16) -> Option<Attr<'_>> {
    attribute::find(body.get(NFGENMSG..)?, kind)
}

fn forward_chain(body: &[u8]) -> Option<ForwardChain> {
    let families = [Family::Inet, Family::Ip, Family::Ip6];
    let family = families.into_iter().find(|family| body.first() == Some(&(*family as u8)))?;
    let number = find(body, NFTA_CHAIN_HOOK)?.find(NFTA_HOOK_HOOKNUM)?.be32()?;
    let text = |kind| find(body, kind).map(Attr::text);
    let is_filter = text(NFTA_CHAIN_TYPE).as_deref() == Some("filter");
    (number == Hook::Forward as u32 && is_filter).then_some(ForwardChain {
        family,
        table: text(NFTA_TABLE_NAME)?,
        name: text(NFTA_CHAIN_NAME)?,
        drops: find(body, NFTA_CHAIN_POLICY).and_then(Attr::be32) == Some(NF_DROP.unsigned_abs()),
        rules: Vec::new(),
    })
}

/// What a rule does.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Next,
    Accept,
    Drop,
    Return,
    Jump(String),
    Goto(String),
}

/// The verdict in data.
fn verdict(data: Attr<'_>) -> Option<Step> {
    let Verdict { code, chain } = Verdict::read(data)?;
    Some(match code {
        NF_DROP => Step::Drop,
        NFT_JUMP => Step::Jump(chain?),
        NFT_GOTO => Step::Goto(chain?),
        NFT_RETURN => Step::Return,
        NFT_CONTINUE => Step::Next,
        // Others may pass, as by a program that gets the packet.
        _ => Step::Accept,
    })
}

impl ForwardChain {
    /// Whether the packet is certainly dropped here.
    pub fn drops(&self, nft: &Nft, packet: &Packet) -> bool {
        let is_of_family = match self.family {
            Family::Ip => packet.is_ipv4,
            Family::Ip6 => !packet.is_ipv4,
            _ => true,
        };
        let mut walk = Walk { nft, chain: self, packet, may_pass: false };
        is_of_family && (walk.ends_in(&self.name, 0) || self.drops) && !walk.may_pass
    }
}

/// The way of a packet through a base chain.
struct Walk<'a> {
    nft: &'a Nft,
    chain: &'a ForwardChain,
    packet: &'a Packet,
    /// Whether a rule accepts, or may accept.
    may_pass: bool,
}

impl Walk<'_> {
    /// Follows a chain. Returns whether the packet certainly gets a verdict in it.
    fn ends_in(&mut self, name: &str, depth: usize) -> bool {
        let is_mine =
            |body: &&Vec<u8>| find(body, NFTA_RULE_CHAIN).is_some_and(|chain| chain.text() == name);
        let mut may_leave = false;
        for body in self.chain.rules.iter().filter(is_mine) {
            let Some((step, is_certain)) = self.rule(body) else { continue };
            let ends = match step {
                Step::Next => false,
                Step::Drop => true,
                Step::Accept => {
                    self.may_pass = true;
                    true
                }
                Step::Return => {
                    if is_certain {
                        return false;
                    }
                    may_leave = true;
                    false
                }
                Step::Jump(_) | Step::Goto(_) if depth >= DEEPEST => {
                    self.may_pass = true;
                    true
                }
                Step::Jump(to) => self.ends_in(&to, depth + 1),
                Step::Goto(to) => {
                    let ends = self.ends_in(&to, depth + 1);
                    if is_certain {
                        return ends && !may_leave;
                    }
                    may_leave |= !ends;
                    ends
                }
            };
            if ends && is_certain {
                return !may_leave;
            }
        }
        false
    }

    /// What a rule does, and whether its conditions are certainly met; `None` if they are certainly not.
    fn rule(&self, body: &[u8]) -> Option<(Step, bool)> {
        let mut registers: Known = vec![None; REGISTERS];
        let mut is_certain = true;
        let list = find(body, NFTA_RULE_EXPRESSIONS).into_iter().flat_map(Attr::nested);
        for expr in list {
            let (Some(name), Some(data)) = (expr.find(NFTA_EXPR_NAME), expr.find(NFTA_EXPR_DATA))
            else {
                continue;
            };
            let name = name.text();
            match self.expression(&name, data, &mut registers) {
                Outcome::Is(false) => return None,
                Outcome::Unknown => is_certain = false,
                Outcome::Is(true) | Outcome::Step(Step::Next) => {}
                Outcome::Step(step) => return Some((step, is_certain)),
            }
        }
        Some((Step::Next, is_certain))
    }

    fn expression(&self, name: &str, data: Attr<'_>, registers: &mut Known) -> Outcome {
        let number = |kind| data.find(kind).and_then(Attr::be32);
        let key = |kind| number(kind).unwrap_or_default().cast_signed();
        let mut load = |value: Known| {
            if let Some(at) = number(NFTA_LOAD_DREG).and_then(place) {
                for (register, byte) in registers[at..].iter_mut().zip(value) {
                    *register = byte;
                }
            }
            Outcome::Is(true)
        };
        match name {
            "meta" => load(self.packet.meta(key(NFTA_LOAD_DREG + 1))),
            "ct" => load(self.packet.ct(key(NFTA_LOAD_DREG + 1))),
            "payload" => {
                let [base, offset, length] = [1, 2, 3].map(|more| key(NFTA_LOAD_DREG + more));
                let range = usize::try_from(offset).ok().zip(usize::try_from(length).ok());
                let range = range.filter(|(_, length)| *length <= REGISTERS);
                range.map_or(Outcome::Unknown, |(at, length)| {
                    load(self.packet.payload(base, at, length))
                })
            }
            "bitwise" => bitwise(data, registers),
            "cmp" => compare(data, registers),
            "lookup" => self.lookup(data, registers),
            "immediate" => match data.find(NFTA_IMMEDIATE_DATA) {
                Some(value) => match (verdict(value), value.find(NFTA_DATA_VALUE)) {
                    (Some(step), _) => Outcome::Step(step),
                    (None, Some(value)) => load(value.value.iter().copied().map(Some).collect()),
                    _ => Outcome::Unknown,
                },
                None => Outcome::Unknown,
            },
            "reject" => Outcome::Step(Step::Drop),
            "match" => self.xt_match(data),
            "target" => match data.find(NFTA_EXTENSION_NAME).map(Attr::text).as_deref() {
                Some("REJECT") => Outcome::Step(Step::Drop),
                Some(target) if TARGETS.contains(&target) => Outcome::Is(true),
                _ => Outcome::Step(Step::Accept),
            },
            "queue" => Outcome::Step(Step::Accept),
            _ if EFFECTS.contains(&name) => Outcome::Is(true),
            _ => {
                registers.fill(None);
                Outcome::Unknown
            }
        }
    }

    fn lookup(&self, data: Attr<'_>, registers: &Known) -> Outcome {
        let number = |kind| data.find(kind).and_then(Attr::be32);
        let (Some(set), Some(at)) =
            (data.find(NFTA_LOOKUP_SET), number(NFTA_LOOKUP_SREG).and_then(place))
        else {
            return Outcome::Unknown;
        };
        let is_inverted = number(NFTA_LOOKUP_FLAGS).unwrap_or_default() != 0;
        match self.nft.look_up(self.chain, &set.text(), &registers[at..].to_vec()) {
            Lookup::Found(Some(step)) => Outcome::Step(step),
            // The data of a map are not read.
            Lookup::Found(None) if number(NFTA_LOOKUP_DREG).is_some() => Outcome::Unknown,
            Lookup::Found(None) => Outcome::Is(!is_inverted),
            Lookup::Absent => Outcome::Is(is_inverted),
            // A verdict of the map may accept.
            Lookup::Unknown if number(NFTA_LOOKUP_DREG) == Some(0) => Outcome::Step(Step::Accept),
            Lookup::Unknown => Outcome::Unknown,
        }
    }

    /// A match of iptables: a comment, or the state of the connection.
    fn xt_match(&self, data: Attr<'_>) -> Outcome {
        let name = data.find(NFTA_EXTENSION_NAME).map(Attr::text);
        if name.as_deref() == Some("comment") {
            return Outcome::Is(true);
        }
        let info = data.find(NFTA_EXTENSION_INFO).map(|info| info.value).unwrap_or_default();
        let word = |at| info.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes);
        let is_third = data.find(NFTA_EXTENSION_REV).and_then(Attr::be32) == Some(3);
        let words = [0, 2, 4].map(|more| word(XT_FLAGS + more));
        match (name.as_deref(), words) {
            (Some("conntrack"), [Some(XT_STATE), Some(inverted), Some(states)]) if is_third => {
                Outcome::Is((states & self.packet.xt_state() != 0) != (inverted & XT_STATE != 0))
            }
            _ => Outcome::Unknown,
        }
    }
}

/// The outcome of an expression.
enum Outcome {
    /// Whether the condition is met; statements are.
    Is(bool),
    Unknown,
    Step(Step),
}

/// The position of a register in bytes.
fn place(register: u32) -> Option<usize> {
    let register = register as usize;
    match register {
        1..=4 => Some((register - 1) * 16),
        _ => (NFT_REG32_00..NFT_REG32_00 + 16).contains(&register).then(|| (register - 8) * 4),
    }
}

fn bitwise(data: Attr<'_>, registers: &mut Known) -> Outcome {
    let number = |kind| data.find(kind).and_then(Attr::be32);
    let value = |kind| Some(data.find(kind)?.find(NFTA_DATA_VALUE)?.value);
    let places =
        number(NFTA_BITWISE_SREG).and_then(place).zip(number(NFTA_BITWISE_DREG).and_then(place));
    let values = value(NFTA_BITWISE_MASK).zip(value(NFTA_BITWISE_XOR));
    let (Some((from, to)), Some((mask, xor))) = (places, values) else {
        registers.fill(None);
        return Outcome::Unknown;
    };
    for (at, (mask, xor)) in mask.iter().zip(xor).enumerate().take(REGISTERS - from.max(to)) {
        registers[to + at] = match (registers[from + at], mask) {
            (_, 0) => Some(*xor),
            (byte, mask) => byte.map(|byte| byte & mask ^ xor),
        };
    }
    Outcome::Is(true)
}

fn compare(data: Attr<'_>, registers: &Known) -> Outcome {
    let number = |kind| data.find(kind).and_then(Attr::be32);
    let value = data.find(NFTA_CMP_DATA).and_then(|data| Some(data.find(NFTA_DATA_VALUE)?.value));
    let (Some(at), Some(op), Some(value)) =
        (number(NFTA_CMP_SREG).and_then(place), number(NFTA_CMP_OP), value)
    else {
        return Outcome::Unknown;
    };
    let found = registers[at..].iter().take(value.len());
    let differs = found.clone().zip(value).any(|(byte, value)| byte.is_some_and(|b| b != *value));
    let is_known = found.clone().all(Option::is_some) && found.len() == value.len();
    match op.cast_signed() {
        NFT_CMP_EQ if differs => Outcome::Is(false),
        NFT_CMP_NEQ if differs => Outcome::Is(true),
        NFT_CMP_EQ if is_known => Outcome::Is(true),
        NFT_CMP_NEQ if is_known => Outcome::Is(false),
        _ => Outcome::Unknown,
    }
}
