//! The trait of a plugin, and its requests, whose fields are all checked.

use std::cell::OnceCell;
use std::path::Path;

use serde::de::DeserializeOwned;

use super::addressing::omit_default_routes;
use super::call::ConfigRemarks;
use super::context::CallContext;
use super::rollback::{Failures, Rollback};
use crate::iface::child::{self, CheckedLink, NewChildLink, RecordedLink};
use crate::iface::{ContainerNetns, verify, veth};
use crate::netfilter::AttachmentId;
use crate::netfilter::names::stale_matcher;
use crate::netlink::{Link, MacAddress, Netlink};
use crate::netns::{Netns, NetnsIdentity};
use crate::repairs::RepairFindings;
use cni::error::{Error, ErrorCode, ErrorContext, Result};
use cni::json::keys::DecodedKeys;
use cni::plugin::PREV_RESULT_REMEDY;
use cni::{CniResult, ContainerId, InterfaceName, SpecVersion, ValidAttachment};

/// A CNI plugin. Every plugin implements every verb of the specification.
pub trait Plugin {
    /// The plugin's name: the `type` of configurations, and the file name.
    const NAME: &'static str;
    /// One line of description, 60 characters at most.
    const ABOUT: &'static str;
    /// The supported versions of the specification.
    const VERSIONS: &'static [SpecVersion] = &SpecVersion::ALL;
    /// Whether a completed ADD is rolled back if the version of the request cannot represent the
    /// result, such as an interface without addresses before 0.3.0. Some reference plugins keep
    /// the interface.
    const UNDO_IF_UNREPRESENTABLE: bool = true;
    /// Whether ADD may create state on the host that outlives the container's namespace, such as
    /// rules: ADD then [records](CallContext::record_attachment) the attachment first.
    const OUTLIVES_ITS_CONTAINER: bool = false;
    /// Whether ADD connects the container to anything. Only such a plugin restores protections of
    /// the host that a flush has removed: a plugin that does not connect is followed by one
    /// that does.
    const CONNECTS: bool = true;
    /// Whether [`repair`](Plugin::repair) does anything.
    const REPAIRS: bool = false;
    /// The plugin's keys of the configuration, decoded before any verb runs.
    type Conf: DeserializeOwned;

    /// The keys of the configuration that the plugin reads, without those common to all plugins.
    fn keys() -> DecodedKeys {
        DecodedKeys::of_type::<Self::Conf>()
    }

