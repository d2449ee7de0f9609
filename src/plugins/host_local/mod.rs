//! host-local: addresses from configured ranges, one file per lease on the local disk.
//!
//! Each range set of `ipam.ranges` supplies one address; a set may have several ranges. Leases
//! are files in `<dataDir>/<network>` named by the address, in the reference plugin's format, so
//! that the two implementations can replace each other.
//!
//! State on the host while the container lives: one lease file per address. Permanently: the directory with its lock,
//! the last reserved address of each set, and `.cnibox` with a journal of the leases and the host's ends of their veth pairs.
//! When no address is free, leases of an earlier boot, or whose end on the host is gone, are reclaimed.
//!
//! Keys, all in `ipam`: `type`, `dataDir`, `resolvConf`, `routes`, `ranges`, `subnet`, `rangeStart`, `rangeEnd`,
//! `gateway`, and in addition to the reference's, `reuseDelay` and `lockTimeout`.

pub mod allocate;
pub mod range;
pub mod resolv;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use self::range::{Range, RangeConf, RangeSet};
use crate::attachment::Owner;
use crate::cni::json::Json;
use crate::cni::json::keys::Keys;
use crate::cni::{CniResult, Dns, IpConfig, Route, ip};
use crate::error::{Code, Context, Error, Result};
use crate::leases::{DATA_DIR, Lease, LeaseOptions, LeaseStore, Listing};
use crate::log;
use crate::skel::{
    AddReq, CheckReq, Cx, DelReq, Failures, GcReq, Plugin, Remarks, addressing, reclaim,
};
use crate::sort::sort_by_key;

/// The plugin.
#[derive(Debug)]
pub struct HostLocal;

/// The keys of a network, decoded on demand: DEL and GC release addresses also with invalid ranges.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conf {
    ipam: Option<Json>,
    runtime_config: Option<Json>,
    args: Option<Json>,
}

/// `ipam`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Ipam {
    /// Routes, copied to the result.
    routes: Vec<Route>,
    /// A file in the format of resolv.conf(5), returned as `dns`. Default: none.
    resolv_conf: String,
    /// Range sets: each supplies one address.
    ranges: Vec<Vec<RangeConf>>,
}

/// The key of `ipam` that DEL needs, decoded also if the others are invalid.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Location {
    /// The folder of the networks' folders. Default: `/var/lib/cni/networks`.
    data_dir: Option<PathBuf>,
}

/// The keys of `ipam` for the lease store.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct StoreConf {
    /// Seconds for which a released address is withheld. Default: 0.
    reuse_delay: Option<u32>,
    /// Seconds to wait for the lock of the network's leases. Default: 10.
    lock_timeout: Option<u32>,
}

/// `runtimeConfig`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RuntimeConfig {
    /// Range sets before the configured ones (capability `ipRanges`).
    ip_ranges: Vec<Vec<RangeConf>>,
    /// Requested addresses (capability `ips`).
    #[serde(deserialize_with = "ip::deserialize_requested")]
    ips: Vec<IpAddr>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Args {
    cni: CniArgs,
}

/// `args.cni`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct CniArgs {
    /// Requested addresses.
    #[serde(deserialize_with = "ip::deserialize_requested")]
    ips: Vec<IpAddr>,
}

impl Plugin for HostLocal {
    const NAME: &'static str = "host-local";
    const ABOUT: &'static str = "addresses from ranges, leases as files on the node";
    type Conf = Conf;

    fn keys() -> Keys {
        let ipam = Keys::of::<Ipam>().and(Keys::of::<RangeConf>());
        let ipam = ipam.and(Keys::of::<Location>()).and(Keys::of::<StoreConf>());
        let runtime = Keys::of::<RuntimeConfig>();
        Keys::of::<Conf>().with("ipam", ipam).with("runtimeConfig", runtime)
    }

