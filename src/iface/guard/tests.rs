//! Guards beside redirects, with simple programs and real frames.

use super::*;
use crate::iface::redirect;
use crate::netlink::{LinkKind, NewLink, VethPeer};
use crate::netns::isolate_test_thread;

/// `BPF_RET | BPF_K`.
const RETURN: u16 = 6;

/// A filter whose program returns a value for all frames, after one that passes them.
fn always(value: u32) -> ProgramFilter {
    let [first, program] =
        [TC_ACT_UNSPEC, value].map(|k| vec![ClassicInstruction { code: RETURN, jt: 0, jf: 0, k }]);
    ProgramFilter { first, program, redirect: None }
}

const PASS: u32 = 0;
const DROP: u32 = 1;

fn find_guard(netlink: &Netlink, link: &Link) -> Result<Option<ProgramFilter>> {
    let found = find_place(netlink, link)?.program;
    let found = found.map(|filter| ProgramFilter { redirect: None, ..filter });
    Ok(found.filter(|filter| has_guard(netlink, link, filter, SINK).unwrap()))
}

/// A link whose peer sends frames.
fn rig() -> (Netlink, Link) {
    isolate_test_thread();
    let netlink = Netlink::open().unwrap();
    let end = netlink.add_and_read_link(&veth("host0")).unwrap();
    let peer = netlink.require_link("host0p").unwrap();
    netlink.change_link(peer.index, LinkChange::new().set_up()).unwrap();
    (netlink, end)
}

fn veth(name: &str) -> NewLink<'_> {
    NewLink::new(name, LinkKind::Veth { peer: VethPeer::new(format!("{name}p")) }).set_up()
}

fn ifb(netlink: &Netlink) -> Link {
    netlink.add_and_read_link(&NewLink::new("ifb9", LinkKind::Ifb).set_up()).unwrap()
}

fn priorities(netlink: &Netlink, link: &Link, parent: TrafficHandle) -> Vec<(String, u16)> {
    let mut found: Vec<_> = netlink.dump_filters(link.index, parent).unwrap();
    // The kernel also lists the classifiers, and the hash tables of u32.
    found.retain(|filter| filter.selects || (filter.kind == "bpf" && filter.handle != 0));
    let mut found: Vec<_> =
        found.into_iter().map(|filter| (filter.kind, filter.priority)).collect();
    // A guard has two programs.
    found.dedup();
    found
}

fn named(filters: &[(&str, u16)]) -> Vec<(String, u16)> {
    filters.iter().map(|(kind, priority)| ((*kind).to_owned(), *priority)).collect()
}

#[test]
fn a_guard_is_put_replaced_found_and_removed() {
    let (netlink, end) = rig();
    assert_eq!(find_guard(&netlink, &end).unwrap(), None);
    remove_guard(&netlink, &end).unwrap();
    for value in [DROP, PASS, DROP] {
        put_guard(&netlink, &end, always(value), SINK).unwrap();
        assert_eq!(find_guard(&netlink, &end).unwrap(), Some(always(value)));
        assert_eq!(priorities(&netlink, &end, redirect::INGRESS), named(&[("bpf", 1)]));
    }
    remove_guard(&netlink, &end).unwrap();
    assert_eq!(find_guard(&netlink, &end).unwrap(), None);
    assert_eq!(netlink.find_qdisc(end.index, QdiscHook::Ingress).unwrap(), None);
}

#[test]
fn the_sink_is_repaired() {
    let (netlink, end) = rig();
    let is_usable = || SINK.require_usable(&netlink);
    put_guard(&netlink, &end, always(DROP), SINK).unwrap();
    let port = netlink.require_link(SINK.port).unwrap();
    for damage in [
        || drop(Netlink::open().unwrap().delete_link(SINK.bridge)),
        || {
            let netlink = Netlink::open().unwrap();
            let port = netlink.require_link(SINK.port).unwrap();
            netlink.change_link(port.index, LinkChange::new().set_down()).unwrap();
        },
    ] {
        damage();
        assert_eq!(is_usable(), Ok(false), "no error, as the next ADD repairs it");
        assert!(!has_guard(&netlink, &end, &always(DROP), SINK).unwrap_or(false));
        put_guard(&netlink, &end, always(DROP), SINK).unwrap();
        assert_eq!(is_usable(), Ok(true));
        assert_eq!(netlink.require_link(SINK.port).unwrap().index, port.index, "no new port");
    }
}

