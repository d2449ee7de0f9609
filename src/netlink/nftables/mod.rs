//! The packet filter, `nf_tables`: tables, chains, sets, maps and rules.
//!
//! [`Nft`] is a socket in one network namespace. Changes are collected in a [`Batch`] and happen
//! together with [`Nft::commit`], or not at all; nothing needs a lock, because the kernel takes
//! one batch after the other. Objects are constants that say how they are made, so that a batch
//! can ensure the objects that it needs at no cost.
//!
//! | file | |
//! | --- | --- |
//! | `object.rs` | tables, chains, sets and maps |
//! | `value.rs`, `element.rs` | types, values, elements |
//! | `rule.rs`, `expr.rs` | rules as they are read, and as the kernel runs them |
//! | `batch.rs`, `commit.rs` | changes, and making them |
//! | `read.rs` | what is there |
//! | `userdata.rs` | comments |
//! | `uapi.rs` | the kernel's constants |

mod batch;
mod commit;
mod element;
mod expr;
mod object;
pub(super) mod read;
mod rule;
#[cfg(test)]
mod tests;
pub(super) mod uapi;
mod userdata;
mod value;

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

pub use self::batch::Batch;
pub use self::element::{Data, Element};
pub use self::expr::{Field, Verdict};
pub use self::object::{Chain, DSTNAT, FILTER, Family, Hook, RAW, SRCNAT, Set, Table};
pub use self::read::{ByComment, DroppingChain, RuleInfo};
pub use self::rule::{CT_STATE_ANSWERS, CT_STATUS_DNAT, Rule};
use self::uapi::{NFNL_SUBSYS_NFTABLES, NFNLGRP_NFTABLES};
pub use self::userdata::cut;
pub use self::value::{Key, L4, Type, Value};
use super::error::Result;
use super::netfilter::NfSocket;

/// The type of a message to the subsystem.
fn kind(message: u16) -> u16 {
    NFNL_SUBSYS_NFTABLES << 8 | message
}

/// A socket to the packet filter of one network namespace. Keep it for all of a call's work: to
/// close it soon after deleting something takes the kernel some 10 ms.
#[derive(Debug)]
pub struct Nft {
    socket: NfSocket,
    /// Whether the kernel can delete what may be absent (6.3), as far as is known.
    destroys: Cell<bool>,
}

impl Nft {
    /// A socket in the calling thread's namespace.
    pub fn open() -> Result<Nft> {
        Ok(Nft { socket: NfSocket::open()?, destroys: Cell::new(true) })
    }

    /// A socket that hears of every change of rules in the calling thread's namespace.
    pub fn watch() -> Result<Watch> {
        let nft = Nft::open()?;
        // Its first request gives a socket its port. One without is sent no events.
        nft.generation()?;
        let group = u32::try_from(NFNLGRP_NFTABLES).unwrap_or_default();
        let joined = nft.socket.socket.join(group);
        joined.map_err(|e| e.doing("watch", || "nf_tables".to_owned()))?;
        Ok(Watch(nft))
    }
}

/// Hears of changes, by whatever program.
#[derive(Debug)]
pub struct Watch(Nft);

/// Readable when there was a change.
impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.socket.socket.as_fd()
    }
}

impl Watch {
    /// Waits for a change; whether there was one before `until`.
    pub fn heard(&self, until: Instant) -> Result<bool> {
        self.0.socket.heard(until).map_err(|e| e.doing("watch", || "nf_tables".to_owned()))
    }
}
