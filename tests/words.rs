//! The words of messages: no names of this program's types, no words of its decoder, no bare error
//! numbers; and the inventory of its advice: each one is followed by `tests/it/advice.rs`, or
//! `words.txt` says why not.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use cnibox_tests::root;
use regex_lite::{Captures, Regex};
use serde_json::Value;

/// Messages of operators' mistakes, with the advice.
const MESSAGES: &str = include_str!("it/golden/messages.json");

/// Advice that no test follows: `reason | text`, one a line.
const UNFOLLOWED: &str = include_str!("words.txt");

/// Words that only this program's authors know.
const OF_THE_PROGRAM: [&str; 9] = [
    r"\b(struct|enum|tuple|newtype) [A-Z]",
    r"\b(unit value|a sequence|unwrap|JSON pointer)\b",
    r"\b(i8|i16|i32|i64|u8|u16|u32|u64|usize|f64|float64|bool|boolean|uint\w*)\b",
    r"(Option|Vec|Result|Box|Arc)<|\b(Some|None|Ok|Err)\(",
    r"interface \{\}|map\[string\]",
    r"\bE(PERM|NOENT|INTR|IO|BADF|AGAIN|NOMEM|ACCES|BUSY|EXIST|NODEV|NOTDIR|INVAL|NOSPC|ROFS|RANGE|NOTSUP|OPNOTSUPP)\b",
    r"\bos error \d|\berrno\b|\(code -?\d",
    r"\b[a-z_]{3,}::[A-Za-z_]{3,}",
    r"\bsrc/[a-z_/]+\.rs\b",
];

/// What follows the trouble in a warning that tells what to do.
const INSTRUCTION: &str = r"[;:] (--\w+|cnitool|cnibox|DEL re|add|choose|give|install|remove|run|see|set|start|try|use|write)";

/// Texts that are the reference's.
const OF_THE_REFERENCE: [&str; 6] = [
    "invalid name type float64",
    "Cannot find network interface {}",
    "invalid 'plugins' type map[string]interface {}",
    "boolean unmarshal error",
    "invalid type float64 for disableCheck",
    "invalid cniVersion type float64",
];

fn messages() -> Vec<Value> {
    serde_json::from_str(MESSAGES).unwrap()
}

/// The first word of the program in a text.
fn word_of_program(text: &str, types: &BTreeSet<String>) -> Option<String> {
    static PATTERN: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(&OF_THE_PROGRAM.join("|")).unwrap());
    let text = OF_THE_REFERENCE.iter().fold(text.to_owned(), |text, known| text.replace(known, ""));
    let mut words = text.split(|c: char| !c.is_alphanumeric());
    let of_type = words.find(|word| types.contains(*word)).map(str::to_owned);
    of_type.or_else(|| PATTERN.find(&text).map(|found| found.as_str().to_owned()))
}

/// The files below `src`, without their tests.
fn sources() -> Vec<(PathBuf, String)> {
    fn walk(dir: &Path, files: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("tests") {
                walk(&path, files);
            } else if path.extension().is_some_and(|e| e == "rs")
                && !path.ends_with("tests.rs")
                && !path.ends_with("fuzz.rs")
            {
                files.push(path);
            }
        }
    }
    let mut files = Vec::new();
    for directory in ["src", "crates/cni/src"] {
        walk(&root().join(directory), &mut files);
    }
    files.sort();
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        let tests = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
        let name = path.strip_prefix(root()).unwrap().to_owned();
        (name, text[..tests].to_owned())
    };
    files.into_iter().map(read).collect()
}

/// The names of types with at least two capitals, as `VlanTrunk`.
fn types() -> BTreeSet<String> {
    let name =
        Regex::new(r"(?m)^\s*(?:pub(?:\([a-z ]*\))? )?(?:struct|enum) ([A-Z][a-z]+[A-Z]\w*)")
            .unwrap();
    let all = sources();
    let names = all.iter().flat_map(|(_, text)| name.captures_iter(text)).map(|c| c[1].to_owned());
    names.filter(|name| name != "NetworkManager").collect()
}

/// A string literal, without the escapes of line breaks and quotes.
struct Literal {
    start: usize,
    text: String,
}

/// The string literals of a source text, and the text with blanks for literals and comments.
fn literals(source: &str) -> (Vec<Literal>, String) {
    static TOKEN: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(
            r##"(?s)//[^\n]*|/\*.*?\*/|b?r#"(.*?)"#|b?"((?:[^"\\]|\\.)*)"|'(?:[^'\\]|\\[^u]|\\u\{[0-9a-f]+\})'"##,
        )
        .unwrap()
    });
    static BREAK: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\\\n\s*").unwrap());
    static ESCAPE: LazyLock<Regex> = LazyLock::new(|| Regex::new(r#"\\(["\\n])"#).unwrap());
    let (mut found, mut code) = (Vec::new(), source.as_bytes().to_vec());
    for token in TOKEN.captures_iter(source) {
        let whole = token.get(0).unwrap();
        if let Some(text) = token.get(1).or(token.get(2)) {
            let joined = BREAK.replace_all(text.as_str(), "");
            let text = ESCAPE.replace_all(&joined, |escape: &Captures<'_>| match &escape[1] {
                "n" => "\n".to_owned(),
                other => other.to_owned(),
            });
            let text = text.into_owned();
            found.push(Literal { start: whole.start(), text });
        }
        code[whole.range()].fill(b' ');
    }
    (found, String::from_utf8_lossy(&code).into_owned())
}

