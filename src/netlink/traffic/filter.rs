//! Filters: which packets, and where to.

use nix::errno::Errno;
use nix::libc::{ETH_P_ALL, RTM_DELTFILTER, RTM_GETTFILTER, RTM_NEWTFILTER};
use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_EXCL};

use super::super::Netlink;
use super::super::attribute::Attributes;
use super::super::error::Result;
use super::super::link::unless_absent;
use super::super::packet::Attr;
use super::{Handle, Header, TCA_KIND, TCA_OPTIONS};

const U32: &str = "u32";
const TCA_U32_CLASSID: u16 = 1;
const TCA_U32_SEL: u16 = 5;
const TCA_U32_ACT: u16 = 7;
/// `TC_U32_TERMINAL`: a match is the end of the search.
const TERMINAL: u8 = 1;

const TCA_ACT_KIND: u16 = 1;
const TCA_ACT_OPTIONS: u16 = 2;
const MIRRED: &str = "mirred";
const TCA_MIRRED_PARMS: u16 = 2;
/// `TC_ACT_STOLEN`: the packet is gone from here.
const STOLEN: u32 = 4;
/// `TCA_EGRESS_REDIR`: it leaves by the other link.
const EGRESS_REDIRECT: u32 = 1;

/// Which packets a filter is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    /// Every packet of every protocol.
    All,
}

/// A filter of the kind `u32`, which redirects to another link what it matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Filters are asked in the order of these, beginning with 1.
    pub priority: u16,
    /// The packets that the filter is for.
    pub packets: Match,
    /// The class that it notes on the packet.
    pub class: Handle,
    /// The index of the link by which the packet leaves.
    pub redirect: u32,
}

/// A filter that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilterInfo {
    /// Its kind: `u32`, `bpf`, `flower`.
    pub kind: String,
    /// Its place among the others.
    pub priority: u16,
    /// Its number among the filters of its priority.
    pub handle: u32,
    /// Of which protocol packets must be, as on Ethernet, in network byte order.
    protocol: u16,
    /// Of a filter `u32`: whether it selects packets; if not, it is a table of those that do.
    pub selects: bool,
    /// Of a filter `u32`: whether it matches every packet of that protocol.
    pub matches_all: bool,
    /// The index of the link that it redirects to; 0 if that link is gone.
    pub redirect: Option<u32>,
}

impl FilterInfo {
    /// Whether this is what [`Netlink::add_filter`] makes of `filter`, whatever the class.
    pub fn is(&self, filter: &Filter) -> bool {
        self.is_redirect_of_all(filter.priority) && self.redirect == Some(filter.redirect)
    }

    /// Whether it redirects every packet, wherever to.
    pub fn is_redirect_of_all(&self, priority: u16) -> bool {
        self.kind == U32
            && self.priority == priority
            && self.protocol == all_protocols()
            && self.matches_all
            && self.redirect.is_some()
    }
}

/// `ETH_P_ALL` as filters have it.
fn all_protocols() -> u16 {
    u16::try_from(ETH_P_ALL).unwrap_or_default().to_be()
}

fn info(priority: u16, protocol: u16) -> u32 {
    u32::from(priority) << 16 | u32::from(protocol)
}

impl Filter {
    fn attributes(&self) -> Attributes {
        let Match::All = self.packets;
        let mut list = Attributes::new();
        list.text(TCA_KIND, U32).nest(TCA_OPTIONS, |options| {
            options.u32(TCA_U32_CLASSID, self.class.0);
            // `struct tc_u32_sel` and one `tc_u32_key` that is zero: any word may be anything.
            let mut selector = vec![0; 32];
            (selector[0], selector[2]) = (TERMINAL, 1);
            options.bytes(TCA_U32_SEL, &selector);
            options.nest(TCA_U32_ACT, |actions| {
                actions.nest(1, |action| write_redirect(action, self.redirect));
            });
        });
        list
    }
}

fn write_redirect(action: &mut Attributes, index: u32) {
    action.text(TCA_ACT_KIND, MIRRED).nest(TCA_ACT_OPTIONS, |options| {
        // `struct tc_mirred`: index, capabilities, what then, two counters, how, where to.
        let words = [0, 0, STOLEN, 0, 0, EGRESS_REDIRECT, index];
        let parms: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        options.bytes(TCA_MIRRED_PARMS, &parms);
    });
}

