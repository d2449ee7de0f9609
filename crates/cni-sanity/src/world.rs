//! The node of a case: mount and network namespaces that isolate plugins from the machine, an
//! uplink to another host, and namespaces of containers.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{Gid, Uid};
use rtnetlink::packet_route::address::AddressMessage;
use rtnetlink::packet_route::link::IpVlanMode;
use rtnetlink::packet_route::route::{RouteMessage, RouteType};
use rtnetlink::packet_route::rule::RuleMessage;
use rtnetlink::packet_route::tc::{TcAttribute, TcHandle, TcMessage};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage as Message};
use rtnetlink::{
    AddressMessageBuilder, LinkBond, LinkDummy, LinkIpVlan, LinkMessageBuilder, LinkUnspec,
    LinkVeth, LinkVlan, LinkVrf, RouteMessageBuilder,
};

use super::netlink;
use super::observe::{self, NAMESPACES, Snapshot};
use super::{Result, context};

/// The directories in which plugins keep state.
pub const STATE: [&str; 2] = ["/var/lib/cni", "/run"];

/// The node's uplink, the master of interfaces that need one.
pub const UPLINK: &str = "eth0";

/// The other host, which observes traffic from the node. It has no route to the containers.
pub const OUTSIDE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 89, 0, 1)),
    IpAddr::V6(Ipv6Addr::new(0xfd89, 0, 0, 0, 0, 0, 0, 1)),
];

/// The node's own addresses on the uplink.
pub const NODE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 89, 0, 2)),
    IpAddr::V6(Ipv6Addr::new(0xfd89, 0, 0, 0, 0, 0, 0, 2)),
];

/// A kind of link that not every kernel supports.
#[derive(Clone, Copy, Debug)]
pub enum Needs {
    Nothing,
    Bond,
    Dummy,
    Ipvlan,
    Vlan,
    Vrf,
}

/// A network namespace at a path.
#[derive(Clone, Debug)]
pub struct Netns {
    pub path: PathBuf,
}

/// Creates the node and moves this process, which must be single-threaded, into it. The node ends
/// with the process.
pub fn enter() -> Result<()> {
    become_root()?;
    context(unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET), "unshare")?;
    let none = None::<&Path>;
    let private = mount(none, "/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none);
    context(private, "make mounts private")?;
    for directory in STATE {
        context(fs::create_dir_all(directory), directory)?;
        context(mount(Some("tmpfs"), directory, Some("tmpfs"), MsFlags::empty(), none), directory)?;
    }
    // /sys shows the network namespace in which it was mounted.
    context(mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), none), "/sys")?;
    context(fs::create_dir_all(NAMESPACES), NAMESPACES)?;
    disable_dad();
    up("lo")?;
    let outside = Netns::new("outside")?;
    make_pair(UPLINK, "out0")?;
    let file = context(File::open(&outside.path), "open the namespace")?;
    set_link("out0", |link| link.setns_by_fd(file.as_raw_fd()))?;
    up(UPLINK)?;
    NODE.iter().try_for_each(|ip| add_address(UPLINK, *ip))?;
    outside.run(|| {
        up("out0")?;
        OUTSIDE.iter().try_for_each(|ip| add_address("out0", *ip))
    })?;
    OUTSIDE.iter().try_for_each(|ip| add_default_route(*ip))
}

/// Root of a new user namespace, for users other than root.
fn become_root() -> Result<()> {
    let (user, group) = (Uid::effective(), Gid::effective());
    if user.is_root() {
        return Ok(());
    }
    context(unshare(CloneFlags::CLONE_NEWUSER), "unshare the user namespace (or be root)")?;
    for (file, text) in [
        ("/proc/self/setgroups", "deny".to_owned()),
        ("/proc/self/uid_map", format!("0 {user} 1")),
        ("/proc/self/gid_map", format!("0 {group} 1")),
    ] {
        context(fs::write(file, text), file)?;
    }
    Ok(())
}

