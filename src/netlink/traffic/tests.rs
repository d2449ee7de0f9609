//! Qdiscs and filters in a private namespace, read back from the kernel.

use super::super::{LinkKind, Netlink, NewLink, VethPeer};
use super::*;
use crate::netns::isolate_test_thread;

const ONE: TrafficHandle = TrafficHandle::new(1, 0);
const FFFF: TrafficHandle = TrafficHandle::new(0xffff, 0);
const SLOW: TokenBucket = TokenBucket { rate: 125_000, buffer: 1_000_000, limit: 40_000 };

/// A veth pair; returns the index of one end.
fn pair(netlink: &Netlink, name: &str) -> u32 {
    let peer = VethPeer::new(format!("{name}p"));
    let link = NewLink::new(name, LinkKind::Veth { peer }).set_up();
    netlink.add_and_read_link(&link).unwrap().index
}

fn host() -> (Netlink, u32) {
    isolate_test_thread();
    let netlink = Netlink::open().unwrap();
    let index = pair(&netlink, "v0");
    (netlink, index)
}

#[test]
fn handles_are_written_as_tc_does() {
    let texts =
        [TrafficHandle::new(1, 0), TrafficHandle::new(1, 0x30), TrafficHandle::new(0xffff, 0)];
    assert_eq!(texts.map(|handle| handle.to_string()), ["1:", "1:30", "ffff:"]);
}

#[test]
fn a_token_bucket_is_created_changed_read_and_deleted() {
    let (netlink, index) = host();
    assert_eq!(netlink.find_qdisc(index, QdiscHook::Root).unwrap(), None);
    let rates = [125_000, u64::from(u32::MAX) - 1, u64::from(u32::MAX), 12_500_000_000];
    for rate in rates {
        let tbf = Qdisc::Tbf(TokenBucket { rate, ..SLOW });
        netlink.replace_qdisc(index, QdiscHook::Root, ONE, &tbf).unwrap();
        let there = netlink.find_qdisc(index, QdiscHook::Root).unwrap().unwrap();
        assert_eq!(there, QdiscInfo { handle: ONE, qdisc: tbf }, "{rate}");
    }
    let error = netlink.add_qdisc(index, QdiscHook::Root, ONE, &Qdisc::Tbf(SLOW)).unwrap_err();
    assert!(error.is_exists(), "{error}");
    assert!(netlink.delete_qdisc(index, QdiscHook::Root).unwrap());
    assert!(!netlink.delete_qdisc(index, QdiscHook::Root).unwrap());
    assert_eq!(netlink.find_qdisc(index, QdiscHook::Root).unwrap(), None);
}

#[test]
fn errors_name_qdisc_and_link() {
    let (netlink, index) = host();
    let empty = Qdisc::Tbf(TokenBucket { buffer: 0, ..SLOW });
    let error = netlink.replace_qdisc(index, QdiscHook::Root, ONE, &empty).unwrap_err();
    assert_eq!(error.to_string(), "add qdisc tbf to \"v0\": invalid argument");
    let other = Qdisc::Other("nothing".to_owned());
    let error = netlink.add_qdisc(index, QdiscHook::Root, ONE, &other).unwrap_err();
    let error = cni::error::Error::from(error);
    assert!(error.details().contains("\"sch_nothing\""), "{error}");
}

#[test]
fn a_redirect_is_added_once_found_and_deleted() {
    let (netlink, index) = host();
    let target = pair(&netlink, "v1");
    assert_eq!(netlink.find_qdisc(index, QdiscHook::Ingress).unwrap(), None);
    assert!(!netlink.delete_qdisc(index, QdiscHook::Ingress).unwrap());
    assert_eq!(netlink.dump_filters(index, FFFF).unwrap(), []);
    netlink.add_qdisc(index, QdiscHook::Ingress, FFFF, &Qdisc::Ingress).unwrap();
    let there = netlink.find_qdisc(index, QdiscHook::Ingress).unwrap().unwrap();
    assert_eq!(there, QdiscInfo { handle: FFFF, qdisc: Qdisc::Ingress });
    assert!(
        netlink
            .add_qdisc(index, QdiscHook::Ingress, FFFF, &Qdisc::Ingress)
            .unwrap_err()
            .is_exists()
    );

    let class = TrafficHandle::new(1, 1);
    let filter = RedirectFilter { priority: 1, class, redirect: target };
    netlink.add_filter(index, FFFF, &filter).unwrap();
    let found = netlink.dump_filters(index, FFFF).unwrap();
    let ours: Vec<_> = found.iter().filter(|f| f.redirect_of_all() == Some(target)).collect();
    assert_eq!(ours.len(), 1, "{found:?}");
    assert_eq!(ours[0].handle, 0x8000_0800);
    let elsewhere = RedirectFilter { redirect: index, ..filter };

    // After the deletion of its target, the redirect remains with index 0.
    netlink.delete_link("v1").unwrap();
    let found = netlink.dump_filters(index, FFFF).unwrap();
    let ours = found.iter().find(|f| f.redirect_of_all() == Some(0)).unwrap();
    assert!(netlink.delete_filter(index, FFFF, ours).unwrap());
    assert!(!netlink.delete_filter(index, FFFF, ours).unwrap());
    assert_eq!(netlink.dump_filters(index, FFFF).unwrap(), []);
    netlink.add_filter(index, FFFF, &elsewhere).unwrap();
    let found = netlink.dump_filters(index, FFFF).unwrap();
    assert_eq!(found.iter().filter(|f| f.selects).count(), 1, "{found:?}");
    assert!(netlink.delete_filters(index, FFFF, 1).unwrap());
    assert!(!netlink.delete_filters(index, FFFF, 1).unwrap());
    assert_eq!(netlink.dump_filters(index, FFFF).unwrap(), []);
    assert!(netlink.delete_qdisc(index, QdiscHook::Ingress).unwrap());
    assert!(!netlink.delete_qdisc(index, QdiscHook::Ingress).unwrap());
}

#[test]
fn clsact_has_filters_for_incoming_packets() {
    let (netlink, index) = host();
    let target = pair(&netlink, "v1");
    netlink.add_qdisc(index, QdiscHook::Ingress, FFFF, &Qdisc::Clsact).unwrap();
    let there = netlink.find_qdisc(index, QdiscHook::Ingress).unwrap().unwrap();
    assert_eq!(there.qdisc, Qdisc::Clsact);
    let ingress = TrafficHandle::new(0xffff, 0xfff2);
    let class = TrafficHandle::new(1, 1);
    let filter = RedirectFilter { priority: 1, class, redirect: target };
    netlink.add_filter(index, ingress, &filter).unwrap();
    assert!(
        netlink
            .dump_filters(index, ingress)
            .unwrap()
            .iter()
            .any(|f| f.redirect_of_all() == Some(target))
    );
}

#[test]
fn deleted_links_have_no_qdiscs_and_no_filters() {
    isolate_test_thread();
    let netlink = Netlink::open().unwrap();
    assert_eq!(netlink.dump_filters(77, FFFF).unwrap(), []);
    assert!(!netlink.delete_qdisc(77, QdiscHook::Root).unwrap());
    assert!(netlink.find_qdisc(77, QdiscHook::Root).is_err());
}
