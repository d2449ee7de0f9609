//! What the keys of the configuration ask for.

use std::num::ParseIntError;

use serde::Deserialize;

use super::{BondConfig, BondLink};
use crate::iface::child;
use crate::netlink::{
    BOND_HASH_POLICIES, BOND_LACP_RATES, BOND_MODES, BondSettings, Link, MacAddress,
};
use cni::error::{Error, Result};

/// The interval of the kernel's documentation, in ms.
const DEFAULT_MIIMON: i64 = 100;
/// The MTU of a new bond in bytes, also with links that could have more.
const DEFAULT_MTU: i64 = 1500;
/// `ETH_MIN_MTU` and `ETH_MAX_MTU`.
const MTU_LIMITS: [i64; 2] = [68, 65535];

/// The modes by their place in [`BOND_MODES`].
const ACTIVE_BACKUP: u8 = 1;
const LACP: u8 = 4;
const BALANCE_TLB: u8 = 5;
const BALANCE_ALB: u8 = 6;

/// `failOverMac`: the bond has the MAC of its active link.
const BOND_FOLLOWS: u8 = 1;

/// A number, or a text of digits; absent if the text is empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "WrittenNumber")]
pub struct NumberOrText(Option<i64>);

#[derive(Deserialize)]
#[serde(untagged, expecting = "must be a number, or a number as a text")]
enum WrittenNumber {
    Number(i64),
    Text(String),
}

impl TryFrom<WrittenNumber> for NumberOrText {
    type Error = ParseIntError;

    fn try_from(written: WrittenNumber) -> Result<NumberOrText, ParseIntError> {
        Ok(NumberOrText(match written {
            WrittenNumber::Number(number) => Some(number),
            WrittenNumber::Text(text) if text.is_empty() => None,
            WrittenNumber::Text(text) => Some(text.parse()?),
        }))
    }
}

impl NumberOrText {
    /// The number, if it is given; fails unless it is one of `least` to `most`.
    fn within<T: TryFrom<i64>>(self, key: &str, [least, most]: [i64; 2]) -> Result<Option<T>> {
        let Some(number) = self.0 else { return Ok(None) };
        let valid = T::try_from(number).ok().filter(|_| (least..=most).contains(&number));
        valid.map(Some).ok_or_else(|| {
            Error::config(format!("invalid {key} {number}, must be {least} to {most}"))
        })
    }
}

/// The bond that the configuration asks for.
#[derive(Debug)]
pub(super) struct BondPlan {
    pub(super) settings: BondSettings,
    /// In bytes.
    pub(super) mtu: u32,
    /// The MAC of the bond; `None` for that of its first link.
    pub(super) mac: Option<MacAddress>,
}

impl BondPlan {
    pub(super) fn from_config(conf: &BondConfig, mac_of_args: &str) -> Result<BondPlan> {
        let mode = number_of_name("mode", &conf.mode, &BOND_MODES)?;
        let policy = Some(conf.xmit_hash_policy.as_str()).filter(|name| !name.is_empty());
        let policy = policy
            .map(|name| number_of_name("xmitHashPolicy", name, &BOND_HASH_POLICIES))
            .transpose()?;
        let rate = Some(conf.lacp_rate.as_str()).filter(|name| !name.is_empty());
        let rate =
            rate.map(|name| number_of_name("lacpRate", name, &BOND_LACP_RATES)).transpose()?;
        let miimon = NumberOrText(conf.miimon.0.or(Some(DEFAULT_MIIMON)));
        let settings = BondSettings {
            mode,
            miimon: miimon.within("miimon", [0, i64::from(u16::MAX)])?.unwrap_or_default(),
            fail_over_mac: conf.fail_over_mac.within("failOverMac", [0, 2])?.unwrap_or_default(),
            xmit_hash_policy: policy,
            all_slaves_active: conf.all_slaves_active.within("allSlavesActive", [0, 1])?,
            tlb_dynamic_lb: conf.tlb_dynamic_lb.within("tlbDynamicLb", [0, 1])?,
            lacp_rate: rate,
            min_links: conf.min_links.within("minLinks", [0, u32::MAX.into()])?,
        };
        for (key, is_set, modes) in [
            ("tlbDynamicLb", settings.tlb_dynamic_lb.is_some(), [BALANCE_TLB, BALANCE_ALB]),
            ("lacpRate", settings.lacp_rate.is_some(), [LACP; 2]),
            ("minLinks", settings.min_links.is_some(), [LACP; 2]),
        ] {
            if is_set && !modes.contains(&mode) {
                let msg = format!("{key} does not exist in mode \"{}\"", conf.mode);
                let [first, second] = modes.map(|mode| BOND_MODES[usize::from(mode)]);
                let other = if first == second { "" } else { &format!(" and \"{second}\"") };
                let remedy = format!("it is for \"{first}\"{other}: remove it");
                return Err(Error::config(msg).with_details(remedy));
            }
        }
        let mtu = NumberOrText(conf.mtu.0.filter(|mtu| *mtu != 0).or(Some(DEFAULT_MTU)));
        let mac = child::requested_mac(&[&conf.runtime_config.mac, mac_of_args, &conf.mac])?;
        let plan =
            BondPlan { settings, mtu: mtu.within("mtu", MTU_LIMITS)?.unwrap_or_default(), mac };
        if let Some(mac) = mac.filter(|_| plan.mac_follows_active_link()) {
            let msg = format!("with failOverMac 1 the bond cannot have the MAC {mac}");
            return Err(Error::config(msg).with_details(
                "it has that of its active link: remove the MAC, or set failOverMac to 2",
            ));
        }
        require_links(&conf.links)?;
        Ok(plan)
    }

