//! The command lines of `cnibox install` and `cnibox uninstall`. Help, manual page and completions
//! come from the tables below.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::options::{CommandLine, Opt, deprecated, opt, unknown_word, usage};
use crate::tool::folders::{CONF, CONF_DIR, PLUGIN_DIR};
use crate::tool::{DRY_RUN, JSON};

const ROOT: Opt = opt("--root", "DIR", "prefix of every folder [environment: DESTDIR]");
const NO_BACKUP: &str = "--no-backup";
/// Of 0.2, for one minor version.
const WATCH: &str = "--watch";

/// The options of `cnibox install`.
pub(super) const INSTALL_OPTIONS: &[Opt] = &[
    opt("--mode", "MODE", "symlink (relative, the default), hardlink or copy"),
    opt(
        "--policy",
        "WHEN",
        "when to replace existing plugins: always (the default), if-newer,\nif-not-present, never",
    ),
    opt("--only", "NAMES", "install only these applets, separated by commas"),
    opt("--skip", "NAMES", "install all applets except these"),
    opt("--replace", "", "also replace files that are neither cnibox nor reference plugins"),
    opt("--backup", "", "back up replaced files for cnibox uninstall (the default)"),
    opt(NO_BACKUP, "", "do not back up replaced files"),
    opt("--force", "", "replace a newer release of cnibox with this one"),
    opt("--no-verify", "", "do not run each plugin with VERSION: for a folder mounted noexec"),
    opt("--conflist", "FILE", "install this network configuration last"),
    CONF,
    opt(
        "--protect",
        "",
        "make the executable immutable until cnibox uninstall, so that cp to the name of a\nplugin cannot overwrite all plugins",
    ),
    opt(WATCH, "", "deprecated: use cnibox repair --watch --install DIR"),
    ROOT,
    DRY_RUN,
    JSON,
];

/// The options of `cnibox uninstall`.
pub(super) const UNINSTALL_OPTIONS: &[Opt] = &[
    opt(
        "--no-hand-over",
        "",
        "leave the packet filter unchanged; by default, rules of running containers are\nrewritten for the reference plugins, and our records of them removed",
    ),
    ROOT,
    DRY_RUN,
    JSON,
];

/// How the name of an applet leads to the executable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Mode {
    /// A relative symbolic link.
    #[default]
    Symlink,
    Hardlink,
    /// A file of its own.
    Copy,
}

/// The values of `--mode`, the default first.
pub(super) const MODES: [(&str, Mode); 3] =
    [("symlink", Mode::Symlink), ("hardlink", Mode::Hardlink), ("copy", Mode::Copy)];

/// When existing plugins are replaced.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Policy {
    Always,
    /// If they are of an older release.
    IfNewer,
    IfNotPresent,
    /// Never, and nothing is added either.
    Never,
}

/// The values of `--policy`, the default first.
const POLICIES: [(&str, Policy); 4] = [
    ("always", Policy::Always),
    ("if-newer", Policy::IfNewer),
    ("if-not-present", Policy::IfNotPresent),
    ("never", Policy::Never),
];

/// The options of one call.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of the command line")]
pub(super) struct Options {
    /// The folder of plugins, below the root.
    pub(super) folder: PathBuf,
    /// The folder of network configurations, below the root.
    pub(super) conf_dir: PathBuf,
    pub(super) conflist: Option<PathBuf>,
    pub(super) mode: Mode,
    pub(super) policy: Policy,
    pub(super) only: Vec<String>,
    pub(super) skip: Vec<String>,
    pub(super) replace: bool,
    pub(super) backup: bool,
    pub(super) force: bool,
    pub(super) verify: bool,
    pub(super) protect: bool,
    pub(super) watch: bool,
    /// Whether the folders are below another root.
    pub(super) has_root: bool,
    /// Whether rules are handed over: not below another root.
    pub(super) hand_over: bool,
    pub(super) dry_run: bool,
    pub(super) json: bool,
}

