//! The parser of the flight recorder's lines.

use serde_json::Value;

/// A call with its steps.
pub(super) struct Recording {
    /// The first span is the call.
    pub(super) spans: Vec<Span>,
}

/// A call, or a step of one.
pub(super) struct Span {
    pub(super) trace: String,
    pub(super) id: String,
    /// The identifier of the parent; empty for the first span of a trace.
    pub(super) parent: String,
    pub(super) name: String,
    /// Nanoseconds since 1970.
    pub(super) start: u64,
    pub(super) end: u64,
    attributes: Vec<(String, String)>,
    /// The cause of its failure.
    pub(super) error: Option<String>,
}

impl Recording {
    /// All recordings of a ring. Lines that are not recordings are skipped.
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

    /// An attribute of the call; empty if absent.
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

    /// An attribute; empty if absent.
    pub(super) fn get(&self, key: &str) -> &str {
        let found = self.attributes.iter().find(|(name, _)| name == key);
        found.map(|(_, value)| value.as_str()).unwrap_or_default()
    }

    /// The duration in nanoseconds.
    pub(super) fn duration(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_are_not_recordings_are_skipped() {
        assert!(Recording::all("{\"resourceSpans\":[]}\nnot JSON\n[]\n").is_empty());
    }
}
