//! JSON as CNI's users rely on it.
//!
//! Callers send keys in any case (containerd's `HostPort`), twice, or as `null`; the reference
//! accepts all of that, so a strict decoder is no replacement. [`Json`] keeps a document as it
//! was written, and [`Json::decode`] reads a struct from it by these rules:
//!
//! * a key matches a field exactly or in another case; later occurrences win, objects merge;
//! * `null` is an absent key; unknown keys are ignored; nothing is coerced.
//!
//! Output ([`pretty`], [`compact`]) escapes as the reference does, so that bytes can be compared.

pub mod decode;
pub mod keys;
pub mod place;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::{fmt, mem};

use serde::Deserialize;
use serde::de::{self, DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::ser::PrettyFormatter;

use crate::error::{Error, Result};
use crate::sort::sort_by;

/// A JSON document whose objects keep their order and repeated keys.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number without fraction or exponent that fits 64 bits.
    Integer(i128),
    /// Any other number.
    Float(f64),
    /// A string.
    String(String),
    /// An array.
    Array(Vec<Json>),
    /// An object, in the order of the document.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Parses a document; the error is the parser's reason. In strings a byte that is no UTF-8 is
    /// read as U+FFFD, as the reference reads it.
    pub fn parse(bytes: &[u8]) -> Result<Json, String> {
        let parsed = match str::from_utf8(bytes) {
            Ok(text) => serde_json::from_str(text),
            Err(_) => serde_json::from_str(&as_utf8(bytes)),
        };
        parsed.map_err(|e| e.to_string())
    }

    /// Reads a struct by the rules of this module. The error names the place in its details.
    // One copy for all callers: the code of a large struct is 10 kB.
    #[inline(never)]
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T> {
        T::deserialize(self).map_err(decode::DecodeError::into_error)
    }

    /// As [`decode`](Json::decode); an absent object has all its defaults.
    pub fn decode_or_default<T: Default + DeserializeOwned>(json: Option<&Json>) -> Result<T> {
        json.map_or_else(|| Ok(T::default()), Json::decode)
    }

    /// The value of `key` in any case; `None` for an absent key, `Some(Null)` for a `null`.
    /// Of several the last one.
    pub fn get(&self, key: &str) -> Option<&Json> {
        let Json::Object(members) = self else { return None };
        members.iter().rfind(|(k, _)| k.eq_ignore_ascii_case(key)).map(|(_, v)| v)
    }

    /// As [`Json::get`], but `null` counts as absent.
    pub fn get_present(&self, key: &str) -> Option<&Json> {
        self.get(key).filter(|value| **value != Json::Null)
    }

    /// The same document with the keys of every object in alphabetical order.
    #[must_use]
    pub fn sorted(self) -> Json {
        match self {
            Json::Array(items) => Json::Array(items.into_iter().map(Json::sorted).collect()),
            Json::Object(members) => {
                let mut members: Vec<_> =
                    members.into_iter().map(|(k, v)| (k, v.sorted())).collect();
                sort_by(&mut members, |a, b| a.0.cmp(&b.0));
                Json::Object(members)
            }
            other => other,
        }
    }

    /// The same document with integral floats as integers (`1.0`, `1e3`): what a number looks
    /// like after it went through the reference's runtime library.
    #[must_use]
    pub fn normalised(self) -> Json {
        match self {
            Json::Float(x) if x.fract() == 0.0 && x.abs() < 9.2e18 =>
            {
                #[expect(clippy::cast_possible_truncation, reason = "integral and within i64")]
                Json::Integer(x as i128)
            }
            Json::Array(items) => Json::Array(items.into_iter().map(Json::normalised).collect()),
            Json::Object(members) => {
                Json::Object(members.into_iter().map(|(k, v)| (k, v.normalised())).collect())
            }
            other => other,
        }
    }

    /// What kind of value this is, as Go names it in messages about types.
    pub fn go_type(&self) -> &'static str {
        match self {
            Json::Null => "<nil>",
            Json::Bool(_) => "bool",
            Json::Integer(_) | Json::Float(_) => "float64",
            Json::String(_) => "string",
            Json::Array(_) => "[]interface {}",
            Json::Object(_) => "map[string]interface {}",
        }
    }

    /// The text of a string.
    pub fn as_str(&self) -> Option<&str> {
        if let Json::String(text) = self { Some(text) } else { None }
    }

    /// Sets a member, whatever case its key was written in before: a plugin ignores the case, so a
    /// second spelling would compete with this one.
    pub fn set(&mut self, key: &str, value: Json) {
        if let Json::Object(members) = self {
            members.retain(|(k, _)| !k.eq_ignore_ascii_case(key));
            members.push((key.to_owned(), value));
        }
    }

    /// The same document with each key once in every object; the last one stays.
    #[must_use]
    pub fn distinct(self) -> Json {
        match self {
            Json::Array(items) => Json::Array(items.into_iter().map(Json::distinct).collect()),
            Json::Object(members) => {
                let mut kept: Vec<(String, Json)> = Vec::with_capacity(members.len());
                for (key, value) in members {
                    let value = value.distinct();
                    match kept.iter_mut().find(|(k, _)| *k == key) {
                        Some((_, earlier)) => *earlier = value,
                        None => kept.push((key, value)),
                    }
                }
                Json::Object(kept)
            }
            other => other,
        }
    }
}

