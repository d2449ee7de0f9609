//! Traffic control: queueing disciplines (qdiscs) that shape outgoing packets, and filters that
//! redirect packets.

pub mod program;
#[cfg(test)]
mod tests;

use std::fmt;

use nix::errno::Errno;
use nix::libc::{
    RTM_DELQDISC, RTM_DELTFILTER, RTM_GETQDISC, RTM_GETTFILTER, RTM_NEWQDISC, RTM_NEWTFILTER,
    TCA_KIND, TCA_OPTIONS,
};
use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};

use super::Netlink;
use super::attribute::{AttributeBuilder, ReplyAttribute, find_attribute, read_u32_at};
use super::error::{NetlinkResult, unless_absent};
use super::request::NetlinkRequest;

const ROOT: u32 = 0xffff_ffff;
/// `TC_H_INGRESS`, the hook of `ingress` and of `clsact`.
const INGRESS: u32 = 0xffff_fff1;

const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_RATE64: u16 = 4;

const U32: &str = "u32";
const TCA_U32_CLASSID: u16 = 1;
const TCA_U32_SEL: u16 = 5;
const TCA_U32_ACT: u16 = 7;
/// `TC_U32_TERMINAL`: a match ends the search.
const TERMINAL: u8 = 1;

const TCA_ACT_KIND: u16 = 1;
const TCA_ACT_OPTIONS: u16 = 2;
const MIRRED: &str = "mirred";
const TCA_MIRRED_PARMS: u16 = 2;
/// `TC_ACT_STOLEN`: the packet is not processed further here.
const STOLEN: u32 = 4;
/// `TCA_EGRESS_REDIR`: the packet leaves by the other link.
const EGRESS_REDIRECT: u32 = 1;

/// The kernel measures a buffer by the time for sending it, in ticks of 64 nanoseconds
/// (`/proc/net/psched`, the same since Linux 2.6.31).
pub const TICKS_PER_8_MICROSECONDS: u64 = 125;

/// The name of a qdisc (`1:`), class (`1:30`) or filter (`800::800`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct TrafficHandle(pub(super) u32);

impl TrafficHandle {
    /// The handle of a qdisc if `minor` is 0, otherwise of a class.
    pub const fn new(major: u16, minor: u16) -> TrafficHandle {
        TrafficHandle((major as u32) << 16 | minor as u32)
    }
}

impl fmt::Display for TrafficHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = (self.0 >> 16, self.0 & 0xffff);
        write!(f, "{major:x}:")?;
        if minor == 0 { Ok(()) } else { write!(f, "{minor:x}") }
    }
}

/// `struct tcmsg`, the fixed header of all messages.
#[derive(Clone, Copy, Debug, Default)]
struct TrafficHeader {
    index: u32,
    handle: u32,
    parent: u32,
    /// For a filter the priority, then the protocol.
    info: u32,
}

/// Length of `struct tcmsg`.
const HEADER_LEN: usize = 20;

impl TrafficHeader {
    fn of_filter(
        index: u32,
        TrafficHandle(parent): TrafficHandle,
        priority: u16,
        protocol: u16,
    ) -> TrafficHeader {
        let info = u32::from(priority) << 16 | u32::from(protocol);
        TrafficHeader { index, handle: 0, parent, info }
    }

    fn to_request(self, kind: u16) -> NetlinkRequest {
        let words = [0, self.index, self.handle, self.parent, self.info];
        NetlinkRequest::new(kind, words.map(u32::to_ne_bytes).as_flattened())
    }

    /// The header of a reply, its kind and the attributes.
    fn parse_reply(body: &[u8]) -> Option<(TrafficHeader, String, &[u8])> {
        let (index, handle) = (read_u32_at(body, 4)?, read_u32_at(body, 8)?);
        let header = TrafficHeader {
            index,
            handle,
            parent: read_u32_at(body, 12)?,
            info: read_u32_at(body, 16)?,
        };
        let attributes = &body[HEADER_LEN..];
        let kind =
            find_attribute(attributes, TCA_KIND).map(ReplyAttribute::to_text).unwrap_or_default();
        Some((header, kind, attributes))
    }
}

/// The place of a qdisc on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum QdiscHook {
    /// For outgoing packets, which can be queued.
    Root = ROOT,
    /// For incoming packets, which are not queued.
    Ingress = INGRESS,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Qdisc {
    /// A token bucket, which shapes all packets.
    Tbf(TokenBucket),
    /// For filters of incoming packets.
    Ingress,
    /// For filters of incoming and of outgoing packets, such as eBPF programs.
    Clsact,
    /// Any other kind, by its name; cannot be created.
    Other(String),
}

