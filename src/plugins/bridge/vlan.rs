//! VLANs of the port.
//!
//! The container's own VLAN (`vlan`) is untagged at the port, the VLANs of `vlanTrunk` are tagged.
//! A bridge separates VLANs only with `vlan_filtering`, which is enabled when the bridge is
//! created, or while it has no ports. A bridge with ports is not changed, since tagged frames that
//! pass now would be dropped; ADD fails then.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use serde::Deserialize;

use super::BridgeConfig;
use crate::netlink::{BridgePortVlans, Link, Netlink, PortVlanRange, VlanTagging};
use cni::error::{Error, ErrorContext, Result};

/// The VLAN IDs of 802.1Q.
const IDS: RangeInclusive<u16> = 1..=4094;
/// The native VLAN of a port with `vlanTrunk` and without `vlan`, unless `preserveDefaultVlan` is
/// false.
const DEFAULT: u16 = 1;

/// One entry of `vlanTrunk`: a VLAN ID, a range, or both.
#[derive(Debug, Deserialize)]
pub(super) struct VlanTrunkEntry {
    id: Option<i64>,
    #[serde(rename = "minID")]
    min_id: Option<i64>,
    #[serde(rename = "maxID")]
    max_id: Option<i64>,
}

/// The VLANs of a validated configuration.
#[derive(Debug)]
pub(super) struct ConfiguredVlans {
    /// Whether the bridge has to filter VLANs.
    pub(super) filtering: bool,
    /// The VLAN of the key `vlan`.
    pub(super) access: Option<u16>,
    /// The VLANs of the port; if empty, the bridge decides.
    pub(super) port: Vec<PortVlanRange>,
    /// Whether the port stays in the default VLAN of the bridge.
    pub(super) preserve: bool,
}

impl ConfiguredVlans {
    /// Decodes the keys; fails with an invalid VLAN ID.
    pub(super) fn from_config(conf: &BridgeConfig) -> Result<ConfiguredVlans> {
        let access = u16::try_from(conf.vlan).ok().filter(|id| *id <= 4094).ok_or_else(|| {
            let msg = format!("invalid VLAN ID {} (must be between 0 and 4094)", conf.vlan);
            Error::config(msg)
        })?;
        let mut tagged = BTreeSet::new();
        for entry in conf.vlan_trunk.iter().flatten() {
            entry.add_vlan_ids(&mut tagged)?;
        }
        let access = (access != 0).then_some(access);
        // Without the key the port is in VLAN 1, as with the reference.
        let has_default = !tagged.is_empty() && conf.preserve_default_vlan != Some(false);
        let native = access.or(has_default.then_some(DEFAULT));
        let mut port = Vec::from_iter(native.map(PortVlanRange::native_vlan));
        // A VLAN that is added tagged is no longer the native one.
        for id in tagged.into_iter().filter(|id| native != Some(*id)) {
            match port.last_mut() {
                Some(PortVlanRange { ids, tagging: VlanTagging::Tagged })
                    if *ids.end() + 1 == id =>
                {
                    *ids = *ids.start()..=id;
                }
                _ => port.push(PortVlanRange { ids: id..=id, tagging: VlanTagging::Tagged }),
            }
        }
        Ok(ConfiguredVlans {
            filtering: access.is_some() || conf.vlan_trunk.is_some(),
            access,
            port,
            preserve: conf.preserve_default_vlan == Some(true),
        })
    }

    /// Whether the bridge filters VLANs or need not; fails if filtering is needed and cannot be
    /// enabled.
    pub(super) fn require_filtering(&self, host: &Netlink, bridge: &Link) -> Result<bool> {
        if !self.filtering || bridge.bridge.unwrap_or_default().vlan_filtering {
            return Ok(true);
        }
        if host.dump_links()?.iter().any(|link| link.master == Some(bridge.index)) {
            return Err(not_filtering_error(bridge));
        }
        Ok(false)
    }

    /// Adds a port of the bridge to `vlans`, and removes it from the default VLAN of the bridge.
    pub(super) fn apply_to_port(
        &self,
        host: &Netlink,
        bridge: &Link,
        port: &Link,
        vlans: &[PortVlanRange],
    ) -> Result<()> {
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
        host.delete_port_vlans(port.index, &[PortVlanRange::native_vlan(default)])
            .context(|| format!("failed to remove default vlan on interface \"{}\"", port.name))
    }

    /// Describes a configured VLAN that the port is not in.
    pub(super) fn describe_missing_vlan(
        &self,
        port: &Link,
        found: &BridgePortVlans,
    ) -> Option<String> {
        let each =
            self.port.iter().flat_map(|vlans| vlans.ids.clone().map(|id| (id, vlans.tagging)));
        let (id, tagging) =
            each.into_iter().find(|(id, how)| found.tagging_of_vlan(*id) != Some(*how))?;
        let how = if tagging == VlanTagging::Tagged { "tagged" } else { "native" };
        Some(format!("port \"{}\" is not in VLAN {id}, configured as {how}", port.name))
    }

