//! tuning: kernel parameters, MAC, MTU, modes and transmit queue of the container's interface.
//!
//! A chained plugin, behind an interface plugin: it returns `prevResult` with the MAC and MTU that
//! it has set. Keys: `sysctl`, an object set in its order, in whose keys `IFNAME` is the interface;
//! `mac`, `mtu`, `promisc`, `allmulti`, `txQLen`, all of which `args.cni` may override, the MAC
//! also `CNI_ARGS` and `runtimeConfig`; `dataDir`; `profile`. Kernel parameters that the node's
//! `/etc/cni/tuning/allowlist.conf` does not match are refused.
//!
//! State on the host while the container lives: a file below `dataDir` with the attributes for DEL
//! to restore. Kernel parameters are not restored: they end with the namespace.

mod attributes;
mod backup;
mod permission;
mod sysctls;

use std::path::{Path, PathBuf};

use serde::Deserialize;

use self::attributes::InterfaceAttributes;
use self::backup::TuningBackup;
use self::sysctls::{ConfiguredSysctls, KernelParameter};
use crate::attachment::backup::{self as files, BackupFile};
use crate::attachment::{AttachmentId, AttachmentRecord};
use crate::files::trust;
use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, GcRequest, Plugin, Rollback,
    require_prev_result,
};
use crate::iface::{ContainerNetns, configure, mtu};
use crate::netlink::{KernelRoute, Link, MacAddress, Netlink, RouteFilter};
use crate::netns::Netns;
use cni::config::{Args, MacConfig};
use cni::error::{Error, ErrorContext, Result};
use cni::{CniResult, InterfaceName};

/// `RTPROT_RA`: routes of router advertisements.
const RTPROT_RA: u8 = 9;

#[derive(Debug)]
pub struct Tuning;

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TuningConfig {
    /// Kernel parameters below `net`, set in this order. `IFNAME` is the interface.
    sysctl: ConfiguredSysctls,
    mac: String,
    /// `true` makes the interface promiscuous; `false` is only verified.
    promisc: Option<bool>,
    /// The MTU; 0 leaves it unchanged.
    mtu: i64,
    /// Whether the interface receives all multicast packets. Default: unchanged.
    allmulti: Option<bool>,
    /// The length of the transmit queue, in packets. Default: unchanged.
    #[serde(rename = "txQLen")]
    txqlen: Option<i64>,
    /// The directory of backups. Default: `/run/cni/tuning`.
    data_dir: String,
    /// `safe` refuses all but a few parameters. Default: the allowlist decides.
    profile: String,
    runtime_config: MacConfig,
    args: Args<TuningArgs>,
}

/// Keys for one container, which override those of the configuration, also with 0.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct TuningArgs {
    sysctl: ConfiguredSysctls,
    mac: Option<String>,
    promisc: Option<bool>,
    mtu: Option<i64>,
    allmulti: Option<bool>,
    #[serde(rename = "txQLen")]
    txqlen: Option<i64>,
}

impl TuningConfig {
    /// The directory of backups, as configured.
    fn backup_directory(&self) -> &Path {
        Path::new(if self.data_dir.is_empty() { "/run/cni/tuning" } else { &self.data_dir })
    }

    /// The directory of backups for DEL and GC, which no invalid key prevents: the backups are
    /// ignored if other users than root could have written them.
    fn backup_directory_if_trusted(&self) -> Option<PathBuf> {
        trust::resolve_data_dir(self.backup_directory())
            .inspect_err(|error| warn!("{error}; its backups are ignored"))
            .ok()
    }

    /// The attributes: `args` overrides the configuration; the MAC has further sources.
    fn resolve_attributes(&self, cx: &CallContext<'_>) -> Result<InterfaceAttributes> {
        let args = &self.args.cni;
        let from_env = cx.mac_arg()?;
        let mut macs = [&self.runtime_config.mac, &from_env, &self.mac].into_iter();
        let mac = args.mac.as_ref().or_else(|| macs.find(|mac| !mac.is_empty()));
        let txqlen = args.txqlen.or(self.txqlen).map(|length| {
            u32::try_from(length)
                .map_err(|_| Error::config(format!("txQLen {length} is not a length of a queue")))
        });
        Ok(InterfaceAttributes {
            mac: mac.filter(|mac| !mac.is_empty()).map(|mac| parse_mac(mac)).transpose()?,
            promisc: args.promisc.or(self.promisc),
            mtu: Some(mtu::bytes_from_config(args.mtu.unwrap_or(self.mtu))?).filter(|mtu| *mtu > 0),
            allmulti: args.allmulti.or(self.allmulti),
            txqlen: txqlen.transpose()?,
        })
    }
}

