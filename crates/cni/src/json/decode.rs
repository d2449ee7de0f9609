//! Decodes structs from a [`Json`] tree by the rules of the parent module.

use std::cell::Cell;
use std::iter::Enumerate;
use std::{fmt, slice};

use serde::de::value::MapAccessDeserializer;
use serde::de::{
    self, DeserializeOwned, DeserializeSeed, Deserializer, Expected, IntoDeserializer, MapAccess,
    SeqAccess, Unexpected, Visitor,
};
use serde::forward_to_deserialize_any;

use super::Json;
use super::mismatch::TypeMismatch;
use super::place::{JsonPathStep, JsonValuePath};
use crate::error::{Error, ErrorCode};

/// Why a value could not be decoded, and its place.
#[derive(Debug)]
pub struct JsonDecodeError {
    reason: String,
    /// How to correct the value; empty if the reason says it.
    remedy: String,
    /// The steps to the place, the last one first.
    steps: Vec<JsonPathStep>,
}

impl JsonDecodeError {
    fn with_parent_step(mut self, step: JsonPathStep) -> JsonDecodeError {
        self.steps.push(step);
        self
    }

    /// The steps to the place from the root.
    pub(super) fn path_steps(&self) -> impl Iterator<Item = &JsonPathStep> {
        self.steps.iter().rev()
    }

    pub(super) fn into_error(self) -> Error {
        let error = Error::new(ErrorCode::DECODE, self.reason);
        if self.steps.is_empty() {
            return error;
        }
        let place: JsonValuePath = self.steps.into_iter().rev().collect();
        let remedy = if self.remedy.is_empty() {
            remedy_for_reason(error.message(), &place)
        } else {
            &self.remedy
        };
        let colon = if remedy.is_empty() { "" } else { ": " };
        error.with_details(format!("in \"{place}\"{colon}{remedy}"))
    }
}

impl From<TypeMismatch> for JsonDecodeError {
    fn from(TypeMismatch { message, remedy }: TypeMismatch) -> JsonDecodeError {
        JsonDecodeError { reason: message, remedy, steps: Vec::new() }
    }
}

/// The remedy for a refused value, by the reason and the place.
fn remedy_for_reason(reason: &str, place: &JsonValuePath) -> &'static str {
    if reason.starts_with("expected an object") {
        // The key of a list's item is that of the list.
        match place.key_steps().next_back().unwrap_or_default() {
            "ipam" => "write the type as {\"type\": \"host-local\"}",
            "dns" => "write the servers as {\"nameservers\": [\"192.0.2.53\"]}",
            "vlanTrunk" => "write the VLAN as {\"id\": 100}",
            _ => "",
        }
    } else if reason.contains("invalid CIDR address") {
        "write an address and the length of its prefix, as in 10.1.0.0/16"
    } else if reason.contains("invalid IP address") {
        "write an address, as in 10.1.0.1"
    } else {
        ""
    }
}

impl fmt::Display for JsonDecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for JsonDecodeError {}

impl de::Error for JsonDecodeError {
    fn custom<T: fmt::Display>(reason: T) -> JsonDecodeError {
        JsonDecodeError { reason: reason.to_string(), remedy: String::new(), steps: Vec::new() }
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> JsonDecodeError {
        TypeMismatch::of_type(found, expected).into()
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> JsonDecodeError {
        TypeMismatch::of_type(found, expected).into()
    }

    fn missing_field(field: &'static str) -> JsonDecodeError {
        de::Error::custom(format_args!("the key \"{field}\" is missing"))
    }
}

/// The only key of an object for which [`fields_read`] records the fields of the struct that reads
/// the object. No configuration has this key.
pub(super) const MARK: &str = "\0";

thread_local! {
    /// The fields of the struct that has read the object with the [`MARK`].
    static READ: Cell<Option<&'static [&'static str]>> = const { Cell::new(None) };
}

/// The fields of the struct within `T` that reads the object with the [`MARK`] in `document`, if
/// there is one.
pub(super) fn fields_read<T: DeserializeOwned>(document: &Json) -> Option<&'static [&'static str]> {
    READ.take();
    drop(document.decode::<T>());
    READ.take()
}

