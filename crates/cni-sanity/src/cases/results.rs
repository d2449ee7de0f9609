//! The form of a result, which depends on the version.

use std::net::IpAddr;

use serde_json::Value;

use super::{Answer, Attachment, Check, Subject};

/// Checks the form of the result of a successful ADD.
pub fn look(subject: &Subject<'_>, at: &Attachment, answer: &Answer, check: &mut Check) {
    if !answer.succeeded() {
        return;
    }
    let json = answer.result().filter(|json| json.is_object());
    check.of("result.json", answer, json.is_some());
    let Some(json) = json else { return };
    check.of("result.cni-version", answer, json["cniVersion"] == subject.version);
    check.of("result.dns", answer, json["dns"].is_null() || is_dns(&json["dns"]));
    check.of("result.no-error", answer, json["code"].is_null() && json["msg"].is_null());
    if subject.since("0.3.0") {
        list_form(subject, at, answer, json, check);
    } else {
        pair_form(answer, json, check);
    }
}

/// 0.1.0 and 0.2.0: one address of each family.
fn pair_form(answer: &Answer, json: &Value, check: &mut Check) {
    check.of("result.old.no-ips", answer, json["ips"].is_null());
    check.of("result.old.no-interfaces", answer, json["interfaces"].is_null());
    for (key, id, is_family) in [
        ("ip4", "result.old.ip4", IpAddr::is_ipv4 as fn(&IpAddr) -> bool),
        ("ip6", "result.old.ip6", IpAddr::is_ipv6),
    ] {
        let entry = &json[key];
        let is_good = prefix(&entry["ip"]).is_some_and(|(ip, _)| is_family(&ip));
        check.of(id, answer, entry.is_null() || is_good);
        let gateway = &entry["gateway"];
        let is_good = ip(gateway).is_some_and(|ip| is_family(&ip));
        check.of("result.old.gateway", answer, gateway.is_null() || is_good);
        check.of("result.old.routes", answer, routes(&entry["routes"]));
    }
}

/// 0.3.0 and later: lists of interfaces and addresses.
fn list_form(
    subject: &Subject<'_>,
    at: &Attachment,
    answer: &Answer,
    json: &Value,
    check: &mut Check,
) {
    check.of("result.no-ip4", answer, json["ip4"].is_null() && json["ip6"].is_null());
    let is_list = json["interfaces"].is_null() || json["interfaces"].is_array();
    check.of("result.interfaces-list", answer, is_list);
    check.of("result.ips-list", answer, json["ips"].is_null() || json["ips"].is_array());
    check.of("result.routes", answer, routes(&json["routes"]));
    for interface in list(json, "interfaces") {
        let is_named = interface["name"].as_str().is_some_and(|name| !name.is_empty());
        check.of("result.interface.name", answer, is_named);
        let mac = &interface["mac"];
        let is_good = mac.as_str().is_some_and(|mac| mac.is_empty() || is_mac(mac));
        check.of("result.interface.mac", answer, mac.is_null() || is_good);
        let sandbox = &interface["sandbox"];
        // The interface inside of a virtual machine has the container's id.
        let is_of_machine = subject.is(&["tc-redirect-tap"]) && *sandbox == at.id;
        let is_good =
            sandbox.is_null() || *sandbox == "" || *sandbox == at.netns.path() || is_of_machine;
        check.of("result.interface.sandbox", answer, is_good);
        let mtu = &interface["mtu"];
        let is_good = subject.since("1.1.0") && mtu.is_u64();
        check.of("result.interface.mtu", answer, mtu.is_null() || is_good);
    }
    let interfaces = list(json, "interfaces").count() as u64;
    for address in list(json, "ips") {
        let parsed = prefix(&address["address"]);
        check.of("result.ip.address", answer, parsed.is_some());
        let family = parsed.map(|(ip, _)| if ip.is_ipv4() { "4" } else { "6" });
        let version = &address["version"];
        if subject.since("1.0.0") {
            check.of("result.ip.no-version", answer, version.is_null());
        } else {
            let is_good = version.is_string() && version.as_str() == family;
            check.of("result.ip.version", answer, is_good);
        }
        let gateway = &address["gateway"];
        check.of("result.ip.gateway", answer, gateway.is_null() || ip(gateway).is_some());
        let both = ip(gateway).zip(parsed);
        let is_family = both.is_none_or(|(gateway, (ip, _))| gateway.is_ipv4() == ip.is_ipv4());
        check.of("result.ip.gateway-family", answer, is_family);
        let index = &address["interface"];
        let is_inside = index.as_u64().is_some_and(|index| index < interfaces);
        check.of("result.ip.interface", answer, index.is_null() || is_inside);
    }
}

fn is_dns(dns: &Value) -> bool {
    let lists = ["nameservers", "search", "options"];
    dns.is_object()
        && lists.iter().all(|key| dns[key].is_null() || dns[key].is_array())
        && (dns["domain"].is_null() || dns["domain"].is_string())
}

fn is_mac(text: &str) -> bool {
    let parts: Vec<&str> = text.split(':').collect();
    parts.len() == 6
        && parts.iter().all(|part| part.len() == 2 && u8::from_str_radix(part, 16).is_ok())
}

fn routes(routes: &Value) -> bool {
    let is_good = |route: &Value| {
        prefix(&route["dst"]).is_some() && (route["gw"].is_null() || ip(&route["gw"]).is_some())
    };
    routes.is_null() || routes.as_array().is_some_and(|routes| routes.iter().all(is_good))
}

/// An address in a result.
pub fn ip(value: &Value) -> Option<IpAddr> {
    value.as_str()?.parse().ok()
}

/// An address and its prefix length.
pub fn prefix(value: &Value) -> Option<(IpAddr, u8)> {
    let (ip, length) = value.as_str()?.split_once('/')?;
    let (ip, length): (IpAddr, u8) = (ip.parse().ok()?, length.parse().ok()?);
    (length <= if ip.is_ipv4() { 32 } else { 128 }).then_some((ip, length))
}

/// The addresses of a result of any version.
pub fn addresses(result: &Value) -> Vec<(IpAddr, u8)> {
    let old = ["ip4", "ip6"].iter().filter_map(|key| prefix(&result[key]["ip"]));
    let new = list(result, "ips");
    old.chain(new.filter_map(|address| prefix(&address["address"]))).collect()
}

/// The entries of a list of the result; none if the list is missing.
pub fn list<'v>(result: &'v Value, key: &str) -> impl Iterator<Item = &'v Value> {
    result[key].as_array().into_iter().flatten()
}

/// The gateways of a result of any version.
pub fn gateways(result: &Value) -> Vec<IpAddr> {
    let old = ["ip4", "ip6"].iter().filter_map(|key| ip(&result[key]["gateway"]));
    let new = list(result, "ips");
    old.chain(new.filter_map(|address| ip(&address["gateway"]))).collect()
}
