//! scripts/prepare.sh on machines with missing programs: its messages, the packages it installs,
//! and when it stops. A machine is a directory of programs that is the whole PATH.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};

use cnibox_tests::root;
use tempfile::TempDir;

/// The programs that the script itself calls.
const TOOLS: [&str; 9] = ["awk", "cut", "grep", "head", "paste", "sed", "sh", "sort", "tr"];

/// A machine where root has a current Rust toolchain and a current kernel, and nothing else.
struct Machine(TempDir);

impl Machine {
    fn new() -> Self {
        let machine = Self(TempDir::new().unwrap());
        for tool in TOOLS {
            let path = ["/usr/bin", "/bin"].map(|directory| Path::new(directory).join(tool));
            let path = path.iter().find(|path| path.exists()).unwrap();
            symlink(path, machine.0.path().join(tool)).unwrap();
        }
        machine
            .program("id", "echo 0")
            .program("uname", "echo 6.12.3-amd64")
            .program("rustc", "echo 'rustc 1.95.0 (59807616e 2026-04-14)'")
    }

    /// The machine with a program added or replaced.
    fn program(self, name: &str, script: &str) -> Self {
        let path = self.0.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    /// Runs the script: whether the machine suffices for the purpose, and the output.
    fn prepare(&self, purpose: &str, variables: &[(&str, &str)]) -> (bool, String) {
        let Output { status, stdout, stderr } = Command::new("/bin/sh")
            .arg(root().join("scripts/prepare.sh"))
            .arg(purpose)
            .env_clear()
            .env("PATH", self.0.path())
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&stdout), "", "stdout is for those who asked");
        (status.success(), String::from_utf8(stderr).unwrap())
    }

    /// The recorded arguments of the machine's apt-get: see [`Machine::debian`].
    fn apt(&self) -> String {
        fs::read_to_string(self.0.path().join("apt.log")).unwrap_or_default()
    }

    /// The machine with an apt-get that records its arguments and then runs `script`.
    fn debian(self, script: &str) -> Self {
        let directory = self.0.path().display().to_string();
        self.program(
            "apt-get",
            &format!("echo \"$@\" >>{directory}/apt.log\ncd {directory}\n{script}"),
        )
    }
}

/// A C compiler that finds the libraries (as /dev/null).
const CC: &str = "echo /dev/null";

#[test]
fn nothing_is_installed_with_deps_no() {
    let machine = Machine::new().debian("");
    let (enough, said) = machine.prepare("demo", &[("DEPS", "no")]);
    assert!(!enough, "{said}");
    assert!(said.contains("cc (gcc): links the executable\n"), "{said}");
    assert!(said.contains("ping (iputils-ping): "), "{said}");
    let last = said.lines().last().unwrap();
    assert!(last.contains("make deps installs). As root: apt-get install gcc "), "{said}");
    assert_eq!(machine.apt(), "");
}

#[test]
fn deps_no_continues_without_optional_programs() {
    let machine =
        Machine::new().debian("").program("cc", CC).program("ip", "").program("unshare", "");
    let (enough, said) = machine.prepare("bench", &[("DEPS", "no"), ("PEER", "/nonexistent")]);
    assert!(enough, "{said}");
    assert!(said.contains("the reference plugins, to compare with; can do without"), "{said}");
    assert!(said.ends_with("continuing without them\n"), "{said}");
}

#[test]
fn root_on_debian_may_install_a_compiler() {
    let compiler =
        "case $* in *install*) printf '#!/bin/sh\\necho /dev/null\\n' >cc; chmod +x cc ;; esac";
    let machine = Machine::new().debian(&compiler.replace("chmod", "/bin/chmod"));
    let (enough, said) = machine.prepare("build", &[]);
    assert!(enough, "{said}");
    assert!(said.contains("apt-get installs gcc libc6-dev"), "{said}");
    assert!(machine.apt().ends_with(" install gcc libc6-dev\n"), "{}", machine.apt());
    assert_eq!(machine.prepare("build", &[]), (true, String::new()), "silent when all is there");
}

#[test]
fn an_ordinary_user_gets_the_commands_for_root() {
    let machine = Machine::new().debian("").program("id", "echo 1000");
    let (enough, said) = machine.prepare("build", &[]);
    assert!(!enough && said.contains("As root: apt-get install gcc libc6-dev\n"), "{said}");
    assert_eq!(machine.apt(), "");
    let (enough, said) = machine.prepare("test", &[]);
    assert!(!enough && said.contains("the tests need root"), "{said}");
}

