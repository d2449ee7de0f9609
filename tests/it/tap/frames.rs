//! A program in the container that opens the device, like a virtual machine monitor, and acts as
//! the neighbour behind it.

use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use nix::libc;
use serde_json::json;

use super::simple;
use crate::support::node::{Container, Node, eventually};
use crate::support::tap::{MULTI, SINGLE, frame, open};

const NEIGHBOUR: [u8; 6] = [2, 0, 0, 0, 0, 9];

/// Replies to ARP requests for any address, and returns after the first ICMP echo reply.
fn echo_once(mut tap: File) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while let Some(mut frame) = frame(&mut tap, deadline) {
        let kind = [frame[12], frame[13]];
        // The reply goes to the sender, from the neighbour.
        let from: [u8; 6] = frame[6..12].try_into().unwrap();
        frame[..6].copy_from_slice(&from);
        frame[6..12].copy_from_slice(&NEIGHBOUR);
        if kind == [8, 6] {
            // ARP: swaps sender and target.
            let (sender, target) = (frame[22..32].to_vec(), frame[38..42].to_vec());
            frame[21] = 2;
            frame[22..28].copy_from_slice(&NEIGHBOUR);
            frame[28..32].copy_from_slice(&target);
            frame[32..42].copy_from_slice(&sender);
            tap.write_all(&frame).unwrap();
        } else if kind == [8, 0] && frame[23] == 1 && frame[34] == 8 {
            // ICMP echo: swapping the addresses keeps the IP checksum; the type changes from 8 to
            // 0.
            let (source, target) = (frame[26..30].to_vec(), frame[30..34].to_vec());
            frame[26..30].copy_from_slice(&target);
            frame[30..34].copy_from_slice(&source);
            frame[34] = 0;
            let sum = u32::from(u16::from_be_bytes([frame[36], frame[37]])) + 0x0800;
            let sum = u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap();
            frame[36..38].copy_from_slice(&sum.to_be_bytes());
            tap.write_all(&frame).unwrap();
            return;
        }
    }
    panic!("nobody asked for an echo");
}

#[test]
fn a_program_reads_and_writes_frames() {
    for owners in [json!({}), json!({"owner": 0, "group": 0})] {
        let (node, container) = (Node::new(), Container::new());
        simple(&node, &owners).add(&container);
        let tap = container.run(|| open("eth0", SINGLE)).unwrap();
        let program = std::thread::spawn(move || echo_once(tap));
        assert!(container.try_sh("ping -n -c 1 -w 15 10.1.2.1"), "no answer");
        program.join().unwrap();
    }
}

#[test]
fn the_configured_number_of_queues_can_be_opened() {
    for (multi, flags, other) in [(false, SINGLE, MULTI), (true, MULTI, SINGLE)] {
        let (node, container) = (Node::new(), Container::new());
        simple(&node, &json!({"multiQueue": multi})).add(&container);
        let wrong = container.run(|| open("eth0", other)).unwrap_err();
        assert_eq!(wrong.raw_os_error(), Some(libc::EINVAL), "{multi}: {wrong}");
        let first = container.run(|| open("eth0", flags)).unwrap();
        let second = container.run(|| open("eth0", flags));
        assert_eq!(second.is_ok(), multi, "{multi}: {second:?}");
        drop(first);
        // The device persists between programs. The descriptor may stay open for a moment in a
        // process that another test has forked before its exec.
        eventually("it can be opened again", || container.run(|| open("eth0", flags)).is_ok());
    }
}
