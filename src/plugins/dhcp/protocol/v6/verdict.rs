//! What the answers of servers come to: an offer, an address, or a refusal (sections 18.2.9 and
//! 18.2.10).

use std::net::Ipv6Addr;

use super::super::timing::{Moment, Random};
use super::lease::{self, Flaw, Lease};
use super::message::{IaNa, Message, Status, status};

/// An address that a server has promised or given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The address.
    pub address: Ipv6Addr,
    /// The server's DUID.
    pub server: Vec<u8>,
}

impl From<&Lease> for Claim {
    fn from(lease: &Lease) -> Claim {
        Claim { address: lease.address, server: lease.server.clone() }
    }
}

/// What a Reply comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// An address.
    Given(Lease),
    /// The server does not know the client.
    NoBinding,
    /// The server has none to give, which says nothing about one that there is already.
    NoAddress(String),
    /// It may not have, or keep, the address.
    Refused(String),
    /// Nothing that counts.
    Useless(String),
}

/// What an Advertise offers to the association `iaid`, or why it is nothing.
pub fn offer(message: &Message, iaid: u32) -> Result<Claim, String> {
    let ia = association(message, iaid)?;
    let usable = ia.addrs.iter().find(|addr| lease::is_usable(addr));
    let address = usable.ok_or_else(|| Flaw::NoAddress.to_string())?.addr;
    Ok(Claim { address, server: message.server.clone() })
}

/// The client's identity association, unless the server has not done what it was asked for.
fn association(message: &Message, iaid: u32) -> Result<&IaNa, String> {
    let ia = message.ias.iter().find(|ia| ia.iaid == iaid);
    match failure(message, ia) {
        Some(status) => Err(status.to_string()),
        None => ia.ok_or_else(|| Flaw::NoAddress.to_string()),
    }
}

/// What a Reply says about the association `iaid` with the address `own`, in answer to a message
/// of the moment `asked`.
pub fn judge(
    reply: &Message,
    iaid: u32,
    own: Ipv6Addr,
    asked: Moment,
    random: &mut Random,
) -> Verdict {
    let ia = reply.ias.iter().find(|ia| ia.iaid == iaid);
    if let Some(status) = failure(reply, ia) {
        let text = status.to_string();
        return match status.code {
            status::NO_BINDING => Verdict::NoBinding,
            status::NO_ADDRS_AVAIL => Verdict::NoAddress(text),
            status::NOT_ON_LINK => Verdict::Refused(text),
            // It may be better the next time, which comes by itself.
            _ => Verdict::Useless(text),
        };
    }
    let flaw = match ia {
        None => Flaw::NoAddress,
        Some(ia) => match Lease::from_reply(reply, ia, Some(own), asked, random) {
            Ok(lease) => return Verdict::Given(lease),
            Err(flaw) => flaw,
        },
    };
    match flaw {
        Flaw::Withdrawn => Verdict::Refused(flaw.to_string()),
        Flaw::NoAddress | Flaw::BadTimes => Verdict::Useless(flaw.to_string()),
    }
}

/// What a server says against it, for the whole message or the association.
fn failure<'m>(message: &'m Message, ia: Option<&'m IaNa>) -> Option<&'m Status> {
    let all = [Some(&message.status), ia.map(|ia| &ia.status)];
    all.into_iter().flatten().find(|status| !status.is_success())
}
