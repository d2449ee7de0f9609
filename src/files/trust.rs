//! The directories whose files are trusted, because only root of the node can have written them.
//!
//! The author of a configuration names a directory by `dataDir`, whose files decide what DEL does
//! as root: only root may be able to replace or write anything on the path. That is no proof where
//! containers have files: without a user namespace uid 0 of a container is also uid 0 of the node,
//! and can create directories with any mode in its volumes. So [`OF_CONTAINERS`] are refused.

use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use nix::unistd::geteuid;

use super::dir::{OTHERS_WRITE, ensure_directory};
use cni::error::{Error, Result};

/// Where policies are; `/var/run` is the former name of `/run`.
const OF_POLICIES: [&str; 4] = ["/etc/cni", "/run/cni", "/var/run/cni", "/var/lib/cni"];
/// Where runtimes, orchestrators and provisioners of volumes have the files of containers, and
/// where the kernel shows them.
const OF_CONTAINERS: [&str; 21] = [
    "/dev",
    "/opt/local-path-provisioner",
    "/opt/nomad",
    "/proc",
    "/run/containerd",
    "/run/containers",
    "/run/crio",
    "/run/docker",
    "/run/k3s",
    "/sys",
    "/var/lib/containerd",
    "/var/lib/containers",
    "/var/lib/docker",
    "/var/lib/incus",
    "/var/lib/k0s",
    "/var/lib/kubelet",
    "/var/lib/lxc",
    "/var/lib/lxd",
    "/var/lib/nomad",
    "/var/lib/rancher",
    "/var/snap",
];
/// The directories of records whose place no configuration chooses.
const OWN: [&str; 5] = [
    "/run/cni/bond",
    "/run/cni/cnibox",
    "/run/cni/dhcp",
    "/run/cni/host-device",
    "/run/cni/route-override",
];
/// `S_ISVTX`: only the owner of an entry, and of the directory, can rename and remove the entry.
const STICKY: u32 = 0o1000;
/// The maximum number of symbolic links on a path, as in the kernel.
const MOST_LINKS: usize = 40;
const REMEDY: &str = "its files decide what DEL does as root, so only root may be able to write \
                      there, and no container: name a directory such as /run/cni/tuning; \"chown \
                      root\" and \"chmod go-w\" close a directory to others";

/// The path of the directory of a `dataDir` without symbolic links, if the directory and every
/// directory and symbolic link on the way belong to root and cannot be written or replaced by
/// others, and it is not one of [`OF_CONTAINERS`]. What is missing can be created by root only.
/// Fails with code 7 otherwise.
pub fn resolve_data_dir(path: &Path) -> Result<PathBuf> {
    require_data_dir_path(path)?;
    let refuse = |why: String| {
        Error::config(format!("dataDir \"{}\": {why}", path.display())).with_details(REMEDY)
    };
    let found = resolve_links(path).map_err(refuse)?;
    if found.metadata().is_ok_and(|meta| meta.mode() & OTHERS_WRITE != 0) {
        return Err(refuse(format!("{} can be written by others", found.display())));
    }
    if OWN.iter().any(|own| found.starts_with(own)) {
        return Err(refuse(format!("{} is for other records", found.display())));
    }
    require_data_dir_path(&found).map(|()| found)
}

/// The path, without symbolic links, of a file in a directory of policies below
/// [`OF_POLICIES`]; only root can write or replace the file. Fails with code 7 otherwise.
pub fn resolve_policy_file(path: &Path) -> Result<PathBuf> {
    let directory = path.parent().unwrap_or(path);
    let refuse = |why: String| {
        Error::config(format!("policyDir \"{}\": {why}", directory.display())).with_details(
            "policies decide what containers can reach: name a directory of root below /etc/cni, \
             /run/cni or /var/lib/cni",
        )
    };
    if !OF_POLICIES.iter().any(|place| path.starts_with(place)) || !is_plain(path) {
        return Err(refuse("not below /etc/cni, /run/cni or /var/lib/cni".to_owned()));
    }
    let found = resolve_links(path).map_err(refuse)?;
    let is_open =
        |path: &Path| path.symlink_metadata().is_ok_and(|meta| meta.mode() & OTHERS_WRITE != 0);
    if let Some(open) = found.ancestors().take(2).find(|path| is_open(path)) {
        return Err(refuse(format!("{} can be written by others", open.display())));
    }
    Ok(found)
}

/// As [`resolve_data_dir`], for a directory that is created with `mode` if it is missing.
pub fn create_data_dir(path: &Path, mode: u32) -> Result<PathBuf> {
    let found = resolve_data_dir(path)?;
    ensure_directory(&found, mode)?;
    // A missing directory proves nothing: in a directory with the sticky bit others could have
    // created it meanwhile.
    resolve_data_dir(path)
}

/// The part of [`resolve_data_dir`] that does not look at this node.
pub fn require_data_dir_path(path: &Path) -> Result<()> {
    // The volumes of another root directory of a runtime.
    let is_volume = |part: Component<'_>| {
        let name = part.as_os_str().as_encoded_bytes();
        name == b"volumes" || name.starts_with(b"kubernetes.io~")
    };
    let why = if !is_plain(path) {
        "is not an absolute path without \"..\""
    } else if OF_CONTAINERS.iter().any(|place| path.starts_with(place))
        || path.components().any(is_volume)
    {
        "may be of a container"
    } else {
        return Ok(());
    };
    let msg = format!("dataDir \"{}\" {why}", path.display());
    Err(Error::config(msg).with_details(REMEDY))
}

