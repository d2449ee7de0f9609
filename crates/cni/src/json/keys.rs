//! The keys that a struct decodes, found through its `Deserialize` implementation, for `cnibox
//! lint` and help texts.

use serde::de::DeserializeOwned;

use super::place::{JsonPathStep, JsonValuePath};
use super::{Json, decode};

/// The keys of a value that are decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodedKeys {
    /// The value is neither an object nor a list, or all its keys are decoded.
    Any,
    /// The fields of a struct.
    Fields(Vec<(&'static str, DecodedKeys)>),
    /// A list, with the keys of each item.
    Items(Box<DecodedKeys>),
}

impl DecodedKeys {
    /// The keys that `T` decodes.
    pub fn of_type<T: DeserializeOwned>() -> DecodedKeys {
        keys_at(decode::fields_read::<T>, &mut Vec::new())
    }

    /// Adds the keys of the member `name`.
    #[must_use]
    pub fn with_member(mut self, name: &'static str, keys: DecodedKeys) -> DecodedKeys {
        let DecodedKeys::Fields(fields) = &mut self else {
            return DecodedKeys::Fields(vec![(name, keys)]);
        };
        match fields.iter_mut().find(|(field, _)| *field == name) {
            Some((_, known)) => {
                *known = std::mem::replace(known, DecodedKeys::Any).union_with(keys);
            }
            None => fields.push((name, keys)),
        }
        self
    }

    /// The union of two sets of keys.
    #[must_use]
    pub fn union_with(self, other: DecodedKeys) -> DecodedKeys {
        match (self, other) {
            (fields @ DecodedKeys::Fields(_), DecodedKeys::Fields(more)) => {
                more.into_iter().fold(fields, |all, (name, keys)| all.with_member(name, keys))
            }
            (DecodedKeys::Items(keys), DecodedKeys::Items(more)) => {
                DecodedKeys::Items(Box::new(keys.union_with(*more)))
            }
            (DecodedKeys::Any, keys) | (keys, _) => keys,
        }
    }

    /// The keys of the member `name`.
    pub fn member_keys(&self, name: &str) -> Option<&DecodedKeys> {
        let DecodedKeys::Fields(fields) = self else { return None };
        let (_, keys) = fields.iter().find(|(field, _)| field.eq_ignore_ascii_case(name))?;
        Some(keys)
    }

    /// The names of the fields of a struct.
    pub fn field_names(&self) -> impl Iterator<Item = &'static str> {
        let fields = if let DecodedKeys::Fields(fields) = self { fields.as_slice() } else { &[] };
        fields.iter().map(|(name, _)| *name)
    }

    /// The places in `json` of unknown keys, each with the known names of the same object.
    pub fn find_unknown_keys(&self, json: &Json) -> Vec<(JsonValuePath, Vec<&'static str>)> {
        let mut unknown = Vec::new();
        self.collect_unknown_keys(json, &JsonValuePath::default(), &mut unknown);
        unknown
    }

    fn collect_unknown_keys(
        &self,
        json: &Json,
        at: &JsonValuePath,
        unknown: &mut Vec<(JsonValuePath, Vec<&'static str>)>,
    ) {
        match (self, json) {
            (DecodedKeys::Fields(_), Json::Object(members)) => {
                for (name, value) in members {
                    let place = at.join_step(JsonPathStep::Key(name.clone()));
                    match self.member_keys(name) {
                        Some(keys) => keys.collect_unknown_keys(value, &place, unknown),
                        None => unknown.push((place, self.field_names().collect())),
                    }
                }
            }
            (DecodedKeys::Items(keys), Json::Array(items)) => {
                for (i, item) in items.iter().enumerate() {
                    keys.collect_unknown_keys(item, &at.join_step(JsonPathStep::Index(i)), unknown);
                }
            }
            _ => {}
        }
    }
}

/// Whether a key is a comment, which no program is expected to read.
pub fn is_comment(key: &str) -> bool {
    const WORDS: [&str; 5] = ["comment", "comments", "description", "documentation", "$schema"];
    let marked = ["_", "//", "#"].iter().any(|mark| key.starts_with(mark));
    marked || WORDS.iter().any(|word| word.eq_ignore_ascii_case(key))
}

/// The largest depth of nested lists, as in host-local's `ranges`.
const DEEPEST: usize = 2;

/// [`decode::fields_read`] of a type.
type FieldReaderFn = fn(&Json) -> Option<&'static [&'static str]>;

