//! `cnibox gc` of rules that lead ports of the host to containers that are gone, without a record
//! of them.

use std::path::PathBuf;

use super::{COLLECT, GarbageCollector};
use crate::framework::port_owner::{self, PortOwnerState};
use crate::netfilter::ports::PortOwner;
use crate::tool::outcome::ActionOutcome;
use cni::error::Result;

impl GarbageCollector<'_> {
    /// Removes, or with `dry_run` lists, what leads ports to containers that have ended, without a
    /// record of them.
    pub(super) fn collect_port_owners(
        &self,
        dry_run: bool,
        outcomes: &mut Vec<ActionOutcome>,
    ) -> Result<()> {
        for owner in &self.port_owners {
            let PortOwner { network, id, .. } = owner;
            if !self.selection.has_attachment(network, id)
                || port_owner::find_record(owner).is_some()
            {
                continue;
            }
            let of_network = self.stores.iter().filter(|store| store.network == *network);
            let dirs: Vec<PathBuf> = of_network.map(|store| store.data_dir.clone()).collect();
            let state = port_owner::judge_port_owner(owner, &dirs);
            let object = format!("{} of container {id}", owner.describe_ports());
            let outcome = |action, why| ActionOutcome::new(action, network, &object, why);
            match (state, self.selection.container) {
                (PortOwnerState::Ended(why), _) if dry_run => {
                    outcomes.push(outcome("would remove", why).with_remedy(COLLECT));
                }
                (PortOwnerState::Ended(_), _) => {
                    let removed = port_owner::remove_ended_port_owner(&self.packets, owner, &dirs)?;
                    outcomes.extend(removed.map(|why| outcome("removed", why)));
                }
                (PortOwnerState::InDoubt(why), Some(_)) => {
                    let why = format!("named by --container, {why}");
                    if dry_run {
                        outcomes.push(outcome("would remove", why).with_remedy(COLLECT));
                    } else if port_owner::remove_named_port_owner(&self.packets, owner)? {
                        outcomes.push(outcome("removed", why));
                    }
                }
                (PortOwnerState::InDoubt(why), None)
                    if dry_run && owner.collect_command().is_some() =>
                {
                    outcomes.push(self.outcome_in_doubt(network, id, object.clone(), why));
                }
                _ => {}
            }
        }
        Ok(())
    }
}
