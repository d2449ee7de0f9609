//! Sets beyond plain lists of keys: intervals, elements with counters, and sets that packets fill;
//! the statement by which a packet adds itself.

use std::time::Duration;

use super::super::attribute::{AttributeBuilder, ReplyAttribute};
use super::super::error::NetlinkResult;
use super::NftSocket;
use super::batch::NftBatch;
use super::field::PacketField;
use super::flavour::SetFlavour;
use super::object::{NftSet, SetElement, element_request, write_value};
use super::read::{find_in_message, parse_element};
use super::rule::{
    CT_STATUS_DNAT, NftRule, RegisterIndex, build_expression, compare_expression, register_number,
};
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::value::ElementKey;
use cni::sort::sort_items;

/// `NFT_SET_ELEM_INTERVAL_END`: the element is the first key after an interval.
const INTERVAL_END: u32 = 1;
/// `NFT_DYNSET_OP_ADD` and `NFT_DYNSET_OP_UPDATE`, which also restarts the timeout.
const ADD: u32 = 0;
const UPDATE: u32 = 1;
/// The maximum number of intervals in one message, whose list of elements is at most 64 KiB long.
const INTERVALS_PER_MESSAGE: usize = 400;

impl NftSet<'_> {
    /// A set of intervals, whose elements are [`KeyInterval`]s. A concatenation needs Linux 5.6.
    pub const fn with_intervals(self) -> Self {
        NftSet { flavour: SetFlavour::Intervals, ..self }
    }

    /// A set whose elements count the packets that match them.
    pub const fn with_counters(self) -> Self {
        NftSet { flavour: SetFlavour::Counters, ..self }
    }

    /// A set that packets fill, with at most `size` elements; an element vanishes after `timeout`
    /// seconds unless it is 0.
    pub const fn filled_by_packets(self, size: u32, timeout: u32) -> Self {
        NftSet { flavour: SetFlavour::FilledByPackets { size, timeout }, ..self }
    }
}

/// The keys from `first` to `last`, both included; for a concatenation in each of its parts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeyInterval {
    pub first: ElementKey,
    pub last: ElementKey,
}

/// An element of a set of intervals as the kernel stores it: an interval of a concatenation, or one
/// of the two ends of a simple interval.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct StoredInterval {
    key: Vec<u8>,
    last: Option<Vec<u8>>,
    is_end: bool,
}

/// The elements of intervals, sorted. An interval up to the largest key has no end.
fn stored_intervals(set: NftSet<'_>, intervals: &[KeyInterval]) -> Vec<StoredInterval> {
    let mut stored = Vec::new();
    for KeyInterval { first, last } in intervals {
        let (key, last) = (first.to_bytes(), last.to_bytes());
        if set.key.len() > 1 {
            stored.push(StoredInterval { key, last: Some(last), is_end: false });
            continue;
        }
        stored.push(StoredInterval { key, last: None, is_end: false });
        stored.extend(next_key(last).map(|key| StoredInterval { key, last: None, is_end: true }));
    }
    sort_items(&mut stored);
    stored
}

/// The key after this one, as a number in network byte order; `None` after the largest key.
fn next_key(mut key: Vec<u8>) -> Option<Vec<u8>> {
    let at = key.iter().rposition(|byte| *byte != u8::MAX)?;
    key[at] += 1;
    key[at + 1..].fill(0);
    Some(key)
}

/// An element that packets have added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedKey {
    pub key: ElementKey,
    /// The time until it vanishes; 0 if it does not.
    pub remaining: Duration,
    pub count: PacketCount,
}

/// At most `burst` packets, and `packets` more in each time of so many seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketLimit {
    pub packets: u64,
    pub seconds: u64,
    pub burst: u32,
}

/// The packets and bytes that a counter has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketCount {
    pub packets: u64,
    pub bytes: u64,
}

