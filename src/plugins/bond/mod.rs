//! bond: several links of the host, or of the container, as one interface of the container.
//!
//! Keys: `mode` and `links` (objects with `name`), both required; `linksInContainer` (the links are
//! in the container already), `miimon`, `mtu`, `failOverMac`, `allSlavesActive`, `tlbDynamicLb`,
//! `xmitHashPolicy`, `lacpRate`, `minLinks`, `mac`; `CNI_ARGS` `MAC` and the capability `mac` have
//! precedence over `mac`. `ipam` is optional: without it the interface is layer 2.
//!
//! While the container has the bond, a record of each link below `/run/cni/bond` holds its former
//! state. DEL deletes the bond, and returns the links to the host, or leaves those that were in the
//! container there, in that state. Nothing else remains on the host.

mod plan;
mod ports;

use serde::Deserialize;

use self::plan::{BondPlan, NumberOrText};
use crate::devices::record::DeviceRecordStore;
use crate::devices::transfer;
use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, Failures, GcRequest, Plugin,
    Rollback, delete_and_release,
};
use crate::iface::ContainerNetns;
use crate::iface::child::{self, CheckedLink, NewChildLink};
use crate::netlink::{LinkChange, LinkKind};
use crate::repairs::RepairFindings;
use cni::config::MacConfig;
use cni::error::{Error, ErrorContext, Result};
use cni::{CniResult, InterfaceName};

const KIND: &str = "bond";

pub struct Bond;

/// The keys of a bond network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BondConfig {
    /// How frames are spread over the links, such as `active-backup` or `802.3ad`.
    mode: String,
    /// The links, at least two.
    links: Vec<BondLink>,
    /// The links are in the container already, and stay there.
    links_in_container: bool,
    /// Whether the default routes of `ipam` are the container's. Default: true.
    default_route: Option<bool>,
    /// Whether router advertisements give the interface addresses and routes, if it has IPv6
    /// addresses of `ipam`. Default: as the kernel decides.
    #[serde(rename = "acceptRA")]
    accept_ra: Option<bool>,
    /// The interval in ms at which the carrier of the links is checked; 0 for never. Default: 100.
    miimon: NumberOrText,
    /// MTU in bytes of the bond and its links, at most theirs. Default: 1500.
    mtu: NumberOrText,
    /// With `active-backup`: all links have the MAC of the bond (0, default), the bond has that of
    /// its active link (1), the active link has that of the bond (2).
    fail_over_mac: NumberOrText,
    /// Whether frames that arrive at inactive links are received (1). Default: the kernel's, 0.
    all_slaves_active: NumberOrText,
    /// Whether flows move between the links by their load (1). Default: the kernel's, 1.
    tlb_dynamic_lb: NumberOrText,
    /// What selects the link of a frame. Default: the kernel's, `layer2`.
    xmit_hash_policy: String,
    /// How often a partner sends LACPDUs, in mode `802.3ad`: `slow` (30 s, the kernel's default) or
    /// `fast` (1 s).
    lacp_rate: String,
    /// The number of links with a carrier below which the bond has none, in mode `802.3ad`.
    /// Default: the kernel's, 0.
    min_links: NumberOrText,
    /// MAC of the bond. Default: that of the first link.
    mac: String,
    /// `runtimeConfig.mac` (capability `mac`): MAC of the bond; has precedence over the others.
    runtime_config: MacConfig,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct BondLink {
    /// The name of the link, or an alternative name.
    name: String,
}

impl Plugin for Bond {
    const NAME: &'static str = KIND;
    const ABOUT: &'static str = "several links of the host or container as one";
    const REPAIRS: bool = true;
    type Conf = BondConfig;

    fn examine(_: &CallContext<'_>, conf: &BondConfig, remarks: &mut ConfigRemarks) -> Result<()> {
        if BondPlan::from_config(conf, "")?.settings.miimon == 0 {
            let warning =
                Error::config("with miimon 0 the bond goes on using links that have failed");
            remarks.warnings.push(warning.with_details("remove the key: the default is 100 ms"));
        }
        Ok(())
    }

    fn add(cx: &CallContext<'_>, conf: &BondConfig, req: &AddRequest) -> Result<CniResult> {
        let plan = BondPlan::from_config(conf, &cx.mac_arg()?)?;
        let netns = req.sandbox.open_netns()?;
        let (inside, host) =
            (ContainerNetns::open_in(netns)?.with_accept_ra(conf.accept_ra), cx.host_netlink()?);
        let l3 = cx.has_ipam();
        if l3 {
            // Looked up before the move: a device loses the addresses of protocols (DHCP, SLAAC)
            // when it is moved.
            cx.ipam_plugin()?;
        }
        inside.require_free_name(req.ifname.as_str())?;
        let links = ports::find_links(cx, conf, &inside, &req.ifname)?;
        plan.require_mtu_of_links(&links)?;
        let store = DeviceRecordStore::for_network(KIND, &cx.net.name);
        let records = ports::new_records(cx, conf, req, &inside, &links)?;
        let mut undo = Rollback::new();

        for (link, record) in links.iter().zip(&records) {
            undo.add_step(format!("give \"{}\" back", link.name), || {
                let returned = ports::give_back(cx, record, Some(netns))?;
                store.end_attachment(record.clone(), returned)
            });
            store.save_record(record)?;
            if !conf.links_in_container {
                transfer::move_into_container(host, link, netns, &link.name, false)?;
            }
        }
        let (kind, mtu, mac) = (LinkKind::Bond(plan.settings), plan.mtu, plan.mac);
        child::create_link(
            &inside.netlink,
            &inside,
            &NewChildLink { ifname: &req.ifname, kind, mtu, mac },
            false,
        )?;
        undo.add_step(format!("delete \"{}\"", req.ifname), || {
            child::roll_back_link(&inside, &req.ifname)
        });
        let bond = inside.require_link(req.ifname.as_str())?;
        ports::attach_links(&inside, &bond, &links, plan.needs_distinct_macs())?;
        if !l3 || cx.ipam_needs_link() {
            inside.netlink.change_link(bond.index, LinkChange::new().set_up())?;
        }
        let mut result =
            if l3 { cx.ipam_add(&mut undo, conf.default_route)? } else { CniResult::new() };
        child::complete_link(&inside, &req.ifname, &req.sandbox.path, &mut result)?;
        cx.finish_result(&mut result);
        undo.commit();
        Ok(result)
    }

