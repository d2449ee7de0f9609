//! How daemons drop privileges before the first packet is received: all capabilities but a few, new
//! privileges, the system calls that take over a node, and with Landlock all files but their own.
//!
//! A daemon parses packets of hostile senders for weeks, so an exploited parser must not endanger
//! more than the daemon's own state. User 0 owns the files of the node, whatever its capabilities:
//! only Landlock keeps them from being written. The units in `packaging/systemd` confine the
//! daemons further; a daemon that is started on demand has no other confinement.

mod seccomp;

use std::path::Path;

use self::seccomp::{Condition, RefusedCall, compile_filter, install_filter, native_architecture};
use cni::error::{Error, Result, io_text};
use landlock::{
    ABI, Access, RestrictionStatus, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError,
    RulesetStatus, Scope, path_beneath_rules,
};
pub use landlock::{AccessFs, BitFlags};
use nix::errno::Errno;
use nix::libc::{self, c_long};
use nix::unistd::getpid;
pub use rustix::thread::CapabilitySet;
use rustix::thread::{self, CapabilitySets};

/// What a daemon keeps.
#[derive(Debug)]
pub struct Confinement<'a> {
    pub capabilities: CapabilitySet,
    /// The address families (`AF_*`) of new sockets. A unix socket could reach the container
    /// runtime.
    pub families: &'a [i32],
    /// Whether threads may enter other network namespaces.
    pub enters_namespaces: bool,
    /// The directory of the daemon's files.
    pub directory: &'a Path,
    /// What the daemon does to files below the directory.
    pub changes: BitFlags<AccessFs>,
    /// Files that are removed at the end. Landlock has no smaller permission than removing any
    /// file below their directories.
    pub removed: &'a [Option<&'a Path>],
}

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

/// The argument of clone(2) with the flags: the second where the kernel has
/// `CONFIG_CLONE_BACKWARDS2`.
const CLONE_FLAGS: u32 = if cfg!(target_arch = "s390x") { 1 } else { 0 };

/// clone3(2), of the same number on every architecture.
const CLONE3: u32 = 435;

// Missing in libc for some targets; `include/uapi/asm-generic/unistd.h` and
// `arch/s390/kernel/syscalls/syscall.tbl`.
#[cfg(any(target_arch = "aarch64", target_arch = "riscv64"))]
const SYS_KEXEC_FILE_LOAD: c_long = 294;
#[cfg(target_arch = "s390x")]
const SYS_KEXEC_FILE_LOAD: c_long = 381;
#[cfg(not(any(target_arch = "aarch64", target_arch = "riscv64", target_arch = "s390x")))]
const SYS_KEXEC_FILE_LOAD: c_long = libc::SYS_kexec_file_load;

/// System calls that no daemon needs.
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
    // Changing users and creating namespaces; `setns` has its own condition.
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
    SYS_KEXEC_FILE_LOAD,
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
    // Former numbers of calls above.
    #[cfg(not(any(target_arch = "aarch64", target_arch = "riscv64")))]
    libc::SYS_mknod,
    #[cfg(any(target_arch = "powerpc64", target_arch = "s390x"))]
    libc::SYS_umount,
    #[cfg(target_arch = "powerpc64")]
    libc::SYS_stime,
    // A multiplexer, whose arguments may be in memory.
    #[cfg(any(target_arch = "powerpc64", target_arch = "s390x"))]
    libc::SYS_ipc,
    // Access to hardware with CAP_SYS_ADMIN.
    #[cfg(any(target_arch = "arm", target_arch = "powerpc64"))]
    libc::SYS_pciconfig_write,
    #[cfg(target_arch = "powerpc64")]
    libc::SYS_rtas,
];

/// The calls of [`REFUSED`] that 32-bit architectures have a second time, with 32-bit user ids and
/// with 64-bit times.
#[cfg(target_arch = "arm")]
const REFUSED_ON_32_BITS: &[c_long] = &[
    libc::SYS_setuid32,
    libc::SYS_setgid32,
    libc::SYS_setreuid32,
    libc::SYS_setregid32,
    libc::SYS_setresuid32,
    libc::SYS_setresgid32,
    libc::SYS_setgroups32,
    // clock_settime64 and clock_adjtime64: missing in libc; `arch/arm/tools/syscall.tbl`.
    404,
    405,
];
#[cfg(not(target_arch = "arm"))]
const REFUSED_ON_32_BITS: &[c_long] = &[];