    fn examine(cx: &Cx<'_>, conf: &Conf, remarks: &mut Remarks) -> Result<()> {
        let Plan { ipam, sets, warnings, .. } = Plan::before_add(cx, conf)?;
        remarks.warnings.extend(warnings);
        remarks.warnings.extend(conf.beside_ranges()?);
        let first = |set: &RangeSet| set.ranges().first().map(|range| range.subnet);
        let of = |address| IpConfig { address, gateway: None, interface: None };
        let ips: Vec<IpConfig> = sets.iter().filter_map(first).map(of).collect();
        remarks.warnings.extend(addressing::routes(&ips, &ipam.routes));
        for range in sets.iter().flat_map(RangeSet::ranges) {
            let Range { subnet, gateway, .. } = range;
            remarks.subnets.push(*subnet);
            if !subnet.contains(gateway) {
                let msg = format!("the gateway {gateway} is not in the subnet {subnet}");
                let remedy = "containers cannot reach it: choose an address of the subnet";
                remarks.warnings.push(Error::config(msg).with_details(remedy));
            }
        }
        Ok(())
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let plan = Plan::resolve(cx, conf)?;
        plan.warnings.iter().for_each(log::warn);
        for Range { subnet, gateway, .. } in plan.sets.iter().flat_map(RangeSet::ranges) {
            if gateway.is_ipv4() != subnet.addr().is_ipv4() {
                log::warn(format_args!("gateway {gateway} is of another family than {subnet}"));
            }
        }
        let dns = if plan.ipam.resolv_conf.is_empty() {
            Dns::default()
        } else {
            resolv::read(Path::new(&plan.ipam.resolv_conf))?
        };
        let mut store =
            LeaseStore::open(&conf.data_dir(cx)?, cx.net.name.as_str(), conf.options(cx)?)?;
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let ips = allocate::allocate_all(&mut store, &plan.sets, &plan.requested, owner, cx.end())?;
        if cx.end().is_none() {
            // Before the lock is released: the record would tell the wrong end of the new lease.
            reclaim::former(owner);
        }
        Ok(CniResult { ips, routes: plan.ipam.routes, dns, ..CniResult::new() })
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        Plan::resolve(cx, conf)?;
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let store = conf.store(cx)?;
        let addresses = store.map_or(Ok(Vec::new()), |mut store| store.owned_by(owner))?;
        if addresses.is_empty() {
            let msg = format!("host-local: Failed to find address added by container {}", req.id);
            return Err(Error::internal(msg)
                .with_details("its lease has been deleted: restart the container to get another"));
        }
        Ok(())
    }

    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let mut failures = Failures::new();
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        failures.keep(
            conf.store(cx)
                .and_then(|store| store.map_or(Ok(Vec::new()), |mut store| store.release(owner))),
        );
        failures.keep(reclaim::leases_of(owner, &[&conf.data_dir(cx)?]));
        failures.into_result()
    }

    fn gc(cx: &Cx<'_>, conf: &Conf, req: &GcReq) -> Result<()> {
        let Some(mut store) = conf.store(cx)? else { return Ok(()) };
        let is_listed = |lease: &Lease| match &lease.ifname {
            Some(ifname) => req.is_valid(&lease.id, ifname),
            // A lease of releases up to 0.7.5 of the reference, or a reservation by an administrator.
            None => true,
        };
        let (mut released, stay) = store.retain(is_listed, true)?;
        // The order of a directory is random.
        sort_by_key(&mut released, |lease| lease.ip);
        for lease in released {
            log::warn(format_args!("released {lease}"));
        }
        let mut failures = Failures::new();
        for lease in stay {
            let error = Error::new(Code::TRY_AGAIN, format!("{lease} stays"));
            let why = "the link of its attachment still exists on this host: DEL deletes it";
            failures.keep(Err::<(), _>(error.with_details(why)));
        }
        failures.into_result()
    }

    fn gc_unlisted(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let Some(mut store) = conf.store(cx)? else { return Ok(()) };
        let mut failures = Failures::new();
        reclaim::in_store(&mut store, None, &mut failures)?;
        failures.into_result()
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let plan = Plan::before_add(cx, conf)?;
        let listing =
            Listing::open_writable(&conf.data_dir(cx)?, cx.net.name.as_str(), conf.options(cx)?)
                .or_unavailable()?;
        match plan.sets.iter().find(|set| allocate::is_exhausted(&listing, set)) {
            None => Ok(()),
            Some(set) => {
                let msg = format!("no IP addresses available in range set: {set}");
                Err(Error::new(Code::NOT_AVAILABLE, msg)
                    .with_details("detach containers, run GC, or widen the range"))
            }
        }
    }
}

