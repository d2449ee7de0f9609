//! GC of attachments that the runtime does not list although they live.
//!
//! A runtime lists what it has attached itself. Another runtime of the node, or multus, may have
//! attached other containers to the same network: CRI-O sends a GC for each network of its
//! directory, also for those that only multus uses. An attachment stays if the kernel shows that it
//! lives and the cache of some runtime has it. libcni deletes what its own cache has before it
//! sends GC, so such a cache is another runtime's.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::call::PluginCaller;
use super::context::CallContext;
use crate::attachment::{AttachmentId, AttachmentRecord, liveness};
use crate::netlink::{Link, Netlink};
use crate::netns::Netns;
use cni::ValidAttachment;
use cni::error::Result;
use cni::files;
use cni::json::Json;
use cni::runtime;

/// The parents of the directories `results` in which libcni caches what ADD returned: that of
/// runtimes, and that of multus.
pub const CACHE_DIRS: [&str; 2] = ["/var/lib/cni", "/var/lib/cni/multus"];
fn result_directories() -> impl Iterator<Item = PathBuf> {
    CACHE_DIRS.iter().map(|dir| Path::new(dir).join("results"))
}

/// The kind of the files.
const KIND: &str = "cniCacheV1";
/// The suffix of the names of files whose attachments are only in their content.
const HASHED: &str = ".hashed";
/// Limit of a file's size in bytes: a configuration in base64, and a result, of the maximum size
/// each.
const MAX_BYTES: usize = 40 << 20;

/// An attachment in a cache.
struct CachedName {
    attachment: ValidAttachment,
    /// The path of the network namespace at ADD.
    netns: String,
}

/// The attachments of the network that the cache has, and the list lacks. A file is read only if
/// its name is not that of an attachment in the list.
fn read_unlisted(cache: &Path, network: &str, valid: &[ValidAttachment]) -> Vec<CachedName> {
    let prefix = format!("{network}-");
    let listed = |name: &str| {
        valid.iter().any(|a| *name == format!("{prefix}{}-{}", a.container_id, a.ifname))
    };
    let names = fs::read_dir(cache).into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let names =
        names.filter(|name| name.ends_with(HASHED) || (name.starts_with(&prefix) && !listed(name)));
    names
        .filter_map(|name| {
            let file =
                Json::parse(&files::read_regular_file(&cache.join(name), MAX_BYTES).ok()?).ok()?;
            let text = |key: &str| file.get_member(key).and_then(Json::as_str).unwrap_or_default();
            let is_of_network = text("kind") == KIND && text("networkName") == network;
            is_of_network.then(|| CachedName {
                attachment: ValidAttachment {
                    container_id: text("containerId").to_owned(),
                    ifname: text("ifName").to_owned(),
                },
                netns: runtime::cached_netns(&file).to_owned(),
            })
        })
        .filter(|cached| !valid.contains(&cached.attachment))
        .collect()
}

/// Whether a cache may have an attachment of the container, in any network: by the names of the
/// files, and the content of those with a hashed name. A directory that cannot be read may have
/// one.
pub(super) fn may_be_cached(id: &str) -> bool {
    let may_name_it = |cache: &Path| match fs::read_dir(cache) {
        Err(e) => e.kind() != ErrorKind::NotFound,
        Ok(entries) => entries.flatten().any(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            name.contains(id)
                || (name.ends_with(HASHED)
                    && (files::read_text(&entry.path(), MAX_BYTES)
                        .map_or(true, |text| text.contains(id))))
        }),
    };
    result_directories().any(|cache| may_name_it(&cache))
}

impl CallContext<'_> {
    /// The attachments that live and are in a cache, without those in the list of valid
    /// attachments.
    pub(super) fn find_living(&self, valid: &[ValidAttachment]) -> Result<Vec<ValidAttachment>> {
        let network = self.net.name.as_str();
        let (mut living, mut links) = (Vec::new(), None);
        for cache in result_directories() {
            for CachedName { attachment, netns } in read_unlisted(&cache, network, valid) {
                let links = match &mut links {
                    Some(links) => links,
                    none => none.insert(self.host_netlink()?.dump_links()?),
                };
                let ValidAttachment { container_id: id, ifname } = &attachment;
                let owner = AttachmentId { network, ifname, id };
                if living.contains(&attachment) || !is_shown_alive(owner, &netns, links) {
                    continue;
                }
                if self.call.caller == PluginCaller::Runtime {
                    warn!(
                        "GC keeps container {id}, interface {ifname}, which the list lacks: it is \
                         alive, and in the cache {}; its runtime's DEL ends it",
                        cache.display()
                    );
                }
                living.push(attachment);
            }
        }
        Ok(living)
    }
}

/// Whether the kernel shows that an attachment lives: its pair has an end on the host and one
/// elsewhere, or there is an interface of its name in the namespace at `netns`. An attachment whose
/// record proves its end is not alive, whatever has its names now.
fn is_shown_alive(owner: AttachmentId<'_>, netns: &str, links: &[Link]) -> bool {
    if AttachmentRecord::find_by_attachment(owner).is_some_and(|record| record.is_gone()) {
        return false;
    }
    let is_whole = |link: &Link| liveness::is_pair(link) && link.link_netnsid.is_some();
    if links.iter().any(|link| is_whole(link) && owner.owns_comment(Some(&link.alias))) {
        return true;
    }
    !netns.is_empty()
        && Netns::open(netns)
            .ok()
            .and_then(|inside| -> Option<bool> {
                let is_own = Netns::open_current().and_then(|own| own.is_same_as(&inside)).ok()?;
                Some(
                    !is_own
                        && Netlink::open_in(&inside)
                            .and_then(|link| link.find_link(owner.ifname))
                            .ok()?
                            .is_some(),
                )
            })
            .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_of_unlisted_attachments_are_read() {
        let cache = tempfile::tempdir().unwrap();
        let write = |name: &str, network: &str, id: &str, kind: &str| {
            let text = format!(
                r#"{{"kind":"{kind}","networkName":"{network}","containerId":"{id}","ifName":"eth0"}}"#
            );
            fs::write(cache.path().join(name), text).unwrap();
        };
        write("net-listed-eth0", "net", "listed", KIND);
        write("net-other-eth0", "net", "other", KIND);
        // The same prefix, another network; a hashed name; a name that is taken; files of other
        // kinds.
        write("net-two-c1-eth0", "net-two", "c1", KIND);
        write("0123.hashed", "net", "long", KIND);
        write("4567.hashed", "net", "listed", KIND);
        write("net-kind-eth0", "net", "kind", "result");
        fs::write(cache.path().join("net-broken-eth0"), "{").unwrap();
        let listed =
            ValidAttachment { container_id: "listed".to_owned(), ifname: "eth0".to_owned() };
        let mut found: Vec<String> = read_unlisted(cache.path(), "net", &[listed])
            .into_iter()
            .map(|cached| cached.attachment.container_id)
            .collect();
        found.sort();
        assert_eq!(found, ["long", "other"]);
        assert!(read_unlisted(&cache.path().join("none"), "net", &[]).is_empty());
    }
}