    /// Whether the bond has another MAC after a failover.
    pub(super) fn mac_follows_active_link(&self) -> bool {
        self.settings.mode == ACTIVE_BACKUP && self.settings.fail_over_mac == BOND_FOLLOWS
    }

    /// Whether the links keep MACs of their own, which must differ.
    pub(super) fn needs_distinct_macs(&self) -> bool {
        self.settings.fail_over_mac != 0 || [BALANCE_TLB, BALANCE_ALB].contains(&self.settings.mode)
    }

    /// Fails if a link cannot have the MTU of the bond, which its ports get.
    pub(super) fn require_mtu_of_links(&self, links: &[Link]) -> Result<()> {
        let mtu = self.mtu;
        let Some(Link { name, mtu: most, .. }) = links.iter().find(|link| link.mtu < mtu) else {
            return Ok(());
        };
        let msg = format!("invalid mtu {mtu}: link \"{name}\" has only {most}");
        Err(Error::config(msg)
            .with_details(format!("write \"mtu\": {most}, or: ip link set {name} mtu {mtu}")))
    }

    /// CHECK: fails unless the bond has the configured settings and MTU.
    pub(super) fn verify_bond(&self, bond: &Link) -> Result<()> {
        let (found, wanted) = (bond.bond.unwrap_or_default(), self.settings);
        // A setting that is not configured is the kernel's.
        let text = |number: Option<u8>, of: Option<u8>| {
            of.and(number).map(|n| n.to_string()).unwrap_or_default()
        };
        let least = |settings: BondSettings| wanted.min_links.and(settings.min_links);
        let facts = |settings: BondSettings| {
            [
                ("mode", settings.mode_name().to_owned()),
                ("miimon", settings.miimon.to_string()),
                ("failOverMac", settings.fail_over_mac.to_string()),
                ("xmitHashPolicy", text(settings.xmit_hash_policy, wanted.xmit_hash_policy)),
                ("allSlavesActive", text(settings.all_slaves_active, wanted.all_slaves_active)),
                ("tlbDynamicLb", text(settings.tlb_dynamic_lb, wanted.tlb_dynamic_lb)),
                ("lacpRate", text(settings.lacp_rate, wanted.lacp_rate)),
                ("minLinks", least(settings).map(|n| n.to_string()).unwrap_or_default()),
            ]
        };
        for ((key, found), (_, wanted)) in facts(found).into_iter().zip(facts(wanted)) {
            if found != wanted {
                let msg =
                    format!("bond \"{}\" has {key} {found}, configured is {wanted}", bond.name);
                return Err(Error::internal(msg).with_details("DEL and ADD create the bond anew"));
            }
        }
        child::verify_mtu(bond, self.mtu)
    }
}

/// The number of a name in a list of the kernel's.
fn number_of_name(key: &str, name: &str, known: &[&str]) -> Result<u8> {
    let place =
        known.iter().position(|known| *known == name).and_then(|place| u8::try_from(place).ok());
    place.ok_or_else(|| {
        let msg = if name.is_empty() {
            format!("\"{key}\" is required")
        } else {
            format!("unknown {key} \"{name}\"")
        };
        Error::config(msg).with_details(format!("known are {}", known.join(", ")))
    })
}

