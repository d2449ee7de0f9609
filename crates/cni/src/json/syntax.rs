//! Errors of syntax: the character that is wrong, its place, and how to correct it.

use serde_json::error::Category;

use super::place::TextPosition;
use crate::error::{Error, ErrorCode};

/// The error of a document that the parser refused. `text` is what the parser read of `bytes`. Code
/// 6; the message ends with `at line 2 column 7`, the details are the usual cause and the
/// correction.
pub(super) fn parse_error(bytes: &[u8], text: &str, cause: &serde_json::Error) -> Error {
    let at = error_offset(text, cause);
    let TextPosition { line, column } = TextPosition::after_text(&text[..at]);
    let place = format!("at line {line} column {column}");
    if cause.classify() == Category::Eof {
        return malformed_error(format!("unexpected end of JSON input {place}"))
            .with_details("the document is empty or was cut short: write it again");
    }
    let expected = expected_token(cause);
    if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
        return malformed_error(format!("{expected}, found a byte order mark of UTF-16 {place}"))
            .with_details("save the file as UTF-8");
    }
    let Some(found) = text[at..].chars().next() else {
        return malformed_error(format!("{expected} {place}"));
    };
    malformed_error(format!("{expected}, found {} {place}", describe_char(found)))
        .with_details(suggest_correction(&expected, &text[..at], found))
}

fn malformed_error(msg: String) -> Error {
    Error::new(ErrorCode::DECODE, msg)
}

/// The offset of the character that the parser refused, or of the last one that it read.
fn error_offset(text: &str, cause: &serde_json::Error) -> usize {
    let before: usize =
        text.split_inclusive('\n').take(cause.line().saturating_sub(1)).map(str::len).sum();
    // The parser counts bytes; at the end of the text, those that it read.
    let is_end = cause.classify() == Category::Eof;
    let at = (before + cause.column() + usize::from(is_end)).saturating_sub(1).min(text.len());
    (0..=at).rev().find(|at| text.is_char_boundary(*at)).unwrap_or_default()
}

/// The part of the grammar that is expected at this place.
fn expected_token(cause: &serde_json::Error) -> String {
    let text = cause.to_string();
    let reason = text.rsplit_once(" at line ").map_or(&*text, |(reason, _)| reason);
    match reason {
        "key must be a string" => "expected a key in double quotes",
        "expected value" | "trailing comma" => "expected a value",
        "expected `:`" => "expected a colon",
        "expected `,` or `}`" => "expected a comma or }",
        "expected `,` or `]`" => "expected a comma or ]",
        "expected ident" => "expected true, false or null",
        "trailing characters" => "expected the end of the document",
        "invalid number" => "invalid number",
        "number out of range" => "the number is too large",
        "recursion limit exceeded" => "objects and lists are nested too deeply",
        _ if reason.starts_with("control character") => "expected the end of the text",
        _ => "invalid escape sequence",
    }
    .to_owned()
}

/// A character in messages: the character itself and, unless it is ASCII, its code point.
fn describe_char(c: char) -> String {
    let code = u32::from(c);
    match c.escape_debug().count() {
        _ if c.is_ascii_graphic() || c == ' ' => format!("'{c}'"),
        1 => format!("'{c}' (U+{code:04X})"),
        _ => format!("U+{code:04X}"),
    }
}

/// How to correct the text, which is sound up to `before`.
fn suggest_correction(expected: &str, before: &str, found: char) -> &'static str {
    let is_start = before.trim().is_empty();
    match found {
        '\u{feff}' if before.is_empty() => "this is a byte order mark: save the file without it",
        '\u{200b}'..='\u{200f}' | '\u{2060}' | '\u{ad}' | '\u{feff}' => {
            "this character is invisible: delete it"
        }
        '\u{2018}'..='\u{201f}' | '«' | '»' | '´' | '`' | '\u{2032}' | '\u{2033}' | '＂' => {
            "this is a typographic quote: replace it by \""
        }
        '\'' => "texts are in double quotes: replace it by \"",
        '\u{ff01}'..='\u{ff5e}' => "this is a full-width character: replace it by that of ASCII",
        '\u{2010}'..='\u{2015}' | '\u{2212}' => "this is a dash: replace it by -",
        _ if found.is_whitespace() && !found.is_ascii() => {
            "this is a no-break space or the like: replace it by a space"
        }
        '/' | '#' => "JSON has no comments: delete it",
        '\\' if !expected.starts_with("invalid") => {
            "a backslash belongs inside of texts only: delete it"
        }
        '}' | ']' if before.trim_end().ends_with(',') => "delete the comma before it",
        '{' if expected.contains("key") => {
            "a brace is too many, or a placeholder of a template was not replaced"
        }
        '-' | 'A'..='Z' | 'a'..='z' if is_start => {
            "the document starts with {: rewrite YAML and other formats as JSON"
        }
        _ => correction_by_grammar(expected, found),
    }
}

