//! Links: settings that depend on the kind of a link (`IFLA_LINKINFO`).

use rtnetlink::packet_route::link::InfoBond;

use super::attribute::{ReplyAttribute, read_u32_at};

/// The kind of a bridge, and the kind of its ports.
pub(super) const BRIDGE: &str = "bridge";

// Attributes that libc lacks, from `linux/if_link.h`.
pub(super) const IFLA_BR_VLAN_FILTERING: u16 = 7;
const IFLA_BR_VLAN_DEFAULT_PVID: u16 = 39;
/// The values of the bridge's boolean options, then the mask of the options that exist.
pub(super) const IFLA_BR_MULTI_BOOLOPT: u16 = 46;
pub(super) const IFLA_MACVLAN_MODE: u16 = 1;
pub(super) const IFLA_MACVLAN_BC_QUEUE_LEN: u16 = 7;
pub(super) const IFLA_IPVLAN_MODE: u16 = 1;
pub(super) const IFLA_VLAN_ID: u16 = 1;
pub(super) const IFLA_VRF_TABLE: u16 = 1;
/// The attribute for hairpin mode.
pub(super) const IFLA_BRPORT_MODE: u16 = 4;
pub(super) const IFLA_BRPORT_ISOLATED: u16 = 33;
const IFLA_BOND_MODE: u16 = 1;
const IFLA_BOND_MIIMON: u16 = 3;
const IFLA_BOND_FAIL_OVER_MAC: u16 = 13;
const IFLA_BOND_XMIT_HASH_POLICY: u16 = 14;
const IFLA_BOND_ALL_SLAVES_ACTIVE: u16 = 17;
const IFLA_BOND_MIN_LINKS: u16 = 18;
const IFLA_BOND_AD_LACP_RATE: u16 = 21;
const IFLA_BOND_TLB_DYNAMIC_LB: u16 = 27;
const IFLA_TUN_OWNER: u16 = 1;
const IFLA_TUN_GROUP: u16 = 2;
const IFLA_TUN_TYPE: u16 = 3;
const IFLA_TUN_PERSIST: u16 = 6;
const IFLA_TUN_MULTI_QUEUE: u16 = 7;

/// `BR_BOOLOPT_NO_LL_LEARN` as a bit.
pub(super) const NO_LL_LEARN: u32 = 1;
/// `IFF_TAP` in `IFLA_TUN_TYPE`.
const IFF_TAP: u8 = 2;

/// The settings of a bridge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BridgeInfo {
    /// Whether ports belong to VLANs.
    pub vlan_filtering: bool,
    /// The native VLAN of new ports; 0 for none.
    pub default_pvid: u16,
    /// Whether ports learn the source addresses of link-local frames, which bypass the packet
    /// filter; `None` before Linux 4.20, where ports always learn.
    pub learns_link_local: Option<bool>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BridgePortInfo {
    /// Whether frames may leave through the port on which they arrived.
    pub hairpin: bool,
    /// Whether frames are exchanged only with ports that are not isolated.
    pub isolated: bool,
}

/// The settings of a macvlan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MacvlanInfo {
    /// `None` for a mode that [`MacvlanMode`] lacks.
    pub mode: Option<MacvlanMode>,
    /// The length of the queue for broadcasts; 0 before Linux 5.11, where it is not reported.
    pub bc_queue_len: u32,
}

/// The modes of a bond, by their numbers in `linux/if_bonding.h`.
pub const BOND_MODES: [&str; 7] = [
    "balance-rr",
    "active-backup",
    "balance-xor",
    "broadcast",
    "802.3ad",
    "balance-tlb",
    "balance-alb",
];

/// The policies by which a bond chooses the port of a frame, by their numbers in
/// `linux/if_bonding.h`.
pub const BOND_HASH_POLICIES: [&str; 6] =
    ["layer2", "layer3+4", "layer2+3", "encap2+3", "encap3+4", "vlan+srcmac"];

/// How often an LACP partner is to send, by their numbers in `linux/if_bonding.h`.
pub const BOND_LACP_RATES: [&str; 2] = ["slow", "fast"];

