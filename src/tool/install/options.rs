//! What `cnibox install` and `cnibox uninstall` are told. The tables below are the help, the
//! manual page and the shells' completions.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// An option: its name, what follows it, what it does.
#[derive(Debug)]
pub struct Opt {
    /// With the dashes.
    pub flag: &'static str,
    /// The name of its value; empty if it takes none.
    pub value: &'static str,
    /// A line, or two with a line break.
    pub about: &'static str,
}

const fn opt(flag: &'static str, value: &'static str, about: &'static str) -> Opt {
    Opt { flag, value, about }
}

const ROOT: Opt = opt("--root", "DIR", "put DIR in front of every folder [environment: DESTDIR]");
const DRY_RUN: Opt = opt("--dry-run", "", "tell what would be done, change nothing");
const JSON: Opt = opt("--json", "", "report in JSON");
const HELP: Opt = opt("--help", "", "this text");
const FORCE: &str = "--force";

/// The options of `cnibox install`.
pub const INSTALL_OPTIONS: &[Opt] = &[
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
    opt("--no-backup", "", "keep nothing"),
    opt(FORCE, "", "install a release older than the one that is there"),
    opt("--no-verify", "", "do not ask each link for its versions: for a folder mounted noexec"),
    opt("--conflist", "FILE", "install this network configuration last"),
    opt("--conf-dir", "DIR", "where it goes [/etc/cni/net.d]"),
    opt("--watch", "", "stay, and repair what changes; ends on SIGTERM"),
    ROOT,
    DRY_RUN,
    JSON,
    HELP,
];

/// The options of `cnibox uninstall`.
pub const UNINSTALL_OPTIONS: &[Opt] = &[
    opt(
        "--no-hand-over",
        "",
        "leave the packet filter alone; without it, rules of running containers become\nthe reference's where its plugins return",
    ),
    ROOT,
    DRY_RUN,
    JSON,
    HELP,
];

/// Where container runtimes look for plugins if nobody tells them otherwise.
const FOLDER: &str = "/opt/cni/bin";
const CONF_DIR: &str = "/etc/cni/net.d";

/// How an applet's name leads to the executable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Mode {
    /// A relative symbolic link.
    #[default]
    Symlink,
    /// A hard link.
    Hardlink,
    /// A file of its own.
    Copy,
}

/// What is done with names that are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Policy {
    /// They become this release.
    #[default]
    Always,
    /// Those of an older release do.
    IfNewer,
    /// They stay.
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
    pub(super) watch: bool,
    /// Whether the folder is that of this node, at work.
    pub(super) hand_over: bool,
    pub(super) dry_run: bool,
    pub(super) json: bool,
}

impl Options {
    /// Reads arguments and the environment. `None` if help is asked for.
    pub(super) fn parse(
        args: Vec<String>,
        known: &[Opt],
        env: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Option<Options>> {
        let mut raw = Raw { backup: true, verify: true, hand_over: true, ..Raw::default() };
        let mut folder = None;
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            if matches!(arg.as_str(), "-h" | "--help" | "help") {
                return Ok(None);
            }
            if !arg.starts_with('-') {
                if let Some(first) = folder.replace(arg) {
                    return Err(usage(format!("one folder at a time, after \"{first}\"")));
                }
                continue;
            }
            let (flag, value) = match arg.split_once('=') {
                Some((flag, value)) => (flag.to_owned(), Some(value.to_owned())),
                None => (arg, None),
            };
            let Some(opt) = known.iter().find(|opt| opt.flag == flag) else {
                return Err(usage(format!("unknown flag: {flag}")));
            };
            let value = match (opt.value.is_empty(), value) {
                (true, None) => String::new(),
                (true, Some(_)) => return Err(usage(format!("flag takes no value: {flag}"))),
                (false, value) => value
                    .or_else(|| args.next())
                    .ok_or_else(|| usage(format!("flag needs an argument: {flag}")))?,
            };
            raw.set(&flag, value)?;
        }
        let root = raw.root.take().map(OsString::from).or_else(|| env("DESTDIR"));
        let root = root.filter(|root| !root.is_empty()).map(PathBuf::from);
        raw.finish(folder.as_deref().unwrap_or(FOLDER), root.as_deref()).map(Some)
    }
}

/// The options as they were written.
#[derive(Default)]
struct Raw {
    options: Options,
    root: Option<String>,
    conf_dir: Option<String>,
    backup: bool,
    verify: bool,
    hand_over: bool,
}

impl Raw {
    fn set(&mut self, flag: &str, value: String) -> Result<()> {
        let options = &mut self.options;
        match flag {
            "--mode" => options.mode = mode(&value)?,
            "--policy" => options.policy = policy(&value)?,
            "--only" => options.only.extend(names(&value)),
            "--skip" => options.skip.extend(names(&value)),
            "--replace" => options.replace = true,
            "--backup" => self.backup = true,
            "--no-backup" => self.backup = false,
            FORCE => options.force = true,
            "--no-verify" => self.verify = false,
            "--no-hand-over" => self.hand_over = false,
            "--conflist" => options.conflist = Some(value.into()),
            "--conf-dir" => self.conf_dir = Some(value),
            "--watch" => options.watch = true,
            "--root" => self.root = Some(value),
            "--dry-run" => options.dry_run = true,
            "--json" => options.json = true,
            other => return Err(usage(format!("unknown flag: {other}"))),
        }
        Ok(())
    }

