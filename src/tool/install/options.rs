//! The command lines of `cnibox install` and `cnibox uninstall`. Help, manual page and completions
//! come from the tables below.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::options::{
    CommandLine, CommandOption, long_option, unexpected_argument, unknown_word_error, usage_error,
};
use crate::tool::directories::{CONF, CONF_DIR, PLUGIN_DIR};
use crate::tool::{DRY_RUN, JSON};
use cni::error::{Error, Result};

const ROOT: CommandOption =
    long_option("--root", "DIR", "prefix of every directory [environment: DESTDIR]");
const NO_BACKUP: &str = "--no-backup";
pub(super) const INSTALL_OPTIONS: &[CommandOption] = &[
    long_option("--mode", "MODE", "symlink (relative, the default), hardlink or copy"),
    long_option(
        "--policy",
        "WHEN",
        "when to replace existing plugins: always (the default), if-newer,\nif-not-present, never",
    ),
    long_option("--only", "NAMES", "install only these applets, separated by commas"),
    long_option("--skip", "NAMES", "install all applets except these"),
    long_option(
        "--replace",
        "",
        "also replace files that are neither cnibox nor reference plugins",
    ),
    long_option("--backup", "", "back up replaced files for cnibox uninstall (the default)"),
    long_option(NO_BACKUP, "", "do not back up replaced files"),
    long_option("--force", "", "replace a newer release of cnibox with this one"),
    long_option(
        "--no-verify",
        "",
        "do not run each plugin with VERSION: for a directory mounted noexec",
    ),
    long_option("--conflist", "FILE", "install this network configuration last"),
    CONF,
    long_option(
        "--protect",
        "",
        "make the executable immutable until cnibox uninstall, so that cp to the name of \
         a\nplugin cannot overwrite all plugins",
    ),
    ROOT,
    DRY_RUN,
    JSON,
];

pub(super) const UNINSTALL_OPTIONS: &[CommandOption] = &[
    long_option(
        "--no-hand-over",
        "",
        "leave the packet filter unchanged; by default, rules of running containers \
         are\nrewritten for the reference plugins, and our records of them removed",
    ),
    ROOT,
    DRY_RUN,
    JSON,
];

/// How the name of an applet leads to the executable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum InstallMode {
    /// A relative symbolic link.
    #[default]
    Symlink,
    Hardlink,
    /// A copy of the executable for each applet.
    Copy,
}

/// The values of `--mode`, the default first.
pub(super) const MODES: [(&str, InstallMode); 3] = [
    ("symlink", InstallMode::Symlink),
    ("hardlink", InstallMode::Hardlink),
    ("copy", InstallMode::Copy),
];

/// When existing plugins are replaced.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ReplacePolicy {
    Always,
    /// Existing plugins are replaced if they are of an older release.
    IfNewer,
    IfNotPresent,
    /// Nothing is replaced, and nothing is added.
    Never,
}

/// The values of `--policy`, the default first.
const POLICIES: [(&str, ReplacePolicy); 4] = [
    ("always", ReplacePolicy::Always),
    ("if-newer", ReplacePolicy::IfNewer),
    ("if-not-present", ReplacePolicy::IfNotPresent),
    ("never", ReplacePolicy::Never),
];

/// The options of one call.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of the command line")]
pub(super) struct InstallOptions {
    /// The directory of plugins, below the root.
    pub(super) directory: PathBuf,
    /// The directory of network configurations, below the root.
    pub(super) conf_dir: PathBuf,
    pub(super) conflist: Option<PathBuf>,
    pub(super) mode: InstallMode,
    pub(super) policy: ReplacePolicy,
    pub(super) only: Vec<String>,
    pub(super) skip: Vec<String>,
    pub(super) replace: bool,
    pub(super) backup: bool,
    pub(super) force: bool,
    pub(super) verify: bool,
    pub(super) protect: bool,
    /// Whether the directories are below another root.
    pub(super) has_root: bool,
    /// Whether rules are handed over: not below another root.
    pub(super) hand_over: bool,
    pub(super) dry_run: bool,
    pub(super) json: bool,
}

