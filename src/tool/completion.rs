//! `cnibox completion <shell>`: what a shell needs to complete the arguments, from the tables of
//! applets and options.

use std::process::ExitCode;

use super::{Tool, cnitool, doctor, gc, install, ipam, lint, pause, print, repair, sysdump, trace};
use crate::error::Result;
use crate::options::{CommandLine, HELP, Opt, VERSION, unknown_word, usage};
use crate::skel::Applet;

/// What `cnibox` does beside its applets, each with a line for a person.
pub(super) const COMMANDS: [(&str, &str); 12] = [
    ("completion", "print completions for a shell"),
    ("doctor", "tell what is wrong on this node"),
    ("gc", "take back what dead containers left"),
    ("help", "print help"),
    ("install", "install into a folder of plugins"),
    ("lint", "tell what is wrong with network configurations"),
    ("list", "print the applets"),
    ("pause", "wait for SIGTERM"),
    ("sysdump", "write a file with what a maintainer would ask for"),
    ("trace", "tell what calls did, and why they failed"),
    ("uninstall", "take an installation back"),
    ("version", "print the version"),
];

const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];

const TOOL: Tool = Tool {
    command: "cnibox completion",
    usage: "\
completion: prints what a shell needs to complete the arguments of cnibox

Usage:
  cnibox completion bash|zsh|fish
",
    options: &[],
    notes: "",
};

/// Every command that has options, by the word behind `cnibox`.
const TOOLS: [(&str, &Tool); 12] = [
    ("cnitool", &cnitool::TOOL),
    ("completion", &TOOL),
    ("doctor", &doctor::TOOL),
    ("gc", &gc::TOOL),
    ("install", &install::INSTALL),
    ("ipam", &ipam::TOOL),
    ("lint", &lint::TOOL),
    ("pause", &pause::TOOL),
    ("repair", &repair::TOOL),
    ("sysdump", &sysdump::TOOL),
    ("trace", &trace::TOOL),
    ("uninstall", &install::UNINSTALL),
];

/// Prints the completions of the shell that the arguments name.
pub(super) fn main(args: Vec<String>, applets: &[Applet]) -> ExitCode {
    let read = |line: CommandLine| match line.words.as_slice() {
        [] => Err(usage("no shell given")),
        [shell] => script(shell, applets),
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

fn all(tool: &Tool) -> impl Iterator<Item = &Opt> {
    tool.options.iter().chain([&HELP, &VERSION])
}

/// The words after `cnibox`.
fn first_words(applets: &[Applet]) -> Vec<(&str, &str)> {
    let applets = applets.iter().map(|applet| (applet.name, applet.about));
    let mut words: Vec<_> = applets.chain(COMMANDS).collect();
    words.sort_unstable();
    words
}

fn bash(applets: &[Applet]) -> String {
    let first: Vec<_> = first_words(applets).into_iter().map(|(word, _)| word).collect();
    let flags = |tool: &Tool| all(tool).map(|opt| opt.flag).collect::<Vec<_>>().join(" ");
    let cases = TOOLS
        .map(|(word, tool)| format!("                    {word}) words=\"{}\" ;;\n", flags(tool)));
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
        cases = cases.concat(),
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
    for (command, tool) in TOOLS {
        for opt in all(tool) {
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
            for opt in TOOLS.iter().flat_map(|(_, tool)| all(tool)) {
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
