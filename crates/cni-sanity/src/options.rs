//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use lexopt::{Arg, Parser, ValueExt};

use super::assertion::{Assertion, Level};
use super::catalogue;
use super::profiles::{KINDS, Profile, VERSIONS};
use super::report::{Case, LEVELS, Report};
use super::spec::{self, Clause};
use super::{Result, context};

const USAGE: &str = "\
cni-sanity: tests whether CNI plugins do what the specification says

Usage:
  cni-sanity [options] DIRECTORY
  cni-sanity [options] --scoreboard NAME=DIRECTORY...
  cni-sanity --list | --clauses | --explain ID

Each plugin in DIRECTORY whose type is known is tested in every version that it supports, as root or in a user namespace,
in namespaces of its own: nothing of the machine is touched.

Options:
  --type TYPE             only this type; may be repeated
  --profile PROFILE       only types of this profile: interface, chained, ipam, foreign
  --only PATTERN          only assertions whose id contains this
  --fail-fast             end at the first failure of an assertion of --only
  --cni-version VERSION   only this version, which each plugin must list; may be repeated
  --faults                also test killed plugins, full disks and pipes, and many calls at once: takes minutes
  --config FILE           test a plugin of an unknown type with this configuration (without cniVersion), as an
                          interface plugin unless --profile says otherwise
  --level LEVEL           the lowest level whose failures count for the exit status: required, recommended or
                          informational [required]
  --expected-failures FILE  ids that may fail, one per line, as ID or ID@TYPE
  --format FORMAT         text, tap, junit or json
  --badge FILE            write an SVG badge for a README
  --jobs N                number of cases at once [two for each processor]
  --list                  list all assertions
  --clauses               list the clauses of the specification: id, force, section, meaning, and the assertions that
                          follow from it or the reason for which there is none
  --explain ID            what an assertion says, and why
  -h, --help              print this text
  -V, --version           print the version

Exit status: 0 all assertions of the level hold; 1 one failed; 2 wrong usage, or nothing to test.
";

/// What is tested, and how it is reported.
#[derive(Debug)]
pub struct Options {
    pub directory: PathBuf,
    pub types: Vec<String>,
    pub profile: Option<Profile>,
    pub only: Option<String>,
    /// Whether the run ends at the first failed assertion that `only` selects.
    pub fail_fast: bool,
    pub versions: Vec<&'static str>,
    pub config: Option<PathBuf>,
    pub expected: Vec<String>,
    /// The lowest level whose failures count.
    pub level: Level,
    pub format: fn(&Report) -> String,
    pub badge: Option<PathBuf>,
    pub jobs: usize,
    /// Whether the cases that take minutes are run too, in the newest version.
    pub faults: bool,
}

#[derive(Debug)]
pub enum Task {
    Print(String),
    Run(Options),
    /// The directories to compare, each with its name in the tables.
    Scoreboard(Vec<(String, PathBuf)>, Options),
    Case(Case),
}

impl Options {
    /// Reads the command line, the program's name first.
    pub fn read(args: impl Iterator<Item = OsString>) -> Result<Task> {
        read(Parser::from_iter(args))
            .map_err(|error| format!("{error}; see: cni-sanity --help").into())
    }
}

fn read(mut line: Parser) -> Result<Task> {
    let mut options = Options {
        directory: PathBuf::new(),
        types: Vec::new(),
        profile: None,
        only: None,
        fail_fast: false,
        versions: Vec::new(),
        config: None,
        expected: Vec::new(),
        level: Level::Required,
        format: Report::text,
        badge: None,
        faults: false,
        // Cases wait more than they compute.
        jobs: 2 * std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
    };
    let (mut words, mut is_scoreboard) = (Vec::new(), false);
    while let Some(arg) = line.next()? {
        match arg {
            Arg::Short('h') | Arg::Long("help") => return Ok(Task::Print(USAGE.to_owned())),
            Arg::Short('V') | Arg::Long("version") => {
                return Ok(Task::Print(version_text()));
            }
            Arg::Long("list") => return Ok(Task::Print(list())),
            Arg::Long("explain") => return explain(&line.value()?.string()?),
            Arg::Long("type") => options.types.push(line.value()?.string()?),
            Arg::Long("profile") => options.profile = Some(profile(&line.value()?.string()?)?),
            Arg::Long("only") => options.only = Some(line.value()?.string()?),
            Arg::Long("fail-fast") => options.fail_fast = true,
            Arg::Long("clauses") => return Ok(Task::Print(clauses())),
            Arg::Long("cni-version") => options.versions.push(version(&line.value()?.string()?)?),
            Arg::Long("config") => options.config = Some(line.value()?.into()),
            Arg::Long("badge") => options.badge = Some(line.value()?.into()),
            Arg::Long("jobs") => options.jobs = line.value()?.parse()?,
            Arg::Long("faults") => options.faults = true,
            Arg::Long("level") => options.level = level(&line.value()?.string()?)?,
            Arg::Long("scoreboard") => is_scoreboard = true,
            Arg::Long("expected-failures") => options.expected.extend(expected(line.value()?)?),
            Arg::Long("format") => options.format = format(&line.value()?.string()?)?,
            // The suite's own child processes have this option.
            Arg::Long("case") => {
                return Ok(Task::Case(serde_json::from_str(&line.value()?.string()?)?));
            }
            Arg::Value(word) => words.push(word.string()?),
            other => return Err(other.unexpected().into()),
        }
    }
    if options.fail_fast && options.only.is_none() {
        return Err("--fail-fast needs --only".into());
    }
    if is_scoreboard {
        let directories = words.iter().map(|word| {
            let (name, directory) =
                word.split_once('=').ok_or_else(|| format!("{word} is not NAME=DIRECTORY"))?;
            Ok((name.to_owned(), PathBuf::from(directory)))
        });
        return Ok(Task::Scoreboard(directories.collect::<Result<_>>()?, options));
    }
    match words.as_slice() {
        [directory] => options.directory = directory.into(),
        [] => return Err("no directory".into()),
        _ => return Err("more than one directory".into()),
    }
    Ok(Task::Run(options))
}

