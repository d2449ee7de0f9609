//! A line of the flight recorder, read back.

use serde_json::Value;

/// A call with what was done in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Recording {
    /// The call first.
    pub(super) spans: Vec<Span>,
}

/// Something that took time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) trace: String,
    pub(super) id: String,
    /// Empty if there is none.
    pub(super) parent: String,
    pub(super) name: String,
    /// Nanoseconds since 1970.
    pub(super) start: u64,
    pub(super) end: u64,
    attributes: Vec<(String, String)>,
    /// Why it failed.
    pub(super) error: Option<String>,
}

impl Recording {
    /// All in the lines of a ring; what is none is passed over.
    pub(super) fn all(lines: &str) -> Vec<Recording> {
        lines.lines().filter_map(Recording::parse).collect()
    }

    fn parse(line: &str) -> Option<Recording> {
        let line: Value = serde_json::from_str(line).ok()?;
        let spans = line["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array()?;
        let spans = spans.iter().map(Span::parse).collect::<Option<Vec<_>>>()?;
        (!spans.is_empty()).then_some(Recording { spans })
    }

    pub(super) fn call(&self) -> &Span {
        &self.spans[0]
    }

    /// An attribute of the call; empty if it has none of this name.
    pub(super) fn get(&self, key: &str) -> &str {
        self.call().get(key)
    }
}

impl Span {
    fn parse(json: &Value) -> Option<Span> {
        let text = |key: &str| json[key].as_str().unwrap_or_default().to_owned();
        let attribute = |json: &Value| {
            let value = &json["value"];
            let value = value["stringValue"].as_str().or(value["intValue"].as_str())?;
            Some((json["key"].as_str()?.to_owned(), value.to_owned()))
        };
        let attributes = json["attributes"].as_array()?.iter().filter_map(attribute).collect();
        Some(Span {
            trace: text("traceId"),
            id: text("spanId"),
            parent: text("parentSpanId"),
            name: text("name"),
            start: text("startTimeUnixNano").parse().ok()?,
            end: text("endTimeUnixNano").parse().ok()?,
            attributes,
            error: json["status"]["message"].as_str().map(str::to_owned),
        })
    }

    /// An attribute; empty if it has none of this name.
    pub(super) fn get(&self, key: &str) -> &str {
        let found = self.attributes.iter().find(|(name, _)| name == key);
        found.map(|(_, value)| value.as_str()).unwrap_or_default()
    }

    /// Nanoseconds.
    pub(super) fn duration(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// What tells it from others of its name.
    pub(super) fn detail(&self) -> String {
        let keys = [
            "cni.plugin",
            "cni.command",
            "process.command",
            "process.executable.path",
            "file.path",
        ];
        let mut words: Vec<String> = match self.name.as_str() {
            "netlink" => vec![message_type(self.get("netlink.type"))],
            _ => keys.map(|key| self.get(key).to_owned()).to_vec(),
        };
        match self.get("nf_tables.changes") {
            "" => {}
            changes => words.push(format!("{changes} changes")),
        }
        words.retain(|word| !word.is_empty());
        words.join(" ")
    }
}

/// The name of a netlink message's type (`linux/rtnetlink.h`, `linux/netfilter/nfnetlink.h`).
fn message_type(number: &str) -> String {
    let objects = ["LINK", "ADDR", "ROUTE", "NEIGH", "RULE", "QDISC", "TCLASS", "TFILTER"];
    let verbs = ["NEW", "DEL", "GET", "SET"];
    let Ok(number) = number.parse::<usize>() else { return String::new() };
    let object = number.checked_sub(16).and_then(|above| objects.get(above / 4));
    match (object, number >> 8) {
        (Some(object), _) => format!("RTM_{}{object}", verbs[number % 4]),
        (None, 0) => match number {
            88..=90 => format!("RTM_{}NSID", verbs[number % 4]),
            _ => format!("type {number}"),
        },
        // The batch's first message is of no subsystem.
        (None, 1) => "conntrack".to_owned(),
        (None, 10) => "nf_tables".to_owned(),
        (None, subsystem) => format!("netfilter subsystem {subsystem}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_their_names() {
        let names =
            ["16", "18", "19", "20", "26", "36", "88", "2561", "16", "99"].map(message_type);
        let expected = [
            "RTM_NEWLINK",
            "RTM_GETLINK",
            "RTM_SETLINK",
            "RTM_NEWADDR",
            "RTM_GETROUTE",
            "RTM_NEWQDISC",
            "RTM_NEWNSID",
            "nf_tables",
            "RTM_NEWLINK",
            "type 99",
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn what_is_no_recording_is_passed_over() {
        assert_eq!(Recording::all("{\"resourceSpans\":[]}\nnot JSON\n[]\n"), []);
    }
}
