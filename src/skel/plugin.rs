//! The trait of a plugin, and its requests, whose fields are all checked.

use std::cell::OnceCell;
use std::path::Path;

use serde::de::DeserializeOwned;

use super::call::Remarks;
use super::context::Cx;
use super::rollback::{Failures, Rollback};
use crate::cni::json::keys::Keys;
use crate::cni::{Attachment, CniResult, ContainerId, IfName, Interface, SpecVersion};
use crate::error::{Code, Context, Error, Result};
use crate::iface::child::{self, Found, Recorded, Wanted};
use crate::iface::{Inside, veth};
use crate::netfilter::Owner;
use crate::netfilter::names::stale;
use crate::netlink::{Link, Netlink};
use crate::netns::{Netns, NetnsId};
use crate::repairs::Repairs;

/// A CNI plugin. Every plugin implements every verb of the specification.
pub trait Plugin {
    /// The plugin's name: the `type` of configurations, and the file name.
    const NAME: &'static str;
    /// One line of description, 60 characters at most.
    const ABOUT: &'static str;
    /// The supported versions of the specification.
    const VERSIONS: &'static [SpecVersion] = &SpecVersion::ALL;
    /// Whether a completed ADD is rolled back if the version of the request cannot represent the result, such as an
    /// interface without addresses before 0.3.0. Some reference plugins keep the interface.
    const UNDO_IF_UNREPRESENTABLE: bool = true;
    /// Whether ADD may create state on the host that outlives the container's namespace, such as rules: ADD then
    /// [records](Cx::note) the attachment first.
    const OUTLIVES_ITS_CONTAINER: bool = false;
    /// Whether ADD connects the container to anything. Only then it restores protections of the host that a flush has ended:
    /// a plugin that connects follows those that do not.
    const CONNECTS: bool = true;
    /// Whether [`repair`](Plugin::repair) does anything.
    const REPAIRS: bool = false;
    /// The plugin's keys of the configuration, decoded before any verb runs.
    type Conf: DeserializeOwned;

    /// The keys of the configuration that the plugin reads, without those common to all plugins.
    fn keys() -> Keys {
        Keys::of::<Self::Conf>()
    }