/// The settings of a bond. `None` leaves a setting of a new bond to the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BondSettings {
    /// An index of [`BOND_MODES`].
    pub mode: u8,
    /// The interval in ms at which the carrier of the ports is checked; 0 for never.
    pub miimon: u32,
    /// What has the MAC of the bond, with active-backup: all ports (0), the bond has that of the
    /// active port (1), the active port has that of the bond (2).
    pub fail_over_mac: u8,
    /// An index of [`BOND_HASH_POLICIES`].
    pub xmit_hash_policy: Option<u8>,
    /// Whether frames that arrive at inactive ports are received (1) or dropped (0).
    pub all_slaves_active: Option<u8>,
    /// Whether flows move between the ports by their load (1), with balance-tlb and balance-alb.
    pub tlb_dynamic_lb: Option<u8>,
    /// An index of [`BOND_LACP_RATES`], with 802.3ad.
    pub lacp_rate: Option<u8>,
    /// The number of ports with a carrier below which the bond has none, with 802.3ad.
    pub min_links: Option<u32>,
}

impl BondSettings {
    pub fn mode_name(&self) -> &'static str {
        BOND_MODES.get(usize::from(self.mode)).unwrap_or(&"unknown")
    }

    /// `IFLA_INFO_DATA` of a new bond.
    pub(super) fn to_attributes(self) -> Vec<InfoBond> {
        let mut data = vec![
            InfoBond::Mode(self.mode.into()),
            InfoBond::MiiMon(self.miimon),
            InfoBond::FailOverMac(self.fail_over_mac.into()),
        ];
        data.extend(self.xmit_hash_policy.map(|policy| InfoBond::XmitHashPolicy(policy.into())));
        data.extend(self.all_slaves_active.map(|active| InfoBond::AllPortsActive(active.into())));
        data.extend(self.tlb_dynamic_lb.map(|dynamic| InfoBond::TlbDynamicLb(dynamic == 1)));
        data.extend(self.lacp_rate.map(|rate| InfoBond::AdLacpRate(rate.into())));
        data.extend(self.min_links.map(InfoBond::MinLinks));
        data
    }
}

/// The settings of a tun or tap device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TunTapInfo {
    /// Whether the device carries Ethernet frames (tap) rather than IP packets (tun).
    pub tap: bool,
    /// The user who may open the device.
    pub owner: Option<u32>,
    /// The group whose members may open the device.
    pub group: Option<u32>,
    /// Whether the device stays when no process has it open.
    pub persist: bool,
    /// Whether the device can be opened several times at once.
    pub multi_queue: bool,
}

/// The modes of a macvlan, by the numbers in `linux/if_link.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MacvlanMode {
    /// Siblings do not reach each other.
    Private = 1,
    /// All frames go through the external switch.
    Vepa = 2,
    /// Siblings reach each other.
    Bridge = 4,
    /// The only macvlan on its lower device.
    Passthru = 8,
}

impl MacvlanMode {
    const ALL: [MacvlanMode; 4] =
        [MacvlanMode::Bridge, MacvlanMode::Private, MacvlanMode::Vepa, MacvlanMode::Passthru];

    pub fn parse(name: &str) -> Option<MacvlanMode> {
        MacvlanMode::ALL.into_iter().find(|mode| mode.as_str() == name)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            MacvlanMode::Bridge => "bridge",
            MacvlanMode::Private => "private",
            MacvlanMode::Vepa => "vepa",
            MacvlanMode::Passthru => "passthru",
        }
    }

    pub(super) fn from_wire(number: u32) -> Option<MacvlanMode> {
        MacvlanMode::ALL.into_iter().find(|mode| *mode as u32 == number)
    }
}

/// The modes of an ipvlan, by the numbers in `linux/if_link.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IpvlanMode {
    L2 = 0,
    /// Routed, bypassing the host's netfilter.
    L3 = 1,
    /// Routed, through the host's netfilter.
    L3s = 2,
}

impl IpvlanMode {
    const ALL: [IpvlanMode; 3] = [IpvlanMode::L2, IpvlanMode::L3, IpvlanMode::L3s];

    pub fn parse(name: &str) -> Option<IpvlanMode> {
        IpvlanMode::ALL.into_iter().find(|mode| mode.as_str() == name)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            IpvlanMode::L2 => "l2",
            IpvlanMode::L3 => "l3",
            IpvlanMode::L3s => "l3s",
        }
    }

    pub(super) fn from_wire(number: u16) -> Option<IpvlanMode> {
        IpvlanMode::ALL.into_iter().find(|mode| *mode as u16 == number)
    }
}

fn is_flag_set(data: ReplyAttribute<'_>, kind: u16) -> bool {
    data.find_nested(kind).and_then(ReplyAttribute::to_u8) == Some(1)
}

