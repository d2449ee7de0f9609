//! The flight recorder: the steps of a call as spans of OpenTelemetry.
//!
//! Without a recording, a [span](begin_span) costs one read of a thread-local variable. Otherwise
//! spans are kept in memory until [`finish_recording`] encodes the call as a line of OTLP JSON; the
//! caller of [`start_recording`] and [`finish_recording`] writes the line. Only the thread that
//! started a recording records.

use std::cell::RefCell;
use std::fmt::Display;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

/// The variable with the caller's span (W3C Trace Context, section 3.2, as an environment
/// variable).
pub const TRACEPARENT: &str = "TRACEPARENT";

/// Limit of the spans of a call.
const MAX_SPANS: usize = 512;

thread_local! {
    static RECORDING: RefCell<Option<TraceRecording>> = const { RefCell::new(None) };
}

/// The span of the caller: `00-<trace>-<span>-<flags>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    trace: u128,
    span: u64,
    /// The caller records its span, and requests the recording of child spans.
    pub is_sampled: bool,
}

impl TraceParent {
    /// Parses a header. An invalid header is ignored, as the recommendation requires.
    pub fn parse(header: &str) -> Option<TraceParent> {
        let mut fields = header.split('-');
        let mut field = |length: usize| {
            let text = fields.next().filter(|text| text.len() == length)?;
            text.bytes()
                .all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
                .then(|| u128::from_str_radix(text, 16).ok())?
        };
        let (version, trace, span, flags) = (field(2)?, field(32)?, field(16)?, field(2)?);
        // Later versions may have more fields.
        let is_known = version < 0xff && (version > 0 || fields.next().is_none());
        let span = u64::try_from(span).ok()?;
        (is_known && trace != 0 && span != 0).then_some(TraceParent {
            trace,
            span,
            is_sampled: flags & 1 == 1,
        })
    }
}

struct RecordedSpan {
    name: String,
    /// The index of the parent in [`TraceRecording::spans`].
    parent: Option<usize>,
    /// Nanoseconds since 1970.
    start: u64,
    end: u64,
    /// The attributes, as in OTLP JSON.
    attributes: Vec<Value>,
    error: Option<String>,
}

/// The spans of one call. The first one is the call itself.
struct TraceRecording {
    trace: u128,
    parent: Option<u64>,
    /// The identifier of the first span; the other identifiers are derived from it.
    first: u64,
    start: Instant,
    /// The time of the start since 1970.
    start_time: Duration,
    spans: Vec<RecordedSpan>,
    /// The indexes of the spans that have not ended, outermost first.
    open: Vec<usize>,
    dropped: u64,
}

impl TraceRecording {
    fn new(name: String, parent: Option<TraceParent>) -> TraceRecording {
        let random = RandomState::new();
        let number = |of: u8| random.hash_one(of) | 1;
        let trace = u128::from(number(0)) << 64 | u128::from(number(1));
        let mut recording = TraceRecording {
            trace: parent.map_or(trace, |parent| parent.trace),
            parent: parent.map(|parent| parent.span),
            first: number(2),
            start: Instant::now(),
            start_time: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
            spans: Vec::with_capacity(32),
            open: Vec::new(),
            dropped: 0,
        };
        recording.open_span(name);
        recording
    }

    fn open_span(&mut self, name: String) -> Option<usize> {
        if self.spans.len() == MAX_SPANS {
            self.dropped += 1;
            return None;
        }
        let start = self.unix_nanos();
        let parent = self.open.last().copied();
        self.spans.push(RecordedSpan {
            name,
            parent,
            start,
            end: start,
            attributes: Vec::new(),
            error: None,
        });
        self.open.push(self.spans.len() - 1);
        self.open.last().copied()
    }

    /// Ends a span and its descendants.
    fn close_span(&mut self, span: usize) {
        let end = self.unix_nanos();
        while let Some(open) = self.open.pop_if(|open| *open >= span) {
            self.spans[open].end = end;
        }
    }

    /// The identifier of a span. Never 0: `first` is odd, and the difference even.
    fn span_id(&self, span: usize) -> u64 {
        self.first.wrapping_add(span as u64 * 2)
    }

    /// Nanoseconds since 1970. The clock is monotonic: it is set at the start of the recording
    /// only.
    fn unix_nanos(&self) -> u64 {
        u64::try_from((self.start_time + self.start.elapsed()).as_nanos()).unwrap_or(u64::MAX)
    }
}

/// The encoding as OTLP JSON: an `ExportTraceServiceRequest` (opentelemetry-proto, `trace/v1`),
/// with 64-bit numbers as decimal strings and identifiers as hexadecimal strings.
impl TraceRecording {
    fn to_json(&self) -> Value {
        let version = env!("CARGO_PKG_VERSION");
        let mut resource = vec![
            text_attribute("service.name", "cnibox"),
            text_attribute("service.version", version),
            number_attribute("process.pid", std::process::id().into()),
        ];
        if self.dropped > 0 {
            resource.push(number_attribute("cnibox.dropped_spans", self.dropped));
        }
        let spans: Vec<Value> =
            self.spans.iter().enumerate().map(|(i, span)| self.span_json(i, span)).collect();
        json!({"resourceSpans": [{
            "resource": {"attributes": resource},
            "scopeSpans": [{"scope": {"name": "cnibox", "version": version}, "spans": spans}],
        }]})
    }

