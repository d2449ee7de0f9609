//! Layouts to the byte, and every conversion of the matrix.

use super::*;
use crate::json::{self, Json};

const FULL_1_1_0: &str = r#"{"cniVersion":"1.1.0","dns":{"domain":"local","nameservers":["1.2.3.4"],"options":["ndots:2"],"search":["a.b"]},"interfaces":[{"mac":"00:11:22:33:44:55","mtu":1500,"name":"eth0","pciID":"8086:9a01","sandbox":"/proc/3553/ns/net","socketPath":"/path/to/vhost"}],"ips":[{"address":"1.2.3.30/24","gateway":"1.2.3.1","interface":0},{"address":"abcd:1234:ffff::cdde/64","gateway":"abcd:1234:ffff::1","interface":0}],"routes":[{"advmss":1360,"dst":"15.5.6.0/24","gw":"15.5.6.8","mtu":1400,"priority":10,"scope":0,"table":50},{"dst":"1111:dddd::/80","gw":"1111:dddd::aaaa"}]}"#;

const FULL_0_4_0: &str = r#"{"cniVersion":"0.4.0","interfaces":[{"name":"eth0","mac":"00:11:22:33:44:55","sandbox":"/proc/3553/ns/net"}],"ips":[{"version":"4","interface":0,"address":"1.2.3.30/24","gateway":"1.2.3.1"},{"version":"6","interface":0,"address":"abcd:1234:ffff::cdde/64","gateway":"abcd:1234:ffff::1"}],"routes":[{"dst":"15.5.6.0/24","gw":"15.5.6.8","mtu":1400,"advmss":1360,"priority":10,"table":50,"scope":0},{"dst":"1111:dddd::/80","gw":"1111:dddd::aaaa"}],"dns":{"nameservers":["1.2.3.4"],"domain":"local","search":["a.b"],"options":["ndots:2"]}}"#;

const FULL_0_2_0: &str = r#"{"cniVersion":"0.2.0","ip4":{"ip":"1.2.3.30/24","gateway":"1.2.3.1","routes":[{"dst":"15.5.6.0/24","gw":"15.5.6.8"}]},"ip6":{"ip":"abcd:1234:ffff::cdde/64","gateway":"abcd:1234:ffff::1","routes":[{"dst":"1111:dddd::/80","gw":"1111:dddd::aaaa"}]},"dns":{"nameservers":["1.2.3.4"],"domain":"local","search":["a.b"],"options":["ndots:2"]}}"#;

fn decode(text: &str) -> CniResult {
    let json = Json::parse(text.as_bytes()).unwrap();
    CniResult::decode(&json, SpecVersion::V0_1_0).unwrap()
}

fn print(result: &CniResult) -> String {
    json::encode_compact(&result.to_json()).unwrap()
}

fn converted(text: &str, to: SpecVersion) -> String {
    print(&decode(text).convert_to(to).unwrap())
}

#[test]
fn every_version_is_printed_as_it_was_read() {
    for text in [FULL_1_1_0, FULL_0_4_0, FULL_0_2_0] {
        assert_eq!(print(&decode(text)), text);
    }
}

#[test]
fn results_are_converted_to_older_versions() {
    assert_eq!(converted(FULL_1_1_0, SpecVersion::V0_4_0), FULL_0_4_0);
    assert_eq!(converted(FULL_1_1_0, SpecVersion::V0_2_0), FULL_0_2_0);
    assert_eq!(converted(FULL_0_4_0, SpecVersion::V0_2_0), FULL_0_2_0);
    let relabelled = FULL_1_1_0.replace("1.1.0", "1.0.0");
    assert_eq!(converted(FULL_1_1_0, SpecVersion::V1_0_0), relabelled);
}

#[test]
fn converting_up_and_back_changes_nothing() {
    for (text, versions) in [
        (FULL_0_2_0, &SpecVersion::ALL[..]),
        (FULL_0_4_0, &SpecVersion::ALL[2..]),
        (FULL_1_1_0, &SpecVersion::ALL[5..]),
    ] {
        let original = decode(text);
        for version in versions {
            let there = original.clone().convert_to(*version).unwrap();
            let there = decode(&print(&there));
            assert_eq!(there.version, *version);
            assert_eq!(print(&there.convert_to(original.version).unwrap()), text, "{version}");
        }
    }
}