/// A token bucket: `tc-tbf(8)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBucket {
    /// The rate in bytes per second.
    pub rate: u64,
    /// The size of the bucket, as the time for filling it, in ticks.
    pub buffer: u32,
    /// The maximum size of the queue in bytes.
    pub limit: u32,
}

/// A qdisc of a link, as the kernel lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QdiscInfo {
    pub handle: TrafficHandle,
    pub qdisc: Qdisc,
}

impl Qdisc {
    /// The kind, such as `tbf`.
    pub fn kind_name(&self) -> &str {
        match self {
            Qdisc::Tbf(_) => "tbf",
            Qdisc::Ingress => "ingress",
            Qdisc::Clsact => "clsact",
            Qdisc::Other(kind) => kind,
        }
    }
}

impl TokenBucket {
    fn write_options<'a>(&self, options: &'a mut AttributeBuilder) -> &'a mut AttributeBuilder {
        // `struct tc_tbf_qopt`: two `tc_ratespec` of 12 bytes, each ending with the rate, then
        // limit, buffer and mtu.
        let rate = u32::try_from(self.rate);
        let parms = [0, 0, rate.unwrap_or(u32::MAX), 0, 0, 0, self.limit, self.buffer, 0];
        options.put_bytes(TCA_TBF_PARMS, parms.map(u32::to_ne_bytes).as_flattened());
        if rate.is_err() {
            options.put_bytes(TCA_TBF_RATE64, &self.rate.to_ne_bytes());
        }
        options
    }

    fn parse_options(options: ReplyAttribute<'_>) -> Option<TokenBucket> {
        let parms = options.find_nested(TCA_TBF_PARMS)?.value;
        let rate64 =
            options.find_nested(TCA_TBF_RATE64).and_then(|attr| attr.value.try_into().ok());
        Some(TokenBucket {
            rate: rate64.map_or(read_u32_at(parms, 8)?.into(), u64::from_ne_bytes),
            limit: read_u32_at(parms, 24)?,
            buffer: read_u32_at(parms, 28)?,
        })
    }
}

impl QdiscInfo {
    pub(super) fn parse_body(body: &[u8]) -> Option<QdiscInfo> {
        let (header, kind, attributes) = TrafficHeader::parse_reply(body)?;
        let qdisc = match kind.as_str() {
            "tbf" => find_attribute(attributes, TCA_OPTIONS)
                .and_then(TokenBucket::parse_options)
                .map_or(Qdisc::Other(kind), Qdisc::Tbf),
            "ingress" => Qdisc::Ingress,
            "clsact" => Qdisc::Clsact,
            _ => Qdisc::Other(kind),
        };
        Some(QdiscInfo { handle: TrafficHandle(header.handle), qdisc })
    }
}

/// A filter of the kind `u32` that redirects all packets of all protocols to another link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RedirectFilter {
    /// The position among the filters, beginning with 1.
    pub priority: u16,
    /// The class that the filter assigns to the packet.
    pub class: TrafficHandle,
    /// The index of the link by which the packet leaves.
    pub redirect: u32,
}

/// A filter of a qdisc or class, as the kernel lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrafficFilterInfo {
    /// The kind: `u32`, `bpf`, `flower`.
    pub kind: String,
    pub priority: u16,
    /// The number among the filters of this priority.
    pub handle: u32,
    /// `ETH_P_*` in network byte order.
    protocol: u16,
    /// Whether this is a filter `u32` that selects packets; the kernel also lists hash tables of
    /// such filters.
    pub selects: bool,
    /// Whether this is a filter `u32` that matches all packets of the protocol.
    pub matches_all: bool,
    /// The index of the link to which the filter redirects; 0 if that link was deleted.
    pub redirect: Option<u32>,
}

impl TrafficFilterInfo {
    /// The index of the link to which the filter redirects all packets; 0 if that link was deleted.
    pub fn redirect_of_all(&self) -> Option<u32> {
        self.redirect
            .filter(|_| self.kind == U32 && self.protocol == ALL_PROTOCOLS && self.matches_all)
    }

