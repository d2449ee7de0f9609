//! A node of a case's own: mount and network namespaces in which plugins cannot touch the machine, an uplink with
//! another host behind it, and namespaces of containers.

use std::fs::{self, File};
use std::io;
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
use rtnetlink::packet_route::tc::{TcAttribute, TcMessage};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage as Message};
use rtnetlink::{
    AddressMessageBuilder, LinkDummy, LinkIpVlan, LinkUnspec, LinkVeth, LinkVlan, LinkVrf,
    RouteMessageBuilder,
};

use super::netlink::{Netlink, Protocol};
use super::observe::{self, NAMESPACES, Snapshot};

/// Where plugins keep state.
pub const STATE: [&str; 2] = ["/var/lib/cni", "/run"];

/// The node's uplink, the master of interfaces that need one.
pub const UPLINK: &str = "eth0";

/// The other host, by which traffic out of the node is seen. It has no route to the containers.
pub const OUTSIDE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 89, 0, 1)),
    IpAddr::V6(Ipv6Addr::new(0xfd89, 0, 0, 0, 0, 0, 0, 1)),
];

/// The node's own addresses on the uplink.
pub const NODE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 89, 0, 2)),
    IpAddr::V6(Ipv6Addr::new(0xfd89, 0, 0, 0, 0, 0, 0, 2)),
];

/// A result whose error says what the suite could not do.
pub type Result<T> = std::result::Result<T, String>;

/// A kind of link that not every kernel has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    Nothing,
    Dummy,
    Ipvlan,
    Vlan,
    Vrf,
}

/// The node. The process has it for itself and ends with it.
#[derive(Debug)]
pub struct World {
    outside: Netns,
}

/// A network namespace at a path.
#[derive(Clone, Debug)]
pub struct Netns {
    pub path: PathBuf,
}

fn said<T>(result: std::result::Result<T, impl Into<io::Error>>, what: &str) -> Result<T> {
    result.map_err(|error| format!("{what}: {}", error.into()))
}

impl World {
    /// Makes the node and moves this process into it, which must have one thread.
    pub fn enter() -> Result<World> {
        become_root()?;
        said(unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET), "unshare")?;
        let none = None::<&Path>;
        said(
            mount(none, "/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none),
            "make mounts private",
        )?;
        for folder in STATE {
            said(fs::create_dir_all(folder), folder)?;
            said(mount(Some("tmpfs"), folder, Some("tmpfs"), MsFlags::empty(), none), folder)?;
        }
        // That of the new network namespace.
        said(mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), none), "/sys")?;
        said(fs::create_dir_all(NAMESPACES), NAMESPACES)?;
        // Without duplicate address detection addresses are there at once.
        drop(fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0"));
        drop(fs::write("/proc/sys/net/ipv6/conf/all/accept_dad", "0"));
        up("lo")?;
        let world = World { outside: Netns::new("outside")? };
        world.wire()?;
        Ok(world)
    }

    /// The uplink and its other end.
    fn wire(&self) -> Result<()> {
        let route = said(Netlink::open(Protocol::Route), "open netlink")?;
        let pair = LinkVeth::new(UPLINK, "out0").build();
        said(route.create(Message::NewLink(pair)), "make the uplink")?;
        let index = index("out0")?;
        let other = said(File::open(&self.outside.path), "open the namespace")?;
        let moved = LinkUnspec::new_with_index(index).setns_by_fd(other.as_raw_fd()).build();
        said(route.change(Message::SetLink(moved)), "move the uplink's end")?;
        up(UPLINK)?;
        NODE.iter().try_for_each(|ip| add_address(UPLINK, *ip))?;
        self.outside.run(|| {
            up("out0")?;
            OUTSIDE.iter().try_for_each(|ip| add_address("out0", *ip))
        })?;
        OUTSIDE.iter().try_for_each(|ip| add_default(*ip))
    }

    /// The namespace of the other host.
    pub fn outside(&self) -> &Netns {
        &self.outside
    }
}

