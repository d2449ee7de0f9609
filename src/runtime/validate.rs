//! Whether the plugins of a network are there and speak its version.

use super::{NetworkList, PluginConf, Runtime};
use crate::error::{Code, Error, Result};
use crate::invoke::{self, VersionInfo};
use crate::sort::sort;

impl Runtime {
    /// Looks up every plugin and asks for its versions. Returns the capabilities that any of them
    /// wants, sorted.
    ///
    /// Errors of all plugins at once, `[<e1> <e2>]`: not found, or
    /// `plugin <type> does not support config version "<v>"`.
    pub fn validate(&self, list: &NetworkList) -> Result<Vec<String>> {
        let errors: Vec<Error> = list
            .plugins
            .iter()
            .filter_map(|plugin| self.validate_version(plugin, &list.cni_version).err())
            .collect();
        if let Some(first) = errors.first() {
            let texts: Vec<String> = errors.iter().map(Error::to_string).collect();
            return Err(Error::foreign(first.code(), format!("[{}]", texts.join(" ")), ""));
        }
        Ok(capabilities(&list.plugins))
    }

    /// As [`Runtime::validate`] for one plugin and its own version; its error comes as it is.
    pub fn validate_plugin(&self, plugin: &PluginConf) -> Result<Vec<String>> {
        self.validate_version(plugin, &plugin.cni_version)?;
        Ok(capabilities(std::slice::from_ref(plugin)))
    }

    /// The versions that the plugin called `plugin_type` speaks.
    pub fn version_info(&self, plugin_type: &str) -> Result<VersionInfo> {
        let path = self.executor.find(plugin_type, &self.plugin_dirs)?;
        invoke::version_info(self.executor.as_ref(), &path, self.deadline)
    }

    fn validate_version(&self, plugin: &PluginConf, version: &str) -> Result<()> {
        let kind = &plugin.plugin_type;
        if self.version_info(kind)?.supports(version) {
            return Ok(());
        }
        let version = if version.is_empty() { "0.1.0" } else { version };
        let msg = format!("plugin {kind} does not support config version \"{version}\"");
        Err(Error::new(Code::INCOMPATIBLE_VERSION, msg))
    }
}

fn capabilities(plugins: &[PluginConf]) -> Vec<String> {
    let mut names: Vec<String> =
        plugins.iter().flat_map(PluginConf::wanted).map(str::to_owned).collect();
    sort(&mut names);
    names.dedup();
    names
}
