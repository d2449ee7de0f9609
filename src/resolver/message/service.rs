//! The records SVCB and HTTPS (RFC 9460) without the addresses in them.
//!
//! A hint would be an address that the policy was not asked about. The key for an encrypted
//! greeting would hide from the network which name a client connects to.

use domain::base::name::{ParsedName, ToName};
use domain::base::rdata::UnknownRecordData;
use domain::base::{ParsedRecord, Rtype};
use domain::rdata::svcb::{Https, Svcb, SvcbRdata};

const MANDATORY: u16 = 0;
const IPV4HINT: u16 = 4;
const ECH: u16 = 5;
const IPV6HINT: u16 = 6;
const REMOVED: [u16; 3] = [IPV4HINT, ECH, IPV6HINT];

/// The data of a record SVCB or HTTPS without the parameters `ipv4hint`, `ipv6hint` and `ech`. None
/// if it is malformed, or if clients must not use it without one of them.
pub fn without_addresses(record: ParsedRecord<'_, [u8]>) -> Option<UnknownRecordData<Vec<u8>>> {
    let kind = record.rtype();
    let data = if kind == Rtype::HTTPS {
        remaining_data(record.into_record::<Https<_, _>>().ok()??.data())
    } else {
        remaining_data(record.into_record::<Svcb<_, _>>().ok()??.data())
    };
    UnknownRecordData::from_octets(kind, data?).ok()
}

fn remaining_data<Variant>(data: &SvcbRdata<Variant, &[u8], ParsedName<&[u8]>>) -> Option<Vec<u8>> {
    let mut bytes = data.priority().to_be_bytes().to_vec();
    let Ok(()) = data.target().compose(&mut bytes);
    for param in data.params().iter_raw() {
        let key = param.key().to_int();
        let value = *param.value();
        if key == MANDATORY && names_removed(value) {
            return None;
        }
        if !REMOVED.contains(&key) {
            bytes.extend(key.to_be_bytes());
            bytes.extend(u16::try_from(value.len()).ok()?.to_be_bytes());
            bytes.extend(value);
        }
    }
    Some(bytes)
}

/// Whether the value of `mandatory`, a list of keys, has one of those that are removed.
fn names_removed(value: &[u8]) -> bool {
    value.chunks(2).any(|key| REMOVED.iter().any(|removed| key == removed.to_be_bytes()))
}
