//! `cnibox gc` of devices of the host that DEL has not found.

use super::{COLLECT, GarbageCollector};
use crate::devices::lost::LostDevice;
use crate::netlink::Netlink;
use crate::tool::outcome::{ActionOutcome, RESTORED};
use cni::error::Result;

impl GarbageCollector<'_> {
    /// Restores, or with `dry_run` lists, the devices that can be found now.
    pub(super) fn return_lost_devices(
        &self,
        dry_run: bool,
        outcomes: &mut Vec<ActionOutcome>,
    ) -> Result<()> {
        let host = Netlink::open()?;
        for device in LostDevice::find_all() {
            let (network, object) = (device.network().to_owned(), device.object());
            if !self.selection.has_attachment(&network, device.container_id()) {
                continue;
            }
            let why = "DEL has not found it";
            if dry_run {
                if device.is_on_host(&host)? {
                    let outcome = ActionOutcome::new("would restore", network, object, why);
                    outcomes.push(outcome.with_remedy(COLLECT));
                }
                continue;
            }
            match device.give_back(&host) {
                Ok(false) => {}
                Ok(true) => outcomes.push(ActionOutcome::new(RESTORED, network, object, why)),
                Err(error) => outcomes.push(ActionOutcome::log_failure(&network, object, &error)),
            }
        }
        Ok(())
    }
}
