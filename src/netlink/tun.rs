//! Links: what only tun and tap devices have.

use super::packet::Attr;

/// The kind of tun and tap devices.
pub(super) const KIND: &str = "tun";
/// Attributes of tun and tap devices, missing in libc.
const IFLA_TUN_OWNER: u16 = 1;
const IFLA_TUN_GROUP: u16 = 2;
const IFLA_TUN_TYPE: u16 = 3;
const IFLA_TUN_PERSIST: u16 = 6;
const IFLA_TUN_MULTI_QUEUE: u16 = 7;
/// A tap device, as `IFLA_TUN_TYPE` and `TUNSETIFF` have it.
const IFF_TAP: u8 = 2;

/// The settings of a tun or tap device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TunInfo {
    /// Ethernet frames rather than IP packets.
    pub tap: bool,
    /// The user who may open it.
    pub owner: Option<u32>,
    /// The group whose members may open the device.
    pub group: Option<u32>,
    /// Whether the device stays when no process has it open.
    pub persist: bool,
    /// Whether it can be opened several times at once.
    pub multi_queue: bool,
}

impl TunInfo {
    pub(super) fn parse(data: Attr<'_>) -> TunInfo {
        let find = |kind| data.nested().find(|attr| attr.kind == kind);
        let flag = |kind| find(kind).and_then(Attr::u8) == Some(1);
        let id = |kind| find(kind).and_then(Attr::u32);
        TunInfo {
            tap: find(IFLA_TUN_TYPE).and_then(Attr::u8) == Some(IFF_TAP),
            owner: id(IFLA_TUN_OWNER),
            group: id(IFLA_TUN_GROUP),
            persist: flag(IFLA_TUN_PERSIST),
            multi_queue: flag(IFLA_TUN_MULTI_QUEUE),
        }
    }
}
