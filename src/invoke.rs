//! Plugins as processes, recorded in the flight recorder.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use cni::error::Result;
use cni::exec::{PluginCommand, PluginExecutor, ProcessExecutor};

use crate::netns;
use crate::trace::{self, TRACEPARENT};

/// Runs plugins as processes. The plugin belongs to the trace of this process.
#[derive(Clone, Copy, Debug)]
pub struct TracedExecutor;

impl PluginExecutor for TracedExecutor {
    fn find_plugin(&self, name: &str, dirs: &[PathBuf]) -> Result<PathBuf> {
        ProcessExecutor.find_plugin(name, dirs)
    }

    fn run_plugin(&self, call: &PluginCommand<'_>) -> Result<Vec<u8>> {
        netns::require_home_netns()?;
        let span = trace::begin_span("plugin");
        span.add_text("process.executable.path", || call.path.display().to_string());
        let parent = trace::traceparent_value().map(|parent| (TRACEPARENT, parent));
        let env = call.env.iter().cloned().chain(parent).collect();
        span.end_with(ProcessExecutor.run_plugin(&PluginCommand { env, ..*call }))
    }
}

/// Whether `path` leads to the executable of this process: the same device and inode. `false` on
/// errors.
pub fn is_own_executable(path: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
    identity(path).is_some_and(|id| identity(Path::new("/proc/self/exe")) == Some(id))
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_to_the_own_executable_is_recognised() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("bridge");
        symlink(env::current_exe().unwrap(), &link).unwrap();
        assert!(is_own_executable(&link));
        assert!(!is_own_executable(Path::new("/bin/sh")) && !is_own_executable(Path::new("/none")));
    }
}
