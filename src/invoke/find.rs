//! Where a plugin is: the directories of `CNI_PATH`, in order.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::text;
use crate::error::{Error, Result};
use crate::options;

/// The executable of the plugin `name` in the first of `dirs` that has one. Symbolic links are
/// followed; empty directory names are skipped. A file without execute permission is returned only where
/// no directory has an executable, so that the error then tells of the permission.
///
/// Messages: `no plugin name provided`, `invalid plugin name: <name>`, `no paths provided`,
/// `failed to find plugin "<name>" in path [<dir> <dir>]`.
pub fn find(name: &str, dirs: &[PathBuf]) -> Result<PathBuf> {
    if name.is_empty() {
        return Err(Error::internal("no plugin name provided")
            .with_details("set the key \"type\", of the plugin or of its \"ipam\""));
    }
    if name.contains('/') {
        return Err(Error::internal(format!("invalid plugin name: {name}"))
            .with_details("write the name of a file in CNI_PATH, without a directory"));
    }
    let dirs: Vec<&PathBuf> = dirs.iter().filter(|dir| !dir.as_os_str().is_empty()).collect();
    if dirs.is_empty() {
        return Err(Error::internal("no paths provided").with_details(
            "set CNI_PATH to the directories that hold the plugins, usually /opt/cni/bin",
        ));
    }
    let mut fallback = None;
    for candidate in dirs.iter().map(|dir| dir.join(name)) {
        match executable_bits(&candidate) {
            Some(0) => fallback = fallback.or(Some(candidate)),
            Some(_) => return Ok(candidate),
            None => {}
        }
    }
    fallback.ok_or_else(|| {
        let names: Vec<String> = dirs.iter().map(|dir| text(dir)).collect();
        Error::internal(format!("failed to find plugin \"{name}\" in path [{}]", names.join(" ")))
            .with_details(reason(name, &dirs))
    })
}

/// Why no directory has the plugin, and what helps.
fn reason(name: &str, dirs: &[&PathBuf]) -> String {
    if let Some(dir) = dirs.iter().find(|dir| !dir.is_dir()) {
        return format!("{} is no directory: correct CNI_PATH, or make it", dir.display());
    }
    let dangling = |file: &PathBuf| file.is_symlink() && !file.exists();
    if let Some(link) = dirs.iter().map(|dir| dir.join(name)).find(dangling) {
        return format!(
            "{} is a link to a file that does not exist: install the plugin again",
            link.display()
        );
    }
    let files = dirs.iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten();
    let names: Vec<String> = files.filter_map(|file| file.file_name().into_string().ok()).collect();
    match options::nearest(name, names.iter().map(String::as_str)) {
        Some(other) => format!("did you mean \"{other}\"?"),
        None => "install the plugin there, or correct \"type\"".to_owned(),
    }
}

/// The execute permissions of a regular file; `None` for anything else.
fn executable_bits(path: &Path) -> Option<u32> {
    let metadata = fs::metadata(path).ok()?;
    metadata.is_file().then(|| metadata.permissions().mode() & 0o111)
}

/// The directories in the text of `CNI_PATH`: split at `:`, empty ones left out.
pub fn split_path(cni_path: &str) -> Vec<PathBuf> {
    cni_path.split(':').filter(|dir| !dir.is_empty()).map(PathBuf::from).collect()
}

/// Whether `path` is the file that this process runs, under whatever name: the same device and
/// inode. `false` if either cannot be looked at.
pub fn is_own_executable(path: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
    identity(path).is_some_and(|id| identity(Path::new("/proc/self/exe")) == Some(id))
}
