//! The command lines of the tools. The arguments, the help and the completions of a tool all come
//! from the table of its options.

use lexopt::{Arg, Parser};

use cni::error::{Error, Result};
use cni::names::nearest_word;

#[derive(Debug)]
pub struct CommandOption {
    /// The long name, with its dashes.
    pub flag: &'static str,
    /// The short name, one letter.
    pub short: Option<char>,
    /// The name of its value in the help; empty for an option without a value.
    pub value: &'static str,
    /// The help, one or more lines.
    pub about: &'static str,
}

/// An option without a short name.
pub const fn long_option(
    flag: &'static str,
    value: &'static str,
    about: &'static str,
) -> CommandOption {
    CommandOption { flag, short: None, value, about }
}

/// An option of every command.
pub const HELP: CommandOption =
    CommandOption { short: Some('h'), ..long_option("--help", "", "print this text") };
/// An option of every command.
pub const VERSION: CommandOption =
    CommandOption { short: Some('V'), ..long_option("--version", "", "print the version") };

/// The options of a command, including those of every command.
pub fn all_options(options: &[CommandOption]) -> impl Iterator<Item = &CommandOption> {
    options.iter().chain([&HELP, &VERSION])
}

/// The arguments of a command.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CommandLine {
    options: Vec<(&'static str, String)>,
    /// The arguments that are not options, in order.
    pub words: Vec<String>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum ParsedCommandLine {
    /// `-h`, `--help`, or `help` as the first word.
    Help,
    /// `-V` or `--version`.
    Version,
    /// The work of the command.
    Work(CommandLine),
}

/// Parses the arguments of a command with these options, `--help` and `--version`. Options may be
/// anywhere before `--`, as `--name value` or `--name=value`.
pub fn parse_args(args: Vec<String>, options: &[CommandOption]) -> Result<ParsedCommandLine> {
    let mut line = CommandLine::default();
    let mut parser = Parser::from_args(args);
    while let Some(arg) = parser.next().map_err(|wrong| usage_error(wrong.to_string()))? {
        match all_options(options).find(|opt| match arg {
            Arg::Long(name) => opt.flag.strip_prefix("--") == Some(name),
            Arg::Short(letter) => opt.short == Some(letter),
            Arg::Value(_) => false,
        }) {
            Some(opt) if opt.value.is_empty() => line.options.push((opt.flag, String::new())),
            Some(opt) => {
                let missing = format!("option {} needs a value: {}", opt.flag, opt.value);
                let value = parser.value().map_err(|_| usage_error(missing))?;
                line.options.push((opt.flag, value.to_string_lossy().into_owned()));
            }
            None => match arg {
                Arg::Value(word) => line.words.push(word.to_string_lossy().into_owned()),
                Arg::Long(name) => return Err(unknown_option_error(&format!("--{name}"), options)),
                Arg::Short(letter) => {
                    return Err(unknown_option_error(&format!("-{letter}"), options));
                }
            },
        }
    }
    let help = line.has_option(HELP.flag) || line.words.first().is_some_and(|word| word == "help");
    Ok(match line {
        _ if help => ParsedCommandLine::Help,
        line if line.has_option(VERSION.flag) => ParsedCommandLine::Version,
        line => ParsedCommandLine::Work(line),
    })
}

impl CommandLine {
    /// Whether the option was given.
    pub fn has_option(&self, flag: &str) -> bool {
        self.options.iter().any(|(name, _)| *name == flag)
    }

    pub fn last_value(&self, flag: &str) -> Option<&str> {
        self.all_values(flag).next_back()
    }

    pub fn all_values(&self, flag: &str) -> impl DoubleEndedIterator<Item = &str> {
        self.options.iter().filter(move |(name, _)| *name == flag).map(|(_, value)| &**value)
    }

    /// The names of the given options, in order.
    pub fn given_flags(&self) -> impl Iterator<Item = &'static str> {
        self.options.iter().map(|(name, _)| *name)
    }
}

pub fn help_text(options: &[CommandOption]) -> String {
    let name = |opt: &CommandOption| {
        let short = opt.short.map_or_else(|| "    ".to_owned(), |letter| format!("-{letter}, "));
        format!("  {short}{} {}", opt.flag, opt.value)
    };
    let width = all_options(options).map(|opt| name(opt).len()).max().unwrap_or_default() + 2;
    all_options(options)
        .map(|opt| {
            let about = opt.about.replace('\n', &format!("\n{:width$}", ""));
            format!("{:width$}{about}\n", name(opt))
        })
        .collect()
}

