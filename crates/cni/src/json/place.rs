//! Places in a document, and their positions in its text.

use std::collections::HashMap;
use std::fmt;

use serde_json::value::RawValue;

/// A step from a value to a value within it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JsonPathStep {
    /// A member of an object.
    Key(String),
    /// An item of an array, counted from 0.
    Index(usize),
}

/// The steps from a document's root to a value in it. Its text is `plugins[0].ipam.type`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JsonValuePath(Vec<JsonPathStep>);

/// A position in a text, counted from 1; the column counts characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TextPosition {
    /// The line.
    pub line: usize,
    /// The character in the line.
    pub column: usize,
}

impl JsonValuePath {
    /// The place of a member of the root.
    pub fn root_member(name: &str) -> JsonValuePath {
        JsonValuePath::default().join_step(JsonPathStep::Key(name.to_owned()))
    }

    /// The place at `step` in the value of this place.
    #[must_use]
    pub fn join_step(&self, step: JsonPathStep) -> JsonValuePath {
        JsonValuePath(self.0.iter().cloned().chain([step]).collect())
    }

    /// The place `below` in the value of this place.
    #[must_use]
    pub fn join_path(&self, below: &JsonValuePath) -> JsonValuePath {
        JsonValuePath(self.0.iter().chain(&below.0).cloned().collect())
    }

    /// The place of the text `a.b[0].c`, as [`Json::decode`](super::Json::decode) names it in its
    /// errors.
    pub fn parse(text: &str) -> JsonValuePath {
        let steps = text.split(['.', '[']).filter(|step| !step.is_empty());
        JsonValuePath(
            steps
                .map(|step| match step.strip_suffix(']').and_then(|index| index.parse().ok()) {
                    Some(index) => JsonPathStep::Index(index),
                    None => JsonPathStep::Key(step.to_owned()),
                })
                .collect(),
        )
    }

    /// The last step, if it is a key.
    pub fn last_key(&self) -> Option<&str> {
        if let Some(JsonPathStep::Key(name)) = self.0.last() { Some(name) } else { None }
    }

    /// The keys among the steps.
    pub fn key_steps(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.0.iter().filter_map(|step| {
            if let JsonPathStep::Key(name) = step { Some(&**name) } else { None }
        })
    }

    /// The first step, if it is a key.
    pub fn first_key(&self) -> Option<&str> {
        if let Some(JsonPathStep::Key(name)) = self.0.first() { Some(name) } else { None }
    }

    /// The position of this place in `text`, a JSON document: of the key of a member, or of the
    /// item of an array.
    pub fn position_in(&self, text: &str) -> Option<TextPosition> {
        let mut value: &RawValue = serde_json::from_str(text).ok()?;
        for step in &self.0 {
            value = match step {
                JsonPathStep::Key(name) => {
                    let members: HashMap<String, &RawValue> =
                        serde_json::from_str(value.get()).ok()?;
                    let found =
                        members.into_iter().filter(|(key, _)| key.eq_ignore_ascii_case(name));
                    // The last one in the text counts.
                    found.map(|(_, value)| value).max_by_key(|value| value.get().as_ptr())?
                }
                JsonPathStep::Index(index) => {
                    let items: Vec<&RawValue> = serde_json::from_str(value.get()).ok()?;
                    *items.get(*index)?
                }
            };
        }
        // The value is a part of the text.
        let start = value.get().as_ptr().addr().checked_sub(text.as_ptr().addr())?;
        let before = text.get(..start)?;
        let key = self.last_key().and_then(|name| {
            let quoted = format!("\"{}\"", name.to_ascii_lowercase());
            before.to_ascii_lowercase().rfind(&quoted)
        });
        Some(TextPosition::after_text(before.get(..key.unwrap_or(start))?))
    }
}

impl TextPosition {
    /// The position after `before`.
    pub(super) fn after_text(before: &str) -> TextPosition {
        let line = before.rsplit('\n').next().unwrap_or_default();
        TextPosition { line: before.matches('\n').count() + 1, column: line.chars().count() + 1 }
    }
}

impl fmt::Display for JsonValuePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, step) in self.0.iter().enumerate() {
            match step {
                JsonPathStep::Key(name) if i == 0 => f.write_str(name)?,
                JsonPathStep::Key(name) => write!(f, ".{name}")?,
                JsonPathStep::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

impl FromIterator<JsonPathStep> for JsonValuePath {
    fn from_iter<I: IntoIterator<Item = JsonPathStep>>(steps: I) -> JsonValuePath {
        JsonValuePath(steps.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "{\n  \"name\": \"ü\", \"plugins\": [\n    {\"type\": \"a\"},\n    \
                        {\"type\": \"b\", \"MTU\": 7, \"ipam\": {\"type\": \"c\"}}\n  ]\n}\n";

    fn position(place: &str) -> Option<(usize, usize)> {
        JsonValuePath::parse(place).position_in(TEXT).map(|at| (at.line, at.column))
    }

    #[test]
    fn the_path_of_a_value_gives_its_line_and_column() {
        assert_eq!(position(""), Some((1, 1)));
        assert_eq!(position("name"), Some((2, 3)));
        assert_eq!(position("plugins"), Some((2, 16)));
        assert_eq!(position("plugins[1]"), Some((4, 5)));
        assert_eq!(position("plugins[1].type"), Some((4, 6)));
        assert_eq!(position("plugins[1].mtu"), Some((4, 19)));
        assert_eq!(position("plugins[1].ipam.type"), Some((4, 38)));
        assert_eq!(position("plugins[2]"), None);
        assert_eq!(position("name.x"), None);
    }

    #[test]
    fn paths_of_values_are_parsed_and_printed() {
        for text in ["", "a", "ipam.ranges[0][1].subnet", "plugins[1]"] {
            assert_eq!(JsonValuePath::parse(text).to_string(), text);
        }
        assert_eq!(
            JsonValuePath::root_member("a").join_path(&JsonValuePath::parse("b[0]")).to_string(),
            "a.b[0]"
        );
    }
}
