//! Long-running tools restart as the new executable after an upgrade: the installed plugins are
//! links to the new file, and the old process would run the plugins of the old release in their
//! place.

use std::path::PathBuf;

use super::files;
use super::origin::ExecutableOrigin;
use crate::cmd;
use crate::invoke;
use cni::error::{Error, Result};

/// The executable of this process.
pub(in crate::tool) struct OwnExecutable {
    /// The path of the executable at the start of the process; another file may have replaced it.
    path: PathBuf,
}

impl OwnExecutable {
    pub(in crate::tool) fn find_current() -> Result<OwnExecutable> {
        let own = std::env::current_exe().map_err(|e| Error::io("find this executable", &e))?;
        let text = own.to_string_lossy();
        let path = text.strip_suffix(" (deleted)").map(PathBuf::from).unwrap_or(own);
        Ok(OwnExecutable { path })
    }

    /// Whether the file is missing: an installer may be replacing it at this moment.
    pub(in crate::tool) fn is_missing(&self) -> bool {
        !self.path.is_file()
    }

    /// If another cnibox is at the path, replaces this process by it, with the same arguments.
    pub(in crate::tool) fn restart_if_replaced(&self) {
        let is_cnibox = || {
            let read = files::read_file(&self.path);
            read.is_ok_and(|bytes| {
                matches!(ExecutableOrigin::from_bytes(&bytes), ExecutableOrigin::Own(_))
            })
        };
        if !self.is_missing() && !invoke::is_own_executable(&self.path) && is_cnibox() {
            warn!("could not restart: {}", cmd::replace_process(&self.path));
        }
    }
}
