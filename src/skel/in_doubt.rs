//! GC of attachments that the reference made with bridge or ptp.
//!
//! The pairs of this program have a label: GC deletes those of attachments that are not valid, and then releases their
//! addresses. A pair of the reference has none, so nothing tells whose it is. While there is a pair that may be the
//! attachment's, its container may be alive: GC treats the attachment as valid, and says so. A DEL ends it.

use std::net::IpAddr;
use std::path::Path;

use super::context::Cx;
use super::plugin::GcReq;
use crate::attachment::Liveness;
use crate::cni::Attachment;
use crate::cni::json::{self, Json};
use crate::error::{Context, Result};
use crate::leases::{DATA_DIR, LeaseStatus, Listing};
use crate::log;
use crate::netlink::{Link, Netlink};

const VALID: &str = "cni.dev/valid-attachments";

/// The leases of the configuration's network; `None` if host-local does not manage its addresses.
pub fn leases_of(conf: &Json, network: &str) -> Result<Option<Vec<LeaseStatus>>> {
    let key = |key: &str| conf.get_present("ipam")?.get_present(key)?.as_str();
    if key("type") != Some("host-local") {
        return Ok(None);
    }
    let dir = key("dataDir").filter(|dir| !dir.is_empty()).unwrap_or(DATA_DIR);
    let listing = Listing::open_existing(Path::new(dir), network)?;
    Ok(Some(listing.map(|listing| listing.statuses()).unwrap_or_default()))
}

/// The host's ends of pairs without a label that may be those of this plugin's attachments.
struct Ends<'a> {
    host: &'a Netlink,
    links: Vec<Link>,
    is_bridged: bool,
}

impl<'a> Cx<'a> {
    /// The request of a GC for the attachments that the runtime calls valid, and for those in doubt.
    pub(super) fn gc_request(&self, plugin: &str, mut valid: Vec<Attachment>) -> Result<GcReq> {
        let in_doubt = self.find_in_doubt(plugin, &valid)?;
        valid.extend(self.in_doubt.get_or_init(|| in_doubt).iter().cloned());
        Ok(GcReq { valid })
    }

    fn find_in_doubt(&self, plugin: &str, valid: &[Attachment]) -> Result<Vec<Attachment>> {
        if !["bridge", "ptp"].contains(&plugin) {
            return Ok(Vec::new());
        }
        // Leases that cannot be read are not released either: host-local's GC fails.
        let leases = leases_of(&self.net.json, self.net.name.as_str());
        let leases = leases.inspect_err(|e| log::debug(e)).ok().flatten();
        let mut leases = leases.unwrap_or_default();
        leases.retain(|status| matches!(status.liveness, Liveness::Unknown(_)));
        let mut in_doubt = Vec::new();
        let mut ends = None;
        for LeaseStatus { lease, .. } in leases {
            let Some(ifname) = lease.ifname.clone() else { continue };
            let attachment = Attachment { container_id: lease.id.clone(), ifname };
            if valid.contains(&attachment) {
                continue;
            }
            let ends = match &mut ends {
                Some(ends) => ends,
                none => none.insert(self.unlabelled_ends(plugin)?),
            };
            if let Some(end) = ends.of(lease.ip)? {
                log::warn(format_args!(
                    "GC keeps {lease}: it was made without a label, and \"{}\" may be its container's link; DEL releases it",
                    end.name
                ));
                in_doubt.push(attachment);
            }
        }
        Ok(in_doubt)
    }

    fn unlabelled_ends(&self, plugin: &str) -> Result<Ends<'_>> {
        let (host, is_bridged) = (self.host()?, plugin == "bridge");
        let name = self.net.json.get_present("bridge").and_then(Json::as_str);
        let bridge = if is_bridged { host.link(name.unwrap_or("cni0"))? } else { None };
        let master = bridge.map(|bridge| bridge.index);
        let mut links = host.dump_links()?;
        links.retain(|link| {
            let is_end = link.kind.as_deref() == Some("veth") && link.link_netnsid.is_some();
            is_end && link.alias.is_empty() && link.master == master
        });
        if is_bridged && master.is_none() {
            links.clear();
        }
        Ok(Ends { host, links, is_bridged })
    }

    /// GC of the IPAM plugin, which gets the attachments in doubt as valid ones.
    pub fn ipam_gc(&'a self) -> Result<()> {
        if !self.has_ipam() {
            return Ok(());
        }
        let ipam = self.ipam()?;
        let in_doubt = self.in_doubt.get().map(Vec::as_slice).unwrap_or_default();
        if in_doubt.is_empty() {
            return ipam.run(super::Verb::Gc).map(drop);
        }
        let mut conf = self.net.json.clone();
        let valid = self.net.valid_attachments()?.unwrap_or_default();
        let text = |text: &str| Json::String(text.to_owned());
        let object = |a: &Attachment| {
            let members = [("containerID", &a.container_id), ("ifname", &a.ifname)];
            Json::Object(members.map(|(key, value)| (key.to_owned(), text(value))).into())
        };
        conf.set(VALID, Json::Array(valid.iter().chain(in_doubt).map(object).collect()));
        let conf = json::compact(&conf).context(|| "GC of the IPAM plugin")?;
        ipam.with_conf(conf.as_bytes()).run(super::Verb::Gc).map(drop)
    }
}

impl Ends<'_> {
    /// An end through which the address may be reached: of a bridge any port, of ptp the one of the address's route.
    fn of(&self, ip: IpAddr) -> Result<Option<&Link>> {
        if self.is_bridged {
            return Ok(self.links.first());
        }
        if self.links.is_empty() {
            return Ok(None);
        }
        let oif = self.host.route_to(ip, None)?.and_then(|route| route.oif);
        Ok(self.links.iter().find(|link| Some(link.index) == oif))
    }
}