impl<'de> Deserializer<'de> for &'de Json {
    type Error = JsonDecodeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, JsonDecodeError> {
        match self {
            Json::Null => visitor.visit_unit(),
            Json::Bool(b) => visitor.visit_bool(*b),
            Json::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(n), _) => visitor.visit_u64(n),
                (None, Some(n)) => visitor.visit_i64(n),
                (None, None) => visitor.visit_f64(number.as_f64().unwrap_or_default()),
            },
            Json::String(text) => visitor.visit_borrowed_str(text),
            Json::Array(items) => visitor.visit_seq(JsonItemAccess(items.iter().enumerate())),
            Json::Object(members) => {
                let members = members.iter().filter(|(_, value)| *value != Json::Null);
                visitor.visit_map(JsonMemberAccess::new(
                    members.map(|(k, v)| (k.as_str(), v)).collect(),
                ))
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, JsonDecodeError> {
        if *self == Json::Null { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, JsonDecodeError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, JsonDecodeError> {
        let members = match self {
            Json::Object(members) => {
                if matches!(members.as_slice(), [(key, _)] if key == MARK) {
                    READ.set(Some(fields));
                }
                members
            }
            // The derived visitor of a struct accepts an array of its fields in order; the
            // reference does not.
            Json::Array(_) => return Err(de::Error::invalid_type(Unexpected::Seq, &visitor)),
            other => return other.deserialize_any(visitor),
        };
        visitor.visit_map(JsonMemberAccess::new(match_fields(members, fields)))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, JsonDecodeError> {
        match self {
            Json::String(text) => visitor.visit_enum(text.as_str().into_deserializer()),
            // A variant with data.
            Json::Object(members) if matches!(members.as_slice(), [(name, _)] if variants.contains(&name.as_str())) =>
            {
                let members = members.iter().map(|(name, value)| (name.as_str(), value));
                let variant = JsonMemberAccess::new(members.collect());
                visitor.visit_enum(MapAccessDeserializer::new(variant))
            }
            other => other.deserialize_any(visitor),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map identifier ignored_any
    }
}

/// The last member of each field, under the field's own spelling.
fn match_fields<'de>(
    members: &'de [(String, Json)],
    fields: &'static [&'static str],
) -> Vec<(&'de str, &'de Json)> {
    let mut found: Vec<(&str, &Json)> = Vec::with_capacity(members.len());
    for (key, value) in members.iter().filter(|(_, value)| *value != Json::Null) {
        let exact = fields.iter().find(|f| *f == key);
        let Some(field) = exact.or_else(|| fields.iter().find(|f| f.eq_ignore_ascii_case(key)))
        else {
            continue;
        };
        match found.iter_mut().find(|(f, _)| f == field) {
            None => found.push((field, value)),
            Some((_, earlier)) => *earlier = value,
        }
    }
    found
}

struct JsonMemberAccess<'de> {
    members: std::vec::IntoIter<(&'de str, &'de Json)>,
    value: Option<(&'de str, &'de Json)>,
}

impl<'de> JsonMemberAccess<'de> {
    fn new(members: Vec<(&'de str, &'de Json)>) -> JsonMemberAccess<'de> {
        JsonMemberAccess { members: members.into_iter(), value: None }
    }
}

impl<'de> MapAccess<'de> for JsonMemberAccess<'de> {
    type Error = JsonDecodeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, JsonDecodeError> {
        self.value = self.members.next();
        self.value.map(|(key, _)| seed.deserialize(key.into_deserializer())).transpose()
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(
        &mut self,
        seed: V,
    ) -> Result<V::Value, JsonDecodeError> {
        let Some((key, value)) = self.value else {
            return Err(de::Error::custom("value asked for before its key"));
        };
        seed.deserialize(value).map_err(|e| e.with_parent_step(JsonPathStep::Key(key.to_owned())))
    }
}

struct JsonItemAccess<'de>(Enumerate<slice::Iter<'de, Json>>);

impl<'de> SeqAccess<'de> for JsonItemAccess<'de> {
    type Error = JsonDecodeError;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, JsonDecodeError> {
        let Some((index, item)) = self.0.next() else { return Ok(None) };
        seed.deserialize(item).map(Some).map_err(|e| e.with_parent_step(JsonPathStep::Index(index)))
    }
}
