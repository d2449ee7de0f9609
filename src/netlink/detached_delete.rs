//! Deletes a link without waiting for the kernel's grace periods.
//!
//! Half a millisecond after the request a link is gone from its network namespace, and the kernel
//! announces its deletion; the request returns 12 to 20 ms later, when the kernel has freed the
//! device. Therefore a forked child makes the request. The child keeps only the socket of the
//! request, which receives the announcement and the kernel's reply: this process returns after the
//! first of the two. Then the child is an orphan, and pid 1 has to reap it. Where
//! that is uncertain, this process makes the request itself. See
//! docs/decisions/0023-detached-deletions.md.

use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::libc::{self, RTM_DELLINK, RTNLGRP_LINK};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, getppid};
use rtnetlink::packet_core::NLM_F_ACK;

use super::Netlink;
use super::attribute::read_u32_at;
use super::error::RequestFailure;
use super::request::{KernelMessage, NetlinkRequest};
use super::socket::{NetlinkSocket, request_span};
use cni::files::open_file;

/// The bit of `SIGCHLD` in the masks of `/proc/<pid>/status`.
const SIGCHLD: u64 = 1 << (libc::SIGCHLD - 1);

/// How often this process checks whether a child has ended without an outcome.
const SILENCE: Duration = Duration::from_millis(10);

/// Whether this process ends after its call.
static ENDS: AtomicBool = AtomicBool::new(false);

/// Declares that this process ends after the current call, so that it can leave children behind. A
/// process that continues would have to reap the children.
pub fn set_process_ends() {
    ENDS.store(true, Ordering::Relaxed);
}

impl Netlink {
    /// Makes the `request` to delete a link, and returns as soon as the link is gone. `None` if
    /// this process has to make the request.
    pub(super) fn delete_detached(
        &self,
        index: u32,
        request: &NetlinkRequest,
    ) -> Option<Result<(), RequestFailure>> {
        if !ENDS.load(Ordering::Relaxed) || !are_orphans_reaped() {
            return None;
        }
        DetachedDeletion::start_child(self, index, request)?.wait_for_outcome()
    }
}

/// Whether pid 1 reaps the children that this process leaves, and is not the caller of this
/// process. A program that blocks `SIGCHLD` receives the signal by signalfd(2), as systemd does; if
/// a program ignores the signal, the kernel reaps. All other programs are in doubt: every Go
/// program has a handler, but waits for its own children only, and the kernel does not show a
/// signal as blocked while a process waits for it in sigtimedwait(2), as tini does. `/proc` may
/// belong to another pid namespace.
fn are_orphans_reaped() -> bool {
    let own = process::id().to_string();
    getppid() > Pid::from_raw(1)
        && fs::read_link("/proc/self").is_ok_and(|link| link.as_os_str() == own.as_str())
        && read_init_status().is_ok_and(|status| blocks_or_ignores_sigchld(&status))
}

/// The first part of `/proc/1/status`, by one read.
fn read_init_status() -> io::Result<String> {
    let mut status = vec![0; 4096];
    let length = open_file("/proc/1/status", OFlag::O_RDONLY)?.read(&mut status)?;
    Ok(String::from_utf8_lossy(&status[..length]).into_owned())
}

fn blocks_or_ignores_sigchld(status: &str) -> bool {
    let mut masks = status.lines().filter_map(|line| {
        let mask = line.strip_prefix("SigBlk:").or(line.strip_prefix("SigIgn:"))?;
        u64::from_str_radix(mask.trim(), 16).ok()
    });
    masks.any(|mask| mask & SIGCHLD != 0)
}

/// A request that a child makes.
#[derive(Debug)]
struct DetachedDeletion {
    child: Pid,
    socket: NetlinkSocket,
    sequence: u32,
    index: u32,
}