impl InstallOptions {
    pub(super) fn from_command_line(
        line: &CommandLine,
        env: impl Fn(&str) -> Option<OsString>,
    ) -> Result<InstallOptions> {
        let root = line.last_value("--root").map(OsString::from).or_else(|| env("DESTDIR"));
        let root = root.filter(|root| !root.is_empty()).map(PathBuf::from);
        let directory = match line.words.as_slice() {
            [] => PLUGIN_DIR,
            [directory] => directory,
            [_, extra, ..] => return Err(unexpected_argument(extra)),
        };
        let conf_dir = line.last_value(CONF.flag).unwrap_or(CONF_DIR);
        let backup =
            line.given_flags().filter(|flag| ["--backup", NO_BACKUP].contains(flag)).last();
        let names = |flag: &str| {
            let names = line.all_values(flag).flat_map(|names| names.split(','));
            names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
        };
        let options = InstallOptions {
            directory: path_below_root(root.as_deref(), directory)?,
            conf_dir: path_below_root(root.as_deref(), conf_dir)?,
            conflist: line.last_value("--conflist").map(PathBuf::from),
            mode: parse_choice("mode", line.last_value("--mode"), &MODES)?,
            policy: parse_choice("policy", line.last_value("--policy"), &POLICIES)?,
            only: names("--only"),
            skip: names("--skip"),
            replace: line.has_option("--replace"),
            backup: backup != Some(NO_BACKUP),
            force: line.has_option("--force"),
            verify: !line.has_option("--no-verify"),
            protect: line.has_option("--protect"),
            has_root: root.is_some(),
            hand_over: !line.has_option("--no-hand-over") && root.is_none(),
            dry_run: line.has_option(DRY_RUN.flag),
            json: line.has_option(JSON.flag),
        };
        if options.protect && options.mode != InstallMode::Symlink {
            return Err(usage_error(
                "--protect requires --mode symlink: copies need no protection, and hard links \
                 could not be replaced",
            ));
        }
        Ok(options)
    }
}

/// `path` below `root`, absolute.
fn path_below_root(root: Option<&Path>, path: &str) -> Result<PathBuf> {
    if path.is_empty() {
        return Err(usage_error("the name of a directory is empty"));
    }
    let joined = match root {
        Some(root) => root.join(path.trim_start_matches('/')),
        None => PathBuf::from(path),
    };
    std::path::absolute(joined).map_err(|cause| Error::io("find the working directory", &cause))
}

/// The value that `text` names; the first value of `known` if there is no text.
fn parse_choice<T: Copy>(what: &str, text: Option<&str>, known: &[(&str, T)]) -> Result<T> {
    let found = known.iter().find(|(name, _)| text.is_none_or(|text| text == *name));
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        unknown_word_error(what, text.unwrap_or_default(), &names)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{self, ParsedCommandLine};

    fn parse(args: &[&str]) -> Result<InstallOptions> {
        read(args, |_| None)
    }

    fn read(args: &[&str], env: impl Fn(&str) -> Option<OsString>) -> Result<InstallOptions> {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        match options::parse_args(args, INSTALL_OPTIONS)? {
            ParsedCommandLine::Work(line) => InstallOptions::from_command_line(&line, env),
            asked => panic!("{asked:?}"),
        }
    }

    #[test]
    fn options_have_their_documented_defaults() {
        let options = parse(&[]).unwrap();
        assert_eq!(options.directory, Path::new(PLUGIN_DIR));
        assert_eq!((options.mode, options.policy), (InstallMode::Symlink, ReplacePolicy::Always));
        assert!(options.backup && options.verify && !options.replace && !options.force);
    }

    #[test]
    fn every_option_has_an_effect() {
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
    fn root_and_destdir_prefix_every_directory() {
        let env = |name: &str| (name == "DESTDIR").then(|| OsString::from("/y"));
        let options = read(&["/usr/lib/cni", "--root=/x"], env).unwrap();
        assert_eq!(options.directory, Path::new("/x/usr/lib/cni"));
        let options = read(&[], env).unwrap();
        assert_eq!(options.directory, Path::new("/y/opt/cni/bin"));
        assert_eq!(options.conf_dir, Path::new("/y/etc/cni/net.d"));
    }

    #[test]
    fn wrong_options_are_named() {
        let wrong = [
            (vec!["--mode", "x"], "unknown mode \"x\""),
            (vec!["--policy", "x"], "unknown policy \"x\""),
            (vec!["a", "b"], "unexpected argument \"b\""),
            (vec![""], "the name of a directory is empty"),
        ];
        for (args, message) in wrong {
            assert_eq!(parse(&args).unwrap_err().message(), message);
        }
    }
}