fn parse_mac(text: &str) -> Result<MacAddress> {
    MacAddress::parse_unicast(text).context(|| format!("invalid args {text} for MAC addr"))
}

impl Plugin for Tuning {
    const NAME: &'static str = "tuning";
    const ABOUT: &'static str = "kernel parameters, MAC, MTU and modes of the interface";
    type Conf = TuningConfig;

    fn examine(cx: &CallContext<'_>, conf: &TuningConfig, _: &mut ConfigRemarks) -> Result<()> {
        let plan = TuningPlan::from_config(cx, conf, &InterfaceName::parse("eth0")?)?;
        if plan.attributes.is_empty() {
            Ok(())
        } else {
            trust::require_data_dir_path(conf.backup_directory())
        }
    }

    fn add(cx: &CallContext<'_>, conf: &TuningConfig, req: &AddRequest) -> Result<CniResult> {
        let plan = TuningPlan::from_config(cx, conf, &req.ifname)?;
        permission::check_allowlist(&plan.parameters)?;
        let mut result =
            require_prev_result(req.prev.as_ref(), "Required prevResult missing")?.clone();
        plan.require_kept_addresses(&result, &req.ifname)?;
        let netns = req.sandbox.open_netns()?;
        // Parameters that are safe in a container's namespace are not safe in the host's.
        if plan.is_safe
            && !plan.parameters.is_empty()
            && Netns::open_current()?.is_same_as(netns)?
        {
            return Err(Error::config(
                "the profile \"safe\" sets no sysctl in the network namespace of the node",
            ));
        }
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let is_backed_up = !plan.attributes.is_empty();
        let dir = if is_backed_up {
            trust::create_data_dir(conf.backup_directory(), 0o700)?
        } else {
            PathBuf::new()
        };
        let (file, ifname) = (BackupFile::new(&dir, &owner), &req.ifname);
        netns.run_inside(|| plan.apply_changes(ifname, &file, &owner))??;
        let host_end = plan.attributes.mtu.and_then(|mtu| {
            let end = set_mtu_of_host_end(cx, netns, ifname, mtu);
            end.inspect_err(|error| warn!("{error}")).ok().flatten()
        });
        if let Some(end) = host_end {
            let entries = result.interfaces.iter_mut();
            entries
                .filter(|entry| entry.name == end.name && entry.sandbox.is_empty())
                .for_each(|entry| entry.mtu = cx.reported_mtu(end.mtu));
        }
        for interface in result
            .interfaces
            .iter_mut()
            .filter(|i| i.name == ifname.as_str() && !i.sandbox.is_empty())
        {
            if let Some(mac) = plan.attributes.mac {
                warn_of_lease(&owner, req, &interface.mac, mac);
                interface.mac = mac.to_string();
            }
            if let Some(mtu) = plan.attributes.mtu {
                interface.mtu = cx.reported_mtu(mtu);
            }
        }
        Ok(result)
    }

    fn check(cx: &CallContext<'_>, conf: &TuningConfig, req: &CheckRequest) -> Result<()> {
        let plan = TuningPlan::from_config(cx, conf, &req.ifname)?;
        req.require_final_result()?;
        let ifname = &req.ifname;
        req.sandbox.open_netns()?.run_inside(|| plan.verify_all(ifname))?
    }

    /// An attribute that cannot be restored is reported once only: otherwise the DEL of the
    /// interface plugin, which runs later, would never delete the interface.
    fn del(cx: &CallContext<'_>, conf: &TuningConfig, req: &DelRequest) -> Result<()> {
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let Some(dir) = conf.backup_directory_if_trusted() else { return Ok(()) };
        let file = BackupFile::new(&dir, &owner);
        let mut backup = match TuningBackup::read_file(&file) {
            Ok(Some(backup)) if !backup.may_belong_to(&owner) => return Ok(()),
            Ok(backup) => backup,
            Err(error) => {
                warn!("\"{}\" stays as it is: {error}", req.ifname);
                None
            }
        };
        if let (Some(netns), Some(backup)) = (&req.netns, backup.as_mut()) {
            let restored = netns.run_inside(|| {
                let netlink = Netlink::open()?;
                let link = netlink.find_link(req.ifname.as_str())?;
                link.map_or(Ok(()), |link| backup.original.restore_on_link(&netlink, &link))
            });
            let restored = restored.unwrap_or_else(|e| Err(e.into()));
            if let Some(mtu) = backup.original.mtu.filter(|_| restored.is_ok()) {
                set_mtu_of_host_end(cx, netns, &req.ifname, mtu)
                    .map_or_else(|error| debug!("{error}"), drop);
            }
            if let Err(error) = restored.context(|| format!("restore \"{}\"", req.ifname)) {
                if !backup.extra.tried {
                    backup.extra.tried = true;
                    backup.write_file(&file)?;
                    return Err(error.with_details("the next DEL tries once more"));
                }
                warn!("{error}");
            }
        }
        Ok(file.remove_files()?)
    }