/// The output of `--version`: with the commit, if the build knew it (`CNIBOX_COMMIT`).
pub fn version_text() -> String {
    let commit = match option_env!("CNIBOX_COMMIT") {
        None | Some("") => String::new(),
        Some(commit) => format!(" (commit {commit})"),
    };
    format!("cnibox {}{commit}\n", env!("CARGO_PKG_VERSION"))
}

/// Fails if there are arguments that are not options.
pub fn require_no_words(line: &CommandLine) -> Result<()> {
    match line.words.first() {
        Some(word) => Err(unexpected_argument(word)),
        None => Ok(()),
    }
}

/// The error of an argument that has no meaning.
pub fn unexpected_argument(word: &str) -> Error {
    usage_error(format!("unexpected argument \"{word}\""))
}

/// The error of a wrong command line.
pub fn usage_error(message: impl Into<String>) -> Error {
    Error::config(message)
}

fn unknown_option_error(flag: &str, options: &[CommandOption]) -> Error {
    let error = usage_error(format!("unknown option: {flag}"));
    match nearest_word(flag, all_options(options).map(|opt| opt.flag)) {
        Some(near) => error.with_details(format!("did you mean {near}?")),
        None => error,
    }
}

/// The error of a word that is not one of `known`.
pub fn unknown_word_error(what: &str, word: &str, known: &[&str]) -> Error {
    let error = usage_error(format!("unknown {what} \"{word}\""));
    match nearest_word(word, known.iter().copied()) {
        Some(near) => error.with_details(format!("did you mean \"{near}\"?")),
        None => error.with_details(format!("there are: {}", known.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: &[CommandOption] = &[
        long_option("--mode", "MODE", "how"),
        long_option("--json", "", "report in JSON"),
        CommandOption { short: Some('n'), ..long_option("--dry-run", "", "change nothing") },
    ];

    fn parsed(args: &[&str]) -> Result<ParsedCommandLine> {
        parse_args(args.iter().map(|arg| (*arg).to_owned()).collect(), OPTIONS)
    }

    fn line(args: &[&str]) -> CommandLine {
        match parsed(args).unwrap() {
            ParsedCommandLine::Work(line) => line,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn options_may_stand_anywhere_before_two_dashes() {
        let given = line(&["a", "--mode", "x", "-n", "b", "--mode=y", "--", "--json"]);
        assert_eq!(given.words, ["a", "b", "--json"]);
        assert_eq!(given.all_values("--mode").collect::<Vec<_>>(), ["x", "y"]);
        assert_eq!(given.last_value("--mode"), Some("y"));
        assert!(given.has_option("--dry-run") && !given.has_option("--json"));
    }

    #[test]
    fn help_and_version_are_options() {
        for args in [["-h"], ["--help"], ["help"]] {
            assert_eq!(parsed(&args).unwrap(), ParsedCommandLine::Help);
        }
        assert_eq!(parsed(&["a", "--version"]).unwrap(), ParsedCommandLine::Version);
        assert_eq!(
            help_text(OPTIONS),
            concat!(
                "      --mode MODE  how\n      --json       report in JSON\n",
                "  -n, --dry-run    change nothing\n  -h, --help       print this text\n",
                "  -V, --version    print the version\n"
            )
        );
    }

    #[test]
    fn wrong_options_are_named_with_a_suggestion() {
        for (args, message) in [
            (vec!["--mod=x"], "unknown option: --mod; did you mean --mode?"),
            (vec!["--colour"], "unknown option: --colour"),
            (vec!["-x"], "unknown option: -x"),
            (vec!["--mode"], "option --mode needs a value: MODE"),
            (vec!["--json=1"], "unexpected argument for option '--json': \"1\""),
        ] {
            assert_eq!(parsed(&args).unwrap_err().to_string(), message);
        }
        let error = |word| unknown_word_error("command", word, &["list", "install"]).to_string();
        assert_eq!(error("instal"), "unknown command \"instal\"; did you mean \"install\"?");
        assert_eq!(error("x"), "unknown command \"x\"; there are: list, install");
    }
}
