//! Selects the device of the host by the keys of the configuration.

use std::path::{Component, Path, PathBuf};

use super::HostDeviceConfig;
use super::sysfs::{self, Sysfs};
use crate::devices::origin::OriginalState;
use crate::iface::child;
use crate::netlink::{Link, MacAddress, Netlink};
use cni::error::{Error, Result};
use cni::sort::sort_by;

/// Kinds of links on top of another link that may share its address: of two links with the same
/// address, the upper one is never selected.
const UPPER_KINDS: [&str; 10] =
    ["bond", "bridge", "hsr", "ipvlan", "ipvtap", "macvlan", "macvtap", "team", "vlan", "vrf"];

/// The configuration's name of the device.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum DeviceSelector {
    /// The name or an alternative name of the interface.
    Name(String),
    /// The Ethernet address of the interface.
    Mac(MacAddress),
    /// The directory of the device below `/sys/devices`.
    Path(PathBuf),
    /// The address of the PCI function.
    Pci(String),
    /// The name of the device on the auxiliary bus.
    Auxiliary(String),
}

impl DeviceSelector {
    /// The selector of the configuration, if any. The runtime's choice for this container has
    /// precedence over the keys of the network.
    pub(super) fn from_config(
        conf: &HostDeviceConfig,
        sysfs: &Sysfs,
    ) -> Result<Option<DeviceSelector>> {
        let given = |key: &Option<String>| key.clone().filter(|text| !text.is_empty());
        if let Some(id) = given(&conf.runtime_config.device_id) {
            return selector_by_device_id(id, sysfs).map(Some);
        }
        if let Some(name) = given(&conf.device) {
            return Ok(Some(DeviceSelector::Name(name)));
        }
        if let Some(text) = given(&conf.hwaddr) {
            let mac = text.parse().map_err(|e| {
                Error::config(format!("failed to parse MAC address \"{text}\": {e}"))
            })?;
            return Ok(Some(DeviceSelector::Mac(mac)));
        }
        if let Some(path) = given(&conf.kernelpath) {
            return selector_by_kernel_path(&path).map(Some);
        }
        given(&conf.pci_bus_id)
            .map(|id| require_one_segment("pciBusID", id).map(DeviceSelector::Pci))
            .transpose()
    }

    /// The name of a [`DeviceSelector::Name`].
    pub(super) fn name(&self) -> Option<&str> {
        if let DeviceSelector::Name(name) = self { Some(name) } else { None }
    }

    /// The PCI function of a [`DeviceSelector::Pci`].
    pub(super) fn pci_function(&self) -> Option<&str> {
        if let DeviceSelector::Pci(id) = self { Some(id) } else { None }
    }

    /// The PCI function, if it has a userspace driver.
    pub(super) fn user_space_pci(&self, sysfs: &Sysfs) -> Option<&str> {
        self.pci_function().filter(|id| sysfs.is_user_space(id))
    }

    /// Whether a recorded device is the one.
    pub(super) fn is_recorded(&self, sysfs: &Sysfs, device: &OriginalState) -> bool {
        match self {
            DeviceSelector::Name(name) => device.has_name(name),
            DeviceSelector::Mac(mac) => {
                device.mac == Some(*mac) || device.identity.has_permanent_mac(*mac)
            }
            DeviceSelector::Pci(id) | DeviceSelector::Auxiliary(id) => {
                device.identity.is_on_bus(&parents_of_function(sysfs, id))
            }
            DeviceSelector::Path(path) => {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                device.identity.is_on_bus(&[name])
            }
        }
    }

    /// Whether a link that came from the host may be the device; `host_name` is its name on the
    /// host. False only if an attribute contradicts.
    pub(super) fn may_select(&self, link: &Link, host_name: &str) -> bool {
        match self {
            DeviceSelector::Name(name) => host_name == name || link.alt_names.contains(name),
            // The address may have been changed, unlike the permanent address.
            DeviceSelector::Mac(mac) => {
                link.permanent_mac.is_none_or(|permanent| permanent == *mac)
            }
            DeviceSelector::Pci(id) | DeviceSelector::Auxiliary(id) => link
                .parent
                .as_ref()
                .is_none_or(|parent| parent.bus == "virtio" || parent.name == *id),
            DeviceSelector::Path(_) => true,
        }
    }
}