impl DetachedDeletion {
    /// `None` if there is no socket or no child.
    #[expect(unsafe_code, reason = "fork(2), and what the child may call")]
    fn start_child(
        netlink: &Netlink,
        index: u32,
        request: &NetlinkRequest,
    ) -> Option<DetachedDeletion> {
        let socket = netlink.listen_to_group(RTNLGRP_LINK).ok()?;
        let (sequence, mut wire) = (socket.reserve_sequence(1), Vec::new());
        request.encode_into(None, NLM_F_ACK, sequence, &mut wire);
        let _span = request_span(&wire);
        // SAFETY: the child only makes system calls, and returns from none of its functions.
        match unsafe { fork() } {
            Ok(ForkResult::Child) => request_and_exit(socket.as_fd().as_raw_fd(), &wire),
            Ok(ForkResult::Parent { child }) => {
                Some(DetachedDeletion { child, socket, sequence, index })
            }
            Err(_) => None,
        }
    }

    /// Waits for the announcement or the kernel's reply; `None` if the child has ended without
    /// either.
    fn wait_for_outcome(&self) -> Option<Result<(), RequestFailure>> {
        let mut has_ended = false;
        loop {
            match self.socket.receive_datagram() {
                Ok(Some(messages)) => {
                    let mut outcomes =
                        messages.iter().filter_map(|message| self.outcome_of_message(message));
                    if let Some(outcome) = outcomes.next() {
                        return Some(outcome);
                    }
                }
                Ok(None) if has_ended => return None,
                Ok(None) => {
                    has_ended = !self.socket.wait_for_datagram(SILENCE).ok()? && !self.is_running();
                }
                // Events were lost in a flood: then the reply decides.
                Err(RequestFailure { errno: Errno::ENOBUFS, .. }) => {}
                Err(_) => return None,
            }
        }
    }

    fn outcome_of_message(&self, message: &KernelMessage) -> Option<Result<(), RequestFailure>> {
        if message.sequence == self.sequence && message.is_final() {
            return Some(message.failure().map_or(Ok(()), Err));
        }
        // The family is not 0 if a bridge announces that a link is no longer its port.
        let is_link = message.body.first() == Some(&0);
        let is_this = read_u32_at(&message.body, 4) == Some(self.index);
        (message.kind == RTM_DELLINK && is_link && is_this).then_some(Ok(()))
    }

    fn is_running(&self) -> bool {
        waitpid(self.child, Some(WaitPidFlag::WNOHANG)) == Ok(WaitStatus::StillAlive)
    }
}