    /// Examines the configuration, independent of the node: an error would fail every ADD. Makes no request to the
    /// kernel.
    fn examine(cx: &Cx<'_>, conf: &Self::Conf, remarks: &mut Remarks) -> Result<()>;

    /// For STATUS: fails where [`examine`](Plugin::examine) does.
    fn require_sound(cx: &Cx<'_>, conf: &Self::Conf) -> Result<()> {
        Self::examine(cx, conf, &mut Remarks::default()).or_unavailable()
    }

    /// Attaches the container. On failure the host is as it was.
    fn add(cx: &Cx<'_>, conf: &Self::Conf, req: &AddReq) -> Result<CniResult>;
    fn check(cx: &Cx<'_>, conf: &Self::Conf, req: &CheckReq) -> Result<()>;
    /// Restores links and addresses of the host and routes of the container that are missing, as ADD made them;
    /// changed ones are left. The packet filter's rules are restored before.
    fn repair(_: &Cx<'_>, _: &Self::Conf, _: &CheckReq, _: &mut Repairs) -> Result<()> {
        Ok(())
    }
    /// Detaches the container: completes all steps that can be done, then reports the first error.
    fn del(cx: &Cx<'_>, conf: &Self::Conf, req: &DelReq) -> Result<()>;
    /// Removes resources of this network that belong to no valid attachment.
    fn gc(cx: &Cx<'_>, conf: &Self::Conf, req: &GcReq) -> Result<()>;
    /// GC without the list of valid attachments: removes only resources whose containers are certainly gone.
    fn gc_unlisted(_: &Cx<'_>, _: &Self::Conf) -> Result<()> {
        Ok(())
    }
    /// Fails if an ADD would fail now; changes nothing.
    fn status(cx: &Cx<'_>, conf: &Self::Conf) -> Result<()>;
}

/// The container's network namespace: opened before the plugin runs, or why it was not.
#[derive(Debug)]
pub struct Sandbox {
    /// `CNI_NETNS` as it was written: the `sandbox` of results.
    pub path: String,
    opened: OnceCell<Result<Netns>>,
}

impl Sandbox {
    pub(super) fn at(path: &str) -> Sandbox {
        Sandbox { path: path.to_owned(), opened: OnceCell::new() }
    }

    /// The namespace. Code 8 if there is none at the path.
    pub fn netns(&self) -> Result<&Netns> {
        let open = || {
            Netns::open(&self.path).map_err(|e| {
                let context = format!("failed to open netns \"{}\"", self.path);
                Error::from(e).context(context).with_code(Code::INVALID_NETNS)
            })
        };
        self.opened.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// The identity of the namespace, different from earlier and later namespaces at this path; `None` if the
    /// kernel does not provide one.
    pub fn identity(&self) -> Option<NetnsId> {
        NetnsId::at(Path::new(&self.path))
    }
}

/// The request of a CHECK or a repair; `prev` is the final result of the ADD of the whole list.
pub type CheckReq = AddReq;

/// The request of an ADD.
#[derive(Debug)]
pub struct AddReq {
    pub id: ContainerId,
    pub sandbox: Sandbox,
    /// The interface in the container.
    pub ifname: IfName,
    /// The result of the previous plugin in the list.
    pub prev: Option<CniResult>,
}

impl AddReq {
    /// Creates the link `wanted` in the container, on top of a master that `place` has, with the addresses and routes
    /// of `addresses`, or of the IPAM plugin. A failure deletes the link and releases the addresses.
    pub fn attach_link(
        &self,
        cx: &Cx<'_>,
        inside: &Inside<'_>,
        place: &Netlink,
        wanted: &Wanted<'_>,
        addresses: Option<CniResult>,
    ) -> Result<(CniResult, Link)> {
        let mut undo = Rollback::new();
        // The link is created before IPAM is called, so that an attachment that exists already keeps its address.
        let is_layer2 = addresses.as_ref().is_some_and(|given| given.ips.is_empty());
        child::add(place, inside, wanted, is_layer2 || cx.ipam_needs_link())?;
        undo.push(format!("delete \"{}\"", self.ifname), || child::take_back(inside, &self.ifname));
        let mut result = addresses.map_or_else(|| cx.ipam_add(&mut undo), Ok)?;
        let link = child::attach(inside, &self.ifname, &self.sandbox.path, &mut result)?;
        cx.finish(&mut result);
        undo.commit();
        Ok((result, link))
    }
}

/// The result of the previous plugin, for a plugin that requires one; `msg` is the error if there is none.
pub fn require_prev<'r>(prev: Option<&'r CniResult>, msg: &str) -> Result<&'r CniResult> {
    prev.ok_or_else(|| {
        Error::internal(msg).with_details(
            "the plugin works on what one before it made: put it behind bridge, ptp, ... in a list",
        )
    })
}

/// For CHECK and repair.
impl CheckReq {
    /// The final result of ADD, with which CHECK compares the kernel's state.
    pub fn require_prev(&self) -> Result<&CniResult> {
        self.prev.as_ref().ok_or_else(|| {
            Error::internal("Required prevResult missing")
                .with_details("CHECK compares with the result of ADD; the runtime must send it")
        })
    }

    /// The attachment's link, of this kind, as the result of ADD lists it.
    pub fn find_link(&self, inside: &Inside<'_>, kind: &str) -> Result<Found<'_>> {
        child::find(inside, self.require_prev()?, &self.ifname, &self.sandbox.path, kind)
    }

    /// Restores the routes of the attachment's link of this kind that are missing.
    pub fn restore_routes(&self, kind: &str, repairs: &mut Repairs) -> Result<()> {
        let inside = Inside::enter(self.sandbox.netns()?)?;
        child::restore_routes(&inside, &self.find_link(&inside, kind)?, repairs)
    }
}

#[derive(Debug)]
pub struct DelReq {
    pub id: ContainerId,
    /// The network namespace; `None` if it no longer exists.
    pub netns: Option<Netns>,
    /// The interface in it.
    pub ifname: IfName,
    /// The final result of the ADD, if the runtime still has it.
    pub prev: Option<CniResult>,
}

impl DelReq {
    /// Deletes the attachment's veth pair, also if the container has renamed or moved its end.
    pub fn del_veth(&self, cx: &Cx<'_>) -> Result<()> {
        let owner = Owner::new(&cx.net.name, &self.id, &self.ifname);
        let is_own = |label: &str| owner.owns(Some(label));
        veth::del(cx.host()?, &self.ifname, self.netns.as_ref(), self.prev.as_ref(), &is_own)
    }

    /// What the result lists of the attachment's link.
    fn recorded(&self) -> Option<Recorded> {
        let prev = self.prev.as_ref()?;
        let is_own =
            |entry: &Interface| entry.name == self.ifname.as_str() && !entry.sandbox.is_empty();
        let index = prev.interfaces.iter().position(is_own)?;
        let mac = prev.interfaces[index].mac.parse().ok()?;
        Some(Recorded { mac, addresses: prev.ips_of(index).map(|ip| ip.address).collect() })
    }

    /// Deletes the attachment's link of this kind and releases the addresses, if they are managed.
    pub fn del_link(&self, cx: &Cx<'_>, kind: &str) -> Result<()> {
        let mut failures = Failures::new();
        del_and_release(cx, &mut failures, Cx::ipam_del, |failures| {
            let netns = self.netns.as_ref();
            let deleted = netns.map_or(Ok(()), |netns| {
                child::del(netns, &self.ifname, kind, self.recorded().as_ref())
            });
            failures.keep(deleted)
        });
        failures.into_result()
    }
}

/// Deletes links with `del_links` and releases their addresses with `release`:
/// no other container may get the addresses before the links are gone, but a DHCP release needs the link.
/// While a link cannot be deleted, for which `del_links` returns `None`, its addresses stay in use.
pub fn del_and_release<'a>(
    cx: &'a Cx<'a>,
    failures: &mut Failures,
    release: fn(&'a Cx<'a>) -> Result<()>,
    del_links: impl FnOnce(&mut Failures) -> Option<()>,
) {
    let over_link = cx.ipam_needs_link();
    if over_link {
        failures.keep(release(cx));
    }
    if del_links(failures).is_some() && !over_link {
        failures.keep(release(cx));
    }
}

/// A GC with the list of valid attachments.
#[derive(Debug)]
pub struct GcReq {
    /// The attachments of this network that are still valid, and those in doubt: all others are stale.
    pub valid: Vec<Attachment>,
}

impl GcReq {
    /// Whether some valid attachment has this container and interface.
    pub fn is_valid(&self, container_id: &str, ifname: &str) -> bool {
        self.valid.iter().any(|a| a.container_id == container_id && a.ifname == ifname)
    }

    /// Deletes the veth pairs of the network's attachments that are not valid, of which the container
    /// may be alive: their addresses are about to be released.
    pub fn del_stale_veths(&self, cx: &Cx<'_>) -> Result<()> {
        let valid = Owner::each(&cx.net.name, &self.valid);
        let is_stale = stale(cx.net.name.as_str(), &valid);
        veth::del_labelled(cx.host()?, &|label| is_stale(Some(label)))
    }
}
