//! Guards: a program of classic BPF at the host's end of a container's veth pair, which judges each
//! frame of the container before the network stack does.
//!
//! The program is a filter of traffic control at the ingress of the end. If all packets of the end
//! are redirected to an `ifb` device before, for shaping, then the program is a filter at the
//! egress of that device. Refused frames go to a sink, where they can be counted before they are
//! dropped.

#[cfg(test)]
mod tests;

use crate::iface::redirect;
use crate::netlink::traffic::program::{
    ClassicInstruction, ProgramFilter, TC_ACT_SHOT, TC_ACT_UNSPEC, is_program_handle,
};
use crate::netlink::traffic::{Qdisc, QdiscHook, TrafficFilterInfo, TrafficHandle};
use crate::netlink::{Link, LinkChange, LinkKind, Netlink, NewLink, VethPeer};
use cni::error::{Error, ErrorContext, Result};

/// The parent of the egress filters of a `clsact` qdisc.
const CLSACT_EGRESS: TrafficHandle = TrafficHandle::new(0xffff, 0xfff3);

/// A place for the program, as [`find_place`] has found it.
#[derive(Debug)]
pub struct GuardPlace {
    /// The link.
    index: u32,
    parent: TrafficHandle,
    /// The qdisc that must be created before.
    missing: Option<Qdisc>,
    priority: u16,
    /// Another filter that judges frames before.
    before: Option<String>,
    /// The program that is there.
    pub program: Option<ProgramFilter>,
}

/// The names of the links that drop refused frames: a veth pair whose second end is a port of a
/// bridge that is down. Such a port drops what it receives, after the packet filter has seen it at
/// the ingress of the port.
#[derive(Clone, Copy, Debug)]
pub struct FrameSink {
    pub entry: &'static str,
    pub port: &'static str,
    pub bridge: &'static str,
}

const RETURN: u16 = 0x06;

const fn step(code: u16, jf: u8, k: u32) -> ClassicInstruction {
    ClassicInstruction { code, jt: 0, jf, k }
}

/// Drops frames to 01:80:c2:00:00:00 and the next addresses, which a bridge passes to the network
/// stack of the host even if the port is down.
const DROP_LINK_LOCAL: [ClassicInstruction; 7] = {
    const LOAD_WORD: u16 = 0x20;
    const LOAD_HALF: u16 = 0x28;
    const AND: u16 = 0x54;
    const IF_EQUAL: u16 = 0x15;
    [
        step(LOAD_WORD, 0, 0),
        step(IF_EQUAL, 4, 0x0180_c200),
        step(LOAD_HALF, 0, 4),
        step(AND, 0, 0xfff0),
        step(IF_EQUAL, 1, 0),
        step(RETURN, 0, TC_ACT_SHOT),
        step(RETURN, 0, TC_ACT_UNSPEC),
    ]
};

/// Drops what the bridge of the sink would pass to the host if somebody set it up.
const DROP_ALL: [ClassicInstruction; 1] = [step(RETURN, 0, TC_ACT_SHOT)];

/// The sink of the host.
pub const SINK: FrameSink =
    FrameSink { entry: "cnibox-refused", port: "cnibox-dropped", bridge: "cnibox-drop" };

