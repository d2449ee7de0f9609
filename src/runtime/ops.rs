//! The operations on one attachment: ADD, CHECK, DEL, for a list and for a single plugin.

use std::path::{Path, PathBuf};

use super::cache::{Cache, Key};
use super::{
    Attach, CachedAttachment, NetworkList, OnAddError, OnDelError, PluginConf, Runtime, request,
};
use crate::cni::{CniResult, SpecVersion};
use crate::error::{Code, Context, Error, Result};
use crate::invoke::{Exec, read_result};
use crate::log;

/// How the error of one plugin of several is told: plain, or with the plugin in front.
type Tell = fn(&PluginConf, Error) -> Error;

/// An ADD under way.
struct Chain<'a> {
    list: &'a NetworkList,
    attach: &'a Attach,
    /// How many plugins were started.
    ran: usize,
    last: Option<CniResult>,
}

impl Runtime {
    /// Attaches: runs the plugins in order, each with the result of the one before, and caches
    /// the last one's result, which is returned in the version that plugin gave it. `None` for a
    /// network without plugins.
    ///
    /// The first failure ends it: `plugin type="<type>" name="<name>" failed (add): <error>`
    /// with the plugin's code, or `failed to set network "<name>" cached result: <reason>`; see
    /// [`OnAddError`] for what remains then.
    pub fn add(&self, list: &NetworkList, attach: &Attach) -> Result<Option<CniResult>> {
        self.add_all(list, attach, |plugin, e| named(plugin, "add", &e))
    }

    /// As [`Runtime::add`] for one plugin under its own name and version; its error comes as it
    /// is.
    pub fn add_plugin(&self, plugin: &PluginConf, attach: &Attach) -> Result<Option<CniResult>> {
        self.add_all(&NetworkList::of_single(plugin), attach, |_, e| e)
    }

    /// Checks that the attachment is still what its ADD made: runs the plugins in order, each
    /// with the cached result of the whole ADD. Nothing is run if the list says `disableCheck`.
    ///
    /// Errors: the first failing plugin's as it is;
    /// `configuration version "<v>" does not support the CHECK command` (code 1) below 0.4.0;
    /// `failed to get network "<name>" cached result: <reason>`.
    pub fn check(&self, list: &NetworkList, attach: &Attach) -> Result<()> {
        if !list.at_least(SpecVersion::V0_4_0)? {
            let version = &list.cni_version;
            let msg =
                format!("configuration version \"{version}\" does not support the CHECK command");
            return Err(Error::new(Code::INCOMPATIBLE_VERSION, msg));
        }
        if list.disable_check {
            return Ok(());
        }
        Key::of(&list.name, attach)?;
        let prev = self
            .cached_result(list, attach)
            .context(|| format!("failed to get network \"{}\" cached result", list.name))?;
        list.plugins.iter().try_for_each(|plugin| {
            let request = request::for_attachment(list, plugin, attach, prev.as_ref())?;
            self.run("CHECK", plugin, attach, &request).map(drop)
        })
    }

    /// What CHECK of the attachment would ask each plugin that is found, in order, whatever the version: where
    /// the plugin is, and its request; the environment is the same for all.
    pub(crate) fn check_requests(
        &self,
        list: &NetworkList,
        attach: &Attach,
    ) -> Result<Vec<(PathBuf, Vec<u8>)>> {
        Key::of(&list.name, attach)?;
        let prev = self.cached_result(list, attach)?;
        let request = |plugin: &PluginConf| {
            let path = self.find(plugin).ok()?;
            let request = request::for_attachment(list, plugin, attach, prev.as_ref());
            Some(request.map(|request| (path, request)))
        };
        list.plugins.iter().filter_map(request).collect()
    }

    /// The environment of a call.
    pub(crate) fn environment(
        &self,
        command: &str,
        attach: &Attach,
    ) -> Vec<(&'static str, String)> {
        request::environment(command, attach, &self.plugin_dirs)
    }

