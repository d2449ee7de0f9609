//! Plugins of this executable run without a process of their own: for tools that call many of them.

use std::path::{Path, PathBuf};

use crate::cni::json::pretty;
use crate::error::Result;
use crate::invoke::{self, Exec, Executor, System};
use crate::skel::call::{Call, Caller, Env};
use crate::skel::{OwnPlugin, Table};

/// Runs this executable's plugins in this process, and others as processes.
#[derive(Debug)]
pub(super) struct InProcess {
    pub(super) table: Table,
}

impl Executor for InProcess {
    fn find(&self, name: &str, dirs: &[PathBuf]) -> Result<PathBuf> {
        System.find(name, dirs)
    }

    fn run(&self, call: &Exec<'_>) -> Result<Vec<u8>> {
        let Some(plugin) = self.own(call.path) else { return System.run(call) };
        let var = |name: &str| {
            let found = call.env.iter().rfind(|(key, _)| *key == name);
            found.map(|(_, value)| value.clone()).unwrap_or_default()
        };
        let env = Env::read(var);
        env.check()?;
        let lookup = self.table.lookup;
        let call = Call { env, stdin: call.stdin, lookup, caller: Caller::Runtime };
        match (plugin.run)(&call)? {
            None => Ok(Vec::new()),
            Some(result) => Ok(pretty(&result.to_json())?.into_bytes()),
        }
    }
}

impl InProcess {
    fn own(&self, path: &Path) -> Option<OwnPlugin> {
        let name = path.file_name()?.to_str()?;
        (self.table.lookup)(name).filter(|_| invoke::is_own_executable(path))
    }
}