/// Drops privileges of this thread and of the threads that it will start. No other thread may
/// exist.
pub fn drop_privileges(kept: &Confinement<'_>) -> Result<()> {
    drop_capabilities(kept.capabilities)?;
    if restrict_files(kept).map_err(|e| Error::internal(format!("restrict files: {e}")))?.ruleset
        == RulesetStatus::NotEnforced
    {
        warn!("this kernel has no Landlock: the files of root are not protected from the daemon");
    }
    let Some(architecture) = native_architecture() else {
        return Err(Error::internal(format!(
            "filter system calls: unknown architecture {}",
            std::env::consts::ARCH
        )));
    };
    install_filter(compile_filter(architecture, &refused_calls(kept)))
        .map_err(|e| Error::internal(format!("filter system calls: {}", io_text(&e))))
}

fn drop_capabilities(kept: CapabilitySet) -> Result<()> {
    let system =
        |what: &'static str| move |e: rustix::io::Errno| Error::io(what, &std::io::Error::from(e));
    let present = thread::capabilities(None).map_err(system("read the capabilities"))?;
    // Clearing the bounding set needs CAP_SETPCAP, which is dropped afterwards.
    if present.effective.contains(CapabilitySet::SETPCAP) {
        for capability in CapabilitySet::all() - kept {
            let dropped = thread::remove_capability_from_bounding_set(capability);
            match dropped {
                // EINVAL: the kernel does not have the capability.
                Ok(()) | Err(rustix::io::Errno::INVAL) => {}
                Err(e) => return Err(system("drop a capability from the bounding set")(e)),
            }
        }
    }
    let kept = kept & present.permitted;
    let sets =
        CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    thread::set_capabilities(None, sets).map_err(system("drop capabilities"))
}

/// Refuses all changes of files but the daemon's own, as far as the kernel can. Landlock also
/// refuses mounts, and access to other processes through procfs.
fn restrict_files(kept: &Confinement<'_>) -> Result<RestrictionStatus, RulesetError> {
    let changes = AccessFs::from_write(ABI::V5);
    let rules = Ruleset::default().handle_access(changes)?.scope(Scope::from_all(ABI::V6))?;
    let directories = kept.removed.iter().filter_map(|path| path.as_deref()?.parent());
    let here = Path::new(".");
    let directories = directories.map(|dir| if dir.as_os_str().is_empty() { here } else { dir });
    rules
        .create()?
        .add_rules(path_beneath_rules([kept.directory], kept.changes))?
        .add_rules(path_beneath_rules(directories, AccessFs::RemoveFile))?
        .restrict_self()
}

fn refused_calls(kept: &Confinement<'_>) -> Vec<RefusedCall> {
    let refuse = |call: c_long, condition| RefusedCall {
        number: number(call),
        errno: Errno::EPERM,
        condition,
    };
    let values =
        |values: &[i32]| values.iter().map(|value| value.unsigned_abs()).collect::<Vec<_>>();
    let own_process = values(&[getpid().as_raw()]);
    let entered: &[i32] = if kept.enters_namespaces { &[libc::CLONE_NEWNET] } else { &[] };
    let entered = values(entered);
    let typing = vec![number(libc::TIOCSTI), number(libc::TIOCLINUX)];
    let new_namespaces = NEW_NAMESPACES.iter().fold(0, |bits, flag| bits | flag.unsigned_abs());
    let always =
        REFUSED.iter().chain(REFUSED_ON_32_BITS).map(|call| refuse(*call, Condition::Always));
    let some = [
        // Its flags are in memory; after ENOSYS the C library uses clone(2).
        RefusedCall { number: CLONE3, errno: Errno::ENOSYS, condition: Condition::Always },
        refuse(libc::SYS_clone, Condition::HasBits(CLONE_FLAGS, new_namespaces)),
        refuse(libc::SYS_socket, Condition::IsNoneOf(0, values(kept.families))),
        refuse(libc::SYS_setns, Condition::IsNoneOf(1, entered)),
        // A process signals itself when it aborts.
        refuse(libc::SYS_tgkill, Condition::IsNoneOf(0, own_process)),
        refuse(libc::SYS_ioctl, Condition::IsOneOf(1, typing)),
        // The multiplexer that glibc uses for s390x: without socket and socketpair, the numbers of
        // `linux/net.h`.
        #[cfg(any(target_arch = "powerpc64", target_arch = "s390x"))]
        refuse(libc::SYS_socketcall, Condition::IsOneOf(0, vec![1, 8])),
    ];
    always.chain(some).collect()
}

