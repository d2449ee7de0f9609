//! The daemon's command line: the reference's options, `--probe` and `--on-demand`.

use std::path::PathBuf;
use std::time::Duration;

use super::super::conf::SOCKET;
use super::super::timing::Timing;
use crate::error::Result;
use crate::options::{self, Asked, CommandLine, Opt, no_words, opt, usage};

const OPTIONS: &[Opt] = &[
    opt("--socketpath", "PATH", "where to listen (/run/cni/dhcp.sock)"),
    opt("--hostprefix", "TEXT", "put before the socket's path and those of namespaces"),
    opt("--pidfile", "PATH", "absolute; written at the start, removed at the end"),
    opt("--broadcast", "", "ask servers to broadcast their answers"),
    opt(
        "--timeout",
        "TIME",
        "for the answer to the first message (4s); doubled for each further one",
    ),
    opt("--resendmax", "TIME", "at most for the answer to one message (62s)"),
    opt("--resendtimeout", "TIME", "for a lease to be had (3m28s)"),
    opt("--probe", "TIME", "for a host that has the address to answer (200ms); 0 sends no probe"),
    opt("--on-demand", "", "started by a plugin: print \"ready\", then close standard output"),
];

/// What `--help` prints.
pub(super) fn help() -> String {
    let options = options::help(OPTIONS);
    format!(
        "Usage: dhcp daemon [OPTIONS]\n\n{options}\nOne dash is as good as two. Times are like 10s or 1m30s.\n"
    )
}

/// How the daemon is to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Options {
    socket: String,
    pub(super) prefix: String,
    pub(super) pidfile: Option<PathBuf>,
    pub(super) broadcast: bool,
    pub(super) timing: Timing,
    /// How long the first lease may take.
    pub(super) limit: Duration,
    pub(super) on_demand: bool,
}

impl Options {
    /// Where to listen.
    pub(super) fn socket(&self) -> PathBuf {
        format!("{}{}", self.prefix, self.socket).into()
    }

    /// The path that a plugin gave, as this process sees it.
    pub(super) fn prefixed(&self, path: &str) -> PathBuf {
        format!("{}{path}", self.prefix).into()
    }
}

impl Default for Options {
    fn default() -> Options {
        Options {
            socket: SOCKET.to_owned(),
            prefix: String::new(),
            pidfile: None,
            broadcast: false,
            timing: Timing::default(),
            limit: Duration::from_secs(208),
            on_demand: false,
        }
    }
}

/// Parses the arguments behind `daemon`.
pub(super) fn parse(args: Vec<String>) -> Result<Asked> {
    options::parse(as_long_options(args), OPTIONS)
}

/// The reference's options are those of Go's `flag`: also with one dash, and a switch may have a value. The
/// argument behind an option that needs a value is that value, whatever it begins with.
fn as_long_options(args: Vec<String>) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let mut is_value = false;
    for arg in args {
        let name = arg.trim_start_matches('-');
        let dashes = arg.len() - name.len();
        if is_value || dashes == 0 || name.len() < 2 {
            is_value = false;
            all.push(arg);
            continue;
        }
        let arg = if dashes == 1 { format!("-{arg}") } else { arg };
        let (flag, value) = arg.split_once('=').unwrap_or((&arg, ""));
        let option = OPTIONS.iter().find(|opt| opt.flag == flag);
        match (option.is_some_and(|opt| opt.value.is_empty()), value) {
            (true, "true" | "1") => all.push(flag.to_owned()),
            (true, "false" | "0") => all.retain(|earlier| earlier != flag),
            _ => {
                is_value = option.is_some_and(|opt| !opt.value.is_empty()) && flag == arg;
                all.push(arg);
            }
        }
    }
    all
}

impl Options {
    /// The options of a command line.
    pub(super) fn read(line: &CommandLine) -> Result<Options> {
        no_words(line)?;
        let defaults = Options::default();
        let text = |flag, default: String| line.last(flag).map_or(default, str::to_owned);
        Ok(Options {
            socket: text("--socketpath", defaults.socket),
            prefix: text("--hostprefix", defaults.prefix),
            pidfile: line.last("--pidfile").filter(|path| !path.is_empty()).map(Into::into),
            broadcast: line.has("--broadcast"),
            timing: Timing {
                first: positive(line, "--timeout", defaults.timing.first)?,
                most: positive(line, "--resendmax", defaults.timing.most)?,
                probe: time(line, "--probe", defaults.timing.probe)?,
            },
            limit: positive(line, "--resendtimeout", defaults.limit)?,
            on_demand: line.has("--on-demand"),
        })
    }
}

