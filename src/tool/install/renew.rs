//! Long-running tools go on as the executable that an upgrade has put at their path: the plugins that are installed
//! then are links to that file, which the old process must not stand for.

use std::path::PathBuf;

use super::files;
use super::origin::ExecutableOrigin;
use crate::cmd;
use crate::error::{Error, Result};
use crate::{invoke, log};

/// The executable of this process.
pub(in crate::tool) struct OwnExecutable {
    /// Its path at the start, also if another file has replaced it.
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
            log::warn(cmd::replace_process(&self.path));
        }
    }
}
