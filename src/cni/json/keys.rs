//! The keys that a struct decodes, found through its `Deserialize` implementation, for `cnibox lint` and help texts.

use serde::de::DeserializeOwned;

use super::place::{Place, Step};
use super::{Json, decode};

/// The keys of a value that are decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Keys {
    /// The value is neither an object nor a list, or all its keys are decoded.
    Any,
    /// The fields of a struct.
    Fields(Vec<(&'static str, Keys)>),
    /// A list, with the keys of each item.
    Items(Box<Keys>),
}

impl Keys {
    /// The keys that `T` decodes.
    pub fn of<T: DeserializeOwned>() -> Keys {
        keys_at(decode::fields_read::<T>, &mut Vec::new())
    }

    /// Adds the keys of the member `name`.
    #[must_use]
    pub fn with(mut self, name: &'static str, keys: Keys) -> Keys {
        let Keys::Fields(fields) = &mut self else { return Keys::Fields(vec![(name, keys)]) };
        match fields.iter_mut().find(|(field, _)| *field == name) {
            Some((_, known)) => *known = std::mem::replace(known, Keys::Any).and(keys),
            None => fields.push((name, keys)),
        }
        self
    }

    /// The union of two sets of keys.
    #[must_use]
    pub fn and(self, other: Keys) -> Keys {
        match (self, other) {
            (fields @ Keys::Fields(_), Keys::Fields(more)) => {
                more.into_iter().fold(fields, |all, (name, keys)| all.with(name, keys))
            }
            (Keys::Items(keys), Keys::Items(more)) => Keys::Items(Box::new(keys.and(*more))),
            (Keys::Any, keys) | (keys, _) => keys,
        }
    }

    /// The keys of the member `name`.
    pub fn get(&self, name: &str) -> Option<&Keys> {
        let Keys::Fields(fields) = self else { return None };
        let (_, keys) = fields.iter().find(|(field, _)| field.eq_ignore_ascii_case(name))?;
        Some(keys)
    }

    /// The names of the fields of a struct.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        let fields = if let Keys::Fields(fields) = self { fields.as_slice() } else { &[] };
        fields.iter().map(|(name, _)| *name)
    }

    /// The places in `json` of unknown keys, each with the known names of the same object.
    pub fn unknown_in(&self, json: &Json) -> Vec<(Place, Vec<&'static str>)> {
        let mut unknown = Vec::new();
        self.compare(json, &Place::default(), &mut unknown);
        unknown
    }

    fn compare(&self, json: &Json, at: &Place, unknown: &mut Vec<(Place, Vec<&'static str>)>) {
        match (self, json) {
            (Keys::Fields(_), Json::Object(members)) => {
                for (name, value) in members {
                    let place = at.join(Step::Key(name.clone()));
                    match self.get(name) {
                        Some(keys) => keys.compare(value, &place, unknown),
                        None => unknown.push((place, self.names().collect())),
                    }
                }
            }
            (Keys::Items(keys), Json::Array(items)) => {
                for (i, item) in items.iter().enumerate() {
                    keys.compare(item, &at.join(Step::Index(i)), unknown);
                }
            }
            _ => {}
        }
    }
}

/// The largest depth of nested lists, as in host-local's `ranges`.
const DEEPEST: usize = 2;

/// [`decode::fields_read`] of a type.
type FieldsRead = fn(&Json) -> Option<&'static [&'static str]>;

/// The keys at `path` within a type. `fields_read` decodes the type from a document with only this path and, at its end,
/// an object with the [mark](decode::MARK).
fn keys_at(fields_read: FieldsRead, path: &mut Vec<Step>) -> Keys {
    let fields = fields_read(&document(path));
    let lists = path.iter().rev().take_while(|step| matches!(step, Step::Index(_))).count();
    let mut below = |step| {
        path.push(step);
        let keys = keys_at(fields_read, path);
        path.pop();
        keys
    };
    if let Some(names) = fields {
        let field = |name: &&'static str| (*name, below(Step::Key((*name).to_owned())));
        return Keys::Fields(names.iter().map(field).collect());
    }
    if lists == DEEPEST {
        return Keys::Any;
    }
    match below(Step::Index(0)) {
        Keys::Any => Keys::Any,
        keys => Keys::Items(Box::new(keys)),
    }
}

fn document(path: &[Step]) -> Json {
    let end = Json::Object(vec![(decode::MARK.to_owned(), Json::Bool(true))]);
    path.iter().rev().fold(end, |below, step| match step {
        Step::Key(name) => Json::Object(vec![(name.clone(), below)]),
        Step::Index(_) => Json::Array(vec![below]),
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

    fn unknown(keys: &Keys, text: &str) -> Vec<String> {
        let json = Json::parse(text.as_bytes()).unwrap();
        keys.unknown_in(&json).iter().map(|(place, _)| place.to_string()).collect()
    }

    #[test]
    fn a_struct_tells_its_keys() {
        let inner = Keys::Fields(vec![("subnet", Keys::Any), ("mtu", Keys::Any)]);
        let list = |keys| Keys::Items(Box::new(keys));
        let keys = Keys::of::<Outer>();
        assert_eq!(
            keys,
            Keys::Fields(vec![
                ("isOne", Keys::Any),
                ("pciBusID", Keys::Any),
                ("inner", inner.clone()),
                ("sets", list(list(inner.clone()))),
                ("raw", Keys::Any),
            ])
        );
        let more = Keys::Fields(vec![("new", Keys::Any)]);
        let keys =
            keys.with("raw", inner.clone()).with("raw", more.clone()).with("x", more.clone());
        assert_eq!(keys.get("RAW"), Some(&inner.with("new", Keys::Any)));
        assert_eq!(keys.get("x"), Some(&more));
    }

    #[test]
    fn unknown_keys_are_found_at_every_depth_and_in_any_case() {
        let keys = Keys::of::<Outer>();
        let text = r#"{"ISONE": true, "isTwo": 1, "inner": {"mtu": 1, "mut": 2}, "raw": {"any": 1},
            "sets": [[{"subnet": ""}, {"subnt": ""}], 7]}"#;
        assert_eq!(unknown(&keys, text), ["isTwo", "inner.mut", "sets[0][1].subnt"]);
        assert_eq!(unknown(&keys, "[1]"), [""; 0]);
    }
}