    fn gc(cx: &CallContext<'_>, conf: &TuningConfig, req: &GcRequest) -> Result<()> {
        let Some(dir) = conf.backup_directory_if_trusted() else { return Ok(()) };
        let valid = AttachmentId::from_attachments(&cx.net.name, &req.valid);
        TuningBackup::remove_stale(&dir, cx.net.name.as_str(), &valid)
    }

    fn status(cx: &CallContext<'_>, conf: &TuningConfig) -> Result<()> {
        let plan =
            TuningPlan::from_config(cx, conf, &InterfaceName::parse("eth0")?).or_unavailable()?;
        permission::check_allowlist(&plan.parameters).or_unavailable()?;
        if !plan.attributes.is_empty() {
            let dir = trust::resolve_data_dir(conf.backup_directory()).or_unavailable()?;
            files::require_writable(&dir).or_unavailable()?;
        }
        cx.usable_host_netlink().map(drop)
    }
}

/// Removes the addresses, and with `routes` the routes, that the interface in the calling thread's
/// namespace got by router advertisements before they were switched off.
fn remove_advertised(ifname: &InterfaceName, routes: bool) -> Result<()> {
    let netlink = Netlink::open()?;
    let Some(link) = netlink.find_link(ifname.as_str())? else { return Ok(()) };
    for address in netlink.dump_addresses(link.index)?.iter().filter(|addr| addr.is_advertised()) {
        netlink.delete_address(link.index, address.net)?;
    }
    if routes {
        let filter = RouteFilter { oif: Some(link.index), ..RouteFilter::default() };
        let is_advertised = |route: &&KernelRoute| route.protocol == Some(RTPROT_RA);
        for route in netlink.dump_routes(&filter)?.iter().filter(is_advertised) {
            netlink.delete_route(route)?;
        }
    }
    Ok(())
}

/// See [`mtu::set_on_host_end`].
fn set_mtu_of_host_end(
    cx: &CallContext<'_>,
    netns: &Netns,
    ifname: &InterfaceName,
    mtu: u32,
) -> Result<Option<Link>> {
    let inside = ContainerNetns::open_in(netns)?;
    let link = inside.require_link(ifname.as_str())?;
    mtu::set_on_host_end(cx.host_netlink()?, &inside, &link, mtu)
}

/// Warns if the interface has a DHCP lease, which is for the MAC `former` that an earlier plugin
/// reported.
fn warn_of_lease(owner: &AttachmentId<'_>, req: &AddRequest, former: &str, mac: MacAddress) {
    if former.parse() != Ok(mac)
        && AttachmentRecord::find_by_attachment(*owner).is_some_and(|record| {
            record.ipam == "dhcp" && record.netns == req.sandbox.netns_identity()
        })
    {
        warn!(
            "the DHCP lease of \"{}\" is for {former}: the server does not know {mac}; give the \
             MAC to the plugin that creates the interface instead of tuning",
            req.ifname
        );
    }
}

/// The parameters and attributes to set.
struct TuningPlan {
    /// Whether the profile is "safe".
    is_safe: bool,
    parameters: Vec<KernelParameter>,
    attributes: InterfaceAttributes,
}

impl TuningPlan {
    fn from_config(
        cx: &CallContext<'_>,
        conf: &TuningConfig,
        ifname: &InterfaceName,
    ) -> Result<TuningPlan> {
        let is_safe = permission::is_safe_profile(&conf.profile)?;
        let mut parameters = conf.sysctl.merge_parameters(&conf.args.cni.sysctl, ifname)?;
        if is_safe {
            permission::restrict_to_safe(&mut parameters, ifname)?;
        }
        Ok(TuningPlan { is_safe, parameters, attributes: conf.resolve_attributes(cx)? })
    }

