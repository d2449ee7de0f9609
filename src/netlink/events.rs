//! Waiting for the kernel: each function looks first, and only if there is something to wait for
//! joins a multicast group, looks again, and sleeps until the kernel tells of a change.

use std::net::Ipv6Addr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use nix::errno::Errno;
use nix::libc::{
    RTM_DELADDR, RTM_DELLINK, RTM_DELROUTE, RTM_NEWLINK, RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV4_NETCONF,
    RTNLGRP_IPV4_ROUTE, RTNLGRP_IPV6_IFADDR, RTNLGRP_IPV6_NETCONF, RTNLGRP_IPV6_ROUTE,
    RTNLGRP_LINK,
};
use rtnetlink::packet_core::NetlinkPayload;

use super::Netlink;
use super::error::{Error, Result};
use super::family::Family;
use super::link::{Link, OperState};
use super::packet::Message;
use super::route::RouteFilter;

/// How a wait for a link ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Waited {
    /// The link is as wanted.
    Reached(Link),
    /// Time is up; the link as it was last seen.
    TimedOut(Link),
}

/// `RTM_NEWNETCONF`, of which libc has none.
const RTM_NEWNETCONF: u16 = 80;

/// Hears of what a namespace loses: links that go or change, addresses and routes that go, and
/// parameters such as forwarding.
#[derive(Debug)]
pub struct Changes(Netlink);

impl Changes {
    /// In the calling thread's namespace, from now on.
    pub fn listen() -> Result<Changes> {
        let groups = [
            RTNLGRP_LINK,
            RTNLGRP_IPV4_IFADDR,
            RTNLGRP_IPV6_IFADDR,
            RTNLGRP_IPV4_ROUTE,
            RTNLGRP_IPV6_ROUTE,
            RTNLGRP_IPV4_NETCONF,
            RTNLGRP_IPV6_NETCONF,
        ];
        let netlink = Netlink::open()?;
        // Its first request gives a socket its port. One without is sent no events.
        netlink.link_by_index(1)?;
        let joined = groups.into_iter().try_for_each(|group| netlink.socket.join(group));
        joined.map_err(|e| e.doing("watch", || "links and routes".to_owned()))?;
        Ok(Changes(netlink))
    }

    /// Drops the changes that have come; whether one was a loss. Changes that were not heard because too
    /// many came count as one.
    pub fn heard(&self) -> Result<bool> {
        let losses = [RTM_NEWLINK, RTM_DELLINK, RTM_DELADDR, RTM_DELROUTE, RTM_NEWNETCONF];
        let mut heard = false;
        loop {
            let event = self.0.socket.event(Instant::now());
            match event.map_err(|e| e.doing("watch", || "links and routes".to_owned()))? {
                None => return Ok(heard),
                Some(event) => {
                    let is_lost = matches!(event.payload, NetlinkPayload::Overrun(_));
                    heard |= is_lost || losses.contains(&event.header.message_type);
                }
            }
        }
    }
}

impl AsFd for Changes {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.socket.as_fd()
    }
}

/// A multicast group and the link that matters.
#[derive(Clone, Copy)]
struct Topic {
    group: u32,
    index: u32,
}

impl Topic {
    /// Whether it is worth looking again: after an event of the link, and after lost events.
    fn concerns(self, event: &Message) -> bool {
        match &event.payload {
            NetlinkPayload::InnerMessage(_) if self.group == RTNLGRP_IPV6_ROUTE => true,
            // ifinfomsg and ifaddrmsg have the index of the link at the same place.
            NetlinkPayload::InnerMessage(packet) => {
                packet.body.get(4..8) == Some(&self.index.to_ne_bytes()[..])
            }
            NetlinkPayload::Overrun(_) => true,
            _ => false,
        }
    }
}

