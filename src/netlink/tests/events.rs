//! Waiting for events.

use std::cell::Cell;
use std::thread;
use std::time::Duration;

use super::{net, sandbox, veths, wire};
use crate::netlink::{
    DuplicateDetection, Link, LinkAddress, LinkChange, Netlink, NetlinkError, NewLinkAddress,
    OnOffSetting, OperationalState, WaitOutcome,
};
use crate::netns::Netns;
use crate::sysctl;

/// Longer than any step on a busy machine, so that an event ends a wait, and not this timeout.
const LONG: Duration = Duration::from_secs(600);

/// A wait does not check the condition after the timeout, so an event reported the change.
#[test]
fn an_event_ends_the_wait() {
    let netlink = sandbox();
    let (veth, peer) = veths(&netlink);
    netlink.change_link(veth.index, LinkChange::new().set_up()).unwrap();
    let here = Netns::open_current().unwrap();
    let looks = Cell::new(0);
    let waited = thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(30));
            let other = Netlink::open_in(&here).unwrap();
            other.change_link(peer.index, LinkChange::new().set_up()).unwrap();
        });
        let up = |link: &Link| {
            looks.set(looks.get() + 1);
            link.oper_state == OperationalState::Up
        };
        netlink.wait_for_link(veth.index, LONG, up).unwrap()
    });
    assert!(matches!(waited, WaitOutcome::Reached(link) if link.name == "veth"));
    // Checked before the wait, after joining the group, and after each of a few events; not
    // periodically.
    assert!(looks.get() < 10, "{looks:?}");
}

#[test]
fn a_wait_is_for_events_of_the_sockets_namespace() {
    let _here = sandbox();
    let other = Netns::create_unnamed().unwrap();
    let there = Netlink::open_in(&other).unwrap();
    let (veth, _) = veths(&there);
    let waited = thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(30));
            let change = LinkChange::new().set_mtu(1234);
            Netlink::open_in(&other).unwrap().change_link(veth.index, change).unwrap();
        });
        there.wait_for_link(veth.index, LONG, |link| link.mtu == 1234).unwrap()
    });
    assert!(matches!(waited, WaitOutcome::Reached(_)));
}

#[test]
fn a_reached_condition_is_checked_once_and_others_time_out() {
    let netlink = sandbox();
    let looks = Cell::new(0);
    let is_lo = |link: &Link| {
        looks.set(looks.get() + 1);
        link.name == "lo"
    };
    assert!(matches!(netlink.wait_for_link(1, LONG, is_lo).unwrap(), WaitOutcome::Reached(_)));
    assert_eq!(looks.get(), 1);
    let vain = netlink.wait_for_link(1, Duration::from_millis(50), |link| link.up).unwrap();
    assert!(matches!(vain, WaitOutcome::TimedOut(link) if link.name == "lo"));
    assert!(netlink.wait_for_link(99, LONG, |_| true).unwrap_err().is_not_found());
}

#[test]
fn lost_events_cause_another_check() {
    let netlink = sandbox();
    let (veth, peer) = wire(&netlink);
    let other = Netlink::open().unwrap();
    // The second check happens after joining the group. It causes more events than fit in the
    // receive buffer, so that the awaited event is lost.
    let looks = Cell::new(0);
    let look = |link: &Link| {
        looks.set(looks.get() + 1);
        if looks.get() == 2 {
            for switch in [OnOffSetting::On, OnOffSetting::Off].iter().cycle().take(2000) {
                other.change_link(peer.index, LinkChange::new().set_allmulti(*switch)).unwrap();
            }
            other.change_link(veth.index, LinkChange::new().set_mtu(1234)).unwrap();
        }
        link.mtu == 1234
    };
    let waited = netlink.wait_for_link(veth.index, LONG, look).unwrap();
    assert!(matches!(waited, WaitOutcome::Reached(_)));
    assert_eq!(netlink.require_link("lo").unwrap().index, 1);
}

#[test]
fn leftover_events_are_ignored() {
    let netlink = sandbox();
    let (_, peer) = wire(&netlink);
    let other = Netlink::open().unwrap();
    let looks = Cell::new(0);
    let look = |_: &Link| {
        looks.set(looks.get() + 1);
        for switch in [OnOffSetting::On, OnOffSetting::Off].iter().cycle().take(2000) {
            other.change_link(peer.index, LinkChange::new().set_allmulti(*switch)).unwrap();
        }
        looks.get() == 2
    };
    netlink.wait_for_link(1, LONG, look).unwrap();
    netlink.change_link(peer.index, LinkChange::new().set_mtu(1234)).unwrap();
    assert_eq!(netlink.require_link("peer").unwrap().mtu, 1234);
}

#[test]
fn settling_waits_for_detection_to_end() {
    let netlink = sandbox();
    let (veth, _) = wire(&netlink);
    netlink.add_address(veth.index, &NewLinkAddress::new(net("fd00::1/64"))).unwrap();
    let tentative =
        || netlink.dump_addresses(veth.index).unwrap().iter().any(LinkAddress::is_tentative);
    assert!(tentative());
    netlink.wait_for_addresses(veth.index, LONG).unwrap();
    assert!(!tentative());
}

#[test]
fn settling_times_out() {
    let netlink = sandbox();
    let (veth, peer) = wire(&netlink);
    netlink.add_address(veth.index, &NewLinkAddress::new(net("fd00::1/64"))).unwrap();
    let error = netlink.wait_for_addresses(veth.index, Duration::from_millis(20)).unwrap_err();
    let text = "link veth still has tentative addresses after 0 seconds";
    assert_eq!(error.to_string(), text);
    // Without carrier, detection cannot end; that is not an error.
    netlink.change_link(peer.index, LinkChange::new().set_down()).unwrap();
    netlink.add_address(veth.index, &NewLinkAddress::new(net("fd00::2/64"))).unwrap();
    netlink.wait_for_addresses(veth.index, Duration::from_millis(20)).unwrap();
}

#[test]
fn a_duplicate_address_is_an_error() {
    let netlink = sandbox();
    // Without link-local addresses, whose detection would take time.
    for name in ["default", "all"] {
        sysctl::write_value(&format!("net/ipv6/conf/{name}/addr_gen_mode"), "1").unwrap();
    }
    let (veth, peer) = wire(&netlink);
    let addr = NewLinkAddress::new(net("fd00::1/64"));
    netlink
        .add_address(peer.index, &NewLinkAddress { dad: DuplicateDetection::Off, ..addr })
        .unwrap();
    netlink.add_address(veth.index, &addr).unwrap();
    let error = netlink.wait_for_addresses(veth.index, LONG).unwrap_err();
    assert!(matches!(error, NetlinkError::Dad(_)));
    assert_eq!(error.to_string(), "another host on the link of \"veth\" uses the address fd00::1");
}
