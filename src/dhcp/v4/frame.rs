//! Ethernet frames: UDP between the DHCP ports, and ARP. A client without an address can send
//! frames only.

use std::net::Ipv4Addr;

use crate::netlink::MacAddress;

pub const CLIENT_PORT: u16 = 68;
pub const SERVER_PORT: u16 = 67;
pub const BROADCAST: MacAddress = MacAddress([0xff; 6]);

const ETHERNET: usize = 14;
const IPV4: usize = 20;
const UDP: usize = 8;
const TYPE_IPV4: [u8; 2] = [8, 0];
const TYPE_ARP: [u8; 2] = [8, 6];
const PROTOCOL_UDP: u8 = 17;
/// The first bytes of an ARP packet for Ethernet and IPv4.
const ARP: [u8; 6] = [0, 1, 8, 0, 6, 4];
const TTL: u8 = 64;

/// Source and destination of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameAddresses {
    /// The source Ethernet address.
    pub src_mac: MacAddress,
    /// The destination Ethernet address.
    pub dst_mac: MacAddress,
    /// The source IPv4 address.
    pub src: Ipv4Addr,
    /// The destination IPv4 address.
    pub dst: Ipv4Addr,
}

/// The frame of a client's message.
pub fn encode_udp(ends: &FrameAddresses, payload: &[u8]) -> Vec<u8> {
    let length = |n: usize| u16::try_from(n).unwrap_or(u16::MAX).to_be_bytes();
    let mut frame = [&ends.dst_mac.0[..], &ends.src_mac.0, &TYPE_IPV4].concat();
    frame.extend([0x45, 0]);
    frame.extend(length(IPV4 + UDP + payload.len()));
    frame.extend([0, 0, 0, 0, TTL, PROTOCOL_UDP, 0, 0]);
    frame.extend(ends.src.octets());
    frame.extend(ends.dst.octets());
    let sum = internet_checksum(&frame[ETHERNET..]).to_be_bytes();
    frame[ETHERNET + 10..ETHERNET + 12].copy_from_slice(&sum);

    let start = frame.len();
    frame.extend(CLIENT_PORT.to_be_bytes());
    frame.extend(SERVER_PORT.to_be_bytes());
    frame.extend(length(UDP + payload.len()));
    frame.extend([0, 0]);
    frame.extend(payload);
    // The checksum covers a pseudo header: both addresses, the protocol and the length.
    let pseudo = [&ends.src.octets()[..], &ends.dst.octets(), &[0, PROTOCOL_UDP]].concat();
    let sum =
        match internet_checksum(&[&pseudo, &frame[start + 4..start + 6], &frame[start..]].concat())
        {
            0 => 0xffff,
            sum => sum,
        };
    frame[start + 6..start + 8].copy_from_slice(&sum.to_be_bytes());
    frame
}

/// The source Ethernet address and the payload of a frame to the client's port. The UDP checksum is
/// not verified: with checksum offload the sender on the same machine has not calculated it.
pub fn decode_udp(frame: &[u8]) -> Option<(MacAddress, &[u8])> {
    let (ethernet, packet) = frame.split_at_checked(ETHERNET)?;
    let src = MacAddress(ethernet[6..12].try_into().ok()?);
    let first = *packet.first()?;
    let header_len = usize::from(first & 0x0f) * 4;
    let header = packet.get(..header_len).filter(|header| header.len() >= IPV4)?;
    let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
    let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0;
    let is_udp = ethernet.ends_with(&TYPE_IPV4)
        && first >> 4 == 4
        && header[9] == PROTOCOL_UDP
        && !fragment
        && internet_checksum(header) == 0;
    let datagram = packet.get(header_len..total).filter(|_| is_udp)?;
    let (udp, payload) = datagram.split_at_checked(UDP)?;
    let length = usize::from(u16::from_be_bytes([udp[4], udp[5]])).checked_sub(UDP)?;
    let to_client = udp[2..4] == CLIENT_PORT.to_be_bytes();
    payload.get(..length).filter(|_| to_client).map(|payload| (src, payload))
}

/// An ARP request for `addr` from `own`, which is 0.0.0.0 for a probe (RFC 5227).
pub fn arp_request(mac: MacAddress, own: Ipv4Addr, addr: Ipv4Addr) -> Vec<u8> {
    let mut frame = [&BROADCAST.0[..], &mac.0, &TYPE_ARP, &ARP, &[0, 1]].concat();
    frame.extend(mac.0);
    frame.extend(own.octets());
    frame.extend([0; 6]);
    frame.extend(addr.octets());
    frame
}