impl PacketCount {
    fn parse_element(attr: ReplyAttribute<'_>) -> Option<PacketCount> {
        let expr = attr.find_nested(NFTA_SET_ELEM_EXPR);
        let expr = expr
            .or_else(|| attr.find_nested(NFTA_SET_ELEM_EXPRESSIONS)?.find_nested(NFTA_LIST_ELEM))
            .filter(|e| e.find_nested(NFTA_EXPR_NAME).is_some_and(|n| n.to_text() == "counter"));
        let data = expr?.find_nested(NFTA_EXPR_DATA)?;
        let number = |kind| data.find_nested(kind)?.value.try_into().ok().map(u64::from_be_bytes);
        Some(PacketCount {
            packets: number(NFTA_COUNTER_PACKETS)?,
            bytes: number(NFTA_COUNTER_BYTES)?,
        })
    }
}

impl NftBatch {
    /// Adds intervals, which must not overlap.
    pub fn add_intervals(&mut self, set: NftSet<'_>, intervals: &[KeyInterval]) -> &mut NftBatch {
        for some in stored_intervals(set, intervals).chunks(INTERVALS_PER_MESSAGE) {
            let mut request = element_request(NFT_MSG_NEWSETELEM, set);
            request.body.put_nested(NFTA_SET_ELEM_LIST_ELEMENTS, |list| {
                for StoredInterval { key, last, is_end } in some {
                    list.put_nested(NFTA_LIST_ELEM, |elem| {
                        elem.put_nested(NFTA_SET_ELEM_KEY, |data| write_value(data, key));
                        if let Some(last) = last {
                            elem.put_nested(NFTA_SET_ELEM_KEY_END, |data| write_value(data, last));
                        }
                        if *is_end {
                            elem.put_u32_be(NFTA_SET_ELEM_FLAGS, INTERVAL_END)
                        } else {
                            elem
                        }
                    });
                }
                list
            });
            self.push_elements(request, format!("{} intervals to {set}", some.len()));
        }
        self
    }
}

impl NftSocket {
    /// Whether the set has these intervals and no others.
    ///
    /// While the kernel ends a commit, a dump of a set of intervals lacks elements that are there
    /// before and after it, although the generation is the new one: only what is missing
    /// without a commit is missing.
    pub fn has_intervals(&self, set: NftSet<'_>, intervals: &[KeyInterval]) -> NetlinkResult<bool> {
        let wanted = stored_intervals(set, intervals);
        let mut is_equal = || Ok(self.dump_intervals(set)? == wanted);
        Ok(is_equal()? || self.read_between_commits(&mut is_equal)?)
    }

    /// The elements of a set of intervals, sorted.
    fn dump_intervals(&self, set: NftSet<'_>) -> NetlinkResult<Vec<StoredInterval>> {
        let bodies = self.dump_or_empty(
            &element_request(NFT_MSG_GETSETELEM, set),
            "list elements of",
            &set,
        )?;
        let value = |attr: ReplyAttribute<'_>, kind| {
            Some(attr.find_nested(kind)?.find_nested(NFTA_DATA_VALUE)?.value.to_vec())
        };
        let parse = |attr: ReplyAttribute<'_>| {
            let flags = attr
                .find_nested(NFTA_SET_ELEM_FLAGS)
                .and_then(ReplyAttribute::to_u32_be)
                .unwrap_or(0);
            let last = value(attr, NFTA_SET_ELEM_KEY_END);
            // An element that matches all packets has no key.
            let key = value(attr, NFTA_SET_ELEM_KEY).unwrap_or_default();
            StoredInterval { key, last, is_end: flags & INTERVAL_END != 0 }
        };
        let mut found: Vec<_> = element_lists(&bodies).map(parse).collect();
        sort_items(&mut found);
        Ok(found)
    }

    /// The elements of a set [with counters](NftSet::with_counters), with their counters; none if
    /// there is no such set.
    pub fn dump_counters(
        &self,
        set: NftSet<'static>,
    ) -> NetlinkResult<Vec<(SetElement, PacketCount)>> {
        let bodies = self.dump_or_empty(
            &element_request(NFT_MSG_GETSETELEM, set),
            "list elements of",
            &set,
        )?;
        Ok(element_lists(&bodies)
            .filter_map(|attr| Some((parse_element(set, attr)?, PacketCount::parse_element(attr)?)))
            .collect())
    }

    /// The elements of a set [filled by packets](NftSet::filled_by_packets) that count them; none if
    /// there is no such set.
    pub fn dump_recorded(&self, set: NftSet<'static>) -> NetlinkResult<Vec<RecordedKey>> {
        let bodies = self.dump_or_empty(
            &element_request(NFT_MSG_GETSETELEM, set),
            "list elements of",
            &set,
        )?;
        Ok(element_lists(&bodies)
            .filter_map(|attr| {
                let left = attr
                    .find_nested(NFTA_SET_ELEM_EXPIRATION)
                    .and_then(|left| left.value.try_into().ok());
                Some(RecordedKey {
                    key: parse_element(set, attr)?.key,
                    remaining: Duration::from_millis(left.map_or(0, u64::from_be_bytes)),
                    count: PacketCount::parse_element(attr).unwrap_or_default(),
                })
            })
            .collect())
    }
}

