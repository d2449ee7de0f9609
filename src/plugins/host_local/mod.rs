//! host-local: addresses from configured ranges, one file per lease on the local disk.
//!
//! Each range set of `ipam.ranges` supplies one address; a set may have several ranges. Leases
//! are files in `<dataDir>/<network>` named by the address, in the reference plugin's format, so
//! that either implementation continues the other's work.
//!
//! On the host it leaves, while the container lives, one lease file per address; for good, the
//! directory with its lock, the address last given out of each set, and `.cnibox` with what makes
//! it fast and what tells of each lease whether its container can still be alive. When no address
//! is free, and on GC, leases of an earlier boot or of a namespace that is gone are reclaimed.
//!
//! Keys of its own, all in `ipam`: `type`, `dataDir`, `resolvConf`, `routes`, `ranges`, `subnet`,
//! `rangeStart`, `rangeEnd`, `gateway`, and beside the reference's `reuseDelay`, `lockTimeout`.

pub mod allocate;
pub mod range;
pub mod resolv;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use self::range::{Range, RangeConf, RangeSet};
use self::resolv::ResolvConf;
use crate::cni::json::Json;
use crate::cni::json::keys::Keys;
use crate::cni::{CniResult, Dns, IpConfig, Route, ip};
use crate::error::{Code, Context, Error, Result};
use crate::leases::{DATA_DIR, LeaseOptions, LeaseStore, Listing, Owner};
use crate::log;
use crate::skel::{AddReq, CheckReq, Cx, DelReq, Failures, GcReq, Plugin, Remarks};
use crate::sort::sort_by_key;

/// The plugin.
#[derive(Debug)]
pub struct HostLocal;

/// The keys of a network, read when they are needed: DEL and GC release addresses also when the
/// ranges make no sense any more.
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
    /// Routes, passed on as they are.
    routes: Vec<Route>,
    /// File in the format of resolv.conf(5), passed on as `dns`. Default: none.
    resolv_conf: String,
    /// Range sets: each supplies one address.
    ranges: Vec<Vec<RangeConf>>,
    /// The network of a single range, written without `ranges`.
    #[serde(deserialize_with = "ip::optional_cidr")]
    subnet: Option<ipnet::IpNet>,
    /// Its first address.
    #[serde(deserialize_with = "ip::optional_ip")]
    range_start: Option<IpAddr>,
    /// Its last address.
    #[serde(deserialize_with = "ip::optional_ip")]
    range_end: Option<IpAddr>,
    /// Its gateway.
    #[serde(deserialize_with = "ip::optional_ip")]
    gateway: Option<IpAddr>,
}

/// `ipam.dataDir`, which DEL needs whatever the rest is like.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Location {
    /// Folder of the networks' folders. Default: `/var/lib/cni/networks`.
    data_dir: Option<PathBuf>,
}

/// How to deal with the leases.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Handling {
    /// Seconds that a freed address is kept from the next owner. Default: 0.
    reuse_delay: Option<u32>,
    /// Seconds to wait for the lock of the network's leases. Default: 10.
    lock_timeout: Option<u32>,
}

/// `runtimeConfig`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RuntimeConfig {
    /// Range sets in front of the configured ones (capability `ipRanges`).
    ip_ranges: Vec<Vec<RangeConf>>,
    /// Wanted addresses (capability `ips`).
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
    /// Wanted addresses.
    #[serde(deserialize_with = "ip::deserialize_requested")]
    ips: Vec<IpAddr>,
}

impl Plugin for HostLocal {
    const NAME: &'static str = "host-local";
    const ABOUT: &'static str = "addresses from ranges, leases as files on the node";
    type Conf = Conf;

    fn keys() -> Keys {
        let ipam = Keys::of::<Ipam>().and(Keys::of::<Location>()).and(Keys::of::<Handling>());
        let runtime = Keys::of::<RuntimeConfig>();
        Keys::of::<Conf>().with("ipam", ipam).with("runtimeConfig", runtime)
    }

