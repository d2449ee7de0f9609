//! JSON with the leniency of the reference's decoder (Go's `encoding/json`), which runtimes depend
//! on.
//!
//! Runtimes send keys in any case (containerd's `HostPort`), repeated keys and `null` values.
//! [`Json`] keeps a document in its order, and [`Json::decode`] decodes a struct by these rules:
//!
//! * a key matches a field exactly or in another case; of repeated keys the last one counts,
//!   repeated objects merge;
//! * `null` is an absent key; unknown keys are ignored; values are not converted to another type.
//!
//! [`encode_pretty`] and [`encode_compact`] escape as the reference does, to the byte.

#[doc(hidden)]
pub mod decode;
#[doc(hidden)]
pub mod keys;
mod mismatch;
#[doc(hidden)]
pub mod place;
#[doc(hidden)]
pub mod sound;
mod syntax;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::{fmt, mem};

use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, DeserializeOwned, Deserializer, MapAccess, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Number;
use serde_json::ser::PrettyFormatter;

use crate::error::{Error, Result};
use crate::sort::sort_by;

/// A JSON document whose objects keep their order and repeated keys.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Json {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number: an integer of 64 bits, or a float.
    Number(Number),
    /// A string.
    String(String),
    /// An array.
    Array(Vec<Json>),
    /// An object, in the order of the document.
    #[serde(serialize_with = "serialize_members")]
    Object(Vec<(String, Json)>),
}

fn serialize_members<S: Serializer>(members: &[(String, Json)], s: S) -> Result<S::Ok, S::Error> {
    s.collect_map(members.iter().map(|(key, value)| (key, value)))
}

