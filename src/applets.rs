//! The table of applets: what this executable is, one line each, sorted by name.

use crate::plugins::bandwidth::Bandwidth;
use crate::plugins::bridge::Bridge;
use crate::plugins::dhcp::{Dhcp, daemon};
use crate::plugins::dummy::Dummy;
use crate::plugins::firewall::Firewall;
use crate::plugins::flannel::Flannel;
use crate::plugins::host_device::HostDevice;
use crate::plugins::host_local::HostLocal;
use crate::plugins::ipvlan::Ipvlan;
use crate::plugins::loopback::Loopback;
use crate::plugins::macvlan::Macvlan;
use crate::plugins::portmap::Portmap;
use crate::plugins::ptp::Ptp;
use crate::plugins::sbr::Sbr;
use crate::plugins::r#static::Static;
use crate::plugins::tap::Tap;
use crate::plugins::tuning::Tuning;
use crate::plugins::vlan::Vlan;
use crate::plugins::vrf::Vrf;
use crate::skel::{Applet, Kind, OwnPlugin, Service, Table};
use crate::tool::{cnitool, ipam, repair};

pub static APPLETS: &[Applet] = &[
    Applet::plugin::<Bandwidth>(Kind::Chained),
    Applet::plugin::<Bridge>(Kind::Interface),
    Applet::tool("cnitool", "attaches and detaches namespaces, as a runtime does", cnitool::main),
    Applet::serviced::<Dhcp>(Kind::Ipam, Service { name: "daemon", main: daemon::main }),
    Applet::plugin::<Dummy>(Kind::Interface),
    Applet::plugin::<Firewall>(Kind::Chained),
    Applet::plugin::<Flannel>(Kind::Interface),
    Applet::plugin::<HostDevice>(Kind::Interface),
    Applet::plugin::<HostLocal>(Kind::Ipam),
    Applet::tool("ipam", "who has which address of host-local, and gets it back", ipam::main),
    Applet::plugin::<Ipvlan>(Kind::Interface),
    Applet::plugin::<Loopback>(Kind::Interface),
    Applet::plugin::<Macvlan>(Kind::Interface),
    Applet::plugin::<Portmap>(Kind::Chained),
    Applet::plugin::<Ptp>(Kind::Interface),
    Applet::tool("repair", "restores what this host's containers have lost", repair::main),
    Applet::plugin::<Sbr>(Kind::Chained),
    Applet::plugin::<Static>(Kind::Ipam),
    Applet::plugin::<Tap>(Kind::Interface),
    Applet::plugin::<Tuning>(Kind::Chained),
    Applet::plugin::<Vlan>(Kind::Interface),
    Applet::plugin::<Vrf>(Kind::Chained),
];

/// The table with its lookup.
pub const TABLE: Table = Table { applets: APPLETS, lookup: plugin };

/// The applet of exactly this name.
pub fn find(name: &str) -> Option<&'static Applet> {
    TABLE.find(name)
}

/// The plugin of exactly this name, for plugins that delegate.
pub fn plugin(name: &str) -> Option<OwnPlugin> {
    find(name).and_then(Applet::as_plugin)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorted_unique_and_told_in_a_line() {
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
    fn names_are_exact() {
        assert!(find("bridge").is_some() && find("bridg").is_none() && find("xbridge").is_none());
    }
}
