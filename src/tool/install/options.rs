//! What `cnibox install` and `cnibox uninstall` are told. The tables below are the help, the
//! manual page and the shells' completions.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::options::{CommandLine, Opt, opt, unknown_word, usage};
use crate::tool::{CONF_DIR, PLUGIN_DIR};

const ROOT: Opt = opt("--root", "DIR", "put DIR in front of every folder [environment: DESTDIR]");
const DRY_RUN: Opt =
    Opt { short: Some('n'), ..opt("--dry-run", "", "tell what would be done, change nothing") };
const JSON: Opt = opt("--json", "", "report in JSON");
const NO_BACKUP: &str = "--no-backup";

/// The options of `cnibox install`.
pub(super) const INSTALL_OPTIONS: &[Opt] = &[
    opt("--mode", "MODE", "symlink (relative, the default), hardlink or copy"),
    opt(
        "--policy",
        "WHEN",
        "what to do with names that are there: always (the default), if-newer,\nif-not-present, never",
    ),
    opt("--only", "NAMES", "these applets only, with commas between them"),
    opt("--skip", "NAMES", "all applets but these"),
    opt("--replace", "", "replace files that are neither cnibox's nor the reference's as well"),
    opt("--backup", "", "keep what is replaced, for cnibox uninstall (the default)"),
    opt(NO_BACKUP, "", "keep nothing"),
    opt("--force", "", "install a release older than the one that is there"),
    opt("--no-verify", "", "do not ask each link for its versions: for a folder mounted noexec"),
    opt("--conflist", "FILE", "install this network configuration last"),
    opt("--conf-dir", "DIR", "where it goes [/etc/cni/net.d]"),
    opt(
        "--protect",
        "",
        "make the executable immutable, so that cp to a plugin's name cannot replace\nall plugins; until cnibox uninstall",
    ),
    opt("--watch", "", "stay, and repair what changes; ends on SIGTERM"),
    ROOT,
    DRY_RUN,
    JSON,
];

/// The options of `cnibox uninstall`.
pub(super) const UNINSTALL_OPTIONS: &[Opt] = &[
    opt(
        "--no-hand-over",
        "",
        "leave the packet filter alone; without it, rules of running containers become\nthe reference's where its plugins return",
    ),
    ROOT,
    DRY_RUN,
    JSON,
];

/// How an applet's name leads to the executable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Mode {
    /// A relative symbolic link.
    #[default]
    Symlink,
    Hardlink,
    /// A file of its own.
    Copy,
}

impl Mode {
    /// As `--mode` takes it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Mode::Symlink => "symlink",
            Mode::Hardlink => "hardlink",
            Mode::Copy => "copy",
        }
    }
}

/// What is done with names that are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Policy {
    /// They become this release.
    #[default]
    Always,
    /// Those of an older release do.
    IfNewer,
    IfNotPresent,
    /// Nothing is done at all.
    Never,
}

/// One call with everything it may need.
#[derive(Debug, Default)]
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
    /// Whether the executable is made immutable.
    pub(super) protect: bool,
    pub(super) watch: bool,
    /// Whether the folder is that of this node, at work.
    pub(super) hand_over: bool,
    pub(super) dry_run: bool,
    pub(super) json: bool,
}

impl Options {
    /// Reads the command line and the environment.
    pub(super) fn read(
        line: &CommandLine,
        env: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Options> {
        let root = line.last("--root").map(OsString::from).or_else(|| env("DESTDIR"));
        let root = root.filter(|root| !root.is_empty()).map(PathBuf::from);
        let folder = match line.words.as_slice() {
            [] => PLUGIN_DIR,
            [folder] => folder,
            [first, ..] => return Err(usage(format!("one folder at a time, after \"{first}\""))),
        };
        let conf_dir = line.last("--conf-dir").unwrap_or(CONF_DIR);
        let backup = line.given().filter(|flag| ["--backup", NO_BACKUP].contains(flag)).last();
        let options = Options {
            folder: below(root.as_deref(), folder)?,
            conf_dir: below(root.as_deref(), conf_dir)?,
            conflist: line.last("--conflist").map(PathBuf::from),
            mode: line.last("--mode").map_or(Ok(Mode::default()), mode)?,
            policy: line.last("--policy").map_or(Ok(Policy::default()), policy)?,
            only: line.all("--only").flat_map(names).collect(),
            skip: line.all("--skip").flat_map(names).collect(),
            replace: line.has("--replace"),
            backup: backup != Some(NO_BACKUP),
            force: line.has("--force"),
            verify: !line.has("--no-verify"),
            protect: line.has("--protect"),
            watch: line.has("--watch"),
            hand_over: !line.has("--no-hand-over") && root.is_none(),
            dry_run: line.has(DRY_RUN.flag),
            json: line.has(JSON.flag),
        };
        if options.protect && options.mode != Mode::Symlink {
            return Err(usage(
                "--protect is for links: with --mode copy nothing is written through, and a hard link could not be replaced",
            ));
        }
        if options.watch && (options.dry_run || options.policy == Policy::Never) {
            return Err(usage("--watch has nothing to do"));
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

const POLICIES: [&str; 4] = ["always", "if-newer", "if-not-present", "never"];

fn mode(text: &str) -> Result<Mode> {
    let modes = [Mode::Symlink, Mode::Hardlink, Mode::Copy];
    let found = modes.into_iter().find(|mode| mode.name() == text);
    found.ok_or_else(|| unknown_word("mode", text, &modes.map(Mode::name)))
}

fn policy(text: &str) -> Result<Policy> {
    Ok(match text {
        "always" => Policy::Always,
        "if-newer" => Policy::IfNewer,
        "if-not-present" => Policy::IfNotPresent,
        "never" => Policy::Never,
        _ => return Err(unknown_word("policy", text, &POLICIES)),
    })
}

fn names(text: &str) -> impl Iterator<Item = String> {
    text.split(',').filter(|name| !name.is_empty()).map(str::to_owned)
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
        let usual = format!("{:?}", parse(&["--no-backup"]).unwrap());
        for opt in INSTALL_OPTIONS.iter().filter(|opt| opt.flag != NO_BACKUP) {
            let value = match opt.flag {
                "--mode" => "copy",
                "--policy" => "never",
                _ => "x",
            };
            let args = [NO_BACKUP, opt.flag, value];
            let count = if opt.value.is_empty() { 2 } else { 3 };
            assert_ne!(format!("{:?}", parse(&args[..count]).unwrap()), usual, "{}", opt.flag);
        }
    }

    #[test]
    fn a_root_goes_in_front_and_destdir_is_one() {
        let env = |name: &str| (name == "DESTDIR").then(|| OsString::from("/y"));
        let options = read(&["/usr/lib/cni", "--root=/x"], env).unwrap();
        assert_eq!(options.folder, Path::new("/x/usr/lib/cni"));
        let options = read(&[], env).unwrap();
        assert_eq!(options.folder, Path::new("/y/opt/cni/bin"));
        assert_eq!(options.conf_dir, Path::new("/y/etc/cni/net.d"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let wrong = [
            (vec!["--mode", "x"], "unknown mode \"x\""),
            (vec!["--policy", "x"], "unknown policy \"x\""),
            (vec!["a", "b"], "one folder at a time, after \"a\""),
            (vec![""], "the name of a folder is empty"),
            (vec!["--watch", "--dry-run"], "--watch has nothing to do"),
        ];
        for (args, message) in wrong {
            assert_eq!(parse(&args).unwrap_err().msg(), message);
        }
    }
}
