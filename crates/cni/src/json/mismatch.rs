//! Values of the wrong type, in the words of a document's author: text, list, object, whole number,
//! true or false.

use std::fmt;

use serde::de::{Expected, Unexpected};

/// Why a value is refused, and how to correct it.
#[derive(Debug)]
pub(super) struct TypeMismatch {
    pub(super) message: String,
    /// The correction; empty if there is no general one.
    pub(super) remedy: String,
}

impl TypeMismatch {
    /// A value of another type than `expected`.
    pub(super) fn of_type(found: Unexpected<'_>, expected: &dyn Expected) -> TypeMismatch {
        let expected = describe_expected(&expected.to_string());
        TypeMismatch {
            message: mismatch_message(found, &expected),
            remedy: mismatch_remedy(found, &expected),
        }
    }
}

/// The message of a mismatch.
pub(super) fn mismatch_message(found: Unexpected<'_>, expected: &str) -> String {
    format!("expected {expected}, found {}", FoundValue(found))
}

/// What is expected, by the decoder's name of it.
fn describe_expected(name: &str) -> String {
    match name {
        "a boolean" => "true or false".to_owned(),
        "a string" | "string" | "str" | "a character" => "a text".to_owned(),
        "a sequence" => "a list".to_owned(),
        "a map" => "an object".to_owned(),
        "f32" | "f64" => "a number".to_owned(),
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number".to_owned(),
        "u8" => "a whole number from 0 to 255".to_owned(),
        "u16" => "a whole number from 0 to 65535".to_owned(),
        "u32" => "a whole number from 0 to 4294967295".to_owned(),
        "u64" | "usize" => "a whole number that is not negative".to_owned(),
        "unit" => "null".to_owned(),
        _ if name.starts_with("struct ") => "an object".to_owned(),
        _ if name.starts_with("a tuple") => "a list".to_owned(),
        _ if name.starts_with("enum ") || name.starts_with("variant") => "a known word".to_owned(),
        // A decoder of this program has described the type already.
        _ => name.to_owned(),
    }
}

/// A value that was found. Lists and objects are named by their type only.
struct FoundValue<'a>(Unexpected<'a>);

impl fmt::Display for FoundValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Unexpected::Bool(value) => write!(f, "{value}"),
            Unexpected::Unsigned(number) => write!(f, "the number {number}"),
            Unexpected::Signed(number) => write!(f, "the number {number}"),
            Unexpected::Float(number) => write!(f, "the number {number:?}"),
            Unexpected::Str(text) => write!(f, "the text {text:?}"),
            Unexpected::Seq => f.write_str("a list"),
            Unexpected::Map => f.write_str("an object"),
            Unexpected::Unit | Unexpected::Option => f.write_str("null"),
            other => write!(f, "{other}"),
        }
    }
}

/// How to write the value.
fn mismatch_remedy(found: Unexpected<'_>, expected: &str) -> String {
    let number = expected.starts_with("a whole number") || expected == "a number";
    match found {
        Unexpected::Str(text) if number && text.parse::<f64>().is_ok() => {
            format!("write {}, without quotes", text.trim())
        }
        Unexpected::Str(_) if number => {
            "write a number in digits, without quotes and unit".to_owned()
        }
        Unexpected::Str(text) if expected == "true or false" => {
            let is_no = ["false", "no", "off", "0", ""].contains(&&*text.to_lowercase());
            format!("write {}, without quotes", !is_no)
        }
        Unexpected::Unsigned(n @ (0 | 1)) if expected == "true or false" => {
            format!("write {}", n == 1)
        }
        Unexpected::Float(x) if number && x.fract() == 0.0 => format!("write {x}"),
        Unexpected::Unit => "remove the null".to_owned(),
        Unexpected::Seq if expected == "an object" => {
            "write one object, without the brackets around it".to_owned()
        }
        Unexpected::Seq => format!("write {expected}, without brackets"),
        _ if expected == "a list" => "put it into brackets, [...]".to_owned(),
        Unexpected::Unsigned(_) | Unexpected::Signed(_) | Unexpected::Float(_)
            if expected == "a text" =>
        {
            "put it into double quotes".to_owned()
        }
        _ => String::new(),
    }
}
