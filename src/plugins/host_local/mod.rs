//! host-local: addresses from configured ranges, one file per lease on the local disk.
//!
//! Each range set of `ipam.ranges` supplies one address; a set may have several ranges. Leases
//! are files in `<dataDir>/<network>` named by the address, in the reference plugin's format, so
//! that the two implementations can replace each other.
//!
//! State on the host while the container lives: one lease file per address. Permanently: the
//! directory with its lock, the last reserved address of each set, and `.cnibox` with a journal of
//! the leases and the host's ends of their veth pairs. When no address is free, leases of an
//! earlier boot, or whose end on the host is gone, are reclaimed.
//!
//! Keys, all in `ipam`: `type`, `dataDir`, `resolvConf`, `routes`, `ranges`, `subnet`,
//! `rangeStart`, `rangeEnd`, `gateway`, and in addition to the reference's, `reuseDelay` and
//! `lockTimeout`.

pub mod allocate;
pub mod range;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use self::range::{AddressRange, RangeConfig, RangeSet};
use crate::attachment::AttachmentId;
use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, Failures, GcRequest, Plugin,
    addressing, reclaim, resolv,
};
use crate::leases::{DATA_DIR, LeaseListing, LeaseOptions, LeaseStore};
use cni::config::Args;
use cni::error::{Error, ErrorCode, ErrorContext, Result};
use cni::json::Json;
use cni::json::keys::DecodedKeys;
use cni::sort::sort_by_key;
use cni::{CniResult, DnsConfig, IpConfig, ResultRoute, ip};

#[derive(Debug)]
pub struct HostLocal;

/// The keys of a network, decoded on demand: DEL and GC release addresses also with invalid ranges.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HostLocalConfig {
    ipam: Option<Json>,
    runtime_config: Option<Json>,
    args: Option<Json>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct HostLocalIpamConfig {
    /// Routes, copied to the result.
    routes: Vec<ResultRoute>,
    /// A file in the format of resolv.conf(5), returned as `dns`. Default: none.
    resolv_conf: String,
    /// Range sets: each supplies one address.
    ranges: Vec<Vec<RangeConfig>>,
}

/// The key of `ipam` that DEL needs, decoded also if the others are invalid.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct DataDirConfig {
    /// The directory of the networks' directories. Default: `/var/lib/cni/networks`.
    data_dir: Option<PathBuf>,
}