    fn examine(cx: &Cx<'_>, conf: &Conf, remarks: &mut Remarks) -> Result<()> {
        for range in Plan::resolve(cx, conf)?.sets.iter().flat_map(RangeSet::ranges) {
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
        warn_of_foreign_gateways(&plan.sets);
        let dns = read_dns(&plan.resolv_conf)?;
        let mut store = LeaseStore::open(&conf.data_dir()?, cx.net.name.as_str(), conf.options()?)?;
        let owner = Owner::new(req.id.as_str(), req.ifname.as_str());
        let owner = owner.with_netns(req.sandbox.identity());
        let allocated = allocate::allocate_all(&mut store, &plan.sets, &plan.requested, &owner)?;
        let ips = allocated.iter().map(|a| IpConfig {
            address: a.net,
            gateway: Some(a.gateway),
            interface: None,
        });
        Ok(CniResult { ips: ips.collect(), routes: plan.routes, dns, ..CniResult::new() })
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        Plan::resolve(cx, conf)?;
        let owner = Owner::new(req.id.as_str(), req.ifname.as_str());
        let store = conf.store(cx, conf.options()?)?;
        let addresses = store.map_or(Ok(Vec::new()), |mut store| store.owned_by(&owner))?;
        if addresses.is_empty() {
            let msg = format!("host-local: Failed to find address added by container {}", req.id);
            return Err(Error::internal(msg).with_details(
                "its lease is gone: restart the container, so that it gets another",
            ));
        }
        Ok(())
    }

    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let mut failures = Failures::new();
        let owner = Owner::new(req.id.as_str(), req.ifname.as_str());
        let options = failures.keep(conf.options()).unwrap_or_default();
        failures.keep(
            conf.store(cx, options)
                .and_then(|store| store.map_or(Ok(Vec::new()), |mut store| store.release(&owner))),
        );
        // A configuration that cannot work is reported also here, after the release; what one
        // ADD asked for has no part in that.
        failures.keep(conf.ipam().and_then(|ipam| {
            let runtime = conf.runtime()?;
            range_sets(cx, &ipam, runtime.ip_ranges)
        }));
        failures.into_result()
    }

    fn gc(cx: &Cx<'_>, conf: &Conf, req: &GcReq) -> Result<()> {
        let Some(mut store) = conf.store(cx, conf.options()?)? else { return Ok(()) };
        let (mut released, stay) = store.evict(|lease| match &lease.ifname {
            Some(ifname) => req.is_valid(&lease.id, ifname),
            // A word alone: a lease of releases up to 0.7.5 of the reference, or a note by hand
            // that the address is taken.
            None => true,
        })?;
        // A folder has no order of its own.
        sort_by_key(&mut released, |lease| lease.ip);
        for lease in released {
            log::warn(format_args!("released {lease}"));
        }
        let mut failures = Failures::new();
        // What is proved dead is so also where the runtime has not noticed yet; and what had to stay may
        // have come to its end meanwhile.
        let reclaimed = allocate::reclaim_dead(&mut store, None, &mut failures);
        let reclaimed = failures.keep(reclaimed).unwrap_or_default();
        for lease in stay {
            if reclaimed.iter().any(|gone| gone.lease == lease) {
                continue;
            }
            let error = Error::new(Code::TRY_AGAIN, format!("{lease} stays"));
            let why = "its address is on an interface of a running container, and cannot be removed there";
            failures.keep(Err::<(), _>(error.with_details(why)));
        }
        failures.into_result()
    }

    fn gc_unlisted(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let store = conf.store(cx, conf.options()?)?;
        store.map_or(Ok(()), |mut store| reclaim_dead(&mut store))
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let plan = Plan::resolve(cx, conf)?;
        let listing =
            Listing::open_writable(&conf.data_dir()?, cx.net.name.as_str(), conf.options()?)
                .or_unavailable()?;
        match plan.sets.iter().find(|set| allocate::exhausted(&listing, set)) {
            None => Ok(()),
            Some(set) => {
                let msg = format!("no IP addresses available in range set: {set}");
                Err(Error::new(Code::NOT_AVAILABLE, msg)
                    .with_details("detach containers, run GC, or widen the range"))
            }
        }
    }
}

