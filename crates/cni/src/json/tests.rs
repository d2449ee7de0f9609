//! The decoding rules callers rely on, and output to the byte.

use std::collections::BTreeMap;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use serde::Deserialize;

use super::*;

#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", default)]
struct Conf {
    is_gateway: bool,
    mtu: Option<u32>,
    ipam: Ipam,
    list: Vec<Ipam>,
    capabilities: BTreeMap<String, bool>,
}

#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", default)]
struct Ipam {
    r#type: String,
    data_dir: Option<String>,
}

fn decode(text: &str) -> Result<Conf> {
    Json::parse(text.as_bytes()).unwrap().decode()
}

#[test]
fn keys_match_in_any_case_and_the_last_wins() {
    let conf = decode(r#"{"ISGATEWAY":true,"Mtu":1,"mtu":2,"MTU":3,"unknown":[{}]}"#).unwrap();
    assert_eq!((conf.is_gateway, conf.mtu), (true, Some(3)));
    assert_eq!(decode(r#"{"mtu":1,"MTU":null}"#).unwrap().mtu, Some(1));
}

#[test]
fn repeated_objects_merge() {
    let conf = decode(r#"{"ipam":{"type":"x","dataDir":"/a"},"IPAM":{"DATADIR":"/b"}}"#).unwrap();
    assert_eq!(conf.ipam, Ipam { r#type: "x".into(), data_dir: Some("/b".into()) });
    let conf = decode(r#"{"ipam":{"type":"x"},"ipam":{"type":"y"}}"#).unwrap();
    assert_eq!(conf.ipam.r#type, "y");
}

#[test]
fn null_is_absent() {
    assert_eq!(
        decode(r#"{"isGateway":null,"mtu":null,"ipam":null,"list":null}"#).unwrap(),
        Conf::default()
    );
}

#[test]
fn types_are_not_converted_and_errors_name_the_place() {
    for bad in [r#"{"mtu":"5"}"#, r#"{"mtu":1.0}"#, r#"{"mtu":-1}"#, r#"{"isGateway":"true"}"#] {
        assert!(decode(bad).is_err(), "{bad}");
    }
    let error = decode(r#"{"list":[{},{"type":7}]}"#).unwrap_err();
    assert_eq!(error.details(), r#"in "list[1].type": put it into double quotes"#);
    assert!(decode(r#"{"list":[null]}"#).is_err());
    assert!(decode(r#"{"ipam":7}"#).is_err());
}

/// Values, each with the message and the details for its key.
const WRONG_TYPES: &str = r#"
{"ipam":"host-local"} | expected an object, found the text "host-local" | in "ipam": write the type as {"type": "host-local"}
{"ipam":[{}]} | expected an object, found a list | in "ipam": write one object, without the brackets around it
{"ipam":{"type":7}} | expected a text, found the number 7 | in "ipam.type": put it into double quotes
{"ipam":{"type":["x"]}} | expected a text, found a list | in "ipam.type": write a text, without brackets
{"ipam":{"dataDir":{}}} | expected a text, found an object | in "ipam.dataDir"
{"mtu":"1500"} | expected BYTES, found the text "1500" | in "mtu": write 1500, without quotes
{"mtu":"10M"} | expected BYTES, found the text "10M" | in "mtu": write a number in digits, without quotes and unit
{"mtu":1500.0} | expected BYTES, found the number 1500.0 | in "mtu": write 1500
{"mtu":1.5} | expected BYTES, found the number 1.5 | in "mtu"
{"mtu":-1} | expected BYTES, found the number -1 | in "mtu"
{"isGateway":"true"} | expected true or false, found the text "true" | in "isGateway": write true, without quotes
{"isGateway":"No"} | expected true or false, found the text "No" | in "isGateway": write false, without quotes
{"isGateway":1} | expected true or false, found the number 1 | in "isGateway": write true
{"list":{}} | expected a list, found an object | in "list": put it into brackets, [...]
{"list":[null]} | expected an object, found null | in "list[0]": remove the null
{"capabilities":true} | expected an object, found true | in "capabilities"
"#;

/// Messages have the terms of JSON, not the names of this program's types.
#[test]
fn errors_of_wrong_types_use_the_words_of_json() {
    for line in WRONG_TYPES.lines().skip(1) {
        let line = line.replace("BYTES", "a whole number from 0 to 4294967295");
        let parts: Vec<&str> = line.split(" | ").collect();
        let error = decode(parts[0]).unwrap_err();
        assert_eq!((error.message(), error.details()), (parts[1], parts[2]), "{line}");
    }
    assert_eq!(Json::Null.wrong_type_message("an object"), "expected an object, found null");
}

#[test]
fn maps_keep_their_keys() {
    let conf = decode(r#"{"capabilities":{"portMappings":true,"IPS":false}}"#).unwrap();
    assert_eq!(conf.capabilities.keys().collect::<Vec<_>>(), ["IPS", "portMappings"]);
}

#[test]
fn numbers_stay_exact() {
    let text =
        r#"{"a":18446744073709551615,"b":-9223372036854775808,"c":9007199254740993,"d":0.5}"#;
    let json = Json::parse(text.as_bytes()).unwrap();
    assert_eq!(encode_compact(&json).unwrap(), text);
    let json = Json::parse(br#"{"a":1.0,"b":[1e3,2.5]}"#).unwrap().with_normalised_numbers();
    assert_eq!(encode_compact(&json).unwrap(), r#"{"a":1,"b":[1000,2.5]}"#);
}

#[test]
fn output_equals_that_of_the_reference() {
    let json =
        Json::parse(r#"{"b":[1,{"x":"<&>\u2028\u2029ä\""}],"a":{},"c":[]}"#.as_bytes()).unwrap();
    assert_eq!(
        encode_compact(&json).unwrap(),
        r#"{"b":[1,{"x":"\u003c\u0026\u003e\u2028\u2029ä\""}],"a":{},"c":[]}"#
    );
    assert_eq!(
        encode_pretty(&json.with_sorted_keys()).unwrap().lines().take(3).collect::<Vec<_>>(),
        ["{", "    \"a\": {},", "    \"b\": ["]
    );
}

#[test]
fn texts_that_are_not_json_are_refused() {
    for bad in ["", "{", "{}x", "\u{feff}{}", "{\"a\":1,}"] {
        assert!(Json::parse(bad.as_bytes()).is_err(), "{bad:?}");
    }
}

#[test]
fn invalid_utf8_is_replaced_in_strings_only() {
    let text = |bytes: &[u8]| Json::parse(bytes).map(|json| encode_compact(&json).unwrap());
    assert_eq!(text(b"{\"a\":\"x\xffy\"}").unwrap(), "{\"a\":\"x\u{fffd}y\"}");
    // Each invalid byte becomes one U+FFFD, also the bytes of an incomplete character.
    assert_eq!(text(b"[\"\xe2\x82\"]").unwrap(), "[\"\u{fffd}\u{fffd}\"]");
    assert!(text(b"[\xff]").is_err() && text(b"\xff[]").is_err());
}

#[test]
fn nested_objects_are_merged() {
    let text = r#"{"a":{"b":{"c":1}},"A":7,"a":{"B":{"d":2},"x":{}},"A":{"b":{"c":3}}}"#;
    let json = Json::parse(text.as_bytes()).unwrap();
    let merged = r#"{"a":{"b":{"c":1,"d":2,"c":3},"x":{}},"A":7}"#;
    assert_eq!(encode_compact(&json).unwrap(), merged);
}

/// The CPU time of this thread, because instructions cannot be counted everywhere.
#[test]
fn decoding_time_is_linear_in_the_number_of_keys() {
    let object = |count: usize| {
        let members = |value: &str| {
            let members = (0..count).map(|n| format!("\"k{n}\":{value}"));
            members.collect::<Vec<_>>().join(",")
        };
        format!("{{{0},\"z\":{{{0}}},\"z\":{{{0}}}}}", members("{}")).into_bytes()
    };
    let time = |text: &[u8]| {
        let clock = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap());
        let measure = |_| {
            let start = clock();
            Json::parse(text).unwrap();
            clock().saturating_sub(start)
        };
        (0..3).map(measure).min().unwrap()
    };
    let (few, many) = (time(&object(1_000)), time(&object(16_000)));
    // 256 times if it were quadratic.
    assert!(many < few * 64, "{few:?} {many:?}");
}

/// As records have them; configurations have none.
#[test]
fn variants_with_data_are_decoded() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum Condition {
        All,
        Name(String),
        Range(u16, u16),
        Port { first: u16, last: Option<u16> },
    }
    let all = vec![
        Condition::All,
        Condition::Name("eth0".to_owned()),
        Condition::Range(1, 2),
        Condition::Port { first: 1, last: None },
    ];
    assert_eq!(Json::encode(&all).decode::<Vec<Condition>>().unwrap(), all);
    let unknown = Json::parse(br#"{"Else": 1}"#).unwrap().decode::<Condition>();
    assert!(unknown.is_err());
}