    pub(super) fn parse_body(body: &[u8]) -> Option<TrafficFilterInfo> {
        let (header, kind, attributes) = TrafficHeader::parse_reply(body)?;
        let options = find_attribute(attributes, TCA_OPTIONS).filter(|_| kind == U32);
        // The keys follow the selector. Each key begins with its mask and value.
        let selector = options.and_then(|options| options.find_nested(TCA_U32_SEL));
        let keys = selector.map(|selector| selector.value.get(16..).unwrap_or_default());
        Some(TrafficFilterInfo {
            kind,
            priority: (header.info >> 16) as u16,
            handle: header.handle,
            protocol: (header.info & 0xffff) as u16,
            selects: keys.is_some(),
            matches_all: keys.is_some_and(|keys| keys.iter().all(|byte| *byte == 0)),
            redirect: options.and_then(|options| {
                options.find_nested(TCA_U32_ACT)?.nested_attributes().find_map(redirected_link)
            }),
        })
    }
}

/// The index of the link to which an action redirects.
fn redirected_link(action: ReplyAttribute<'_>) -> Option<u32> {
    action.find_nested(TCA_ACT_KIND).filter(|kind| kind.to_text() == MIRRED)?;
    let parms = action.find_nested(TCA_ACT_OPTIONS)?.find_nested(TCA_MIRRED_PARMS)?.value;
    read_u32_at(parms, 20).filter(|how| *how == EGRESS_REDIRECT)?;
    read_u32_at(parms, 24)
}

/// `ETH_P_ALL` in network byte order.
const ALL_PROTOCOLS: u16 = 3_u16.to_be();

impl RedirectFilter {
    fn write_options<'a>(&self, options: &'a mut AttributeBuilder) -> &'a mut AttributeBuilder {
        options.put_u32(TCA_U32_CLASSID, self.class.0);
        // `struct tc_u32_sel` and one `tc_u32_key` with an empty mask, which matches all packets.
        let mut selector = [0; 32];
        (selector[0], selector[2]) = (TERMINAL, 1);
        options.put_bytes(TCA_U32_SEL, &selector);
        options.put_nested(TCA_U32_ACT, |actions| write_redirect(actions, self.redirect))
    }
}

/// The action that sends all packets by another link.
fn write_redirect(actions: &mut AttributeBuilder, redirect: u32) -> &mut AttributeBuilder {
    // `struct tc_mirred`: index, capabilities, action, two counters, eaction, ifindex.
    let parms = [0, 0, STOLEN, 0, 0, EGRESS_REDIRECT, redirect].map(u32::to_ne_bytes);
    actions.put_nested(1, |action| {
        action.put_text(TCA_ACT_KIND, MIRRED).put_nested(TCA_ACT_OPTIONS, |options| {
            options.put_bytes(TCA_MIRRED_PARMS, parms.as_flattened())
        })
    })
}

impl Netlink {
    /// The qdisc of a link; `None` if the link has only the kernel's default qdisc.
    pub fn find_qdisc(&self, index: u32, hook: QdiscHook) -> NetlinkResult<Option<QdiscInfo>> {
        let header = TrafficHeader { index, parent: hook as u32, ..TrafficHeader::default() };
        match self.socket.request_ack_and_echo(&header.to_request(RTM_GETQDISC), 0) {
            Ok(body) => {
                let found = body.and_then(|body| QdiscInfo::parse_body(&body));
                Ok(found.filter(|info| info.handle != TrafficHandle::default()))
            }
            Err(failure) if failure.errno == Errno::ENOENT => Ok(None),
            Err(failure) => {
                Err(failure.into_error("look up the qdisc of", &self.link_label(index)))
            }
        }
    }

