//! Whether the rules of the node drop a forwarded [packet](ForwardedPacket).
//!
//! A rule may have a condition whose outcome is not known, such as a match of iptables that is not
//! read here. Then the packet may get the verdict of the rule, or not.

use nix::errno::Errno;

use super::super::attribute::{self, AttributeBuilder, ReplyAttribute};
use super::super::error::NetlinkResult;
use super::super::request::{NFGENMSG, NetlinkRequest};
use super::object::{
    NetfilterHook, NftTable, PacketVerdict, TableFamily, table_request, write_value,
};
use super::packet::{ForwardedPacket, KnownBytes};
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::{NftSocket, message_type};

/// The size of all registers in bytes.
const REGISTERS: usize = 64;
/// The greatest depth of jumps that the kernel allows: `NFT_JUMP_STACK_SIZE`.
const MAX_DEPTH: usize = 16;
/// Expressions that give no verdict and have no condition.
const EFFECTS: [&str; 6] = ["counter", "dynset", "flow_offload", "last", "log", "objref"];
/// Targets of iptables that give no verdict.
const TARGETS: [&str; 7] = ["CONNMARK", "CT", "LOG", "MARK", "NFLOG", "TCPMSS", "TRACE"];
/// The offset of the flags in iptables' `struct xt_conntrack_mtinfo3`: flags, inverted flags, and
/// the mask of states.
const XT_FLAGS: usize = 146;
/// The flag `XT_CONNTRACK_STATE` of that structure.
const XT_STATE: u16 = 1;

/// A base chain of an IP family at the hook `forward`, with the rules of its table.
#[derive(Debug)]
pub struct ForwardChain {
    pub family: TableFamily,
    pub table: String,
    pub name: String,
    /// Whether the policy of the chain is to drop.
    pub drops: bool,
    /// The rules of all chains of the table, as the kernel lists them.
    rules: Vec<Vec<u8>>,
}

impl NftSocket {
    /// The base chains of all tables of IP families at the hook `forward`.
    pub fn dump_forward_chains(&self) -> NetlinkResult<Vec<ForwardChain>> {
        // Family 0 stands for all families.
        let request = NetlinkRequest::new_netfilter(message_type(NFT_MSG_GETCHAIN), 0);
        let bodies = self.dump_or_empty(&request, "list chains", &"of all tables")?;
        let mut chains: Vec<_> =
            bodies.iter().filter_map(|body| parse_forward_chain(body)).collect();
        for chain in &mut chains {
            let table = NftTable::new(chain.family, &chain.table);
            let request = table_request(NFT_MSG_GETRULE, table);
            chain.rules = self.dump_or_empty(&request, "list rules of table", &table)?;
        }
        Ok(chains)
    }

    /// Looks up the key in the registers in a set of the table of `chain`.
    fn look_up_element(
        &self,
        chain: &ForwardChain,
        set: &str,
        registers: &KnownBytes,
    ) -> SetLookup {
        let table = NftTable::new(chain.family, &chain.table);
        let mut wanted = table_request(NFT_MSG_NEWSET, table);
        wanted.kind += 1;
        wanted.body.put_text(NFTA_SET_NAME, set);
        let length = self.socket.request_object(&wanted).ok();
        let length = length.and_then(|body| find_in_message(&body, NFTA_SET_KEY_LEN)?.to_u32_be());
        let key = length.and_then(|length| registers.get(..length as usize));
        let Some(key) = key.and_then(|key| key.iter().copied().collect::<Option<Vec<u8>>>()) else {
            return SetLookup::Unknown;
        };
        let mut wanted = table_request(NFT_MSG_GETSETELEM, table);
        wanted.body.put_text(NFTA_SET_ELEM_LIST_SET, set);
        wanted.body.put_nested(NFTA_SET_ELEM_LIST_ELEMENTS, |list| {
            list.put_nested(NFTA_LIST_ELEM, |elem| {
                elem.put_nested(NFTA_SET_ELEM_KEY, |data: &mut AttributeBuilder| {
                    write_value(data, &key)
                })
            })
        });
        match self.socket.request_object(&wanted) {
            Ok(body) => {
                let element = find_in_message(&body, NFTA_SET_ELEM_LIST_ELEMENTS);
                let element = element.and_then(|list| list.nested_attributes().next());
                SetLookup::Found(
                    element.and_then(|e| parse_effect(e.find_nested(NFTA_SET_ELEM_DATA)?)),
                )
            }
            Err(failure) if failure.refusal_errno() == Some(Errno::ENOENT) => SetLookup::Absent,
            Err(_) => SetLookup::Unknown,
        }
    }
}

