//! Waits for events of the kernel. Each function checks its condition first. Only if the condition
//! does not hold, the function opens a socket, joins a multicast group, and checks the condition
//! again after events.

use std::net::Ipv6Addr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use nix::libc::{
    RTM_DELADDR, RTM_DELLINK, RTM_DELQDISC, RTM_DELROUTE, RTM_DELTFILTER, RTM_NEWLINK,
    RTM_NEWNETCONF, RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV4_NETCONF, RTNLGRP_IPV4_ROUTE,
    RTNLGRP_IPV6_IFADDR, RTNLGRP_IPV6_NETCONF, RTNLGRP_IPV6_ROUTE, RTNLGRP_LINK, RTNLGRP_TC,
};
use rtnetlink::sys::protocols::NETLINK_ROUTE;

use super::attribute::read_u32_at;
use super::error::{NetlinkError, NetlinkResult, RequestFailure};
use super::link::{Link, OperationalState};
use super::request::KernelMessage;
use super::route::RouteFilter;
use super::socket::NetlinkSocket;
use super::{IpFamily, LinkAddress, Netlink};

/// How a wait for a link ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitOutcome {
    /// The condition holds.
    Reached(Link),
    /// The condition does not hold; the link as it was when last checked.
    TimedOut(Link),
}

/// Receives events after which something may be missing in a network namespace: links deleted or
/// changed, addresses, routes and filters of traffic control deleted, parameters such as forwarding
/// changed.
#[derive(Debug)]
pub struct LossEvents(NetlinkSocket);

impl LossEvents {
    /// Receives the events of the calling thread's namespace from now on.
    pub fn listen_for_losses() -> NetlinkResult<LossEvents> {
        let groups = [
            RTNLGRP_LINK,
            RTNLGRP_IPV4_IFADDR,
            RTNLGRP_IPV6_IFADDR,
            RTNLGRP_IPV4_ROUTE,
            RTNLGRP_IPV6_ROUTE,
            RTNLGRP_IPV4_NETCONF,
            RTNLGRP_IPV6_NETCONF,
            RTNLGRP_TC,
        ];
        NetlinkSocket::listen_to_groups(NETLINK_ROUTE, &groups).map(LossEvents)
    }

    /// Discards the queued changes; `true` if one of them was a loss, or if some did not fit in the
    /// receive buffer.
    pub fn drain_events(&self) -> NetlinkResult<bool> {
        let losses = [
            RTM_NEWLINK,
            RTM_DELLINK,
            RTM_DELADDR,
            RTM_DELROUTE,
            RTM_NEWNETCONF,
            RTM_DELQDISC,
            RTM_DELTFILTER,
        ];
        let has_loss = self.0.drain_events(&|event| losses.contains(&event.kind));
        has_loss.map_err(|f| f.into_error("watch", &"links and routes"))
    }
}

impl AsFd for LossEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A multicast group and the link of interest.
#[derive(Clone, Copy)]
struct EventTopic {
    group: u32,
    index: u32,
}

impl EventTopic {
    /// Whether the condition must be checked again after an event.
    fn matches_event(self, event: &KernelMessage) -> bool {
        self.group == RTNLGRP_IPV6_ROUTE
            // ifinfomsg and ifaddrmsg have the index of the link at the same offset.
            || read_u32_at(&event.body, 4) == Some(self.index)
    }
}

impl Netlink {
    /// Waits until `done` returns true for a link, at most `limit`.
    pub fn wait_for_link(
        &self,
        index: u32,
        limit: Duration,
        done: impl Fn(&Link) -> bool,
    ) -> NetlinkResult<WaitOutcome> {
        let mut last = None;
        let reached =
            self.wait_for_topic(EventTopic { group: RTNLGRP_LINK, index }, limit, || {
                let link = self.require_link_by_index(index)?;
                let reached = done(&link);
                last = Some(link);
                Ok(reached)
            })?;
        match last {
            Some(link) if reached => Ok(WaitOutcome::Reached(link)),
            Some(link) => Ok(WaitOutcome::TimedOut(link)),
            None => Err(NetlinkError::NoLink(index.to_string())),
        }
    }

