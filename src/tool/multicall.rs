//! `cnibox` itself: its commands, help, list of applets and completions, and the error for an unknown
//! name. Help and completions are made from the tables of applets, commands and options.

use std::process::ExitCode;

use super::{
    Tool, WRONG_USAGE, cnitool, doctor, gc, install, ipam, lint, pause, print, repair, sysdump,
    trace,
};
use crate::cni::SpecVersion;
use crate::error::{Code, Error, Result};
use crate::log;
use crate::options::{self, CommandLine, all, unknown_word, usage};
use crate::skel::call::{Main, ToolFn};
use crate::skel::{Applet, Table, run};

const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];

const COMPLETION: Tool = Tool {
    command: "cnibox completion",
    usage: "\
completion: prints completions of the arguments of cnibox for a shell

Usage:
  cnibox completion bash|zsh|fish
",
    options: &[],
    notes: "",
};

/// The commands that are not applets, each with its main function.
const COMMANDS: [(&Tool, ToolFn); 9] = [
    (&install::INSTALL, install::main),
    (&install::UNINSTALL, install::main_uninstall),
    (&lint::TOOL, lint::main),
    (&doctor::TOOL, doctor::main),
    (&sysdump::TOOL, sysdump::main),
    (&trace::TOOL, trace::main),
    (&gc::TOOL, gc::main),
    (&pause::TOOL, pause::main),
    (&COMPLETION, completion),
];

/// All commands, each with a description.
fn commands() -> impl Iterator<Item = (&'static str, &'static str)> {
    COMMANDS.iter().map(|(tool, _)| tool.title()).chain([
        ("help", "prints this help"),
        ("list", "lists the applets"),
        ("version", "prints the version"),
    ])
}

/// Whether `name` is that of the executable, whose first argument is an applet or a command. The
/// name of a release's file, such as `cnibox-0.1.0-x86_64`, is one.
pub fn is_own_name(name: &str) -> bool {
    name == "cnibox" || name.starts_with("cnibox-")
}

/// Runs the executable under the name of an applet. A link of a tool without an argument prints what a plugin prints, and
/// its help: programs such as Nomad start each file in a folder of plugins to find out which plugin it is.
pub fn link(applet: &Applet, args: Vec<String>, table: Table) -> ExitCode {
    let Main::Tool(tool) = applet.main else { return run::main(applet, args, table) };
    if !args.is_empty() {
        return tool(args, table);
    }
    if is_called_by_runtime() {
        let error = Error::config(format!("\"{}\" is a tool, not a plugin", applet.name));
        let error = error.with_details("correct \"type\" in the network configuration");
        return run::fail(&error, SpecVersion::NEWEST);
    }
    run::about(applet.name, &SpecVersion::ALL);
    tool(vec!["--help".to_owned()], table)
}

fn is_called_by_runtime() -> bool {
    std::env::var_os("CNI_COMMAND").is_some_and(|verb| !verb.is_empty())
}

/// Runs the executable under a name that is not an applet.
pub fn main(name: &str, args: &[String], table: Table) -> ExitCode {
    let applets = table.applets;
    if !is_own_name(name) {
        return unknown(name, applets, ExitCode::FAILURE);
    }
    let text = match args.first().map(String::as_str) {
        None | Some("help" | "--help" | "-h") => help(applets),
        Some(word @ ("list" | "--list" | "version" | "--version" | "-V")) => match args.get(1) {
            Some(extra) => {
                log::line(format_args!("cnibox {word}: unexpected argument \"{extra}\""));
                return WRONG_USAGE.into();
            }
            None if word.ends_with("list") => list(applets),
            None => options::version(),
        },
        Some(word) => {
            return match COMMANDS.iter().find(|(tool, _)| tool.title().0 == word) {
                Some((_, main)) => main(args[1..].to_vec(), table),
                None => unknown(word, applets, WRONG_USAGE.into()),
            };
        }
    };
    print(&text).unwrap_or(ExitCode::FAILURE)
}

/// Fails with this status. A runtime, which may have started a link of this name, reads the error object; a person
/// reads stderr.
fn unknown(name: &str, applets: &[Applet], status: ExitCode) -> ExitCode {
    let names: Vec<_> = applets.iter().map(|applet| applet.name).collect();
    let words = names.iter().copied().chain(commands().map(|(word, _)| word));
    let remedy = match options::nearest(name, words) {
        Some(near) => format!("did you mean \"{near}\"?"),
        None => format!("the applets are: {}", names.join(", ")),
    };
    let error = Error::new(Code::INVALID_CONFIG, format!("cnibox has no applet \"{name}\""));
    let error = error.with_details(remedy);
    if is_called_by_runtime() {
        return run::fail(&error, SpecVersion::NEWEST);
    }
    log::line(error);
    status
}

fn list(applets: &[Applet]) -> String {
    let line = |applet: &Applet| {
        let Applet { name, kind, about, .. } = applet;
        format!("{name:<12} {kind:<10} {about}\n")
    };
    applets.iter().map(line).collect()
}

fn help(applets: &[Applet]) -> String {
    let commands: Vec<_> =
        commands().map(|(word, about)| format!("  cnibox {word:<12}  {about}\n")).collect();
    format!(
        "cnibox {}: every Linux CNI plugin in one executable

Usage:
  <applet> ...         as a link of that name, the way container runtimes start it
  cnibox <applet> ...  the same without a link
{}
Applets:
  {}

A plugin reads CNI_COMMAND and the other CNI_* variables from the environment and the network
configuration from standard input; without CNI_COMMAND it prints the supported versions. To try
a network by hand, see: cnibox cnitool --help
",
        env!("CARGO_PKG_VERSION"),
        commands.concat(),
        list(applets).trim_end().replace('\n', "\n  ")
    )
}