enum SetLookup {
    /// With the verdict of the element, if it has one.
    Found(Option<RuleEffect>),
    Absent,
    /// The key is not known, or the set cannot be read.
    Unknown,
}

fn find_in_message(body: &[u8], kind: u16) -> Option<ReplyAttribute<'_>> {
    attribute::find_attribute(body.get(NFGENMSG..)?, kind)
}

fn parse_forward_chain(body: &[u8]) -> Option<ForwardChain> {
    let families = [TableFamily::Inet, TableFamily::Ip, TableFamily::Ip6];
    let family = families.into_iter().find(|family| body.first() == Some(&(*family as u8)))?;
    let number =
        find_in_message(body, NFTA_CHAIN_HOOK)?.find_nested(NFTA_HOOK_HOOKNUM)?.to_u32_be()?;
    let text = |kind| find_in_message(body, kind).map(ReplyAttribute::to_text);
    let is_filter = text(NFTA_CHAIN_TYPE).as_deref() == Some("filter");
    (number == NetfilterHook::Forward as u32 && is_filter).then_some(ForwardChain {
        family,
        table: text(NFTA_TABLE_NAME)?,
        name: text(NFTA_CHAIN_NAME)?,
        drops: find_in_message(body, NFTA_CHAIN_POLICY).and_then(ReplyAttribute::to_u32_be)
            == Some(NF_DROP.unsigned_abs()),
        rules: Vec::new(),
    })
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum RuleEffect {
    Next,
    Accept,
    Drop,
    Return,
    Jump(String),
    Goto(String),
}

/// The verdict in data.
fn parse_effect(data: ReplyAttribute<'_>) -> Option<RuleEffect> {
    let PacketVerdict { code, chain } = PacketVerdict::parse_data(data)?;
    Some(match code {
        NF_DROP => RuleEffect::Drop,
        NFT_JUMP => RuleEffect::Jump(chain?),
        NFT_GOTO => RuleEffect::Goto(chain?),
        NFT_RETURN => RuleEffect::Return,
        NFT_CONTINUE => RuleEffect::Next,
        // Other verdicts may let the packet pass: a program may receive it, and accept it.
        _ => RuleEffect::Accept,
    })
}

/// What a chain does with a packet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ForwardJudgement {
    Passes,
    /// The packet is dropped unless a rule accepts it whose condition is not known: "rule 2 of
    /// chain input (time)".
    DropsUnless(String),
    Drops,
}

impl ForwardChain {
    /// What this chain does with the packet.
    pub fn judge_packet(&self, nft: &NftSocket, packet: &ForwardedPacket) -> ForwardJudgement {
        let is_of_family = match self.family {
            TableFamily::Ip => packet.is_ipv4,
            TableFamily::Ip6 => !packet.is_ipv4,
            _ => true,
        };
        if !is_of_family {
            return ForwardJudgement::Passes;
        }
        let mut walk = PacketWalk {
            nft,
            chain: self,
            packet,
            may_pass: false,
            skips_unknown: false,
            unknown: None,
        };
        let mut drops = |skips_unknown| {
            (walk.skips_unknown, walk.may_pass) = (skips_unknown, false);
            (walk.ends_in(&self.name, 0) || self.drops) && !walk.may_pass
        };
        if drops(false) {
            ForwardJudgement::Drops
        } else if drops(true) {
            ForwardJudgement::DropsUnless(walk.unknown.unwrap_or_default())
        } else {
            ForwardJudgement::Passes
        }
    }
}

