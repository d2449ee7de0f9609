//! Tap devices, which are created by ioctl(2) on `/dev/net/tun`: this is the only kind of link that
//! netlink can read and change, but not create.
//!
//! [`create_device`] holds the new device open. Until [`TapDevice::make_persistent`] the device
//! vanishes with this process, so that a plugin that fails or is killed leaves no device.

use std::fs::{self, File, OpenOptions};
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::libc;

use crate::cmd;
use crate::netlink::Link;
use crate::netns::{self, Netns};
use cni::InterfaceName;
use cni::error::{Error, ErrorContext, Result, errno_text, io_text};

/// The kind of tap devices, and of tun devices.
pub const TUN: &str = "tun";
/// The device that creates tap devices.
const CLONE_DEVICE: &str = "/dev/net/tun";
/// Exists where SELinux labels processes.
const SELINUX: &str = "/sys/fs/selinux/enforce";
/// The SELinux label of programs that the thread starts.
const EXEC_LABEL: &str = "/proc/thread-self/attr/exec";

#[derive(Clone, Copy, Debug, Default)]
pub struct NewTapDevice<'a> {
    /// The name, which must be free in the network namespace; `None` for the first free one of
    /// `tap0`, `tap1` ...
    pub ifname: Option<&'a InterfaceName>,
    /// Whether the device can be opened several times at once.
    pub multi_queue: bool,
    /// Whether each frame begins with a `virtio_net_hdr`, which describes its offloads. A program
    /// that opens the device sets the flag again to its own choice.
    pub vnet_hdr: bool,
    /// The user id that may open the device; `None` for any user with `CAP_NET_ADMIN`.
    pub owner: Option<u32>,
    /// The id of the group whose members may open the device; `None` for no group.
    pub group: Option<u32>,
    /// The SELinux label of the program that will open the device.
    pub label: Option<&'a str>,
}

#[derive(Debug)]
pub struct TapDevice {
    /// The name in its network namespace.
    pub name: String,
    /// Keeps the device in existence; `None` if the program `ip` created it.
    file: Option<File>,
}

/// Creates a tap device in `netns`. Frames have no packet information header unless the program
/// that opens the device requests it.
pub fn create_device(netns: &Netns, wanted: NewTapDevice<'_>) -> Result<TapDevice> {
    let made = netns.run_inside(|| match wanted.label {
        // On a thread of its own: the label applies to all programs that the thread starts.
        Some(label) if Path::new(SELINUX).exists() => {
            netns::on_scratch_thread(|| create_labelled(label, wanted))?
        }
        _ => create_in_current_netns(wanted),
    });
    made?.context(|| format!("failed to create tap \"{}\"", wanted.name()))
}

/// CHECK: fails unless the device `link` has this owner and group, where given, and queues, and is
/// persistent.
pub fn verify_device(
    link: &Link,
    owner: Option<u32>,
    group: Option<u32>,
    multi_queue: bool,
) -> Result<()> {
    let name = &link.name;
    // Kernels before 4.20 do not report these attributes.
    let Some(tun) = link.tun else { return Ok(()) };
    let id = |id: Option<u32>| id.map_or("none".to_owned(), |id| id.to_string());
    for (what, wanted, found) in [
        ("owner", owner.map(|owner| owner.to_string()), id(tun.owner)),
        ("group", group.map(|group| group.to_string()), id(tun.group)),
        ("multi_queue", Some(multi_queue.to_string()), tun.multi_queue.to_string()),
        ("persist", Some(true.to_string()), tun.persist.to_string()),
    ] {
        if let Some(wanted) = wanted.filter(|wanted| *wanted != found) {
            return Err(Error::internal(format!(
                "tap \"{name}\": {what} is {found}, not {wanted}"
            )));
        }
    }
    Ok(())
}

/// Fails if the kernel cannot create tap devices.
pub fn require_usable() -> Result<()> {
    open_clone_device().map(drop)
}

impl NewTapDevice<'_> {
    /// The name, or the pattern of names that the kernel uses.
    fn name(&self) -> &str {
        self.ifname.map_or("tap%d", InterfaceName::as_str)
    }
}

impl TapDevice {
    /// Makes the device persistent: it stays when no process has it open.
    pub fn make_persistent(self) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        set_parameter(file.as_fd(), libc::TUNSETPERSIST, 1)
            .map_err(|errno| ioctl_error("make the device persistent", errno))
    }
}

