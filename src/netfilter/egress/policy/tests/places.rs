//! The host, other containers, name servers, metadata services and the Internet as destinations.

use super::*;

/// Both are judged alike.
fn assert_near(json: &str, allowed: &[(&str, u32)], denied: &[(&str, u32)]) {
    let compiled = compiled(json);
    assert_verdicts(&compiled.host, allowed, denied);
    assert_verdicts(&compiled.neighbours, allowed, denied);
}

#[test]
fn no_network_opens_the_host_and_neighbours() {
    let json = r#"{"allow": [{"to": ["10.0.0.0/8", "0.0.0.0/0", "::/0"]}, {"to": ["internet"]}]}"#;
    assert_near(json, &[], &[("10.0.0.1", SSH), ("8.8.8.8", HTTPS), ("2a00::1", DNS)]);
    let address = r#"{"allow": [{"to": ["10.0.0.1"], "ports": ["tcp/22"]}]}"#;
    assert_near(address, &[("10.0.0.1", SSH)], &[("10.0.0.1", HTTPS), ("10.0.0.2", SSH)]);
    let all = r#"{"policy": "allow", "deny": [{"to": ["10.0.0.0/8"]}, {"ports": ["tcp/443"]}]}"#;
    assert_near(all, &[("11.0.0.1", SSH)], &[("10.0.0.1", SSH), ("11.0.0.1", HTTPS)]);
}

#[test]
fn words_open_the_host_and_neighbours() {
    for (word, is_host) in [("host", true), ("neighbours", false)] {
        let json = format!(
            r#"{{"allow": [{{"to": ["{word}"], "ports": ["tcp"]}}],
                 "deny": [{{"to": ["{word}"], "ports": ["tcp/22"]}}, {{"to": ["10.0.0.1"]}}]}}"#
        );
        let CompiledPolicy { host, neighbours, routed, .. } = compiled(&json);
        let (named, other) = if is_host { (host, neighbours) } else { (neighbours, host) };
        let denied = [("10.0.0.1", HTTPS), ("10.0.0.2", SSH), ("10.0.0.2", DNS)];
        assert_verdicts(&named, &[("10.0.0.2", HTTPS), ("2a00::1", HTTPS)], &denied);
        assert!(other.is_empty() && routed.is_empty(), "{word}");
    }
    let wide = r#"{"allow": [{"to": ["host", "neighbours"]}], "deny": [{"to": ["10.0.0.0/8"]}]}"#;
    assert_near(wide, &[("10.0.0.1", SSH), ("8.8.8.8", HTTPS)], &[]);
}

#[test]
fn the_word_dns_is_port_53_of_the_host_and_of_name_servers() {
    let servers = ["10.20.0.9".parse().unwrap(), "2001:db8::53".parse().unwrap()];
    let scene = PolicyScene { name_servers: &servers, ..PolicyScene::default() };
    let json = r#"{"allow": [{"to": ["dns"]}], "deny": [{"to": ["10.0.0.0/8"]}]}"#;
    let compiled = policy(json).compile(&scene).unwrap();
    let denied = [("10.20.0.9", HTTPS), ("10.20.0.8", DNS), ("8.8.8.8", DNS)];
    assert_verdicts(&compiled.routed, &[("10.20.0.9", DNS), ("2001:db8::53", DNS_TCP)], &denied);
    assert_verdicts(&compiled.host, &[("10.0.0.1", DNS)], &[("10.0.0.1", HTTPS)]);
    assert!(compiled.neighbours.is_empty());
    // A sandbox has it, unless its policy denies it.
    let sandbox = policy(SANDBOXED).compile(&scene).unwrap();
    assert_verdicts(&sandbox.routed, &[("10.20.0.9", DNS)], &denied[..2]);
    for deny in
        [r#"{"ports": ["udp/53", "tcp/53"]}"#, r#"{"to": ["10.20.0.0/16"]}"#, r#"{"to": ["dns"]}"#]
    {
        let json = format!(r#"{{"profile": "sandbox", "deny": [{deny}]}}"#);
        let routed = policy(&json).compile(&scene).unwrap().routed;
        assert_verdicts(&routed, &[], &[("10.20.0.9", DNS)]);
    }
}

#[test]
fn the_word_internet_is_what_a_sandbox_reaches() {
    let web = r#"{"allow": [{"to": ["internet"], "ports": ["tcp/443"]}, {"to": ["10.0.0.0/8"]}],
        "deny": [{"to": ["8.8.8.8"]}]}"#;
    let denied = [("8.8.8.8", HTTPS), ("1.1.1.1", SSH), ("172.16.0.1", HTTPS), ("fd00::1", HTTPS)];
    let allowed = [("1.1.1.1", HTTPS), ("2a00::1", HTTPS), ("10.0.0.1", SSH)];
    assert_routed(web, &allowed, &denied);
    let without = r#"{"policy": "allow", "deny": [{"to": ["internet"]}]}"#;
    assert_routed(without, &[("10.0.0.1", SSH)], &[("1.1.1.1", SSH), ("2a00::1", SSH)]);
}

#[test]
fn no_wide_network_opens_metadata() {
    let metadata = ["169.254.169.254", "fd00:ec2::254", "168.63.129.16", "100.100.100.200"];
    let wide = r#"{"allow": [{"to": ["0.0.0.0/0", "::/0", "100.64.0.0/10", "fd00::/8"]}]}"#;
    assert_routed(wide, &[("8.8.8.8", HTTPS)], &metadata.map(|addr| (addr, HTTPS)));
    for addr in metadata {
        let json = format!(r#"{{"allow": [{{"to": ["{addr}"], "ports": ["tcp/80"]}}]}}"#);
        assert_routed(&json, &[(addr, 0x6_0050)], &[(addr, HTTPS)]);
    }
}
