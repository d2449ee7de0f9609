//! Entries of policies that do not do what they say.

use super::compile::AllowedTraffic;
use super::policy::{
    CompiledPolicy, EgressPolicy, PolicyEntry, PolicyScene, is_name, parse_network,
};
use cni::error::{Error, Result};

/// The entries that decide no packet, each with what to write instead, for a container in these
/// surroundings. They are not looked for in a policy with more than `most` networks. Fails if an
/// entry is for the address `0.0.0.0` or `::`, to which nothing is sent: all addresses were meant.
pub fn find_idle_entries(
    policy: &EgressPolicy,
    scene: &PolicyScene<'_>,
    most: usize,
) -> Result<Vec<Error>> {
    let mut networks = 0;
    for (key, entries) in [("allow", &policy.allow), ("deny", &policy.deny)] {
        for (at, entry) in entries.iter().enumerate() {
            networks += entry.to.len().max(1);
            require_destinations(&format!("{key}[{at}]"), entry)?;
        }
    }
    let mut idle = Vec::new();
    if networks == 0 || networks > most {
        return Ok(idle);
    }
    // Those that the profile opens are not the entries'.
    let scene = &PolicyScene { name_servers: &[], ..*scene };
    let whole = policy.compile(scene)?;
    for (at, entry) in policy.allow.iter().enumerate() {
        find_idle_parts(&format!("allow[{at}]"), entry, &whole, scene, &mut idle)?;
    }
    let has_family = |text: &String| {
        let network = parse_network(text).ok().map(|network| network.addr().is_ipv4());
        network
            .is_none_or(|is_ipv4| scene.on_link.iter().any(|near| near.addr().is_ipv4() == is_ipv4))
    };
    let mut named = policy.allow.iter().flat_map(|entry| &entry.to).peekable();
    if !scene.on_link.is_empty() && named.peek().is_some() && !named.any(has_family) {
        let problem = "\"allow\" has no address of the family that the container has";
        idle.push(Error::config(problem).with_details("IPv4 and IPv6 need networks of their own"));
    }
    for at in 0..policy.deny.len() {
        let mut without = policy.clone();
        let entry = without.deny.remove(at);
        let named = named_by_denial(entry, scene)?.intersect(&whole);
        let is_same = || Ok::<_, Error>(without.compile(scene)?.routed == whole.routed);
        if named.routed != AllowedTraffic::default() && is_same()? {
            let remedy = "networks of \"allow\" with longer prefixes decide: write them in \
                          \"deny\", too";
            idle.push(Error::config(format!("deny[{at}] refuses nothing")).with_details(remedy));
        }
    }
    Ok(idle)
}

fn require_destinations(name: &str, entry: &PolicyEntry) -> Result<()> {
    for (at, text) in entry.to.iter().enumerate() {
        let Ok(network) = parse_network(text) else { continue };
        let address = network.addr();
        if address.is_unspecified() && network.prefix_len() == network.max_prefix_len() {
            let problem = format!("{name}.to[{at}] {text:?}: nothing is sent to this address");
            return Err(Error::config(problem)
                .with_details(format!("write \"{address}/0\" for all addresses")));
        }
    }
    Ok(())
}