/// The keys of `ipam` for the lease store.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct LeaseStoreConfig {
    /// Seconds for which a released address is withheld. Default: 0.
    reuse_delay: Option<u32>,
    /// Seconds to wait for the lock of the network's leases. Default: 10.
    lock_timeout: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct HostLocalRuntimeConfig {
    /// Range sets before the configured ones (capability `ipRanges`).
    ip_ranges: Vec<Vec<RangeConfig>>,
    /// Requested addresses (capability `ips`).
    #[serde(deserialize_with = "ip::deserialize_requested")]
    ips: Vec<IpAddr>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct HostLocalArgs {
    #[serde(deserialize_with = "ip::deserialize_requested")]
    ips: Vec<IpAddr>,
}

impl Plugin for HostLocal {
    const NAME: &'static str = "host-local";
    const ABOUT: &'static str = "addresses from ranges, leases as files on the node";
    type Conf = HostLocalConfig;

    fn keys() -> DecodedKeys {
        let ipam = DecodedKeys::of_type::<HostLocalIpamConfig>()
            .union_with(DecodedKeys::of_type::<RangeConfig>());
        let ipam = ipam
            .union_with(DecodedKeys::of_type::<DataDirConfig>())
            .union_with(DecodedKeys::of_type::<LeaseStoreConfig>());
        let runtime = DecodedKeys::of_type::<HostLocalRuntimeConfig>();
        DecodedKeys::of_type::<HostLocalConfig>()
            .with_member("ipam", ipam)
            .with_member("runtimeConfig", runtime)
    }

    fn examine(
        cx: &CallContext<'_>,
        conf: &HostLocalConfig,
        remarks: &mut ConfigRemarks,
    ) -> Result<()> {
        let HostLocalPlan { ipam, sets, warnings, .. } = HostLocalPlan::before_add(cx, conf)?;
        remarks.warnings.extend(warnings);
        remarks.warnings.extend(conf.stray_key_warning()?);
        let of = |address| IpConfig { address, gateway: None, interface: None };
        let ips: Vec<IpConfig> = sets
            .iter()
            .filter_map(|set| set.ranges().first().map(|range| range.subnet))
            .map(of)
            .collect();
        remarks.warnings.extend(addressing::route_warnings(&ips, &ipam.routes));
        for range in sets.iter().flat_map(RangeSet::ranges) {
            let AddressRange { subnet, gateway, .. } = range;
            remarks.subnets.push(*subnet);
            if !subnet.contains(gateway) {
                let msg = format!("the gateway {gateway} is not in the subnet {subnet}");
                let remedy = "containers cannot reach it: choose an address of the subnet";
                remarks.warnings.push(Error::config(msg).with_details(remedy));
            }
        }
        Ok(())
    }

    fn add(cx: &CallContext<'_>, conf: &HostLocalConfig, req: &AddRequest) -> Result<CniResult> {
        let plan = HostLocalPlan::from_config(cx, conf)?;
        plan.warnings.iter().for_each(|warning| warn!("{warning}"));
        for AddressRange { subnet, gateway, .. } in plan.sets.iter().flat_map(RangeSet::ranges) {
            if gateway.is_ipv4() != subnet.addr().is_ipv4() {
                warn!("gateway {gateway} is of another family than {subnet}");
            }
        }
        let dns = if plan.ipam.resolv_conf.is_empty() {
            DnsConfig::default()
        } else {
            resolv::read_file(Path::new(&plan.ipam.resolv_conf))?
        };
        let mut store =
            LeaseStore::open(&conf.data_dir(cx)?, cx.net.name.as_str(), conf.lease_options(cx)?)?;
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let ips =
            allocate::allocate_all(&mut store, &plan.sets, &plan.requested, owner, cx.host_end())?;
        Ok(CniResult { ips, routes: plan.ipam.routes, dns, ..CniResult::new() })
    }

    fn check(cx: &CallContext<'_>, conf: &HostLocalConfig, req: &CheckRequest) -> Result<()> {
        HostLocalPlan::from_config(cx, conf)?;
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let store = conf.open_store(cx)?;
        let addresses = store.map_or(Ok(Vec::new()), |mut store| store.addresses_held_by(owner))?;
        if addresses.is_empty() {
            let msg = format!("host-local: Failed to find address added by container {}", req.id);
            return Err(Error::internal(msg)
                .with_details("its lease has been deleted: restart the container to get another"));
        }
        Ok(())
    }

    fn del(cx: &CallContext<'_>, conf: &HostLocalConfig, req: &DelRequest) -> Result<()> {
        if cx.is_collected() {
            return Ok(());
        }
        let mut failures = Failures::new();
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        failures.keep_error(conf.open_store(cx).and_then(|store| {
            store.map_or(Ok(Vec::new()), |mut store| store.release_attachment(owner))
        }));
        failures.keep_error(reclaim::release_recorded_leases(owner, &[&conf.data_dir(cx)?]));
        failures.into_result()
    }

    fn gc(cx: &CallContext<'_>, conf: &HostLocalConfig, req: &GcRequest) -> Result<()> {
        let Some(mut store) = conf.open_store(cx)? else { return Ok(()) };
        let (mut released, stay) = store.retain_leases(
            |lease| match &lease.ifname {
                Some(ifname) => req.is_valid_attachment(&lease.id, ifname),
                // A lease of releases up to 0.7.5 of the reference, or a reservation by an
                // administrator.
                None => true,
            },
            true,
        )?;
        // The order of a directory is random.
        sort_by_key(&mut released, |lease| lease.ip);
        for lease in released {
            warn!("released {lease}");
        }
        let mut failures = Failures::new();
        for lease in stay {
            let error = Error::new(ErrorCode::TRY_AGAIN, format!("{lease} stays"));
            let why = "the link of its attachment still exists on this host: DEL deletes it";
            failures.keep_error(Err::<(), _>(error.with_details(why)));
        }
        failures.into_result()
    }

    fn gc_unlisted(cx: &CallContext<'_>, conf: &HostLocalConfig) -> Result<()> {
        let Some(mut store) = conf.open_store(cx)? else { return Ok(()) };
        let mut failures = Failures::new();
        reclaim::remove_ended_leases(&mut store, None, &mut failures)?;
        failures.into_result()
    }

    fn status(cx: &CallContext<'_>, conf: &HostLocalConfig) -> Result<()> {
        let plan = HostLocalPlan::before_add(cx, conf)?;
        let listing = LeaseListing::open_writable(
            &conf.data_dir(cx)?,
            cx.net.name.as_str(),
            conf.lease_options(cx)?,
        )
        .or_unavailable()?;
        match plan.sets.iter().find(|set| allocate::is_exhausted(&listing, set)) {
            None => Ok(()),
            Some(set) => {
                let msg = format!("no IP addresses available in range set: {set}");
                Err(Error::new(ErrorCode::NOT_AVAILABLE, msg)
                    .with_details("detach containers, run GC, or widen the range"))
            }
        }
    }
}

impl HostLocalConfig {
    /// The warning of keys of a range that stand beside `ranges`, without `subnet`.
    fn stray_key_warning(&self) -> Result<Option<Error>> {
        let RangeConfig { subnet, range_start, range_end, gateway, .. } = self.decode_ipam()?;
        let keys = [("rangeStart", range_start), ("rangeEnd", range_end), ("gateway", gateway)];
        let given = keys.iter().find(|(_, value)| subnet.is_none() && value.is_some());
        Ok(given.map(|(key, _)| {
            Error::config(format!("\"{key}\" beside \"ranges\" is not read"))
                .with_details(format!("in \"{key}\": move it into an object of \"ranges\""))
        }))
    }

    fn decode_ipam<T: DeserializeOwned>(&self) -> Result<T> {
        self.ipam.as_ref().ok_or_else(|| Error::config("IPAM config missing 'ipam' key"))?.decode()
    }

    fn decode_runtime_config(&self) -> Result<HostLocalRuntimeConfig> {
        Json::decode_or_default(self.runtime_config.as_ref())
    }

    fn data_dir(&self, cx: &CallContext<'_>) -> Result<PathBuf> {
        let location: DataDirConfig = cx.decode_part(self.ipam.as_ref())?;
        let given = location.data_dir.filter(|dir| !dir.as_os_str().is_empty());
        Ok(given.unwrap_or_else(|| DATA_DIR.into()))
    }

    fn lease_options(&self, cx: &CallContext<'_>) -> Result<LeaseOptions> {
        let LeaseStoreConfig { reuse_delay, lock_timeout } = cx.decode_part(self.ipam.as_ref())?;
        let seconds = |number: u32| Duration::from_secs(number.into());
        let default = LeaseOptions::default();
        Ok(LeaseOptions {
            lock_timeout: lock_timeout.map_or(default.lock_timeout, seconds),
            reuse_delay: reuse_delay.map_or(default.reuse_delay, seconds),
        })
    }

    /// The lease store of the network, if it exists.
    fn open_store(&self, cx: &CallContext<'_>) -> Result<Option<LeaseStore>> {
        LeaseStore::open_existing(
            &self.data_dir(cx)?,
            cx.net.name.as_str(),
            self.lease_options(cx)?,
        )
    }
}

/// The ranges and requested addresses of a call.
struct HostLocalPlan {
    ipam: HostLocalIpamConfig,
    sets: Vec<RangeSet>,
    requested: Vec<IpAddr>,
    /// Addresses of the ranges that no host can have.
    warnings: Vec<Error>,
}

impl HostLocalPlan {
    fn from_config(cx: &CallContext<'_>, conf: &HostLocalConfig) -> Result<HostLocalPlan> {
        HostLocalPlan::build_plan(cx, conf, false)
    }

    /// The plan before the runtime has supplied ranges.
    fn before_add(cx: &CallContext<'_>, conf: &HostLocalConfig) -> Result<HostLocalPlan> {
        HostLocalPlan::build_plan(cx, conf, cx.net.wants_capability("ipRanges"))
    }

    fn build_plan(
        cx: &CallContext<'_>,
        conf: &HostLocalConfig,
        is_supplied: bool,
    ) -> Result<HostLocalPlan> {
        let ipam: HostLocalIpamConfig = conf.decode_ipam()?;
        let dir = conf.data_dir(cx)?;
        if dir.is_relative() {
            let msg = format!("dataDir \"{}\" is not an absolute path", dir.display());
            let why = "it would be another directory for each working directory of the runtime";
            return Err(Error::config(msg).with_details(why));
        }
        let runtime = conf.decode_runtime_config()?;
        let args: Args<HostLocalArgs> = Json::decode_or_default(conf.args.as_ref())?;
        let from_env = cx.parse_args(&["IP"])?.parse_value("IP", ip::parse_ip_or_cidr)?;
        let requested = from_env.into_iter().chain(args.cni.ips).chain(runtime.ips).collect();
        let confs = collect_range_configs(conf, &ipam, runtime.ip_ranges)?;
        let warnings = confs.iter().flatten().flat_map(RangeConfig::address_warnings).collect();
        let sets = if is_supplied && confs.is_empty() {
            Vec::new()
        } else {
            RangeSet::all_from_configs(&confs)?
        };
        cx.require_one_per_family(sets.iter().map(RangeSet::is_ipv4))?;
        range::check_overlaps(&sets)?;
        Ok(HostLocalPlan { ipam, sets, requested, warnings })
    }
}

/// The range sets of the runtime, the single range without `ranges`, then `ranges`.
fn collect_range_configs(
    conf: &HostLocalConfig,
    ipam: &HostLocalIpamConfig,
    mut confs: Vec<Vec<RangeConfig>>,
) -> Result<Vec<Vec<RangeConfig>>> {
    let single: RangeConfig = conf.decode_ipam()?;
    confs.extend(single.subnet.is_some().then(|| vec![single]));
    confs.extend(ipam.ranges.iter().cloned());
    Ok(confs)
}