impl Netns {
    /// A new one below `/run/netns`, with `lo` up.
    pub fn new(name: &str) -> Result<Netns> {
        let netns = Netns { path: Path::new(NAMESPACES).join(name) };
        said(File::create(&netns.path), "make a file for the namespace")?;
        let path = netns.path.clone();
        let made = thread::spawn(move || {
            said(unshare(CloneFlags::CLONE_NEWNET), "unshare")?;
            drop(fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0"));
            drop(fs::write("/proc/sys/net/ipv6/conf/all/accept_dad", "0"));
            let source = Some(Path::new("/proc/thread-self/ns/net"));
            let none = None::<&Path>;
            said(mount(source, &path, none, MsFlags::MS_BIND, none), "bind the namespace")
        });
        made.join().map_err(|_| "make a namespace: panic".to_owned())??;
        Ok(netns)
    }

    /// Its path as plugins get it.
    pub fn path(&self) -> String {
        self.path.display().to_string()
    }

    /// Runs code in it, on a thread of its own.
    pub fn run<T: Send>(&self, code: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                let file = said(File::open(&self.path), "open the namespace")?;
                said(setns(file, CloneFlags::CLONE_NEWNET), "enter the namespace")?;
                code()
            });
            inside.join().map_err(|_| "in the namespace: panic".to_owned())?
        })
    }

    /// What is in it.
    pub fn snapshot(&self) -> Result<Snapshot> {
        self.run(|| said(Snapshot::of_kernel(), "look at the kernel"))
    }

    /// Its links.
    pub fn links(&self) -> Result<Vec<observe::Link>> {
        self.run(|| said(observe::links(), "list links"))
    }

    /// Its addresses.
    pub fn addresses(&self) -> Result<Vec<observe::Address>> {
        self.run(|| said(observe::addresses(), "list addresses"))
    }

    /// Its routes.
    pub fn routes(&self) -> Result<Vec<observe::Route>> {
        self.run(|| said(observe::routes(), "list routes"))
    }

    /// Takes it away, as a runtime does whose container has died.
    pub fn remove(&self) -> Result<()> {
        said(umount2(&self.path, MntFlags::MNT_DETACH), "unmount the namespace")?;
        said(fs::remove_file(&self.path), "remove the namespace's file")
    }
}

/// The namespace of the node.
pub fn node() -> Netns {
    Netns { path: "/proc/self/ns/net".into() }
}

/// What is on the node.
pub fn snapshot() -> Result<Snapshot> {
    let folders: Vec<&Path> = STATE.iter().map(Path::new).collect();
    said(Snapshot::of_kernel(), "look at the kernel").map(|snapshot| snapshot.with_files(&folders))
}

/// Root of a user namespace of its own, for users that are not root.
fn become_root() -> Result<()> {
    let (user, group) = (Uid::effective(), Gid::effective());
    if user.is_root() {
        return Ok(());
    }
    said(unshare(CloneFlags::CLONE_NEWUSER), "unshare the user namespace (or be root)")?;
    for (file, text) in [
        ("/proc/self/setgroups", "deny".to_owned()),
        ("/proc/self/uid_map", format!("0 {user} 1")),
        ("/proc/self/gid_map", format!("0 {group} 1")),
    ] {
        said(fs::write(file, text), file)?;
    }
    Ok(())
}

/// The number of a link of the calling thread's namespace.
pub fn index(name: &str) -> Result<u32> {
    let links = said(observe::links(), "list links")?;
    let found = links.iter().find(|link| link.name == name).map(|link| link.index);
    found.ok_or_else(|| format!("link {name} is missing"))
}

/// The links of the calling thread's namespace.
pub fn links() -> Result<Vec<observe::Link>> {
    said(observe::links(), "list links")
}

/// Switches a link on.
pub fn up(name: &str) -> Result<()> {
    let message = LinkUnspec::new_with_index(index(name)?).up().build();
    let route = said(Netlink::open(Protocol::Route), "open netlink")?;
    said(route.change(Message::SetLink(message)), "switch a link on")
}

/// Switches a link off.
pub fn down(name: &str) -> Result<()> {
    let message = LinkUnspec::new_with_index(index(name)?).down().build();
    let route = said(Netlink::open(Protocol::Route), "open netlink")?;
    said(route.change(Message::SetLink(message)), "switch a link off")
}

/// Deletes a link.
pub fn delete(name: &str) -> Result<()> {
    let message = LinkUnspec::new_with_index(index(name)?).build();
    let route = said(Netlink::open(Protocol::Route), "open netlink")?;
    said(route.change(Message::DelLink(message)), "delete a link")
}