fn require_links(links: &[BondLink]) -> Result<()> {
    let refuse = |msg: String, remedy: &str| Err(Error::config(msg).with_details(remedy));
    for (number, link) in links.iter().enumerate() {
        if link.name.is_empty() {
            return refuse(format!("links[{number}] has no name"), "write {\"name\": \"eth1\"}");
        }
        if links[..number].iter().any(|other| other.name == link.name) {
            return refuse(format!("\"links\" has \"{}\" twice", link.name), "name each link once");
        }
    }
    if links.len() < 2 {
        let msg = format!("bonding requires at least two links, \"links\" has {}", links.len());
        return refuse(msg, "write \"links\": [{\"name\": \"eth1\"}, {\"name\": \"eth2\"}]");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(text: &str) -> Result<BondPlan> {
        let json = cni::json::Json::parse(text.as_bytes()).unwrap();
        BondPlan::from_config(&json.decode()?, "")
    }

    fn with(keys: &str) -> Result<BondPlan> {
        plan(&format!(r#"{{"mode":"balance-tlb","links":[{{"name":"a"}},{{"name":"b"}}]{keys}}}"#))
    }

    #[test]
    fn numbers_are_numbers_or_texts() {
        for quote in ["", "\""] {
            let keys = [
                ("miimon", 250),
                ("mtu", 1400),
                ("failOverMac", 2),
                ("allSlavesActive", 1),
                ("tlbDynamicLb", 0),
            ];
            let keys: Vec<_> =
                keys.iter().map(|(key, n)| format!(",\"{key}\":{quote}{n}{quote}")).collect();
            let plan = with(&keys.concat()).unwrap();
            let BondSettings { miimon, fail_over_mac, all_slaves_active, tlb_dynamic_lb, .. } =
                plan.settings;
            assert_eq!((miimon, plan.mtu, fail_over_mac), (250, 1400, 2));
            assert_eq!((all_slaves_active, tlb_dynamic_lb), (Some(1), Some(0)));
        }
        assert_eq!(with(r#","miimon":"ten""#).unwrap_err().code(), cni::error::ErrorCode::DECODE);
    }

    #[test]
    fn absent_keys_have_the_documented_defaults() {
        for keys in ["", r#","mtu":0,"miimon":"""#, r#","mtu":null,"xmitHashPolicy":null"#] {
            let BondPlan { settings, mtu, mac } = with(keys).unwrap();
            assert_eq!(
                settings,
                BondSettings { mode: BALANCE_TLB, miimon: 100, ..BondSettings::default() }
            );
            assert_eq!((mtu, mac), (1500, None));
        }
    }

    #[test]
    fn wrong_values_are_refused() {
        let refused =
            |text: &str, msg: &str| assert_eq!(plan(text).unwrap_err().message(), msg, "{text}");
        refused("{}", "\"mode\" is required");
        refused(r#"{"mode":"1"}"#, "unknown mode \"1\"");
        refused(r#"{"mode":"802.3ad"}"#, "bonding requires at least two links, \"links\" has 0");
        refused(r#"{"mode":"802.3ad","links":[{"name":"a"},{}]}"#, "links[1] has no name");
        refused(
            r#"{"mode":"802.3ad","links":[{"name":"a"},{"name":"a"}]}"#,
            "\"links\" has \"a\" twice",
        );
        refused(
            r#"{"mode":"broadcast","tlbDynamicLb":1}"#,
            "tlbDynamicLb does not exist in mode \"broadcast\"",
        );
        refused(
            r#"{"mode":"active-backup","lacpRate":"fast"}"#,
            "lacpRate does not exist in mode \"active-backup\"",
        );
        refused(
            r#"{"mode":"active-backup","minLinks":1}"#,
            "minLinks does not exist in mode \"active-backup\"",
        );
        for (keys, msg) in [
            (r#","miimon":-1"#, "invalid miimon -1, must be 0 to 65535"),
            (r#","mtu":67"#, "invalid mtu 67, must be 68 to 65535"),
            (r#","failOverMac":3"#, "invalid failOverMac 3, must be 0 to 2"),
            (r#","allSlavesActive":2"#, "invalid allSlavesActive 2, must be 0 to 1"),
            (r#","tlbDynamicLb":"2""#, "invalid tlbDynamicLb 2, must be 0 to 1"),
            (r#","lacpRate":"1""#, "unknown lacpRate \"1\""),
            (r#","minLinks":-1"#, "invalid minLinks -1, must be 0 to 4294967295"),
            (r#","xmitHashPolicy":"layer4""#, "unknown xmitHashPolicy \"layer4\""),
            (r#","mac":"x""#, "invalid args x for MAC addr: address x: invalid MAC address"),
        ] {
            assert_eq!(with(keys).unwrap_err().message(), msg);
        }
        let links = r#""links":[{"name":"a"},{"name":"b"}],"mac":"02:00:00:00:00:01""#;
        refused(
            &format!(r#"{{"mode":"active-backup","failOverMac":1,{links}}}"#),
            "with failOverMac 1 the bond cannot have the MAC 02:00:00:00:00:01",
        );
    }

    #[test]
    fn check_compares_what_is_configured() {
        let plan = with(r#","tlbDynamicLb":1"#).unwrap();
        let bond = |settings| Link {
            name: "b".into(),
            mtu: 1500,
            bond: Some(settings),
            ..Link::default()
        };
        let same =
            BondSettings { xmit_hash_policy: Some(3), all_slaves_active: Some(0), ..plan.settings };
        assert_eq!(plan.verify_bond(&bond(same)), Ok(()));
        for (other, msg) in [
            (
                BondSettings { mode: 1, ..same },
                "bond \"b\" has mode active-backup, configured is balance-tlb",
            ),
            (BondSettings { miimon: 0, ..same }, "bond \"b\" has miimon 0, configured is 100"),
            (
                BondSettings { tlb_dynamic_lb: Some(0), ..same },
                "bond \"b\" has tlbDynamicLb 0, configured is 1",
            ),
        ] {
            assert_eq!(plan.verify_bond(&bond(other)).unwrap_err().message(), msg);
        }
        let links =
            [9000, 1400].map(|mtu| Link { name: format!("l{mtu}"), mtu, ..Link::default() });
        let error = plan.require_mtu_of_links(&links).unwrap_err();
        assert_eq!(error.message(), "invalid mtu 1500: link \"l1400\" has only 1400");
    }
}
