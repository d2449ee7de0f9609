//! A recording as one line of OTLP JSON: an `ExportTraceServiceRequest` (opentelemetry-proto, `trace/v1`), with
//! numbers of 64 bits as texts and ids in hexadecimal digits, as OTLP's JSON encoding asks.

use serde::Serialize;

use super::{Recorded, Recording, Value};

/// `SPAN_KIND_INTERNAL`.
const INTERNAL: u8 = 1;
/// `STATUS_CODE_ERROR`.
const ERROR: u8 = 2;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Request<'a> {
    resource_spans: [ResourceSpans<'a>; 1],
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ResourceSpans<'a> {
    resource: Resource<'a>,
    scope_spans: [ScopeSpans<'a>; 1],
}

#[derive(Serialize)]
struct Resource<'a> {
    attributes: Vec<Attribute<'a>>,
}

#[derive(Serialize)]
struct ScopeSpans<'a> {
    scope: Scope,
    spans: Vec<Span<'a>>,
}

#[derive(Serialize)]
struct Scope {
    name: &'static str,
    version: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Span<'a> {
    trace_id: &'a str,
    span_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent_span_id: Option<String>,
    name: &'a str,
    kind: u8,
    start_time_unix_nano: String,
    end_time_unix_nano: String,
    attributes: Vec<Attribute<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Status<'a>>,
}

#[derive(Serialize)]
struct Status<'a> {
    code: u8,
    message: &'a str,
}

#[derive(Serialize)]
struct Attribute<'a> {
    key: &'a str,
    value: AnyValue<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
enum AnyValue<'a> {
    StringValue(&'a str),
    IntValue(String),
}

/// The line, with its newline.
pub(super) fn line(recording: &Recording) -> Option<String> {
    let trace = format!("{:032x}", recording.trace);
    let spans = recording.spans.iter().enumerate();
    let spans = spans.map(|(i, span)| as_json(recording, &trace, i, span)).collect();
    let (name, version) = ("cnibox", env!("CARGO_PKG_VERSION"));
    let pid = Value::Number(std::process::id().into());
    let dropped = Value::Number(recording.dropped);
    let mut attributes = vec![
        Attribute { key: "service.name", value: AnyValue::StringValue(name) },
        Attribute { key: "service.version", value: AnyValue::StringValue(version) },
        attribute("process.pid", &pid),
    ];
    if recording.dropped > 0 {
        attributes.push(attribute("cnibox.dropped_spans", &dropped));
    }
    let scope_spans = [ScopeSpans { scope: Scope { name, version }, spans }];
    let resource = Resource { attributes };
    let request = Request { resource_spans: [ResourceSpans { resource, scope_spans }] };
    serde_json::to_string(&request).ok().map(|line| line + "\n")
}

fn as_json<'a>(recording: &Recording, trace: &'a str, i: usize, span: &'a Recorded) -> Span<'a> {
    let parent = span.parent.map(|parent| recording.id(parent)).or(recording.parent);
    let id = |number: u64| format!("{number:016x}");
    Span {
        trace_id: trace,
        span_id: id(recording.id(i)),
        parent_span_id: parent.map(id),
        name: &span.name,
        kind: INTERNAL,
        start_time_unix_nano: recording.nanos(span.start).to_string(),
        end_time_unix_nano: recording.nanos(span.end).to_string(),
        attributes: span.attributes.iter().map(|(key, value)| attribute(key, value)).collect(),
        status: span.error.as_ref().map(|message| Status { code: ERROR, message }),
    }
}

fn attribute<'a>(key: &'a str, value: &'a Value) -> Attribute<'a> {
    let value = match value {
        Value::Text(text) => AnyValue::StringValue(text),
        Value::Number(number) => AnyValue::IntValue(number.to_string()),
    };
    Attribute { key, value }
}
