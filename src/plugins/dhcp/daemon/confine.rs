//! Dropping privileges before the first packet is received: all capabilities but a few, new privileges, and the system
//! calls that take over a node.
//!
//! The daemon parses packets of a hostile segment for weeks, so an exploited parser must not endanger more than leases.
//! The units in `packaging/systemd` confine the daemon further; a daemon that is started on demand has no other
//! confinement.

use std::collections::BTreeMap;

use nix::errno::Errno;
use nix::libc::{self, c_long};
use rustix::thread::{self, CapabilitySet, CapabilitySets};
use seccompiler::SeccompCmpArgLen::Dword;
use seccompiler::SeccompCmpOp::Ne;
use seccompiler::{BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule};
use seccompiler::{apply_filter, sock_filter};

use crate::error::{Error, Result};

/// The capabilities for work in containers' namespaces.
const KEPT: CapabilitySet = CapabilitySet::SYS_ADMIN // entering namespaces
    .union(CapabilitySet::SYS_PTRACE) // opening /proc/<pid>/ns/net of other users' processes
    .union(CapabilitySet::DAC_READ_SEARCH) // opening namespaces below folders of other users
    .union(CapabilitySet::NET_ADMIN) // addresses, routes, links, sysctls
    .union(CapabilitySet::NET_RAW) // frames, and sockets of one interface
    .union(CapabilitySet::NET_BIND_SERVICE); // ports 68 and 546

/// The allowed address families of sockets: systemd and plugins, leases, netlink, frames.
const FAMILIES: [i32; 5] =
    [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_PACKET];

/// System calls that the daemon does not need.
const REFUSED: &[c_long] = &[
    // Executing programs and accessing other processes.
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_memfd_create,
    // Changing users and creating namespaces; `setns` into network namespaces is allowed.
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    libc::SYS_unshare,
    libc::SYS_chroot,
    libc::SYS_pivot_root,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_fsmount,
    libc::SYS_mount_setattr,
    libc::SYS_open_by_handle_at,
    libc::SYS_mknodat,
    // Changing the kernel.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_personality,
];

/// Drops privileges of this thread and of the threads that it will start. No other thread may exist.
pub(super) fn confine() -> Result<()> {
    let system =
        |what: &'static str| move |e: rustix::io::Errno| Error::io(what, &std::io::Error::from(e));
    let had = thread::capabilities(None).map_err(system("read the capabilities"))?;
    // Clearing the bounding set needs CAP_SETPCAP, which is dropped afterwards.
    if had.effective.contains(CapabilitySet::SETPCAP) {
        for capability in CapabilitySet::all() - KEPT {
            let dropped = thread::remove_capability_from_bounding_set(capability);
            match dropped {
                // EINVAL: the kernel does not have the capability.
                Ok(()) | Err(rustix::io::Errno::INVAL) => {}
                Err(e) => return Err(system("drop a capability from the bounding set")(e)),
            }
        }
    }
    let kept = KEPT & had.permitted;
    let sets =
        CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    thread::set_capabilities(None, sets).map_err(system("drop capabilities"))?;
    let failed = |e: seccompiler::Error| Error::internal(format!("filter system calls: {e}"));
    // Installing the filter sets PR_SET_NO_NEW_PRIVS as well.
    apply_filter(&filter().map_err(|e| failed(e.into()))?).map_err(failed)
}

fn filter() -> Result<BpfProgram, seccompiler::BackendError> {
    let unless = |argument: u8, allowed: &[i32]| {
        let conditions = allowed.iter().map(|value| {
            SeccompCondition::new(argument, Dword, Ne, u64::from(value.unsigned_abs()))
        });
        SeccompRule::new(conditions.collect::<Result<_, _>>()?)
    };
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        REFUSED.iter().map(|call| (*call, Vec::new())).collect();
    rules.insert(libc::SYS_socket, vec![unless(0, &FAMILIES)?]);
    rules.insert(libc::SYS_setns, vec![unless(1, &[libc::CLONE_NEWNET])?]);
    let refuse = SeccompAction::Errno(Errno::EPERM as u32);
    let arch = std::env::consts::ARCH.try_into()?;
    let compiled: BpfProgram =
        SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch)?.try_into()?;
    Ok(without_x32().into_iter().chain(compiled).collect())
}

/// Refuses x32 system calls, which are the system calls of x86-64 with other numbers.
fn without_x32() -> [sock_filter; 3] {
    const X32: u32 = 0x4000_0000;
    let instruction = |code: u32, jf: u8, k: u32| {
        let code = u16::try_from(code).unwrap_or_default();
        sock_filter { code, jt: 0, jf, k }
    };
    [
        // The system call number is the first word of `struct seccomp_data`.
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 1, X32),
        instruction(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | Errno::EPERM as u32),
    ]
}