    /// Waits until no IPv6 address of a link is tentative. Fails after `limit` if the link is up;
    /// otherwise detection cannot end, and there is no error.
    pub fn wait_for_addresses(&self, index: u32, limit: Duration) -> NetlinkResult<()> {
        let topic = EventTopic { group: RTNLGRP_IPV6_IFADDR, index };
        if self.wait_for_topic(topic, limit, || self.are_addresses_settled(index))? {
            return Ok(());
        }
        let link = self.require_link_by_index(index)?;
        if link.oper_state == OperationalState::Up {
            return Err(NetlinkError::Dad(format!(
                "link {} still has tentative addresses after {} seconds",
                link.name,
                limit.as_secs()
            )));
        }
        Ok(())
    }

    /// Waits until packets to these IPv6 addresses of this namespace are delivered; `false` after
    /// `limit`. Without duplicate address detection an address is usable at once, but the kernel
    /// adds the local route in a work queue.
    pub fn wait_for_local_addresses(
        &self,
        addrs: &[Ipv6Addr],
        limit: Duration,
    ) -> NetlinkResult<bool> {
        let topic = EventTopic { group: RTNLGRP_IPV6_ROUTE, index: 0 };
        self.wait_for_topic(topic, limit, || {
            Ok(addrs.iter().all(|addr| self.is_local_address((*addr).into())))
        })
    }

    /// Waits until the routes that match `filter` include a route to each of `wanted`; `false`
    /// after `limit`.
    pub fn wait_for_routes(
        &self,
        filter: &RouteFilter,
        wanted: &[IpNet],
        limit: Duration,
    ) -> NetlinkResult<bool> {
        self.wait_for_topic(EventTopic { group: RTNLGRP_IPV6_ROUTE, index: 0 }, limit, || {
            let routes = self.dump_routes(filter)?;
            Ok(wanted.iter().all(|dst| routes.iter().any(|route| route.dst == *dst)))
        })
    }

    fn are_addresses_settled(&self, index: u32) -> NetlinkResult<bool> {
        let addrs = self.dump_family_addresses(index, Some(IpFamily::V6))?;
        if let Some(failed) = addrs.iter().find(|addr| addr.is_dad_failed()) {
            let link = self.require_link_by_index(index)?.name;
            let addr = failed.net.addr();
            return Err(NetlinkError::Dad(format!(
                "another host on the link of \"{link}\" uses the address {addr}"
            )));
        }
        Ok(!addrs.iter().any(LinkAddress::is_tentative))
    }

    /// A socket for the events of a multicast group of this namespace.
    pub(super) fn listen_to_group(&self, group: u32) -> NetlinkResult<NetlinkSocket> {
        let listen = || NetlinkSocket::listen_to_groups(NETLINK_ROUTE, &[group]);
        self.elsewhere.as_ref().map_or_else(listen, |netns| netns.run_inside(listen)?)
    }

    /// Calls `look` now and after events of the topic until it returns true; `false` after `limit`.
    fn wait_for_topic(
        &self,
        topic: EventTopic,
        limit: Duration,
        mut look: impl FnMut() -> NetlinkResult<bool>,
    ) -> NetlinkResult<bool> {
        let deadline = Instant::now() + limit;
        if look()? {
            return Ok(true);
        }
        let events = self.listen_to_group(topic.group)?;
        while !look()? {
            loop {
                let left = deadline.saturating_duration_since(Instant::now());
                let failed =
                    |f: RequestFailure| f.into_error("watch", &self.link_label(topic.index));
                // Also checked before each wait, because events may arrive without a pause.
                if left.is_zero() || !events.wait_for_datagram(left).map_err(failed)? {
                    return Ok(false);
                }
                if events.drain_events(&|event| topic.matches_event(event)).map_err(failed)? {
                    break;
                }
            }
        }
        Ok(true)
    }
}