    /// As [`Runtime::check`] for one plugin under its own name and version.
    pub fn check_plugin(&self, plugin: &PluginConf, attach: &Attach) -> Result<()> {
        self.check(&NetworkList::of_single(plugin), attach)
    }

    /// Detaches: runs the plugins in reverse order, each with the cached result of the ADD (from
    /// 0.4.0 on, if the cache has a readable result), then removes it from the cache. Idempotent.
    ///
    /// A failure is `plugin type="<type>" name="<name>" failed (delete): <error>` with the
    /// plugin's code; see [`OnDelError`] for whether the others still run. The cache file then
    /// stays.
    pub fn del(&self, list: &NetworkList, attach: &Attach) -> Result<()> {
        self.del_all(list, attach, |plugin, e| named(plugin, "delete", &e))
    }

    /// As [`Runtime::del`] for one plugin under its own name and version; its error comes as it
    /// is.
    pub fn del_plugin(&self, plugin: &PluginConf, attach: &Attach) -> Result<()> {
        self.del_all(&NetworkList::of_single(plugin), attach, |_, e| e)
    }

    /// The result of the attachment's ADD in the network's version; `None` if none is cached.
    pub fn cached_result(&self, list: &NetworkList, attach: &Attach) -> Result<Option<CniResult>> {
        self.cache().result(list, attach)
    }

    /// The configuration with which the attachment was made, and `attach` with the arguments of
    /// then: `CNI_ARGS` if there were any, capability arguments always; the namespace stays that
    /// of `attach`. `None` if nothing is cached. DEL with these undoes exactly what ADD did.
    ///
    /// Errors: `failed to unmarshal cached network "<name>" config: <reason>`,
    /// `read cached network "<name>" config has wrong kind: <kind>`.
    pub fn cached_config(
        &self,
        network: &str,
        attach: &Attach,
    ) -> Result<Option<(Vec<u8>, Attach)>> {
        let Some(cached) = self.cache().config(network, attach)? else { return Ok(None) };
        let mut attach = attach.clone();
        if !cached.attach.args.is_empty() {
            attach.args = cached.attach.args;
        }
        attach.capability_args = cached.attach.capability_args;
        Ok(Some((cached.config, attach)))
    }

    /// The attachments in the cache, of one container or, if `container_id` is empty, of all.
    /// Files that are none are passed over; a directory that does not exist has none.
    pub fn cached_attachments(&self, container_id: &str) -> Result<Vec<CachedAttachment>> {
        self.cache().attachments(container_id)
    }

    pub(super) fn cache(&self) -> Cache {
        Cache::below(&self.cache_dir)
    }

    fn add_all(
        &self,
        list: &NetworkList,
        attach: &Attach,
        tell: Tell,
    ) -> Result<Option<CniResult>> {
        let mut chain = Chain { list, attach, ran: 0, last: None };
        // A second ADD fails because of the first one, whose work is not to be undone.
        let undo = self.on_add_error == OnAddError::Undo
            && matches!(self.cached_result(list, attach), Ok(None));
        let added = self.add_chain(&mut chain, tell);
        if let (Err(failed), true) = (&added, undo) {
            self.undo(&chain, failed);
        }
        added.map(|()| chain.last)
    }

    fn add_chain(&self, chain: &mut Chain<'_>, tell: Tell) -> Result<()> {
        for plugin in &chain.list.plugins {
            self.add_one(chain, plugin).map_err(|e| tell(plugin, e))?;
        }
        let Chain { list, attach, last, .. } = chain;
        self.cache()
            .store(list, attach, last.as_ref())
            .context(|| format!("failed to set network \"{}\" cached result", list.name))
    }