fn open_clone_device() -> Result<File> {
    OpenOptions::new().read(true).write(true).open(CLONE_DEVICE).map_err(|e| {
        Error::internal(format!("open {CLONE_DEVICE}: {}", io_text(&e)))
            .with_details("load the kernel module \"tun\" on the node, and let the plugin open it")
    })
}

fn create_in_current_netns(wanted: NewTapDevice<'_>) -> Result<TapDevice> {
    let file = open_clone_device()?;
    let name =
        attach_device(file.as_fd(), wanted).map_err(|errno| ioctl_error("set the name", errno))?;
    for (what, request, id) in [
        ("set the owner", libc::TUNSETOWNER, wanted.owner),
        ("set the group", libc::TUNSETGROUP, wanted.group),
    ] {
        let Some(id) = id else { continue };
        set_parameter(file.as_fd(), request, id.into())
            .map_err(|errno| ioctl_error(what, errno))?;
    }
    Ok(TapDevice { name, file: Some(file) })
}

fn ioctl_error(what: &str, errno: Errno) -> Error {
    let error = Error::internal(format!("{what}: {}", errno_text(errno)));
    match errno {
        // The error with `IFF_TUN_EXCL` if the name is taken.
        Errno::EBUSY => error.with_details("there is a link of that name"),
        Errno::EPERM => error.with_details("cnibox needs CAP_NET_ADMIN in this network namespace"),
        _ => error,
    }
}

/// Under SELinux a device has the label of the thread that created it, and a thread of a
/// multi-threaded process cannot change its label. Therefore the program `ip` creates the device,
/// with that label: SELinux policies for the reference plugin allow `ip`.
fn create_labelled(label: &str, wanted: NewTapDevice<'_>) -> Result<TapDevice> {
    let program = cmd::find_program("ip").ok_or_else(|| {
        Error::internal("the program \"ip\" was not found")
            .with_details("\"selinuxContext\" needs iproute2 on a node with SELinux")
    })?;
    fs::write(EXEC_LABEL, label).map_err(|e| {
        Error::internal(format!("failed set socket label: {label}: {}", io_text(&e)))
    })?;
    let args = tuntap_args(wanted);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    cmd::run_program(&program, &args, "")?.require_success()?;
    Ok(TapDevice { name: wanted.name().to_owned(), file: None })
}

fn tuntap_args(wanted: NewTapDevice<'_>) -> Vec<String> {
    let mut args: Vec<String> =
        ["tuntap", "add", "mode", "tap", "name"].into_iter().map(str::to_owned).collect();
    args.push(wanted.name().to_owned());
    for (word, is_wanted) in [("multi_queue", wanted.multi_queue), ("vnet_hdr", wanted.vnet_hdr)] {
        args.extend(is_wanted.then(|| word.to_owned()));
    }
    for (word, id) in [("user", wanted.owner), ("group", wanted.group)] {
        args.extend(id.into_iter().flat_map(|id| [word.to_owned(), id.to_string()]));
    }
    args
}

/// `struct ifreq` as used by `TUNSETIFF`.
#[repr(C)]
struct TunInterfaceRequest {
    name: [u8; libc::IFNAMSIZ],
    flags: u16,
    rest: [u8; 22],
}

const _: () = assert!(size_of::<TunInterfaceRequest>() >= size_of::<libc::ifreq>());

/// Creates the device of an open `/dev/net/tun`; returns its name.
#[expect(unsafe_code, reason = "the kernel offers no other way, and nix no safe one")]
fn attach_device(tun: BorrowedFd<'_>, wanted: NewTapDevice<'_>) -> nix::Result<String> {
    let mut flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_TUN_EXCL;
    for (flag, is_wanted) in
        [(libc::IFF_MULTI_QUEUE, wanted.multi_queue), (libc::IFF_VNET_HDR, wanted.vnet_hdr)]
    {
        flags |= if is_wanted { flag } else { 0 };
    }
    let mut name = [0; libc::IFNAMSIZ];
    // An `InterfaceName` is shorter than the array, so a NUL remains at the end.
    let text = wanted.name().as_bytes();
    name[..text.len()].copy_from_slice(text);
    let flags = u16::try_from(flags).map_err(|_| Errno::EINVAL)?;
    let mut request = TunInterfaceRequest { name, flags, rest: [0; 22] };
    // SAFETY: the kernel reads and writes one `struct ifreq`; `TunInterfaceRequest` is at least as
    // long and outlives the call, and any bytes are valid integers.
    let done = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    Errno::result(done)?;
    let end = request.name.iter().position(|byte| *byte == 0).unwrap_or(libc::IFNAMSIZ);
    Ok(String::from_utf8_lossy(&request.name[..end]).into_owned())
}