impl FrameSink {
    /// Creates what is missing, and repairs the links if somebody has deleted the bridge, or set
    /// the bridge up or the port down. Returns the index of the entry.
    pub fn ensure_links(self, netlink: &Netlink) -> Result<u32> {
        if let Some(entry) = netlink.find_link(self.entry)?.filter(|entry| entry.up)
            && let Ok(index) = self.require_dropping(netlink, &entry, true)
        {
            return Ok(index);
        }
        // Another process may create the same links at the same time.
        let ensure = |name, new: &NewLink<'_>| {
            netlink.find_link(name)?.map_or_else(
                || {
                    let created = netlink.add_link(new);
                    netlink.require_link(name).or_else(|error| created.and(Err(error)))
                },
                Ok,
            )
        };
        let bridge = ensure(
            self.bridge,
            &NewLink::new(self.bridge, LinkKind::Bridge { vlan_filtering: None }),
        )?;
        let pair = NewLink::new(self.port, LinkKind::Veth { peer: VethPeer::new(self.entry) });
        let port = ensure(self.port, &pair.with_master(bridge.index))?;
        let entry = netlink.require_link(self.entry)?;
        if bridge.up && bridge.kind.as_deref() == Some("bridge") {
            netlink.change_link(bridge.index, LinkChange::new().set_down())?;
        }
        if port.master.is_none() && entry.link == Some(port.index) {
            netlink.change_link(port.index, LinkChange::new().set_master(bridge.index))?;
        }
        self.require_dropping(netlink, &entry, false)?;
        for (link, program) in [(&port, &DROP_LINK_LOCAL[..]), (&bridge, &DROP_ALL)] {
            let filter = ProgramFilter { program: program.to_vec(), ..ProgramFilter::default() };
            put_filter(netlink, link, &filter)?;
        }
        // The entry is set up last, when its port has the filter.
        for link in [&port, &entry] {
            netlink.change_link(link.index, LinkChange::new().set_up())?;
        }
        Ok(entry.index)
    }

    /// For STATUS: fails if other links have the names. Returns whether the links are there, and
    /// need no repair by ADD.
    pub fn require_usable(self, netlink: &Netlink) -> Result<bool> {
        let Some(entry) = netlink.find_link(self.entry)? else { return Ok(false) };
        match netlink.find_link(self.port)?.filter(|port| entry.link == Some(port.index)) {
            Some(port) if port.master.is_none() => return Ok(false),
            Some(port)
                if netlink
                    .find_link(self.bridge)?
                    .is_some_and(|b| b.up && port.master == Some(b.index)) =>
            {
                return Ok(false);
            }
            Some(port) if !port.up => {
                return self.require_dropping(netlink, &entry, false).map(|_| false);
            }
            _ => {}
        }
        self.require_dropping(netlink, &entry, entry.up).map(|_| entry.up)
    }

    /// Fails unless what the entry sends is dropped: at a port, which is up if `is_ready`, of a
    /// bridge that is down.
    fn require_dropping(self, netlink: &Netlink, entry: &Link, is_ready: bool) -> Result<u32> {
        let find =
            |index: Option<u32>| index.map_or(Ok(None), |index| netlink.find_link_by_index(index));
        let port = find(entry.link.filter(|_| entry.link_netnsid.is_none()))?;
        let bridge = find(port.as_ref().and_then(|port| port.master))?;
        let FrameSink { entry: from, .. } = self;
        let why = match (&port, &bridge) {
            (None, _) => format!("\"{from}\" has no other end on the host"),
            (Some(port), _) if is_ready && !port.up => format!("\"{}\" is down", port.name),
            (Some(port), None) => format!("\"{}\" is not a port of \"{}\"", port.name, self.bridge),
            (_, Some(bridge)) if bridge.kind.as_deref() != Some("bridge") => {
                format!("\"{}\" is not a bridge", bridge.name)
            }
            (_, Some(bridge)) if bridge.up => format!("\"{}\" is up", bridge.name),
            _ => return Ok(entry.index),
        };
        Err(Error::internal(format!("the links that drop refused frames were changed: {why}"))
            .with_details(format!("ip link del {from}; ip link del {}", self.bridge)))
    }
}

/// Judges all frames that `link` receives by the filter, instead of the previous one, with the sink
/// as its redirect.
pub fn put_guard(
    netlink: &Netlink,
    link: &Link,
    filter: ProgramFilter,
    sink: FrameSink,
) -> Result<()> {
    put_guard_at(netlink, link, &find_place(netlink, link)?, filter, sink)
}

/// Like [`put_guard`], at the place of the link.
pub fn put_guard_at(
    netlink: &Netlink,
    link: &Link,
    place: &GuardPlace,
    filter: ProgramFilter,
    sink: FrameSink,
) -> Result<()> {
    let redirect = Some(sink.ensure_links(netlink)?);
    put_filter_at(netlink, link, place, &ProgramFilter { redirect, ..filter })
}

/// Puts the filter of an earlier [`find_place`] in force again; `None` deletes the filter.
pub fn restore_filter(
    netlink: &Netlink,
    link: &Link,
    former: Option<&ProgramFilter>,
) -> Result<()> {
    former.map_or_else(|| remove_guard(netlink, link), |former| put_filter(netlink, link, former))
}

fn put_filter(netlink: &Netlink, link: &Link, filter: &ProgramFilter) -> Result<()> {
    put_filter_at(netlink, link, &find_place(netlink, link)?, filter)
}

fn put_filter_at(
    netlink: &Netlink,
    link: &Link,
    place: &GuardPlace,
    filter: &ProgramFilter,
) -> Result<()> {
    if let Some(kind) = &place.before {
        return Err(Error::internal(format!(
            "a filter of the kind {kind} judges frames of \"{}\" first",
            link.name
        ))
        .with_details(format!("tc filter show dev {} ingress", link.name)));
    }
    if place.program.as_ref() == Some(filter) {
        return Ok(());
    }
    if let Some(qdisc) = &place.missing {
        let added = netlink.add_qdisc(place.index, QdiscHook::Ingress, redirect::INGRESS, qdisc);
        added.context(|| format!("create {} qdisc", qdisc.kind_name()))?;
    }
    Ok(netlink.replace_program(place.index, place.parent, place.priority, filter)?)
}

/// Runs `remove`, which deletes redirects of `link`. A program on the device of a redirect stays in
/// force on the link.
pub fn keep_without_redirect(
    netlink: &Netlink,
    link: &Link,
    remove: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let (Some(filter), Some(parent)) =
        (find_place(netlink, link)?.program, redirect::find_ingress_parent(netlink, link)?)
    else {
        return remove();
    };
    let filters = netlink.dump_filters(link.index, parent)?;
    let behind = GuardPlace::new(link.index, parent, None).find_priority(netlink, &filters)?;
    if behind.program.is_some() {
        return remove();
    }
    // Until the redirect is deleted the program runs behind it too, so that no frame passes
    // unjudged.
    netlink.replace_program(link.index, parent, behind.priority, &filter)?;
    remove()?;
    put_filter(netlink, link, &filter)?;
    if find_place(netlink, link)?.priority != behind.priority {
        netlink.delete_filters(link.index, parent, behind.priority)?;
    }
    Ok(())
}