    /// Examines the configuration, independent of the node: an error would fail every ADD. Makes no
    /// request to the kernel.
    fn examine(cx: &CallContext<'_>, conf: &Self::Conf, remarks: &mut ConfigRemarks) -> Result<()>;

    /// For STATUS: fails where [`examine`](Plugin::examine) does.
    fn require_sound(cx: &CallContext<'_>, conf: &Self::Conf) -> Result<()> {
        Self::examine(cx, conf, &mut ConfigRemarks::default()).or_unavailable()
    }

    /// Attaches the container. A failed ADD leaves the host as it was before.
    fn add(cx: &CallContext<'_>, conf: &Self::Conf, req: &AddRequest) -> Result<CniResult>;
    fn check(cx: &CallContext<'_>, conf: &Self::Conf, req: &CheckRequest) -> Result<()>;
    /// Restores the missing links and addresses of the host and the missing routes of the
    /// container, as ADD created them; changed ones are left. The rules of the packet filter
    /// have been restored already.
    fn repair(
        _: &CallContext<'_>,
        _: &Self::Conf,
        _: &CheckRequest,
        _: &mut RepairFindings,
    ) -> Result<()> {
        Ok(())
    }
    /// Detaches the container: completes all steps that can be done, then reports the first error.
    fn del(cx: &CallContext<'_>, conf: &Self::Conf, req: &DelRequest) -> Result<()>;
    /// Removes resources of this network that belong to no valid attachment.
    fn gc(cx: &CallContext<'_>, conf: &Self::Conf, req: &GcRequest) -> Result<()>;
    /// GC without the list of valid attachments: removes only resources whose containers are
    /// certainly gone.
    fn gc_unlisted(_: &CallContext<'_>, _: &Self::Conf) -> Result<()> {
        Ok(())
    }
    /// Fails if an ADD would fail now; changes nothing.
    fn status(cx: &CallContext<'_>, conf: &Self::Conf) -> Result<()>;
}

/// The container's network namespace, opened on first use; an error of the opening is kept.
#[derive(Debug)]
pub struct ContainerSandbox {
    /// `CNI_NETNS` as the caller wrote it, which results show as `sandbox`.
    pub path: String,
    opened: OnceCell<Result<Netns>>,
}

impl ContainerSandbox {
    pub(super) fn at_path(path: &str) -> ContainerSandbox {
        ContainerSandbox { path: path.to_owned(), opened: OnceCell::new() }
    }

    /// The namespace. Code 8 if there is none at the path.
    pub fn open_netns(&self) -> Result<&Netns> {
        self.opened
            .get_or_init(|| {
                Netns::open(&self.path).map_err(|e| {
                    let context = format!("failed to open netns \"{}\"", self.path);
                    Error::from(e).context(context).with_code(ErrorCode::INVALID_NETNS)
                })
            })
            .as_ref()
            .map_err(Clone::clone)
    }

    /// The identity of the namespace, which distinguishes it from earlier and later namespaces at
    /// this path. `None` if the kernel does not provide one.
    pub fn netns_identity(&self) -> Option<NetnsIdentity> {
        NetnsIdentity::at_path(Path::new(&self.path))
    }
}

#[derive(Debug)]
pub struct AddRequest {
    pub id: ContainerId,
    pub sandbox: ContainerSandbox,
    /// The interface in the container.
    pub ifname: InterfaceName,
    /// The result of the previous plugin in the list.
    pub prev: Option<CniResult>,
}

impl AddRequest {
    /// Creates the link `wanted` in the container, on top of a master in the namespace of
    /// `master_netlink`, with `addresses` and their routes. A failure deletes the link and releases
    /// the addresses.
    pub fn attach_link(
        &self,
        cx: &CallContext<'_>,
        inside: &ContainerNetns<'_>,
        master_netlink: &Netlink,
        wanted: &NewChildLink<'_>,
        addresses: LinkAddresses,
    ) -> Result<(CniResult, Link)> {
        let mut undo = Rollback::new();
        // The link is created before IPAM is called, so that an attachment that exists already
        // keeps its address.
        let LinkAddresses { given, default_route } = addresses;
        let is_layer2 = given.as_ref().is_some_and(|result| result.ips.is_empty());
        child::create_link(master_netlink, inside, wanted, is_layer2 || cx.ipam_needs_link())?;
        undo.add_step(format!("delete \"{}\"", self.ifname), || {
            child::roll_back_link(inside, &self.ifname)
        });
        let mut result = given.map_or_else(|| cx.ipam_add(&mut undo, None), Ok)?;
        omit_default_routes(&mut result, default_route);
        let link = child::complete_link(inside, &self.ifname, &self.sandbox.path, &mut result)?;
        cx.finish_result(&mut result);
        undo.commit();
        Ok((result, link))
    }
}

/// The origin of a link's addresses and routes.
#[derive(Debug)]
pub struct LinkAddresses {
    /// Those of this result; `None` for those of the IPAM plugin.
    pub given: Option<CniResult>,
    /// The key `defaultRoute`.
    pub default_route: Option<bool>,
}

/// The result of the previous plugin, for a plugin that requires one; `msg` is the error if there
/// is none.
pub fn require_prev_result<'r>(prev: Option<&'r CniResult>, msg: &str) -> Result<&'r CniResult> {
    prev.ok_or_else(|| Error::internal(msg).with_details(PREV_RESULT_REMEDY))
}

/// The request of a CHECK or a repair.
#[derive(Debug)]
pub struct CheckRequest {
    pub id: ContainerId,
    pub sandbox: ContainerSandbox,
    /// The interface in the container.
    pub ifname: InterfaceName,
    /// The final result of the ADD of the whole list.
    pub prev: Option<CniResult>,
}

impl CheckRequest {
    /// The result with which CHECK compares the kernel's state. Fails if the runtime did not send
    /// it.
    pub fn require_final_result(&self) -> Result<&CniResult> {
        self.prev.as_ref().ok_or_else(|| {
            Error::internal("Required prevResult missing")
                .with_details("CHECK compares with the result of ADD; the runtime must send it")
        })
    }

    /// The attachment's link, of this kind, as the result of ADD lists it.
    pub fn find_link(&self, inside: &ContainerNetns<'_>, kind: &str) -> Result<CheckedLink<'_>> {
        child::find_listed_link(
            inside,
            self.require_final_result()?,
            &self.ifname,
            &self.sandbox.path,
            kind,
        )
    }

    /// Restores the attachment's link of this kind: makes it again by `create`, which gets its MAC
    /// and whether it is to be up, if the kernel has deleted it with its master, and adds missing
    /// routes.
    pub fn restore_link(
        &self,
        inside: &ContainerNetns<'_>,
        kind: &str,
        repairs: &mut RepairFindings,
        create: &dyn Fn(Option<MacAddress>, bool) -> Result<()>,
    ) -> Result<()> {
        if inside.netlink.find_link(self.ifname.as_str())?.is_none() {
            let (ifname, path) = (&self.ifname, &self.sandbox.path);
            let prev = self.require_final_result()?;
            let (index, entry) = verify::find_container_entry(prev, ifname, path)?;
            let what = format!("interface \"{ifname}\" in {path}");
            if repairs.shares_namespace {
                repairs.record_changed(format!("{what}, which is another container's path, too"));
                return Ok(());
            }
            let mac: Option<MacAddress> = entry.mac.parse().ok();
            let is_renamed = |link: &Link| link.kind.as_deref() == Some(kind) && link.mac == mac;
            if let Some(link) = inside.netlink.dump_links()?.into_iter().find(is_renamed) {
                repairs.record_changed(format!("{what}, which is \"{}\" now", link.name));
                return Ok(());
            }
            let mut result = CniResult::new();
            result.ips = prev.ips_of_interface(index).cloned().collect();
            result.routes.clone_from(&prev.routes);
            repairs.restore_missing(what, || {
                create(mac, result.ips.is_empty())?;
                let completed = child::complete_link(inside, ifname, path, &mut result);
                completed.map(drop).inspect_err(|_| {
                    child::roll_back_link(inside, ifname).unwrap_or_else(|error| warn!("{error}"));
                })
            });
            return Ok(());
        }
        child::restore_routes(inside, &self.find_link(inside, kind)?, repairs)
    }
}

#[derive(Debug)]
pub struct DelRequest {
    pub id: ContainerId,
    /// The network namespace; `None` if it no longer exists.
    pub netns: Option<Netns>,
    /// The interface in the container.
    pub ifname: InterfaceName,
    /// The final result of the ADD, if the runtime still has it.
    pub prev: Option<CniResult>,
}

impl DelRequest {
    /// Deletes the attachment's veth pair, also if the container has renamed or moved its end.
    pub fn delete_veth(&self, cx: &CallContext<'_>) -> Result<()> {
        if cx.is_collected() {
            return Ok(());
        }
        let owner = AttachmentId::new(&cx.net.name, &self.id, &self.ifname);
        veth::delete_pair(
            cx.host_netlink()?,
            &self.ifname,
            self.netns.as_ref(),
            self.prev.as_ref(),
            &|label| owner.owns_comment(Some(label)),
        )
    }

    /// The MAC and the addresses of the attachment's link in the result of ADD.
    pub fn recorded_link(&self) -> Option<RecordedLink> {
        let prev = self.prev.as_ref()?;
        let index = prev
            .interfaces
            .iter()
            .position(|entry| entry.name == self.ifname.as_str() && !entry.sandbox.is_empty())?;
        let mac = prev.interfaces[index].mac.parse().ok()?;
        Some(RecordedLink {
            mac,
            addresses: prev.ips_of_interface(index).map(|ip| ip.address).collect(),
        })
    }

    /// Deletes the attachment's link of this kind and releases the addresses, if they are managed.
    pub fn delete_link(&self, cx: &CallContext<'_>, kind: &str) -> Result<()> {
        let mut failures = Failures::new();
        delete_and_release(cx, &mut failures, CallContext::ipam_del, |failures| {
            let netns = self.netns.as_ref();
            let deleted = netns.map_or(Ok(()), |netns| {
                child::delete_link(netns, &self.ifname, kind, self.recorded_link().as_ref())
            });
            failures.keep_error(deleted)
        });
        failures.into_result()
    }
}

/// Deletes links with `del_links` and releases their addresses with `release`: no other container
/// may get the addresses before the links are deleted, but a DHCP release needs the link.
/// `del_links` returns `None` if a link cannot be deleted, whose addresses then stay in use.
pub fn delete_and_release<'a>(
    cx: &'a CallContext<'a>,
    failures: &mut Failures,
    release: fn(&'a CallContext<'a>) -> Result<()>,
    del_links: impl FnOnce(&mut Failures) -> Option<()>,
) {
    let over_link = cx.ipam_needs_link();
    if over_link {
        failures.keep_error(release(cx));
    }
    if del_links(failures).is_some() && !over_link {
        failures.keep_error(release(cx));
    }
}

/// A GC with the list of valid attachments.
#[derive(Debug)]
pub struct GcRequest {
    /// The valid attachments of this network and those in doubt. All other attachments are stale.
    pub valid: Vec<ValidAttachment>,
}

impl GcRequest {
    pub fn is_valid_attachment(&self, container_id: &str, ifname: &str) -> bool {
        self.valid.iter().any(|a| a.container_id == container_id && a.ifname == ifname)
    }

    /// Deletes the veth pairs of the network's stale attachments, whose addresses are about to be
    /// released: their containers may still be alive.
    pub fn delete_stale_veths(&self, cx: &CallContext<'_>) -> Result<()> {
        let valid = AttachmentId::from_attachments(&cx.net.name, &self.valid);
        let is_stale = stale_matcher(cx.net.name.as_str(), &valid);
        veth::delete_labelled_pairs(cx.host_netlink()?, &|label| is_stale(Some(label)))
    }
}