#[test]
fn other_systems_get_their_package_names() {
    for (manager, command) in [
        ("dnf", "dnf install gcc glibc-static"),
        ("zypper", "zypper install gcc glibc-devel-static"),
        ("apk", "apk add gcc musl-dev"),
        ("pacman", "pacman -S gcc glibc"),
    ] {
        let machine = Machine::new().program(manager, "touch /nonexistent/called");
        let (enough, said) = machine.prepare("build", &[]);
        assert!(!enough && said.contains(&format!("As root: {command}\n")), "{manager}: {said}");
    }
    let (enough, said) = Machine::new().prepare("build", &[]);
    assert!(!enough && said.contains("As root: Debian's packages gcc libc6-dev\n"), "{said}");
}

#[test]
fn outdated_rust_and_kernel_are_named() {
    let machine = Machine::new().program("cc", CC).program("rustc", "echo 'rustc 1.63.0'");
    let (enough, said) = machine.prepare("build", &[]);
    assert!(!enough && said.contains("found: rustc 1.63.0\n"), "{said}");
    assert!(said.contains(env!("CARGO_PKG_RUST_VERSION")), "{said}");
    let none = machine.program("rustc", "echo 'error: no default toolchain' >&2; exit 1");
    let (enough, said) = none.prepare("build", &[("SUDO_USER", "jane")]);
    assert!(!enough && said.contains("error: no default toolchain\n"), "{said}");
    assert!(said.contains("if jane has it: sudo env HOME="), "{said}");

    let machine = Machine::new().program("cc", CC).program("uname", "echo 5.4.0-1-amd64");
    let (enough, said) = machine.prepare("build", &[]);
    assert!(enough && said.contains("this kernel is Linux 5.4.0-1-amd64; "), "{said}");
}

#[test]
fn a_demo_is_not_built_without_privileges() {
    let machine =
        ["ip", "ping", "nsenter"].into_iter().fold(Machine::new(), |m, p| m.program(p, ""));
    let machine = machine.program("cc", CC).program("readlink", "echo /run").program("unshare", "");
    assert_eq!(machine.prepare("demo", &[]), (true, String::new()));
    let (enough, said) =
        machine.program("unshare", "echo not here >&2; exit 1").prepare("demo", &[]);
    assert!(
        !enough && said.contains("demo: needs root (in a container: a privileged one)"),
        "{said}"
    );
    assert!(said.contains("not here"), "{said}");
}

/// The script must describe the purpose of each Debian package that it installs.
#[test]
fn every_package_has_a_purpose() {
    let text = fs::read_to_string(root().join("scripts/prepare.sh")).unwrap();
    let table = |name: &str| {
        let (_, rest) = text.split_once(&format!("\n{name}=\"\n")).unwrap();
        rest.split_once("\n\"\n").unwrap().0
    };
    let described: Vec<&str> =
        table("elsewhere").lines().map(|line| line.split('|').next().unwrap().trim()).collect();
    for line in table("elsewhere").lines() {
        let columns: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, purpose, names] = columns[..] else { panic!("three columns: {line}") };
        assert!(!purpose.is_empty(), "no purpose: {line}");
        assert!(matches!(names.split(' ').count(), 1 | 4), "no name or four: {line}");
    }
    for line in table("needs").lines() {
        let package = line.split_whitespace().nth(1).unwrap();
        assert!(
            ["-", "pip"].contains(&package) || described.contains(&package),
            "not in \"elsewhere\": {package}"
        );
    }
}

/// The first build is for the C library that was just installed, not for the one that was there.
#[test]
fn the_first_demo_is_built_for_the_installed_library() {
    let stubs = TempDir::new().unwrap();
    let path = |name: &str| stubs.path().join(name).display().to_string();
    let program = |name: &str, script: &str| {
        fs::write(path(name), format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(path(name), fs::Permissions::from_mode(0o755)).unwrap();
    };
    program(
        "rustc",
        &format!(
            "case $* in *sysroot*) echo {} ;; *-vV*) echo host: x86_64-unknown-linux-gnu ;;\n\
             *) echo rustc 1.95.0 ;; esac",
            path("sysroot")
        ),
    );
    let library = path("sysroot/lib/rustlib/x86_64-unknown-linux-musl/lib");
    program("rustup", &format!("mkdir -p {library}"));
    program("uname", "case $* in -m) echo x86_64 ;; *) echo 6.12.3-amd64 ;; esac");
    program("cargo", "echo \"cargo $*\"; exit 1");
    let search = format!("{}:{}", stubs.path().display(), std::env::var("PATH").unwrap());
    let output = Command::new("make")
        .args(["demo", &format!("CARGO_TARGET_DIR={}", path("target"))])
        .current_dir(root())
        .env("PATH", search)
        .env_remove("CARGO")
        .env_remove("MAKEFLAGS")
        .env_remove("MAKELEVEL")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let built: Vec<&str> = said.lines().filter(|line| line.starts_with("cargo ")).collect();
    assert_eq!(built.len(), 1, "{said}");
    assert!(built[0].ends_with(" --target x86_64-unknown-linux-musl"), "{said}");
}
