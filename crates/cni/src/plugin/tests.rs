//! The skeleton, around a plugin that records its calls.

use std::cell::RefCell;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde::Deserialize;

use super::*;
use crate::error::ErrorCode;

thread_local! {
    static CALLS: RefCell<Vec<String>> = RefCell::default();
}

struct Recorder;

#[derive(Deserialize)]
#[serde(default)]
struct Keys {
    mtu: u32,
}

impl Default for Keys {
    fn default() -> Keys {
        Keys { mtu: 1500 }
    }
}

fn record(what: &str, network: &Network<Keys>) {
    CALLS.with_borrow_mut(|calls| {
        calls.push(format!("{what} {} mtu {}", network.version, network.keys.mtu));
    });
}

impl Plugin for Recorder {
    const NAME: &'static str = "recorder";
    const VERSIONS: &'static [SpecVersion] =
        &[SpecVersion::V0_2_0, SpecVersion::V1_0_0, SpecVersion::V1_1_0];
    type Keys = Keys;

    fn add(network: &Network<Keys>, _: &Attachment) -> Result<CniResult> {
        record("add", network);
        network.run_ipam(CniVerb::Add).map(Option::unwrap_or_default)
    }

    fn check(network: &Network<Keys>, attachment: &Attachment) -> Result<()> {
        record("check", network);
        attachment.require_prev_result().map(drop)
    }

    fn del(network: &Network<Keys>, attachment: &Attachment) -> Result<()> {
        let what = if attachment.netns.is_empty() { "del without a namespace" } else { "del" };
        record(what, network);
        Ok(())
    }

    fn gc(network: &Network<Keys>, valid: &[ValidAttachment]) -> Result<()> {
        record(&format!("gc {}", valid.len()), network);
        Ok(())
    }
}

/// The outcome of a call, and the calls of the plugin's functions.
fn call(verb: CniVerb, path: &str, request: &str) -> (Result<Option<CniResult>>, Vec<String>) {
    let env = CallEnvironment {
        container_id: "c1".into(),
        netns: "/run/netns/c1".into(),
        ifname: "eth0".into(),
        path: path.into(),
        ..CallEnvironment::default()
    };
    let outcome = run::<Recorder>(&env.with_verb(verb), request.as_bytes());
    (outcome, CALLS.take())
}

