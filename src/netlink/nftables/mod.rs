//! The packet filter, `nf_tables`: tables, chains, sets, maps and rules.
//!
//! [`Nft`] is a socket in one network namespace. Changes are collected in a [`Batch`] and applied
//! atomically by [`Nft::commit`]; no lock is needed, because the kernel processes one batch after the
//! other. Objects are constants with all of their settings, so that a batch can ensure the objects that
//! it needs.
//!
//! | file | |
//! | --- | --- |
//! | `object.rs` | tables, chains, sets, maps and their elements |
//! | `value.rs` | types, keys and values |
//! | `rule.rs` | rules, and the expressions that the kernel executes |
//! | `expression.rs` | the expressions of iptables on top of `nf_tables` |
//! | `batch.rs` | changes, and committing them |
//! | `read.rs` | reading objects, rules and elements |
//! | `forward.rs`, `packet.rs` | whether the rules of the node drop a packet |
//! | `uapi.rs` | the kernel's constants |

mod batch;
pub(super) mod expression;
mod forward;
mod object;
mod packet;
pub(super) mod read;
mod rule;
#[cfg(test)]
mod tests;
pub(super) mod uapi;
mod value;

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use rtnetlink::sys::protocols::NETLINK_NETFILTER;

pub use self::batch::{Batch, Place};
pub use self::expression::{Expression, Loaded};
pub use self::forward::ForwardChain;
pub use self::object::{
    Chain, DSTNAT, Data, Element, FILTER, Family, Hook, RAW, SRCNAT, Set, Table, Verdict, cut,
};
pub use self::packet::Packet;
pub use self::read::{ByComment, RuleInfo};
pub use self::rule::{CT_STATE_ANSWERS, CT_STATUS_DNAT, Extension, Field, Rule};
use self::uapi::{NFNL_SUBSYS_NFTABLES, NFNLGRP_NFTABLES};
pub use self::value::{Key, L4, Type, Value};
use super::error::Result;
use super::socket::Socket;

/// The type of a message to the subsystem.
fn kind(message: u16) -> u16 {
    NFNL_SUBSYS_NFTABLES << 8 | message
}

/// A socket for the packet filter of one network namespace. Use one socket for a whole call: closing
/// it soon after a deletion takes some 10 ms.
#[derive(Debug)]
pub struct Nft {
    socket: Socket,
    /// Whether the kernel may know `NFT_MSG_DESTROY..` (6.3).
    destroys: Cell<bool>,
}

impl Nft {
    /// A socket in the calling thread's namespace.
    pub fn open() -> Result<Nft> {
        Ok(Nft { socket: Socket::open(NETLINK_NETFILTER)?, destroys: Cell::new(true) })
    }

    /// Watches all changes of rules in the calling thread's namespace.
    pub fn watch() -> Result<Watch> {
        let group = u32::try_from(NFNLGRP_NFTABLES).unwrap_or_default();
        Socket::listen(NETLINK_NETFILTER, &[group]).map(Watch)
    }
}

/// Receives an event for each change, by any process.
#[derive(Debug)]
pub struct Watch(Socket);

/// Readable after a change.
impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Watch {
    /// Waits for a change, and discards all queued events; `false` if there was none before `until`.
    pub fn heard(&self, until: Instant) -> Result<bool> {
        let limit = until.saturating_duration_since(Instant::now());
        // Every change counts. Events that were lost are changes as well.
        let heard = self.0.wait(limit).and_then(|waited| Ok(self.0.heard(&|_| true)? || waited));
        heard.map_err(|f| f.context("watch", &"nf_tables"))
    }
}