impl Conf {
    /// The warning of keys of a range that stand beside `ranges`, without `subnet`.
    fn beside_ranges(&self) -> Result<Option<Error>> {
        let RangeConf { subnet, range_start, range_end, gateway } = self.ipam()?;
        let keys = [("rangeStart", range_start), ("rangeEnd", range_end), ("gateway", gateway)];
        let given = keys.iter().find(|(_, value)| subnet.is_none() && value.is_some());
        Ok(given.map(|(key, _)| {
            Error::config(format!("\"{key}\" beside \"ranges\" is not read"))
                .with_details(format!("in \"{key}\": move it into an object of \"ranges\""))
        }))
    }

    /// Decodes keys of `ipam`.
    fn ipam<T: DeserializeOwned>(&self) -> Result<T> {
        let missing = || Error::config("IPAM config missing 'ipam' key");
        self.ipam.as_ref().ok_or_else(missing)?.decode()
    }

    fn runtime(&self) -> Result<RuntimeConfig> {
        Json::decode_or_default(self.runtime_config.as_ref())
    }

    fn data_dir(&self, cx: &Cx<'_>) -> Result<PathBuf> {
        let location: Location = cx.decode(self.ipam.as_ref())?;
        let given = location.data_dir.filter(|dir| !dir.as_os_str().is_empty());
        Ok(given.unwrap_or_else(|| DATA_DIR.into()))
    }

    fn options(&self, cx: &Cx<'_>) -> Result<LeaseOptions> {
        let StoreConf { reuse_delay, lock_timeout } = cx.decode(self.ipam.as_ref())?;
        let seconds = |number: u32| Duration::from_secs(number.into());
        let default = LeaseOptions::default();
        Ok(LeaseOptions {
            lock_timeout: lock_timeout.map_or(default.lock_timeout, seconds),
            reuse_delay: reuse_delay.map_or(default.reuse_delay, seconds),
        })
    }

    /// The lease store of the network, if it exists.
    fn store(&self, cx: &Cx<'_>) -> Result<Option<LeaseStore>> {
        LeaseStore::open_existing(&self.data_dir(cx)?, cx.net.name.as_str(), self.options(cx)?)
    }
}

/// The ranges and requested addresses of a call.
struct Plan {
    ipam: Ipam,
    sets: Vec<RangeSet>,
    requested: Vec<IpAddr>,
    /// Addresses of the ranges that no host can have.
    warnings: Vec<Error>,
}

impl Plan {
    fn resolve(cx: &Cx<'_>, conf: &Conf) -> Result<Plan> {
        Plan::of(cx, conf, false)
    }

    /// The plan before the runtime has supplied ranges.
    fn before_add(cx: &Cx<'_>, conf: &Conf) -> Result<Plan> {
        Plan::of(cx, conf, cx.net.wants("ipRanges"))
    }

    fn of(cx: &Cx<'_>, conf: &Conf, is_supplied: bool) -> Result<Plan> {
        let ipam: Ipam = conf.ipam()?;
        let dir = conf.data_dir(cx)?;
        if dir.is_relative() {
            let msg = format!("dataDir \"{}\" is not an absolute path", dir.display());
            let why = "it would be another folder for each working directory of the runtime";
            return Err(Error::config(msg).with_details(why));
        }
        let runtime = conf.runtime()?;
        let args: Args = Json::decode_or_default(conf.args.as_ref())?;
        let from_env = cx.args(&["IP"])?.get("IP", ip::parse_ip_or_cidr)?;
        let requested = from_env.into_iter().chain(args.cni.ips).chain(runtime.ips).collect();
        let confs = range_confs(conf, &ipam, runtime.ip_ranges)?;
        let warnings = confs.iter().flatten().flat_map(RangeConf::warnings).collect();
        let sets = if is_supplied && confs.is_empty() {
            Vec::new()
        } else {
            RangeSet::resolve_all(&confs)?
        };
        cx.require_one_per_family(sets.iter().map(RangeSet::is_ipv4))?;
        range::check_overlaps(&sets)?;
        Ok(Plan { ipam, sets, requested, warnings })
    }
}

/// The range sets of the runtime, the single range without `ranges`, then `ranges`.
fn range_confs(
    conf: &Conf,
    ipam: &Ipam,
    mut confs: Vec<Vec<RangeConf>>,
) -> Result<Vec<Vec<RangeConf>>> {
    let single: RangeConf = conf.ipam()?;
    confs.extend(single.subnet.is_some().then(|| vec![single]));
    confs.extend(ipam.ranges.iter().cloned());
    Ok(confs)
}
