//! The daemon's command line: the reference's options, `--probe` and `--on-demand`.

use std::path::PathBuf;
use std::time::Duration;

use super::super::conf::SOCKET;
use super::super::timing::ClientTiming;
use crate::options::{
    self, CommandLine, CommandOption, ParsedCommandLine, long_option, require_no_words, usage_error,
};
use cni::error::Result;

const OPTIONS: &[CommandOption] = &[
    long_option("--socketpath", "PATH", "the socket to listen on (/run/cni/dhcp.sock)"),
    long_option("--hostprefix", "TEXT", "prefix of the paths of the socket and of namespaces"),
    long_option("--pidfile", "PATH", "absolute; created at the start, removed at the end"),
    long_option("--broadcast", "", "request broadcast replies from servers"),
    long_option(
        "--timeout",
        "TIME",
        "timeout of the first message (4s), doubled for each further one",
    ),
    long_option("--resendmax", "TIME", "longest timeout of a message (62s)"),
    long_option("--resendtimeout", "TIME", "time limit for the first lease (3m28s)"),
    long_option(
        "--probe",
        "TIME",
        "timeout for the reply of a host that uses the address (200ms); 0 sends no probe",
    ),
    long_option(
        "--on-demand",
        "",
        "started by a plugin: print \"ready\", then close standard output",
    ),
];

pub(super) fn help_text() -> String {
    let options = options::help_text(OPTIONS);
    format!(
        "Usage: dhcp daemon [OPTIONS]\n\n{options}\nOptions can have one dash or two. Times are \
         like 10s or 1m30s.\n"
    )
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct DaemonOptions {
    pub(super) socket: PathBuf,
    pub(super) prefix: String,
    pub(super) pidfile: Option<PathBuf>,
    pub(super) broadcast: bool,
    pub(super) timing: ClientTiming,
    /// The time limit of the first lease.
    pub(super) limit: Duration,
    pub(super) on_demand: bool,
}

impl DaemonOptions {
    pub(super) fn from_command_line(line: &CommandLine) -> Result<DaemonOptions> {
        require_no_words(line)?;
        let prefix = line.last_value("--hostprefix").unwrap_or_default().to_owned();
        let defaults = ClientTiming::default();
        Ok(DaemonOptions {
            socket: format!("{prefix}{}", line.last_value("--socketpath").unwrap_or(SOCKET)).into(),
            prefix,
            pidfile: line.last_value("--pidfile").filter(|path| !path.is_empty()).map(Into::into),
            broadcast: line.has_option("--broadcast"),
            timing: ClientTiming {
                first: positive_time(line, "--timeout", defaults.first)?,
                most: positive_time(line, "--resendmax", defaults.most)?,
                probe: time_option(line, "--probe", defaults.probe)?,
            },
            limit: positive_time(line, "--resendtimeout", Duration::from_secs(208))?,
            on_demand: line.has_option("--on-demand"),
        })
    }

    /// The path of a plugin, as this process sees it.
    pub(super) fn prefixed_path(&self, path: &str) -> PathBuf {
        format!("{}{path}", self.prefix).into()
    }
}

/// Parses the arguments after `daemon`.
pub(super) fn parse_arguments(args: Vec<String>) -> Result<ParsedCommandLine> {
    options::parse_args(as_long_options(args), OPTIONS)
}

/// Converts options as Go's `flag` accepts them: with one dash, and switches with a value. The
/// argument after an option that needs a value is its value, even with a leading dash.
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

fn positive_time(line: &CommandLine, flag: &str, default: Duration) -> Result<Duration> {
    match time_option(line, flag, default)? {
        Duration::ZERO => Err(usage_error(format!("{flag} must be more than 0"))),
        time => Ok(time),
    }
}

fn time_option(line: &CommandLine, flag: &str, default: Duration) -> Result<Duration> {
    let Some(text) = line.last_value(flag) else { return Ok(default) };
    parse_duration(text).ok_or_else(|| {
        usage_error(format!("invalid time \"{text}\" of {flag}"))
            .with_details("write it like 10s or 1m30s")
    })
}

/// The units of [`parse_duration`] in seconds.
const UNITS: [(&str, f64); 7] = [
    ("ns", 1e-9),
    ("us", 1e-6),
    ("µs", 1e-6),
    ("ms", 1e-3),
    ("s", 1.0),
    ("m", 60.0),
    ("h", 3600.0),
];

/// A duration in the format of Go: numbers with units, at most a day.
fn parse_duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut rest = text;
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let number = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let tail = &rest[number..];
        let unit = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == &tail[..unit])?;
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

    fn defaults() -> DaemonOptions {
        DaemonOptions {
            socket: "/run/cni/dhcp.sock".into(),
            prefix: String::new(),
            pidfile: None,
            broadcast: false,
            timing: ClientTiming::default(),
            limit: Duration::from_secs(208),
            on_demand: false,
        }
    }

    fn read(line: &str) -> Result<DaemonOptions> {
        match parse_arguments(line.split_whitespace().map(str::to_owned).collect())? {
            ParsedCommandLine::Work(line) => DaemonOptions::from_command_line(&line),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn options_with_one_dash_or_two() {
        let line = "-socketpath /a.sock --hostprefix=/host -timeout 2s -resendmax=8s \
                    --resendtimeout 1m10s -broadcast --pidfile /run/x.pid -probe 0";
        let options = read(line).unwrap();
        assert_eq!(options.socket, Path::new("/host/a.sock"));
        assert_eq!(options.prefixed_path("/n"), Path::new("/host/n"));
        assert_eq!(options.pidfile, Some("/run/x.pid".into()));
        assert!(options.broadcast && !options.on_demand);
        let seconds = Duration::from_secs;
        assert_eq!(options.limit, seconds(70));
        let timing = ClientTiming { first: seconds(2), most: seconds(8), probe: Duration::ZERO };
        assert_eq!(options.timing, timing);
        assert_eq!(read(""), Ok(defaults()));
        for line in ["-broadcast=false", "--broadcast=0", "-broadcast --broadcast=false"] {
            assert_eq!(read(line), Ok(defaults()), "{line}");
        }
        assert!(read("-broadcast=true").unwrap().broadcast);
        assert!(read("-on-demand=1").unwrap().on_demand);
        assert_eq!(read("-hostprefix -broadcast").unwrap().prefix, "-broadcast");
    }

    #[test]
    fn help_is_printed_and_wrong_options_are_refused() {
        for line in ["-h", "-help", "-broadcast --help"] {
            let args = line.split_whitespace().map(str::to_owned).collect();
            assert_eq!(parse_arguments(args), Ok(ParsedCommandLine::Help), "{line}");
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
            assert_eq!(read(line).unwrap_err().message(), message, "{line}");
        }
    }

    #[test]
    fn durations_are_parsed() {
        let seconds = |text| parse_duration(text).map(|d| d.as_secs_f64());
        assert_eq!(seconds("1m30s"), Some(90.0));
        assert_eq!(seconds("1.5h"), Some(5400.0));
        assert_eq!(seconds("250ms"), Some(0.25));
        assert_eq!(seconds("0"), Some(0.0));
    }
}