impl Options {
    pub(super) fn read(
        line: &CommandLine,
        env: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Options> {
        let root = line.last("--root").map(OsString::from).or_else(|| env("DESTDIR"));
        let root = root.filter(|root| !root.is_empty()).map(PathBuf::from);
        let folder = match line.words.as_slice() {
            [] => PLUGIN_DIR,
            [folder] => folder,
            [_, extra, ..] => return Err(usage(format!("unexpected argument \"{extra}\""))),
        };
        let conf_dir = line.last(CONF.flag).unwrap_or(CONF_DIR);
        let backup = line.given().filter(|flag| ["--backup", NO_BACKUP].contains(flag)).last();
        let names = |flag: &str| {
            let names = line.all(flag).flat_map(|names| names.split(','));
            names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
        };
        let options = Options {
            folder: below(root.as_deref(), folder)?,
            conf_dir: below(root.as_deref(), conf_dir)?,
            conflist: line.last("--conflist").map(PathBuf::from),
            mode: choice("mode", line.last("--mode"), &MODES)?,
            policy: choice("policy", line.last("--policy"), &POLICIES)?,
            only: names("--only"),
            skip: names("--skip"),
            replace: line.has("--replace"),
            backup: backup != Some(NO_BACKUP),
            force: line.has("--force"),
            verify: !line.has("--no-verify"),
            protect: line.has("--protect"),
            watch: line.has(WATCH),
            has_root: root.is_some(),
            hand_over: !line.has("--no-hand-over") && root.is_none(),
            dry_run: line.has(DRY_RUN.flag),
            json: line.has(JSON.flag),
        };
        if options.protect && options.mode != Mode::Symlink {
            return Err(usage(
                "--protect requires --mode symlink: copies need no protection, and hard links could not be replaced",
            ));
        }
        if options.watch && (options.dry_run || options.policy == Policy::Never) {
            return Err(usage("--watch excludes --dry-run and --policy never"));
        }
        if options.watch {
            deprecated(
                "install --watch",
                "cnibox repair --watch --install DIR, after cnibox install",
            );
        }
        Ok(options)
    }
}

/// `path` below `root`, absolute.
fn below(root: Option<&Path>, path: &str) -> Result<PathBuf> {
    if path.is_empty() {
        return Err(usage("the name of a folder is empty"));
    }
    let joined = match root {
        Some(root) => root.join(path.trim_start_matches('/')),
        None => PathBuf::from(path),
    };
    std::path::absolute(joined).map_err(|cause| Error::io("find the working directory", &cause))
}

/// The value that `text` names, the first of `known` without a text.
fn choice<T: Copy>(what: &str, text: Option<&str>, known: &[(&str, T)]) -> Result<T> {
    let found = known.iter().find(|(name, _)| text.is_none_or(|text| text == *name));
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        unknown_word(what, text.unwrap_or_default(), &names)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{self, Asked};

    fn parse(args: &[&str]) -> Result<Options> {
        read(args, |_| None)
    }

    fn read(args: &[&str], env: impl Fn(&str) -> Option<OsString>) -> Result<Options> {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        match options::parse(args, INSTALL_OPTIONS)? {
            Asked::Work(line) => Options::read(&line, env),
            asked => panic!("{asked:?}"),
        }
    }

    #[test]
    fn defaults() {
        let options = parse(&[]).unwrap();
        assert_eq!(options.folder, Path::new(PLUGIN_DIR));
        assert_eq!((options.mode, options.policy), (Mode::Symlink, Policy::Always));
        assert!(options.backup && options.verify && !options.replace && !options.force);
    }

    #[test]
    fn every_option_changes_something() {
        let default = format!("{:?}", parse(&["--no-backup"]).unwrap());
        for opt in INSTALL_OPTIONS.iter().filter(|opt| opt.flag != NO_BACKUP) {
            let value = match opt.flag {
                "--mode" => "copy",
                "--policy" => "never",
                _ => "x",
            };
            let args = [NO_BACKUP, opt.flag, value];
            let count = if opt.value.is_empty() { 2 } else { 3 };
            assert_ne!(format!("{:?}", parse(&args[..count]).unwrap()), default, "{}", opt.flag);
        }
    }

    #[test]
    fn root_and_destdir_prefix_every_folder() {
        let env = |name: &str| (name == "DESTDIR").then(|| OsString::from("/y"));
        let options = read(&["/usr/lib/cni", "--root=/x"], env).unwrap();
        assert_eq!(options.folder, Path::new("/x/usr/lib/cni"));
        let options = read(&[], env).unwrap();
        assert_eq!(options.folder, Path::new("/y/opt/cni/bin"));
        assert_eq!(options.conf_dir, Path::new("/y/etc/cni/net.d"));
    }

    #[test]
    fn mistakes_are_named() {
        let wrong = [
            (vec!["--mode", "x"], "unknown mode \"x\""),
            (vec!["--policy", "x"], "unknown policy \"x\""),
            (vec!["a", "b"], "unexpected argument \"b\""),
            (vec![""], "the name of a folder is empty"),
            (vec!["--watch", "--dry-run"], "--watch excludes --dry-run and --policy never"),
        ];
        for (args, message) in wrong {
            assert_eq!(parse(&args).unwrap_err().msg(), message);
        }
    }
}