/// Sets the MTU of a link.
pub fn set_mtu(name: &str, mtu: u32) -> Result<()> {
    let message = LinkUnspec::new_with_index(index(name)?).mtu(mtu).build();
    let route = said(Netlink::open(Protocol::Route), "open netlink")?;
    said(route.change(Message::SetLink(message)), "set an MTU")
}

/// Deletes the IPv4 addresses of a link.
pub fn delete_addresses(name: &str) -> Result<()> {
    let index = index(name)?;
    delete_all(Message::GetAddress(AddressMessage::default()), |message| match message {
        Message::NewAddress(one) => {
            let is_of_it = one.header.index == index && one.header.family == AddressFamily::Inet;
            is_of_it.then_some(Message::DelAddress(one))
        }
        _ => None,
    })
}

/// Deletes the default routes.
pub fn delete_default_routes() -> Result<()> {
    delete_all(Message::GetRoute(RouteMessage::default()), |message| match message {
        Message::NewRoute(one) => {
            let is_default =
                one.header.destination_prefix_length == 0 && one.header.kind == RouteType::Unicast;
            is_default.then_some(Message::DelRoute(one))
        }
        _ => None,
    })
}

/// Deletes the rules that a source address leads to.
pub fn delete_source_rules() -> Result<()> {
    delete_all(Message::GetRule(RuleMessage::default()), |message| match message {
        Message::NewRule(one) => (one.header.src_len > 0).then_some(Message::DelRule(one)),
        _ => None,
    })
}

/// Deletes the token bucket filters.
pub fn delete_shapers() -> Result<()> {
    delete_all(Message::GetQueueDiscipline(TcMessage::default()), |message| match message {
        Message::NewQueueDiscipline(one) => {
            let is_shaper = one.attributes.contains(&TcAttribute::Kind("tbf".to_owned()));
            is_shaper.then_some(Message::DelQueueDiscipline(one))
        }
        _ => None,
    })
}

/// Deletes what a dump has and `choose` makes a deletion of.
fn delete_all(dump: Message, choose: impl Fn(Message) -> Option<Message>) -> Result<()> {
    let route = said(Netlink::open(Protocol::Route), "open netlink")?;
    let all = said(route.dump(dump), "look at the kernel")?;
    all.into_iter().filter_map(choose).try_for_each(|one| said(route.change(one), "delete"))
}

/// Deletes all rules of the packet filter.
pub fn flush_rules() -> Result<()> {
    let netlink = said(Netlink::open(Protocol::Netfilter), "open netlink")?;
    said(netlink.flush_nftables(), "delete the tables of nf_tables")
}

/// Why the kernel has no such kind of link; `None` if it has.
pub fn lacks(needs: Needs) -> Result<Option<&'static str>> {
    let route = said(Netlink::open(Protocol::Route), "open netlink")?;
    let (name, message) = match needs {
        Needs::Nothing => return Ok(None),
        Needs::Dummy => ("dummy", LinkDummy::new("probe0").build()),
        Needs::Vrf => ("vrf", LinkVrf::new("probe0", 99).build()),
        Needs::Vlan => ("8021q", LinkVlan::new("probe0", index(UPLINK)?, 9).build()),
        Needs::Ipvlan => {
            ("ipvlan", LinkIpVlan::new("probe0", index(UPLINK)?, IpVlanMode::L2).build())
        }
    };
    let made = route.create(Message::NewLink(message));
    if made.is_ok() {
        delete("probe0")?;
    }
    Ok(made.is_err().then_some(name))
}

/// A link pair in the calling thread's namespace.
pub fn make_pair(name: &str, peer: &str) -> Result<()> {
    let route = said(Netlink::open(Protocol::Route), "open netlink")?;
    said(route.create(Message::NewLink(LinkVeth::new(name, peer).build())), "make a pair of links")
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
    let route = said(Netlink::open(Protocol::Route), "open netlink")?;
    said(route.create(Message::NewAddress(message)), "add an address")
}

fn add_default(gateway: IpAddr) -> Result<()> {
    let message = match gateway {
        IpAddr::V4(ip) => RouteMessageBuilder::<Ipv4Addr>::new().gateway(ip).build(),
        IpAddr::V6(ip) => RouteMessageBuilder::<Ipv6Addr>::new().gateway(ip).build(),
    };
    let route = said(Netlink::open(Protocol::Route), "open netlink")?;
    said(route.create(Message::NewRoute(message)), "add a route")
}
