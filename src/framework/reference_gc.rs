//! GC of attachments that the reference made with bridge or ptp.
//!
//! The pairs of this program have a label: GC deletes those of attachments that are not valid, and
//! then releases their addresses. A pair of the reference has no label, so its attachment is
//! unknown. While there is a pair that may be the attachment's, the container may be alive: GC
//! treats the attachment as valid and logs that. DEL ends this state.

use std::net::IpAddr;
use std::path::Path;

use super::context::CallContext;
use super::plugin::GcRequest;
use crate::attachment::Liveness;
use crate::leases::{DATA_DIR, LeaseListing, LeaseStatus};
use crate::netlink::{KernelRoute, Link, RT_TABLE_MAIN, RouteFilter};
use cni::ValidAttachment;
use cni::error::{ErrorContext, Result};
use cni::json::{self, Json};
use cni::plugin::CniVerb;

const VALID: &str = "cni.dev/valid-attachments";

/// The leases of the configuration's network; `None` if host-local does not manage its addresses.
pub fn read_network_leases(conf: &Json, network: &str) -> Result<Option<Vec<LeaseStatus>>> {
    let key = |key: &str| conf.get_present_member("ipam")?.get_present_member(key)?.as_str();
    if key("type") != Some("host-local") {
        return Ok(None);
    }
    let dir = key("dataDir").filter(|dir| !dir.is_empty()).unwrap_or(DATA_DIR);
    let listing = LeaseListing::open_existing(Path::new(dir), network)?;
    Ok(Some(listing.map(|listing| listing.lease_statuses()).unwrap_or_default()))
}

/// The host's ends of pairs without a label that may be those of this plugin's attachments.
struct UnlabelledEnds {
    links: Vec<Link>,
    /// The routes of ptp to single addresses; `None` with bridge.
    host_routes: Option<Vec<KernelRoute>>,
}

impl<'a> CallContext<'a> {
    /// The request of a GC for the attachments that the runtime calls valid, for those that
    /// [live](super::living), and for those in doubt.
    pub(super) fn gc_request(
        &self,
        plugin: &str,
        mut valid: Vec<ValidAttachment>,
    ) -> Result<GcRequest> {
        let listed = valid.len();
        valid.extend(self.find_living(&valid)?);
        valid.extend(self.find_in_doubt(plugin, &valid)?);
        self.unlisted.get_or_init(|| valid[listed..].to_vec());
        Ok(GcRequest { valid })
    }

    fn find_in_doubt(
        &self,
        plugin: &str,
        valid: &[ValidAttachment],
    ) -> Result<Vec<ValidAttachment>> {
        if !["bridge", "ptp"].contains(&plugin) {
            return Ok(Vec::new());
        }
        // Leases that cannot be read are not released either: host-local's GC fails.
        let leases = read_network_leases(&self.net.json, self.net.name.as_str());
        let leases = leases.inspect_err(|e| debug!("{e}")).ok().flatten();
        let mut leases = leases.unwrap_or_default();
        leases.retain(|status| matches!(status.liveness, Liveness::Unknown(_)));
        let mut in_doubt = Vec::new();
        let mut ends = None;
        for LeaseStatus { lease, .. } in leases {
            let Some(ifname) = lease.ifname.clone() else { continue };
            let attachment = ValidAttachment { container_id: lease.id.clone(), ifname };
            if valid.contains(&attachment) {
                continue;
            }
            let ends = match &mut ends {
                Some(ends) => ends,
                none => none.insert(self.find_unlabelled_ends(plugin)?),
            };
            if let Some(end) = ends.end_for_address(lease.ip) {
                warn!(
                    "GC keeps {lease}: it was made without a label, and \"{}\" may be its \
                     container's link; DEL releases it",
                    end.name
                );
                in_doubt.push(attachment);
            }
        }
        Ok(in_doubt)
    }

    fn find_unlabelled_ends(&self, plugin: &str) -> Result<UnlabelledEnds> {
        let (host, is_bridged) = (self.host_netlink()?, plugin == "bridge");
        let name = self.net.json.get_present_member("bridge").and_then(Json::as_str);
        let bridge = if is_bridged { host.find_link(name.unwrap_or("cni0"))? } else { None };
        let master = bridge.map(|bridge| bridge.index);
        let mut links = host.dump_links()?;
        links.retain(|link| {
            let is_end = link.kind.as_deref() == Some("veth") && link.link_netnsid.is_some();
            is_end && link.alias.is_empty() && link.master == master
        });
        if is_bridged && master.is_none() {
            links.clear();
        }
        let mut host_routes = None;
        if !is_bridged {
            let filter = RouteFilter { table: Some(RT_TABLE_MAIN), ..RouteFilter::default() };
            let mut routes = host.dump_routes(&filter)?;
            routes.retain(|route| route.dst.prefix_len() == route.dst.max_prefix_len());
            host_routes = Some(routes);
        }
        Ok(UnlabelledEnds { links, host_routes })
    }

    /// GC of the IPAM plugin, which gets as valid also the attachments that live and those in
    /// doubt.
    pub fn ipam_gc(&'a self) -> Result<()> {
        if !self.has_ipam() {
            return Ok(());
        }
        let ipam = self.ipam_plugin()?;
        let unlisted = self.unlisted.get().map(Vec::as_slice).unwrap_or_default();
        if unlisted.is_empty() {
            return ipam.run_verb(CniVerb::Gc).map(drop);
        }
        let mut conf = self.net.json.clone();
        let valid = self.net.valid_attachments()?.unwrap_or_default();
        let text = |text: &str| Json::String(text.to_owned());
        conf.set_member(
            VALID,
            Json::Array(
                valid
                    .iter()
                    .chain(unlisted)
                    .map(|a| {
                        let members = [("containerID", &a.container_id), ("ifname", &a.ifname)];
                        Json::Object(
                            members.map(|(key, value)| (key.to_owned(), text(value))).into(),
                        )
                    })
                    .collect(),
            ),
        );
        let conf = json::encode_compact(&conf).context(|| "GC of the IPAM plugin")?;
        ipam.with_config(conf.as_bytes()).run_verb(CniVerb::Gc).map(drop)
    }
}

impl UnlabelledEnds {
    /// An end through which the address may be reached: with bridge any port, with ptp the device
    /// of the route to this address alone. The uplink of a node may be an end of a pair, too.
    fn end_for_address(&self, ip: IpAddr) -> Option<&Link> {
        let Some(routes) = &self.host_routes else { return self.links.first() };
        let oif = routes.iter().find(|route| route.dst.addr() == ip)?.oif;
        self.links.iter().find(|link| Some(link.index) == oif)
    }
}
