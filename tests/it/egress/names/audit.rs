//! What `cnibox egress ls` lists of names; in the mode audit all are answered with all their
//! addresses.

use std::fs;

use fs2::FileExt;
use serde_json::{Value, json};

use super::wire::{A, NOERROR, Record, SERVFAIL};
use super::{Inside, Site, names};
use crate::support::net::merged;
use crate::support::node::eventually;

const NAME: &str = "api.example.org";
/// Addresses to which a name leads, of which an enforced policy opens the last one.
const LED_TO: [&str; 3] = ["10.9.0.2", "169.254.169.254", "192.0.2.7"];

fn audited() -> Value {
    merged(&names(), &json!({"mode": "audit"}))
}

fn lead(site: &Site) {
    let other = Record::address("other.example.org", "203.0.113.15");
    let zone = LED_TO.iter().map(|ip| Record::address(NAME, ip)).chain([other]);
    site.upstream.serve(zone.collect::<Vec<_>>());
}

#[test]
fn an_audited_policy_answers_all_and_lists_it() {
    for kind in ["bridge", "ptp"] {
        let site = Site::new();
        let inside = site.attach(kind, "c1", Some(&audited()));
        lead(&site);
        inside.finds(NAME, &LED_TO);
        inside.finds("other.example.org", &["203.0.113.15"]);
        for ip in ["192.0.2.7", "203.0.113.15", "10.9.0.2"] {
            assert!(inside.reaches(ip, 443), "{kind}: {ip}");
        }
        let noted = |name: &str, count| (name.to_owned(), "noted".to_owned(), count);
        let expected = [noted(NAME, LED_TO.len()), noted("other.example.org", 1)];
        eventually("the names are listed", || site.listed_names() == expected);
    }
}

#[test]
fn an_enforced_policy_lists_where_names_must_not_lead() {
    let site = Site::new();
    let inside = site.attach("bridge", "c1", Some(&names()));
    lead(&site);
    inside.finds(NAME, &LED_TO[2..]);
    inside.ask("other.example.org", A);
    let refused = |name: &str, count| (name.to_owned(), "refused".to_owned(), count);
    let expected = [refused(NAME, 2), refused("other.example.org", 0)];
    eventually("the names are listed", || site.listed_names() == expected);
    let line = format!("\"{NAME}\" must not lead container c1 to [10.9.0.2, 169.254.169.254]");
    assert!(fs::read_to_string(site.log()).unwrap().contains(&line));
}

/// Has the lock of the container's policy, as a call that changes it.
fn lock_policy() -> fs::File {
    let mut links = fs::read_dir("/run/cni/cnibox/egress").unwrap();
    let link = links.next().unwrap().unwrap().file_name().into_string().unwrap();
    let instance = link.strip_suffix(".json").unwrap();
    let path = format!("/run/cni/cnibox/turn-{instance}-egress.lock");
    let file = fs::File::create(path).unwrap();
    file.lock_exclusive().unwrap();
    file
}

/// An address that cannot be put in force is told in the mode audit only.
#[test]
fn what_is_not_in_force_is_told_in_the_mode_audit_only() {
    for is_audited in [true, false] {
        let site = Site::new();
        let keys = if is_audited { audited() } else { names() };
        let inside = site.attach("bridge", "c1", Some(&keys));
        lead(&site);
        let told = |inside: &Inside| {
            let answer = inside.ask(NAME, A);
            (answer.rcode(), answer.ips().len())
        };
        let lock = lock_policy();
        let expected = if is_audited { (NOERROR, LED_TO.len()) } else { (SERVFAIL, 0) };
        assert_eq!(told(&inside), expected, "{is_audited}");
        assert_eq!(inside.reaches("192.0.2.7", 443), is_audited);
        drop(lock);
        let expected = if is_audited { LED_TO.len() } else { 1 };
        // A process that another test has just started may have the file.
        eventually("the lock is free", || told(&inside) == (NOERROR, expected));
        assert!(inside.reaches("192.0.2.7", 443), "{is_audited}");
    }
}
