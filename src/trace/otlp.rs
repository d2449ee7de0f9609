//! The encoder of a recording as one line of OTLP JSON: an `ExportTraceServiceRequest` (opentelemetry-proto,
//! `trace/v1`), with 64-bit numbers as decimal strings and identifiers as hexadecimal strings.
//!
//! The line is concatenated by hand: serde would double the time of a recording.

use super::{Recorded, Recording, Value};

/// The line, with its newline.
pub(super) fn line(recording: &Recording) -> String {
    let mut out = Line(String::with_capacity(512 * (1 + recording.spans.len())));
    let (name, version) = ("cnibox", env!("CARGO_PKG_VERSION"));
    out.raw(r#"{"resourceSpans":[{"resource":{"attributes":["#);
    let mut resource = vec![
        ("service.name", Value::Text(name.to_owned())),
        ("service.version", Value::Text(version.to_owned())),
        ("process.pid", Value::Number(std::process::id().into())),
    ];
    if recording.dropped > 0 {
        resource.push(("cnibox.dropped_spans", Value::Number(recording.dropped)));
    }
    out.list(&resource, Line::attribute);
    out.raw(r#"]},"scopeSpans":[{"scope":{"name":"#).text(name);
    out.raw(r#","version":"#).text(version).raw(r#"},"spans":["#);
    let spans: Vec<(usize, &Recorded)> = recording.spans.iter().enumerate().collect();
    out.list(&spans, |out, (i, span)| out.span(recording, *i, span));
    out.raw("]}]}]}\n");
    out.0
}

/// The beginning of the line.
struct Line(String);

impl Line {
    fn raw(&mut self, json: &str) -> &mut Line {
        self.0.push_str(json);
        self
    }

    fn text(&mut self, text: &str) -> &mut Line {
        // Serializing a string cannot fail.
        self.raw(&serde_json::to_string(text).unwrap_or_default())
    }

    fn number(&mut self, number: u64) -> &mut Line {
        self.raw("\"").raw(&number.to_string()).raw("\"")
    }

    fn id(&mut self, number: u64) -> &mut Line {
        self.raw(&format!("{number:016x}"))
    }

    fn list<T>(&mut self, items: &[T], write: impl Fn(&mut Line, &T)) {
        for (i, item) in items.iter().enumerate() {
            self.raw(if i == 0 { "" } else { "," });
            write(self, item);
        }
    }

    fn attribute(&mut self, (key, value): &(&'static str, Value)) {
        self.raw(r#"{"key":""#).raw(key).raw(r#"","value":{"#);
        match value {
            Value::Text(text) => self.raw(r#""stringValue":"#).text(text),
            Value::Number(number) => self.raw(r#""intValue":"#).number(*number),
        };
        self.raw("}}");
    }

    fn span(&mut self, recording: &Recording, i: usize, span: &Recorded) {
        self.raw(r#"{"traceId":""#).raw(&format!("{:032x}", recording.trace));
        self.raw(r#"","spanId":""#).id(recording.id(i));
        if let Some(parent) = span.parent.map(|parent| recording.id(parent)).or(recording.parent) {
            self.raw(r#"","parentSpanId":""#).id(parent);
        }
        self.raw(r#"","name":"#).text(&span.name);
        // SPAN_KIND_INTERNAL
        self.raw(r#","kind":1,"startTimeUnixNano":"#).number(recording.nanos(span.start));
        self.raw(r#","endTimeUnixNano":"#).number(recording.nanos(span.end));
        self.raw(r#","attributes":["#);
        self.list(&span.attributes, Line::attribute);
        self.raw("]");
        if let Some(message) = &span.error {
            // STATUS_CODE_ERROR
            self.raw(r#","status":{"code":2,"message":"#).text(message).raw("}");
        }
        self.raw("}");
    }
}
