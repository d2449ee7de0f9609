//! `cnibox` itself: its commands, help, list of applets and completions, and the error for an
//! unknown name. Help and completions are made from the tables of applets, commands and options.

use std::process::ExitCode;

use super::{
    ToolCommand, WRONG_USAGE, cnitool, doctor, egress, format_columns, gc, install, ipam, lint,
    pause, print_text, repair, sysdump, trace,
};
use crate::framework::call::{AppletMain, ToolFunction};
use crate::framework::{Applet, AppletTable, run};
use crate::options::{self, all_options, unexpected_argument, unknown_word_error, usage_error};
use crate::stderr;
use cni::SpecVersion;
use cni::error::{Error, ErrorCode, Result};
use cni::names::nearest_word;
use cni::plugin::process::print_error;

const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];

const COMPLETION: ToolCommand = ToolCommand {
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
const COMMANDS: [(&ToolCommand, ToolFunction); 9] = [
    (&install::INSTALL, install::main),
    (&install::UNINSTALL, install::main_uninstall),
    (&lint::TOOL, lint::main),
    (&doctor::TOOL, doctor::main),
    (&sysdump::TOOL, sysdump::main),
    (&trace::TOOL, trace::main),
    (&gc::TOOL, gc::main),
    (&pause::TOOL, pause::main),
    (&COMPLETION, print_completion),
];

/// All commands, each with a description.
fn all_commands() -> impl Iterator<Item = (&'static str, &'static str)> {
    COMMANDS.iter().map(|(tool, _)| tool.name_and_summary()).chain([
        ("help", "prints this help"),
        ("list", "lists the applets"),
        ("version", "prints the version"),
    ])
}

/// Whether `name` is that of the executable, whose first argument is an applet or a command: also
/// that of a release's file, such as `cnibox-0.1.0-x86_64`, and of a file that is being replaced,
/// such as `cnibox.new` and `.cnibox`.
pub fn is_own_name(name: &str) -> bool {
    name.trim_start_matches('.').starts_with("cnibox")
}

/// Runs the executable under the name of an applet.
pub fn run_linked_applet(applet: &Applet, args: Vec<String>, table: AppletTable) -> ExitCode {
    match applet.main {
        AppletMain::Tool(tool) => run_linked_tool(applet.name, tool, args, table),
        AppletMain::Plugin(_) => run::main(applet, args, table),
    }
}

/// Runs the executable under the name of a tool or command. Without an argument it prints what a
/// plugin prints, and its help: programs such as Nomad start each file in a directory of plugins to
/// find out which plugin it is.
fn run_linked_tool(
    name: &str,
    tool: ToolFunction,
    args: Vec<String>,
    table: AppletTable,
) -> ExitCode {
    if !args.is_empty() {
        return tool(args, table);
    }
    if is_called_by_runtime() {
        let error = Error::config(format!("\"{name}\" is a tool, not a plugin"));
        let error = error.with_details("correct \"type\" in the network configuration");
        return print_error(&error, SpecVersion::NEWEST);
    }
    run::print_about(name, &SpecVersion::ALL);
    tool(vec!["--help".to_owned()], table)
}

/// The command of this name that is not an applet.
fn find_command(name: &str) -> Option<ToolFunction> {
    let found = COMMANDS.iter().find(|(tool, _)| tool.name_and_summary().0 == name);
    found.map(|(_, main)| *main)
}

fn is_called_by_runtime() -> bool {
    std::env::var_os("CNI_COMMAND").is_some_and(|verb| !verb.is_empty())
}

/// Runs the executable under a name that is not an applet.
pub fn main(name: &str, args: &[String], table: AppletTable) -> ExitCode {
    let applets = table.applets;
    if !is_own_name(name) {
        return match find_command(name) {
            Some(main) => run_linked_tool(name, main, args.to_vec(), table),
            None => refuse_unknown_name(name, applets, ExitCode::FAILURE),
        };
    }
    let text = match args.first().map(String::as_str) {
        None | Some("help" | "--help" | "-h") => help_text(applets),
        Some(word @ ("list" | "--list" | "version" | "--version" | "-V")) => match args.get(1) {
            Some(extra) => {
                stderr::write_line(format_args!("cnibox {word}: {}", unexpected_argument(extra)));
                return WRONG_USAGE.into();
            }
            None if word.ends_with("list") => applet_list(applets),
            None => options::version_text(),
        },
        Some(word) => {
            return match find_command(word) {
                Some(main) => main(args[1..].to_vec(), table),
                None => refuse_unknown_name(word, applets, WRONG_USAGE.into()),
            };
        }
    };
    print_text(&text).unwrap_or(ExitCode::FAILURE)
}

/// Reports an unknown name. A runtime, which may have started a link of this name, reads an error
/// object on stdout; a person reads stderr and gets the exit status `status`.
fn refuse_unknown_name(name: &str, applets: &[Applet], status: ExitCode) -> ExitCode {
    let names: Vec<_> = applets.iter().map(|applet| applet.name).collect();
    let words = names.iter().copied().chain(all_commands().map(|(word, _)| word));
    let remedy = match nearest_word(name, words) {
        Some(near) => format!("did you mean \"{near}\"?"),
        None => format!("the applets are: {}", names.join(", ")),
    };
    let error = Error::new(ErrorCode::INVALID_CONFIG, format!("cnibox has no applet \"{name}\""));
    let error = error.with_details(remedy);
    if is_called_by_runtime() {
        return print_error(&error, SpecVersion::NEWEST);
    }
    stderr::write_line(error);
    status
}

fn applet_list(applets: &[Applet]) -> String {
    format_columns(
        applets
            .iter()
            .map(|applet| [applet.name, &applet.kind.to_string(), applet.about].map(str::to_owned))
            .collect(),
    )
}

fn help_text(applets: &[Applet]) -> String {
    let commands: Vec<_> =
        all_commands().map(|(word, about)| format!("  cnibox {word:<12}  {about}\n")).collect();
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
        applet_list(applets).trim_end().replace('\n', "\n  ")
    )
}