    /// Replaces the qdisc of a link; a qdisc of the same kind and handle is changed in place.
    pub fn replace_qdisc(
        &self,
        index: u32,
        hook: QdiscHook,
        handle: TrafficHandle,
        qdisc: &Qdisc,
    ) -> NetlinkResult<()> {
        self.send_qdisc(index, hook, handle, qdisc, NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// Adds a qdisc to a link that has only the kernel's default qdisc.
    pub fn add_qdisc(
        &self,
        index: u32,
        hook: QdiscHook,
        handle: TrafficHandle,
        qdisc: &Qdisc,
    ) -> NetlinkResult<()> {
        self.send_qdisc(index, hook, handle, qdisc, NLM_F_CREATE | NLM_F_EXCL)
    }

    fn send_qdisc(
        &self,
        index: u32,
        hook: QdiscHook,
        TrafficHandle(handle): TrafficHandle,
        qdisc: &Qdisc,
        flags: u16,
    ) -> NetlinkResult<()> {
        let header = TrafficHeader { index, handle, parent: hook as u32, info: 0 };
        let mut request = header.to_request(RTM_NEWQDISC);
        request.body.put_text(TCA_KIND, qdisc.kind_name());
        if let Qdisc::Tbf(tbf) = qdisc {
            request.body.put_nested(TCA_OPTIONS, |options| tbf.write_options(options));
        }
        let target = format_args!("{} to {}", qdisc.kind_name(), self.link_label(index));
        self.socket.request_change(&request, flags, "add qdisc", &target).map_err(|error| {
            match error.errno() {
                Some(Errno::ENOENT | Errno::EOPNOTSUPP) => {
                    error.with_missing_module(&format!("sch_{}", qdisc.kind_name()))
                }
                _ => error,
            }
        })
    }

    /// Deletes the qdisc of a link, with its filters; `false` if there was only the kernel's
    /// default.
    pub fn delete_qdisc(&self, index: u32, hook: QdiscHook) -> NetlinkResult<bool> {
        let header = TrafficHeader { index, parent: hook as u32, ..TrafficHeader::default() };
        let op = "delete the qdisc of";
        match self.socket.request_deletion(
            &header.to_request(RTM_DELQDISC),
            op,
            &self.link_label(index),
        ) {
            // The kernel's reply if the hook never had a qdisc.
            Err(error) if error.errno() == Some(Errno::EINVAL) => Ok(false),
            deleted => deleted,
        }
    }

    /// Adds a filter to the qdisc or class `parent` of a link.
    pub fn add_filter(
        &self,
        index: u32,
        parent: TrafficHandle,
        filter: &RedirectFilter,
    ) -> NetlinkResult<()> {
        let header = TrafficHeader::of_filter(index, parent, filter.priority, ALL_PROTOCOLS);
        let mut request = header.to_request(RTM_NEWTFILTER);
        request
            .body
            .put_text(TCA_KIND, U32)
            .put_nested(TCA_OPTIONS, |options| filter.write_options(options));
        let (flags, op) = (NLM_F_CREATE | NLM_F_EXCL, "add a filter to");
        let added = self.socket.request_change(&request, flags, op, &self.link_label(index));
        added.map_err(|error| match error.errno() {
            Some(Errno::ENOENT | Errno::EOPNOTSUPP) => error.with_remedy(
                "load the kernel modules \"cls_u32\" and \"act_mirred\" on the node".to_owned(),
            ),
            _ => error,
        })
    }

    /// The filters of the qdisc or class `parent` of a link; none if there is no such link.
    pub fn dump_filters(
        &self,
        index: u32,
        TrafficHandle(parent): TrafficHandle,
    ) -> NetlinkResult<Vec<TrafficFilterInfo>> {
        let request =
            TrafficHeader { index, parent, ..TrafficHeader::default() }.to_request(RTM_GETTFILTER);
        let op = "list the filters of";
        let found = self.socket.request_list(
            &request,
            op,
            &self.link_label(index),
            TrafficFilterInfo::parse_body,
        );
        unless_absent(found, Vec::new())
    }

    /// Deletes all filters of one priority for packets of all protocols, with their tables;
    /// `false` if there are none.
    pub fn delete_filters(
        &self,
        index: u32,
        parent: TrafficHandle,
        priority: u16,
    ) -> NetlinkResult<bool> {
        let header = TrafficHeader::of_filter(index, parent, priority, ALL_PROTOCOLS);
        let op = "delete the filters of";
        self.socket.request_deletion(
            &header.to_request(RTM_DELTFILTER),
            op,
            &self.link_label(index),
        )
    }

    /// Deletes a filter of the qdisc or class `parent` of a link; `false` if it is absent.
    pub fn delete_filter(
        &self,
        index: u32,
        parent: TrafficHandle,
        filter: &TrafficFilterInfo,
    ) -> NetlinkResult<bool> {
        let mut header = TrafficHeader::of_filter(index, parent, filter.priority, filter.protocol);
        header.handle = filter.handle;
        let mut request = header.to_request(RTM_DELTFILTER);
        request.body.put_text(TCA_KIND, &filter.kind);
        self.socket.request_deletion(&request, "delete a filter of", &self.link_label(index))
    }
}
