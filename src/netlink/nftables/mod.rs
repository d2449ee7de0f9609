//! The packet filter, `nf_tables`: tables, chains, sets, maps and rules.
//!
//! [`NftSocket`] is a socket in one network namespace. Changes are collected in a [`NftBatch`] and
//! applied atomically by [`NftSocket::commit_batch`]; no lock is needed, because the kernel
//! processes one batch after the other. Objects are constants with all of their settings, so that a
//! batch can create the objects that it needs.
//!
//! | file | |
//! | --- | --- |
//! | `object.rs` | tables, chains, sets, maps and their elements |
//! | `value.rs` | types, keys and values |
//! | `rule.rs` | rules, and the expressions that the kernel executes |
//! | `field.rs` | the fields of packets that rules compare |
//! | `expression.rs` | the expressions of iptables on top of `nf_tables` |
//! | `flavour.rs` | what elements of sets have besides keys |
//! | `set.rs` | sets of intervals, with counters, and filled by packets |
//! | `timed.rs` | sets whose elements vanish after a time |
//! | `batch.rs` | batches of changes |
//! | `read.rs` | reads objects, rules and elements |
//! | `forward.rs`, `packet.rs` | whether the rules of the node drop a packet |
//! | `uapi.rs` | the kernel's constants |

mod batch;
pub(super) mod expression;
mod field;
mod flavour;
mod forward;
mod object;
mod packet;
pub(super) mod read;
mod rule;
mod set;
#[cfg(test)]
mod tests;
mod timed;
pub(super) mod uapi;
mod userdata;
mod value;

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use rtnetlink::sys::protocols::NETLINK_NETFILTER;

pub use self::batch::{NftBatch, RulePosition};
pub use self::expression::{ForeignRule, LoadedField, RuleExpression, XtExtension};
pub use self::field::PacketField;
pub use self::forward::{ForwardChain, ForwardJudgement};
pub use self::object::{
    BRIDGE_FILTER, DSTNAT, ElementData, FILTER, NetfilterHook, NftChain, NftSet, NftTable,
    PacketVerdict, RAW, SRCNAT, SetElement, TableFamily,
};
pub use self::packet::ForwardedPacket;
pub use self::read::{ChainInfo, CommentSelector, RuleInfo};
pub use self::rule::{
    CT_STATE_ANSWERS, CT_STATE_ESTABLISHED, CT_STATE_NEW, CompatExtension, NftRule,
};
pub use self::set::{KeyInterval, PacketCount, PacketLimit, RecordedKey};
pub use self::timed::TimedKey;
use self::uapi::{NFNL_SUBSYS_NFTABLES, NFNLGRP_NFTABLES};
pub use self::userdata::cut_comment;
pub use self::value::{ElementKey, NftValue, TransportProtocol, ValueType};
use super::error::NetlinkResult;
use super::socket::NetlinkSocket;

/// The type of a message to the subsystem `nf_tables`.
fn message_type(message: u16) -> u16 {
    NFNL_SUBSYS_NFTABLES << 8 | message
}

/// A socket for the packet filter of one network namespace. Use one socket for a whole call:
/// closing it soon after a deletion takes some 10 ms.
#[derive(Debug)]
pub struct NftSocket {
    socket: NetlinkSocket,
    /// Whether the kernel may support `NFT_MSG_DESTROY..` (Linux 6.3).
    destroys: Cell<bool>,
}

impl NftSocket {
    /// A socket in the calling thread's namespace.
    pub fn open() -> NetlinkResult<NftSocket> {
        Ok(NftSocket { socket: NetlinkSocket::open(NETLINK_NETFILTER)?, destroys: Cell::new(true) })
    }

    /// Watches all changes of rules in the calling thread's namespace.
    pub fn watch_changes() -> NetlinkResult<NftablesWatch> {
        let group = u32::try_from(NFNLGRP_NFTABLES).unwrap_or_default();
        NetlinkSocket::listen_to_groups(NETLINK_NETFILTER, &[group]).map(NftablesWatch)
    }
}

/// Receives an event for each change by any process. The descriptor is readable after a change.
#[derive(Debug)]
pub struct NftablesWatch(NetlinkSocket);

impl AsFd for NftablesWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl NftablesWatch {
    /// Waits for a change, and discards all queued events; `false` if there was none before
    /// `until`.
    pub fn wait_for_change(&self, until: Instant) -> NetlinkResult<bool> {
        let limit = until.saturating_duration_since(Instant::now());
        // Lost events are changes, too.
        let has_changed = self
            .0
            .wait_for_datagram(limit)
            .and_then(|waited| Ok(self.0.drain_events(&|_| true)? || waited));
        has_changed.map_err(|f| f.into_error("watch", &"nf_tables"))
    }
}
