//! Programs in filters, read back from the kernel.

use super::*;
use crate::netlink::traffic::{Qdisc, QdiscHook};
use crate::netlink::{Link, LinkKind, NewLink, VethPeer};
use crate::netns::isolate_test_thread;

const INGRESS: TrafficHandle = TrafficHandle::new(0xffff, 0);
/// `BPF_RET | BPF_K`.
const RETURN: u16 = 6;

fn program(value: u32, length: usize) -> ProgramFilter {
    // `BPF_LD | BPF_IMM`.
    let mut program = vec![ClassicInstruction { code: 0, jt: 0, jf: 0, k: 7 }; length - 1];
    program.push(ClassicInstruction { code: RETURN, jt: 0, jf: 0, k: value });
    ProgramFilter { program, redirect: Some(1), first: Vec::new() }
}

/// A link with a qdisc for filters of incoming packets.
fn end() -> Link {
    isolate_test_thread();
    let netlink = Netlink::open().unwrap();
    let link = NewLink::new("v0", LinkKind::Veth { peer: VethPeer::new("v0p") });
    let end = netlink.add_and_read_link(&link).unwrap();
    netlink.add_qdisc(end.index, QdiscHook::Ingress, INGRESS, &Qdisc::Ingress).unwrap();
    end
}

#[test]
fn a_program_is_added_replaced_found_and_deleted() {
    let end = end().index;
    let netlink = Netlink::open().unwrap();
    assert_eq!(netlink.find_program(end, INGRESS, 1).unwrap(), None);
    for program in [
        program(1, 1),
        program(0, 300),
        program(1, 4000),
        ProgramFilter { redirect: None, ..program(2, 2) },
        program(3, 2),
    ] {
        netlink.replace_program(end, INGRESS, 1, &program).unwrap();
        // A new socket, whose first message from the kernel is short.
        assert_eq!(
            Netlink::open().unwrap().find_program(end, INGRESS, 1).unwrap().as_ref(),
            Some(&program)
        );
        assert_eq!(netlink.find_program(end, INGRESS, 1).unwrap(), Some(program));
        assert_eq!(netlink.find_program(end, INGRESS, 2).unwrap(), None);
        let mut filters = netlink.dump_filters(end, INGRESS).unwrap();
        // The kernel also lists the classifier, with the handle 0.
        filters.retain(|filter| filter.handle != 0);
        assert_eq!(
            filters.iter().map(|filter| (&*filter.kind, filter.handle)).collect::<Vec<_>>(),
            [("bpf", 1)]
        );
    }
    assert!(netlink.delete_filters(end, INGRESS, 1).unwrap());
    assert_eq!(netlink.find_program(end, INGRESS, 1).unwrap(), None);
    assert_eq!(netlink.find_program(77, INGRESS, 1).unwrap(), None);
}

#[test]
fn the_first_program_is_asked_before_the_other() {
    let end = end().index;
    let netlink = Netlink::open().unwrap();
    let mut filter = ProgramFilter { first: program(TC_ACT_UNSPEC, 2).program, ..program(1, 3) };
    for value in [TC_ACT_UNSPEC, TC_ACT_SHOT] {
        filter.first = program(value, 2).program;
        filter.program = program(value, 3).program;
        netlink.replace_program(end, INGRESS, 1, &filter).unwrap();
        assert_eq!(netlink.find_program(end, INGRESS, 1).unwrap().as_ref(), Some(&filter));
        let mut filters = netlink.dump_filters(end, INGRESS).unwrap();
        filters.retain(|filter| filter.handle != 0);
        let handles: Vec<u32> = filters.iter().map(|filter| filter.handle).collect();
        assert_eq!(handles, [FIRST_HANDLE, HANDLE], "in the order of the kernel");
    }
}

#[test]
fn a_program_that_the_kernel_refuses_is_an_error() {
    let end = end().index;
    let netlink = Netlink::open().unwrap();
    netlink.replace_program(end, INGRESS, 1, &program(2, 3)).unwrap();
    for length in [4097, 9000] {
        let error = netlink.replace_program(end, INGRESS, 1, &program(2, length)).unwrap_err();
        assert!(error.to_string().starts_with("set the filter program of \"v0\": "), "{error}");
    }
    let falls_out = ProgramFilter { program: program(2, 3).program[..2].to_vec(), ..program(2, 3) };
    assert!(netlink.replace_program(end, INGRESS, 1, &falls_out).is_err());
    // The refused programs changed nothing.
    assert_eq!(netlink.find_program(end, INGRESS, 1).unwrap(), Some(program(2, 3)));
    assert!(netlink.replace_program(77, INGRESS, 1, &program(2, 3)).is_err());
}
