//! The spans of a trace under each other, with what each took and when.

use super::duration;
use super::recording::{Recording, Span};

use crate::sort::sort_by_key;

/// Characters of the time axis.
const WIDTH: u64 = 40;

/// The spans in the order of their starts, those of a parent below it.
pub(super) fn show(calls: &[&Recording]) -> String {
    let spans: Vec<&Span> = calls.iter().flat_map(|call| &call.spans).collect();
    let start = spans.iter().map(|span| span.start).min().unwrap_or_default();
    let end = spans.iter().map(|span| span.end).max().unwrap_or_default();
    let axis = Axis { start, length: (end - start).max(1) };
    // Parents of other programs are not here.
    let is_known = |id: &str| spans.iter().any(|span| span.id == id);
    let mut lines = Vec::new();
    for root in spans.iter().filter(|span| !is_known(&span.parent)) {
        below(root, &spans, 0, &axis, &mut lines);
    }
    let mut text = format!("trace {}\n\n", calls[0].call().trace) + &crate::tool::columns(&lines);
    for call in calls {
        text += &about(call);
    }
    text
}

/// When the trace began, and how long it took, in nanoseconds.
struct Axis {
    start: u64,
    length: u64,
}

impl Axis {
    fn at(&self, time: u64) -> u64 {
        (time - self.start) * WIDTH / self.length
    }

    /// A bar from the start to the end of a span.
    fn bar(&self, span: &Span) -> String {
        let (from, to) = (self.at(span.start).min(WIDTH - 1), self.at(span.end));
        let mark = |at: u64| if (from..to.max(from + 1)).contains(&at) { '#' } else { '.' };
        (0..WIDTH).map(mark).collect()
    }
}

fn below(span: &Span, all: &[&Span], depth: usize, axis: &Axis, lines: &mut Vec<[String; 4]>) {
    let failed = if span.error.is_some() { "failed" } else { "" };
    let name = format!("{}{} {}", "  ".repeat(depth), span.name, detail(span));
    let name = name.trim_end().to_owned();
    lines.push([axis.bar(span), duration(span.duration()), name, failed.to_owned()]);
    let mut children: Vec<_> = all.iter().filter(|child| child.parent == span.id).collect();
    sort_by_key(&mut children, |child| child.start);
    // A recording is no deeper; what says so may have been forged.
    if depth < 64 {
        for child in children {
            below(child, all, depth + 1, axis, lines);
        }
    }
}

/// The name of a call has plugin and verb already.
fn detail(span: &Span) -> String {
    if span.name.contains(' ') && span.name != "lock wait" { String::new() } else { span.detail() }
}

/// What is known of a call: its variables, its error and its configuration.
fn about(call: &Recording) -> String {
    let keys = [
        "cni.network",
        "cni.container_id",
        "cni.ifname",
        "cni.netns",
        "cni.args",
        "cni.path",
        "cni.config",
    ];
    let known = keys.iter().map(|key| (*key, call.get(key))).filter(|(_, value)| !value.is_empty());
    let mut lines: Vec<String> =
        known.map(|(key, value)| format!("  {}: {value}\n", &key["cni.".len()..])).collect();
    let code = call.get("cni.error.code");
    lines.extend(call.call().error.iter().map(|error| format!("  error {code}: {error}\n")));
    if lines.is_empty() {
        String::new()
    } else {
        format!("\n{}\n{}", call.call().name, lines.concat())
    }
}