#[test]
fn an_add_whose_result_the_version_lacks_is_undone() {
    let (outcome, calls) =
        call(CniVerb::Add, "/none", r#"{"cniVersion": "0.2.0", "name": "n", "type": "recorder"}"#);
    assert!(outcome.is_err());
    assert_eq!(calls, ["add 0.2.0 mtu 1500", "del 0.2.0 mtu 1500"]);
    let (outcome, calls) =
        call(CniVerb::Add, "/none", r#"{"cniVersion": "1.0.0", "name": "n", "type": "recorder"}"#);
    assert_eq!(outcome.unwrap().unwrap().version, SpecVersion::V1_0_0);
    assert_eq!(calls, ["add 1.0.0 mtu 1500"]);
}

#[test]
fn del_goes_on_with_what_decodes() {
    let request = r#"{"cniVersion": "9.9.9", "name": "n", "type": "recorder", "mtu": "big", "prevResult": 7}"#;
    let (outcome, calls) = call(CniVerb::Del, "/none", request);
    assert_eq!((outcome, calls), (Ok(None), vec!["del 1.1.0 mtu 1500".to_owned()]));
    for verb in [CniVerb::Add, CniVerb::Check, CniVerb::Status] {
        let (outcome, calls) = call(verb, "/none", request);
        assert!(outcome.is_err() && calls.is_empty(), "{verb:?}");
    }
    let request = r#"{"cniVersion": "1.1.0", "name": "n", "type": "recorder", "mtu": "big"}"#;
    let (outcome, calls) = call(CniVerb::Add, "/none", request);
    assert_eq!((outcome.unwrap_err().code(), calls.len()), (ErrorCode::DECODE, 0));
}

#[test]
fn gc_without_a_list_removes_nothing() {
    let (outcome, calls) =
        call(CniVerb::Gc, "/none", r#"{"cniVersion": "1.1.0", "name": "n", "type": "recorder"}"#);
    assert_eq!((outcome, calls.len()), (Ok(None), 0));
    let empty = r#"{"cniVersion": "1.1.0", "name": "n", "type": "recorder", "cni.dev/valid-attachments": []}"#;
    assert_eq!(call(CniVerb::Gc, "/none", empty).1, ["gc 0 1.1.0 mtu 1500"]);
}

#[test]
fn the_ipam_plugin_gets_the_call() {
    let dir = tempfile::tempdir().unwrap();
    let plugin = dir.path().join("pool");
    let script = "#!/bin/sh\ngrep -q '\"mtu\": 9' && echo '{\"ips\": [{\"address\": \"10.1.2.3/24\"}]}'\n\
        echo \"$CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME\" > \"$CNI_PATH/seen\"\n";
    fs::write(&plugin, script).unwrap();
    fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755)).unwrap();
    let request = r#"{"cniVersion": "1.1.0", "name": "n", "type": "recorder", "mtu": 9, "ipam": {"type": "pool"}}"#;
    let (outcome, _) = call(CniVerb::Add, &dir.path().display().to_string(), request);
    assert_eq!(outcome.unwrap().unwrap().all_addresses().len(), 1);
    assert_eq!(fs::read_to_string(dir.path().join("seen")).unwrap(), "ADD c1 eth0\n");
    let (outcome, _) = call(CniVerb::Add, "/none", request);
    assert!(outcome.unwrap_err().message().starts_with("failed to find plugin \"pool\""));
}

#[test]
fn a_container_in_the_plugins_own_namespace_is_refused() {
    let request = br#"{"cniVersion": "1.1.0", "name": "n", "type": "recorder"}"#;
    let env = CallEnvironment {
        container_id: "c1".into(),
        netns: "/proc/thread-self/ns/net".into(),
        ifname: "eth0".into(),
        path: "/none".into(),
        ..CallEnvironment::default()
    };
    let error = run::<Recorder>(&env.with_verb(CniVerb::Add), request).unwrap_err();
    assert_eq!((error.code(), CALLS.take().len()), (ErrorCode::INVALID_NETNS, 0));
    assert_eq!(run::<Recorder>(&env.with_verb(CniVerb::Del), request), Ok(None));
    assert_eq!(CALLS.take(), ["del without a namespace 1.1.0 mtu 1500"]);
    let allowed = CallEnvironment { netns_override: "1".into(), ..env };
    assert!(run::<Recorder>(&allowed.with_verb(CniVerb::Add), request).is_ok());
}

#[test]
fn del_and_gc_get_the_default_of_keys_that_do_not_decode() {
    #[derive(Default, Deserialize)]
    struct Strict {
        required: String,
    }
    struct Demanding;
    impl Plugin for Demanding {
        const NAME: &'static str = "demanding";
        type Keys = Strict;

        fn add(_: &Network<Strict>, _: &Attachment) -> Result<CniResult> {
            Ok(CniResult::new())
        }

        fn check(_: &Network<Strict>, _: &Attachment) -> Result<()> {
            Ok(())
        }

        fn del(network: &Network<Strict>, _: &Attachment) -> Result<()> {
            CALLS.with_borrow_mut(|calls| calls.push(format!("del {:?}", network.keys.required)));
            Ok(())
        }
    }
    let env = CallEnvironment {
        container_id: "c1".into(),
        netns: "/none".into(),
        ifname: "eth0".into(),
        path: "/none".into(),
        ..CallEnvironment::default()
    };
    for wrong in ["", r#", "required": 7"#] {
        let request =
            format!(r#"{{"cniVersion": "1.1.0", "name": "n", "type": "demanding"{wrong}}}"#);
        let outcome = run::<Demanding>(&env.with_verb(CniVerb::Del), request.as_bytes());
        assert_eq!((outcome, CALLS.take()), (Ok(None), vec!["del \"\"".to_owned()]));
        assert!(run::<Demanding>(&env.with_verb(CniVerb::Add), request.as_bytes()).is_err());
    }
}