/// The text with U+FFFD for each byte that does not belong to it.
fn as_utf8(bytes: &[u8]) -> String {
    bytes.utf8_chunks().fold(String::with_capacity(bytes.len()), |text, chunk| {
        text + chunk.valid() + &"\u{fffd}".repeat(chunk.invalid().len())
    })
}

impl From<&str> for Json {
    fn from(text: &str) -> Json {
        Json::String(text.to_owned())
    }
}

/// Four blanks per level, no newline at the end: results and errors on stdout.
pub fn pretty(value: &impl Serialize) -> Result<String> {
    let mut out = Vec::new();
    let formatter = PrettyFormatter::with_indent(b"    ");
    let written = value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter));
    escaped(written.and_then(|()| String::from_utf8(out).map_err(de::Error::custom)))
}

/// One line: requests to plugins, cache files, VERSION.
pub fn compact(value: &impl Serialize) -> Result<String> {
    escaped(serde_json::to_string(value))
}

fn escaped(text: serde_json::Result<String>) -> Result<String> {
    let text = text.map_err(|e| Error::internal(format!("encode JSON: {e}")))?;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        // Outside of strings JSON has none of these, so no parsing is needed.
        match c {
            '<' => out.push_str("\\u003c"),
            '>' => out.push_str("\\u003e"),
            '&' => out.push_str("\\u0026"),
            '\u{2028}' => out.push_str("\\u2028"),
            '\u{2029}' => out.push_str("\\u2029"),
            other => out.push(other),
        }
    }
    Ok(out)
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Json::Null => s.serialize_unit(),
            Json::Bool(b) => s.serialize_bool(*b),
            Json::Integer(n) => match u64::try_from(*n) {
                Ok(n) => s.serialize_u64(n),
                // Only 64-bit integers are ever made.
                Err(_) => s.serialize_i64(i64::try_from(*n).unwrap_or(i64::MIN)),
            },
            Json::Float(x) => s.serialize_f64(*x),
            Json::String(text) => s.serialize_str(text),
            Json::Array(items) => s.collect_seq(items),
            Json::Object(members) => {
                let mut map = s.serialize_map(Some(members.len()))?;
                for (key, value) in members {
                    map.serialize_entry(key, value)?;
                }
                map.end()
            }
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Json, D::Error> {
        d.deserialize_any(Builder)
    }
}

/// Builds a [`Json`] from whatever deserializer there is.
struct Builder;

impl<'de> Visitor<'de> for Builder {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_none<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, b: bool) -> Result<Json, E> {
        Ok(Json::Bool(b))
    }

    fn visit_i64<E>(self, n: i64) -> Result<Json, E> {
        Ok(Json::Integer(n.into()))
    }

    fn visit_u64<E>(self, n: u64) -> Result<Json, E> {
        Ok(Json::Integer(n.into()))
    }

    fn visit_f64<E>(self, x: f64) -> Result<Json, E> {
        Ok(Json::Float(x))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json, E> {
        Ok(Json::String(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<Json, E> {
        Ok(Json::String(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Json::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = map.next_entry()? {
            members.push(member);
        }
        Ok(Json::Object(merge(members)))
    }
}

/// The members with the objects of a repeated key merged into the first one of them.
fn merge(members: Vec<(String, Json)>) -> Vec<(String, Json)> {
    let (mut merged, mut grown) = (Vec::with_capacity(members.len()), BTreeSet::new());
    let mut places = BTreeMap::new();
    for (key, value) in members {
        let Json::Object(later) = value else {
            merged.push((key, value));
            continue;
        };
        let place = *places.entry(key.to_ascii_lowercase()).or_insert(merged.len());
        if let Some((_, Json::Object(earlier))) = merged.get_mut(place) {
            earlier.extend(later);
            grown.insert(place);
        } else {
            merged.push((key, Json::Object(later)));
        }
    }
    for place in grown {
        if let (_, Json::Object(members)) = &mut merged[place] {
            *members = merge(mem::take(members));
        }
    }
    merged
}
