//! The table of applets, one line each, sorted by name.

use crate::dhcp::{Dhcp, daemon};
use crate::plugins::{
    bandwidth::Bandwidth, bridge::Bridge, dummy::Dummy, firewall::Firewall, flannel::Flannel,
    host_device::HostDevice, host_local::HostLocal, ipvlan::Ipvlan, loopback::Loopback,
    macvlan::Macvlan, portmap::Portmap, ptp::Ptp, sbr::Sbr, r#static::Static, tap::Tap,
    tuning::Tuning, vlan::Vlan, vrf::Vrf,
};
use crate::skel::{Applet, Kind, Service, Table};
use crate::tool::{cnitool, ipam, repair};

pub static APPLETS: &[Applet] = &[
    Applet::plugin::<Bandwidth>(Kind::Chained),
    Applet::plugin::<Bridge>(Kind::Interface),
    Applet::tool("cnitool", "attaches and detaches namespaces, as a runtime does", cnitool::main),
    Applet::with_service::<Dhcp>(Kind::Ipam, Some(Service { name: "daemon", main: daemon::main })),
    Applet::plugin::<Dummy>(Kind::Interface),
    Applet::plugin::<Firewall>(Kind::Chained),
    Applet::plugin::<Flannel>(Kind::Interface),
    Applet::plugin::<HostDevice>(Kind::Interface),
    Applet::plugin::<HostLocal>(Kind::Ipam),
    Applet::tool("ipam", "lists and frees leases of host-local", ipam::main),
    Applet::plugin::<Ipvlan>(Kind::Interface),
    Applet::plugin::<Loopback>(Kind::Interface),
    Applet::plugin::<Macvlan>(Kind::Interface),
    Applet::plugin::<Portmap>(Kind::Chained),
    Applet::plugin::<Ptp>(Kind::Interface),
    Applet::tool("repair", "restores missing rules, bridges and routes", repair::main),
    Applet::plugin::<Sbr>(Kind::Chained),
    Applet::plugin::<Static>(Kind::Ipam),
    Applet::plugin::<Tap>(Kind::Interface),
    Applet::plugin::<Tuning>(Kind::Chained),
    Applet::plugin::<Vlan>(Kind::Interface),
    Applet::plugin::<Vrf>(Kind::Chained),
];

pub const TABLE: Table = Table { applets: APPLETS };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorted_unique_and_described_in_a_line() {
        assert!(APPLETS.is_sorted_by(|a, b| a.name < b.name));
        for applet in APPLETS {
            assert!(applet.about.len() <= 60, "{}: {}", applet.name, applet.about.len());
            assert!(!applet.about.ends_with('.'), "{}", applet.name);
        }
    }

    #[test]
    fn every_plugin_has_its_file_and_its_place_in_the_readme() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
        for applet in APPLETS {
            let name = applet.name.replace('-', "_");
            let folder = if applet.kind == Kind::Tool { "src/tool" } else { "src/plugins" };
            let file = root.join(folder).join(format!("{name}.rs"));
            let module = root.join(folder).join(&name).join("mod.rs");
            assert!(file.is_file() || module.is_file(), "{}", file.display());
            assert!(readme.contains(&format!("`{}`", applet.name)), "README lacks {}", applet.name);
        }
    }

    #[test]
    fn a_file_is_the_plugin_that_its_name_ends_in() {
        let name = |file| TABLE.of_file(file).map(|applet| applet.name);
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
    fn names_are_exact() {
        assert!(
            TABLE.find("bridge").is_some()
                && TABLE.find("bridg").is_none()
                && TABLE.find("xbridge").is_none()
        );
    }
}
