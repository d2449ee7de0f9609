//! VLANs of the port.
//!
//! The container's own VLAN (`vlan`) is untagged at the port, the VLANs of `vlanTrunk` are tagged. A bridge separates
//! VLANs only with `vlan_filtering`, which is enabled when the bridge is created, or while it has no ports. A bridge
//! with ports is not changed, since tagged frames that pass now would be dropped; ADD fails then.

use std::ops::RangeInclusive;

use serde::Deserialize;

use super::Conf;
use crate::error::{Context, Error, Result};
use crate::netlink::{Link, LinkChange, Netlink, PortVlans, Tagging, VlanPort};
use crate::sort::sort_by_key;

/// The native VLAN of a port with `vlanTrunk` and without `vlan`.
const DEFAULT: u16 = 1;

/// One entry of `vlanTrunk`: an id, a range, or both.
#[derive(Debug, Deserialize)]
pub(super) struct VlanTrunk {
    id: Option<i64>,
    #[serde(rename = "minID")]
    min_id: Option<i64>,
    #[serde(rename = "maxID")]
    max_id: Option<i64>,
}

/// The VLANs of a validated configuration.
#[derive(Debug)]
pub(super) struct Vlans {
    /// Whether the bridge has to filter VLANs.
    pub(super) filtering: bool,
    /// The VLAN of the key `vlan`.
    pub(super) access: Option<u16>,
    /// The VLANs of the port; if empty, the bridge decides.
    port: Vec<PortVlans>,
    /// Whether the port stays in the default VLAN of the bridge.
    preserve: bool,
}

impl Vlans {
    /// Decodes the keys; fails with an invalid VLAN ID.
    pub(super) fn resolve(conf: &Conf) -> Result<Vlans> {
        let access = u16::try_from(conf.vlan).ok().filter(|id| *id <= 4094).ok_or_else(|| {
            let msg = format!("invalid VLAN ID {} (must be between 0 and 4094)", conf.vlan);
            Error::config(msg)
        })?;
        let mut tagged = Vec::new();
        for entry in conf.vlan_trunk.iter().flatten() {
            tagged.extend(entry.ranges()?);
        }
        let tagged = merged(tagged);
        let access = (access != 0).then_some(access);
        let native = access.or((!tagged.is_empty()).then_some(DEFAULT));
        // A VLAN that is added tagged is no longer the native one.
        let tagged = tagged.into_iter().flat_map(|ids| without(ids, native));
        let tagged = tagged.map(|ids| PortVlans { ids, tagging: Tagging::Tagged });
        Ok(Vlans {
            filtering: access.is_some() || conf.vlan_trunk.is_some(),
            access,
            port: native.map(PortVlans::native).into_iter().chain(tagged).collect(),
            preserve: conf.preserve_default_vlan,
        })
    }

    /// Enables VLAN filtering of an existing bridge, if needed.
    pub(super) fn ensure_filtering(&self, host: &Netlink, bridge: &Link) -> Result<()> {
        if self.require_filtering(host, bridge)? {
            return Ok(());
        }
        host.set_link(bridge.index, LinkChange::vlan_filtering())
            .context(|| format!("could not switch on VLAN filtering of \"{}\"", bridge.name))
    }

    /// Whether the bridge filters VLANs or need not; fails if filtering is needed and cannot be enabled.
    pub(super) fn require_filtering(&self, host: &Netlink, bridge: &Link) -> Result<bool> {
        if !self.filtering || bridge.bridge.unwrap_or_default().vlan_filtering {
            return Ok(true);
        }
        if host.dump_links()?.iter().any(|link| link.master == Some(bridge.index)) {
            return Err(not_filtering(bridge));
        }
        Ok(false)
    }

    /// Adds a new port of the bridge to its VLANs.
    pub(super) fn set(&self, host: &Netlink, bridge: &Link, port: &Link) -> Result<()> {
        self.put(host, bridge, port, &self.port)
    }

    /// Adds the port of a VLAN's gateway to the VLAN.
    pub(super) fn set_gateway(&self, host: &Netlink, bridge: &Link, port: &Link) -> Result<()> {
        let own: Vec<_> = self.access.map(PortVlans::native).into_iter().collect();
        self.put(host, bridge, port, &own)
    }

    fn put(&self, host: &Netlink, bridge: &Link, port: &Link, vlans: &[PortVlans]) -> Result<()> {
        if vlans.is_empty() {
            return Ok(());
        }
        host.add_port_vlans(port.index, vlans)
            .context(|| format!("failed to setup vlan tag on interface \"{}\"", port.name))?;
        let default = bridge.bridge.unwrap_or_default().default_pvid;
        let wanted = vlans.iter().any(|vlans| vlans.ids.contains(&default));
        if self.preserve || wanted || default == 0 {
            return Ok(());
        }
        host.del_port_vlans(port.index, &[PortVlans::native(default)])
            .context(|| format!("failed to remove default vlan on interface \"{}\"", port.name))
    }

    /// Describes a configured VLAN that the port is not in.
    pub(super) fn missing(&self, port: &Link, found: &VlanPort) -> Option<String> {
        let each =
            self.port.iter().flat_map(|vlans| vlans.ids.clone().map(|id| (id, vlans.tagging)));
        let (id, tagging) = each.into_iter().find(|(id, how)| found.tagging(*id) != Some(*how))?;
        let how = if tagging == Tagging::Tagged { "tagged" } else { "native" };
        Some(format!("port \"{}\" is not in VLAN {id}, configured as {how}", port.name))
    }

    /// Whether the configuration has VLANs for ports.
    pub(super) fn has_any(&self) -> bool {
        !self.port.is_empty()
    }

