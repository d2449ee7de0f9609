//! `cnibox completion <shell>`: what a shell needs to complete the arguments, from the tables of
//! applets and options.

use std::process::ExitCode;

use super::install::{INSTALL_OPTIONS, Opt, UNINSTALL_OPTIONS};
use super::print;
use crate::log;
use crate::skel::Applet;

/// What `cnibox` does beside its applets, each with a line for a person.
const COMMANDS: [(&str, &str); 7] = [
    ("completion", "print completions for a shell"),
    ("help", "print help"),
    ("install", "install into a folder of plugins"),
    ("list", "print the applets"),
    ("pause", "wait for SIGTERM"),
    ("uninstall", "take an installation back"),
    ("version", "print the version"),
];

/// Prints the completions of the shell that the arguments name.
pub fn main(args: &[String], applets: &[Applet]) -> ExitCode {
    if let Some(text) = args.first().and_then(|shell| script(shell, applets)) {
        return print(&text);
    }
    log::line("cnibox: completion of which shell: bash, zsh or fish?");
    ExitCode::FAILURE
}

fn script(shell: &str, applets: &[Applet]) -> Option<String> {
    match shell {
        "bash" => Some(bash(applets)),
        // zsh runs bash's completions.
        "zsh" => Some(format!(
            "#compdef cnibox\nautoload -U +X bashcompinit && bashcompinit\n{}",
            bash(applets)
        )),
        "fish" => Some(fish(applets)),
        _ => None,
    }
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
    let flags = |options: &[Opt]| options.iter().map(|opt| opt.flag).collect::<Vec<_>>().join(" ");
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
                    install) words="{install}" ;;
                    uninstall) words="{uninstall}" ;;
                    completion) words="bash zsh fish" ;;
                esac
                case $word in -*) ;; *) [ "${{COMP_WORDS[1]}}" = completion ] || words= ;; esac
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
        install = flags(INSTALL_OPTIONS),
        uninstall = flags(UNINSTALL_OPTIONS),
    )
}

fn fish(applets: &[Applet]) -> String {
    let quoted = |text: &str| text.replace('\n', " ").replace('\'', "\\'");
    let mut lines = vec!["complete -c cnibox -f".to_owned()];
    for (word, about) in first_words(applets) {
        let about = quoted(about);
        lines.push(format!("complete -c cnibox -n __fish_use_subcommand -a '{word}' -d '{about}'"));
    }
    for (command, options) in [("install", INSTALL_OPTIONS), ("uninstall", UNINSTALL_OPTIONS)] {
        for opt in options {
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
            for opt in INSTALL_OPTIONS.iter().chain(UNINSTALL_OPTIONS) {
                let flag =
                    if shell == "fish" { opt.flag.trim_start_matches('-') } else { opt.flag };
                assert!(text.contains(flag), "{shell}: {flag}");
            }
        }
        assert_eq!(script("tcsh", APPLETS), None);
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
    }
}
