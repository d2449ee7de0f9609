//! Dropping privileges before the first packet is received: all capabilities but a few, new privileges, the system
//! calls that take over a node, and with Landlock all files but those of leases.
//!
//! The daemon parses packets of a hostile segment for weeks, so an exploited parser must not endanger more than leases.
//! User 0 owns the files of the node, whatever its capabilities: only Landlock keeps them from being written.
//! The units in `packaging/systemd` confine the daemon further; a daemon that is started on demand has no other
//! confinement.

use std::collections::BTreeMap;
use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, RestrictionStatus, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus,
    Scope, path_beneath_rules,
};
use nix::errno::Errno;
use nix::libc::{self, c_long};
use nix::unistd::getpid;
use rustix::thread::{self, CapabilitySet, CapabilitySets};
use seccompiler::SeccompCmpArgLen::Dword;
use seccompiler::SeccompCmpOp::{Eq, MaskedEq, Ne};
use seccompiler::{BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule};
use seccompiler::{apply_filter, sock_filter};

use crate::error::{Error, Result};
use crate::log;

/// The capabilities for work in containers' namespaces.
const KEPT: CapabilitySet = CapabilitySet::SYS_ADMIN // entering namespaces
    .union(CapabilitySet::NET_ADMIN) // addresses, routes, links
    .union(CapabilitySet::NET_RAW) // frames, and sockets of one interface
    .union(CapabilitySet::NET_BIND_SERVICE); // ports 68 and 546

/// The allowed address families of new sockets: leases, netlink, frames. A unix socket could reach the container
/// runtime.
const FAMILIES: [i32; 4] = [libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_PACKET];

/// The flags of clone(2) that create namespaces.
const NEW_NAMESPACES: [i32; 7] = [
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWCGROUP,
];

/// Requests of ioctl(2) that type into a terminal.
const TYPING: [u64; 2] = [libc::TIOCSTI, libc::TIOCLINUX];

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
    libc::SYS_socketpair,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_pidfd_send_signal,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
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

/// The files that the daemon changes.
#[derive(Debug)]
pub(super) struct WritableFiles<'a> {
    /// The directory of leases.
    pub(super) leases: &'a Path,
    /// Files that are removed at the end. Landlock has no smaller permission than removing any file below their
    /// directories.
    pub(super) removed: &'a [Option<&'a Path>],
}

/// Drops privileges of this thread and of the threads that it will start. No other thread may exist.
pub(super) fn drop_privileges(files: &WritableFiles<'_>) -> Result<()> {
    drop_capabilities()?;
    let failed = |e: RulesetError| Error::internal(format!("restrict files: {e}"));
    if restrict_files(files).map_err(failed)?.ruleset == RulesetStatus::NotEnforced {
        log::warn("this kernel has no Landlock: the files of root are not protected from the daemon");
    }
    let failed = |e: seccompiler::Error| Error::internal(format!("filter system calls: {e}"));
    // Installing the filter also sets PR_SET_NO_NEW_PRIVS.
    apply_filter(&syscall_filter().map_err(|e| failed(e.into()))?).map_err(failed)
}

fn drop_capabilities() -> Result<()> {
    let system = |what: &'static str| move |e: rustix::io::Errno| Error::io(what, &std::io::Error::from(e));
    let present = thread::capabilities(None).map_err(system("read the capabilities"))?;
    // Clearing the bounding set needs CAP_SETPCAP, which is dropped afterwards.
    if present.effective.contains(CapabilitySet::SETPCAP) {
        for capability in CapabilitySet::all() - KEPT {
            let dropped = thread::remove_capability_from_bounding_set(capability);
            match dropped {
                // EINVAL: the kernel does not have the capability.
                Ok(()) | Err(rustix::io::Errno::INVAL) => {}
                Err(e) => return Err(system("drop a capability from the bounding set")(e)),
            }
        }
    }
    let kept = KEPT & present.permitted;
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    thread::set_capabilities(None, sets).map_err(system("drop capabilities"))
}

