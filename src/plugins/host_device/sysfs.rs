//! Devices in sysfs: their drivers, network interfaces and buses.
//!
//! `/sys/bus` is the same in every namespace, but a `net` directory shows the interfaces of the
//! namespace that sysfs was mounted in. So the names in the directory are compared with the links
//! that netlink reports ([`shows_link`]).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::netlink::{Link, ParentDevice};
use cni::error::{Error, Result, io_text};
use cni::files;
use cni::sort::sort_items;

/// Userspace drivers of PCI devices, for which the kernel has no network interface.
const USER_SPACE_DRIVERS: [&str; 3] = ["vfio-pci", "uio_pci_generic", "igb_uio"];

/// Limit of an attribute's size in bytes: the kernel's largest page.
const MAX_BYTES: usize = 64 << 10;

/// The file system, usually at `/sys`.
pub(super) struct Sysfs(PathBuf);

impl Sysfs {
    pub(super) fn new() -> Sysfs {
        Sysfs("/sys".into())
    }

    #[cfg(test)]
    pub(super) fn from_root(root: &Path) -> Sysfs {
        Sysfs(root.into())
    }

    /// The directory of a device on a bus: of a PCI function such as `0000:3d:00.1`, or on the
    /// auxiliary bus such as `mlx5_core.sf.4`.
    pub(super) fn device_directory(&self, bus: &str, id: &str) -> PathBuf {
        self.0.join("bus").join(bus).join("devices").join(id)
    }

    /// Whether the PCI function has a userspace driver (VFIO, UIO).
    pub(super) fn is_user_space(&self, id: &str) -> bool {
        let driver =
            fs::read_link(self.device_directory("pci", id).join("driver")).unwrap_or_default();
        let name = driver.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| USER_SPACE_DRIVERS.contains(&name))
    }

    /// The `net` directory of a PCI function; that of a virtio device is one level below.
    pub(super) fn pci_net_directory(&self, id: &str) -> Result<PathBuf> {
        let device = self.device_directory("pci", id);
        let virtio =
            self.list_virtio_devices(id).into_iter().map(|name| device.join(name).join("net"));
        let mut directories = std::iter::once(device.join("net")).chain(virtio);
        directories
            .find(|directory| directory.is_dir())
            .ok_or_else(|| Error::internal(format!("no net directory under pci device {id}")))
    }

    /// The names of the virtio devices of a PCI function.
    pub(super) fn list_virtio_devices(&self, id: &str) -> Vec<String> {
        let mut names = list_names(&self.device_directory("pci", id)).unwrap_or_default();
        names.retain(|name| name.starts_with("virtio"));
        names
    }

    /// The PCI function of a device: the device itself or one of its ancestors.
    pub(super) fn find_pci_id(&self, device: &ParentDevice) -> Option<String> {
        if device.bus == "pci" {
            return Some(device.name.clone());
        }
        let path = fs::canonicalize(self.device_directory(&device.bus, &device.name)).ok()?;
        let mut names = path.ancestors().filter_map(|p| p.file_name()?.to_str());
        names.find(|name| is_pci_id(name)).map(str::to_owned)
    }
}

/// Whether a link is the link that a `net` directory shows under its name: the namespace of the
/// mount may have another link of that name.
pub(super) fn shows_link(directory: &Path, link: &Link) -> bool {
    let shown = |file| files::read_text(&directory.join(&link.name).join(file), MAX_BYTES).ok();
    let same = |text: &String, value: String| text.trim() == value;
    let mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
    shown("ifindex").is_none_or(|text| same(&text, link.index.to_string()))
        && (mac.is_empty() || shown("address").is_none_or(|text| same(&text, mac)))
}

/// The names of the interfaces in a `net` directory, sorted; at least one.
pub(super) fn list_interfaces(directory: &Path) -> Result<Vec<String>> {
    let path = directory.display();
    let names = list_names(directory).map_err(|e| {
        Error::internal(format!("failed to read directory {path}: {}", io_text(&e)))
    })?;
    if names.is_empty() {
        return Err(Error::internal(format!("failed to find network device in path {path}"))
            .with_details("it may be in a container, or the driver made no network interface"));
    }
    Ok(names)
}

fn list_names(directory: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        names.extend(entry?.file_name().into_string());
    }
    sort_items(&mut names);
    Ok(names)
}

