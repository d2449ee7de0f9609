//! Runs plugins of this executable without new processes, for tools that call many plugins.

use std::path::{Path, PathBuf};

use crate::cni::json::pretty;
use crate::error::Result;
use crate::invoke::{self, Exec, Executor, System};
use crate::repairs::Repairs;
use crate::skel::call::{Call, Caller, Env};
use crate::skel::{OwnPlugin, Table};

/// Runs the plugins of this executable in this process, and others as processes.
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
        match (plugin.run)(&self.request(&call.env, call.stdin)?)? {
            None => Ok(Vec::new()),
            Some(result) => Ok(pretty(&result.to_json())?.into_bytes()),
        }
    }
}

impl InProcess {
    /// Calls [`OwnPlugin::repair`] for the plugin at `path`. Does nothing for another executable.
    pub(super) fn repair(
        &self,
        path: &Path,
        env: &[(&str, String)],
        stdin: &[u8],
        repairs: &mut Repairs,
    ) -> Result<()> {
        let Some(plugin) = self.own(path) else { return Ok(()) };
        (plugin.repair)(&self.request(env, stdin)?, repairs)
    }

    fn request<'a>(&self, env: &[(&str, String)], stdin: &'a [u8]) -> Result<Call<'a>> {
        let var = |name: &str| {
            let found = env.iter().rfind(|(key, _)| *key == name);
            found.map(|(_, value)| value.clone()).unwrap_or_default()
        };
        let env = Env::read(var);
        env.check()?;
        Ok(Call { env, stdin, table: self.table, caller: Caller::Runtime })
    }

    fn own(&self, path: &Path) -> Option<OwnPlugin> {
        let name = path.file_name()?.to_str()?;
        self.table.plugin(name).filter(|_| invoke::is_own_executable(path))
    }
}