fn positive(line: &CommandLine, flag: &str, default: Duration) -> Result<Duration> {
    let found = time(line, flag, default)?;
    if found.is_zero() { Err(usage(format!("{flag} must be more than 0"))) } else { Ok(found) }
}

fn time(line: &CommandLine, flag: &str, default: Duration) -> Result<Duration> {
    let Some(text) = line.last(flag) else { return Ok(default) };
    let wrong = || usage(format!("invalid time \"{text}\" of {flag}"));
    duration(text).ok_or_else(|| wrong().with_details("write it like 10s or 1m30s"))
}

/// A time as Go writes it: numbers with units, one after the other. A day is more than enough.
fn duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut rest = text;
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let number = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let tail = &rest[number..];
        let unit = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let factor = match &tail[..unit] {
            "ns" => 1e-9,
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        seconds += rest[..number].parse::<f64>().ok()? * factor;
        rest = &tail[unit..];
    }
    let fine = !text.is_empty() && seconds <= 86_400.0;
    Duration::try_from_secs_f64(seconds).ok().filter(|_| fine)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn read(line: &str) -> Result<Options> {
        match parse(line.split_whitespace().map(str::to_owned).collect())? {
            Asked::Work(line) => Options::read(&line),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn options_with_one_dash_or_two() {
        let line = "-socketpath /a.sock --hostprefix=/host -timeout 2s -resendmax=8s \
                    --resendtimeout 1m10s -broadcast --pidfile /run/x.pid -probe 0";
        let options = read(line).unwrap();
        assert_eq!(options.socket(), Path::new("/host/a.sock"));
        assert_eq!(options.prefixed("/n"), Path::new("/host/n"));
        assert_eq!(options.pidfile, Some("/run/x.pid".into()));
        assert!(options.broadcast && !options.on_demand);
        let seconds = Duration::from_secs;
        assert_eq!(options.limit, seconds(70));
        let timing = Timing { first: seconds(2), most: seconds(8), probe: Duration::ZERO };
        assert_eq!(options.timing, timing);
        assert_eq!(read(""), Ok(Options::default()));
        for line in ["-broadcast=false", "--broadcast=0", "-broadcast --broadcast=false"] {
            assert_eq!(read(line), Ok(Options::default()), "{line}");
        }
        assert!(read("-broadcast=true").unwrap().broadcast);
        assert!(read("-on-demand=1").unwrap().on_demand);
        assert_eq!(read("-hostprefix -broadcast").unwrap().prefix, "-broadcast");
    }

    #[test]
    fn help_and_mistakes() {
        for line in ["-h", "-help", "-broadcast --help"] {
            let args = line.split_whitespace().map(str::to_owned).collect();
            assert_eq!(parse(args), Ok(Asked::Help), "{line}");
        }
        let mistakes = [
            ("-x", "unknown option: -x"),
            ("-socketpaht /a", "unknown option: --socketpaht"),
            ("x", "unexpected argument \"x\""),
            ("-timeout", "option --timeout needs a value: TIME"),
            ("-timeout 10", "invalid time \"10\" of --timeout"),
            ("-timeout 0s", "--timeout must be more than 0"),
            ("-timeout -1s", "invalid time \"-1s\" of --timeout"),
            ("-timeout=-1s", "invalid time \"-1s\" of --timeout"),
            ("-timeout 25h", "invalid time \"25h\" of --timeout"),
            ("-timeout s", "invalid time \"s\" of --timeout"),
            ("-timeout 1.2.3s", "invalid time \"1.2.3s\" of --timeout"),
            ("-timeout=", "invalid time \"\" of --timeout"),
            ("-broadcast=maybe", "unexpected argument for option '--broadcast': \"maybe\""),
        ];
        for (line, message) in mistakes {
            assert_eq!(read(line).unwrap_err().msg(), message, "{line}");
        }
    }

    #[test]
    fn times() {
        let seconds = |text| duration(text).map(|d| d.as_secs_f64());
        assert_eq!(seconds("1m30s"), Some(90.0));
        assert_eq!(seconds("1.5h"), Some(5400.0));
        assert_eq!(seconds("250ms"), Some(0.25));
        assert_eq!(seconds("0"), Some(0.0));
    }
}
