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
//! | `v4/`, `v6/` | DHCP and DHCPv6: messages and leases |
//! | `family.rs` | a lease of either family |
//! | `machine/` | the state machine of a client |
//! | `timing.rs`, `text.rs` | for both families: clock, timeouts, random numbers; domain names |
//! | `record.rs` | leases on disk |
//! | `interface.rs`, `socket.rs` | work in the container's namespace |
//! | `daemon/` | the daemon |

mod client;
mod conf;
pub mod daemon;
pub mod family;
pub mod interface;
pub mod machine;
pub mod record;
pub mod rpc;
pub mod socket;
#[cfg(test)]
mod tests;
pub mod text;
pub mod timing;
pub mod v4;
pub mod v6;

use std::net::IpAddr;

use self::client::Daemon;
pub use self::conf::Conf;
use self::conf::Ipam;
use self::rpc::{Key, Request, Valid, Verb};
use self::v4::option::CLIENT_ID;
use crate::cni::json::keys::Keys;
use crate::cni::{CniResult, ContainerId, IfName};
use crate::error::{Context, Error, Result};
use crate::skel::{AddReq, CheckReq, Cx, DelReq, GcReq, Plugin, Remarks};

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
        request.netns = absolute(&req.sandbox.path)?;
        let result = Daemon::of(&ipam).ensure()?.call(&request)?;
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
        Daemon::of(&conf.ipam()?).call_or_replace(&request)
    }

    fn gc(cx: &Cx<'_>, conf: &Conf, req: &GcReq) -> Result<()> {
        let network = cx.net.name.to_string();
        let mut request = Request::new(Verb::Gc, Key { network, ..Key::default() });
        let valid = req.valid.iter().cloned();
        request.valid =
            valid.map(|a| Valid { container_id: a.container_id, ifname: a.ifname }).collect();
        Daemon::of(&conf.ipam()?).call_or_replace(&request)
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

/// An absolute path, because the working directory of the daemon is another one.
fn absolute(path: &str) -> Result<String> {
    let absolute = std::path::absolute(path);
    let absolute = absolute.map_err(|e| Error::io(format_args!("find {path}"), &e));
    absolute.map(|path| path.display().to_string()).context(|| "CNI_NETNS")
}
