//! Where the benchmark may do what it does: as root at once, else in a user namespace; with a `/run`
//! of its own, where plugins keep their records, and a folder that is removed however it ends.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use cnibox::testing::netns::Netns;

use crate::Result;

/// The folder, for the process inside.
const DIR: &str = "CNIBOX_BENCH_DIR";

/// Runs the benchmark and cleans up after it. A trap that is not empty keeps the shell alive on
/// Ctrl-C, but not the benchmark, whose end takes the namespaces along.
const KEEPER: &str = r#"
dir=$(mktemp -d "${TMPDIR:-/tmp}/cnibox-bench.XXXXXX") || exit 1
trap 'rm -rf "$dir"' EXIT
trap : INT TERM HUP
ulimit -n "$(ulimit -H -n)"
export CNIBOX_BENCH_DIR=$dir
"$@"
"#;

/// Needs a mount namespace.
const OWN_RUN: &str = r#"mount -t tmpfs tmpfs /run && exec "$@""#;

const USER_NAMESPACE: [&str; 3] = ["unshare", "--user", "--map-root-user"];

const HINT: &str = "run it as root, or allow user namespaces: \
    sysctl kernel.unprivileged_userns_clone=1 (Debian), \
    sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu)";

/// The folder for this run, when the process is inside.
pub(crate) fn dir() -> Option<PathBuf> {
    std::env::var_os(DIR).map(PathBuf::from)
}

/// Replaces this process with the same one inside.
pub(crate) fn enter() -> Result<ExitCode> {
    let mut command = Command::new("sh");
    command.args(["-c", KEEPER, "pods"]);
    if let Err(missing) = Netns::fresh() {
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