/// The range from `open` to the end of the bracket there, or of the statement.
fn extent(code: &str, open: usize) -> std::ops::Range<usize> {
    let mut depth = 0;
    for (at, c) in code[open..].char_indices() {
        match c {
            '(' | '{' | '[' => depth += 1,
            ')' | '}' | ']' => depth -= 1,
            ';' if depth == 0 => return open..open + at,
            _ => {}
        }
        if depth == 0 && matches!(c, ')' | '}') || depth < 0 {
            return open..open + at;
        }
    }
    open..code.len()
}

/// The pieces of advice in a source text: what becomes the details of an error, or the remedy of a
/// finding; and warnings with an instruction.
fn advice(source: &str) -> Vec<String> {
    static INSTRUCTIONS: LazyLock<Regex> = LazyLock::new(|| Regex::new(INSTRUCTION).unwrap());
    let (found, code) = literals(source);
    let places = [
        r"with_details\(",
        r"with_remedy\(",
        r"(?:let|const) (?:mut )?(?:remedy|details|[A-Z_]*REMEDY\w*|LACKING_MODULE|DEL_FIRST|DETACH|COLLECT|RECREATE|LIST|IN_NAME)\b[^=;]*=",
        r"fn (?:\w*remedy\w*|\w*correction\w*|accept_by_iptables|accept_commands)\b[^{;]*\{",
    ];
    let mut ranges = Vec::new();
    for place in places {
        for place in Regex::new(place).unwrap().find_iter(&code) {
            let is_open = place.as_str().ends_with(['(', '{']);
            let from = if is_open { place.end() - 1 } else { place.end() };
            ranges.push(extent(&code, from));
        }
    }
    // The remedy is the last argument.
    for call in Regex::new(
        r"(?:Finding::new_(?:error|warning|note)|mistake_error|report_\w+|print_report)\(",
    )
    .unwrap()
    .find_iter(&code)
    {
        let range = extent(&code, call.end() - 1);
        if let Some(last) = found.iter().rfind(|literal| range.contains(&literal.start)) {
            ranges.push(last.start..last.start + 1);
        }
    }
    // A warning with an instruction.
    for (call, name) in code.match_indices("warn!") {
        let range = extent(&code, call + name.len());
        let within = found.iter().filter(|literal| range.contains(&literal.start));
        let texts = within.filter(|literal| INSTRUCTIONS.is_match(&literal.text));
        ranges.extend(texts.map(|literal| literal.start..literal.start + 1));
    }
    let is_advice = |literal: &&Literal| {
        let letters = literal.text.chars().filter(|c| c.is_alphabetic()).count();
        letters > 8
            && literal.text.contains(' ')
            && ranges.iter().any(|r| r.contains(&literal.start))
    };
    found.iter().filter(is_advice).map(|literal| literal.text.clone()).collect()
}

/// Whether a message has the text; a placeholder stands for anything.
fn is_in(text: &str, message: &str) -> bool {
    static HOLES: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\{[a-zA-Z_0-9:?]*\}").unwrap());
    let unescaped = text.replace("{{", "\u{1}").replace("}}", "\u{2}");
    let mut rest = message;
    HOLES.split(&unescaped).all(|part| {
        let part = part.replace('\u{1}', "{").replace('\u{2}', "}");
        match rest.find(&*part) {
            Some(at) => {
                rest = &rest[at + part.len()..];
                true
            }
            None => false,
        }
    })
}

#[test]
fn messages_have_no_words_of_the_program() {
    let types = types();
    assert!(types.len() > 50, "{types:?}");
    for message in messages() {
        let says = message["says"].as_str().unwrap();
        assert_eq!(word_of_program(says, &types), None, "{says}");
    }
}

#[test]
fn texts_in_the_source_have_no_words_of_the_program() {
    let mut found = Vec::new();
    for (file, source) in sources() {
        for literal in literals(&source).0 {
            // A message has several words; the decoder's names are translated in one file.
            let is_message = literal.text.split(' ').count() > 2;
            if is_message
                && !file.ends_with("json/mismatch.rs")
                && !file.ends_with("json/syntax.rs")
            {
                let word = word_of_program(&literal.text, &BTreeSet::new());
                found.extend(
                    word.map(|word| format!("{}: {word}: {}", file.display(), literal.text)),
                );
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn advice_is_followed_or_listed_in_words_txt() {
    let followed: Vec<Value> =
        messages().into_iter().filter(|message| !message["follow"].is_null()).collect();
    let is_followed =
        |text: &str| followed.iter().any(|message| is_in(text, message["says"].as_str().unwrap()));
    let lines = UNFOLLOWED.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let listed: BTreeSet<&str> =
        lines.map(|line| line.split_once(" | ").unwrap_or_else(|| panic!("{line}")).1).collect();
    let (mut missing, mut gone, mut count) = (BTreeSet::new(), listed.clone(), 0);
    for (file, source) in sources() {
        for text in advice(&source) {
            count += 1;
            let line = text.replace('\n', "\\n");
            if is_followed(&text) {
                continue;
            }
            gone.remove(line.as_str());
            if !listed.contains(line.as_str()) {
                missing.insert(format!("{}: | {line}", file.display()));
            }
        }
    }
    let missing: Vec<_> = missing.into_iter().collect();
    assert!(missing.is_empty(), "neither followed nor listed:\n{}", missing.join("\n"));
    assert!(gone.is_empty(), "listed, but gone from the source or followed:\n{gone:?}");
    assert!(count > 150, "{count}");
}
