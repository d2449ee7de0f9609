//! The operations on a network as a whole: GC and STATUS.

use super::{Attach, Attachment, CachedAttachment, NetworkList, PluginConf, Runtime, request};
use crate::cni::{NetworkName, SpecVersion};
use crate::error::{Error, Result};

impl Runtime {
    /// Removes what is left of attachments that are not in `valid`: a DEL for each one in the
    /// cache, with the configuration and the arguments of its ADD, then (from 1.1.0 on) the verb
    /// GC for every plugin, with the list, for what the cache does not know of.
    ///
    /// `None` instead of a list: every cached attachment of the network is removed, and the
    /// plugins get no list; ours then release nothing. An empty list says that none is valid.
    /// Nothing is done if the list says `disableGC`.
    ///
    /// Goes on after failures and reports them all, one per line:
    /// `failed to delete stale attachment <id> <ifname>: <reason>`,
    /// `failed to GC plugin <type>: <reason>`.
    pub fn gc(&self, list: &NetworkList, valid: Option<&[Attachment]>) -> Result<()> {
        if list.disable_gc {
            return Ok(());
        }
        NetworkName::parse(&list.name)?;
        let verb_exists = list.at_least(SpecVersion::V1_1_0)?;
        let mut errors = Vec::new();
        match self.cached_attachments("") {
            Ok(cached) => self.del_stale(list, valid.unwrap_or_default(), &cached, &mut errors),
            Err(error) => errors.push(error.context("read the cached attachments")),
        }
        for plugin in list.plugins.iter().filter(|_| verb_exists) {
            let done = request::for_network(list, plugin, valid)
                .and_then(|request| self.run("GC", plugin, &Attach::default(), &request));
            if let Err(error) = done {
                let what = format!("failed to GC plugin {}", plugin.plugin_type);
                errors.push(in_front(&what, &error));
            }
        }
        lines(&errors).map_or(Ok(()), Err)
    }

    /// Asks every plugin in order whether it could serve an ADD now. The first error is returned
    /// as it is: code 50 or 51 usually. Below 1.1.0 no plugin is asked.
    pub fn status(&self, list: &NetworkList) -> Result<()> {
        if !list.at_least(SpecVersion::V1_1_0)? {
            return Ok(());
        }
        list.plugins.iter().try_for_each(|plugin| {
            let request = request::for_network(list, plugin, None)?;
            self.run("STATUS", plugin, &Attach::default(), &request).map(drop)
        })
    }

    fn del_stale(
        &self,
        list: &NetworkList,
        valid: &[Attachment],
        cached: &[CachedAttachment],
        errors: &mut Vec<Error>,
    ) {
        let is_valid = |attach: &Attach| {
            valid.iter().any(|v| v.container_id == attach.container_id && v.ifname == attach.ifname)
        };
        for stale in cached.iter().filter(|c| c.network == list.name && !is_valid(&c.attach)) {
            let made_by = stale.list();
            if let Err(error) = self.del(made_by.as_ref().unwrap_or(list), &stale.attach) {
                let Attach { container_id, ifname, .. } = &stale.attach;
                let what = format!("failed to delete stale attachment {container_id} {ifname}");
                errors.push(in_front(&what, &error));
            }
        }
    }
}

impl CachedAttachment {
    /// The network as it was at ADD, if the cache tells.
    pub fn list(&self) -> Option<NetworkList> {
        let list = NetworkList::from_bytes(&self.config).ok()?;
        if list.plugins.is_empty() {
            let single = PluginConf::from_bytes(&self.config).ok()?;
            return Some(NetworkList::of_single(&single)).filter(|l| l.name == self.network);
        }
        Some(list).filter(|list| list.name == self.network)
    }
}

fn in_front(what: &str, error: &Error) -> Error {
    Error::foreign(error.code(), format!("{what}: {error}"), "")
}

fn lines(errors: &[Error]) -> Option<Error> {
    let text: Vec<String> = errors.iter().map(Error::to_string).collect();
    errors.first().map(|first| Error::foreign(first.code(), text.join("\n"), ""))
}