    fn add_one(&self, chain: &mut Chain<'_>, plugin: &PluginConf) -> Result<()> {
        let Chain { list, attach, .. } = *chain;
        let path = self.find(plugin)?;
        Key::of(&list.name, attach)?;
        // The next plugin refuses a result of another generation than the network's version.
        let prev = match (chain.last.take(), SpecVersion::exact(&list.cni_version)) {
            (Some(result), Some(version)) => Some(result.convert(version)?),
            (result, _) => result,
        };
        let request = request::for_attachment(list, plugin, attach, prev.as_ref())?;
        chain.last = prev;
        chain.ran += 1;
        let stdout = self.run_at(&path, "ADD", attach, &request)?;
        chain.last = Some(read_result(&stdout, list.result_version())?);
        Ok(())
    }

    /// DEL for the plugins of a failed ADD, including the plugin that failed, which may have left
    /// something. What fails as the ADD did is not reported twice.
    fn undo(&self, chain: &Chain<'_>, failed: &Error) {
        let Chain { list, attach, ran, last } = chain;
        let knows_prev = list.at_least(SpecVersion::V0_4_0).unwrap_or(false);
        let prev = last.as_ref().filter(|_| knows_prev);
        for plugin in list.plugins.iter().take(*ran).rev() {
            let done = request::for_attachment(list, plugin, attach, prev)
                .and_then(|request| self.run("DEL", plugin, attach, &request));
            if let Err(error) = done
                && !failed.msg().ends_with(error.msg())
            {
                let kind = &plugin.plugin_type;
                log::warn(format_args!("undo a failed ADD: plugin type=\"{kind}\": {error}"));
            }
        }
    }

    fn del_all(&self, list: &NetworkList, attach: &Attach, tell: Tell) -> Result<()> {
        let key = Key::of(&list.name, attach)?;
        let prev = self.prev_for_del(list, attach, &key)?;
        let mut errors = Vec::new();
        for plugin in list.plugins.iter().rev() {
            let done = request::for_attachment(list, plugin, attach, prev.as_ref())
                .and_then(|request| self.run("DEL", plugin, attach, &request));
            if let Err(error) = done {
                errors.push(tell(plugin, error));
                if self.on_del_error == OnDelError::Stop {
                    break;
                }
            }
        }
        if let Some(error) = Error::join(errors) {
            return Err(error);
        }
        self.cache().remove(&key);
        Ok(())
    }

    /// A cache file that is no good must not keep a container from going away: it is dropped.
    fn prev_for_del(
        &self,
        list: &NetworkList,
        attach: &Attach,
        key: &Key,
    ) -> Result<Option<CniResult>> {
        if !list.at_least(SpecVersion::V0_4_0)? {
            return Ok(None);
        }
        Ok(self.cached_result(list, attach).unwrap_or_else(|error| {
            log::debug(format_args!("cached result dropped: {error}"));
            self.cache().remove(key);
            None
        }))
    }

    pub(super) fn find(&self, plugin: &PluginConf) -> Result<PathBuf> {
        self.executor.find(&plugin.plugin_type, &self.plugin_dirs)
    }

    /// Finds and runs a plugin; returns its stdout.
    pub(super) fn run(
        &self,
        command: &str,
        plugin: &PluginConf,
        attach: &Attach,
        request: &[u8],
    ) -> Result<Vec<u8>> {
        self.run_at(&self.find(plugin)?, command, attach, request)
    }

    fn run_at(
        &self,
        path: &Path,
        command: &str,
        attach: &Attach,
        request: &[u8],
    ) -> Result<Vec<u8>> {
        let env = request::environment(command, attach, &self.plugin_dirs);
        self.executor.run(&Exec { path, env, stdin: request, deadline: self.deadline })
    }
}

/// The plugin in front of its error; code and details stay readable.
fn named(plugin: &PluginConf, verb: &str, error: &Error) -> Error {
    let kind = &plugin.plugin_type;
    let name = match plugin.name.as_str() {
        "" => String::new(),
        name => format!(" name=\"{name}\""),
    };
    let msg = format!("plugin type=\"{kind}\"{name} failed ({verb}): {}", error.msg());
    Error::foreign(error.code(), msg, error.details())
}
