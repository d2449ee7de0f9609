//! Kinds of links, `IFLA_INFO_KIND`, and the modes that some have.

use rtnetlink::packet_route::link::{IpVlanMode, MacVlanMode};

/// The kind of a bridge, and of its ports.
pub(super) const BRIDGE: &str = "bridge";
/// The kind of a VRF.
pub(super) const VRF: &str = "vrf";

/// The modes of a macvlan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MacvlanMode {
    /// Siblings reach one another.
    Bridge,
    /// Siblings do not reach one another.
    Private,
    /// Everything goes through the switch outside.
    Vepa,
    /// The only one on its lower device.
    Passthru,
}

impl MacvlanMode {
    const ALL: [MacvlanMode; 4] =
        [MacvlanMode::Bridge, MacvlanMode::Private, MacvlanMode::Vepa, MacvlanMode::Passthru];

    /// The mode of this name.
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
        MacvlanMode::ALL.into_iter().find(|mode| u32::from(MacVlanMode::from(*mode)) == number)
    }
}

/// The modes of an ipvlan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IpvlanMode {
    L2,
    /// By IP, past the host's netfilter.
    L3,
    /// By IP, through the host's netfilter.
    L3s,
}

impl IpvlanMode {
    const ALL: [IpvlanMode; 3] = [IpvlanMode::L2, IpvlanMode::L3, IpvlanMode::L3s];

    /// The mode of this name.
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
        IpvlanMode::ALL.into_iter().find(|mode| u16::from(IpVlanMode::from(*mode)) == number)
    }
}

impl From<MacvlanMode> for MacVlanMode {
    fn from(mode: MacvlanMode) -> MacVlanMode {
        match mode {
            MacvlanMode::Bridge => MacVlanMode::Bridge,
            MacvlanMode::Private => MacVlanMode::Private,
            MacvlanMode::Vepa => MacVlanMode::Vepa,
            MacvlanMode::Passthru => MacVlanMode::Passthrough,
        }
    }
}

impl From<IpvlanMode> for IpVlanMode {
    fn from(mode: IpvlanMode) -> IpVlanMode {
        match mode {
            IpvlanMode::L2 => IpVlanMode::L2,
            IpvlanMode::L3 => IpVlanMode::L3,
            IpvlanMode::L3s => IpVlanMode::L3S,
        }
    }
}