fn element_lists(bodies: &[Vec<u8>]) -> impl Iterator<Item = ReplyAttribute<'_>> {
    let lists = bodies.iter().filter_map(|body| find_in_message(body, NFTA_SET_ELEM_LIST_ELEMENTS));
    lists.flat_map(ReplyAttribute::nested_attributes)
}

/// Packets that add themselves to sets, and conditions on parts of a value.
impl NftRule {
    /// `add @set { a . b limit rate .. }`: packets beyond the limit of their key end the rule. With
    /// Linux before 5.6 the limit of an element that exists does not count.
    pub fn add_with_limit(
        self,
        fields: &[PacketField],
        set: NftSet<'_>,
        limit: PacketLimit,
    ) -> NftRule {
        self.add_limited(fields, set, limit, 0)
    }

    /// `add @set { a . b limit rate over .. }`: packets within the limit of their key end the rule.
    pub fn add_over_limit(
        self,
        fields: &[PacketField],
        set: NftSet<'_>,
        limit: PacketLimit,
    ) -> NftRule {
        self.add_limited(fields, set, limit, NFT_LIMIT_F_INV)
    }

    fn add_limited(
        self,
        fields: &[PacketField],
        set: NftSet<'_>,
        PacketLimit { packets, seconds, burst }: PacketLimit,
        flags: u32,
    ) -> NftRule {
        self.add_counted(fields, set, ADD, "limit", |limit| {
            limit.put_bytes(NFTA_LIMIT_RATE, &packets.to_be_bytes());
            limit.put_bytes(NFTA_LIMIT_UNIT, &seconds.to_be_bytes());
            limit.put_u32_be(NFTA_LIMIT_BURST, burst);
            limit.put_u32_be(NFTA_LIMIT_TYPE, 0).put_u32_be(NFTA_LIMIT_FLAGS, flags)
        })
    }

    /// `add @set { a . b ct count over count }`: packets whose key has at most `count` tracked
    /// connections end the rule. The set must not have a timeout.
    pub fn add_over_connections(
        self,
        fields: &[PacketField],
        set: NftSet<'_>,
        count: u32,
    ) -> NftRule {
        self.add_counted(fields, set, ADD, "connlimit", |limit| {
            limit.put_u32_be(NFTA_CONNLIMIT_COUNT, count);
            limit.put_u32_be(NFTA_CONNLIMIT_FLAGS, NFT_CONNLIMIT_F_INV)
        })
    }

    /// Adds the key with an expression that its element keeps.
    fn add_counted(
        self,
        fields: &[PacketField],
        set: NftSet<'_>,
        operation: u32,
        name: &str,
        fill: impl FnOnce(&mut AttributeBuilder) -> &mut AttributeBuilder,
    ) -> NftRule {
        const FIRST: RegisterIndex = 0;
        self.load_key(fields).push_expression(build_expression("dynset", |data| {
            data.put_text(NFTA_DYNSET_SET_NAME, set.name).put_u32_be(NFTA_DYNSET_OP, operation);
            data.put_u32_be(NFTA_DYNSET_SREG_KEY, register_number(FIRST));
            if let SetFlavour::FilledByPackets { timeout: seconds @ 1.., .. } = set.flavour {
                let milliseconds = u64::from(seconds) * 1000;
                data.put_bytes(NFTA_DYNSET_TIMEOUT, &milliseconds.to_be_bytes());
            }
            data.put_nested(NFTA_DYNSET_EXPR, |expr| {
                expr.put_text(NFTA_EXPR_NAME, name).put_nested(NFTA_EXPR_DATA, fill)
            })
        }))
    }