/// The number of a system call or ioctl, whose types in libc differ. `u32::MAX` is the number of
/// none.
fn number(number: impl TryInto<u32>) -> u32 {
    number.try_into().unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::{self, ErrorKind};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::PathBuf;
    use std::process::{Child, Command, id};

    use landlock::{CompatLevel, Compatible};
    use nix::sys::signal::kill;
    use nix::unistd::Pid;

    use super::seccomp::tests::{self, ALLOWED, REFUSED as REFUSED_CALL};
    use super::*;
    use crate::netns::on_scratch_thread;

    /// What a daemon keeps that enters namespaces and has its files in `directory`.
    fn confinement<'a>(directory: &'a Path, removed: &'a [Option<&'a Path>]) -> Confinement<'a> {
        Confinement {
            capabilities: CapabilitySet::SYS_ADMIN | CapabilitySet::NET_ADMIN,
            families: &[libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_PACKET],
            enters_namespaces: true,
            directory,
            changes: AccessFs::WriteFile | AccessFs::MakeReg | AccessFs::RemoveFile,
            removed,
        }
    }

    fn anywhere() -> Confinement<'static> {
        confinement(Path::new("/"), &[])
    }

    const UNKNOWN_CALL: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;

    fn decide(call: u32, args: &[u64]) -> u32 {
        decide_for(&anywhere(), call, args)
    }

    fn decide_for(kept: &Confinement<'_>, call: u32, args: &[u64]) -> u32 {
        let architecture = native_architecture().unwrap();
        tests::decide(&compile_filter(architecture, &refused_calls(kept)), architecture, call, args)
    }

    /// The arguments of clone(2) with these flags.
    fn clone_args(flags: i32) -> Vec<u64> {
        let mut args = vec![0; 2];
        args[CLONE_FLAGS as usize] = u64::from(flags.unsigned_abs());
        args
    }

    #[test]
    fn the_filter_checks_arguments_of_system_calls() {
        let flag = |flag: i32| u64::from(flag.unsigned_abs());
        let request = |request: u32| u64::from(request);
        let thread = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_THREAD;
        let own = u64::from(id());
        for (call, args, expected) in [
            (libc::SYS_read, vec![], ALLOWED),
            (libc::SYS_mount, vec![], REFUSED_CALL),
            (libc::SYS_clone3, vec![], UNKNOWN_CALL),
            (libc::SYS_clone, clone_args(thread), ALLOWED),
            (libc::SYS_clone, clone_args(libc::CLONE_NEWUSER | libc::CLONE_NEWNS), REFUSED_CALL),
            (libc::SYS_clone, clone_args(libc::CLONE_NEWNS | thread), REFUSED_CALL),
            (libc::SYS_setns, vec![3, flag(libc::CLONE_NEWNET)], ALLOWED),
            (libc::SYS_setns, vec![3, flag(libc::CLONE_NEWNS)], REFUSED_CALL),
            (libc::SYS_setns, vec![3, 0], REFUSED_CALL),
            (libc::SYS_socket, vec![flag(libc::AF_PACKET)], ALLOWED),
            (libc::SYS_socket, vec![flag(libc::AF_UNIX)], REFUSED_CALL),
            (libc::SYS_ioctl, vec![0, request(number(libc::TIOCSTI))], REFUSED_CALL),
            (libc::SYS_ioctl, vec![0, request(number(libc::TCGETS))], ALLOWED),
            (libc::SYS_tgkill, vec![own, 1, 6], ALLOWED),
            (libc::SYS_tgkill, vec![1, 1, 9], REFUSED_CALL),
            (0x4000_0000 | libc::SYS_read, vec![], REFUSED_CALL),
        ] {
            assert_eq!(decide(number(call), &args), expected, "{call} {args:x?}");
        }
        for flag in NEW_NAMESPACES {
            let clone = decide(number(libc::SYS_clone), &clone_args(flag | thread));
            assert_eq!(clone, REFUSED_CALL, "{flag:x}");
        }
    }

    #[test]
    fn a_daemon_of_one_namespace_enters_no_other() {
        let families = &[libc::AF_INET, libc::AF_NETLINK];
        let kept = Confinement { enters_namespaces: false, families, ..anywhere() };
        let decide =
            |call, arg: i32| decide_for(&kept, number(call), &[u64::from(arg.unsigned_abs()); 2]);
        for flag in [0, libc::CLONE_NEWNET, libc::CLONE_NEWNS] {
            assert_eq!(decide(libc::SYS_setns, flag), REFUSED_CALL, "{flag:x}");
        }
        assert_eq!(decide(libc::SYS_socket, libc::AF_NETLINK), ALLOWED);
        for family in [libc::AF_INET6, libc::AF_PACKET, libc::AF_UNIX] {
            assert_eq!(decide(libc::SYS_socket, family), REFUSED_CALL, "{family}");
        }
    }

    #[test]
    fn former_numbers_and_multiplexers_do_not_bypass_the_filter() {
        let always = |calls: &[c_long]| {
            for call in calls {
                assert_eq!(decide(number(*call), &[]), REFUSED_CALL, "{call}");
            }
        };
        always(REFUSED);
        always(REFUSED_ON_32_BITS);
        #[cfg(target_arch = "x86_64")]
        always(&[libc::SYS_mknod]);
        // setuid32, setgroups32, clock_settime64, clock_adjtime64, mknod
        #[cfg(target_arch = "arm")]
        always(&[213, 206, 404, 405, 14]);
        #[cfg(any(target_arch = "powerpc64", target_arch = "s390x"))]
        {
            // umount, ipc
            always(&[22, 117]);
            // socketcall: socket, bind, socketpair, sendto
            for (call, expected) in
                [(1, REFUSED_CALL), (2, ALLOWED), (8, REFUSED_CALL), (11, ALLOWED)]
            {
                assert_eq!(decide(102, &[call]), expected, "{call}");
            }
        }
    }

    /// Where the C library has its own way to create sockets, the filter must not see it.
    #[test]
    fn sockets_are_created_under_the_filter() {
        on_scratch_thread(|| {
            let calls = refused_calls(&anywhere());
            install_filter(compile_filter(native_architecture().unwrap(), &calls)).unwrap();
            std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            assert_eq!(
                UnixStream::connect("/nonexistent").unwrap_err().kind(),
                ErrorKind::PermissionDenied
            );
        })
        .unwrap();
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
            vec![
                ("memory", write(proc("mem"))),
                ("namespace", File::open(proc("ns/net")).map(drop)),
            ]
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
        on_scratch_thread(|| {
            drop_capabilities(anywhere().capabilities).unwrap();
            assert_eq!(failed(node.processes()), denied);
        })
        .unwrap();
    }

    /// A kernel before 5.13, or one that was started without it, has no Landlock.
    fn has_landlock() -> bool {
        let rules = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
        rules.handle_access(AccessFs::from_write(ABI::V1)).is_ok_and(|rules| rules.create().is_ok())
    }

    #[test]
    fn a_confined_thread_reaches_no_process_and_no_file() {
        let node = Node::new();
        assert_eq!(failed(node.all()), [], "the attempts succeed without confinement");
        let (leases, socket) = (node.path("leases"), node.path("run/socket"));
        let confined = || {
            drop_privileges(&confinement(&leases, &[Some(&socket), None])).unwrap();
            let failed = failed(node.all());
            // EXDEV is Landlock's answer to a hard link from another directory.
            let denied = [ErrorKind::PermissionDenied, ErrorKind::CrossesDevices];
            assert_eq!(failed.len(), if has_landlock() { 10 } else { 5 }, "{failed:?}");
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
