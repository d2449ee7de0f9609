//! Runs plugins of this executable without new processes, for tools that call many plugins.

use std::path::{Path, PathBuf};

use crate::framework::call::{PluginCall, PluginCaller, TURN_VARIABLE};
use crate::framework::{AppletTable, AttachmentTurn, BuiltinPlugin};
use crate::invoke::{self, TracedExecutor};
use crate::repairs::RepairFindings;
use cni::error::Result;
use cni::exec::{PluginCommand, PluginExecutor};
use cni::json::encode_pretty;
use cni::plugin::CallEnvironment;

/// Runs the plugins of this executable in this process, and others as processes.
#[derive(Debug)]
pub(super) struct InProcessExecutor {
    pub(super) table: AppletTable,
    caller: PluginCaller,
    turn: AttachmentTurn,
}

impl PluginExecutor for InProcessExecutor {
    fn find_plugin(&self, name: &str, dirs: &[PathBuf]) -> Result<PathBuf> {
        TracedExecutor.find_plugin(name, dirs)
    }

    fn run_plugin(&self, call: &PluginCommand<'_>) -> Result<Vec<u8>> {
        let Some(plugin) = self.find_own_plugin(call.path) else {
            return TracedExecutor.run_plugin(call);
        };
        match (plugin.run)(&self.build_call(&call.env, call.stdin)?)? {
            None => Ok(Vec::new()),
            Some(result) => Ok(encode_pretty(&result.to_json())?.into_bytes()),
        }
    }
}

impl InProcessExecutor {
    /// Runs plugins as a runtime does.
    pub(super) fn new(table: AppletTable) -> InProcessExecutor {
        InProcessExecutor { table, caller: PluginCaller::Runtime, turn: AttachmentTurn::default() }
    }

    /// Runs the DELs of an attachment that has ended, whose turn this process has.
    pub(super) fn for_collector(table: AppletTable, turn: AttachmentTurn) -> InProcessExecutor {
        InProcessExecutor { table, caller: PluginCaller::Collector, turn }
    }

    /// Calls `Plugin::repair` for the plugin at `path`. Does nothing for another executable.
    pub(super) fn run_repair(
        &self,
        path: &Path,
        env: &[(&str, String)],
        stdin: &[u8],
        repairs: &mut RepairFindings,
    ) -> Result<()> {
        let Some(plugin) = self.find_own_plugin(path) else { return Ok(()) };
        (plugin.repair)(&self.build_call(env, stdin)?, repairs)
    }

    fn build_call<'a>(&self, env: &[(&str, String)], stdin: &'a [u8]) -> Result<PluginCall<'a>> {
        let var = |name: &str| {
            let found = env.iter().rfind(|(key, _)| *key == name);
            found.map(|(_, value)| value.clone()).unwrap_or_default()
        };
        let env = CallEnvironment::from_lookup(var);
        env.require_variables()?;
        let turn_of_caller = var(TURN_VARIABLE);
        Ok(PluginCall {
            env,
            stdin,
            table: self.table,
            caller: self.caller,
            turn: self.turn.clone(),
            turn_of_caller,
        })
    }

    pub(super) fn find_own_plugin(&self, path: &Path) -> Option<BuiltinPlugin> {
        let name = path.file_name()?.to_str()?;
        self.table.find_plugin(name).filter(|_| invoke::is_own_executable(path))
    }
}
