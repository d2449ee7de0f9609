//! What an administrator does: damage, and the tools of cnibox.

use std::fs;

use super::super::plan::{By, Damage, Kind, Place};
use super::{Machine, Plugins};
use crate::support::conflist::Failed;
use crate::support::node::Call;

impl Machine<'_> {
    pub(super) fn damage(&self, damage: Damage) {
        match damage {
            Damage::Ruleset => drop(self.node.sh("nft flush ruleset")),
            Damage::Nat => drop(self.node.sh("iptables -t nat -F")),
            Damage::Bridge(name) => drop(self.node.sh(&format!("ip link del {name} 2>/dev/null || true"))),
        }
        if self.plan.drops {
            self.node.sh("iptables -P FORWARD DROP");
        }
    }

    pub(super) fn cut_pair(&mut self, place: Place) {
        let is_its_own = |(name, owner): &(&String, &String)| name.starts_with("veth") && **owner == place.to_string();
        for (name, _) in self.owners.iter().filter(is_its_own) {
            self.node.sh(&format!("ip link del {name} 2>/dev/null || true"));
        }
        if let Some(known) = self.known.get_mut(&place) {
            known.is_dead = true;
        }
    }

    pub(super) fn repair(&self, damage: Damage) {
        if self.plugins == Plugins::Cnibox {
            self.damage(damage);
            let outcome = self.node.cnibox(&["repair", "--plugin-path", &self.bin()]).run();
            // Where a link is gone whose container lives, it says so, and goes on.
            let is_cut = self.known.values().any(|known| known.is_dead);
            assert!(outcome.status == Some(0) || is_cut && outcome.status == Some(1), "{outcome:?}");
        }
    }

    pub(super) fn doctor(&self) -> Result<(), Failed> {
        if self.plugins == Plugins::Reference {
            return Ok(());
        }
        let outcome = self.tool("doctor").run();
        if outcome.status == Some(0) || !self.healthy && outcome.status == Some(1) {
            return Ok(());
        }
        Err(Failed { plugin: "doctor".to_owned(), code: None, msg: format!("{outcome:?}") })
    }

    fn tool(&self, name: &str) -> Call {
        let [leases, lists] = ["leases", "net.d"].map(|name| self.node.path(name).display().to_string());
        fs::create_dir_all(&lists).unwrap();
        let options = ["--plugin-path", &self.bin(), "--data-dir", &leases, "--conf-dir", &lists];
        self.node.cnibox(&[&[name], &options[..]].concat())
    }

    fn bin(&self) -> String {
        self.node.bin().display().to_string()
    }

    /// Without a pair, or attached by the reference, nothing proves that an attachment has ended: DEL on both.
    pub(super) fn collect_dead(&mut self) -> Result<(), Failed> {
        let is_ours = self.plugins == Plugins::Cnibox;
        if is_ours {
            self.tool("gc").printed();
        }
        let places: Vec<Place> =
            self.known.iter().filter(|(_, known)| known.is_dead).map(|(place, _)| *place).collect();
        for place in places {
            let known = &self.known[&place];
            let is_proved = known.by == By::Cnibox && !matches!(self.plan.networks[known.net].kind, Kind::Macvlan(_));
            if is_ours && is_proved {
                self.uncache(&self.list(known.net, By::Cnibox), place);
                self.forget(place);
            } else {
                self.del(place, By::Cnibox)?;
            }
        }
        Ok(())
    }
}