/// Whether the path is absolute, and has neither `..` nor only a root.
fn is_plain(path: &Path) -> bool {
    let mut parts = path.components();
    parts.next() == Some(Component::RootDir)
        && path.file_name().is_some()
        && parts.all(|part| matches!(part, Component::Normal(_)))
}

fn resolve_links(path: &Path) -> Result<PathBuf, String> {
    let failed = |at: &Path, error| format!("{}: {}", at.display(), cni::error::io_text(&error));
    let root = Path::new("/");
    // In a user namespace, root of the node is a user without a number. The owner of `/` can
    // replace everything.
    let owners = [geteuid().as_raw(), fs::metadata(root).map_err(|e| failed(root, e))?.uid()];
    let (mut at, mut left, mut links) = (root.to_owned(), reversed_names(path), 0);
    while let Some(name) = left.pop() {
        let next = at.join(&name);
        let meta = match next.symlink_metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                // The target of a link may have `..`.
                return if left.iter().any(|name| name == "..") {
                    Err(failed(&next, error))
                } else {
                    Ok(left.iter().rev().fold(next, |path, name| path.join(name)))
                };
            }
            meta => meta.map_err(|e| failed(&next, e))?,
        };
        require_safe(&next, &meta, owners)?;
        if name == ".." {
            at.pop();
        } else if meta.is_symlink() {
            links += 1;
            if links > MOST_LINKS {
                return Err(failed(&next, nix::errno::Errno::ELOOP.into()));
            }
            let target = fs::read_link(&next).map_err(|e| failed(&next, e))?;
            if target.is_absolute() {
                root.clone_into(&mut at);
            }
            left.append(&mut reversed_names(&target));
        } else {
            at = next;
        }
    }
    Ok(at)
}

/// The names of a path, the last one first.
fn reversed_names(path: &Path) -> Vec<OsString> {
    let names =
        path.components().filter(|part| !matches!(part, Component::RootDir | Component::CurDir));
    names.rev().map(|part| part.as_os_str().to_owned()).collect()
}

/// Whether nobody but root can replace what is at `path`, nor, without the sticky bit, what is in
/// it.
fn require_safe(path: &Path, meta: &Metadata, owners: [u32; 2]) -> Result<(), String> {
    let path = path.display();
    if !owners.contains(&meta.uid()) {
        return Err(format!("user {} has {path}", meta.uid()));
    }
    let is_open = meta.mode() & OTHERS_WRITE != 0 && meta.mode() & STICKY == 0;
    if is_open && !meta.is_symlink() {
        let mode = meta.mode() & 0o7777;
        return Err(format!("{path} can be written by others (mode {mode:o})"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    #[test]
    fn directories_of_containers_are_refused() {
        for path in ["/run/cni/x", "/var/run/cni/x/y", "/etc/cni/x", "/run/cni/./x/", "/tmp/x"] {
            require_data_dir_path(Path::new(path)).unwrap();
        }
        let (no_path, of_container) =
            ("is not an absolute path without \"..\"", "may be of a container");
        for (path, why) in [
            ("/run/cni/../x", no_path),
            ("run/cni/x", no_path),
            ("", no_path),
            ("/", no_path),
            ("/proc/1/root/x", of_container),
            ("/var/lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir/x", of_container),
            ("/data/kubelet/pods/1/volumes/kubernetes.io~empty-dir/x", of_container),
            ("/srv/docker/volumes/x/_data", of_container),
        ] {
            let error = require_data_dir_path(Path::new(path)).unwrap_err();
            assert_eq!(error.code(), cni::error::ErrorCode::INVALID_CONFIG, "{path}");
            assert_eq!(error.message(), format!("dataDir \"{path}\" {why}"));
        }
    }

    fn found(path: &Path) -> Result<PathBuf, String> {
        resolve_links(path)
    }

    fn directory(path: &Path, mode: u32) {
        fs::create_dir(path).unwrap();
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn links_in_directories_of_root_are_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        directory(&path("disk"), 0o755);
        directory(&path("closed"), 0o755);
        symlink("../disk", path("closed/link")).unwrap();
        symlink(path("closed/link"), path("closed/far")).unwrap();
        symlink("loop", path("closed/loop")).unwrap();
        assert_eq!(found(&path("closed/link/new/er")).unwrap(), path("disk/new/er"));
        assert_eq!(found(&path("closed/far")).unwrap(), path("disk"));
        assert!(found(&path("closed/loop")).unwrap_err().contains("symbolic links"));
        // The sticky bit keeps root's entries where they are.
        fs::set_permissions(path("closed"), Permissions::from_mode(0o1777)).unwrap();
        assert_eq!(found(&path("closed/link")).unwrap(), path("disk"));
        for mode in [0o775, 0o757] {
            fs::set_permissions(path("closed"), Permissions::from_mode(mode)).unwrap();
            let why =
                format!("{} can be written by others (mode {mode:o})", path("closed").display());
            assert_eq!(found(&path("closed/link")).unwrap_err(), why);
            assert_eq!(found(&path("closed/new")).unwrap_err(), why);
        }
    }

    #[test]
    fn paths_through_files_of_another_user_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        directory(&path("theirs"), 0o755);
        symlink("/", path("link")).unwrap();
        if chown(path("theirs"), Some(4711), None).is_err() {
            // Without privileges there is no other user.
            return;
        }
        std::os::unix::fs::lchown(path("link"), Some(4711), None).unwrap();
        for name in ["theirs", "theirs/new", "link/tmp"] {
            assert!(found(&path(name)).unwrap_err().starts_with("user 4711 has "), "{name}");
        }
    }
}
