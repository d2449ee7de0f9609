//! DHCPv6 for one address (`IA_NA`), RFC 9915, which obsoletes RFC 8415; and the identity of a
//! client.
//!
//! | file | |
//! | --- | --- |
//! | `message.rs` | messages and their options |
//! | `lease.rs` | the lease of a Reply and its CNI result |
//! | `retransmit.rs` | retransmission timeouts, section 15 |
//! | `neighbour.rs` | duplicate address detection |
//!
//! DUID and IAID are derived from the names of the attachment, so that neither a restart of the
//! daemon nor another Ethernet address creates a new client.

pub mod lease;
pub mod message;
pub mod neighbour;
pub mod retransmit;

use sha2::{Digest, Sha512};

/// The type of a DUID that is a UUID (RFC 6355).
const DUID_UUID: [u8; 2] = [0, 4];

/// The DUID of the client with this DHCP client identifier (option 61): a UUID of version 8 (RFC
/// 9562) from the first 16 bytes of the identifier's SHA-512.
pub fn duid_from_client_id(client_id: &[u8]) -> Vec<u8> {
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&Sha512::digest(client_id)[..16]);
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    [&DUID_UUID[..], &uuid].concat()
}

/// The IAID of an interface: the first 4 bytes of the SHA-512 of its name.
pub fn interface_iaid(ifname: &str) -> u32 {
    let hash = Sha512::digest(ifname);
    u32::from_be_bytes([hash[0], hash[1], hash[2], hash[3]])
}

/// The text form of a DUID: hexadecimal bytes, separated by colons.
pub fn duid_text(duid: &[u8]) -> String {
    duid.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_stable_and_differ() {
        // Servers store these values: another value is another client.
        let one = duid_from_client_id(b"\0c1/net/eth0");
        assert_eq!(duid_text(&one), "00:04:51:42:44:e6:7f:62:89:15:89:59:c2:45:b1:e4:97:57");
        assert_eq!(one.len(), 18);
        assert_eq!((one[8] >> 4, one[10] >> 6), (8, 2), "version and variant");
        assert_ne!(one, duid_from_client_id(b"\0c2/net/eth0"));
        assert_ne!(interface_iaid("eth0"), interface_iaid("eth1"));
        assert_eq!(interface_iaid("eth0"), 0x0de8_08c1);
    }
}