pub(super) fn selected_device(
    host: &Netlink,
    sysfs: &Sysfs,
    selector: &DeviceSelector,
) -> Result<Link> {
    let link = match selector {
        DeviceSelector::Name(name) => host.require_link(name).map_err(|error| {
            let absent = error.is_not_found();
            let remedy = if absent { child::address_label_remedy(host, name) } else { Ok(None) };
            let error = Error::from(error);
            if let Ok(Some(remedy)) = remedy { error.with_details(remedy) } else { error }
        })?,
        DeviceSelector::Mac(mac) => find_by_mac(&host.dump_links()?, *mac)?,
        DeviceSelector::Path(path) => find_in_net_directory(host, &path.join("net"))?,
        DeviceSelector::Pci(id) => {
            find_by_parent(host, sysfs.pci_net_directory(id), &parents_of_function(sysfs, id))?
        }
        DeviceSelector::Auxiliary(id) => {
            let directory = sysfs.device_directory("auxiliary", id).join("net");
            find_by_parent(host, Ok(directory), std::slice::from_ref(id))?
        }
    };
    if link.loopback {
        let msg = format!("\"{}\" is the host's loopback interface", link.name);
        return Err(Error::config(msg).with_details("every container has its own"));
    }
    Ok(link)
}

/// The possible parent devices of the interface of a PCI function.
fn parents_of_function(sysfs: &Sysfs, id: &str) -> Vec<String> {
    let mut parents = sysfs.list_virtio_devices(id);
    parents.push(id.to_owned());
    parents
}

fn selector_by_device_id(id: String, sysfs: &Sysfs) -> Result<DeviceSelector> {
    let id = require_one_segment("deviceID", id)?;
    if sysfs.device_directory("pci", &id).exists() {
        return Ok(DeviceSelector::Pci(id));
    }
    if sysfs.device_directory("auxiliary", &id).exists() {
        return Ok(DeviceSelector::Auxiliary(id));
    }
    let msg = format!("runtime config DeviceID {id} not found or unsupported");
    Err(Error::internal(msg).with_details("it is on neither the pci nor the auxiliary bus"))
}

/// Refuses a name on a bus that is not a single path segment, because the name becomes part of a
/// path.
fn require_one_segment(key: &str, id: String) -> Result<String> {
    let mut parts = Path::new(&id).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(only)), None) if only == id.as_str() => Ok(id),
        _ => Err(Error::config(format!("{key} \"{id}\" is not the name of a device"))),
    }
}

fn selector_by_kernel_path(text: &str) -> Result<DeviceSelector> {
    let path = Path::new(text);
    if text.starts_with("/sys/devices/") && !path.components().any(|c| c == Component::ParentDir) {
        return Ok(DeviceSelector::Path(path.to_owned()));
    }
    let msg =
        format!("kernel device path \"{text}\" must be absolute and begin with /sys/devices/");
    Err(Error::config(msg))
}

/// The link with this address. Bonds give their address to their ports, and VLANs, bridges and
/// bonds take the address of a lower link, so the permanent address has precedence.
fn find_by_mac(links: &[Link], mac: MacAddress) -> Result<Link> {
    let permanent = |link: &Link| link.permanent_mac == Some(mac);
    let upper = |link: &Link| link.kind.as_deref().is_some_and(|k| UPPER_KINDS.contains(&k));
    let current = |link: &Link| link.mac == Some(mac) && !link.loopback;
    let ranks: [&dyn Fn(&Link) -> bool; 3] =
        [&|l| permanent(l) && !upper(l), &|l| current(l) && !upper(l), &current];
    for wanted in ranks {
        let found: Vec<&Link> = links.iter().filter(|link| wanted(link)).collect();
        match found[..] {
            [] => {}
            [only] => return Ok(only.clone()),
            _ => {
                let names: Vec<_> = found.iter().map(|link| link.name.as_str()).collect();
                let msg = format!("several links have the address {mac}: {}", names.join(", "));
                return Err(Error::internal(msg).with_details("use the key \"device\""));
            }
        }
    }
    Err(Error::internal("failed to find physical interface")
        .with_details(format!("no link of the host has the address {mac}")))
}

/// The first interface of a `net` directory that is in this namespace.
fn find_in_net_directory(host: &Netlink, directory: &Path) -> Result<Link> {
    let names = sysfs::list_interfaces(directory)?;
    for name in &names {
        if let Some(link) = host.find_link(name)?
            && sysfs::shows_link(directory, &link)
        {
            return Ok(link);
        }
    }
    let names = names.join(", ");
    Err(Error::internal(format!("link {names} not found in the host's namespace")))
}