/// Without duplicate address detection IPv6 addresses are usable at once. The kernel may lack IPv6.
fn disable_dad() {
    drop(fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0"));
    drop(fs::write("/proc/sys/net/ipv6/conf/all/accept_dad", "0"));
}

impl Netns {
    /// Creates a namespace below `/run/netns`.
    pub fn new(name: &str) -> Result<Netns> {
        let path = Path::new(NAMESPACES).join(name);
        context(File::create(&path), "create a file for the namespace")?;
        let create = || {
            context(unshare(CloneFlags::CLONE_NEWNET), "unshare")?;
            disable_dad();
            let source = Some(Path::new("/proc/thread-self/ns/net"));
            let none = None::<&Path>;
            context(mount(source, &path, none, MsFlags::MS_BIND, none), "bind the namespace")
        };
        thread::scope(|scope| scope.spawn(create).join())
            .map_err(|_| "create a namespace: panic")??;
        Ok(Netns { path })
    }

    /// The value of `CNI_NETNS`.
    pub fn path(&self) -> String {
        self.path.display().to_string()
    }

    /// Runs code in the namespace, on a new thread.
    pub fn run<T: Send>(&self, code: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let inside = || {
            let file = context(File::open(&self.path), "open the namespace")?;
            context(setns(file, CloneFlags::CLONE_NEWNET), "enter the namespace")?;
            code()
        };
        thread::scope(|scope| scope.spawn(inside).join()).map_err(|_| "in the namespace: panic")?
    }

    /// The kernel's state in the namespace.
    pub fn snapshot(&self) -> Result<Snapshot> {
        self.run(Snapshot::of_kernel)
    }

    /// The link of this name, if the namespace has one.
    pub fn link(&self, name: &str) -> Result<Option<observe::Link>> {
        Ok(self.run(observe::links)?.into_iter().find(|link| link.name == name))
    }

    /// Deletes the namespace, as a runtime does after the end of its container.
    pub fn remove(&self) -> Result<()> {
        context(umount2(&self.path, MntFlags::MNT_DETACH), "unmount the namespace")?;
        context(fs::remove_file(&self.path), "delete the namespace's file")
    }
}

/// The namespace of the node.
pub fn node() -> Netns {
    Netns { path: "/proc/self/ns/net".into() }
}

/// The namespace of the other host.
pub fn outside() -> Netns {
    Netns { path: Path::new(NAMESPACES).join("outside") }
}

/// The state of the node: kernel and files.
pub fn snapshot() -> Result<Snapshot> {
    let mut snapshot = Snapshot::of_kernel()?;
    for directory in STATE {
        snapshot.add_files(Path::new(directory));
    }
    Ok(snapshot)
}

/// The index of a link of the calling thread's namespace.
pub fn index(name: &str) -> Result<u32> {
    let link = observe::links()?.into_iter().find(|link| link.name == name);
    link.map(|link| link.index).ok_or_else(|| format!("link {name} is missing").into())
}

/// Sets a link up.
fn up(name: &str) -> Result<()> {
    set_link(name, LinkMessageBuilder::up)
}

pub fn set_link(
    name: &str,
    change: impl FnOnce(LinkMessageBuilder<LinkUnspec>) -> LinkMessageBuilder<LinkUnspec>,
) -> Result<()> {
    let message = change(LinkUnspec::new_with_index(index(name)?)).build();
    context(netlink::change(Message::SetLink(message)), &format!("change link {name}"))
}

pub fn delete(name: &str) -> Result<()> {
    let message = LinkUnspec::new_with_index(index(name)?).build();
    context(netlink::change(Message::DelLink(message)), "delete a link")
}

/// Deletes the addresses of this family of a link.
pub fn delete_addresses(name: &str, family: AddressFamily) -> Result<()> {
    let index = index(name)?;
    delete_all(Message::GetAddress(AddressMessage::default()), |message| match message {
        Message::NewAddress(address)
            if address.header.index == index && address.header.family == family =>
        {
            Some(Message::DelAddress(address))
        }
        _ => None,
    })
}

/// Deletes the routes with a prefix of this length.
pub fn delete_routes(prefix: u8) -> Result<()> {
    delete_all(Message::GetRoute(RouteMessage::default()), |message| match message {
        Message::NewRoute(route)
            if route.header.destination_prefix_length == prefix
                && route.header.kind == RouteType::Unicast =>
        {
            Some(Message::DelRoute(route))
        }
        _ => None,
    })
}

/// Deletes the rules that match a source address.
pub fn delete_source_rules() -> Result<()> {
    delete_all(Message::GetRule(RuleMessage::default()), |message| match message {
        Message::NewRule(rule) if rule.header.src_len > 0 => Some(Message::DelRule(rule)),
        _ => None,
    })
}

/// Whether packets that the link receives are redirected to another link.
pub fn is_redirected(name: &str) -> Result<bool> {
    let mut filters = TcMessage::default();
    filters.header.index = i32::try_from(index(name)?)?;
    // The parent of filters of an `ingress` qdisc.
    filters.header.parent = TcHandle { major: 0xffff, minor: 0 };
    let found = context(netlink::dump(Message::GetTrafficFilter(filters)), "list filters")?;
    Ok(found.iter().any(|filter| format!("{filter:?}").contains("mirred")))
}

/// Deletes the qdiscs of this kind.
pub fn delete_qdiscs(kind: &str) -> Result<()> {
    delete_qdiscs_if(kind, |_| true)
}

/// Deletes the qdisc of this kind of a link.
pub fn delete_qdisc(name: &str, kind: &str) -> Result<()> {
    let index = i32::try_from(index(name)?)?;
    delete_qdiscs_if(kind, |qdisc| qdisc.header.index == index)
}

fn delete_qdiscs_if(kind: &str, which: impl Fn(&TcMessage) -> bool) -> Result<()> {
    let kind = TcAttribute::Kind(kind.to_owned());
    delete_all(Message::GetQueueDiscipline(TcMessage::default()), |message| match message {
        Message::NewQueueDiscipline(qdisc) if qdisc.attributes.contains(&kind) && which(&qdisc) => {
            Some(Message::DelQueueDiscipline(qdisc))
        }
        _ => None,
    })
}

/// Sends the requests that `deletion` returns for the objects of a dump.
fn delete_all(dump: Message, deletion: impl Fn(Message) -> Option<Message>) -> Result<()> {
    let all = context(netlink::dump(dump), "list the objects to delete")?;
    let mut deletions = all.into_iter().filter_map(deletion);
    deletions.try_for_each(|request| context(netlink::change(request), "delete"))
}

/// Deletes all rules of the packet filter.
pub fn flush_rules() -> Result<()> {
    context(netlink::flush_nftables(), "delete the tables of nf_tables")
}

/// The module of the link kind, if the kernel lacks it.
pub fn lacks(needs: Needs) -> Result<Option<&'static str>> {
    let (name, message) = match needs {
        Needs::Nothing => return Ok(None),
        Needs::Bond => ("bonding", LinkBond::new("probe0").build()),
        Needs::Dummy => ("dummy", LinkDummy::new("probe0").build()),
        Needs::Vrf => ("vrf", LinkVrf::new("probe0", 99).build()),
        Needs::Vlan => ("8021q", LinkVlan::new("probe0", index(UPLINK)?, 9).build()),
        Needs::Ipvlan => {
            ("ipvlan", LinkIpVlan::new("probe0", index(UPLINK)?, IpVlanMode::L2).build())
        }
    };
    if netlink::create(Message::NewLink(message)).is_err() {
        return Ok(Some(name));
    }
    delete("probe0").map(|()| None)
}