impl Netlink {
    /// Waits until `done` holds for a link, at most `limit`.
    pub fn wait_link(
        &self,
        index: u32,
        limit: Duration,
        done: impl Fn(&Link) -> bool,
    ) -> Result<Waited> {
        let mut last = None;
        let reached = self.watch(Topic { group: RTNLGRP_LINK, index }, limit, || {
            let link = self.require_link_by_index(index)?;
            let reached = done(&link);
            last = Some(link);
            Ok(reached)
        })?;
        match last {
            Some(link) if reached => Ok(Waited::Reached(link)),
            Some(link) => Ok(Waited::TimedOut(link)),
            None => Err(Error::NoLink(index.to_string())),
        }
    }

    /// Waits until no IPv6 address of a link is tentative, at most `limit`. A link that is not up
    /// never gets that far, so for it the end of time is no error.
    pub fn settle_addrs(&self, index: u32, limit: Duration) -> Result<()> {
        let topic = Topic { group: RTNLGRP_IPV6_IFADDR, index };
        if self.watch(topic, limit, || self.addrs_settled(index))? {
            return Ok(());
        }
        let link = self.require_link_by_index(index)?;
        if link.oper_state == OperState::Up {
            return Err(Error::StillTentative { link: link.name, seconds: limit.as_secs() });
        }
        Ok(())
    }

    /// Waits until packets to these IPv6 addresses of this namespace are taken in, at most `limit`;
    /// whether they are. Without duplicate address detection an address is there at once, but its
    /// local route is left to the kernel's work queue.
    pub fn settle_local(&self, addrs: &[Ipv6Addr], limit: Duration) -> Result<bool> {
        let topic = Topic { group: RTNLGRP_IPV6_ROUTE, index: 0 };
        self.watch(topic, limit, || Ok(addrs.iter().all(|addr| self.is_local((*addr).into()))))
    }

    /// Waits until there are routes to all of `wanted` among those that `filter` admits, at most
    /// `limit`; whether there are.
    pub fn settle_routes(
        &self,
        filter: &RouteFilter,
        wanted: &[IpNet],
        limit: Duration,
    ) -> Result<bool> {
        self.watch(Topic { group: RTNLGRP_IPV6_ROUTE, index: 0 }, limit, || {
            let routes = self.dump_routes(filter)?;
            Ok(wanted.iter().all(|dst| routes.iter().any(|route| route.dst == *dst)))
        })
    }

    fn addrs_settled(&self, index: u32) -> Result<bool> {
        let addrs = self.dump_family(index, Some(Family::V6))?;
        if let Some(failed) = addrs.iter().find(|addr| addr.is_dad_failed()) {
            let link = self.require_link_by_index(index)?.name;
            return Err(Error::DadFailed { link, addr: failed.net.addr() });
        }
        Ok(!addrs.iter().any(super::Addr::is_tentative))
    }

    /// Whether `look` succeeds before `limit`; it is asked again after each event of the topic.
    fn watch(
        &self,
        topic: Topic,
        limit: Duration,
        mut look: impl FnMut() -> Result<bool>,
    ) -> Result<bool> {
        let deadline = Instant::now() + limit;
        if look()? {
            return Ok(true);
        }
        self.socket.join(topic.group).map_err(|e| e.doing("watch", || self.label(topic.index)))?;
        let reached = self.look_at_events(topic, deadline, &mut look);
        // Nothing reads the socket between two requests; events would fill its buffer.
        self.socket.leave(topic.group).map_err(|e| e.doing("watch", || self.label(topic.index)))?;
        reached
    }

    fn look_at_events(
        &self,
        topic: Topic,
        deadline: Instant,
        look: &mut impl FnMut() -> Result<bool>,
    ) -> Result<bool> {
        loop {
            match look() {
                // However many events come, time is up at some point.
                Ok(false) if Instant::now() >= deadline => return Ok(false),
                Ok(false) => {}
                // Events came faster than they were read, and the answer was lost with them.
                Err(Error::Unanswered { errno: Errno::ENOBUFS, .. })
                    if Instant::now() < deadline =>
                {
                    continue;
                }
                ended => return ended,
            }
            loop {
                let event = self.socket.event(deadline);
                match event.map_err(|e| e.doing("watch", || self.label(topic.index)))? {
                    None => return Ok(false),
                    Some(event) if topic.concerns(&event) => break,
                    Some(_) => {}
                }
            }
        }
    }
}
