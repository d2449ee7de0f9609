//! Sets whose elements vanish after a time that each has for itself.

use super::super::error::NetlinkResult;
use super::super::request::NetlinkRequest;
use super::NftSocket;
use super::batch::NftBatch;
use super::flavour::SetFlavour;
use super::object::{NftSet, element_request, write_value};
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::value::ElementKey;

/// The maximum number of keys in one message or datagram.
const KEYS_PER_MESSAGE: usize = 64;

/// A key of a set, and the number of seconds after which it vanishes.
pub type TimedKey = (ElementKey, u32);

impl NftSet<'_> {
    /// A set whose elements are [`TimedKey`]s.
    pub const fn with_timeouts(self) -> Self {
        NftSet { flavour: SetFlavour::Timeouts, ..self }
    }
}

impl NftBatch {
    /// Adds keys to a set [with timeouts](NftSet::with_timeouts). The time of a key that the set has
    /// already may stay as it is: to change it, delete the key in the same batch before.
    pub fn add_timed_keys(&mut self, set: NftSet<'_>, keys: &[TimedKey]) -> &mut NftBatch {
        for some in keys.chunks(KEYS_PER_MESSAGE) {
            let request = timed_request(NFT_MSG_NEWSETELEM, set, some);
            self.push_elements(request, format!("{} elements to {set}", some.len()));
        }
        self
    }

    /// Deletes keys, which must exist.
    pub fn delete_keys(&mut self, set: NftSet<'_>, keys: &[TimedKey]) -> &mut NftBatch {
        for some in keys.chunks(KEYS_PER_MESSAGE) {
            let request = timed_request(NFT_MSG_DELSETELEM, set, some);
            self.push_elements(request, format!("{} elements of {set}", some.len()));
        }
        self
    }
}

impl NftSocket {
    /// Those of the keys that the set has.
    pub fn present_keys(&self, set: NftSet<'_>, keys: &[TimedKey]) -> NetlinkResult<Vec<TimedKey>> {
        let mut present = Vec::new();
        for some in keys.chunks(KEYS_PER_MESSAGE) {
            let request =
                |key| (timed_request(NFT_MSG_GETSETELEM, set, std::slice::from_ref(key)), 0);
            let requests: Vec<_> = some.iter().map(request).collect();
            let replies = self.socket.exchange_all(&requests);
            let replies = replies.map_err(|f| f.into_error("read elements of", &set))?;
            for (key, reply) in some.iter().zip(replies) {
                match reply {
                    Ok(_) => present.push(key.clone()),
                    Err(failure) if failure.is_not_found() => {}
                    Err(failure) => return Err(failure.into_error("read an element of", &set)),
                }
            }
        }
        Ok(present)
    }
}

fn timed_request(message: u16, set: NftSet<'_>, keys: &[TimedKey]) -> NetlinkRequest {
    let mut request = element_request(message, set);
    request.body.put_nested(NFTA_SET_ELEM_LIST_ELEMENTS, |list| {
        for (key, seconds) in keys {
            list.put_nested(NFTA_LIST_ELEM, |elem| {
                elem.put_nested(NFTA_SET_ELEM_KEY, |data| write_value(data, &key.to_bytes()));
                if message == NFT_MSG_NEWSETELEM {
                    let milliseconds = u64::from(*seconds) * 1000;
                    elem.put_bytes(NFTA_SET_ELEM_TIMEOUT, &milliseconds.to_be_bytes());
                }
                elem
            });
        }
        list
    });
    request
}