/// Appends the parts of an entry of `allow` that open nothing in the `whole` policy.
fn find_idle_parts(
    name: &str,
    entry: &PolicyEntry,
    whole: &CompiledPolicy,
    scene: &PolicyScene<'_>,
    idle: &mut Vec<Error>,
) -> Result<()> {
    let empty = if entry.to.is_empty() {
        Some("without \"to\" allows nothing: write \"to\": [\"0.0.0.0/0\", \"::/0\"] for all")
    } else if entry.ports.as_ref().is_some_and(Vec::is_empty) {
        Some("with \"ports\": [] allows nothing: leave \"ports\" out for all services")
    } else {
        None
    };
    if let Some(empty) = empty {
        idle.push(Error::config(format!("{name} {empty}")));
        return Ok(());
    }
    for (at, text) in entry.to.iter().enumerate() {
        if is_name(text) {
            find_idle_name(&format!("{name}.to[{at}] {text:?}"), entry, whole, scene, idle)?;
            continue;
        }
        let own = parse_network(text).ok().filter(|net| net.prefix_len() < net.max_prefix_len());
        if own.is_some_and(|net| scene.on_link.iter().any(|near| near.contains(&net))) {
            let problem = format!("{name}.to[{at}] {text:?} opens none of the containers there");
            let remedy = "no network opens other containers of the node: write \"neighbours\"";
            idle.push(Error::config(problem).with_details(remedy));
            continue;
        }
        let named = traffic_to(vec![text.clone()], entry.ports.clone(), scene)?;
        let allowed = named.intersect(whole);
        let is_idle = if named.routed == AllowedTraffic::default() {
            allowed == CompiledPolicy::default()
        } else {
            allowed.routed == AllowedTraffic::default()
        };
        if is_idle {
            let problem = format!("{name}.to[{at}] {text:?} allows nothing");
            idle.push(Error::config(problem).with_details(longer_prefixes(text)));
        }
    }
    Ok(())
}

/// Appends a name whose services the policy allows everywhere on the Internet.
fn find_idle_name(
    name: &str,
    entry: &PolicyEntry,
    whole: &CompiledPolicy,
    scene: &PolicyScene<'_>,
    idle: &mut Vec<Error>,
) -> Result<()> {
    let everywhere = traffic_to(vec!["internet".to_owned()], entry.ports.clone(), scene)?;
    if everywhere.intersect(whole).routed == everywhere.routed {
        let problem = format!("{name} adds nothing: the policy allows the Internet");
        let remedy = "leave the profile, \"policy\": \"allow\" and \"internet\" out, so that \
                      the policy allows the names alone";
        idle.push(Error::config(problem).with_details(remedy));
    }
    Ok(())
}

/// What to write in place of a network that `deny` or the profile has as well.
fn longer_prefixes(text: &str) -> String {
    let refused = "\"deny\" or the profile refuses it, and decides where prefixes are equally long";
    let network = parse_network(text).ok();
    let halves = network.and_then(|network| network.subnets(network.prefix_len() + 1).ok());
    match halves.map(Iterator::collect::<Vec<_>>).as_deref() {
        Some([low, high]) => format!("{refused}: write \"{low}\" and \"{high}\""),
        _ => refused.to_owned(),
    }
}

/// What an entry of `deny` names.
fn named_by_denial(entry: PolicyEntry, scene: &PolicyScene<'_>) -> Result<CompiledPolicy> {
    let all = || vec!["0.0.0.0/0".to_owned(), "::/0".to_owned()];
    let to = if entry.to.is_empty() { all() } else { entry.to };
    traffic_to(to, entry.ports.filter(|ports| !ports.is_empty()), scene)
}

