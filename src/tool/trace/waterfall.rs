//! `show`: the spans of a trace as a tree, with duration and position in time.

use super::{ParsedSpan, RecordedCall, milliseconds_text};
use crate::tool::format_columns;
use cni::sort::sort_by_key;

/// The width of the time axis in characters.
const WIDTH: u64 = 40;

/// Limit of the tree's depth: parents in a forged file may form a cycle.
const MAX_DEPTH: usize = 64;

/// The spans of a trace, children below their parents in the order of their starts, and the details
/// of its calls.
pub(super) fn show_trace(recordings: &[RecordedCall], trace: &str) -> String {
    let calls = || recordings.iter().filter(|recording| recording.call_span().trace == trace);
    let mut spans: Vec<&ParsedSpan> = calls().flat_map(|call| &call.spans).collect();
    let start = spans.iter().map(|span| span.start).min().unwrap_or_default();
    let end = spans.iter().map(|span| span.end).max().unwrap_or_default();
    let bar = |span: &ParsedSpan| {
        let column = |time: u64| (time - start) * WIDTH / (end - start).max(1);
        let (from, to) = (column(span.start).min(WIDTH - 1), column(span.end));
        (0..WIDTH)
            .map(|at| if (from..to.max(from + 1)).contains(&at) { '#' } else { '.' })
            .collect()
    };
    // The parent of a root is a span of the runtime.
    let is_root = |span: &&&ParsedSpan| !spans.iter().any(|parent| parent.id == span.parent);
    let mut stack: Vec<(&ParsedSpan, usize)> =
        spans.iter().filter(is_root).map(|s| (*s, 0)).rev().collect();
    sort_by_key(&mut spans, |span| span.start);
    let mut lines = Vec::new();
    while let Some((span, depth)) = stack.pop() {
        let name = format!("{}{} {}", "  ".repeat(depth), span.name, span_detail(span));
        let failed = if span.error.is_some() { "failed" } else { "" };
        let name = name.trim_end().to_owned();
        lines.push([bar(span), milliseconds_text(span.duration_nanos()), name, failed.to_owned()]);
        if depth < MAX_DEPTH {
            let children = spans.iter().filter(|child| child.parent == span.id).rev();
            stack.extend(children.map(|child| (*child, depth + 1)));
        }
    }
    format!(
        "trace {trace}\n\n{}{}",
        format_columns(lines),
        calls().map(call_details).collect::<String>()
    )
}

/// The text that distinguishes a span from other spans of the same name.
fn span_detail(span: &ParsedSpan) -> String {
    let keys =
        ["cni.plugin", "cni.command", "process.command", "process.executable.path", "file.path"];
    let mut words: Vec<String> = match span.name.as_str() {
        "netlink" => vec![message_type_name(span.attribute_value("netlink.type"))],
        _ => keys.map(|key| span.attribute_value(key).to_owned()).to_vec(),
    };
    match span.attribute_value("nf_tables.changes") {
        "" => {}
        changes => words.push(format!("{changes} changes")),
    }
    // The name of a call contains plugin and verb.
    words.retain(|word| !span.name.contains(word.as_str()));
    words.join(" ")
}

/// The name of a netlink message's type (`linux/rtnetlink.h`, `linux/netfilter/nfnetlink.h`).
fn message_type_name(number: &str) -> String {
    let objects = ["LINK", "ADDR", "ROUTE", "NEIGH", "RULE", "QDISC", "TCLASS", "TFILTER"];
    let Ok(number) = number.parse::<usize>() else { return String::new() };
    let verb = ["NEW", "DEL", "GET", "SET"][number % 4];
    let object = number.checked_sub(16).and_then(|above| objects.get(above / 4));
    match (object, number >> 8) {
        (Some(object), _) => format!("RTM_{verb}{object}"),
        (None, 0) if (88..=90).contains(&number) => format!("RTM_{verb}NSID"),
        (None, 0) => format!("type {number}"),
        // The first message of a batch belongs to no subsystem.
        (None, 1) => "conntrack".to_owned(),
        (None, 10) => "nf_tables".to_owned(),
        (None, subsystem) => format!("netfilter subsystem {subsystem}"),
    }
}

/// The variables, the configuration and the error of a call.
fn call_details(call: &RecordedCall) -> String {
    let keys = ["network", "container_id", "ifname", "netns", "args", "path", "config"];
    let value = |key| (key, call.call_attribute(&format!("cni.{key}")));
    let known = keys.map(value).into_iter().filter(|(_, value)| !value.is_empty());
    // Further lines of a value are indented, so that they are no lines of their own.
    let line = |key: &str, value: &str| format!("  {key}: {}\n", value.replace('\n', "\n    "));
    let mut lines: Vec<String> = known.map(|(key, value)| line(key, value)).collect();
    if let Some(error) = &call.call_span().error {
        lines.push(line(&format!("error {}", call.call_attribute("cni.error.code")), error));
    }
    if lines.is_empty() {
        return String::new();
    }
    format!("\n{}\n{}", call.call_span().name, lines.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_types_have_names() {
        let names =
            ["16", "18", "19", "20", "26", "36", "88", "2561", "16", "99"].map(message_type_name);
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
}
