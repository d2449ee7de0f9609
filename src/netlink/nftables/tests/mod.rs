//! Tests of the packet filter with the real kernel, each in its own network namespace; objects are
//! compared with the output of `nft list ruleset`.

mod changes;
mod elements;
mod rules;
mod sets;
mod timed;
mod traffic;

use std::net::IpAddr;
use std::process::Command;

use super::*;
use crate::netns::{Netns, isolate_test_thread};

const T: NftTable<'_> = NftTable::new_inet("t").with_comment("the table");
const PRE: NftChain<'_> = T.named_chain("pre").at_nat_hook(NetfilterHook::Prerouting, DSTNAT);
const POST: NftChain<'_> = T.named_chain("post").at_nat_hook(NetfilterHook::Postrouting, SRCNAT);
const REGULAR: NftChain<'_> = T.named_chain("regular").with_comment("a chain");
const DNAT4: NftSet<'_> = T.value_map(
    "dnat4",
    &[ValueType::Ipv4Addr, ValueType::InetProto, ValueType::InetService],
    &[ValueType::Ipv4Addr, ValueType::InetService],
);
const PODS: NftSet<'_> = T.named_set("pods", &[ValueType::Ipv4Addr]);
const NAMES: NftSet<'_> = T.verdict_map("names", &[ValueType::IfName]);
const NETS: NftSet<'_> = T.named_set("nets", &[ValueType::Ipv4Addr]);

fn sandbox() -> NftSocket {
    isolate_test_thread();
    NftSocket::open().unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Runs nft in the namespace of the calling thread.
fn nft(args: &[&str]) -> String {
    let output = Command::new("nft").args(args).output().expect("nft is not installed");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "nft {args:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

fn ruleset() -> String {
    nft(&["list", "ruleset"])
}

/// The rules of the only chain with rules, without indentation.
fn listed(chain: &str) -> Vec<String> {
    let text = nft(&["list", "chain", "inet", "t", chain]);
    let body = text.split_once("chain ").unwrap().1;
    let lines = body.lines().skip(1).map(str::trim);
    let rules =
        lines.filter(|l| !l.starts_with("type ") && !l.starts_with("comment ") && *l != "}");
    rules.filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

fn base(batch: &mut NftBatch) {
    batch.ensure_object(T).ensure_object(PRE).ensure_object(POST).ensure_object(REGULAR);
    batch.ensure_object(DNAT4).ensure_object(PODS).ensure_object(NAMES).ensure_object(NETS);
}

fn commit_base(nft: &NftSocket) {
    let mut batch = NftBatch::new();
    base(&mut batch);
    nft.commit_batch(batch).unwrap();
}

fn one(fill: impl FnOnce(&mut NftBatch)) -> NftBatch {
    let mut batch = NftBatch::new();
    fill(&mut batch);
    batch
}