/// All tools with options: the commands, and the applets that are not plugins.
fn tools() -> impl Iterator<Item = &'static Tool> {
    let applets = [&cnitool::TOOL, &ipam::TOOL, &repair::TOOL];
    COMMANDS.iter().map(|(tool, _)| *tool).chain(applets)
}

/// The command of each tool, with its options.
#[cfg(feature = "testing")]
pub fn of_tools() -> Vec<(&'static str, Vec<&'static str>)> {
    let flags = |tool: &Tool| all(tool.options).map(|opt| opt.flag).collect();
    tools().map(|tool| (tool.command, flags(tool))).collect()
}

/// Runs `cnibox completion` with the arguments that follow it.
fn completion(args: Vec<String>, table: Table) -> ExitCode {
    let read = |line: CommandLine| match line.words.as_slice() {
        [] => Err(usage("no shell given")),
        [shell] => script(shell, table.applets),
        [_, extra, ..] => Err(usage(format!("unexpected argument \"{extra}\""))),
    };
    COMPLETION.run(args, read, |text| print(&text))
}

fn script(shell: &str, applets: &[Applet]) -> Result<String> {
    Ok(match shell {
        "bash" => bash(applets),
        // zsh runs bash's completions.
        "zsh" => format!(
            "#compdef cnibox\nautoload -U +X bashcompinit && bashcompinit\n{}",
            bash(applets)
        ),
        "fish" => fish(applets),
        other => return Err(unknown_word("shell", other, &SHELLS)),
    })
}

/// The words that may follow `cnibox`, each with a description, sorted.
fn first_words(applets: &[Applet]) -> Vec<(&'static str, &'static str)> {
    let applets = applets.iter().map(|applet| (applet.name, applet.about));
    let mut words: Vec<_> = applets.chain(commands()).collect();
    words.sort_unstable();
    words
}

fn bash(applets: &[Applet]) -> String {
    let first: Vec<_> = first_words(applets).into_iter().map(|(word, _)| word).collect();
    let flags = |tool: &Tool| all(tool.options).map(|opt| opt.flag).collect::<Vec<_>>().join(" ");
    let case = |tool: &Tool| {
        format!("                    {}) words=\"{}\" ;;\n", tool.title().0, flags(tool))
    };
    format!(
        r#"_cnibox() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} last=${{COMP_WORDS[COMP_CWORD-1]}} words=
    COMPREPLY=()
    case $last in
        --mode) words="symlink hardlink copy" ;;
        --policy) words="always if-newer if-not-present never" ;;
        --only | --skip) words="{names}" ;;
        *)
            if [ "$COMP_CWORD" = 1 ]; then
                words="{first}"
            else
                case ${{COMP_WORDS[1]}} in
{cases}                esac
                case $word in
                    -*) ;;
                    *) words=; [ "${{COMP_WORDS[1]}}" != completion ] || words="{shells}" ;;
                esac
            fi
            ;;
    esac
    while read -r reply; do
        COMPREPLY+=("$reply")
    done < <(compgen -W "$words" -- "$word")
}}
complete -o default -F _cnibox cnibox
"#,
        names = applets.iter().map(|applet| applet.name).collect::<Vec<_>>().join(" "),
        first = first.join(" "),
        cases = tools().map(case).collect::<String>(),
        shells = SHELLS.join(" "),
    )
}

fn fish(applets: &[Applet]) -> String {
    let quoted = |text: &str| text.replace('\n', " ").replace('\'', "\\'");
    let mut lines = vec!["complete -c cnibox -f".to_owned()];
    for (word, about) in first_words(applets) {
        let about = quoted(about);
        lines.push(format!("complete -c cnibox -n __fish_use_subcommand -a '{word}' -d '{about}'"));
    }
    for tool in tools() {
        let (command, _) = tool.title();
        for opt in all(tool.options) {
            let (flag, about) = (opt.flag.trim_start_matches('-'), quoted(opt.about));
            let value = if opt.value.is_empty() { "" } else { " -r" };
            lines.push(format!(
                "complete -c cnibox -n '__fish_seen_subcommand_from {command}' -l {flag}{value} -d '{about}'"
            ));
        }
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::applets::APPLETS;

    #[test]
    fn every_applet_command_and_option_is_offered() {
        for shell in ["bash", "zsh", "fish"] {
            let text = script(shell, APPLETS).unwrap();
            for (word, _) in first_words(APPLETS) {
                assert!(text.contains(word), "{shell}: {word}");
            }
            for opt in tools().flat_map(|tool| all(tool.options)) {
                let flag =
                    if shell == "fish" { opt.flag.trim_start_matches('-') } else { opt.flag };
                assert!(text.contains(flag), "{shell}: {flag}");
            }
        }
        script("tcsh", APPLETS).unwrap_err();
    }

    #[test]
    fn bash_completes() {
        let complete = |words: &str| {
            let script = script("bash", APPLETS).unwrap();
            let count = words.split(' ').count() - 1;
            let test = format!(
                "{script}\nCOMP_WORDS=({words}); COMP_CWORD={count}; _cnibox; echo \"${{COMPREPLY[*]}}\""
            );
            let bash = std::path::Path::new("/bin/bash");
            crate::cmd::run(bash, &["-c", &test], "").unwrap().require_success().unwrap()
        };
        assert_eq!(complete("cnibox inst"), "install\n");
        assert_eq!(complete("cnibox install --mo"), "--mode\n");
        assert_eq!(complete("cnibox install --policy if"), "if-newer if-not-present\n");
        assert_eq!(complete("cnibox install --only ptp"), "ptp\n");
        assert_eq!(complete("cnibox completion f"), "fish\n");
        assert_eq!(complete("cnibox ipam --dr"), "--dry-run\n");
    }
}
