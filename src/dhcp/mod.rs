//! dhcp: leases from the DHCP servers of the container's network.
//!
//! The plugin process ends long before a lease has to be renewed, so the same executable is also the daemon that
//! maintains leases: `dhcp daemon`, in [`daemon`]. The plugin sends requests to the daemon over a unix socket.
//!
//! Keys of `ipam`: `daemonSocketPath` (`/run/cni/dhcp.sock`), `family` (`ipv4`, `ipv6` or `both`),
//! `request`, `provide`, `priority`, and `startDaemon`: start the daemon if it is not running.
//! `docs/dhcp-daemon.md` documents them.
//!
//! On the host it leaves a file per lease in `/run/cni/dhcp` while the container exists.
//!
//! | file | |
//! | --- | --- |
//! | `conf.rs` | the keys |
//! | `rpc.rs`, `client.rs` | requests and replies between plugin and daemon, and the plugin's side |
//! | `passing.rs` | the descriptors of an ADD |
//! | `v4/`, `v6/` | DHCP and DHCPv6: messages and leases |
//! | `family.rs` | a lease of either family |
//! | `machine/` | the state machine of a client |
//! | `timing.rs`, `text.rs` | for both families: clock, timeouts, random numbers; domain names |
//! | `record.rs` | leases on disk |
//! | `sandbox.rs` | the container's namespace, and how the daemon enters it again |
//! | `interface.rs`, `socket.rs` | work in the container's namespace |
//! | `daemon/` | the daemon |

mod client;
mod conf;
pub mod daemon;
pub mod family;
pub mod interface;
pub mod machine;
pub mod passing;
pub mod record;
pub mod rpc;
pub mod sandbox;
pub mod socket;
#[cfg(test)]
mod tests;
pub mod text;
pub mod timing;
pub mod v4;
pub mod v6;

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;

use self::client::Daemon;
pub use self::conf::Conf;
use self::conf::Ipam;
use self::family::Family;
use self::passing::Link;
use self::rpc::{Key, Request, Valid, Verb};
use self::v4::option::CLIENT_ID;
use crate::cni::json::keys::Keys;
use crate::cni::{CniResult, ContainerId, IfName};
use crate::error::{Code, Context, Error, Result};
use crate::netns::Netns;
use crate::skel::{AddReq, CheckReq, Cx, DelReq, GcReq, Plugin, Remarks};
use crate::sysctl;

/// The plugin.
#[derive(Debug)]
pub struct Dhcp;

impl Plugin for Dhcp {
    const NAME: &'static str = "dhcp";
    const ABOUT: &'static str = "addresses on loan from a DHCP server";
    type Conf = Conf;

    fn keys() -> Keys {
        Keys::of::<Conf>().with("ipam", Keys::of::<Ipam>())
    }

    fn examine(cx: &Cx<'_>, conf: &Conf, _: &mut Remarks) -> Result<()> {
        conf.ipam()?.options(cx.raw_args()).map(drop)
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let ipam = conf.ipam()?;
        let mut request = request(Verb::Add, cx, &req.id, &req.ifname);
        request.families = ipam.families()?;
        request.options = ipam.options(cx.raw_args())?;
        request.options.entry(CLIENT_ID).or_insert_with(|| request.key.client_id());
        request.priority = ipam.priority;
        let netns = req.sandbox.netns()?;
        if request.families.contains(&Family::V6) {
            let key = format!("net/ipv6/conf/{}/disable_ipv6", req.ifname);
            netns.run(|| sysctl::ensure(&key, "0"))??;
        }
        let link = link_of(netns)?;
        request.netns = absolute(link.as_ref().map_or(netns.path(), Link::path))?;
        let folder = link.as_ref().map(Link::folder);
        let passed: Vec<_> = [netns.as_fd()].into_iter().chain(folder).collect();
        let result = Daemon::of(&ipam).ensure()?.call_with(&request, &passed)?;
        result.ok_or_else(|| Error::internal("the DHCP daemon replied without a result"))
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let ipam = conf.ipam()?;
        let mut request = request(Verb::Check, cx, &req.id, &req.ifname);
        request.families = ipam.families()?;
        request.addresses = addresses_of(req);
        Daemon::of(&ipam).call(&request).map(drop)
    }

    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let request = request(Verb::Del, cx, &req.id, &req.ifname);
        Daemon::of(&conf.readable(cx)?).call_or_replace(&request)
    }

    fn gc(cx: &Cx<'_>, conf: &Conf, req: &GcReq) -> Result<()> {
        let network = cx.net.name.to_string();
        let mut request = Request::new(Verb::Gc, Key { network, ..Key::default() });
        let valid = req.valid.iter().cloned();
        request.valid =
            valid.map(|a| Valid { container_id: a.container_id, ifname: a.ifname }).collect();
        Daemon::of(&conf.readable(cx)?).call_or_replace(&request)
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let ipam = conf.ipam()?;
        ipam.options(cx.raw_args())?;
        Daemon::of(&ipam).status().or_unavailable()
    }
}

/// A request about an attachment.
fn request(verb: Verb, cx: &Cx<'_>, id: &ContainerId, ifname: &IfName) -> Request {
    let (container_id, network) = (id.to_string(), cx.net.name.to_string());
    let ifname = ifname.to_string();
    Request::new(verb, Key { container_id, network, ifname, ..Key::default() })
}

/// The addresses of this interface in `prevResult`, and those without an interface.
fn addresses_of(req: &CheckReq) -> Vec<IpAddr> {
    let Some(prev) = &req.prev else { return Vec::new() };
    let name = |index: i64| {
        let interface = usize::try_from(index).ok().and_then(|i| prev.interfaces.get(i))?;
        Some(interface.name.as_str())
    };
    let is_own = |index: i64| name(index) == Some(req.ifname.as_str());
    let own = prev.ips.iter().filter(|ip| ip.interface.is_none_or(is_own));
    own.map(|ip| ip.address.addr()).collect()
}

/// The link of procfs that the path of a namespace is or leads to. Its process is alive and in this namespace.
fn link_of(netns: &Netns) -> Result<Option<Link>> {
    let path = netns.path();
    let link = Link::of(path);
    let link = link.map_err(|e| Error::io(format_args!("look for {}", path.display()), &e))?;
    if let Some(link) = &link
        && !Netns::open(link.own_path())?.same_as(netns)?
    {
        let msg = format!("another network namespace is at {}", path.display());
        return Err(Error::internal(msg).with_code(Code::INVALID_NETNS));
    }
    Ok(link)
}

/// An absolute path, because the working directory of the daemon is another one.
fn absolute(path: &Path) -> Result<String> {
    let absolute = std::path::absolute(path);
    let absolute = absolute.map_err(|e| Error::io(format_args!("find {}", path.display()), &e));
    absolute.map(|path| path.display().to_string()).context(|| "CNI_NETNS")
}