#[test]
fn a_redirect_after_a_guard_has_the_next_priority() {
    let (netlink, end) = rig();
    let device = ifb(&netlink);
    put_guard(&netlink, &end, always(PASS), SINK).unwrap();
    redirect::add(&netlink, &end, &device).unwrap();
    put_guard(&netlink, &end, always(DROP), SINK).unwrap();
    assert_eq!(priorities(&netlink, &end, redirect::INGRESS), named(&[("bpf", 1), ("u32", 2)]));
    assert_eq!(find_guard(&netlink, &end).unwrap(), Some(always(DROP)));
    assert_eq!(redirect::find_targets(&netlink, &end).unwrap(), [device.index]);

    // A redirect to a link that is gone is replaced.
    netlink.delete_link("ifb9").unwrap();
    let device = ifb(&netlink);
    redirect::add(&netlink, &end, &device).unwrap();
    assert_eq!(priorities(&netlink, &end, redirect::INGRESS), named(&[("bpf", 1), ("u32", 2)]));

    // Each is removed without the other.
    redirect::remove(&netlink, &end, &[device.index]).unwrap();
    assert_eq!(find_guard(&netlink, &end).unwrap(), Some(always(DROP)));
    redirect::add(&netlink, &end, &device).unwrap();
    remove_guard(&netlink, &end).unwrap();
    assert_eq!(priorities(&netlink, &end, redirect::INGRESS), named(&[("u32", 2)]));
    redirect::remove(&netlink, &end, &[device.index]).unwrap();
    assert_eq!(netlink.find_qdisc(end.index, QdiscHook::Ingress).unwrap(), None);
}

#[test]
fn behind_a_redirect_the_guard_is_on_the_device() {
    let (netlink, end) = rig();
    let device = ifb(&netlink);
    redirect::add(&netlink, &end, &device).unwrap();
    assert_eq!(find_guard(&netlink, &end).unwrap(), None);
    for value in [PASS, DROP] {
        put_guard(&netlink, &end, always(value), SINK).unwrap();
        assert_eq!(find_guard(&netlink, &end).unwrap(), Some(always(value)));
    }
    assert_eq!(priorities(&netlink, &end, redirect::INGRESS), named(&[("u32", 1)]));
    assert_eq!(priorities(&netlink, &device, CLSACT_EGRESS), named(&[("bpf", 1)]));
    remove_guard(&netlink, &end).unwrap();
    assert_eq!(find_guard(&netlink, &end).unwrap(), None);
    assert_eq!(netlink.find_qdisc(device.index, QdiscHook::Ingress).unwrap(), None);
    assert_eq!(redirect::find_targets(&netlink, &end).unwrap(), [device.index]);

    // Without the device the guard is on the link again, behind the redirect that has no target.
    put_guard(&netlink, &end, always(DROP), SINK).unwrap();
    netlink.delete_link("ifb9").unwrap();
    assert_eq!(find_guard(&netlink, &end).unwrap(), None);
}

#[test]
fn a_clsact_qdisc_of_another_program_stays() {
    let (netlink, end) = rig();
    netlink.add_qdisc(end.index, QdiscHook::Ingress, redirect::INGRESS, &Qdisc::Clsact).unwrap();
    put_guard(&netlink, &end, always(DROP), SINK).unwrap();
    assert_eq!(priorities(&netlink, &end, redirect::CLSACT_INGRESS), named(&[("bpf", 1)]));
    assert_eq!(find_guard(&netlink, &end).unwrap(), Some(always(DROP)));
    remove_guard(&netlink, &end).unwrap();
    assert_eq!(find_guard(&netlink, &end).unwrap(), None);
    assert_eq!(
        netlink.find_qdisc(end.index, QdiscHook::Ingress).unwrap().unwrap().qdisc,
        Qdisc::Clsact
    );
}

#[test]
fn a_guard_outlives_the_device_of_a_redirect() {
    for program in [PASS, DROP] {
        let (netlink, end) = rig();
        let device = ifb(&netlink);
        redirect::add(&netlink, &end, &device).unwrap();
        put_guard(&netlink, &end, always(program), SINK).unwrap();
        keep_without_redirect(&netlink, &end, || {
            assert_eq!(
                priorities(&netlink, &end, redirect::INGRESS),
                named(&[("u32", 1), ("bpf", 2)])
            );
            redirect::remove(&netlink, &end, &[device.index])
        })
        .unwrap();
        netlink.delete_link("ifb9").unwrap();
        assert_eq!(find_guard(&netlink, &end).unwrap(), Some(always(program)));
        assert_eq!(priorities(&netlink, &end, redirect::INGRESS), named(&[("bpf", 1)]));
    }
}

#[test]
fn a_guard_stays_where_a_redirect_stays_or_is_behind_it() {
    let (netlink, end) = rig();
    let device = ifb(&netlink);
    redirect::add(&netlink, &end, &device).unwrap();
    put_guard(&netlink, &end, always(DROP), SINK).unwrap();
    keep_without_redirect(&netlink, &end, || redirect::remove(&netlink, &end, &[])).unwrap();
    assert_eq!(find_guard(&netlink, &end).unwrap(), Some(always(DROP)));
    redirect::remove(&netlink, &end, &[device.index]).unwrap();
    put_guard(&netlink, &end, always(DROP), SINK).unwrap();
    redirect::add(&netlink, &end, &device).unwrap();
    keep_without_redirect(&netlink, &end, || redirect::remove(&netlink, &end, &[device.index]))
        .unwrap();
    assert_eq!(priorities(&netlink, &end, redirect::INGRESS), named(&[("bpf", 1)]));
}