/// Puts a filter on a link, with the link itself as the sink of refused frames, to see whether the
/// kernel accepts it.
pub fn try_guard(netlink: &Netlink, link: &Link, filter: ProgramFilter) -> Result<()> {
    put_filter(netlink, link, &ProgramFilter { redirect: Some(link.index), ..filter })
}

/// Whether all frames that `link` receives are judged by the filter.
pub fn has_guard(
    netlink: &Netlink,
    link: &Link,
    filter: &ProgramFilter,
    sink: FrameSink,
) -> Result<bool> {
    let Some(entry) = netlink.find_link(sink.entry)? else { return Ok(false) };
    sink.require_dropping(netlink, &entry, true)?;
    let place = find_place(netlink, link)?;
    let wanted = ProgramFilter { redirect: Some(entry.index), ..filter.clone() };
    Ok(place.before.is_none() && place.program == Some(wanted))
}

/// Deletes the program, then its qdisc if that has no other filters.
pub fn remove_guard(netlink: &Netlink, link: &Link) -> Result<()> {
    let place = find_place(netlink, link)?;
    if place.program.is_none() {
        return Ok(());
    }
    netlink.delete_filters(place.index, place.parent, place.priority)?;
    let has_filters =
        |parent| Ok::<_, Error>(!netlink.dump_filters(place.index, parent)?.is_empty());
    let is_unused = match place.parent {
        redirect::CLSACT_INGRESS => false,
        CLSACT_EGRESS => !has_filters(CLSACT_EGRESS)? && !has_filters(redirect::CLSACT_INGRESS)?,
        parent => !has_filters(parent)?,
    };
    if is_unused {
        netlink.delete_qdisc(place.index, QdiscHook::Ingress)?;
    }
    Ok(())
}

/// The place for the filter: on the link, or, if an earlier filter of the link redirects all
/// packets to another device, on that device.
pub fn find_place(netlink: &Netlink, link: &Link) -> Result<GuardPlace> {
    let Some(parent) = redirect::find_ingress_parent(netlink, link)? else {
        return Ok(GuardPlace::new(link.index, redirect::INGRESS, Some(Qdisc::Ingress)));
    };
    let filters = netlink.dump_filters(link.index, parent)?;
    let place = GuardPlace::new(link.index, parent, None).find_priority(netlink, &filters)?;
    let targets = filters
        .iter()
        .filter(|filter| filter.priority < place.priority)
        .filter_map(TrafficFilterInfo::redirect_of_all);
    let Some(device) = targets.into_iter().find(|index| *index != 0) else { return Ok(place) };
    if netlink.find_qdisc(device, QdiscHook::Ingress)?.is_none() {
        return Ok(GuardPlace::new(device, CLSACT_EGRESS, Some(Qdisc::Clsact)));
    }
    let filters = netlink.dump_filters(device, CLSACT_EGRESS)?;
    GuardPlace::new(device, CLSACT_EGRESS, None).find_priority(netlink, &filters)
}

/// Whether the program is a guard or a filter of the sink. Programs of others do not redirect.
fn is_own(found: &ProgramFilter) -> bool {
    found.redirect.is_some() || found.program == DROP_LINK_LOCAL || found.program == DROP_ALL
}

impl GuardPlace {
    fn new(index: u32, parent: TrafficHandle, missing: Option<Qdisc>) -> GuardPlace {
        GuardPlace { index, parent, missing, priority: 1, before: None, program: None }
    }

    /// The first priority that has no filter, or a program that may be replaced.
    fn find_priority(
        mut self,
        netlink: &Netlink,
        filters: &[TrafficFilterInfo],
    ) -> Result<GuardPlace> {
        while filters.iter().any(|filter| filter.priority == self.priority) {
            self.program =
                netlink.find_program(self.index, self.parent, self.priority)?.filter(is_own);
            if self.program.is_some() {
                // The kernel asks the latest filter of a priority first. It also lists the priority
                // itself.
                let others = filters
                    .iter()
                    .filter(|filter| filter.priority == self.priority && filter.handle != 0)
                    .filter(|filter| !is_program_handle(filter.handle));
                self.before = self.before.or(others.map(|filter| filter.kind.clone()).next());
                break;
            }
            let is_redirect =
                |filter: &&TrafficFilterInfo| filter.redirect_of_all().is_some() || !filter.selects;
            let other = filters
                .iter()
                .filter(|filter| filter.priority == self.priority)
                .find(|filter| !is_redirect(filter) || filter.kind != "u32");
            self.before = self.before.or(other.map(|filter| filter.kind.clone()));
            self.priority += 1;
        }
        Ok(self)
    }
}