/// The keys at `path` within a type. `fields_read` decodes the type from a document with only this
/// path and, at its end, an object with the [mark](decode::MARK).
fn keys_at(fields_read: FieldReaderFn, path: &mut Vec<JsonPathStep>) -> DecodedKeys {
    let fields = fields_read(&probe_document(path));
    let lists = path.iter().rev().take_while(|step| matches!(step, JsonPathStep::Index(_))).count();
    let mut below = |step| {
        path.push(step);
        let keys = keys_at(fields_read, path);
        path.pop();
        keys
    };
    if let Some(names) = fields {
        return DecodedKeys::Fields(
            names
                .iter()
                .map(|name| (*name, below(JsonPathStep::Key((*name).to_owned()))))
                .collect(),
        );
    }
    if lists == DEEPEST {
        return DecodedKeys::Any;
    }
    match below(JsonPathStep::Index(0)) {
        DecodedKeys::Any => DecodedKeys::Any,
        keys => DecodedKeys::Items(Box::new(keys)),
    }
}

fn probe_document(path: &[JsonPathStep]) -> Json {
    let end = Json::Object(vec![(decode::MARK.to_owned(), Json::Bool(true))]);
    path.iter().rev().fold(end, |below, step| match step {
        JsonPathStep::Key(name) => Json::Object(vec![(name.clone(), below)]),
        JsonPathStep::Index(_) => Json::Array(vec![below]),
    })
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Default, Deserialize)]
    #[serde(rename_all = "camelCase", default)]
    struct Outer {
        is_one: bool,
        #[serde(rename = "pciBusID")]
        id: Option<String>,
        inner: Option<Inner>,
        sets: Vec<Vec<Inner>>,
        raw: Option<Json>,
    }

    #[derive(Deserialize)]
    #[expect(dead_code, reason = "only its keys are looked at")]
    struct Inner {
        subnet: ipnet::IpNet,
        mtu: u32,
    }

    fn unknown(keys: &DecodedKeys, text: &str) -> Vec<String> {
        let json = Json::parse(text.as_bytes()).unwrap();
        keys.find_unknown_keys(&json).iter().map(|(place, _)| place.to_string()).collect()
    }

    #[test]
    fn keys_that_are_comments_are_recognised() {
        for key in ["_note", "//", "// why", "#", "Comment", "Documentation", "$schema"] {
            assert!(is_comment(key), "{key}");
        }
        assert!(!is_comment("commentary") && !is_comment("mtu"));
    }

    #[test]
    fn keys_of_a_struct_are_listed() {
        let inner =
            DecodedKeys::Fields(vec![("subnet", DecodedKeys::Any), ("mtu", DecodedKeys::Any)]);
        let list = |keys| DecodedKeys::Items(Box::new(keys));
        let keys = DecodedKeys::of_type::<Outer>();
        assert_eq!(
            keys,
            DecodedKeys::Fields(vec![
                ("isOne", DecodedKeys::Any),
                ("pciBusID", DecodedKeys::Any),
                ("inner", inner.clone()),
                ("sets", list(list(inner.clone()))),
                ("raw", DecodedKeys::Any),
            ])
        );
        let more = DecodedKeys::Fields(vec![("new", DecodedKeys::Any)]);
        let keys = keys
            .with_member("raw", inner.clone())
            .with_member("raw", more.clone())
            .with_member("x", more.clone());
        assert_eq!(keys.member_keys("RAW"), Some(&inner.with_member("new", DecodedKeys::Any)));
        assert_eq!(keys.member_keys("x"), Some(&more));
    }

    #[test]
    fn unknown_keys_are_found_at_every_depth_and_in_any_case() {
        let keys = DecodedKeys::of_type::<Outer>();
        let text = r#"{"ISONE": true, "isTwo": 1, "inner": {"mtu": 1, "mut": 2}, "raw": {"any": 1},
            "sets": [[{"subnet": ""}, {"subnt": ""}], 7]}"#;
        assert_eq!(unknown(&keys, text), ["isTwo", "inner.mut", "sets[0][1].subnt"]);
        assert_eq!(unknown(&keys, "[1]"), [""; 0]);
    }
}
