//! What an administrator does: damage, and the tools of cnibox.

use std::fs;

use serde_json::Value;

use super::super::plan::{By, Damage, Extra, Kind, Place};
use super::cache::uncache;
use super::{Held, Machine, Plugins};
use crate::support::conflist::Failed;
use crate::support::node::Call;

impl Machine<'_> {
    pub(super) fn damage(&self, damage: Damage) {
        match damage {
            Damage::Ruleset => drop(self.node.sh("nft flush ruleset")),
            Damage::Nat => drop(self.node.sh("iptables -t nat -F")),
            Damage::Bridge(name) => {
                drop(self.node.sh(&format!("ip link del {name} 2>/dev/null || true")));
            }
        }
        if self.plan.drops {
            self.node.sh("iptables -P FORWARD DROP");
        }
    }

    pub(super) fn cut_pair(&mut self, place: Place) {
        let is_its_own = |(name, owner): &(&String, &String)| {
            name.starts_with("veth") && **owner == place.to_string()
        };
        for (name, _) in self.owners.iter().filter(is_its_own) {
            self.node.sh(&format!("ip link del {name} 2>/dev/null || true"));
        }
        if let Some(known) = self.known.get_mut(&place) {
            known.is_dead = true;
        }
    }

    /// Damage, after which all is as before. What `repair` cannot restore, a link that is gone, it
    /// names, and goes on.
    pub(super) fn repair(&self, damage: Damage) -> Result<(), Failed> {
        if self.plugins == Plugins::Reference {
            return Ok(());
        }
        self.damage(damage);
        let outcome = self.node.cnibox(&["repair", "--plugin-path", &self.bin()]).run();
        let is_expected =
            outcome.status == Some(0) || !self.is_healthy && outcome.status == Some(1);
        is_expected.then_some(()).ok_or_else(|| failed("repair", format!("{outcome:?}")))
    }

    pub(super) fn doctor(&self) -> Result<(), Failed> {
        if self.plugins == Plugins::Reference {
            return Ok(());
        }
        let outcome = self.tool(&["doctor", "--json"]).run();
        let findings: Vec<Value> = serde_json::from_str(&outcome.stdout)
            .map_err(|e| failed("doctor", format!("{e}: {outcome:?}")))?;
        // The runtime's directory of networks is empty.
        let is_defect =
            |finding: &Value| finding["severity"] != "note" && finding["object"] != self.lists();
        let has_found = findings.iter().any(is_defect);
        let (alive, _) = self.held();
        let is_masqueraded = |(_, known, _): &Held<'_>| {
            known.by == By::Cnibox && self.plan.networks[known.net].has(Extra::Masquerade)
        };
        let is_lost = self.is_flushed && alive.iter().any(is_masqueraded);
        let assigned: Vec<String> = self.assigned().into_iter().map(|(.., addr)| addr).collect();
        let is_shared = (1..assigned.len()).any(|n| assigned[..n].contains(&assigned[n]));
        let is_healthy = self.is_healthy && !is_shared;
        if is_healthy && has_found || is_lost && !has_found {
            return Err(failed("doctor", format!("{outcome:?}")));
        }
        Ok(())
    }

    fn lists(&self) -> String {
        self.node.path("net.d").display().to_string()
    }

    fn tool(&self, words: &[&str]) -> Call {
        let (leases, lists) = (self.node.path("leases").display().to_string(), self.lists());
        fs::create_dir_all(&lists).unwrap();
        let options = ["--plugin-path", &self.bin(), "--data-dir", &leases, "--conf-dir", &lists];
        self.node.cnibox(&[words, &options].concat())
    }

    fn bin(&self) -> String {
        self.node.bin().display().to_string()
    }

    /// Without a pair, or attached by the reference, nothing proves that an attachment has ended:
    /// DEL on both.
    pub(super) fn collect_dead(&mut self) -> Result<(), Failed> {
        let is_ours = self.plugins == Plugins::Cnibox;
        if is_ours {
            self.tool(&["gc"]).printed();
        }
        let places: Vec<Place> =
            self.known.iter().filter(|(_, known)| known.is_dead).map(|(place, _)| *place).collect();
        for place in places {
            let known = &self.known[&place];
            let is_proved = known.by == By::Cnibox
                && !matches!(self.plan.networks[known.net].kind, Kind::Macvlan(_));
            if is_ours && is_proved {
                uncache(&self.list(known.net, By::Cnibox), place);
                self.forget(place);
            } else {
                self.del(place, By::Cnibox)?;
            }
        }
        Ok(())
    }
}

fn failed(tool: &str, msg: String) -> Failed {
    Failed { plugin: tool.to_owned(), code: None, msg }
}
