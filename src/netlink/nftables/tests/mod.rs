//! Tests of the packet filter with the real kernel, each in its own network namespace; objects are
//! compared with the output of `nft list ruleset`.

mod changes;
mod elements;
mod rules;
mod traffic;

use std::net::IpAddr;
use std::process::Command;

use super::*;
use crate::netns::{Netns, isolate};

const T: Table<'_> = Table::inet("t").comment("the table");
const PRE: Chain<'_> = T.chain("pre").nat(Hook::Prerouting, DSTNAT);
const POST: Chain<'_> = T.chain("post").nat(Hook::Postrouting, SRCNAT);
const REGULAR: Chain<'_> = T.chain("regular").comment("a chain");
const DNAT4: Set<'_> = T.map(
    "dnat4",
    &[Type::Ipv4Addr, Type::InetProto, Type::InetService],
    &[Type::Ipv4Addr, Type::InetService],
);
const PODS: Set<'_> = T.set("pods", &[Type::Ipv4Addr]);
const NAMES: Set<'_> = T.vmap("names", &[Type::IfName]);
const NETS: Set<'_> = T.set("nets", &[Type::Ipv4Addr]);

fn sandbox() -> Nft {
    isolate();
    Nft::open().unwrap()
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

fn base(batch: &mut Batch) {
    batch.ensure(T).ensure(PRE).ensure(POST).ensure(REGULAR);
    batch.ensure(DNAT4).ensure(PODS).ensure(NAMES).ensure(NETS);
}

fn commit_base(nft: &Nft) {
    let mut batch = Batch::new();
    base(&mut batch);
    nft.commit(batch).unwrap();
}

fn one(fill: impl FnOnce(&mut Batch)) -> Batch {
    let mut batch = Batch::new();
    fill(&mut batch);
    batch
}