/// The way of a packet through a base chain.
struct PacketWalk<'a> {
    nft: &'a NftSocket,
    chain: &'a ForwardChain,
    packet: &'a ForwardedPacket,
    /// Whether a rule accepts, or may accept.
    may_pass: bool,
    /// Whether a condition that is not known counts as not met.
    skips_unknown: bool,
    /// The first rule with such a condition that may let the packet pass.
    unknown: Option<String>,
}

impl PacketWalk<'_> {
    /// Follows a chain. Returns whether the packet certainly gets a verdict in the chain.
    fn ends_in(&mut self, name: &str, depth: usize) -> bool {
        let is_in_chain = |body: &&Vec<u8>| {
            find_in_message(body, NFTA_RULE_CHAIN).is_some_and(|chain| chain.to_text() == name)
        };
        let (chain, mut may_leave) = (self.chain, false);
        for (at, body) in chain.rules.iter().filter(is_in_chain).enumerate() {
            let Some((step, unknown)) = self.evaluate_rule(body) else { continue };
            let is_certain = unknown.is_none();
            if let Some(condition) = unknown.filter(|_| self.skips_unknown) {
                if !matches!(step, RuleEffect::Next | RuleEffect::Drop) {
                    let rule = || format!("rule {} of chain {name} ({condition})", at + 1);
                    self.unknown.get_or_insert_with(rule);
                }
                continue;
            }
            let ends = match step {
                RuleEffect::Next => false,
                RuleEffect::Drop => true,
                RuleEffect::Accept => {
                    self.may_pass = true;
                    true
                }
                RuleEffect::Return => {
                    if is_certain {
                        return false;
                    }
                    may_leave = true;
                    false
                }
                RuleEffect::Jump(_) | RuleEffect::Goto(_) if depth >= MAX_DEPTH => {
                    self.may_pass = true;
                    true
                }
                RuleEffect::Jump(to) => self.ends_in(&to, depth + 1),
                RuleEffect::Goto(to) => {
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

    /// The effect of a rule, and the first of its conditions whose outcome is not known; `None` if
    /// one is certainly not met.
    fn evaluate_rule(&self, body: &[u8]) -> Option<(RuleEffect, Option<String>)> {
        let mut registers: KnownBytes = vec![None; REGISTERS];
        let (mut unknown, mut loaded) = (None, String::new());
        let list = find_in_message(body, NFTA_RULE_EXPRESSIONS)
            .into_iter()
            .flat_map(ReplyAttribute::nested_attributes);
        for expr in list {
            let (Some(name), Some(data)) =
                (expr.find_nested(NFTA_EXPR_NAME), expr.find_nested(NFTA_EXPR_DATA))
            else {
                continue;
            };
            let name = name.to_text();
            match self.evaluate_expression(&name, data, &mut registers) {
                ExpressionOutcome::Is(false) => return None,
                ExpressionOutcome::Unknown => {
                    // A comparison is told by what is compared, a match of iptables by its name.
                    let extension = data.find_nested(NFTA_EXTENSION_NAME);
                    let of_match = extension.filter(|_| name == "match");
                    let told = of_match.map_or_else(|| loaded.clone(), ReplyAttribute::to_text);
                    unknown.get_or_insert(told);
                }
                ExpressionOutcome::Is(true) | ExpressionOutcome::Step(RuleEffect::Next) => {}
                ExpressionOutcome::Step(step) => return Some((step, unknown)),
            }
            if !matches!(&*name, "cmp" | "bitwise" | "lookup") {
                loaded = name;
            }
        }
        Some((RuleEffect::Next, unknown))
    }

    fn evaluate_expression(
        &self,
        name: &str,
        data: ReplyAttribute<'_>,
        registers: &mut KnownBytes,
    ) -> ExpressionOutcome {
        let number = |kind| data.find_nested(kind).and_then(ReplyAttribute::to_u32_be);
        let key = |kind| number(kind).unwrap_or_default().cast_signed();
        let mut load = |value: KnownBytes| {
            if let Some(at) = number(NFTA_LOAD_DREG).and_then(register_offset) {
                for (register, byte) in registers[at..].iter_mut().zip(value) {
                    *register = byte;
                }
            }
            ExpressionOutcome::Is(true)
        };
        match name {
            "meta" => load(self.packet.meta_value(key(NFTA_LOAD_DREG + 1))),
            "ct" => load(self.packet.ct_value(key(NFTA_LOAD_DREG + 1))),
            "payload" => {
                let [base, offset, length] = [1, 2, 3].map(|more| key(NFTA_LOAD_DREG + more));
                let range = usize::try_from(offset).ok().zip(usize::try_from(length).ok());
                let range = range.filter(|(_, length)| *length <= REGISTERS);
                range.map_or(ExpressionOutcome::Unknown, |(at, length)| {
                    load(self.packet.payload_bytes(base, at, length))
                })
            }
            "bitwise" => evaluate_bitwise(data, registers),
            "cmp" => evaluate_compare(data, registers),
            "lookup" => self.evaluate_lookup(data, registers),
            "immediate" => match data.find_nested(NFTA_IMMEDIATE_DATA) {
                Some(value) => match (parse_effect(value), value.find_nested(NFTA_DATA_VALUE)) {
                    (Some(step), _) => ExpressionOutcome::Step(step),
                    (None, Some(value)) => load(value.value.iter().copied().map(Some).collect()),
                    _ => ExpressionOutcome::Unknown,
                },
                None => ExpressionOutcome::Unknown,
            },
            "reject" => ExpressionOutcome::Step(RuleEffect::Drop),
            "match" => self.evaluate_xt_match(data),
            "target" => {
                match data.find_nested(NFTA_EXTENSION_NAME).map(ReplyAttribute::to_text).as_deref()
                {
                    Some("REJECT") => ExpressionOutcome::Step(RuleEffect::Drop),
                    Some(target) if TARGETS.contains(&target) => ExpressionOutcome::Is(true),
                    _ => ExpressionOutcome::Step(RuleEffect::Accept),
                }
            }
            "queue" => ExpressionOutcome::Step(RuleEffect::Accept),
            _ if EFFECTS.contains(&name) => ExpressionOutcome::Is(true),
            _ => {
                registers.fill(None);
                ExpressionOutcome::Unknown
            }
        }
    }

    fn evaluate_lookup(
        &self,
        data: ReplyAttribute<'_>,
        registers: &KnownBytes,
    ) -> ExpressionOutcome {
        let number = |kind| data.find_nested(kind).and_then(ReplyAttribute::to_u32_be);
        let (Some(set), Some(at)) =
            (data.find_nested(NFTA_LOOKUP_SET), number(NFTA_LOOKUP_SREG).and_then(register_offset))
        else {
            return ExpressionOutcome::Unknown;
        };
        let is_inverted = number(NFTA_LOOKUP_FLAGS).unwrap_or_default() != 0;
        match self.nft.look_up_element(self.chain, &set.to_text(), &registers[at..].to_vec()) {
            SetLookup::Found(Some(step)) => ExpressionOutcome::Step(step),
            // The data of a map is not read.
            SetLookup::Found(None) if number(NFTA_LOOKUP_DREG).is_some() => {
                ExpressionOutcome::Unknown
            }
            SetLookup::Found(None) => ExpressionOutcome::Is(!is_inverted),
            SetLookup::Absent => ExpressionOutcome::Is(is_inverted),
            // A verdict of the map may accept.
            SetLookup::Unknown if number(NFTA_LOOKUP_DREG) == Some(0) => {
                ExpressionOutcome::Step(RuleEffect::Accept)
            }
            SetLookup::Unknown => ExpressionOutcome::Unknown,
        }
    }

    /// A match of iptables: a comment, or the state of the connection.
    fn evaluate_xt_match(&self, data: ReplyAttribute<'_>) -> ExpressionOutcome {
        let name = data.find_nested(NFTA_EXTENSION_NAME).map(ReplyAttribute::to_text);
        if name.as_deref() == Some("comment") {
            return ExpressionOutcome::Is(true);
        }
        let info = data.find_nested(NFTA_EXTENSION_INFO).map(|info| info.value).unwrap_or_default();
        let word = |at| info.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes);
        let is_third =
            data.find_nested(NFTA_EXTENSION_REV).and_then(ReplyAttribute::to_u32_be) == Some(3);
        let words = [0, 2, 4].map(|more| word(XT_FLAGS + more));
        match (name.as_deref(), words) {
            (Some("conntrack"), [Some(XT_STATE), Some(inverted), Some(states)]) if is_third => {
                ExpressionOutcome::Is(
                    (states & self.packet.xt_state() != 0) != (inverted & XT_STATE != 0),
                )
            }
            _ => ExpressionOutcome::Unknown,
        }
    }
}

enum ExpressionOutcome {
    /// Whether the condition is met; true for statements.
    Is(bool),
    Unknown,
    Step(RuleEffect),
}

/// The position of a register in bytes.
fn register_offset(register: u32) -> Option<usize> {
    let register = register as usize;
    match register {
        1..=4 => Some((register - 1) * 16),
        _ => (NFT_REG32_00..NFT_REG32_00 + 16).contains(&register).then(|| (register - 8) * 4),
    }
}

fn evaluate_bitwise(data: ReplyAttribute<'_>, registers: &mut KnownBytes) -> ExpressionOutcome {
    let number = |kind| data.find_nested(kind).and_then(ReplyAttribute::to_u32_be);
    let value = |kind| Some(data.find_nested(kind)?.find_nested(NFTA_DATA_VALUE)?.value);
    let places = number(NFTA_BITWISE_SREG)
        .and_then(register_offset)
        .zip(number(NFTA_BITWISE_DREG).and_then(register_offset));
    let values = value(NFTA_BITWISE_MASK).zip(value(NFTA_BITWISE_XOR));
    let (Some((from, to)), Some((mask, xor))) = (places, values) else {
        registers.fill(None);
        return ExpressionOutcome::Unknown;
    };
    for (at, (mask, xor)) in mask.iter().zip(xor).enumerate().take(REGISTERS - from.max(to)) {
        registers[to + at] = match (registers[from + at], mask) {
            (_, 0) => Some(*xor),
            (byte, mask) => byte.map(|byte| byte & mask ^ xor),
        };
    }
    ExpressionOutcome::Is(true)
}

fn evaluate_compare(data: ReplyAttribute<'_>, registers: &KnownBytes) -> ExpressionOutcome {
    let number = |kind| data.find_nested(kind).and_then(ReplyAttribute::to_u32_be);
    let value = data
        .find_nested(NFTA_CMP_DATA)
        .and_then(|data| Some(data.find_nested(NFTA_DATA_VALUE)?.value));
    let (Some(at), Some(op), Some(value)) =
        (number(NFTA_CMP_SREG).and_then(register_offset), number(NFTA_CMP_OP), value)
    else {
        return ExpressionOutcome::Unknown;
    };
    let found = registers[at..].iter().take(value.len());
    let differs = found.clone().zip(value).any(|(byte, value)| byte.is_some_and(|b| b != *value));
    let is_known = found.clone().all(Option::is_some) && found.len() == value.len();
    match op.cast_signed() {
        NFT_CMP_EQ if differs => ExpressionOutcome::Is(false),
        NFT_CMP_NEQ if differs => ExpressionOutcome::Is(true),
        NFT_CMP_EQ if is_known => ExpressionOutcome::Is(true),
        NFT_CMP_NEQ if is_known => ExpressionOutcome::Is(false),
        _ => ExpressionOutcome::Unknown,
    }
}
