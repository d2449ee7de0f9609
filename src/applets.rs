//! The table of applets, one line each, sorted by name. `make lists` writes the lists of the
//! documentation from it.

use crate::dhcp::{Dhcp, daemon};
use crate::framework::{Applet, AppletKind, AppletTable, PluginService};
use crate::plugins::{
    bandwidth::Bandwidth, bond::Bond, bridge::Bridge, dummy::Dummy, egress::Egress,
    firewall::Firewall, flannel::Flannel, host_device::HostDevice, host_local::HostLocal,
    ipvlan::Ipvlan, loopback::Loopback, macvlan::Macvlan, portmap::Portmap, ptp::Ptp,
    route_override::RouteOverride, sbr::Sbr, r#static::Static, tap::Tap,
    tc_redirect_tap::TcRedirectTap, tuning::Tuning, vlan::Vlan, vrf::Vrf,
};
use crate::tool::{cnitool, egress, ipam, repair};

pub static APPLETS: &[Applet] = &[
    Applet::for_plugin::<Bandwidth>(AppletKind::Chained),
    Applet::for_plugin::<Bond>(AppletKind::Interface),
    Applet::for_plugin::<Bridge>(AppletKind::Interface),
    Applet::for_tool(
        "cnitool",
        "attaches and detaches namespaces, as a runtime does",
        cnitool::main,
    ),
    Applet::for_plugin_with_services::<Dhcp>(
        AppletKind::Ipam,
        &[PluginService { name: "daemon", main: daemon::main }],
    ),
    Applet::for_plugin::<Dummy>(AppletKind::Interface),
    Applet::for_plugin_with_services::<Egress>(AppletKind::Chained, egress::TOOLS),
    Applet::for_plugin::<Firewall>(AppletKind::Chained),
    Applet::for_plugin::<Flannel>(AppletKind::Interface),
    Applet::for_plugin::<HostDevice>(AppletKind::Interface),
    Applet::for_plugin::<HostLocal>(AppletKind::Ipam),
    Applet::for_tool("ipam", "lists and frees leases of host-local", ipam::main),
    Applet::for_plugin::<Ipvlan>(AppletKind::Interface),
    Applet::for_plugin::<Loopback>(AppletKind::Interface),
    Applet::for_plugin::<Macvlan>(AppletKind::Interface),
    Applet::for_plugin::<Portmap>(AppletKind::Chained),
    Applet::for_plugin::<Ptp>(AppletKind::Interface),
    Applet::for_tool("repair", "restores missing rules, bridges and routes", repair::main),
    Applet::for_plugin::<RouteOverride>(AppletKind::Chained),
    Applet::for_plugin::<Sbr>(AppletKind::Chained),
    Applet::for_plugin::<Static>(AppletKind::Ipam),
    Applet::for_plugin::<Tap>(AppletKind::Interface),
    Applet::for_plugin::<TcRedirectTap>(AppletKind::Chained),
    Applet::for_plugin::<Tuning>(AppletKind::Chained),
    Applet::for_plugin::<Vlan>(AppletKind::Interface),
    Applet::for_plugin::<Vrf>(AppletKind::Chained),
];

pub const TABLE: AppletTable = AppletTable { applets: APPLETS };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn applets_are_sorted_unique_and_have_a_one_line_description() {
        assert!(APPLETS.is_sorted_by(|a, b| a.name < b.name));
        for applet in APPLETS {
            assert!(applet.about.len() <= 60, "{}: {}", applet.name, applet.about.len());
            assert!(!applet.about.ends_with('.'), "{}", applet.name);
        }
    }

    #[test]
    fn every_applet_has_its_file() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        for applet in APPLETS {
            let name = applet.name.replace('-', "_");
            let directory = match applet.kind {
                AppletKind::Tool => "src/tool",
                // dhcp is beside the plugins.
                _ if applet.name == "dhcp" => "src",
                _ => "src/plugins",
            };
            let file = root.join(directory).join(format!("{name}.rs"));
            let module = root.join(directory).join(&name).join("mod.rs");
            assert!(file.is_file() || module.is_file(), "{}", file.display());
        }
    }

    #[test]
    fn the_end_of_a_file_name_selects_the_plugin() {
        let name = |file| TABLE.find_by_file_name(file).map(|applet| applet.name);
        for (file, applet) in [
            ("bridge", Some("bridge")),
            ("host-local", Some("host-local")),
            ("buildkit-cni-bridge", Some("bridge")),
            ("buildkit-cni-host-local", Some("host-local")),
            ("x-macvlan", Some("macvlan")),
            ("xbridge", None),
            ("local", None),
            ("my-local", None),
            ("bridge-x", None),
            ("my-repair", None),
        ] {
            assert_eq!(name(file), applet, "{file}");
        }
    }

    #[test]
    fn applets_are_found_by_exact_name_only() {
        assert!(
            TABLE.find_applet("bridge").is_some()
                && TABLE.find_applet("bridg").is_none()
                && TABLE.find_applet("xbridge").is_none()
        );
    }
}