impl FilterInfo {
    pub(in crate::netlink) fn read(body: &[u8]) -> Option<FilterInfo> {
        let (header, attributes) = Header::read(body)?;
        let mut filter = FilterInfo {
            kind: String::new(),
            priority: u16::try_from(header.info >> 16).unwrap_or_default(),
            handle: header.handle,
            protocol: u16::try_from(header.info & 0xffff).unwrap_or_default(),
            selects: false,
            matches_all: false,
            redirect: None,
        };
        for attr in attributes {
            match attr.kind {
                TCA_KIND => filter.kind = attr.text(),
                TCA_OPTIONS if filter.kind == U32 => filter.read_u32(attr),
                _ => {}
            }
        }
        Some(filter)
    }

    fn read_u32(&mut self, options: Attr<'_>) {
        for attr in options.nested() {
            match attr.kind {
                // Behind the selector are its keys, each with mask and value in front.
                TCA_U32_SEL => {
                    let keys = attr.value.get(16..).unwrap_or_default();
                    self.selects = true;
                    self.matches_all = keys.iter().all(|byte| *byte == 0);
                }
                TCA_U32_ACT => self.redirect = attr.nested().find_map(redirect_of),
                _ => {}
            }
        }
    }
}

/// Where an action redirects to.
fn redirect_of(action: Attr<'_>) -> Option<u32> {
    let find = |kind| action.nested().find(|attr| attr.kind == kind);
    find(TCA_ACT_KIND).filter(|kind| kind.text() == MIRRED)?;
    let parms = find(TCA_ACT_OPTIONS)?.nested().find(|attr| attr.kind == TCA_MIRRED_PARMS)?;
    let word = |at: usize| parms.value.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes);
    word(20).filter(|how| *how == EGRESS_REDIRECT)?;
    word(24)
}

impl Netlink {
    /// Adds a filter to the qdisc or class `parent` of a link.
    pub fn add_filter(&self, index: u32, parent: Handle, filter: &Filter) -> Result<()> {
        let info = info(filter.priority, all_protocols());
        let header = Header { index, handle: 0, parent: parent.0, info };
        let message = header.message(RTM_NEWTFILTER, filter.attributes());
        self.ack(message, NLM_F_CREATE | NLM_F_EXCL).map_err(|failure| {
            let lacks_driver = matches!(failure.errno, Errno::ENOENT | Errno::EOPNOTSUPP);
            let error = failure.doing("add a filter to", || self.label(index));
            if lacks_driver {
                let modules = "load the kernel modules \"cls_u32\" and \"act_mirred\" on the node";
                return error.with_remedy(modules.to_owned());
            }
            error
        })
    }

    /// The filters of the qdisc or class `parent` of a link.
    pub fn dump_filters(&self, index: u32, parent: Handle) -> Result<Vec<FilterInfo>> {
        let header = Header { index, parent: parent.0, ..Header::default() };
        let message = header.message(RTM_GETTFILTER, Attributes::new());
        match self.dump(&message) {
            Ok(bodies) => Ok(bodies.iter().filter_map(|body| FilterInfo::read(body)).collect()),
            Err(failure) if matches!(failure.errno, Errno::ENODEV | Errno::ENOENT) => {
                Ok(Vec::new())
            }
            Err(failure) => Err(failure.doing("list the filters of", || self.label(index))),
        }
    }

    /// Deletes all filters of one priority for packets of every protocol, with their tables;
    /// `false` if there are none.
    pub fn del_filters(&self, index: u32, parent: Handle, priority: u16) -> Result<bool> {
        let info = info(priority, all_protocols());
        let header = Header { index, handle: 0, parent: parent.0, info };
        let deleted = self.ack(header.message(RTM_DELTFILTER, Attributes::new()), 0);
        unless_absent(deleted.map_err(|f| f.doing("delete the filters of", || self.label(index))))
    }

    /// Deletes a filter of the qdisc or class `parent` of a link; `false` if it is gone.
    pub fn del_filter(&self, index: u32, parent: Handle, filter: &FilterInfo) -> Result<bool> {
        let info = info(filter.priority, filter.protocol);
        let header = Header { index, handle: filter.handle, parent: parent.0, info };
        let mut kind = Attributes::new();
        kind.text(TCA_KIND, &filter.kind);
        let deleted = self.ack(header.message(RTM_DELTFILTER, kind), 0);
        unless_absent(deleted.map_err(|f| f.doing("delete a filter of", || self.label(index))))
    }
}