pub(super) fn parse_bridge(data: ReplyAttribute<'_>) -> BridgeInfo {
    let options =
        data.find_nested(IFLA_BR_MULTI_BOOLOPT).and_then(|options| read_u32_at(options.value, 0));
    BridgeInfo {
        vlan_filtering: is_flag_set(data, IFLA_BR_VLAN_FILTERING),
        default_pvid: data
            .find_nested(IFLA_BR_VLAN_DEFAULT_PVID)
            .and_then(ReplyAttribute::to_u16)
            .unwrap_or_default(),
        learns_link_local: options.map(|values| values & NO_LL_LEARN == 0),
    }
}

pub(super) fn parse_bridge_port(data: ReplyAttribute<'_>) -> BridgePortInfo {
    BridgePortInfo {
        hairpin: is_flag_set(data, IFLA_BRPORT_MODE),
        isolated: is_flag_set(data, IFLA_BRPORT_ISOLATED),
    }
}

pub(super) fn parse_macvlan(data: ReplyAttribute<'_>) -> MacvlanInfo {
    let number = |kind| data.find_nested(kind).and_then(ReplyAttribute::to_u32);
    MacvlanInfo {
        mode: number(IFLA_MACVLAN_MODE).and_then(MacvlanMode::from_wire),
        bc_queue_len: number(IFLA_MACVLAN_BC_QUEUE_LEN).unwrap_or_default(),
    }
}

pub(super) fn parse_bond(data: ReplyAttribute<'_>) -> BondSettings {
    let number = |kind| data.find_nested(kind).and_then(ReplyAttribute::to_u8);
    let long = |kind| data.find_nested(kind).and_then(ReplyAttribute::to_u32);
    BondSettings {
        mode: number(IFLA_BOND_MODE).unwrap_or_default(),
        miimon: long(IFLA_BOND_MIIMON).unwrap_or_default(),
        fail_over_mac: number(IFLA_BOND_FAIL_OVER_MAC).unwrap_or_default(),
        xmit_hash_policy: number(IFLA_BOND_XMIT_HASH_POLICY),
        all_slaves_active: number(IFLA_BOND_ALL_SLAVES_ACTIVE),
        tlb_dynamic_lb: number(IFLA_BOND_TLB_DYNAMIC_LB),
        lacp_rate: number(IFLA_BOND_AD_LACP_RATE),
        min_links: long(IFLA_BOND_MIN_LINKS),
    }
}

pub(super) fn parse_tun_tap(data: ReplyAttribute<'_>) -> TunTapInfo {
    TunTapInfo {
        tap: data.find_nested(IFLA_TUN_TYPE).and_then(ReplyAttribute::to_u8) == Some(IFF_TAP),
        owner: data.find_nested(IFLA_TUN_OWNER).and_then(ReplyAttribute::to_u32),
        group: data.find_nested(IFLA_TUN_GROUP).and_then(ReplyAttribute::to_u32),
        persist: is_flag_set(data, IFLA_TUN_PERSIST),
        multi_queue: is_flag_set(data, IFLA_TUN_MULTI_QUEUE),
    }
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_core::Emitable;

    use super::*;

    #[test]
    fn the_settings_of_a_bond_have_the_kernels_attributes() {
        let settings = BondSettings {
            mode: 5,
            miimon: 100,
            fail_over_mac: 2,
            xmit_hash_policy: Some(4),
            all_slaves_active: Some(1),
            tlb_dynamic_lb: Some(0),
            lacp_rate: Some(1),
            min_links: Some(2),
        };
        let attributes = settings.to_attributes();
        let mut bytes = vec![0; attributes.as_slice().buffer_len()];
        attributes.as_slice().emit(&mut bytes);
        let attribute = |number: u16, value: &[u8]| {
            let length = u16::try_from(4 + value.len()).unwrap();
            let mut bytes = [length.to_ne_bytes(), number.to_ne_bytes()].concat();
            bytes.extend(value);
            bytes.resize(8, 0);
            bytes
        };
        let expected = [
            attribute(1, &[5]),
            attribute(3, &100_u32.to_ne_bytes()),
            attribute(13, &[2]),
            attribute(14, &[4]),
            attribute(17, &[1]),
            attribute(27, &[0]),
            attribute(21, &[1]),
            attribute(18, &2_u32.to_ne_bytes()),
        ];
        assert_eq!(bytes, expected.concat());
        let data = ReplyAttribute { kind: nix::libc::IFLA_INFO_DATA, value: &bytes };
        assert_eq!(parse_bond(data), settings);
        let default = BondSettings::default().to_attributes();
        assert_eq!(default.len(), 3, "the kernel's defaults");
    }
}
