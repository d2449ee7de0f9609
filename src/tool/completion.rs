//! `cnibox completion <shell>`: prints completions, made from the tables of applets and options.

use std::process::ExitCode;

use super::multicall::{COMMANDS, commands};
use super::{Tool, cnitool, ipam, print, repair};
use crate::error::Result;
use crate::options::{CommandLine, all, unknown_word, usage};
use crate::skel::{Applet, Table};

const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];

pub(super) const TOOL: Tool = Tool {
    command: "cnibox completion",
    usage: "\
completion: prints completions of the arguments of cnibox for a shell

Usage:
  cnibox completion bash|zsh|fish
",
    options: &[],
    notes: "",
};

/// All tools with options: the commands, and the applets that are not plugins.
fn tools() -> impl Iterator<Item = &'static Tool> {
    let applets = [&cnitool::TOOL, &ipam::TOOL, &repair::TOOL];
    COMMANDS.iter().map(|(tool, _)| *tool).chain(applets)
}

/// Runs `cnibox completion` with the arguments that follow it.
pub(super) fn main(args: Vec<String>, table: Table) -> ExitCode {
    let read = |line: CommandLine| match line.words.as_slice() {
        [] => Err(usage("no shell given")),
        [shell] => script(shell, table.applets),
        [_, extra, ..] => Err(usage(format!("unexpected argument \"{extra}\""))),
    };
    TOOL.run(args, read, |text| print(&text))
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
