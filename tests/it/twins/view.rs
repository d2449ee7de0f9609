//! What a user sees of a namespace: links, addresses, routes, as lines without random parts.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::plan::TUNED_MTU;
use crate::support::traffic::Place;

/// The links of the test itself.
fn is_foreign(name: &str) -> bool {
    ["lo", "out0", "m0", "m1", "m0far", "m1far"].contains(&name) || name.starts_with("mark")
}

/// The lines of a place. `names` says whose a link is.
pub(super) fn lines(
    place: &impl Place,
    title: &str,
    names: &BTreeMap<String, String>,
) -> Vec<String> {
    let name = |name: &str| match names.get(name) {
        Some(owner) if name.starts_with("bwp") => format!("[limit of {owner}]"),
        Some(owner) => format!("[host end of {owner}]"),
        None if name.starts_with("veth") => "[unknown veth]".to_owned(),
        None if name.starts_with("bwp") => "[unknown limit]".to_owned(),
        None => name.to_owned(),
    };
    let [all, routes] = listed(place);
    let mut lines = Vec::new();
    for link in all.as_array().unwrap() {
        let Some(ifname) = link["ifname"].as_str().filter(|name| !is_foreign(name)) else {
            continue;
        };
        lines.push(format!("{title}: {}", link_text(link, &name(ifname), &name)));
        for addr in link["addr_info"].as_array().into_iter().flatten() {
            if addr["family"] == "inet" {
                let (local, length) = (text(&addr["local"]), &addr["prefixlen"]);
                lines.push(format!("{title}: address {local}/{length} of {}", name(ifname)));
            }
        }
    }
    for route in routes.as_array().unwrap() {
        let dev = text(&route["dev"]);
        if is_foreign(&dev) && text(&route["protocol"]) == "kernel" {
            continue;
        }
        let via = route["gateway"].as_str().map_or(String::new(), |via| format!(" via {via}"));
        let metric = route["metric"].as_u64().map_or(String::new(), |n| format!(" metric {n}"));
        lines.push(format!(
            "{title}: route {}{via} dev {}{metric}",
            text(&route["dst"]),
            name(&dev)
        ));
    }
    lines
}

fn link_text(link: &Value, name: &str, names: &dyn Fn(&str) -> String) -> String {
    let flags = link["flags"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let flags: Vec<&str> =
        flags.filter(|flag| ["UP", "PROMISC", "ALLMULTI"].contains(flag)).collect();
    let kind = link["linkinfo"]["info_kind"].as_str().unwrap_or("?");
    let mac = text(&link["address"]);
    let mac = if mac.starts_with("02:00:00:00:00:") { mac } else { "random".to_owned() };
    let mac = if kind == "bridge" { String::new() } else { format!(" mac {mac}") };
    let master = link["master"].as_str().map_or(String::new(), |m| format!(" in {}", names(m)));
    let limit = if link["qdisc"] == "tbf" { " limited" } else { "" };
    // The reference's tuning leaves the host's end of a pair as it was, and with it a black hole.
    let is_tuned = kind == "veth" && link["mtu"] == TUNED_MTU;
    let mtu = if is_tuned { &json!(1500) } else { &link["mtu"] };
    format!("link {name} {kind} mtu {mtu} {flags:?}{mac}{master}{limit}")
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Links with addresses, and the routes of the table `main`, by one process, which also forgets the
/// neighbours: how long those of deleted containers remain is by chance.
fn listed(place: &impl Place) -> [Value; 2] {
    let output = place.within(|| {
        let mut ip = Command::new("ip");
        ip.args(["-j", "-d", "-batch", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = ip.spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"addr show\nroute show\nneigh flush all\n").unwrap();
        child.wait_with_output().unwrap()
    });
    let mut values = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
    // `ip` prints nothing for an empty list of routes.
    [(); 2].map(|()| values.next().map_or(Value::Array(Vec::new()), Result::unwrap))
}