    /// Refuses changes by which the interface would lose IPv6 addresses of earlier plugins.
    fn require_kept_addresses(&self, prev: &CniResult, ifname: &InterfaceName) -> Result<()> {
        let index =
            prev.interfaces.iter().position(|i| i.name == ifname.as_str() && !i.sandbox.is_empty());
        let addresses = index.into_iter().flat_map(|index| prev.ips_of_interface(index));
        let Some(v6) = addresses.map(|ip| ip.address).find(|ip| ip.addr().is_ipv6()) else {
            return Ok(());
        };
        if let Some(mtu) = self.attributes.mtu.filter(|mtu| *mtu < mtu::LEAST_OF_IPV6) {
            let msg = format!("mtu {mtu} takes the address {v6} off \"{ifname}\"");
            return Err(Error::config(msg).with_details(mtu::REMEDY_OF_IPV6));
        }
        self.parameters.iter().find(|parameter| parameter.disables_ipv6(ifname.as_str())).map_or(
            Ok(()),
            |parameter| {
                let msg =
                    format!("sysctl {} takes the address {v6} off \"{ifname}\"", parameter.written);
                Err(Error::config(msg)
                    .with_details("remove the sysctl, or the IPv6 range of \"ipam\""))
            },
        )
    }

    /// Sets everything in the calling thread's namespace, or changes nothing.
    fn apply_changes(
        &self,
        ifname: &InterfaceName,
        file: &BackupFile,
        owner: &AttachmentId<'_>,
    ) -> Result<()> {
        // `false` is only verified.
        let promisc = self.attributes.promisc.filter(|on| *on);
        let attributes = InterfaceAttributes { promisc, ..self.attributes.clone() };
        let parameters: Vec<_> = self
            .parameters
            .iter()
            .map(KernelParameter::find_in_namespace)
            .collect::<Result<_>>()?;
        let mut link = None;
        if !attributes.is_empty() {
            let netlink = Netlink::open()?;
            let missing = || Error::internal(format!("failed to get \"{ifname}\": Link not found"));
            let found = netlink.find_link(ifname.as_str())?.ok_or_else(missing)?;
            link = Some((netlink, found));
        }

        let mut undo = Rollback::new();
        for parameter in &parameters {
            undo.add_step(format!("restore {}", parameter.key), || parameter.restore_value());
            parameter.write_value()?;
        }
        if let Some((netlink, link)) = &link {
            let original = InterfaceAttributes::from_link(link, &attributes);
            let former = file.read_content()?;
            let earlier =
                former.as_deref().map(TuningBackup::parse).transpose().unwrap_or_else(|error| {
                    warn!("replacing a backup that could not be read: {error}");
                    None
                });
            undo.add_step("restore the backup", move || {
                Ok(former
                    .map_or_else(|| file.remove_files(), |content| file.write_content(&content))?)
            });
            let earlier = earlier.filter(|backup| backup.may_belong_to(owner));
            TuningBackup::renew_backup(earlier, owner, &original, &attributes).write_file(file)?;
            undo.add_step(format!("restore {ifname:?}"), move || {
                original.restore_on_link(netlink, link)
            });
            let set: Result<()> = attributes.set_on_link(netlink, link).collect();
            set.context(|| format!("tune \"{ifname}\""))?;
        }
        undo.commit();
        let is_off = |key: &str| parameters.iter().any(|p| p.switches_off(ifname, key));
        let accepts_none = is_off("accept_ra");
        if accepts_none || is_off("autoconf") {
            remove_advertised(ifname, accepts_none)
                .unwrap_or_else(|error| warn!("\"{ifname}\": {error}"));
        }
        if let (Some(mac), Some((netlink, link))) = (attributes.mac, link) {
            configure::announce_once(&netlink, &Link { mac: Some(mac), ..link });
        }
        Ok(())
    }

    /// Compares with the attributes and parameters of the calling thread's namespace.
    fn verify_all(&self, ifname: &InterfaceName) -> Result<()> {
        for parameter in &self.parameters {
            parameter.find_in_namespace()?.verify_value()?;
        }
        let link = Netlink::open()?.find_link(ifname.as_str())?;
        self.attributes.verify_link(
            &link.ok_or_else(|| Error::internal(format!("Cannot find container link {ifname}")))?,
            ifname,
        )
    }
}