/// Creates a veth pair in the calling thread's namespace.
pub fn make_pair(name: &str, peer: &str) -> Result<()> {
    let message = LinkVeth::new(name, peer).build();
    context(netlink::create(Message::NewLink(message)), "create a pair of links")
}

fn add_address(name: &str, ip: IpAddr) -> Result<()> {
    let index = index(name)?;
    let message = match ip {
        IpAddr::V4(ip) => {
            AddressMessageBuilder::<Ipv4Addr>::new().index(index).address(ip, 24).build()
        }
        IpAddr::V6(ip) => {
            AddressMessageBuilder::<Ipv6Addr>::new().index(index).address(ip, 64).build()
        }
    };
    context(netlink::create(Message::NewAddress(message)), "add an address")
}

/// Adds a route to a network behind a gateway.
pub fn add_route(network: Ipv4Addr, prefix: u8, gateway: Ipv4Addr) -> Result<()> {
    let route = RouteMessageBuilder::<Ipv4Addr>::new().destination_prefix(network, prefix);
    let message = route.gateway(gateway).build();
    context(netlink::create(Message::NewRoute(message)), "add a route")
}

/// Takes a link out of its bridge.
pub fn release_port(name: &str) -> Result<()> {
    set_link(name, LinkMessageBuilder::nocontroller)
}

fn add_default_route(gateway: IpAddr) -> Result<()> {
    let message = match gateway {
        IpAddr::V4(ip) => RouteMessageBuilder::<Ipv4Addr>::new().gateway(ip).build(),
        IpAddr::V6(ip) => RouteMessageBuilder::<Ipv6Addr>::new().gateway(ip).build(),
    };
    context(netlink::create(Message::NewRoute(message)), "add a route")
}