/// Whether a text has the form `domain:bus:device.function`, in hexadecimal.
fn is_pci_id(text: &str) -> bool {
    let hex = |part: &str, most: usize| {
        (1..=most).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_hexdigit())
    };
    let parts: Vec<&str> = text.split([':', '.']).collect();
    matches!(parts[..], [domain, bus, device, function]
        if hex(domain, 8) && hex(bus, 2) && hex(device, 2) && hex(function, 1) && text.contains(':'))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::netlink::MacAddress;

    const ID: &str = "0000:3d:00.1";

    fn tree(directories: &[&str]) -> (tempfile::TempDir, Sysfs) {
        let dir = tempfile::tempdir().unwrap();
        for directory in directories {
            fs::create_dir_all(dir.path().join(directory)).unwrap();
        }
        let sysfs = Sysfs::from_root(dir.path());
        (dir, sysfs)
    }

    #[test]
    fn interfaces_of_devices_are_found() {
        let (_dir, sysfs) = tree(&[
            "bus/pci/devices/0000:3d:00.1/net/ens2",
            "bus/pci/devices/0000:3d:00.1/net/ens1",
            "bus/pci/devices/0000:00:03.0/virtio4/net/eth7",
            "bus/pci/devices/0000:00:04.0",
            "bus/pci/devices/0000:00:05.0/net",
        ]);
        let names =
            |id| sysfs.pci_net_directory(id).and_then(|directory| list_interfaces(&directory));
        assert_eq!(names(ID).unwrap(), ["ens1", "ens2"]);
        assert_eq!(names("0000:00:03.0").unwrap(), ["eth7"]);
        assert_eq!(sysfs.list_virtio_devices("0000:00:03.0"), ["virtio4"]);
        let error = names("0000:00:04.0").unwrap_err();
        assert_eq!(error.message(), "no net directory under pci device 0000:00:04.0");
        let error = names("0000:00:05.0").unwrap_err();
        assert!(error.message().starts_with("failed to find network device in path /"), "{error}");
    }

    #[test]
    fn userspace_drivers_are_recognised() {
        let (dir, sysfs) = tree(&["bus/pci/devices/0000:3d:00.1"]);
        assert!(!sysfs.is_user_space(ID), "no driver at all");
        let driver = dir.path().join("bus/pci/devices").join(ID).join("driver");
        for (name, expected) in [
            ("vfio-pci", true),
            ("igb_uio", true),
            ("uio_pci_generic", true),
            ("mlx5_core", false),
            ("vfio", false),
        ] {
            drop(fs::remove_file(&driver));
            symlink(format!("../../../../bus/pci/drivers/{name}"), &driver).unwrap();
            assert_eq!(sysfs.is_user_space(ID), expected, "{name}");
        }
    }

    #[test]
    fn a_name_in_another_namespace_is_another_link() {
        let (dir, sysfs) = tree(&["bus/pci/devices/0000:3d:00.1/net/eth0"]);
        let found = sysfs.pci_net_directory(ID).unwrap();
        let mac = MacAddress([2, 0, 0, 0, 0, 1]);
        let link = Link { name: "eth0".into(), index: 7, mac: Some(mac), ..Link::default() };
        assert!(shows_link(&found, &link), "nothing contradicts");
        let file =
            |name: &str| dir.path().join("bus/pci/devices").join(ID).join("net/eth0").join(name);
        fs::write(file("ifindex"), "7\n").unwrap();
        fs::write(file("address"), "02:00:00:00:00:01\n").unwrap();
        assert!(shows_link(&found, &link));
        fs::write(file("address"), "02:00:00:00:00:02\n").unwrap();
        assert!(!shows_link(&found, &link));
        fs::write(file("address"), "02:00:00:00:00:01\n").unwrap();
        fs::write(file("ifindex"), "8\n").unwrap();
        assert!(!shows_link(&found, &link));
    }

    #[test]
    fn the_pci_function_of_a_device_is_found() {
        let (dir, sysfs) = tree(&[
            "devices/pci0000:00/0000:00:03.0/virtio4",
            "bus/virtio/devices",
            "devices/platform/x/y",
        ]);
        let link = |to: &str, name: &str| {
            symlink(
                dir.path().join("devices").join(to),
                dir.path().join("bus/virtio/devices").join(name),
            )
            .unwrap();
        };
        link("pci0000:00/0000:00:03.0/virtio4", "virtio4");
        link("platform/x/y", "y");
        let parent = |bus: &str, name: &str| ParentDevice { bus: bus.into(), name: name.into() };
        assert_eq!(sysfs.find_pci_id(&parent("pci", ID)).as_deref(), Some(ID));
        assert_eq!(
            sysfs.find_pci_id(&parent("virtio", "virtio4")).as_deref(),
            Some("0000:00:03.0")
        );
        assert_eq!(sysfs.find_pci_id(&parent("virtio", "y")), None);
        assert_eq!(sysfs.find_pci_id(&parent("virtio", "gone")), None);
    }

    #[test]
    fn pci_addresses_are_recognised() {
        for id in [ID, "10000:01:1f.7"] {
            assert!(is_pci_id(id), "{id}");
        }
        for id in ["", "pci0000:00", "0000:3d:00", "0000.3d.00.1", "0000:3d:00.g", "virtio4"] {
            assert!(!is_pci_id(id), "{id}");
        }
    }
}
