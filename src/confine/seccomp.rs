//! Seccomp filters: programs of classic BPF that refuse system calls by number and by one argument.
//!
//! The program is generated for the architecture of an `AUDIT_ARCH_*` value, whose byte order is
//! the order of the words of `struct seccomp_data`. Firecracker's crate seccompiler knows neither
//! s390x nor 32 bits nor ppc64le.

use std::io;

use nix::errno::Errno;
use nix::libc::{self, sock_filter};

/// Flags of `AUDIT_ARCH_*` in `linux/audit.h`; without the second the architecture is big-endian.
const AUDIT_64_BITS: u32 = 0x8000_0000;
const AUDIT_LITTLE_ENDIAN: u32 = 0x4000_0000;
/// Numbers from this one on are x32 system calls: those of x86-64 with other numbers. No other
/// architecture has them.
const X32: u32 = 0x4000_0000;

/// Offsets in `struct seccomp_data` (`linux/seccomp.h`): `int nr; __u32 arch; __u64
/// instruction_pointer, args[6]`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
const IF_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
const IF_AT_LEAST: u32 = libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K;
const IF_BIT: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

#[derive(Debug)]
pub(super) struct RefusedCall {
    pub(super) number: u32,
    /// What the system call returns.
    pub(super) errno: Errno,
    pub(super) condition: Condition,
}

/// When a system call is refused. Arguments are given by index; their lower 32 bits count, as in
/// the kernel for all arguments that are of type `int`, and for the flags of clone(2).
#[derive(Debug)]
pub(super) enum Condition {
    Always,
    /// The argument has one of the values.
    IsOneOf(u32, Vec<u32>),
    /// The argument has none of the values.
    IsNoneOf(u32, Vec<u32>),
    /// The argument has one of the bits.
    HasBits(u32, u32),
}

/// The `AUDIT_ARCH_*` of this executable; `None` if its system calls are not known here.
pub(super) fn native_architecture() -> Option<u32> {
    let machine = match std::env::consts::ARCH {
        "x86_64" => libc::EM_X86_64,
        "aarch64" => libc::EM_AARCH64,
        "arm" => libc::EM_ARM,
        "powerpc64" => libc::EM_PPC64,
        "riscv64" => libc::EM_RISCV,
        "s390x" => libc::EM_S390,
        _ => return None,
    };
    let bits = if cfg!(target_pointer_width = "64") { AUDIT_64_BITS } else { 0 };
    let order = if cfg!(target_endian = "little") { AUDIT_LITTLE_ENDIAN } else { 0 };
    Some(u32::from(machine) | bits | order)
}

/// The program that refuses `calls`, kills the process at a system call of another architecture,
/// and allows the rest.
pub(super) fn compile_filter(architecture: u32, calls: &[RefusedCall]) -> Vec<sock_filter> {
    let is_little_endian = architecture & AUDIT_LITTLE_ENDIAN != 0;
    let mut program = vec![
        instruction(LOAD, ARCHITECTURE),
        jump(IF_EQUAL, architecture, 1, 0),
        instruction(RETURN, libc::SECCOMP_RET_KILL_PROCESS),
        instruction(LOAD, NUMBER),
        jump(IF_AT_LEAST, X32, 0, 1),
        refusal(Errno::EPERM),
    ];
    for call in calls {
        let body = compile_call(call, if is_little_endian { 0 } else { 4 });
        program.push(jump(IF_EQUAL, call.number, 0, body.len()));
        program.extend(body);
    }
    program.push(instruction(RETURN, libc::SECCOMP_RET_ALLOW));
    program
}

