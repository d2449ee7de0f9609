//! Duplicate address detection: Neighbor Solicitations (RFC 4862, section 5.4) and the detection of
//! conflicts in received frames (RFC 4861).

use std::net::Ipv6Addr;

use super::super::v4::frame::internet_checksum;
use crate::netlink::MacAddress;

/// Offsets in an Ethernet frame, in bytes.
const ETHERNET: usize = 14;
const IPV6: usize = 40;
const TARGET: usize = ETHERNET + IPV6 + 8;
const END: usize = TARGET + 16;

const TYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const ICMPV6: u8 = 58;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// The hop limit of Neighbor Discovery: packets that were forwarded have a lower one.
const HOP_LIMIT: u8 = 255;
/// Length of an ICMPv6 packet with a target and without options.
const LENGTH: u8 = 24;

/// A Neighbor Solicitation for `addr` from the unspecified address.
pub fn probe_frame(mac: MacAddress, addr: Ipv6Addr) -> Vec<u8> {
    let octets = addr.octets();
    let [.., a, b, c] = octets;
    // The solicited-node multicast address (RFC 4291, section 2.7.1).
    let group =
        Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(a), u16::from_be_bytes([b, c]));
    let mut frame = [&[0x33, 0x33, 0xff, a, b, c][..], &mac.0, &TYPE_IPV6].concat();
    frame.extend([0x60, 0, 0, 0, 0, LENGTH, ICMPV6, HOP_LIMIT]);
    frame.extend(Ipv6Addr::UNSPECIFIED.octets());
    frame.extend(group.octets());
    let icmp = [&[SOLICITATION, 0, 0, 0, 0, 0, 0, 0][..], &octets].concat();
    let pseudo = [&frame[ETHERNET + 8..], &[0, 0, 0, LENGTH, 0, 0, 0, ICMPV6], &icmp].concat();
    frame.extend(icmp);
    let sum = internet_checksum(&pseudo).to_be_bytes();
    frame[ETHERNET + IPV6 + 2..][..2].copy_from_slice(&sum);
    frame
}

/// Whether the frame is from another host than `mac` that uses `addr`, or probes for it.
pub fn is_conflict(frame: &[u8], mac: MacAddress, addr: Ipv6Addr) -> bool {
    let Some(frame) = frame.get(..END) else { return false };
    let (ip, icmp) = (&frame[ETHERNET..], &frame[ETHERNET + IPV6..]);
    let about = frame[12..14] == TYPE_IPV6
        && ip[0] >> 4 == 6
        && ip[6..8] == [ICMPV6, HOP_LIMIT]
        && icmp[1] == 0
        && frame[TARGET..] == addr.octets()
        && frame[6..12] != mac.0;
    let also_probes = icmp[0] == SOLICITATION && ip[8..24] == [0; 16];
    about && (icmp[0] == ADVERTISEMENT || also_probes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 7]);
    const OTHER: MacAddress = MacAddress([2, 0, 0, 0, 0, 8]);
    const ADDR: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0x12, 0x3456);

    #[test]
    fn probes_have_the_layout_of_the_rfc() {
        let frame = probe_frame(MAC, ADDR);
        assert_eq!(frame.len(), 78);
        assert_eq!(frame[..14], [0x33, 0x33, 0xff, 0x12, 0x34, 0x56, 2, 0, 0, 0, 0, 7, 0x86, 0xdd]);
        let group: Ipv6Addr = "ff02::1:ff12:3456".parse().unwrap();
        assert_eq!(frame[38..54], group.octets());
        assert_eq!(frame[62..], ADDR.octets());
        let pseudo = [&frame[22..54], &[0, 0, 0, 24, 0, 0, 0, 58], &frame[54..]].concat();
        assert_eq!(internet_checksum(&pseudo), 0);
    }

    #[test]
    fn neighbour_conflicts_are_recognised() {
        let asked = probe_frame(OTHER, ADDR);
        assert!(is_conflict(&asked, MAC, ADDR), "another host probes for it");
        assert!(!is_conflict(&asked, OTHER, ADDR), "our own");
        assert!(!is_conflict(&asked, MAC, Ipv6Addr::LOCALHOST));
        let mut resolving = asked.clone();
        resolving[22] = 0xfe;
        assert!(!is_conflict(&resolving, MAC, ADDR), "address resolution by another host");
        let mut answer = resolving;
        answer[54] = ADVERTISEMENT;
        answer.extend([2, 1, 2, 0, 0, 0, 0, 8]);
        assert!(is_conflict(&answer, MAC, ADDR));
        for (at, value) in [(12, 8), (14, 0x40), (20, 17), (21, 64), (54, 134), (55, 1), (77, 0)] {
            let mut bad = answer.clone();
            bad[at] = value;
            assert!(!is_conflict(&bad, MAC, ADDR), "{at}");
        }
        for length in 0..78 {
            assert!(!is_conflict(&answer[..length], MAC, ADDR), "{length}");
        }
    }
}