fn arp_packet(frame: &[u8]) -> Option<&[u8]> {
    let packet = frame.get(ETHERNET..ETHERNET + 28)?;
    (frame[12..14] == TYPE_ARP && packet[..6] == ARP).then_some(packet)
}

/// The Ethernet address of `addr`, if the frame is an ARP reply with it.
pub fn arp_reply_mac(frame: &[u8], addr: Ipv4Addr) -> Option<MacAddress> {
    let packet = arp_packet(frame)?;
    let is_reply = packet[6..8] == [0, 2] && packet[14..18] == addr.octets();
    packet[8..14].try_into().ok().filter(|_| is_reply).map(MacAddress)
}

/// Whether the frame is from another host than `mac` that uses `addr`, or probes for it.
pub fn is_arp_conflict(frame: &[u8], mac: MacAddress, addr: Ipv4Addr) -> bool {
    let Some(packet) = arp_packet(frame).filter(|packet| packet[8..14] != mac.0) else {
        return false;
    };
    let probe = packet[14..18] == [0; 4] && packet[24..28] == addr.octets();
    packet[14..18] == addr.octets() || (probe && packet[7] == 1)
}

/// The Internet checksum.
pub fn internet_checksum(bytes: &[u8]) -> u16 {
    let mut sum = bytes
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)])))
        .fold(0, u32::wrapping_add);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 7]);
    const OTHER: MacAddress = MacAddress([2, 0, 0, 0, 0, 8]);

    fn sample(payload: &[u8]) -> Vec<u8> {
        let dst = Ipv4Addr::BROADCAST;
        encode_udp(
            &FrameAddresses { src_mac: MAC, dst_mac: BROADCAST, src: [10, 0, 0, 5].into(), dst },
            payload,
        )
    }

    /// The same frame from a server to a client: the ports exchanged.
    fn reply(payload: &[u8]) -> Vec<u8> {
        let mut frame = sample(payload);
        frame[34..38].copy_from_slice(&[0, 67, 0, 68]);
        frame
    }

    #[test]
    fn checksums_are_correct() {
        for payload in [&b"even"[..], b"odd", b""] {
            let frame = sample(payload);
            assert_eq!(internet_checksum(&frame[14..34]), 0);
            let length = u8::try_from(8 + payload.len()).unwrap();
            let pseudo = [&frame[26..34], &[0, 17, 0, length]].concat();
            assert_eq!(internet_checksum(&[&pseudo, &frame[34..]].concat()), 0);
        }
    }

    #[test]
    fn replies_are_read_without_padding() {
        let mut frame = reply(b"hello");
        frame.extend([0; 13]);
        assert_eq!(decode_udp(&frame), Some((MAC, &b"hello"[..])));
        assert_eq!(decode_udp(&sample(b"hello")), None, "to the server's port");
    }

    #[test]
    fn malformed_frames_are_ignored() {
        let good = reply(b"hello");
        for length in 0..good.len() {
            assert_eq!(decode_udp(&good[..length]), None, "{length}");
        }
        for at in [12, 14, 20, 22, 23, 24, 39] {
            let mut bad = good.clone();
            bad[at] ^= 0x3f;
            assert_eq!(decode_udp(&bad), None, "{at}");
        }
        for at in 0..good.len() {
            for value in [0, 1, 0x40, 0x4f, 0xff] {
                let mut bad = good.clone();
                bad[at] = value;
                assert!(decode_udp(&bad).is_none_or(|(_, payload)| payload.len() <= 5));
            }
        }
    }

    #[test]
    fn arp_conflicts_are_recognised() {
        let addr = Ipv4Addr::new(10, 0, 0, 5);
        let probe = arp_request(OTHER, Ipv4Addr::UNSPECIFIED, addr);
        assert_eq!(probe.len(), 42);
        assert!(is_arp_conflict(&probe, MAC, addr), "another host probes for it");
        assert!(!is_arp_conflict(&probe, OTHER, addr), "our own");
        assert!(!is_arp_conflict(&probe, MAC, [10, 0, 0, 6].into()));
        let mut reply = probe.clone();
        reply[21] = 2;
        reply[28..32].copy_from_slice(&addr.octets());
        assert!(is_arp_conflict(&reply, MAC, addr));
        assert_eq!(arp_reply_mac(&reply, addr), Some(OTHER));
        assert_eq!(arp_reply_mac(&reply, [10, 0, 0, 6].into()), None);
        assert_eq!(arp_reply_mac(&probe, addr), None, "a question");
        assert_eq!(arp_reply_mac(&reply[..41], addr), None);
        assert!(!is_arp_conflict(&reply[..41], MAC, addr));
    }
}