/// Removes the leases of dead containers; a lease that has to stay is an error.
fn reclaim_dead(store: &mut LeaseStore) -> Result<()> {
    let mut failures = Failures::new();
    allocate::reclaim_dead(store, None, &mut failures)?;
    failures.into_result()
}

impl Conf {
    fn ipam(&self) -> Result<Ipam> {
        let missing = || Error::config("IPAM config missing 'ipam' key");
        self.ipam.as_ref().ok_or_else(missing)?.decode()
    }

    fn runtime(&self) -> Result<RuntimeConfig> {
        Json::decode_or_default(self.runtime_config.as_ref())
    }

    fn data_dir(&self) -> Result<PathBuf> {
        let location: Location = Json::decode_or_default(self.ipam.as_ref())?;
        let given = location.data_dir.filter(|dir| !dir.as_os_str().is_empty());
        Ok(given.unwrap_or_else(|| DATA_DIR.into()))
    }

    fn options(&self) -> Result<LeaseOptions> {
        let Handling { reuse_delay, lock_timeout } = Json::decode_or_default(self.ipam.as_ref())?;
        let seconds = |number: u32| Duration::from_secs(number.into());
        let default = LeaseOptions::default();
        Ok(LeaseOptions {
            lock_timeout: lock_timeout.map_or(default.lock_timeout, seconds),
            reuse_delay: reuse_delay.map_or(default.reuse_delay, seconds),
        })
    }

    /// The network's leases, if it ever had any.
    fn store(&self, cx: &Cx<'_>, options: LeaseOptions) -> Result<Option<LeaseStore>> {
        LeaseStore::open_existing(&self.data_dir()?, cx.net.name.as_str(), options)
    }
}

/// What the configuration and the runtime ask for.
#[derive(Debug)]
struct Plan {
    sets: Vec<RangeSet>,
    requested: Vec<IpAddr>,
    routes: Vec<Route>,
    resolv_conf: String,
}

impl Plan {
    fn resolve(cx: &Cx<'_>, conf: &Conf) -> Result<Plan> {
        let ipam = conf.ipam()?;
        let runtime = conf.runtime()?;
        let args: Args = Json::decode_or_default(conf.args.as_ref())?;
        let from_env = cx.args(&["IP"])?.get("IP", ip::parse_ip_or_cidr)?;
        let requested = from_env.into_iter().chain(args.cni.ips).chain(runtime.ips).collect();

        let sets = range_sets(cx, &ipam, runtime.ip_ranges)?;
        Ok(Plan { sets, requested, routes: ipam.routes, resolv_conf: ipam.resolv_conf })
    }
}

/// The runtime's ranges, the single one written without `ranges`, then `ranges`.
fn range_sets(
    cx: &Cx<'_>,
    ipam: &Ipam,
    from_runtime: Vec<Vec<RangeConf>>,
) -> Result<Vec<RangeSet>> {
    let single = ipam.subnet.map(|subnet| {
        let Ipam { range_start, range_end, gateway, .. } = *ipam;
        vec![RangeConf { subnet: Some(subnet), range_start, range_end, gateway }]
    });
    let configured = single.into_iter().chain(ipam.ranges.iter().cloned());
    let confs: Vec<_> = from_runtime.into_iter().chain(configured).collect();
    let sets = RangeSet::resolve_all(&confs)?;
    cx.require_one_per_family(sets.iter().map(RangeSet::is_ipv4))?;
    range::check_overlaps(&sets)?;
    Ok(sets)
}

/// Such a gateway is never used by the containers of the range; the reference is silent.
fn warn_of_foreign_gateways(sets: &[RangeSet]) {
    for range in sets.iter().flat_map(RangeSet::ranges) {
        if range.gateway.is_ipv4() != range.subnet.addr().is_ipv4() {
            let (gateway, subnet) = (range.gateway, range.subnet);
            log::warn(format_args!("gateway {gateway} is of another family than {subnet}"));
        }
    }
}

fn read_dns(path: &str) -> Result<Dns> {
    if path.is_empty() {
        return Ok(Dns::default());
    }
    let ResolvConf { nameservers, domain, search, options } = ResolvConf::read(Path::new(path))?;
    Ok(Dns { nameservers, domain: domain.unwrap_or_default(), search, options })
}