/// Runs in the child. Closes all other descriptors first: pipes to the caller, locks, namespaces.
#[expect(
    unsafe_code,
    reason = "system calls that are allowed after a fork, as the kernel has them"
)]
fn request_and_exit(socket: RawFd, wire: &[u8]) -> ! {
    let close = |first: RawFd, last: RawFd| {
        // SAFETY: no descriptor in the range is used any more.
        first > last || unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } == 0
    };
    if close(0, socket - 1) && close(socket + 1, RawFd::MAX) {
        // SAFETY: the path is a C string; the message outlives the call.
        unsafe {
            libc::chdir(c"/".as_ptr());
            libc::send(socket, wire.as_ptr().cast(), wire.len(), 0);
        }
    }
    // SAFETY: ends the process without running any of its code.
    unsafe { libc::_exit(0) }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Instant;

    use super::*;
    use crate::netlink::{LinkChange, LinkKind, NewLink, VethPeer};
    use crate::netns::{Netns, isolate_test_thread};

    fn deletion_of(index: u32) -> NetlinkRequest {
        let header = [[0; 4], index.to_ne_bytes(), [0; 4], [0; 4]].concat();
        NetlinkRequest::new(RTM_DELLINK, &header)
    }

    fn start(netlink: &Netlink, index: u32) -> DetachedDeletion {
        DetachedDeletion::start_child(netlink, index, &deletion_of(index)).unwrap()
    }

    fn reap(deletion: &DetachedDeletion) {
        waitpid(deletion.child, None).unwrap();
    }

    #[test]
    fn process_1_reaps_if_it_ignores_or_blocks_sigchld() {
        let status = |blocked, ignored, caught| {
            format!("Name:\tinit\nSigBlk:\t{blocked}\nSigIgn:\t{ignored}\nSigCgt:\t{caught}\n")
        };
        let none = "0000000000000000";
        let systemd = status("7be3c0fe28014a03", "0000000000001000", "00000000000004ec");
        let catatonit = status("fffffffe3ffbfa07", none, none);
        let shell_with_trap = status(none, "0000000000010000", none);
        for reaps in [systemd, catatonit, shell_with_trap] {
            assert!(blocks_or_ignores_sigchld(&reaps), "{reaps}");
        }
        let go = status(none, none, "fffffffd7fc1feff");
        let sleep = status(none, none, none);
        for in_doubt in [go, sleep, "SigBlk:\tx\n".to_owned(), String::new()] {
            assert!(!blocks_or_ignores_sigchld(&in_doubt), "{in_doubt}");
        }
    }

    /// Prints the medians of the times until the link is gone, and until the request returns.
    #[test]
    fn the_link_is_gone_on_return() {
        isolate_test_thread();
        let (host, container) = (Netlink::open().unwrap(), Netns::create_unnamed().unwrap());
        let inside = Netlink::open_in(&container).unwrap();
        let kind = LinkKind::Bridge { vlan_filtering: None };
        let bridge = host.add_and_read_link(&NewLink::new("br0", kind).set_up()).unwrap();
        let (mut times, mut running) = ([const { Vec::new() }; 2], Vec::new());
        for round in 0..200 {
            let peer = VethPeer::new("eth0").with_netns(container.as_fd());
            let pair = NewLink::new("veth0", LinkKind::Veth { peer }).with_master(bridge.index);
            let index = host.add_and_read_link(&pair).unwrap().index;
            host.change_link(index, LinkChange::new().set_up()).unwrap();
            let end = inside.require_link("eth0").unwrap().index;
            inside.change_link(end, LinkChange::new().set_up()).unwrap();
            let from_inside = round % 2 == 1;
            let (netlink, index) = if from_inside { (&inside, end) } else { (&host, index) };
            let begin = Instant::now();
            let deletion = start(netlink, index);
            assert_eq!(deletion.wait_for_outcome(), Some(Ok(())));
            times[0].push(begin.elapsed());
            assert_eq!(host.find_link("veth0"), Ok(None), "{round}");
            assert_eq!(inside.find_link("eth0"), Ok(None), "{round}");
            // The last hundred reuse the same names at once.
            if round < 100 {
                reap(&deletion);
                times[1].push(begin.elapsed());
            } else {
                running.push(deletion);
            }
        }
        running.iter().for_each(reap);
        let [gone, returned] = times.map(|mut times| {
            times.sort();
            times[times.len() / 2]
        });
        println!("gone after {gone:?}, returned after {returned:?}");
    }

    #[test]
    fn a_refusal_of_the_kernel_is_returned() {
        isolate_test_thread();
        let host = Netlink::open().unwrap();
        for (index, errno) in [(99, Errno::ENODEV), (1, Errno::EOPNOTSUPP)] {
            let deletion = start(&host, index);
            let failure = deletion.wait_for_outcome().unwrap().unwrap_err();
            assert_eq!(failure.refusal_errno(), Some(errno));
            reap(&deletion);
        }
    }

    #[test]
    fn the_end_of_the_child_replaces_a_lost_reply() {
        isolate_test_thread();
        let host = Netlink::open().unwrap();
        let flooded = host
            .add_and_read_link(&NewLink::new(
                "veth",
                LinkKind::Veth { peer: VethPeer::new("peer") },
            ))
            .unwrap()
            .index;
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let deletion = DetachedDeletion {
            child: Pid::from_raw(child.id().cast_signed()),
            socket: host.listen_to_group(RTNLGRP_LINK).unwrap(),
            sequence: 1,
            index: flooded,
        };
        // More events than fit in the queue, so that the announcement is lost.
        for _ in 0..2000 {
            host.change_link(flooded, LinkChange::new().set_mtu(1400)).unwrap();
            host.change_link(flooded, LinkChange::new().set_mtu(1500)).unwrap();
        }
        host.delete_link("veth").unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(deletion.wait_for_outcome(), None);
        assert_eq!(host.delete_link_by_index(flooded), Ok(false));
    }
}
