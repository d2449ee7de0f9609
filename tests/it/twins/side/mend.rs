//! What the reference does wrong at DEL, by rows of docs/parity.md, is put right, so that the nodes
//! can be compared further: see [`MENDED`].

use super::super::plan::{By, Extra, Place};
use super::{Known, Machine, Plugins, addresses};

/// The rows.
pub(in super::super) const MENDED: [&str; 2] = [
    "DEL without namespace, interface and prevResult",
    "rules of an address that two attachments have",
];

impl Machine<'_> {
    /// The attachment is over, for the runtime; its addresses.
    pub(super) fn forget(&mut self, place: Place) -> Vec<String> {
        self.replaced.retain(|(other, _)| *other != place);
        let result = self.known.get_mut(&place).and_then(|known| known.result.take());
        result.as_ref().map(addresses).unwrap_or_default()
    }

    /// A DEL has succeeded.
    pub(super) fn deleted(&mut self, place: Place, by: By) {
        let is_restarted = self.replaced.iter().any(|(other, _)| *other == place);
        let own = self.forget(place);
        let Known { net, is_dead, .. } = self.known[&place];
        if self.plan.networks[net].has(Extra::Firewall) {
            self.accept_again(&own, by);
        }
        if self.is_ours(by) {
            return;
        }
        if self.plugins == Plugins::Cnibox {
            self.handed.push(format!("twin-{}", place.pod));
            self.handed.extend(own.iter().cloned());
        }
        if is_dead || is_restarted {
            self.end_masquerade(place, net);
        }
    }

    fn end_masquerade(&self, place: Place, net: usize) {
        let owner =
            format!(r#"name: \"{}\" id: \"twin-{}\""#, self.plan.networks[net].name, place.pod);
        let rules = self.node.sh("iptables -t nat -S POSTROUTING");
        let rules = rules.lines().filter(|line| line.contains(&owner));
        for rule in rules.filter_map(|line| line.strip_prefix("-A ")) {
            let chain = rule.rsplit(' ').next().unwrap();
            self.node.sh(&format!("iptables -t nat -D {rule} && iptables -t nat -F {chain}"));
            self.node.sh(&format!("iptables -t nat -X {chain} 2>/dev/null || true"));
        }
    }

    /// For the other owners of these addresses: cnibox knows of those that it has attached itself.
    fn accept_again(&self, deleted: &[String], by: By) {
        if self.node.sh("iptables -S CNI-FORWARD 2>/dev/null || true").is_empty() {
            // All rules were flushed.
            return;
        }
        let (alive, _) = self.held();
        let is_deleted = |known: &Known| !(self.is_ours(by) && self.is_ours(known.by));
        let has_rules =
            |known: &Known| self.plan.networks[known.net].has(Extra::Firewall) && is_deleted(known);
        let alive = alive.iter().filter(|(_, known, _)| has_rules(known));
        for addr in alive.flat_map(|(.., own)| own).filter(|addr| deleted.contains(addr)) {
            let established =
                format!("-d {addr} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT");
            for rule in [established, format!("-s {addr} -j ACCEPT")] {
                let rule = format!("CNI-FORWARD {rule}");
                self.node.sh(&format!("iptables -C {rule} 2>/dev/null || iptables -A {rule}"));
            }
        }
    }
}