impl Json {
    /// Parses a document; the error (code 6) names the wrong character, its line and column. In
    /// strings each byte of invalid UTF-8 is read as U+FFFD, as in the reference.
    ///
    /// ```
    /// # use cnibox_cni::Json;
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let json = Json::parse(br#"{"mtu": 1400}"#)?;
    /// let error = Json::parse(br#"{"mtu": 1400"#).unwrap_err();
    /// assert_eq!(error.code(), cnibox_cni::ErrorCode::DECODE);
    /// # Ok(())
    /// # }
    /// ```
    pub fn parse(bytes: &[u8]) -> Result<Json> {
        let text = str::from_utf8(bytes)
            .map_or_else(|_| replace_invalid_utf8(bytes).into(), Cow::Borrowed);
        serde_json::from_str(&text).map_err(|cause| syntax::parse_error(bytes, &text, &cause))
    }

    /// Encodes a value whose serialization cannot fail: structs, lists and texts.
    ///
    /// ```
    /// # use cnibox_cni::Json;
    /// assert_eq!(Json::encode(&["a", "b"]), Json::Array(vec!["a".into(), "b".into()]));
    /// ```
    pub fn encode(value: &impl Serialize) -> Json {
        let text = serde_json::to_vec(value).unwrap_or_default();
        Json::parse(&text).unwrap_or(Json::Null)
    }

    /// Decodes a value by the rules of this module. The details of the error name the place.
    ///
    /// ```
    /// # use cnibox_cni::Json;
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let sizes: Vec<u32> = Json::parse(b"[1400, 1500]")?.decode()?;
    /// assert_eq!(sizes, [1400, 1500]);
    /// # Ok(())
    /// # }
    /// ```
    // One copy for all callers: a large struct has 10 kB of code.
    #[inline(never)]
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T> {
        T::deserialize(self).map_err(decode::JsonDecodeError::into_error)
    }

    /// As [`decode`](Json::decode), with the defaults of an absent object.
    #[doc(hidden)]
    pub fn decode_or_default<T: Default + DeserializeOwned>(json: Option<&Json>) -> Result<T> {
        json.map_or_else(|| Ok(T::default()), Json::decode)
    }

    /// The last value of `key`, which matches in any case; `None` for an absent key, `Some(Null)`
    /// for a `null`.
    ///
    /// ```
    /// # use cnibox_cni::Json;
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let json = Json::parse(br#"{"Name": "a", "name": "b", "dns": null}"#)?;
    /// assert_eq!(json.get_member("NAME"), Some(&"b".into()));
    /// assert_eq!(json.get_member("dns"), Some(&Json::Null));
    /// # Ok(())
    /// # }
    /// ```
    pub fn get_member(&self, key: &str) -> Option<&Json> {
        self.find_last_member(&|k, _| k.eq_ignore_ascii_case(key))
    }

    /// As [`Json::get_member`], without `null` values.
    ///
    /// ```
    /// # use cnibox_cni::Json;
    /// # fn main() -> cnibox_cni::Result<()> {
    /// assert_eq!(Json::parse(br#"{"dns": null}"#)?.get_present_member("dns"), None);
    /// # Ok(())
    /// # }
    /// ```
    pub fn get_present_member(&self, key: &str) -> Option<&Json> {
        self.find_last_member(&|k, value| k.eq_ignore_ascii_case(key) && *value != Json::Null)
    }

    fn find_last_member(&self, is_wanted: &dyn Fn(&str, &Json) -> bool) -> Option<&Json> {
        let Json::Object(members) = self else { return None };
        members.iter().rfind(|(key, value)| is_wanted(key, value)).map(|(_, value)| value)
    }

    /// The mutable value of exactly `key`.
    #[doc(hidden)]
    pub fn get_member_mut(&mut self, key: &str) -> Option<&mut Json> {
        let Json::Object(members) = self else { return None };
        members.iter_mut().find(|(k, _)| k == key).map(|(_, value)| value)
    }

    /// Applies `change` to every value of the document, to a parent before its children.
    #[doc(hidden)]
    pub fn modify_values(&mut self, change: &dyn Fn(&mut Json)) {
        change(self);
        match self {
            Json::Array(items) => items.iter_mut().for_each(|item| item.modify_values(change)),
            Json::Object(members) => members.iter_mut().for_each(|(_, v)| v.modify_values(change)),
            _ => {}
        }
    }

    /// The same document with the keys of every object in alphabetical order.
    ///
    /// ```
    /// # use cnibox_cni::json::{Json, encode_compact};
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let json = Json::parse(br#"{"b": {"d": 1, "c": 2}, "a": 3}"#)?;
    /// assert_eq!(encode_compact(&json.with_sorted_keys())?, r#"{"a":3,"b":{"c":2,"d":1}}"#);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn with_sorted_keys(mut self) -> Json {
        self.modify_values(&|json| {
            if let Json::Object(members) = json {
                sort_by(members, |a, b| a.0.cmp(&b.0));
            }
        });
        self
    }

    /// The same document with integral floats as integers (`1.0`, `1e3`), as the reference's
    /// runtime library rewrites numbers.
    ///
    /// ```
    /// # use cnibox_cni::json::{Json, encode_compact};
    /// # fn main() -> cnibox_cni::Result<()> {
    /// assert_eq!(encode_compact(&Json::parse(b"[1.0, 1e3, 0.5]")?.with_normalised_numbers())?, "[1,1000,0.5]");
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn with_normalised_numbers(mut self) -> Json {
        self.modify_values(&|json| {
            if let Json::Number(number) = json
                && number.is_f64()
                && let Some(x) = number.as_f64()
                && x.fract() == 0.0
                && x.abs() < 9.2e18
            {
                #[expect(clippy::cast_possible_truncation, reason = "integral and within i64")]
                let integer = x as i64;
                *number = integer.into();
            }
        });
        self
    }

    /// The same document with each key once in every object, with the last value.
    ///
    /// ```
    /// # use cnibox_cni::json::{Json, encode_compact};
    /// # fn main() -> cnibox_cni::Result<()> {
    /// assert_eq!(encode_compact(&Json::parse(br#"{"a": 1, "a": 2}"#)?.without_repeated_keys())?, r#"{"a":2}"#);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn without_repeated_keys(mut self) -> Json {
        self.modify_values(&|json| {
            let Json::Object(members) = json else { return };
            for (key, value) in mem::take(members) {
                match members.iter_mut().find(|(k, _)| *k == key) {
                    Some((_, earlier)) => *earlier = value,
                    None => members.push((key, value)),
                }
            }
        });
        self
    }

    /// The message for a value of the wrong type: `expected an object, found a list`.
    #[doc(hidden)]
    pub fn wrong_type_message(&self, what: &str) -> String {
        let found = match self {
            Json::Null => Unexpected::Unit,
            Json::Bool(value) => Unexpected::Bool(*value),
            Json::Number(_) => Unexpected::Other("a number"),
            Json::String(text) => Unexpected::Str(text),
            Json::Array(_) => Unexpected::Seq,
            Json::Object(_) => Unexpected::Map,
        };
        mismatch::mismatch_message(found, what)
    }

    /// The type of this value as Go names it, in messages that are the reference's.
    #[doc(hidden)]
    pub fn go_type(&self) -> &'static str {
        match self {
            Json::Null => "<nil>",
            Json::Bool(_) => "bool",
            Json::Number(_) => "float64",
            Json::String(_) => "string",
            Json::Array(_) => "[]interface {}",
            Json::Object(_) => "map[string]interface {}",
        }
    }