/// As [`find_in_net_directory`]; if sysfs shows another namespace, the link whose parent device is
/// reported by netlink.
fn find_by_parent(host: &Netlink, directory: Result<PathBuf>, parents: &[String]) -> Result<Link> {
    directory.and_then(|directory| find_in_net_directory(host, &directory)).or_else(|error| {
        let mut links = host.dump_links()?;
        sort_by(&mut links, |a, b| a.name.cmp(&b.name));
        links
            .into_iter()
            .find(|link| link.parent.as_ref().is_some_and(|p| parents.contains(&p.name)))
            .ok_or(error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conf(text: &str) -> HostDeviceConfig {
        cni::json::Json::parse(text.as_bytes()).unwrap().decode().unwrap()
    }

    fn sysfs() -> (tempfile::TempDir, Sysfs) {
        let dir = tempfile::tempdir().unwrap();
        for directory in ["pci/devices/0000:3d:00.1", "auxiliary/devices/mlx5_core.sf.4"] {
            std::fs::create_dir_all(dir.path().join("bus").join(directory)).unwrap();
        }
        let sysfs = Sysfs::from_root(dir.path());
        (dir, sysfs)
    }

    fn selected(text: &str) -> Result<Option<DeviceSelector>> {
        let (_dir, sysfs) = sysfs();
        DeviceSelector::from_config(&conf(text), &sysfs)
    }

    #[test]
    fn the_runtimes_device_precedes_the_keys() {
        let all = r#"{"device":"a","hwaddr":"02:00:00:00:00:01","kernelpath":"/sys/devices/x",
            "pciBusID":"0000:00:01.0","runtimeConfig":{"deviceID":"0000:3d:00.1"}}"#;
        assert_eq!(selected(all), Ok(Some(DeviceSelector::Pci("0000:3d:00.1".into()))));
        let all = all.replace("deviceID", "other");
        assert_eq!(selected(&all), Ok(Some(DeviceSelector::Name("a".into()))));
        let all = all.replace("\"a\"", "\"\"");
        assert_eq!(selected(&all), Ok(Some(DeviceSelector::Mac(MacAddress([2, 0, 0, 0, 0, 1])))));
        let all = all.replace("hwaddr", "other");
        assert_eq!(selected(&all), Ok(Some(DeviceSelector::Path("/sys/devices/x".into()))));
        let all = all.replace("kernelpath", "other");
        assert_eq!(selected(&all), Ok(Some(DeviceSelector::Pci("0000:00:01.0".into()))));
        assert_eq!(selected("{}"), Ok(None));
        let auxiliary = r#"{"runtimeConfig":{"deviceID":"mlx5_core.sf.4"}}"#;
        assert_eq!(
            selected(auxiliary),
            Ok(Some(DeviceSelector::Auxiliary("mlx5_core.sf.4".into())))
        );
    }

    #[test]
    fn invalid_keys_are_refused() {
        for (text, msg) in [
            (
                r#"{"hwaddr":"zz"}"#,
                "failed to parse MAC address \"zz\": address zz: invalid MAC address",
            ),
            (
                r#"{"kernelpath":"x"}"#,
                "kernel device path \"x\" must be absolute and begin with /sys/devices/",
            ),
            (
                r#"{"kernelpath":"/sys/devices/../x"}"#,
                "kernel device path \"/sys/devices/../x\" must be absolute and begin with \
                 /sys/devices/",
            ),
            (r#"{"pciBusID":"../x"}"#, "pciBusID \"../x\" is not the name of a device"),
            (
                r#"{"runtimeConfig":{"deviceID":".."}}"#,
                "deviceID \"..\" is not the name of a device",
            ),
            (
                r#"{"runtimeConfig":{"deviceID":"a/"}}"#,
                "deviceID \"a/\" is not the name of a device",
            ),
            (
                r#"{"runtimeConfig":{"deviceID":"x"}}"#,
                "runtime config DeviceID x not found or unsupported",
            ),
        ] {
            assert_eq!(selected(text).unwrap_err().message(), msg);
        }
    }

    fn link(name: &str, kind: &str, macs: (u8, u8)) -> Link {
        let mac = |n| (n > 0).then_some(MacAddress([2, 0, 0, 0, 0, n]));
        Link {
            name: name.into(),
            kind: Some(kind.to_owned()).filter(|kind| !kind.is_empty()),
            mac: mac(macs.0),
            permanent_mac: mac(macs.1),
            ..Link::default()
        }
    }

    #[test]
    fn hardware_precedes_virtual_links_with_the_same_mac() {
        let wanted = MacAddress([2, 0, 0, 0, 0, 1]);
        let found = |links: &[Link]| find_by_mac(links, wanted).map(|link| link.name);
        let (bond, port) = (link("bond0", "bond", (1, 0)), link("ens1", "", (1, 1)));
        let other_port = link("ens2", "", (1, 2));
        assert_eq!(found(&[bond.clone(), other_port, port.clone()]).unwrap(), "ens1");
        let vlan = link("ens1.5", "vlan", (1, 0));
        assert_eq!(found(&[vlan.clone(), link("v", "veth", (1, 0))]).unwrap(), "v");
        assert_eq!(found(std::slice::from_ref(&vlan)).unwrap(), "ens1.5", "nothing else has it");
        let twins = [link("a", "veth", (1, 0)), link("b", "veth", (1, 0))];
        assert_eq!(
            found(&twins).unwrap_err().message(),
            "several links have the address 02:00:00:00:00:01: a, b"
        );
        assert_eq!(found(&[]).unwrap_err().message(), "failed to find physical interface");
    }
}
