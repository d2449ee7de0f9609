//! `--json`: results, machine and plugins, as packaging/charts.py reads them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;

use cnibox::testing::{APPLETS, AppletKind};
use serde_json::{Value, json};

use crate::Result;
use crate::options::Options;

/// Writes the rows of the table and their context. `directories` are the directories of cnibox and
/// the peer.
pub(crate) fn write(
    file: &Path,
    options: &Options,
    directories: [Option<&Path>; 2],
    rows: &[Value],
) -> Result<()> {
    let [ours, peer] = directories.map(|directory| directory.map(plugins));
    let report = json!({
        "machine": machine(),
        "options": {"rounds": options.rounds, "backend": options.backend.name(), "foreign": options.foreign},
        "cnibox": {"name": concat!("cnibox ", env!("CARGO_PKG_VERSION")), "plugins": ours},
        "reference": peer.map(|plugins| json!({"name": options.peer_name, "plugins": plugins})),
        "rows": rows,
    });
    let text = serde_json::to_string_pretty(&report)? + "\n";
    fs::write(file, text).map_err(|e| format!("--json {}: {e}", file.display()).into())
}

/// The processor model, the number of processors, and the kernel release without the distribution's
/// suffix.
fn machine() -> Value {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let info = read("/proc/cpuinfo");
    let model = info.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let release = read("/proc/sys/kernel/osrelease");
    let kernel = release.trim().split(['-', '+']).next().unwrap_or_default();
    json!({
        "processor": model.trim_start_matches([' ', '\t', ':']),
        "processors": thread::available_parallelism().map_or(1, usize::from),
        "virtual": info.contains(" hypervisor"),
        "architecture": std::env::consts::ARCH,
        "kernel": kernel,
    })
}

/// The number of plugins in the directory, of files, and of bytes.
fn plugins(directory: &Path) -> Value {
    let names =
        APPLETS.iter().filter(|applet| applet.kind != AppletKind::Tool).map(|applet| applet.name);
    let found: Vec<_> =
        names.filter_map(|name| fs::canonicalize(directory.join(name)).ok()).collect();
    let count = found.len();
    let files: BTreeMap<_, _> = found
        .into_iter()
        .filter_map(|file| fs::metadata(&file).ok().map(|meta| (file, meta.len())))
        .collect();
    json!({"count": count, "files": files.len(), "bytes": files.values().sum::<u64>()})
}