    /// The text of a string.
    ///
    /// ```
    /// # use cnibox_cni::Json;
    /// assert_eq!(Json::from("eth0").as_str(), Some("eth0"));
    /// assert_eq!(Json::Null.as_str(), None);
    /// ```
    pub fn as_str(&self) -> Option<&str> {
        if let Json::String(text) = self { Some(text) } else { None }
    }

    /// Sets a member, replacing every other spelling of its key: plugins ignore the case.
    ///
    /// ```
    /// # use cnibox_cni::Json;
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let mut json = Json::parse(br#"{"cniversion": "1.0.0"}"#)?;
    /// json.set_member("cniVersion", "1.1.0".into());
    /// assert_eq!(json, Json::parse(br#"{"cniVersion": "1.1.0"}"#)?);
    /// # Ok(())
    /// # }
    /// ```
    pub fn set_member(&mut self, key: &str, value: Json) {
        self.remove_member(key);
        if let Json::Object(members) = self {
            members.push((key.to_owned(), value));
        }
    }

    /// Removes a member, whatever the case of its key.
    ///
    /// ```
    /// # use cnibox_cni::Json;
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let mut json = Json::parse(br#"{"DNS": {}}"#)?;
    /// json.remove_member("dns");
    /// assert_eq!(json, Json::Object(Vec::new()));
    /// # Ok(())
    /// # }
    /// ```
    pub fn remove_member(&mut self, key: &str) {
        if let Json::Object(members) = self {
            members.retain(|(k, _)| !k.eq_ignore_ascii_case(key));
        }
    }
}

/// The text with U+FFFD for each byte of invalid UTF-8.
fn replace_invalid_utf8(bytes: &[u8]) -> String {
    bytes.utf8_chunks().fold(String::with_capacity(bytes.len()), |text, chunk| {
        text + chunk.valid() + &"\u{fffd}".repeat(chunk.invalid().len())
    })
}

impl From<&str> for Json {
    fn from(text: &str) -> Json {
        Json::String(text.to_owned())
    }
}

/// Text with an indentation of four spaces and no newline at the end, for results and errors on
/// stdout.
///
/// ```
/// # use cnibox_cni::json::encode_pretty;
/// assert_eq!(encode_pretty(&["a"]).unwrap(), "[\n    \"a\"\n]");
/// ```
pub fn encode_pretty(value: &impl Serialize) -> Result<String> {
    let mut out = Vec::new();
    let formatter = PrettyFormatter::with_indent(b"    ");
    let written = value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter));
    escape_as_go(written.and_then(|()| String::from_utf8(out).map_err(de::Error::custom)))
}

/// Text on one line, for requests to plugins and cache files.
///
/// ```
/// # use cnibox_cni::json::encode_compact;
/// assert_eq!(encode_compact(&["a", "b"]).unwrap(), r#"["a","b"]"#);
/// ```
pub fn encode_compact(value: &impl Serialize) -> Result<String> {
    escape_as_go(serde_json::to_string(value))
}

fn escape_as_go(text: serde_json::Result<String>) -> Result<String> {
    let text = text.map_err(|e| Error::internal(format!("encode JSON: {e}")))?;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        // These characters occur only within strings.
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

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Json, D::Error> {
        d.deserialize_any(JsonVisitor)
    }
}

/// Builds a [`Json`].
struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, b: bool) -> Result<Json, E> {
        Ok(Json::Bool(b))
    }

    fn visit_i64<E>(self, n: i64) -> Result<Json, E> {
        Ok(Json::Number(n.into()))
    }

    fn visit_u64<E>(self, n: u64) -> Result<Json, E> {
        Ok(Json::Number(n.into()))
    }

    fn visit_f64<E>(self, x: f64) -> Result<Json, E> {
        Ok(Number::from_f64(x).map_or(Json::Null, Json::Number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json, E> {
        Ok(Json::String(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Json, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(items)).map(Json::Array)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = map.next_entry()? {
            members.push(member);
        }
        Ok(Json::Object(merge_repeated_objects(members)))
    }
}

/// Merges the objects of a repeated key into the first of them.
fn merge_repeated_objects(members: Vec<(String, Json)>) -> Vec<(String, Json)> {
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
            *members = merge_repeated_objects(mem::take(members));
        }
    }
    merged
}