fn traffic_to(
    to: Vec<String>,
    ports: Option<Vec<String>>,
    scene: &PolicyScene<'_>,
) -> Result<CompiledPolicy> {
    let allow = vec![PolicyEntry { to, ports }];
    EgressPolicy { allow, ..EgressPolicy::default() }.compile(scene)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn idle(json: &str) -> Vec<String> {
        let policy = serde_json::from_str(json).unwrap();
        let on_link = ["10.1.2.0/24".parse().unwrap()];
        let scene = PolicyScene { on_link: &on_link, ..PolicyScene::default() };
        let found = find_idle_entries(&policy, &scene, usize::MAX).unwrap();
        assert_eq!(find_idle_entries(&policy, &scene, 0).unwrap(), []);
        found.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn entries_that_decide_no_packet_are_found() {
        for (json, expected) in [
            (
                r#"{"allow":[{"ports":["tcp/443"]}]}"#,
                &["allow[0] without \"to\" allows nothing: write \"to\""][..],
            ),
            (
                r#"{"allow":[{"to":["192.0.2.7"],"ports":[]}]}"#,
                &["allow[0] with \"ports\": [] allows nothing: leave"],
            ),
            (
                r#"{"profile":"sandbox","allow":[{"to":["8.8.8.8","10.0.0.0/8"]},{"to":["10.1.2.3/24"],"ports":["tcp"]}]}"#,
                &[
                    "allow[0].to[1] \"10.0.0.0/8\" allows nothing; \"deny\" or the profile refuses \
                     it, and decides where prefixes are equally long: write \"10.0.0.0/9\" and \
                     \"10.128.0.0/9\"",
                    "allow[1].to[0] \"10.1.2.3/24\" opens none of the containers there; no network \
                     opens other containers of the node: write \"neighbours\"",
                ],
            ),
            (
                r#"{"allow":[{"to":["192.0.2.7"],"ports":["tcp/80"]}],"deny":[{"to":["192.0.2.7"]}]}"#,
                &[
                    "allow[0].to[0] \"192.0.2.7\" allows nothing; \"deny\" or the profile refuses it",
                ],
            ),
            (
                r#"{"allow":[{"to":["10.0.0.0/8"]}],"deny":[{"ports":["tcp/25"]}]}"#,
                &["deny[0] refuses nothing; networks of \"allow\" with longer"],
            ),
            (
                r#"{"policy":"allow","allow":[{"to":["192.0.2.0/25","192.0.2.128/25"]}],"deny":[{"to":["192.0.2.0/24"]}]}"#,
                &["deny[0] refuses nothing; networks of \"allow\" with longer"],
            ),
        ] {
            let found = idle(json);
            assert_eq!(found.len(), expected.len(), "{json}: {found:?}");
            for (found, expected) in found.iter().zip(expected) {
                assert!(found.starts_with(expected), "{found}");
            }
        }
    }

    #[test]
    fn a_list_for_another_family_is_found() {
        let families = "\"allow\" has no address of the family that the container has; IPv4 and \
                        IPv6 need networks of their own";
        assert_eq!(idle(r#"{"allow":[{"to":["2001:db8::5"]}]}"#), [families]);
        assert_eq!(idle(r#"{"allow":[{"to":["2001:db8::5"]},{"to":["192.0.2.7"]}]}"#), [""; 0]);
    }

    #[test]
    fn entries_that_decide_or_only_repeat_are_left() {
        for json in [
            r#"{"allow":[{"to":["10.0.0.0/8"]},{"to":["10.20.0.5"]},{"to":["10.0.0.0/8"]}]}"#,
            r#"{"profile":"sandbox","allow":[{"to":["10.0.0.0/9"]},{"to":["8.8.8.8"]}]}"#,
            r#"{"allow":[{"to":["192.0.2.0/24"]}],"deny":[{"to":["169.254.0.0/16"]}]}"#,
            r#"{"policy":"allow","deny":[{"to":["10.0.0.0/8"]},{"to":["10.0.0.0/9"]},{"ports":["tcp/25"]},{}]}"#,
            r#"{"policy":"allow","allow":[{"to":["10.20.0.5"]}],"deny":[{"to":["10.0.0.0/8"]}]}"#,
            r#"{"allow":[{"to":["192.0.2.7"]}],"deny":[{"to":["192.0.2.7"],"ports":["tcp/80"]}]}"#,
        ] {
            assert_eq!(idle(json), [""; 0], "{json}");
        }
    }

    #[test]
    fn the_unspecified_address_is_no_destination() {
        for (to, remedy) in [
            ("0.0.0.0", "write \"0.0.0.0/0\" for all addresses"),
            ("0.0.0.0/32", "write \"0.0.0.0/0\" for all addresses"),
            ("::", "write \"::/0\" for all addresses"),
        ] {
            let deny = vec![PolicyEntry { to: vec!["10.0.0.0/8".into(), to.into()], ports: None }];
            let policy = EgressPolicy { policy: "allow".into(), deny, ..Default::default() };
            let error = find_idle_entries(&policy, &PolicyScene::default(), 0).unwrap_err();
            let problem = format!("deny[0].to[1] \"{to}\": nothing is sent to this address");
            assert_eq!((error.message(), error.details()), (problem.as_str(), remedy));
        }
    }
}