/// All tools with options: the commands, and the applets that are not plugins.
fn all_tools() -> impl Iterator<Item = &'static ToolCommand> {
    let applets = [&cnitool::TOOL, &egress::TOOL, &ipam::TOOL, &repair::TOOL];
    COMMANDS.iter().map(|(tool, _)| *tool).chain(applets)
}

/// The command of each tool, with its options.
#[cfg(feature = "testing")]
pub fn flags_by_tool() -> Vec<(&'static str, Vec<&'static str>)> {
    let flags = |tool: &ToolCommand| all_options(tool.options).map(|opt| opt.flag).collect();
    all_tools().map(|tool| (tool.command, flags(tool))).collect()
}

/// Runs `cnibox completion` with the arguments that follow it.
fn print_completion(args: Vec<String>, table: AppletTable) -> ExitCode {
    COMPLETION.run_command(
        args,
        |line| match line.words.as_slice() {
            [] => Err(usage_error("no shell given")),
            [shell] => completion_script(shell, table.applets),
            [_, extra, ..] => Err(unexpected_argument(extra)),
        },
        |text| print_text(&text),
    )
}

fn completion_script(shell: &str, applets: &[Applet]) -> Result<String> {
    Ok(match shell {
        "bash" => bash_completion(applets),
        // zsh runs bash's completions.
        "zsh" => format!(
            "#compdef cnibox\nautoload -U +X bashcompinit && bashcompinit\n{}",
            bash_completion(applets)
        ),
        "fish" => fish_completion(applets),
        other => return Err(unknown_word_error("shell", other, &SHELLS)),
    })
}

/// The words that may follow `cnibox`, each with a description, sorted.
fn first_words(applets: &[Applet]) -> Vec<(&'static str, &'static str)> {
    let applets = applets.iter().map(|applet| (applet.name, applet.about));
    let mut words: Vec<_> = applets.chain(all_commands()).collect();
    words.sort_unstable();
    words
}

fn bash_completion(applets: &[Applet]) -> String {
    let first: Vec<_> = first_words(applets).into_iter().map(|(word, _)| word).collect();
    let flags = |tool: &ToolCommand| {
        all_options(tool.options).map(|opt| opt.flag).collect::<Vec<_>>().join(" ")
    };
    let case = |tool: &ToolCommand| {
        format!("                    {}) words=\"{}\" ;;\n", tool.name_and_summary().0, flags(tool))
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
        cases = all_tools().map(case).collect::<String>(),
        shells = SHELLS.join(" "),
    )
}

fn fish_completion(applets: &[Applet]) -> String {
    let quoted = |text: &str| text.replace('\n', " ").replace('\'', "\\'");
    let mut lines = vec!["complete -c cnibox -f".to_owned()];
    for (word, about) in first_words(applets) {
        let about = quoted(about);
        lines.push(format!("complete -c cnibox -n __fish_use_subcommand -a '{word}' -d '{about}'"));
    }
    for tool in all_tools() {
        let (command, _) = tool.name_and_summary();
        for opt in all_options(tool.options) {
            let (flag, about) = (opt.flag.trim_start_matches('-'), quoted(opt.about));
            let value = if opt.value.is_empty() { "" } else { " -r" };
            lines.push(format!(
                "complete -c cnibox -n '__fish_seen_subcommand_from {command}' -l {flag}{value} \
                 -d '{about}'"
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
            let text = completion_script(shell, APPLETS).unwrap();
            for (word, _) in first_words(APPLETS) {
                assert!(text.contains(word), "{shell}: {word}");
            }
            for opt in all_tools().flat_map(|tool| all_options(tool.options)) {
                let flag =
                    if shell == "fish" { opt.flag.trim_start_matches('-') } else { opt.flag };
                assert!(text.contains(flag), "{shell}: {flag}");
            }
        }
        completion_script("tcsh", APPLETS).unwrap_err();
    }

    #[test]
    fn bash_completion_works() {
        let complete = |words: &str| {
            let script = completion_script("bash", APPLETS).unwrap();
            let count = words.split(' ').count() - 1;
            let test = format!(
                "{script}\nCOMP_WORDS=({words}); COMP_CWORD={count}; _cnibox; echo \
                 \"${{COMPREPLY[*]}}\""
            );
            let bash = std::path::Path::new("/bin/bash");
            crate::cmd::run_program(bash, &["-c", &test], "").unwrap().require_success().unwrap()
        };
        assert_eq!(complete("cnibox inst"), "install\n");
        assert_eq!(complete("cnibox install --mo"), "--mode\n");
        assert_eq!(complete("cnibox install --policy if"), "if-newer if-not-present\n");
        assert_eq!(complete("cnibox install --only ptp"), "ptp\n");
        assert_eq!(complete("cnibox completion f"), "fish\n");
        assert_eq!(complete("cnibox ipam --dr"), "--dry-run\n");
    }
}