    /// CHECK: fails unless the bridge filters VLANs, if needed, and the port is in exactly its
    /// VLANs. Older releases of the reference leave each port also in the default VLAN, which
    /// is accepted without `is_labelled`.
    pub(super) fn verify_port(
        &self,
        host: &Netlink,
        bridge: &Link,
        port: &Link,
        is_labelled: bool,
    ) -> Result<()> {
        let info = bridge.bridge.unwrap_or_default();
        if self.filtering && !info.vlan_filtering {
            return Err(not_filtering_error(bridge));
        }
        if self.port.is_empty() {
            return Ok(());
        }
        let found = read_port_vlans(host, port)?;
        if let Some(missing) = self.describe_missing_vlan(port, &found) {
            return Err(Error::internal(missing));
        }
        let expected = |id: &u16| {
            let kept = (self.preserve || !is_labelled) && *id == info.default_pvid;
            kept || self.port.iter().any(|vlans| vlans.ids.contains(id))
        };
        let mut present = found.vlans.iter().flat_map(|vlans| vlans.ids.clone());
        let Some(id) = present.find(|id| !expected(id)) else { return Ok(()) };
        let msg = format!("port \"{}\" is in VLAN {id}, which is not configured", port.name);
        Err(Error::internal(msg))
    }
}

pub(super) fn read_port_vlans(host: &Netlink, port: &Link) -> Result<BridgePortVlans> {
    let all = host.dump_port_vlans()?;
    Ok(all.into_iter().find(|vlans| vlans.index == port.index).unwrap_or_default())
}

fn not_filtering_error(bridge: &Link) -> Error {
    let name = &bridge.name;
    Error::internal(format!("bridge \"{name}\" does not filter VLANs, and has other ports"))
        .with_details(format!(
            "if no tagged frames have to pass it: ip link set {name} type bridge vlan_filtering 1"
        ))
}

impl VlanTrunkEntry {
    /// Adds the VLAN IDs of this entry to `tagged`; fails with an invalid VLAN ID or range.
    fn add_vlan_ids(&self, tagged: &mut BTreeSet<u16>) -> Result<()> {
        if let Some(id) = self.id {
            tagged.insert(parse_vlan_id(id, "incorrect trunk id parameter")?);
        }
        let missing = match (self.min_id, self.max_id) {
            (None, None) => return Ok(()),
            (Some(min), Some(max)) => {
                let min = parse_vlan_id(min, "incorrect trunk minID parameter")?;
                let max = parse_vlan_id(max, "incorrect trunk maxID parameter")?;
                if min > max {
                    return Err(Error::config("minID is greater than maxID in trunk parameter"));
                }
                tagged.extend(min..=max);
                return Ok(());
            }
            (None, Some(_)) => "minID",
            (Some(_), None) => "maxID",
        };
        Err(Error::config(format!(
            "minID and maxID should be configured simultaneously, {missing} is missing"
        )))
    }
}

fn parse_vlan_id(id: i64, refusal: &str) -> Result<u16> {
    u16::try_from(id).ok().filter(|id| IDS.contains(id)).ok_or_else(|| Error::config(refusal))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni::json::Json;

    fn vlans(text: &str) -> Result<ConfiguredVlans> {
        ConfiguredVlans::from_config(
            &Json::parse(text.as_bytes()).unwrap().decode::<BridgeConfig>().unwrap(),
        )
    }

    /// `native/first-last,...`
    fn port(text: &str) -> String {
        vlans(text)
            .unwrap()
            .port
            .iter()
            .map(|vlans| match vlans.tagging {
                VlanTagging::Native => format!("{}/", vlans.ids.start()),
                _ => format!("{}-{},", vlans.ids.start(), vlans.ids.end()),
            })
            .collect()
    }

    #[test]
    fn trunk_ranges_are_merged_and_exclude_the_ports_vlan() {
        assert_eq!(port("{}"), "");
        assert_eq!(port(r#"{"vlan":100}"#), "100/");
        assert_eq!(port(r#"{"vlanTrunk":[]}"#), "");
        let trunk = r#""vlanTrunk":[{"minID":200,"maxID":210},{"id":101},{"id":205},{"minID":211,"maxID":212}]"#;
        assert_eq!(port(&format!("{{{trunk}}}")), "1/101-101,200-212,");
        assert_eq!(port(&format!("{{\"vlan\":205,{trunk}}}")), "205/101-101,200-204,206-212,");
        assert_eq!(port(r#"{"vlanTrunk":[{"minID":1,"maxID":4094}]}"#), "1/2-4094,");
        assert_eq!(port(r#"{"vlan":101,"vlanTrunk":[{"id":101}]}"#), "101/");
        assert_eq!(port(r#"{"preserveDefaultVlan":false,"vlanTrunk":[{"id":101}]}"#), "101-101,");
        assert!(!vlans("{}").unwrap().filtering && vlans(r#"{"vlanTrunk":[]}"#).unwrap().filtering);
    }
}