    fn check(cx: &CallContext<'_>, conf: &BondConfig, req: &CheckRequest) -> Result<()> {
        let plan = BondPlan::from_config(conf, &cx.mac_arg()?)?;
        let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
        cx.if_ipam(CallContext::ipam_check)?;
        let prev = plan.comparable_result(req)?;
        let found = find_bond(req, &inside, &prev)?;
        plan.verify_bond(&found.link)?;
        ports::verify_links(conf, &inside, &found.link)?;
        found.verify_layer3(&inside)
    }

    fn repair(
        cx: &CallContext<'_>,
        conf: &BondConfig,
        req: &CheckRequest,
        repairs: &mut RepairFindings,
    ) -> Result<()> {
        let prev = BondPlan::from_config(conf, &cx.mac_arg()?)?.comparable_result(req)?;
        let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
        child::restore_routes(&inside, &find_bond(req, &inside, &prev)?, repairs)
    }

    fn del(cx: &CallContext<'_>, conf: &BondConfig, req: &DelRequest) -> Result<()> {
        let mut failures = Failures::new();
        let store = DeviceRecordStore::for_network(KIND, &cx.net.name);
        let mut records = store.list_network_records();
        records.retain(|record| {
            record.container_id == req.id.as_str() && record.ifname == req.ifname.as_str()
        });
        let netns = match records.first() {
            Some(record) => failures.keep_error(record.netns_of_del(req.netns.as_ref())).flatten(),
            None => req.netns.clone(),
        };
        let netns = netns.as_ref();
        delete_and_release(cx, &mut failures, CallContext::ipam_del, |failures| {
            if let Some(netns) = netns.filter(|_| records.is_empty()) {
                let found = failures.keep_error(ports::unrecorded_ports(cx, conf, req, netns));
                records.extend(found.unwrap_or_default());
            }
            let recorded = req.recorded_link();
            let deleted = failures.keep_error(netns.map_or(Ok(()), |netns| {
                child::delete_link(netns, &req.ifname, KIND, recorded.as_ref())
            }));
            for record in records {
                let given_back = ports::give_back(cx, &record, netns);
                failures.keep_error(
                    given_back.and_then(|returned| store.end_attachment(record, returned)),
                );
            }
            // The temporary file of an ADD that was killed before it had a record.
            failures.keep_error(store.remove_record(req.id.as_str(), req.ifname.as_str(), ""));
            deleted
        });
        failures.into_result()
    }

    fn gc(cx: &CallContext<'_>, _: &BondConfig, req: &GcRequest) -> Result<()> {
        let mut failures = Failures::new();
        delete_and_release(cx, &mut failures, CallContext::ipam_gc, |failures| {
            let store = DeviceRecordStore::for_network(KIND, &cx.net.name);
            let ended = store.end_stale_attachments(req, &|record, valid| {
                let netns = record.open_netns()?;
                // A later container in the same namespace may have a bond of that name.
                let has_name = valid
                    .iter()
                    .any(|other| (&other.netns, &other.ifname) == (&record.netns, &record.ifname));
                if let Some(netns) = netns.as_ref().filter(|_| !has_name) {
                    child::delete_link(netns, &InterfaceName::parse(&record.ifname)?, KIND, None)?;
                }
                ports::give_back(cx, record, netns.as_ref())
            });
            failures.keep_error(ended)
        });
        failures.into_result()
    }

    fn status(cx: &CallContext<'_>, conf: &BondConfig) -> Result<()> {
        Self::require_sound(cx, conf)?;
        let host = cx.usable_host_netlink()?;
        if !conf.links_in_container {
            ports::require_known(cx, conf, host).or_unavailable()?;
        }
        let settings = BondPlan::from_config(conf, "")?.settings;
        child::require_driver(&|_| LinkKind::Bond(settings)).or_unavailable()?;
        cx.if_ipam(CallContext::ipam_status)
    }
}

/// The bond that the result of ADD lists.
fn find_bond<'r>(
    req: &CheckRequest,
    inside: &ContainerNetns<'_>,
    prev: &'r CniResult,
) -> Result<CheckedLink<'r>> {
    child::find_listed_link(inside, prev, &req.ifname, &req.sandbox.path, KIND)
}

impl BondPlan {
    /// The result of ADD, without the MAC of a bond that has another one after a failover.
    fn comparable_result(&self, req: &CheckRequest) -> Result<CniResult> {
        let mut prev = req.require_final_result()?.clone();
        if self.mac_follows_active_link() {
            let own = prev.interfaces.iter_mut().filter(|entry| entry.name == req.ifname.as_str());
            own.for_each(|entry| entry.mac.clear());
        }
        Ok(prev)
    }
}
