//! The daemon's command line, which is the reference's and a little more.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::super::conf::SOCKET;
use super::super::protocol::timing::Timing;

/// What `-h` prints.
pub(super) const USAGE: &str = "usage: dhcp daemon [flags]

  -socketpath <path>   where to listen (/run/cni/dhcp.sock)
  -hostprefix <text>   put before the socket's path and those of namespaces
  -pidfile <path>      absolute; written at the start, removed at the end
  -broadcast           ask servers to broadcast their answers
  -timeout <time>      for the answer to the first message (4s); doubled for each further one
  -resendmax <time>    at most for the answer to one message (62s)
  -resendtimeout <time>  for a lease to be had (3m28s)
  -probe <time>        for whoever uses the address already to say so (200ms); 0 does not ask
  -on-demand           started by a plugin: say \"ready\" on standard output, then close it

Flags take one dash or two, values follow a blank or a \"=\". Times are like 10s or 1m30s.
";

/// How the daemon is to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Options {
    socket: String,
    pub(super) prefix: String,
    pub(super) pidfile: Option<PathBuf>,
    pub(super) broadcast: bool,
    pub(super) timing: Timing,
    /// For a first lease to be had.
    pub(super) limit: Duration,
    pub(super) on_demand: bool,
}

/// What the command line asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    Run(Options),
    Help,
    Wrong(String),
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

/// Reads the arguments behind `daemon`.
pub(super) fn parse(args: &[String]) -> Asked {
    match read(args) {
        Ok(Some(options)) => Asked::Run(options),
        Ok(None) => Asked::Help,
        Err(why) => Asked::Wrong(why),
    }
}

fn read(args: &[String]) -> Result<Option<Options>, String> {
    let mut options = Options::default();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let dashed = arg.strip_prefix("--").or_else(|| arg.strip_prefix('-'));
        let flag = dashed.ok_or_else(|| format!("unexpected argument \"{arg}\""))?;
        let (name, given) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (flag, None),
        };
        if let Some(switch) = switch(&mut options, name) {
            *switch = match given.as_deref() {
                None | Some("true" | "1") => true,
                Some("false" | "0") => false,
                Some(other) => return Err(format!("invalid value \"{other}\" of -{name}")),
            };
            continue;
        }
        if matches!(name, "h" | "help") {
            return Ok(None);
        }
        let mut value = || {
            given.clone().or_else(|| args.next().cloned()).ok_or(format!("-{name} needs a value"))
        };
        match name {
            "socketpath" => options.socket = value()?,
            "hostprefix" => options.prefix = value()?,
            "pidfile" => options.pidfile = pidfile(&value()?)?,
            "timeout" => options.timing.first = positive(name, &value()?)?,
            "resendmax" => options.timing.most = positive(name, &value()?)?,
            "resendtimeout" => options.limit = positive(name, &value()?)?,
            "probe" => options.timing.probe = time(name, &value()?)?,
            _ => return Err(format!("no such flag: -{name}")),
        }
    }
    Ok(Some(options))
}

fn switch<'o>(options: &'o mut Options, name: &str) -> Option<&'o mut bool> {
    match name {
        "broadcast" => Some(&mut options.broadcast),
        "on-demand" => Some(&mut options.on_demand),
        _ => None,
    }
}

fn pidfile(path: &str) -> Result<Option<PathBuf>, String> {
    if path.is_empty() {
        return Ok(None);
    }
    if !Path::new(path).is_absolute() {
        return Err(format!("Error writing pidfile \"{path}\": path not absolute"));
    }
    Ok(Some(path.into()))
}

fn positive(name: &str, text: &str) -> Result<Duration, String> {
    let found = time(name, text)?;
    if found.is_zero() { Err(format!("-{name} must be more than nothing")) } else { Ok(found) }
}

fn time(name: &str, text: &str) -> Result<Duration, String> {
    duration(text).ok_or_else(|| format!("invalid time \"{text}\" of -{name}"))
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
    use super::*;

    fn args(line: &str) -> Asked {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn flags_with_one_dash_or_two() {
        let Asked::Run(options) = args(
            "-socketpath /a.sock --hostprefix=/host -timeout 2s -resendmax=8s \
             --resendtimeout 1m10s -broadcast --pidfile /run/x.pid -probe 0",
        ) else {
            panic!("refused");
        };
        assert_eq!(options.socket(), Path::new("/host/a.sock"));
        assert_eq!(options.prefixed("/n"), Path::new("/host/n"));
        assert_eq!(options.pidfile, Some("/run/x.pid".into()));
        assert!(options.broadcast && !options.on_demand);
        let seconds = Duration::from_secs;
        assert_eq!(options.limit, seconds(70));
        let timing = Timing { first: seconds(2), most: seconds(8), probe: Duration::ZERO };
        assert_eq!(options.timing, timing);
        assert_eq!(args(""), Asked::Run(Options::default()));
        assert_eq!(args("-broadcast=false"), Asked::Run(Options::default()));
    }

    #[test]
    fn help_and_mistakes() {
        assert_eq!(args("-h"), Asked::Help);
        assert_eq!(args("-broadcast --help"), Asked::Help);
        for line in [
            "-x",
            "x",
            "-timeout",
            "-timeout 10",
            "-timeout 0s",
            "-timeout -1s",
            "-timeout 25h",
            "-timeout s",
            "-timeout 1.2.3s",
            "-pidfile x",
            "-broadcast=maybe",
            "-timeout=",
        ] {
            assert!(matches!(args(line), Asked::Wrong(_)), "{line}");
        }
        let relative = Asked::Wrong("Error writing pidfile \"x\": path not absolute".to_owned());
        assert_eq!(args("-pidfile x"), relative);
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