    fn span_json(&self, i: usize, span: &RecordedSpan) -> Value {
        let mut json = json!({
            "traceId": format!("{:032x}", self.trace),
            "spanId": format!("{:016x}", self.span_id(i)),
            "name": span.name,
            // SPAN_KIND_INTERNAL
            "kind": 1,
            "startTimeUnixNano": span.start.to_string(),
            "endTimeUnixNano": span.end.to_string(),
            "attributes": span.attributes,
        });
        if let Some(parent) = span.parent.map(|parent| self.span_id(parent)).or(self.parent) {
            json["parentSpanId"] = json!(format!("{parent:016x}"));
        }
        if let Some(cause) = &span.error {
            // STATUS_CODE_ERROR
            json["status"] = json!({"code": 2, "message": cause});
        }
        json
    }
}

fn text_attribute(key: &str, value: &str) -> Value {
    json!({"key": key, "value": {"stringValue": value}})
}

fn number_attribute(key: &str, value: u64) -> Value {
    json!({"key": key, "value": {"intValue": value.to_string()}})
}

/// Starts the recording of this thread with a span called `name`.
pub fn start_recording(name: String, parent: Option<TraceParent>) {
    RECORDING.set(Some(TraceRecording::new(name, parent)));
}

/// Whether this thread records.
pub fn is_recording() -> bool {
    RECORDING.with_borrow(Option::is_some)
}

/// A step of the call, from its creation until it is dropped.
#[must_use = "a span ends when it is dropped"]
pub struct OpenSpan(Option<usize>);

/// Begins a child of the innermost open span.
pub fn begin_span(name: &'static str) -> OpenSpan {
    OpenSpan(RECORDING.with_borrow_mut(|on| on.as_mut()?.open_span(name.to_owned())))
}

/// The span of the call.
pub fn root_span() -> OpenSpan {
    // `finish_recording` ends it.
    OpenSpan(is_recording().then_some(0))
}

impl OpenSpan {
    fn change_record(&self, change: impl FnOnce(&mut RecordedSpan)) {
        let Some(span) = self.0 else { return };
        RECORDING.with_borrow_mut(|on| {
            on.as_mut().and_then(|on| on.spans.get_mut(span)).map(change);
        });
    }

    /// Adds an attribute. `value` is called only if this thread records.
    pub fn add_text<T: Into<String>>(&self, key: &'static str, value: impl FnOnce() -> T) {
        self.change_record(|span| span.attributes.push(text_attribute(key, &value().into())));
    }

    pub fn add_number(&self, key: &'static str, value: u64) {
        self.change_record(|span| span.attributes.push(number_attribute(key, value)));
    }

    pub fn mark_failed(&self, cause: &dyn Display) {
        self.change_record(|span| span.error = Some(cause.to_string()));
    }

    /// Ends the span, and marks it as failed if `outcome` is an error.
    pub fn end_with<T, E: Display>(self, outcome: Result<T, E>) -> Result<T, E> {
        if let Err(error) = &outcome {
            self.mark_failed(error);
        }
        outcome
    }
}

impl Drop for OpenSpan {
    fn drop(&mut self) {
        if let Some(span) = self.0.filter(|span| *span > 0) {
            RECORDING.with_borrow_mut(|on| on.as_mut().map(|on| on.close_span(span)));
        }
    }
}

/// The value of [`TRACEPARENT`] for a child process: its parent is the innermost open span.
pub fn traceparent_value() -> Option<String> {
    RECORDING.with_borrow(|on| {
        let on = on.as_ref()?;
        let span = on.open.last().copied().unwrap_or_default();
        Some(format!("00-{:032x}-{:016x}-01", on.trace, on.span_id(span)))
    })
}

/// Ends the recording. Returns the call as a line of OTLP JSON, with a newline; `clean` leaves out
/// secrets of errors.
pub fn finish_recording(clean: &dyn Fn(&str) -> String) -> Option<String> {
    let mut recording = RECORDING.take()?;
    recording.close_span(0);
    for error in recording.spans.iter_mut().filter_map(|span| span.error.as_mut()) {
        *error = clean(error);
    }
    Some(format!("{}\n", recording.to_json()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trace_context_headers_are_parsed() {
        let parent =
            TraceParent::parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").unwrap();
        assert_eq!(parent.trace, 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c);
        assert_eq!((parent.span, parent.is_sampled), (0xb7ad_6b71_6920_3331, true));
        let with = |version: &str, flags: &str| {
            TraceParent::parse(&format!("{version}-{:032x}-{:016x}-{flags}", 1, 2))
        };
        assert_eq!(with("00", "00").map(|parent| parent.is_sampled), Some(false));
        assert!(with("01", "01-more").is_some());
        for wrong in [with("00", "01-more"), with("ff", "01"), with("0", "01"), with("00", "0G")] {
            assert_eq!(wrong, None);
        }
        for wrong in [
            "",
            "00",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        ] {
            assert_eq!(TraceParent::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn attributes_are_evaluated_only_while_recording() {
        let span = begin_span("netlink");
        span.add_text("key", || -> String { unreachable!("not recording") });
        assert_eq!((traceparent_value(), finish_recording(&str::to_owned)), (None, None));
    }

    #[test]
    fn a_child_process_inherits_the_open_span() {
        let parent = TraceParent::parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
        start_recording("bridge ADD".to_owned(), parent);
        let header = traceparent_value().unwrap();
        let handed = TraceParent::parse(&header).unwrap();
        assert_eq!(handed.trace, parent.unwrap().trace);
        let span = begin_span("exec");
        let inner = TraceParent::parse(&traceparent_value().unwrap()).unwrap();
        assert_ne!(inner.span, handed.span);
        drop(span);
        assert_eq!(traceparent_value().unwrap(), header);
        let line = finish_recording(&str::to_owned).unwrap();
        assert!(line.contains(&format!("\"spanId\":\"{:016x}\"", inner.span)), "{line}");
    }
}