    /// `update @set { a . b timeout .. counter }`: adds the key, or restarts its timeout, and counts
    /// the packet.
    pub fn update_set(self, fields: &[PacketField], set: NftSet<'_>) -> NftRule {
        self.add_counted(fields, set, UPDATE, "counter", |counter| counter)
    }

    /// Whether a field of one byte is in `first..=last`.
    pub fn byte_in_range(self, field: PacketField, first: u8, last: u8) -> NftRule {
        let rule =
            self.load_field(field, 0).push_expression(compare_expression(NFT_CMP_GTE, &[first]));
        rule.push_expression(compare_expression(NFT_CMP_LTE, &[last]))
    }

    /// Whether a field of one byte is `value`.
    pub fn byte_is(self, field: PacketField, value: u8) -> NftRule {
        self.match_bytes(field, true, &[value])
    }

    /// `meta protocol != type`, an `ETH_P_*`.
    pub fn ethertype_is_not(self, ethertype: u16) -> NftRule {
        self.match_bytes(PacketField::Protocol, false, &ethertype.to_be_bytes())
    }

    /// `meta protocol type`, an `ETH_P_*`.
    pub fn ethertype_is(self, ethertype: u16) -> NftRule {
        self.match_bytes(PacketField::Protocol, true, &ethertype.to_be_bytes())
    }

    /// `ip hdrlength != 5`: the header of IPv4 has options.
    pub fn has_ip_options(self) -> NftRule {
        let rule = self.load_field(PacketField::IpHeader, 0).apply_mask(&[0x0f]);
        rule.push_expression(compare_expression(NFT_CMP_NEQ, &[5]))
    }

    /// `tcp flags & (rst | ack) != 0`: a segment that opens no connection.
    pub fn opens_no_connection(self) -> NftRule {
        let rule = self.load_field(PacketField::TcpFlags, 0).apply_mask(&[0x14]);
        rule.push_expression(compare_expression(NFT_CMP_NEQ, &[0]))
    }

    /// `arp operation reply`
    pub fn match_arp_reply(self) -> NftRule {
        self.match_bytes(PacketField::ArpOperation, true, &[0, 2])
    }

    /// `meta oiftype != 0`: the link by which the packet leaves is known.
    pub fn match_leaving(self) -> NftRule {
        self.match_bytes(PacketField::Oiftype, false, &[0, 0])
    }

    /// Type and code of ICMP.
    pub fn icmp_is(self, kind: u8, code: u8) -> NftRule {
        self.match_bytes(PacketField::IcmpType, true, &[kind, code])
    }

    /// `ether type type`, an `ETH_P_*`: also that of a VLAN tag.
    pub fn frame_type_is(self, ethertype: u16) -> NftRule {
        self.match_bytes(PacketField::EtherType, true, &ethertype.to_be_bytes())
    }

    /// `ct status dnat`: a packet of a connection whose destination was translated.
    pub fn match_dnat(self) -> NftRule {
        self.any_bit_set(PacketField::CtStatus, CT_STATUS_DNAT)
    }

    /// `ct direction reply`
    pub fn match_reply(self) -> NftRule {
        self.byte_is(PacketField::CtDirection, 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_after_the_largest_one_is_none() {
        assert_eq!(next_key(vec![1, 255, 255]), Some(vec![2, 0, 0]));
        assert_eq!(next_key(vec![0, 0, 7]), Some(vec![0, 0, 8]));
        assert_eq!(next_key(vec![255, 255]), None);
    }
}