/// The ids in the file, without comments.
fn expected(path: OsString) -> Result<Vec<String>> {
    let path = PathBuf::from(path);
    let text = context(std::fs::read_to_string(&path), &format!("read {}", path.display()))?;
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    Ok(lines.filter(|line| !line.is_empty()).map(str::to_owned).collect())
}

fn format(name: &str) -> Result<fn(&Report) -> String> {
    match name {
        "text" => Ok(Report::text),
        "tap" => Ok(Report::tap),
        "junit" => Ok(Report::junit),
        "json" => Ok(Report::json),
        other => Err(format!("unknown format {other}: text, tap, junit or json").into()),
    }
}

/// With the commit, if the build knew it (`CNIBOX_COMMIT`).
fn version_text() -> String {
    let commit = option_env!("CNIBOX_COMMIT").filter(|commit| !commit.is_empty());
    let commit = commit.map(|commit| format!(" (commit {commit})")).unwrap_or_default();
    format!("cni-sanity {}{commit}\n", env!("CARGO_PKG_VERSION"))
}

fn level(name: &str) -> Result<Level> {
    LEVELS.into_iter().find(|level| level.name() == name).ok_or_else(|| {
        format!("unknown level {name}: required, recommended or informational").into()
    })
}

fn profile(name: &str) -> Result<Profile> {
    let all = [Profile::Interface, Profile::Chained, Profile::Ipam, Profile::Foreign];
    all.into_iter().find(|profile| profile.name() == name).ok_or_else(|| {
        format!("unknown profile {name}: interface, chained, ipam or foreign").into()
    })
}

fn version(name: &str) -> Result<&'static str> {
    let known = VERSIONS.into_iter().find(|known| *known == name);
    known.ok_or_else(|| format!("unknown version {name}: {}", VERSIONS.join(", ")).into())
}

fn list() -> String {
    let mut out = String::new();
    for Assertion { id, level, clauses, text, .. } in catalogue::all() {
        out.extend([id, "\t", level.name(), "\t", clauses, "\t", text, "\n"]);
    }
    let kinds: Vec<String> =
        KINDS.iter().map(|kind| format!("{} ({})", kind.name, kind.profile.name())).collect();
    out + &format!("\nTypes that are known: {}\n", kinds.join(", "))
}

fn clauses() -> String {
    let line = |clause: &Clause| {
        let of = |one: &&Assertion| one.clauses().any(|known| known.id == clause.id);
        let ids: Vec<&str> = catalogue::all().filter(of).map(|one| one.id).collect();
        let tested = if ids.is_empty() { format!("- {}", clause.untested) } else { ids.join(" ") };
        let Clause { id, section, force, text, .. } = clause;
        format!("{id}\t{}\t{section}\t{text}\t{tested}\n", force.name())
    };
    spec::TABLE.iter().map(line).collect()
}

fn explain(id: &str) -> Result<Task> {
    let assertion =
        catalogue::find(id).ok_or_else(|| format!("no assertion {id}; --list has them all"))?;
    let Assertion { id, level, text, why, .. } = assertion;
    let clause = |Clause { id, section, force, text, .. }: &Clause| {
        format!("  clause   {section}, {id} ({}): {text}\n", force.name())
    };
    let clauses: String = assertion.clauses().map(clause).collect();
    let level = level.name();
    Ok(Task::Print(format!("{id} ({level})\n  says     {text}\n{clauses}  otherwise  {why}\n")))
}