/// The correction by what is expected.
fn correction_by_grammar(expected: &str, found: char) -> &'static str {
    match expected {
        "expected a colon" => "write a colon between the key and its value",
        "expected a key in double quotes" => "write the key as \"key\"",
        "expected the end of the text" => {
            "end the text with a double quote, or write \\n for a line break and \\t for a tab"
        }
        "expected the end of the document" => {
            "delete what follows the document, or the bracket that ends it too early"
        }
        "invalid number" => "write it in decimal digits, without + and leading zeros",
        "invalid escape sequence" => "write \\\\ for a backslash",
        _ if expected.starts_with("expected a comma") => match found {
            '"' | '{' | '[' => "write a comma before it",
            ';' => "replace it by a comma",
            _ => "",
        },
        "expected a value" | "expected true, false or null" => {
            "write texts in double quotes; true, false and null in lower case without"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::super::Json;

    fn told(bytes: impl AsRef<[u8]>) -> String {
        Json::parse(bytes.as_ref()).unwrap_err().to_string()
    }

    #[test]
    fn syntax_errors_name_character_place_and_cause() {
        for (text, found, cause) in [
            ("\u{feff}{}", "value, found U+FEFF at line 1 column 1", "byte order mark"),
            ("{\u{201c}a\u{201d}:1}", "quotes, found '“' (U+201C) at line 1 column 2", "by \""),
            ("{\"ü\":\n\u{a0}1}", "a value, found U+00A0 at line 2 column 1", "by a space"),
            ("{\"a\":1,\u{200b}}", "quotes, found U+200B at line 1 column 8", "delete it"),
            ("{'a':1}", "found ''' at line 1 column 2", "replace it by \""),
            ("{// x\n}", "found '/' at line 1 column 2", "no comments"),
            ("# x\n{}", "expected a value, found '#' at line 1 column 1", "no comments"),
            ("{\"a\":1 /* x */}", "comma or }, found '/' at line 1 column 8", "no comments"),
            ("cniVersion: 1.0.0", "found 'c' at line 1 column 1", "YAML"),
            ("---\na: 1", "at line 1 column", "decimal digits"),
            ("- a", "invalid number, found ' ' at line 1 column 2", "decimal digits"),
            ("{a:1}", "quotes, found 'a' at line 1 column 2", "write the key as \"key\""),
            ("{{x}}", "found '{' at line 1 column 2", "template"),
            ("[1,]", "expected a value, found ']' at line 1 column 4", "the comma before it"),
            ("{\"a\":1,}", "found '}' at line 1 column 8", "delete the comma before it"),
            ("{\"a\" 1}", "expected a colon, found '1' at line 1 column 6", "write a colon"),
            ("{\"a\"=1}", "expected a colon, found '=' at line 1 column 5", "write a colon"),
            ("{\"a\":1 \"b\":2}", "found '\"' at line 1 column 8", "write a comma before it"),
            ("{\"a\":1;}", "found ';' at line 1 column 7", "by a comma"),
            ("{\"a\":True}", "found 'T' at line 1 column 6", "lower case"),
            ("{\"a\":nUll}", "expected true, false or null, found 'U'", "lower case"),
            ("{}}", "end of the document, found '}' at line 1 column 3", "too early"),
            ("{\"a\":01}", "invalid number, found '1' at line 1 column 7", "leading zeros"),
            ("{\"a\":\"x\ny\"}", "end of the text, found U+000A at line 1 column 8", "\\n"),
            ("{\"a\":\"\\x\"}", "invalid escape sequence, found 'x'", "\\\\ for a backslash"),
            ("{\\\"a\\\":1}", "found '\\' at line 1 column 2", "backslash"),
            ("{\"a\":\u{ff11}}", "found '１' (U+FF11) at line 1 column 6", "full-width"),
            ("{\"a\":\u{2013}1}", "found '–' (U+2013) at line 1 column 6", "dash"),
            ("", "unexpected end of JSON input at line 1 column 1", "cut short"),
            ("{\"a\":[1", "unexpected end of JSON input at line 1 column 8", "cut short"),
        ] {
            let told = told(text);
            assert!(told.contains(found) && told.contains(cause), "{text:?}: {told}");
        }
    }

    #[test]
    fn utf_16_is_recognised() {
        let utf16 = |text: &str| -> Vec<u8> {
            text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>()
        };
        let told = told(utf16("\u{feff}{}"));
        assert!(told.contains("mark of UTF-16") && told.ends_with("save the file as UTF-8"));
    }

    #[test]
    fn any_truncated_text_is_explained() {
        let text = "{\"a\u{201c}\":[1,\"x\ny\",\u{a0}tru,{\"b\":\"\\u12\"}]}";
        for from in 0..text.len() {
            for to in from..=text.len() {
                if let Err(error) = Json::parse(&text.as_bytes()[from..to]) {
                    assert!(error.message().contains(" at line "), "{error}");
                }
            }
        }
    }
}