    fn finish(self, folder: &str, root: Option<&Path>) -> Result<Options> {
        let conf_dir = self.conf_dir.as_deref().unwrap_or(CONF_DIR);
        let options = Options {
            folder: below(root, folder)?,
            conf_dir: below(root, conf_dir)?,
            backup: self.backup,
            verify: self.verify,
            hand_over: self.hand_over && root.is_none(),
            ..self.options
        };
        if options.watch && (options.dry_run || options.policy == Policy::Never) {
            return Err(usage("--watch has nothing to do".to_owned()));
        }
        Ok(options)
    }
}

/// `path` below `root`, absolute.
fn below(root: Option<&Path>, path: &str) -> Result<PathBuf> {
    if path.is_empty() {
        return Err(usage("the name of a folder is empty".to_owned()));
    }
    let joined = match root {
        Some(root) => root.join(path.trim_start_matches('/')),
        None => PathBuf::from(path),
    };
    std::path::absolute(joined).map_err(|cause| Error::io("find the working directory", &cause))
}

fn mode(text: &str) -> Result<Mode> {
    Ok(match text {
        "symlink" => Mode::Symlink,
        "hardlink" => Mode::Hardlink,
        "copy" => Mode::Copy,
        _ => return Err(usage(format!("unknown mode \"{text}\""))),
    })
}

fn policy(text: &str) -> Result<Policy> {
    Ok(match text {
        "always" => Policy::Always,
        "if-newer" => Policy::IfNewer,
        "if-not-present" => Policy::IfNotPresent,
        "never" => Policy::Never,
        _ => return Err(usage(format!("unknown policy \"{text}\""))),
    })
}

fn names(text: &str) -> impl Iterator<Item = String> {
    text.split(',').filter(|name| !name.is_empty()).map(str::to_owned)
}

fn usage(message: String) -> Error {
    Error::config(message).with_details("run it with --help")
}

/// The text of `cnibox install --help`.
pub(super) fn help_install() -> String {
    format!(
        "cnibox install: this executable, and a link for each applet, in a folder of plugins

Usage:
  cnibox install [DIR] [options]     DIR is {FOLDER} if it is not given

What is there is switched at once and kept for cnibox uninstall; running containers and calls
under way are not disturbed. Files that are neither cnibox's nor the reference plugins' stop it
before anything is changed. A second run changes nothing.

Options:
{}",
        lines(INSTALL_OPTIONS)
    )
}

/// The text of `cnibox uninstall --help`.
pub(super) fn help_uninstall() -> String {
    format!(
        "cnibox uninstall: take cnibox install back

Usage:
  cnibox uninstall [DIR] [options]   DIR is {FOLDER} if it is not given

What install replaced returns, what it made goes. Files that changed since stay.

Options:
{}",
        lines(UNINSTALL_OPTIONS)
    )
}

fn lines(options: &[Opt]) -> String {
    let line = |opt: &Opt| {
        let flag = format!("{} {}", opt.flag, opt.value);
        format!("  {flag:<18} {}\n", opt.about.replace('\n', &format!("\n{:21}", "")))
    };
    options.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Option<Options>> {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        Options::parse(args, INSTALL_OPTIONS, |_| None)
    }

    #[test]
    fn defaults() {
        let options = parse(&[]).unwrap().unwrap();
        assert_eq!(options.folder, Path::new(FOLDER));
        assert_eq!((options.mode, options.policy), (Mode::Symlink, Policy::Always));
        assert!(options.backup && options.verify && !options.replace && !options.force);
    }

    #[test]
    fn every_option_of_the_table_is_understood() {
        for opt in INSTALL_OPTIONS.iter().filter(|opt| opt.flag != "--help") {
            let value = match opt.flag {
                "--mode" => "copy",
                "--policy" => "always",
                _ => "x",
            };
            let args = if opt.value.is_empty() { vec![opt.flag] } else { vec![opt.flag, value] };
            assert!(parse(&args).unwrap().is_some(), "{}", opt.flag);
            assert!(help_install().contains(opt.flag));
        }
        assert!(parse(&["--help"]).unwrap().is_none());
    }

    #[test]
    fn a_root_goes_in_front_and_destdir_is_one() {
        let args = ["/usr/lib/cni", "--root=/x"].map(str::to_owned).to_vec();
        let env = |name: &str| (name == "DESTDIR").then(|| OsString::from("/y"));
        let options = Options::parse(args, INSTALL_OPTIONS, env).unwrap().unwrap();
        assert_eq!(options.folder, Path::new("/x/usr/lib/cni"));
        let options = Options::parse(Vec::new(), INSTALL_OPTIONS, env).unwrap().unwrap();
        assert_eq!(options.folder, Path::new("/y/opt/cni/bin"));
        assert_eq!(options.conf_dir, Path::new("/y/etc/cni/net.d"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let wrong = [
            (vec!["--mod=x"], "unknown flag: --mod"),
            (vec!["--mode"], "flag needs an argument: --mode"),
            (vec!["--mode", "x"], "unknown mode \"x\""),
            (vec!["--policy", "x"], "unknown policy \"x\""),
            (vec!["--json=1"], "flag takes no value: --json"),
            (vec!["a", "b"], "one folder at a time, after \"a\""),
            (vec![""], "the name of a folder is empty"),
            (vec!["--watch", "--dry-run"], "--watch has nothing to do"),
        ];
        for (args, message) in wrong {
            assert_eq!(parse(&args).unwrap_err().msg(), message);
        }
    }
}
