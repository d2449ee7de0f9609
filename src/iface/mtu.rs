//! The key `mtu` of a network: bytes, or `"auto"`, the MTU of the link of the host's default route,
//! so that the MTU of an overlay or a cloud's network is written in one place only.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, Visitor};

use super::default_route;
use crate::error::{Context, Error, Result};
use crate::netlink::{Link, Netlink};

/// An MTU as a configuration has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mtu {
    /// So many bytes; 0 leaves it to the kernel.
    Bytes(i64),
    /// `"auto"`: the MTU of the link of the host's default route, of IPv4 first.
    Auto,
}

impl Default for Mtu {
    fn default() -> Mtu {
        Mtu::Bytes(0)
    }
}

/// A number of bytes; 0 leaves the MTU to the kernel, as less does.
pub fn bytes(configured: i64) -> Result<u32> {
    u32::try_from(configured.max(0))
        .map_err(|_| Error::config(format!("mtu {configured} is larger than any link's")))
}

impl Mtu {
    /// Refuses what no veth pair and no bridge can have (`ETH_MIN_MTU`, `ETH_MAX_MTU` of `if_ether.h`).
    pub fn require_ethernet(self) -> Result<()> {
        match self {
            Mtu::Bytes(number) if number > 0 && !(68..=65535).contains(&number) => {
                let msg = format!("invalid MTU {number}, must be 0, or 68 to 65535");
                Err(Error::config(msg))
            }
            _ => Ok(()),
        }
    }

    /// The MTU of a veth pair or bridge, in bytes; 0 leaves it to the kernel, as less does.
    pub fn resolve(self, host: &Netlink) -> Result<u32> {
        self.require_ethernet()?;
        match self {
            Mtu::Bytes(number) => bytes(number),
            Mtu::Auto => default_route::link(host).map(|link| link.mtu).context(|| "mtu \"auto\""),
        }
    }

    /// The MTU of a link on top of `master`, which has to be as large. A larger one of the default
    /// route's link is brought down to it.
    pub fn resolve_below(self, host: &Netlink, master: &Link) -> Result<u32> {
        let most = master.mtu;
        match self {
            Mtu::Bytes(bytes) => {
                u32::try_from(bytes).ok().filter(|mtu| *mtu <= most).ok_or_else(|| {
                    Error::config(format!("invalid MTU {bytes}, must be [0, master MTU({most})]"))
                })
            }
            Mtu::Auto => Ok(self.resolve(host)?.min(most)),
        }
    }
}

impl<'de> Deserialize<'de> for Mtu {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Mtu, D::Error> {
        from.deserialize_any(MtuVisitor)
    }
}

struct MtuVisitor;

impl Visitor<'_> for MtuVisitor {
    type Value = Mtu;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of bytes or \"auto\"")
    }

    fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Mtu, E> {
        Ok(Mtu::Bytes(bytes))
    }

    fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Mtu, E> {
        Ok(Mtu::Bytes(i64::try_from(bytes).unwrap_or(i64::MAX)))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Mtu, E> {
        if text == "auto" {
            Ok(Mtu::Auto)
        } else {
            Err(E::invalid_value(de::Unexpected::Str(text), &self))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::json::Json;

    fn read(text: &str) -> Result<Mtu, String> {
        let json = Json::parse(text.as_bytes()).unwrap();
        Mtu::deserialize(&json).map_err(|e| e.to_string())
    }

    #[test]
    fn it_is_a_number_or_auto() {
        assert_eq!(read("1400"), Ok(Mtu::Bytes(1400)));
        assert_eq!(read("-1"), Ok(Mtu::Bytes(-1)));
        assert_eq!(read("\"auto\""), Ok(Mtu::Auto));
        for wrong in ["\"1400\"", "true", "1.5", "{}"] {
            let error = read(wrong).unwrap_err();
            assert!(error.ends_with("expected a number of bytes or \"auto\""), "{error}");
        }
    }

    #[test]
    fn less_than_nothing_is_the_kernels_and_too_much_is_refused() {
        assert_eq!((bytes(-5), bytes(9000)), (Ok(0), Ok(9000)));
        assert!(bytes(1 << 32).is_err());
    }
}
