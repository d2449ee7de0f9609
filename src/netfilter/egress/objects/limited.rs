//! The sets and rules of a policy that limit connections.

use super::super::limits::{ConnectionLimits, ConnectionRate};
use super::{PolicyObjects, PolicySet, SetContent};
use crate::netlink::nftables::{
    CT_STATE_NEW, NftRule, NftSet, PacketField, PacketLimit, ValueType,
};

/// The maximum number of containers with one policy whose connections are counted, and how long an
/// unused limit of new connections is kept, in seconds.
const MOST_LIMITED: u32 = 65536;
const LIMIT_TIMEOUT: u32 = 120;
/// The limits of new and of open connections of each container.
pub(super) const NEW: &str = "new";
pub(super) const OPEN: &str = "open";

impl PolicyObjects {
    /// Adds the sets of the limits, and returns the rules that refuse what is beyond them.
    pub(super) fn add_limits(&mut self, prefix: &str, limits: ConnectionLimits) -> Vec<NftRule> {
        let key = &[PacketField::EtherSaddr];
        let opens = || NftRule::new().any_bit_set(PacketField::CtState, CT_STATE_NEW);
        let mut rules = Vec::new();
        if let Some(ConnectionRate { count: packets, seconds }) = limits.new {
            let burst = u32::try_from(packets).unwrap_or(u32::MAX);
            let limit = PacketLimit { packets, seconds, burst };
            rules.push(self.add_limit(prefix, NEW, LIMIT_TIMEOUT, |set| {
                opens().add_over_limit(key, set, limit)
            }));
        }
        if let Some(count) = limits.connections {
            let open = |set: NftSet<'_>| opens().add_over_connections(key, set, count);
            rules.push(self.add_limit(prefix, OPEN, 0, open));
        }
        rules
    }

    fn add_limit(
        &mut self,
        prefix: &str,
        name: &'static str,
        timeout: u32,
        rule: impl FnOnce(NftSet<'_>) -> NftRule,
    ) -> NftRule {
        let (name, content) = (
            format!("{prefix}_{name}"),
            SetContent::FilledByPackets { most: MOST_LIMITED, timeout },
        );
        let set = PolicySet { name, key: &[ValueType::EtherAddr], content };
        let rule = rule(set.nft_set(self.table)).go_to(self.end).with_comment("too many");
        self.sets.push(set);
        rule
    }
}