/// Refuses all changes of files but those of `files`, as far as the kernel can. Landlock also refuses mounts, and
/// access to other processes through procfs.
fn restrict_files(files: &WritableFiles<'_>) -> Result<RestrictionStatus, RulesetError> {
    let changes = AccessFs::from_write(ABI::V5);
    let rules = Ruleset::default().handle_access(changes)?.scope(Scope::from_all(ABI::V6))?;
    let leases = AccessFs::WriteFile | AccessFs::MakeReg | AccessFs::RemoveFile;
    let directories = files.removed.iter().filter_map(|path| path.as_deref()?.parent());
    let here = Path::new(".");
    let directories = directories.map(|dir| if dir.as_os_str().is_empty() { here } else { dir });
    rules
        .create()?
        .add_rules(path_beneath_rules([files.leases], leases))?
        .add_rules(path_beneath_rules(directories, AccessFs::RemoveFile))?
        .restrict_self()
}

fn syscall_filter() -> Result<BpfProgram, seccompiler::BackendError> {
    let one =
        |argument, operator, value| SeccompRule::new(vec![SeccompCondition::new(argument, Dword, operator, value)?]);
    let unless = |argument: u8, allowed: &[i32]| {
        let conditions =
            allowed.iter().map(|value| SeccompCondition::new(argument, Dword, Ne, u64::from(value.unsigned_abs())));
        SeccompRule::new(conditions.collect::<Result<_, _>>()?)
    };
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = REFUSED.iter().map(|call| (*call, Vec::new())).collect();
    rules.insert(libc::SYS_socket, vec![unless(0, &FAMILIES)?]);
    rules.insert(libc::SYS_setns, vec![unless(1, &[libc::CLONE_NEWNET])?]);
    // A process signals itself when it aborts.
    rules.insert(libc::SYS_tgkill, vec![unless(0, &[getpid().as_raw()])?]);
    let flags = NEW_NAMESPACES.map(|flag| u64::from(flag.unsigned_abs()));
    let clone = flags.iter().map(|flag| one(0, MaskedEq(*flag), *flag));
    rules.insert(libc::SYS_clone, clone.collect::<Result<_, _>>()?);
    let typing = TYPING.iter().map(|request| one(1, Eq, *request));
    rules.insert(libc::SYS_ioctl, typing.collect::<Result<_, _>>()?);
    let refuse = SeccompAction::Errno(Errno::EPERM as u32);
    let arch = std::env::consts::ARCH.try_into()?;
    let compiled: BpfProgram = SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch)?.try_into()?;
    Ok(syscall_number_filter().into_iter().chain(compiled).collect())
}

