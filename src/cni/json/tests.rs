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
fn nothing_is_coerced_and_the_place_is_named() {
    for bad in [r#"{"mtu":"5"}"#, r#"{"mtu":1.0}"#, r#"{"mtu":-1}"#, r#"{"isGateway":"true"}"#] {
        assert!(decode(bad).is_err(), "{bad}");
    }
    let error = decode(r#"{"list":[{},{"type":7}]}"#).unwrap_err();
    assert_eq!(error.details(), r#"in "list[1].type": put it into double quotes"#);
    assert!(decode(r#"{"list":[null]}"#).is_err());
    assert!(decode(r#"{"ipam":7}"#).is_err());
}

/// The words of a document's author: no names of this program's types.
#[test]
fn wrong_types_are_told_in_the_authors_words() {
    for (text, msg, details) in [
        (
            r#"{"ipam":"host-local"}"#,
            "expected an object, found the text \"host-local\"",
            r#"in "ipam": write the type as {"type": "host-local"}"#,
        ),
        (
            r#"{"ipam":[{}]}"#,
            "expected an object, found a list",
            r#"in "ipam": write one object, without the brackets around it"#,
        ),
        (
            r#"{"ipam":{"type":7}}"#,
            "expected a text, found the number 7",
            r#"in "ipam.type": put it into double quotes"#,
        ),
        (
            r#"{"ipam":{"type":["x"]}}"#,
            "expected a text, found a list",
            r#"in "ipam.type": write a text, without brackets"#,
        ),
        (r#"{"ipam":{"dataDir":{}}}"#, "expected a text, found an object", r#"in "ipam.dataDir""#),
        (
            r#"{"mtu":"1500"}"#,
            "expected a whole number from 0 to 4294967295, found the text \"1500\"",
            r#"in "mtu": write 1500, without quotes"#,
        ),
        (
            r#"{"mtu":"10M"}"#,
            "expected a whole number from 0 to 4294967295, found the text \"10M\"",
            r#"in "mtu": write a number in digits, without quotes and unit"#,
        ),
        (
            r#"{"mtu":1500.0}"#,
            "expected a whole number from 0 to 4294967295, found the number 1500.0",
            r#"in "mtu": write 1500"#,
        ),
        (
            r#"{"mtu":1.5}"#,
            "expected a whole number from 0 to 4294967295, found the number 1.5",
            r#"in "mtu""#,
        ),
        (
            r#"{"mtu":-1}"#,
            "expected a whole number from 0 to 4294967295, found the number -1",
            r#"in "mtu""#,
        ),
        (
            r#"{"isGateway":"true"}"#,
            "expected true or false, found the text \"true\"",
            r#"in "isGateway": write true, without quotes"#,
        ),
        (
            r#"{"isGateway":"No"}"#,
            "expected true or false, found the text \"No\"",
            r#"in "isGateway": write false, without quotes"#,
        ),
        (
            r#"{"isGateway":1}"#,
            "expected true or false, found the number 1",
            r#"in "isGateway": write true"#,
        ),
        (
            r#"{"list":{}}"#,
            "expected a list, found an object",
            r#"in "list": put it into brackets, [...]"#,
        ),
        (
            r#"{"list":[null]}"#,
            "expected an object, found null",
            r#"in "list[0]": remove the null"#,
        ),
        (r#"{"capabilities":true}"#, "expected an object, found true", r#"in "capabilities""#),
    ] {
        let error = decode(text).unwrap_err();
        assert_eq!((error.msg(), error.details()), (msg, details), "{text}");
    }
    assert_eq!(Json::Null.expected("an object"), "expected an object, found null");
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
    assert_eq!(compact(&json).unwrap(), text);
    let json = Json::parse(br#"{"a":1.0,"b":[1e3,2.5]}"#).unwrap().normalised();
    assert_eq!(compact(&json).unwrap(), r#"{"a":1,"b":[1000,2.5]}"#);
}

#[test]
fn output_is_the_references() {
    let json =
        Json::parse(r#"{"b":[1,{"x":"<&>\u2028\u2029ä\""}],"a":{},"c":[]}"#.as_bytes()).unwrap();
    assert_eq!(
        compact(&json).unwrap(),
        r#"{"b":[1,{"x":"\u003c\u0026\u003e\u2028\u2029ä\""}],"a":{},"c":[]}"#
    );
    assert_eq!(
        pretty(&json.sorted()).unwrap().lines().take(3).collect::<Vec<_>>(),
        ["{", "    \"a\": {},", "    \"b\": ["]
    );
}

#[test]
fn not_json() {
    for bad in ["", "{", "{}x", "\u{feff}{}", "{\"a\":1,}"] {
        assert!(Json::parse(bad.as_bytes()).is_err(), "{bad:?}");
    }
}

#[test]
fn invalid_utf8_is_replaced_in_strings_only() {
    let text = |bytes: &[u8]| Json::parse(bytes).map(|json| compact(&json).unwrap());
    assert_eq!(text(b"{\"a\":\"x\xffy\"}").unwrap(), "{\"a\":\"x\u{fffd}y\"}");
    // One for each byte, also of a character that is cut off.
    assert_eq!(text(b"[\"\xe2\x82\"]").unwrap(), "[\"\u{fffd}\u{fffd}\"]");
    assert!(text(b"[\xff]").is_err() && text(b"\xff[]").is_err());
}

#[test]
fn merging_goes_all_the_way_down() {
    let text = r#"{"a":{"b":{"c":1}},"A":7,"a":{"B":{"d":2},"x":{}},"A":{"b":{"c":3}}}"#;
    let json = Json::parse(text.as_bytes()).unwrap();
    let merged = r#"{"a":{"b":{"c":1,"d":2,"c":3},"x":{}},"A":7}"#;
    assert_eq!(compact(&json).unwrap(), merged);
}

/// Instructions would be counted if they could be; the processor's time of this thread is next to it.
#[test]
fn many_keys_take_time_in_proportion() {
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