#[test]
fn results_without_addresses_have_no_form_before_0_3_0() {
    let empty = CniResult::new();
    let error = empty.clone().convert_to(SpecVersion::V0_2_0).unwrap_err();
    assert_eq!(error.message(), "cannot convert: no valid IP addresses");
    assert_eq!(
        print(&empty.convert_to(SpecVersion::V0_4_0).unwrap()),
        r#"{"cniVersion":"0.4.0","dns":{}}"#
    );
    // A result that was decoded from such a version passes.
    assert_eq!(converted(r#"{"cniVersion":"0.2.0"}"#, SpecVersion::V0_1_0).len(), 31);
}

#[test]
fn old_versions_keep_one_address_and_its_routes() {
    let text = r#"{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.2/24"},{"address":"10.1.0.2/24"}],"routes":[{"dst":"::/0"},{"dst":"0.0.0.0/0","mtu":9}]}"#;
    assert_eq!(
        converted(text, SpecVersion::V0_1_0),
        r#"{"cniVersion":"0.1.0","ip4":{"ip":"10.0.0.2/24","routes":[{"dst":"0.0.0.0/0"}]},"dns":{}}"#
    );
}

#[test]
fn interface_index_0_differs_from_a_missing_index() {
    let text = r#"{"cniVersion":"0.3.1","ips":[{"version":"4","interface":0,"address":"10.0.0.2/24"},{"version":"4","address":"10.0.0.3/24"}],"dns":{}}"#;
    assert_eq!(print(&decode(text)), text);
    let result = decode(text);
    assert_eq!(result.ips_of_interface(0).count(), 1);
}

#[test]
fn the_version_of_a_result_is_read_or_the_default() {
    let json = |text: &str| Json::parse(text.as_bytes()).unwrap();
    let default = SpecVersion::V0_4_0;
    let version = |text: &str| CniResult::decode(&json(text), default).unwrap().version;
    assert_eq!(version("{}"), default);
    assert_eq!(version(r#"{"cniVersion":""}"#), default);
    assert_eq!(version(r#"{"CniVersion":"1.0.0"}"#), SpecVersion::V1_0_0);
    let error = CniResult::decode(&json(r#"{"cniVersion":"2.0.0"}"#), default).unwrap_err();
    assert_eq!(error.message(), "unsupported CNI result version \"2.0.0\"");
}

#[test]
fn previous_results_must_be_of_the_same_generation() {
    let prev = |text: &str, version| {
        CniResult::decode_prev_result(&Json::parse(text.as_bytes()).unwrap(), version)
    };
    assert!(prev(r#"{"cniVersion":"1.0.0"}"#, SpecVersion::V1_1_0).is_ok());
    assert!(prev(r#"{"cniVersion":""}"#, SpecVersion::V1_1_0).is_ok());
    assert_eq!(
        prev(r#"{"cniVersion":"0.4.0"}"#, SpecVersion::V1_1_0).unwrap_err().message(),
        "could not parse prevResult: result type supports [1.0.0 1.1.0] but unmarshalled CNIVersion is \"0.4.0\""
    );
    assert_eq!(
        prev(r#"{"cniVersion":"0.4.0"}"#, SpecVersion::V0_1_0).unwrap_err().message(),
        "could not parse prevResult: result type supports [ 0.1.0 0.2.0] but unmarshalled CNIVersion is \"0.4.0\""
    );
}

#[test]
fn errors_name_the_invalid_member() {
    let bad = |text: &str| {
        let json = Json::parse(text.as_bytes()).unwrap();
        CniResult::decode(&json, SpecVersion::NEWEST).unwrap_err()
    };
    assert_eq!(
        bad(r#"{"routes":[{"dst":"10.0.0.0/8","gw":"x"}]}"#).message(),
        "invalid IP address: x"
    );
    assert_eq!(bad(r#"{"routes":[{"gw":"1.1.1.1"}]}"#).message(), "the key \"dst\" is missing");
    assert_eq!(bad(r#"{"ips":[{"address":"1.2.3"}]}"#).message(), "invalid CIDR address: 1.2.3");
    assert!(bad(r#"{"interfaces":[null]}"#).details().contains("interfaces[0]"));
}

#[test]
fn numbers_rewritten_by_a_runtime_pass() {
    let text = r#"{"cniVersion":"1.1.0","routes":[{"dst":"::/0","mtu":1.4e3,"table":1.0}]}"#;
    let result = decode(text);
    assert_eq!((result.routes[0].mtu, result.routes[0].table), (Some(1400), Some(1)));
}
