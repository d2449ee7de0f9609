//! One file or directory per plugin, named as the plugin.

pub mod bandwidth;
pub mod bond;
pub mod bridge;
pub mod dummy;
pub mod egress;
pub mod firewall;
pub mod flannel;
pub mod host_device;
pub mod host_local;
pub mod ipvlan;
pub mod loopback;
pub mod macvlan;
pub mod portmap;
pub mod ptp;
pub mod route_override;
pub mod sbr;
pub mod r#static;
pub mod tap;
pub mod tc_redirect_tap;
pub mod tuning;
pub mod vlan;
pub mod vrf;