/// Refuses by number alone: clone3(2), whose flags are in memory and which the C library replaces by clone(2) after
/// `ENOSYS`; and x32 system calls, which are the system calls of x86-64 with other numbers.
fn syscall_number_filter() -> [sock_filter; 5] {
    const X32: u32 = 0x4000_0000;
    // The number is the same on every architecture.
    const CLONE3: u32 = 435;
    let instruction = |code: u32, jf: u8, k: u32| {
        let code = u16::try_from(code).unwrap_or_default();
        sock_filter { code, jt: 0, jf, k }
    };
    let fail = |errno| {
        let action = libc::SECCOMP_RET_ERRNO | errno as u32;
        instruction(libc::BPF_RET | libc::BPF_K, 0, action)
    };
    [
        // The system call number is the first word of `struct seccomp_data`.
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, CLONE3),
        fail(Errno::ENOSYS),
        instruction(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 1, X32),
        fail(Errno::EPERM),
    ]
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::{self, ErrorKind};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::PathBuf;
    use std::process::{Child, Command, id};

    use nix::sys::signal::kill;
    use nix::unistd::Pid;

    use super::*;
    use crate::netns::on_scratch_thread;

    const ALLOWED: u32 = libc::SECCOMP_RET_ALLOW;
    const REFUSED_CALL: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    const UNKNOWN_CALL: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;

    /// The action of the filter for a system call, computed as the kernel does.
    fn decide(program: &[sock_filter], call: c_long, args: &[u64]) -> u32 {
        let arch = match std::env::consts::ARCH {
            "x86_64" => 0xc000_003e,
            "aarch64" => 0xc000_00b7,
            other => panic!("{other}"),
        };
        // `struct seccomp_data`: number, architecture, instruction pointer, arguments.
        let mut data = vec![u32::try_from(call).unwrap(), arch, 0, 0];
        for at in 0..6 {
            let arg = args.get(at).copied().unwrap_or_default();
            data.extend([arg, arg >> 32].map(|half| u32::try_from(half & 0xffff_ffff).unwrap()));
        }
        let (mut at, mut value) = (0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            let code = u32::from(code);
            let jump = |holds: bool| usize::from(if holds { jt } else { jf });
            match code {
                c if c == libc::BPF_LD | libc::BPF_W | libc::BPF_ABS => {
                    value = data[k as usize / 4];
                }
                c if c == libc::BPF_ALU | libc::BPF_AND | libc::BPF_K => value &= k,
                c if c == libc::BPF_JMP | libc::BPF_JA => at += k as usize,
                c if c == libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K => at += jump(value == k),
                c if c == libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K => at += jump(value >= k),
                c if c == libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K => at += jump(value > k),
                c if c == libc::BPF_RET | libc::BPF_K => return k,
                other => panic!("{other:#x}"),
            }
        }
    }

    #[test]
    fn the_filter_checks_arguments_of_system_calls() {
        let program = syscall_filter().unwrap();
        let flag = |flag: i32| u64::from(flag.unsigned_abs());
        let thread = flag(libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_THREAD);
        let own = u64::from(id());
        for (call, args, expected) in [
            (libc::SYS_read, vec![], ALLOWED),
            (libc::SYS_mount, vec![], REFUSED_CALL),
            (libc::SYS_clone3, vec![], UNKNOWN_CALL),
            (libc::SYS_clone, vec![thread], ALLOWED),
            (libc::SYS_clone, vec![flag(libc::CLONE_NEWUSER | libc::CLONE_NEWNS)], REFUSED_CALL),
            (libc::SYS_clone, vec![flag(libc::CLONE_NEWNS) | thread], REFUSED_CALL),
            (libc::SYS_setns, vec![3, flag(libc::CLONE_NEWNET)], ALLOWED),
            (libc::SYS_setns, vec![3, flag(libc::CLONE_NEWNS)], REFUSED_CALL),
            (libc::SYS_setns, vec![3, 0], REFUSED_CALL),
            (libc::SYS_socket, vec![flag(libc::AF_PACKET)], ALLOWED),
            (libc::SYS_socket, vec![flag(libc::AF_UNIX)], REFUSED_CALL),
            (libc::SYS_ioctl, vec![0, libc::TIOCSTI], REFUSED_CALL),
            (libc::SYS_ioctl, vec![0, libc::TCGETS], ALLOWED),
            (libc::SYS_tgkill, vec![own, 1, 6], ALLOWED),
            (libc::SYS_tgkill, vec![1, 1, 9], REFUSED_CALL),
            (0x4000_0000 | libc::SYS_read, vec![], REFUSED_CALL),
        ] {
            assert_eq!(decide(&program, call, &args), expected, "{call} {args:x?}");
        }
        for flag in NEW_NAMESPACES {
            let args = [u64::from(flag.unsigned_abs()) | thread];
            assert_eq!(decide(&program, libc::SYS_clone, &args), REFUSED_CALL, "{flag:x}");
        }
    }

    /// Attempts of an exploited daemon, with their names.
    type Attempts = Vec<(&'static str, io::Result<()>)>;

    /// The attempts that failed.
    fn failed(attempts: Attempts) -> Vec<(&'static str, ErrorKind)> {
        let failed = attempts.into_iter().filter_map(|(what, done)| Some((what, done.err()?)));
        failed.map(|(what, error)| (what, error.kind())).collect()
    }

    fn write(path: impl AsRef<Path>) -> io::Result<()> {
        File::options().write(true).open(path).map(drop)
    }

    /// A node with another process of root, and files.
    struct Node {
        dir: tempfile::TempDir,
        victim: Child,
        _runtime: UnixListener,
    }

    impl Node {
        fn new() -> Node {
            let dir = tempfile::tempdir().unwrap();
            for directory in ["leases", "run"] {
                fs::create_dir(dir.path().join(directory)).unwrap();
            }
            for file in ["leases/old", "run/socket", "foreign"] {
                fs::write(dir.path().join(file), "x").unwrap();
            }
            let runtime = UnixListener::bind(dir.path().join("runtime")).unwrap();
            let victim = Command::new("sleep").arg("60").spawn().unwrap();
            Node { dir, victim, _runtime: runtime }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn processes(&self) -> Attempts {
            let proc = |name: &str| format!("/proc/{}/{name}", self.victim.id());
            vec![("memory", write(proc("mem"))), ("namespace", File::open(proc("ns/net")).map(drop))]
        }

        fn all(&self) -> Attempts {
            let (new, linked) = (self.path("new"), self.path("leases/linked"));
            let link = || fs::hard_link(self.path("foreign"), &linked);
            let pid = Pid::from_raw(self.victim.id().try_into().unwrap());
            let others = vec![
                ("write", write(self.path("foreign"))),
                ("truncate", fs::write(self.path("foreign"), "y")),
                ("create", File::create_new(&new).and_then(|_| fs::remove_file(&new))),
                ("link", link().and_then(|()| fs::remove_file(&linked))),
                ("core", write("/proc/sys/kernel/core_pattern")),
                ("signal", kill(pid, None).map_err(io::Error::from)),
                ("runtime", UnixStream::connect(self.path("runtime")).map(drop)),
                ("program", Command::new("true").status().map(drop)),
            ];
            self.processes().into_iter().chain(others).collect()
        }
    }

    impl Drop for Node {
        fn drop(&mut self) {
            drop(self.victim.kill());
            drop(self.victim.wait());
        }
    }

    #[test]
    fn without_its_capabilities_no_process_is_reached() {
        let node = Node::new();
        assert_eq!(failed(node.processes()), []);
        let denied = ["memory", "namespace"].map(|what| (what, ErrorKind::PermissionDenied));
        let dropped = || {
            drop_capabilities().unwrap();
            assert_eq!(failed(node.processes()), denied);
        };
        on_scratch_thread(dropped).unwrap();
    }

    #[test]
    fn a_confined_thread_reaches_no_process_and_no_file() {
        let node = Node::new();
        assert_eq!(failed(node.all()), [], "the attempts succeed without confinement");
        let (leases, socket) = (node.path("leases"), node.path("run/socket"));
        let confined = || {
            drop_privileges(&WritableFiles { leases: &leases, removed: &[Some(&socket), None] }).unwrap();
            let failed = failed(node.all());
            // EXDEV is Landlock's answer to a hard link from another directory.
            let denied = [ErrorKind::PermissionDenied, ErrorKind::CrossesDevices];
            assert_eq!(failed.len(), 10, "{failed:?}");
            assert!(failed.iter().all(|(_, kind)| denied.contains(kind)), "{failed:?}");
            assert_eq!(fs::read(node.path("foreign")).unwrap(), b"y");
            // What the daemon does.
            fs::write(leases.join(".tmp"), "z").unwrap();
            fs::rename(leases.join(".tmp"), leases.join("old")).unwrap();
            fs::remove_file(leases.join("old")).unwrap();
            fs::remove_file(&socket).unwrap();
            std::thread::spawn(|| ()).join().unwrap();
        };
        on_scratch_thread(confined).unwrap();
    }
}