/// The instructions for one system call, which end with a decision. `low` is the offset of the
/// lower half of a 64-bit word.
fn compile_call(call: &RefusedCall, low: u32) -> Vec<sock_filter> {
    let (refuse, allow) = (refusal(call.errno), instruction(RETURN, libc::SECCOMP_RET_ALLOW));
    let (argument, test, values, otherwise, matched) = match &call.condition {
        Condition::Always => return vec![refuse],
        Condition::IsOneOf(argument, values) => {
            (argument, IF_EQUAL, values.as_slice(), allow, refuse)
        }
        Condition::IsNoneOf(argument, values) => {
            (argument, IF_EQUAL, values.as_slice(), refuse, allow)
        }
        Condition::HasBits(argument, bits) => {
            (argument, IF_BIT, std::slice::from_ref(bits), allow, refuse)
        }
    };
    let tests =
        values.iter().enumerate().map(|(at, value)| jump(test, *value, values.len() - at, 0));
    let load = instruction(LOAD, ARGUMENTS + 8 * argument + low);
    [load].into_iter().chain(tests).chain([otherwise, matched]).collect()
}

fn instruction(code: u32, k: u32) -> sock_filter {
    jump(code, k, 0, 0)
}

/// A test that skips `then` instructions if it holds, or else `otherwise` instructions.
fn jump(code: u32, k: u32, then: usize, otherwise: usize) -> sock_filter {
    // All codes of classic BPF are below 256, and so are the distances within the few instructions
    // of a system call.
    let code = u16::try_from(code).unwrap_or(u16::MAX);
    let [jt, jf] = [then, otherwise].map(|distance| u8::try_from(distance).unwrap_or(u8::MAX));
    sock_filter { code, jt, jf, k }
}

fn refusal(errno: Errno) -> sock_filter {
    instruction(RETURN, libc::SECCOMP_RET_ERRNO | errno as u32)
}

/// Installs the filter for this thread and the threads that it will start, with
/// `PR_SET_NO_NEW_PRIVS`.
#[expect(unsafe_code, reason = "nix and rustix do not have seccomp(2)")]
pub(super) fn install_filter(mut program: Vec<sock_filter>) -> io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    let len = program.len().try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
    let program = libc::sock_fprog { len, filter: program.as_mut_ptr() };
    let (call, operation) = (libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER);
    // SAFETY: the kernel copies the program, which lives until the end of this function, and writes
    // nothing.
    Errno::result(unsafe { libc::syscall(call, operation, 0, &raw const program) })?;
    Ok(())
}

