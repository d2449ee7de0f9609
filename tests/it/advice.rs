//! Advice in messages is followed as it is written: afterwards the trouble is gone, what worked
//! before still works, and nothing is open that was closed.
//!
//! The situations and the messages are those of `golden/messages.json`. `follow` is the advice as a
//! command line, followed by the call again; where the advice has alternatives, one line each.
//! Beside the network `pods` of the mistake the node has a network `neighbours` with a container,
//! and rules of its administrator that stop what comes from `pods` to this container.

use std::collections::BTreeSet;

use crate::messages::{Mistake, mistakes};

/// Before the mistake: the neighbour, the administrator's rules, and words for the command lines.
const BEFORE: &str = r#"
again() { cnitool del pods NETNS >/dev/null 2>&1; cnitool add pods NETNS "$@"; }
lint() { cnibox lint --offline DIR/net.d; }
conf() { cat >DIR/net.d/10-pods.conflist; }
sound() { echo '{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","bridge":"cni0"'"$1"'}]}' | conf; }
check() { cnitool check pods NETNS; }
resolver() {
  cnibox egress resolver --upstream ${1-127.0.0.1} >/dev/null 2>DIR/resolver &
  trap "kill $!" EXIT
  until grep -q ready DIR/resolver; do sleep 0.05; done
}
obey() {
  for i in 1 2 3; do
    l=$(check 2>&1) && return
    case $l in *"in the container: "*) place="nsenter --net=NETNS" ;; *) place= ;; esac
    $place sh -c "${l##*[:;] }"
  done
  check
}
nb() { NETCONFPATH=DIR/nb.d CNI_PATH=DIR/nb.bin DIR/nb.bin/cnitool "$1" neighbours /run/netns/nb --cache-dir DIR/nb.cache; }
closed() { nft list ruleset 2>/dev/null | grep -o 'hook forward.*policy [a-z]*'; nft list table inet guard; }
mkdir DIR/nb.d DIR/nb.bin
for p in bridge host-local cnitool cnibox; do ln -s $(readlink -f BIN/cnibox) DIR/nb.bin/$p; done
echo '{"cniVersion":"1.1.0","name":"neighbours","plugins":[{"type":"bridge","bridge":"nb0","isGateway":true,"ipam":
{"type":"host-local","dataDir":"DIR/nb.leases","ranges":[[{"subnet":"10.77.0.0/24"}]]}}]}' >DIR/nb.d/10-nb.conflist
ip netns add nb && nb add >/dev/null || exit 90
nft -f - <<'X' || exit 91
table inet guard {
  chain forward { type filter hook forward priority -10; policy accept; ip saddr 10.88.0.0/16 ip daddr 10.77.0.0/24 drop; }
}
X
closed >DIR/closed
"#;

/// After the advice was followed.
const AFTER: &str = r#"
followed=$?
[ $followed = 0 ] || { echo "the trouble is not gone: status $followed" >&2; exit 92; }
nb check && ip netns exec nb ping -qc1 -W2 10.77.0.1 >/dev/null || { echo "the neighbour is cut off" >&2; exit 93; }
closed >DIR/open; grep -vxFf DIR/open DIR/closed >&2 && { echo "this is open now" >&2; exit 94; }
nsenter --net=NETNS ping -qc1 -W0.3 10.77.0.2 >/dev/null 2>&1 && { echo "the neighbour is open now" >&2; exit 95; }
exit 0
"#;

impl Mistake {
    /// Makes the mistake, follows the advice by `line`, and looks at the node.
    fn follow(&self, line: &str) -> Option<String> {
        let mistake = &self.run;
        let script = format!("{BEFORE}\n( {mistake}\n) >DIR/said 2>&1\n{line}\n{AFTER}");
        let outcome = self.run(&script);
        let told = format!("{}\n{}", outcome.stdout, outcome.stderr);
        (outcome.status != Some(0))
            .then(|| format!("{}: {line}: {:?}: {told}", self.mistake, outcome.status))
    }
}

/// Follows the advice of every fourth mistake, starting with `first`.
fn follow(first: usize) {
    let mut failed = Vec::new();
    for mistake in mistakes().iter().skip(first).step_by(4) {
        if mistake.of_kernel {
            println!("skipped: {}: another kernel", mistake.mistake);
            continue;
        }
        failed.extend(mistake.follow.iter().filter_map(|line| mistake.follow(line)));
    }
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn advice_can_be_followed() {
    follow(0);
}

#[test]
fn advice_can_be_followed_2() {
    follow(1);
}

#[test]
fn advice_can_be_followed_3() {
    follow(2);
}

#[test]
fn advice_can_be_followed_4() {
    follow(3);
}

/// Each advice is followed, or the reason why not is given.
#[test]
fn every_mistake_has_followed_advice_or_a_reason() {
    let all = mistakes();
    let mut names = BTreeSet::new();
    for Mistake { mistake, follow, unfollowed, .. } in &all {
        assert!(names.insert(mistake), "{mistake}: twice");
        let is_told = follow.is_empty() != unfollowed.is_empty();
        assert!(is_told, "{mistake}: give \"follow\" or \"unfollowed\"");
    }
    let followed = all.iter().filter(|mistake| !mistake.follow.is_empty()).count();
    assert!(followed * 10 >= all.len() * 8, "{followed} of {}", all.len());
}
