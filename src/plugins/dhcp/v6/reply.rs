//! How the answers of servers are judged: an offer, an address, or a refusal (sections 18.2.9 and
//! 18.2.10).

use std::net::Ipv6Addr;

use super::super::timing::{BootTime, Random};
use super::lease::{self, Flaw, Lease};
use super::message::{IaNa, Message, Status, status};

/// An address that a server has promised or given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The address.
    pub address: Ipv6Addr,
    /// The server's DUID.
    pub server: Vec<u8>,
}

impl From<&Lease> for Binding {
    fn from(lease: &Lease) -> Binding {
        Binding { address: lease.address, server: lease.server.clone() }
    }
}

/// An offer of a server's Advertise.
#[derive(Clone, Debug)]
pub struct Offer {
    /// The address.
    pub binding: Binding,
    /// The preference of the server, 0 to 255.
    pub preference: u8,
}

/// How a Reply is judged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// An address.
    Given(Lease),
    /// The server does not know the client.
    NoBinding,
    /// The server has no address to give, which does not end a lease that exists.
    NoAddress(String),
    /// The client must not use the address.
    Refused(String),
    /// A Reply that is ignored.
    Useless(String),
}

/// The offer of an Advertise to the association `iaid`, or why there is none.
pub fn offer(message: &Message, iaid: u32) -> Result<Offer, String> {
    let ia = association(message, iaid)?;
    let usable = ia.addrs.iter().find(|addr| lease::is_usable(addr));
    let address = usable.ok_or_else(|| Flaw::NoAddress.to_string())?.addr;
    let binding = Binding { address, server: message.server.clone() };
    Ok(Offer { binding, preference: message.preference })
}

/// The client's identity association, unless its status code or the message's is a failure.
fn association(message: &Message, iaid: u32) -> Result<&IaNa, String> {
    let ia = message.ias.iter().find(|ia| ia.iaid == iaid);
    match failure(message, ia) {
        Some(status) => Err(status.to_string()),
        None => ia.ok_or_else(|| Flaw::NoAddress.to_string()),
    }
}

/// Judges a Reply for the association `iaid` with the address `own`, in answer to a message
/// of the moment `asked`.
pub fn evaluate(
    reply: &Message,
    iaid: u32,
    own: Ipv6Addr,
    asked: BootTime,
    random: &mut Random,
) -> Outcome {
    let ia = reply.ias.iter().find(|ia| ia.iaid == iaid);
    if let Some(status) = failure(reply, ia) {
        let text = status.to_string();
        return match status.code {
            status::NO_BINDING => Outcome::NoBinding,
            status::NO_ADDRS_AVAIL => Outcome::NoAddress(text),
            status::NOT_ON_LINK => Outcome::Refused(text),
            // The next transmission may get a better answer.
            _ => Outcome::Useless(text),
        };
    }
    let flaw = match ia {
        None => Flaw::NoAddress,
        Some(ia) => match Lease::from_reply(reply, ia, Some(own), asked, random) {
            Ok(lease) => return Outcome::Given(lease),
            Err(flaw) => flaw,
        },
    };
    match flaw {
        Flaw::Withdrawn => Outcome::Refused(flaw.to_string()),
        Flaw::NoAddress | Flaw::BadTimes => Outcome::Useless(flaw.to_string()),
    }
}

/// The failure that the server reports, for the whole message or the association.
fn failure<'m>(message: &'m Message, ia: Option<&'m IaNa>) -> Option<&'m Status> {
    let all = [Some(&message.status), ia.map(|ia| &ia.status)];
    all.into_iter().flatten().find(|status| !status.is_success())
}
