//! dhcp: addresses on loan from the DHCP server of the container's network.
//!
//! The plugin lives too short to renew a lease, so the same executable is the daemon that does:
//! `dhcp daemon`, in [`daemon`]. The plugin asks it over a unix socket and prints what it says.
//!
//! Keys of `ipam`: `daemonSocketPath` (`/run/cni/dhcp.sock`), `family` (`ipv4`, `ipv6` or `both`),
//! `request`, `provide`, `priority`, and `startDaemon`: start the daemon if it is not there.
//! `docs/dhcp-daemon.md` has all of them.
//!
//! On the host it leaves, while the container lives, a file in `/run/cni/dhcp`.
//!
//! | file | |
//! | --- | --- |
//! | `conf.rs` | the keys |
//! | `rpc.rs`, `client.rs` | requests and answers between plugin and daemon, and the plugin's side |
//! | `v4/`, `v6/` | DHCP and DHCPv6: messages, leases, sockets |
//! | `family.rs` | a lease of either family |
//! | `machine/` | the client's states, for either family |
//! | `timing.rs`, `text.rs` | for both: clock, waits, random numbers; domain names |
//! | `record.rs` | leases on disk |
//! | `interface.rs`, `release.rs` | work in the container's namespace |
//! | `daemon/` | the daemon |

mod client;
mod conf;
pub mod daemon;
pub mod family;
pub mod interface;
pub mod machine;
pub mod record;
pub mod release;
pub mod rpc;
#[cfg(test)]
mod tests;
pub mod text;
pub mod timing;
pub mod v4;
pub mod v6;

use std::path::Path;

use self::client::Daemon;
pub use self::conf::Conf;
use self::conf::Ipam;
use self::rpc::{Key, Request, Verb};
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
        let request = Request::new(Verb::Add, key(cx, &req.id, &req.ifname));
        let mut request = request.families(ipam.families()?);
        request.options = ipam.options(cx.raw_args())?;
        let id = request.key.client_id();
        request.options.entry(CLIENT_ID).or_insert(id);
        request.priority = ipam.priority();
        request.netns = absolute(&req.sandbox.path)?;
        let result = Daemon::of(&ipam).ensure()?.call(&request)?;
        result.ok_or_else(|| Error::internal("the DHCP daemon answered without a result"))
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let ipam = conf.ipam()?;
        let request = Request::new(Verb::Check, key(cx, &req.id, &req.ifname));
        let mut request = request.families(ipam.families()?);
        request.addresses = addresses_of(req);
        Daemon::of(&ipam).call(&request).map(drop)
    }

    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let ipam = conf.ipam()?;
        let request = Request::new(Verb::Del, key(cx, &req.id, &req.ifname));
        Daemon::of(&ipam).call_or_replace(&request)
    }

    fn gc(cx: &Cx<'_>, conf: &Conf, req: &GcReq) -> Result<()> {
        let ipam = conf.ipam()?;
        let network = cx.net.name.to_string();
        let mut request = Request::new(Verb::Gc, Key { network, ..Key::default() });
        request.valid = req.valid.iter().cloned().map(Into::into).collect();
        Daemon::of(&ipam).call_or_replace(&request)
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let ipam: Ipam = conf.ipam()?;
        ipam.options(cx.raw_args())?;
        Daemon::of(&ipam).status().or_unavailable()
    }
}

fn key(cx: &Cx<'_>, id: &ContainerId, ifname: &IfName) -> Key {
    Key {
        container_id: id.to_string(),
        network: cx.net.name.to_string(),
        ifname: ifname.to_string(),
        ..Key::default()
    }
}

/// The addresses that the result of ADD has for this interface, or for none in particular.
fn addresses_of(req: &CheckReq) -> Vec<std::net::IpAddr> {
    let Some(prev) = &req.prev else { return Vec::new() };
    let name = |index: i64| {
        let interface = usize::try_from(index).ok().and_then(|i| prev.interfaces.get(i))?;
        Some(interface.name.as_str())
    };
    let own = |index: Option<i64>| match index {
        Some(index) => name(index) == Some(req.ifname.as_str()),
        None => true,
    };
    prev.ips.iter().filter(|ip| own(ip.interface)).map(|ip| ip.address.addr()).collect()
}

/// The daemon has another working directory.
fn absolute(path: &str) -> Result<String> {
    let absolute = std::path::absolute(Path::new(path));
    let absolute = absolute.map_err(|e| Error::io(format_args!("find {path}"), &e));
    absolute.map(|path| path.display().to_string()).context(|| "CNI_NETNS")
}