/// Sets a numeric parameter of the device.
#[expect(unsafe_code, reason = "the kernel offers no other way, and nix no safe one")]
fn set_parameter(
    tun: BorrowedFd<'_>,
    request: libc::Ioctl,
    value: libc::c_ulong,
) -> nix::Result<()> {
    // SAFETY: TUNSETPERSIST, TUNSETOWNER and TUNSETGROUP take the number itself, so no memory is
    // read or written.
    let done = unsafe { libc::ioctl(tun.as_raw_fd(), request, value) };
    Errno::result(done).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::Netlink;
    use crate::netns::isolate_test_thread;

    const PLAIN: fn(&InterfaceName) -> NewTapDevice<'_> =
        |ifname| NewTapDevice { ifname: Some(ifname), ..NewTapDevice::default() };

    #[test]
    fn a_tap_is_deleted_with_its_descriptor_unless_persistent() {
        isolate_test_thread();
        let (netns, ifname) =
            (Netns::create_unnamed().unwrap(), InterfaceName::parse("tap0").unwrap());
        let netlink = Netlink::open_in(&netns).unwrap();
        let tap = create_device(&netns, PLAIN(&ifname)).unwrap();
        let link = netlink.find_link("tap0").unwrap().unwrap();
        assert_eq!(link.kind.as_deref(), Some("tun"));
        assert!(link.tun.is_some_and(|tun| tun.tap && !tun.persist && !tun.multi_queue));
        drop(tap);
        assert_eq!(netlink.find_link("tap0").unwrap(), None);
        let wanted = NewTapDevice { owner: Some(1001), multi_queue: true, ..PLAIN(&ifname) };
        create_device(&netns, wanted).unwrap().make_persistent().unwrap();
        let tun = netlink.find_link("tap0").unwrap().unwrap().tun.unwrap();
        assert_eq!((tun.owner, tun.group), (Some(1001), None));
        assert!(tun.persist && tun.multi_queue);
    }

    #[test]
    fn without_a_name_the_first_free_one_is_used() {
        isolate_test_thread();
        let netns = Netns::create_unnamed().unwrap();
        let taps = [0, 1].map(|_| create_device(&netns, NewTapDevice::default()).unwrap());
        assert_eq!(taps.map(|tap| tap.name), ["tap0", "tap1"]);
    }

    #[test]
    fn a_name_in_use_is_refused() {
        isolate_test_thread();
        let (netns, ifname) =
            (Netns::create_unnamed().unwrap(), InterfaceName::parse("tap0").unwrap());
        let _tap = create_device(&netns, PLAIN(&ifname)).unwrap();
        let error = create_device(&netns, PLAIN(&ifname)).unwrap_err();
        let msg = "failed to create tap \"tap0\": set the name: device or resource busy";
        assert_eq!(error.message(), msg);
        let lo = InterfaceName::parse("lo").unwrap();
        let error = create_device(&netns, PLAIN(&lo)).unwrap_err();
        assert!(
            error.message().starts_with("failed to create tap \"lo\": set the name: "),
            "{error}"
        );
    }

    #[test]
    fn ip_tuntap_gets_the_options_of_the_device() {
        let ifname = InterfaceName::parse("tap0").unwrap();
        let all =
            NewTapDevice { multi_queue: true, owner: Some(0), group: Some(7), ..PLAIN(&ifname) };
        assert_eq!(
            tuntap_args(all).join(" "),
            "tuntap add mode tap name tap0 multi_queue user 0 group 7"
        );
        let all = NewTapDevice { multi_queue: false, vnet_hdr: true, ..all };
        assert_eq!(
            tuntap_args(all).join(" "),
            "tuntap add mode tap name tap0 vnet_hdr user 0 group 7"
        );
        assert_eq!(tuntap_args(PLAIN(&ifname)).join(" "), "tuntap add mode tap name tap0");
    }
}