/// Creates a socket by socket(2). In glibc for s390x this function uses the multiplexer
/// socketcall(2), which has the address family in memory, where no filter can see it. This
/// definition takes the place of glibc's.
#[cfg(all(target_arch = "s390x", target_env = "gnu"))]
#[expect(unsafe_code, reason = "replaces a function of the C library")]
#[unsafe(no_mangle)]
extern "C" fn socket(family: libc::c_int, kind: libc::c_int, protocol: libc::c_int) -> libc::c_int {
    // SAFETY: the system call takes three numbers. The result is -1 or a descriptor.
    let descriptor = unsafe { libc::syscall(libc::SYS_socket, family, kind, protocol) };
    libc::c_int::try_from(descriptor).unwrap_or(-1)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::confine) const ALLOWED: u32 = libc::SECCOMP_RET_ALLOW;
    pub(in crate::confine) const REFUSED: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    const KILLED: u32 = libc::SECCOMP_RET_KILL_PROCESS;

    const X86_64: u32 = 0xc000_003e;
    const ARM: u32 = 0x4000_0028;
    const S390X: u32 = 0x8000_0016;

    /// The action of a program for a system call of this architecture, computed as its kernel does.
    pub(in crate::confine) fn decide(
        program: &[sock_filter],
        arch: u32,
        call: u32,
        args: &[u64],
    ) -> u32 {
        let is_little = arch & AUDIT_LITTLE_ENDIAN != 0;
        let word = |word: u32| if is_little { word.to_le_bytes() } else { word.to_be_bytes() };
        let long = |long: u64| if is_little { long.to_le_bytes() } else { long.to_be_bytes() };
        let mut data = [word(call), word(arch), [0; 4], [0; 4]].concat();
        data.extend((0..6).flat_map(|at| long(args.get(at).copied().unwrap_or_default())));
        let (mut at, mut value) = (0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            let jump = |holds: bool| usize::from(if holds { jt } else { jf });
            match u32::from(code) {
                LOAD => {
                    let bytes = *data[k as usize..].first_chunk().unwrap();
                    value = if is_little {
                        u32::from_le_bytes(bytes)
                    } else {
                        u32::from_be_bytes(bytes)
                    };
                }
                IF_EQUAL => at += jump(value == k),
                IF_AT_LEAST => at += jump(value >= k),
                IF_BIT => at += jump(value & k != 0),
                RETURN => return k,
                other => panic!("{other:#x}"),
            }
        }
    }

    fn refused(number: u32, condition: Condition) -> RefusedCall {
        RefusedCall { number, errno: Errno::EPERM, condition }
    }

    #[test]
    fn the_lower_half_of_an_argument_counts_on_every_byte_order() {
        let calls = [
            refused(5, Condition::Always),
            refused(6, Condition::IsOneOf(5, vec![1, 8])),
            refused(7, Condition::IsNoneOf(1, vec![2, 0x4000_0000])),
            refused(8, Condition::HasBits(0, 0x1010)),
        ];
        for arch in [X86_64, ARM, S390X] {
            let program = compile_filter(arch, &calls);
            let decide = |call, args: &[u64]| decide(&program, arch, call, args);
            assert_eq!([4, 5, 9].map(|call| decide(call, &[])), [ALLOWED, REFUSED, ALLOWED]);
            // The upper half is random: the kernel ignores it.
            let high = 0xdead_0001_0000_0000;
            for (value, action) in [(0, ALLOWED), (1, REFUSED), (8, REFUSED), (9, ALLOWED)] {
                assert_eq!(decide(6, &[1, 1, 1, 1, 1, high | value]), action, "{arch:x} {value}");
            }
            for (value, action) in
                [(0, REFUSED), (2, ALLOWED), (0x4000_0000, ALLOWED), (3, REFUSED)]
            {
                assert_eq!(decide(7, &[2, high | value, 2]), action, "{arch:x} {value}");
            }
            for (value, action) in
                [(0, ALLOWED), (0x1000, REFUSED), (0x30, REFUSED), (0x0101, ALLOWED)]
            {
                assert_eq!(decide(8, &[high | value, 0x1010]), action, "{arch:x} {value:x}");
            }
        }
    }

    #[test]
    fn the_program_for_s390x_reads_the_second_word_of_arguments() {
        // The number of clone(2), whose flags are the second argument there.
        let program = compile_filter(S390X, &[refused(120, Condition::HasBits(1, 0x1000_0000))]);
        let offsets: Vec<u32> =
            program.iter().filter(|it| u32::from(it.code) == LOAD).map(|it| it.k).collect();
        assert_eq!(offsets, [4, 0, 28]);
        let program = compile_filter(X86_64, &[refused(56, Condition::HasBits(0, 0x1000_0000))]);
        assert_eq!(program[7].k, 16);
    }

    #[test]
    fn calls_of_other_architectures_kill_and_x32_is_refused() {
        let program = compile_filter(X86_64, &[]);
        assert_eq!(decide(&program, 0x4000_0003, 1, &[]), KILLED, "i386");
        assert_eq!(decide(&program, X86_64, 1, &[]), ALLOWED);
        assert_eq!(decide(&program, X86_64, 0x4000_0001, &[]), REFUSED);
        // 31-bit programs on s390x.
        assert_eq!(decide(&compile_filter(S390X, &[]), 0x16, 1, &[]), KILLED);
    }

    #[test]
    fn the_architecture_is_that_of_the_audit_subsystem() {
        let expected = match std::env::consts::ARCH {
            "x86_64" => X86_64,
            "aarch64" => 0xc000_00b7,
            "arm" => ARM,
            "powerpc64" if cfg!(target_endian = "little") => 0xc000_0015,
            "riscv64" => 0xc000_00f3,
            "s390x" => S390X,
            other => panic!("{other}"),
        };
        assert_eq!(native_architecture(), Some(expected));
    }
}