    /// CHECK: fails unless the bridge filters VLANs, if needed, and the port is in exactly its VLANs.
    pub(super) fn verify(&self, host: &Netlink, bridge: &Link, port: &Link) -> Result<()> {
        let info = bridge.bridge.unwrap_or_default();
        if self.filtering && !info.vlan_filtering {
            return Err(not_filtering(bridge));
        }
        if self.port.is_empty() {
            return Ok(());
        }
        let found = of_port(host, port)?;
        if let Some(missing) = self.missing(port, &found) {
            return Err(Error::internal(missing));
        }
        let expected = |id: &u16| {
            let kept = self.preserve && *id == info.default_pvid;
            kept || self.port.iter().any(|vlans| vlans.ids.contains(id))
        };
        let mut present = found.vlans.iter().flat_map(|vlans| vlans.ids.clone());
        let Some(id) = present.find(|id| !expected(id)) else { return Ok(()) };
        let msg = format!("port \"{}\" is in VLAN {id}, which is not configured", port.name);
        Err(Error::internal(msg))
    }
}

/// The VLANs of a port.
pub(super) fn of_port(host: &Netlink, port: &Link) -> Result<VlanPort> {
    let all = host.dump_port_vlans()?;
    Ok(all.into_iter().find(|vlans| vlans.index == port.index).unwrap_or_default())
}

fn not_filtering(bridge: &Link) -> Error {
    let name = &bridge.name;
    Error::internal(format!("bridge \"{name}\" does not keep VLANs apart, and has other ports"))
        .with_details(format!(
            "if no tagged frames have to pass it: ip link set {name} type bridge vlan_filtering 1"
        ))
}

impl VlanTrunk {
    fn ranges(&self) -> Result<impl Iterator<Item = RangeInclusive<u16>> + use<>> {
        let missing =
            |key| format!("minID and maxID should be configured simultaneously, {key} is missing");
        let id = valid(self.id, "incorrect trunk id parameter")?;
        let range = match (self.min_id, self.max_id) {
            (None, None) => None,
            (None, Some(_)) => return Err(Error::config(missing("minID"))),
            (Some(_), None) => return Err(Error::config(missing("maxID"))),
            (min, max) => {
                let min = valid(min, "incorrect trunk minID parameter")?;
                let max = valid(max, "incorrect trunk maxID parameter")?;
                if min > max {
                    return Err(Error::config("minID is greater than maxID in trunk parameter"));
                }
                min.zip(max)
            }
        };
        Ok(id.map(|id| id..=id).into_iter().chain(range.map(|(min, max)| min..=max)))
    }
}

fn valid(id: Option<i64>, refusal: &str) -> Result<Option<u16>> {
    let number = |id| u16::try_from(id).ok().filter(|id| (1..=4094).contains(id));
    id.map(|id| number(id).ok_or_else(|| Error::config(refusal))).transpose()
}

/// The ranges sorted; ranges that overlap or touch are merged.
fn merged(mut ranges: Vec<RangeInclusive<u16>>) -> Vec<RangeInclusive<u16>> {
    sort_by_key(&mut ranges, |ids| *ids.start());
    let mut merged: Vec<RangeInclusive<u16>> = Vec::new();
    for ids in ranges {
        match merged.last_mut() {
            Some(last) if *ids.start() <= *last.end() + 1 => {
                *last = *last.start()..=*ids.end().max(last.end());
            }
            _ => merged.push(ids),
        }
    }
    merged
}

/// A range without one of its numbers.
fn without(
    ids: RangeInclusive<u16>,
    hole: Option<u16>,
) -> impl Iterator<Item = RangeInclusive<u16>> {
    let (first, last) = (*ids.start(), *ids.end());
    let parts = match hole.filter(|hole| ids.contains(hole)) {
        Some(hole) => [Some(first..=hole - 1), Some(hole + 1..=last)],
        None => [Some(first..=last), None],
    };
    parts.into_iter().flatten().filter(|part| !part.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::json::Json;

    fn vlans(text: &str) -> Result<Vlans> {
        Vlans::resolve(&Json::parse(text.as_bytes()).unwrap().decode::<Conf>().unwrap())
    }

    /// `native/first-last,...`
    fn port(text: &str) -> String {
        let text_of = |vlans: &PortVlans| match vlans.tagging {
            Tagging::Native => format!("{}/", vlans.ids.start()),
            _ => format!("{}-{},", vlans.ids.start(), vlans.ids.end()),
        };
        vlans(text).unwrap().port.iter().map(text_of).collect()
    }

    #[test]
    fn the_vlans_of_configurations() {
        assert_eq!(port("{}"), "");
        assert_eq!(port(r#"{"vlan":100}"#), "100/");
        assert_eq!(port(r#"{"vlanTrunk":[]}"#), "");
        let trunk = r#""vlanTrunk":[{"minID":200,"maxID":210},{"id":101},{"id":205},{"minID":211,"maxID":212}]"#;
        assert_eq!(port(&format!("{{{trunk}}}")), "1/101-101,200-212,");
        assert_eq!(port(&format!("{{\"vlan\":205,{trunk}}}")), "205/101-101,200-204,206-212,");
        assert_eq!(port(r#"{"vlanTrunk":[{"minID":1,"maxID":4094}]}"#), "1/2-4094,");
        assert_eq!(port(r#"{"vlan":101,"vlanTrunk":[{"id":101}]}"#), "101/");
        assert!(!vlans("{}").unwrap().filtering && vlans(r#"{"vlanTrunk":[]}"#).unwrap().filtering);
    }
}
