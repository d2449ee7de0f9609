//! Decoding that skips invalid members: a configuration that was edited after ADD must not prevent
//! the deletion of a container.

use serde::de::DeserializeOwned;

use super::Json;
use super::decode::JsonDecodeError;
use super::place::JsonPathStep;
use crate::error::{Error, Result};

impl Json {
    /// As [`Json::decode`]; a member, or an item of a list, that does not decode counts as absent,
    /// and `report` gets its error.
    #[doc(hidden)]
    pub fn decode_valid_members<T: DeserializeOwned>(&self, report: &dyn Fn(&Error)) -> Result<T> {
        let mut error = match T::deserialize(self) {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        let mut rest = self.clone();
        // Each round removes a value, so this ends.
        while rest.remove_undecodable(&error) {
            report(&error.into_error());
            match T::deserialize(&rest) {
                Ok(value) => return Ok(value),
                Err(next) => error = next,
            }
        }
        Err(error.into_error())
    }

    fn remove_undecodable(&mut self, error: &JsonDecodeError) -> bool {
        let mut steps = error.path_steps();
        let Some(mut step) = steps.next() else { return false };
        let mut parent = self;
        for next in steps {
            let below = match (step, parent) {
                (JsonPathStep::Key(key), Json::Object(members)) => last_member_mut(members, key),
                (JsonPathStep::Index(index), Json::Array(items)) => items.get_mut(*index),
                _ => None,
            };
            let Some(below) = below else { return false };
            (step, parent) = (next, below);
        }
        match (step, parent) {
            (JsonPathStep::Key(key), Json::Object(members)) => {
                let before = members.len();
                members.retain(|(name, _)| !name.eq_ignore_ascii_case(key));
                members.len() < before
            }
            (JsonPathStep::Index(index), Json::Array(items)) if *index < items.len() => {
                items.remove(*index);
                true
            }
            _ => false,
        }
    }
}

/// The value that a decoder reads of a repeated key.
fn last_member_mut<'a>(members: &'a mut [(String, Json)], key: &str) -> Option<&'a mut Json> {
    members
        .iter_mut()
        .rev()
        .find(|(name, value)| name.eq_ignore_ascii_case(key) && *value != Json::Null)
        .map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Default, Deserialize)]
    #[serde(default)]
    struct Conf {
        mtu: u32,
        name: String,
        sysctl: BTreeMap<String, String>,
        ports: Vec<Port>,
    }

    #[derive(Debug, Deserialize)]
    struct Port {
        host: u16,
    }

    fn read(text: &str) -> (Conf, Vec<String>) {
        let reported = RefCell::new(Vec::new());
        let conf = Json::parse(text.as_bytes())
            .unwrap()
            .decode_valid_members(&|error| reported.borrow_mut().push(error.details().to_owned()))
            .unwrap();
        (conf, reported.into_inner())
    }

    #[test]
    fn values_that_do_not_decode_are_dropped_and_others_kept() {
        let (conf, reported) = read(
            r#"{"MTU": "1500", "name": "n", "sysctl": {"a.b": 5, "c": "1"},
                "ports": [{"host": 80}, {"host": "x"}, {}, 7, {"host": 81}]}"#,
        );
        assert_eq!((conf.mtu, conf.name.as_str()), (0, "n"));
        assert_eq!(conf.sysctl.into_iter().collect::<Vec<_>>(), [("c".into(), "1".into())]);
        assert_eq!(conf.ports.iter().map(|port| port.host).collect::<Vec<_>>(), [80, 81]);
        // A port without its key is refused twice: for the value, then for the key.
        assert_eq!(reported.len(), 6, "{reported:?}");
        assert!(reported[0].starts_with("in \"mtu\""), "{reported:?}");
    }

    #[test]
    fn a_document_of_another_type_is_an_error() {
        let json = Json::parse(b"[1]").unwrap();
        assert!(json.decode_valid_members::<Conf>(&|_| ()).is_err());
    }
}
