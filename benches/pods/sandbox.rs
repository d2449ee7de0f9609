//! The benchmark's environment: root, or root of a user namespace; a private `/run` for the
//! plugins' records; and a temporary directory that is removed however the benchmark ends.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use cnibox::testing::netns::Netns;

use crate::Result;

/// The environment variable with the temporary directory; set inside the sandbox.
const DIR: &str = "CNIBOX_BENCH_DIR";

/// Runs the benchmark and cleans up after it. A non-empty trap keeps the shell alive on Ctrl-C but
/// not the benchmark, and the benchmark's namespaces end with its process.
const KEEPER: &str = r#"
dir=$(mktemp -d "${TMPDIR:-/tmp}/cnibox-bench.XXXXXX") || exit 1
trap 'rm -rf "$dir"' EXIT
trap : INT TERM HUP
ulimit -n "$(ulimit -H -n)"
export CNIBOX_BENCH_DIR=$dir
"$@"
"#;

/// Requires a mount namespace.
const OWN_RUN: &str = r#"mount -t tmpfs tmpfs /run && exec "$@""#;

const USER_NAMESPACE: [&str; 3] = ["unshare", "--user", "--map-root-user"];

const HINT: &str = "run it as root, or allow user namespaces: \
    sysctl kernel.unprivileged_userns_clone=1 (Debian), \
    sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu)";

/// The temporary directory of this run, or `None` outside the sandbox.
pub(crate) fn dir() -> Option<PathBuf> {
    std::env::var_os(DIR).map(PathBuf::from)
}

/// Replaces this process with the same executable inside the sandbox.
pub(crate) fn enter() -> Result<ExitCode> {
    let mut command = Command::new("sh");
    command.args(["-c", KEEPER, "pods"]);
    if let Err(missing) = Netns::create_unnamed() {
        let [unshare, args @ ..] = USER_NAMESPACE;
        let probe = Command::new(unshare).args(args).arg("true").output();
        let probe = probe.map_err(|e| format!("start unshare (util-linux): {e}"))?;
        if !probe.status.success() {
            let why = String::from_utf8_lossy(&probe.stderr);
            return Err(format!("{missing}; {}; {HINT}", why.trim()).into());
        }
        command.args(USER_NAMESPACE);
    }
    command.args(["unshare", "--mount", "sh", "-c", OWN_RUN, "pods"]);
    command.arg(std::env::current_exe()?).args(std::env::args_os().skip(1));
    Err(command.exec().into())
}
