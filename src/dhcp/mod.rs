//! dhcp: leases from the DHCP servers of the container's network.
//!
//! The plugin process ends long before a lease has to be renewed, so the same executable is also
//! the daemon that maintains leases: `dhcp daemon`, in [`daemon`]. The plugin sends requests to the
//! daemon over a unix socket.
//!
//! Keys of `ipam`: `daemonSocketPath` (`/run/cni/dhcp.sock`), `family` (`ipv4`, `ipv6` or `both`),
//! `request`, `provide`, `priority`, `routes`, and `startDaemon`: start the daemon if it is not
//! running. `docs/dhcp-daemon.md` documents them.
//!
//! State on the host while the container lives: a file per lease in `/run/cni/dhcp`.
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

use ipnet::{Ipv4Net, Ipv6Net};

use self::client::DaemonClient;
pub use self::conf::DhcpConfig;
use self::conf::DhcpIpamConfig;
use self::family::DhcpFamily;
use self::passing::ProcfsLink;
use self::rpc::{DaemonRequest, DaemonVerb, DhcpLeaseKey, ValidDhcpAttachment};
use self::v4::option::CLIENT_ID;
use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, GcRequest, Plugin, addressing,
};
use crate::netns::Netns;
use crate::sysctl;
use cni::error::{Error, ErrorCode, ErrorContext, Result};
use cni::json::keys::DecodedKeys;
use cni::{CniResult, ContainerId, InterfaceName, IpConfig};

#[derive(Debug)]
pub struct Dhcp;

impl Plugin for Dhcp {
    const NAME: &'static str = "dhcp";
    const ABOUT: &'static str = "addresses on loan from a DHCP server";
    type Conf = DhcpConfig;

    fn keys() -> DecodedKeys {
        DecodedKeys::of_type::<DhcpConfig>()
            .with_member("ipam", DecodedKeys::of_type::<DhcpIpamConfig>())
    }

    fn examine(cx: &CallContext<'_>, conf: &DhcpConfig, remarks: &mut ConfigRemarks) -> Result<()> {
        let ipam = conf.required_ipam()?;
        let any_address = |family| {
            let address = match family {
                DhcpFamily::V4 => Ipv4Net::default().into(),
                DhcpFamily::V6 => Ipv6Net::default().into(),
            };
            IpConfig { address, gateway: None, interface: None }
        };
        let ips: Vec<_> = ipam.lease_families()?.into_iter().map(any_address).collect();
        remarks.warnings.extend(addressing::route_warnings(&ips, &ipam.routes));
        ipam.message_options(cx.raw_args()).map(drop)
    }

    fn add(cx: &CallContext<'_>, conf: &DhcpConfig, req: &AddRequest) -> Result<CniResult> {
        let ipam = conf.required_ipam()?;
        let mut request = attachment_request(DaemonVerb::Add, cx, &req.id, &req.ifname);
        request.families = ipam.lease_families()?;
        request.options = ipam.message_options(cx.raw_args())?;
        request.options.entry(CLIENT_ID).or_insert_with(|| request.key.client_id());
        request.priority = ipam.priority;
        request.routes = conf.route_config(&ipam);
        let netns = req.sandbox.open_netns()?;
        if request.families.contains(&DhcpFamily::V6) {
            let key = format!("net/ipv6/conf/{}/disable_ipv6", req.ifname);
            netns.run_inside(|| sysctl::ensure_value(&key, "0"))??;
        }
        let link = find_procfs_link(netns)?;
        request.netns = absolute_path(link.as_ref().map_or(netns.path(), ProcfsLink::link_path))?;
        let directory = link.as_ref().map(ProcfsLink::directory_fd);
        let passed: Vec<_> = [netns.as_fd()].into_iter().chain(directory).collect();
        let result = DaemonClient::from_ipam(&ipam)
            .ensure_running()?
            .send_with_descriptors(&request, &passed)?;
        result.ok_or_else(|| Error::internal("the DHCP daemon replied without a result"))
    }

    fn check(cx: &CallContext<'_>, conf: &DhcpConfig, req: &CheckRequest) -> Result<()> {
        let ipam = conf.required_ipam()?;
        let mut request = attachment_request(DaemonVerb::Check, cx, &req.id, &req.ifname);
        request.families = ipam.lease_families()?;
        request.addresses = previous_addresses(req);
        DaemonClient::from_ipam(&ipam).send_request(&request).map(drop)
    }

    fn del(cx: &CallContext<'_>, conf: &DhcpConfig, req: &DelRequest) -> Result<()> {
        let request = attachment_request(DaemonVerb::Del, cx, &req.id, &req.ifname);
        DaemonClient::from_ipam(&conf.ipam_for_removal(cx)?).release_leases(&request)
    }

    fn gc(cx: &CallContext<'_>, conf: &DhcpConfig, req: &GcRequest) -> Result<()> {
        let network = cx.net.name.to_string();
        let mut request =
            DaemonRequest::new(DaemonVerb::Gc, DhcpLeaseKey { network, ..DhcpLeaseKey::default() });
        let valid = req.valid.iter().cloned();
        request.valid = valid
            .map(|a| ValidDhcpAttachment { container_id: a.container_id, ifname: a.ifname })
            .collect();
        DaemonClient::from_ipam(&conf.ipam_for_removal(cx)?).release_leases(&request)
    }

    fn status(cx: &CallContext<'_>, conf: &DhcpConfig) -> Result<()> {
        let ipam = conf.required_ipam()?;
        ipam.message_options(cx.raw_args())?;
        DaemonClient::from_ipam(&ipam).verify_status().or_unavailable()
    }
}

fn attachment_request(
    verb: DaemonVerb,
    cx: &CallContext<'_>,
    id: &ContainerId,
    ifname: &InterfaceName,
) -> DaemonRequest {
    let (container_id, network) = (id.to_string(), cx.net.name.to_string());
    let ifname = ifname.to_string();
    DaemonRequest::new(
        verb,
        DhcpLeaseKey { container_id, network, ifname, ..DhcpLeaseKey::default() },
    )
}

/// The addresses of this interface in `prevResult`, and those without an interface.
fn previous_addresses(req: &CheckRequest) -> Vec<IpAddr> {
    let Some(prev) = &req.prev else { return Vec::new() };
    let name = |index: i64| {
        let interface = usize::try_from(index).ok().and_then(|i| prev.interfaces.get(i))?;
        Some(interface.name.as_str())
    };
    let own = prev
        .ips
        .iter()
        .filter(|ip| ip.interface.is_none_or(|index| name(index) == Some(req.ifname.as_str())));
    own.map(|ip| ip.address.addr()).collect()
}

/// The link of procfs that the path of a namespace is or leads to. Its process is alive and in this
/// namespace.
fn find_procfs_link(netns: &Netns) -> Result<Option<ProcfsLink>> {
    let path = netns.path();
    let link = ProcfsLink::from_path(path);
    let link = link.map_err(|e| Error::io(format_args!("look for {}", path.display()), &e))?;
    if let Some(link) = &link
        && !Netns::open(link.descriptor_path())?.is_same_as(netns)?
    {
        let msg = format!("another network namespace is at {}", path.display());
        return Err(Error::internal(msg).with_code(ErrorCode::INVALID_NETNS));
    }
    Ok(link)
}

/// An absolute path, because the working directory of the daemon is another one.
fn absolute_path(path: &Path) -> Result<String> {
    let absolute = std::path::absolute(path);
    let absolute = absolute.map_err(|e| Error::io(format_args!("find {}", path.display()), &e));
    absolute.map(|path| path.display().to_string()).context(|| "CNI_NETNS")
}
