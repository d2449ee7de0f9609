//! Waiting for events of the kernel. Each function checks the condition first; only if it does not hold
//! a socket of its own joins a multicast group, and the condition is checked again after events.

use std::net::Ipv6Addr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use nix::libc::{
    RTM_DELADDR, RTM_DELLINK, RTM_DELROUTE, RTM_NEWLINK, RTM_NEWNETCONF, RTNLGRP_IPV4_IFADDR,
    RTNLGRP_IPV4_NETCONF, RTNLGRP_IPV4_ROUTE, RTNLGRP_IPV6_IFADDR, RTNLGRP_IPV6_NETCONF,
    RTNLGRP_IPV6_ROUTE, RTNLGRP_LINK,
};
use rtnetlink::sys::protocols::NETLINK_ROUTE;

use super::attribute::word;
use super::error::{Error, Failure, Result};
use super::link::{Link, OperState};
use super::request::Message;
use super::route::RouteFilter;
use super::socket::Socket;
use super::{Addr, Family, Netlink};

/// How a wait for a link ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Waited {
    /// The condition holds.
    Reached(Link),
    /// Timeout; the link's last known state.
    TimedOut(Link),
}

/// Receives events of losses in a namespace: links deleted or changed, addresses and routes deleted,
/// parameters such as forwarding changed.
#[derive(Debug)]
pub struct Changes(Socket);

impl Changes {
    /// Receives the events of the calling thread's namespace from now on.
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
        Socket::listen(NETLINK_ROUTE, &groups).map(Changes)
    }

    /// Discards the queued changes; `true` if one of them was a loss, or if some did not fit in the
    /// receive buffer.
    pub fn heard(&self) -> Result<bool> {
        let losses = [RTM_NEWLINK, RTM_DELLINK, RTM_DELADDR, RTM_DELROUTE, RTM_NEWNETCONF];
        let heard = self.0.heard(&|event| losses.contains(&event.kind));
        heard.map_err(|f| f.context("watch", &"links and routes"))
    }
}

impl AsFd for Changes {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A multicast group and the link of interest.
#[derive(Clone, Copy)]
struct Topic {
    group: u32,
    index: u32,
}

impl Topic {
    /// Whether an event requires another look.
    fn concerns(self, event: &Message) -> bool {
        self.group == RTNLGRP_IPV6_ROUTE
            // ifinfomsg and ifaddrmsg have the index of the link at the same offset.
            || word(&event.body, 4) == Some(self.index)
    }
}

impl Netlink {
    /// Waits until `done` returns true for a link, at most `limit`.
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

    /// Waits until no IPv6 address of a link is tentative. Fails after `limit`, unless the link is not
    /// up, where detection cannot end.
    pub fn settle_addrs(&self, index: u32, limit: Duration) -> Result<()> {
        let topic = Topic { group: RTNLGRP_IPV6_IFADDR, index };
        if self.watch(topic, limit, || self.addrs_settled(index))? {
            return Ok(());
        }
        let link = self.require_link_by_index(index)?;
        if link.oper_state == OperState::Up {
            return Err(Error::Dad(format!(
                "link {} still has tentative addresses after {} seconds",
                link.name,
                limit.as_secs()
            )));
        }
        Ok(())
    }

    /// Waits until packets to these IPv6 addresses of this namespace are delivered; `false` after
    /// `limit`. Without duplicate address detection an address is usable at once, but the kernel adds
    /// the local route in a work queue.
    pub fn settle_local(&self, addrs: &[Ipv6Addr], limit: Duration) -> Result<bool> {
        let topic = Topic { group: RTNLGRP_IPV6_ROUTE, index: 0 };
        self.watch(topic, limit, || Ok(addrs.iter().all(|addr| self.is_local((*addr).into()))))
    }

    /// Waits until there are routes to all of `wanted` among the routes that match `filter`; `false`
    /// after `limit`.
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
            let addr = failed.net.addr();
            return Err(Error::Dad(format!("link {link} has address {addr} in DADFAILED state")));
        }
        Ok(!addrs.iter().any(Addr::is_tentative))
    }

    /// A socket for the events of a multicast group of this namespace.
    pub(super) fn listen(&self, group: u32) -> Result<Socket> {
        let listen = || Socket::listen(NETLINK_ROUTE, &[group]);
        self.elsewhere.as_ref().map_or_else(listen, |ns| ns.run(listen)?)
    }

    /// Calls `look` now and after events of the topic until it returns true; `false` after `limit`.
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
        let events = self.listen(topic.group)?;
        while !look()? {
            loop {
                let left = deadline.saturating_duration_since(Instant::now());
                let failed = |f: Failure| f.context("watch", &self.label(topic.index));
                // The time is checked here as well, because events may arrive without a pause.
                if left.is_zero() || !events.wait(left).map_err(failed)? {
                    return Ok(false);
                }
                if events.heard(&|event| topic.concerns(event)).map_err(failed)? {
                    break;
                }
            }
        }
        Ok(true)
    }
}
