//! Ethernet addresses.

use std::collections::hash_map::RandomState;
use std::fmt::{self, Write};
use std::hash::{BuildHasher, Hasher};
use std::str::FromStr;

use cni::error::Error;

/// A 48-bit Ethernet address. Its text has lower-case digits and colons.
#[derive(
    Default,
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    serde::Serialize,
    serde::Deserialize,
)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// A random address for a single interface, marked as locally administered.
    pub fn random_local() -> MacAddress {
        // The standard library keys its hasher with the kernel's random numbers.
        let random = RandomState::new().build_hasher().finish().to_le_bytes();
        let mut octets = [0; 6];
        octets.copy_from_slice(&random[..6]);
        // Bit 0 of the first octet means multicast, bit 1 means locally administered.
        octets[0] = octets[0] & !0b01 | 0b10;
        MacAddress(octets)
    }

    /// Like [`MacAddress::random_local`], for a port of a bridge: a high address, because a bridge
    /// without an assigned address uses the lowest address of its ports. An address that the
    /// kernel chose would be replaced by udev.
    pub fn random_for_bridge_port() -> MacAddress {
        let MacAddress(mut octets) = MacAddress::random_local();
        octets[0] = 0xfe;
        MacAddress(octets)
    }

    /// The address of an interface, from a configuration or a request. Fails with code 7 if the
    /// text is not a MAC address, and for multicast addresses and zero, which the kernel
    /// refuses.
    pub fn parse_unicast(text: &str) -> cni::error::Result<MacAddress> {
        let mac: MacAddress = text.parse().map_err(|why: String| {
            Error::config(why).with_details("write six bytes, as in 02:00:00:00:00:01")
        })?;
        if mac.0 == [0; 6] {
            return Err(Error::config(format!("address {mac}: not a unicast address"))
                .with_details("write another address, as in 02:00:00:00:00:01"));
        }
        if mac.0[0] & 0b01 == 0 {
            return Ok(mac);
        }
        let mut unicast = mac;
        unicast.0[0] &= !0b01;
        Err(Error::config(format!("address {mac}: not a unicast address, but multicast"))
            .with_details(format!("the first byte must be even: write {unicast}")))
    }

    /// `None` for an address of another length, such as the address of a tunnel.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<MacAddress> {
        bytes.try_into().ok().map(MacAddress)
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap_or_default();
        for (position, octet) in self.0.into_iter().enumerate() {
            if position > 0 {
                f.write_char(':')?;
            }
            f.write_char(digit(octet >> 4))?;
            f.write_char(digit(octet & 0xf))?;
        }
        Ok(())
    }
}

impl FromStr for MacAddress {
    type Err = String;

    /// Accepts `00:00:5e:00:53:01`, `00-00-5E-00-53-01` and `0000.5e00.5301`.
    fn from_str(text: &str) -> Result<MacAddress, String> {
        let octets = match text.as_bytes().get(2) {
            Some(b':') => parse_groups(text, ':', 2),
            Some(b'-') => parse_groups(text, '-', 2),
            _ => parse_groups(text, '.', 4),
        };
        octets.map(MacAddress).ok_or_else(|| format!("address {text}: invalid MAC address"))
    }
}

/// Six octets from groups of `width` hexadecimal digits.
fn parse_groups(text: &str, separator: char, width: usize) -> Option<[u8; 6]> {
    let mut digits = Vec::with_capacity(12);
    for group in text.split(separator) {
        if group.len() != width {
            return None;
        }
        for digit in group.chars() {
            digits.push(u8::try_from(digit.to_digit(16)?).ok()?);
        }
    }
    let octets: Vec<u8> = digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    octets.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_notations_are_accepted() {
        let mac = MacAddress([0, 0, 0x5e, 0, 0x53, 0xab]);
        for text in ["00:00:5e:00:53:ab", "00-00-5E-00-53-AB", "0000.5e00.53Ab"] {
            assert_eq!(text.parse(), Ok(mac), "{text}");
        }
        assert_eq!(mac.to_string(), "00:00:5e:00:53:ab");
    }

    #[test]
    fn other_notations_are_refused() {
        for text in [
            "",
            "00",
            "00:00:5e:00:53",
            "00:00:5e:00:53:01:02",
            "00:00:5e:00:53:0g",
            "0:0:5e:0:53:1",
            "00:00-5e:00:53:01",
            "00005e005301",
            "0000.5e00",
            "00:00:5e:00:53:+1",
            "€€:€€",
            "00:00:5e:00:53:01:00:00",
        ] {
            let error = text.parse::<MacAddress>().unwrap_err();
            assert_eq!(error, format!("address {text}: invalid MAC address"));
        }
    }

    #[test]
    fn an_interface_has_a_unicast_address() {
        assert_eq!(
            MacAddress::parse_unicast("02:00:00:00:00:01"),
            Ok(MacAddress([2, 0, 0, 0, 0, 1]))
        );
        for (text, msg, details) in [
            ("e7:d1:44:8d:65:b0", "multicast", "write e6:d1:44:8d:65:b0"),
            ("00:00:00:00:00:00", "not a unicast address", "write another address"),
            ("e7:d1", "address e7:d1: invalid MAC address", "six bytes"),
        ] {
            let error = MacAddress::parse_unicast(text).unwrap_err();
            assert!(error.message().ends_with(msg) && error.details().contains(details), "{error}");
        }
    }

    #[test]
    fn random_addresses_are_local_and_unicast() {
        let (one, two) = (MacAddress::random_local(), MacAddress::random_local());
        assert_ne!(one, two);
        assert_eq!(one.0[0] & 0b11, 0b10);
    }
}
