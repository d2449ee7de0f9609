//! The attributes of an interface: MAC, MTU, modes, length of the transmit queue.

use serde::{Deserialize, Serialize};

use crate::attachment::backup::mac_text;
use crate::framework::Failures;
use crate::iface::verify::IN_CONTAINER;
use crate::netlink::{Link, LinkChange, MacAddress, Netlink};
use cni::InterfaceName;
use cni::error::{Error, ErrorContext, Result};

/// Attributes of an interface; `None` if not configured. As JSON they are the reference's backup.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct InterfaceAttributes {
    #[serde(with = "mac_text", skip_serializing_if = "Option::is_none")]
    pub(super) mac: Option<MacAddress>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) promisc: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) mtu: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) allmulti: Option<bool>,
    #[serde(rename = "txQLen", skip_serializing_if = "Option::is_none")]
    pub(super) txqlen: Option<u32>,
}

impl InterfaceAttributes {
    /// The link's values of the attributes that are `configured`.
    pub(super) fn from_link(link: &Link, configured: &InterfaceAttributes) -> InterfaceAttributes {
        InterfaceAttributes {
            mac: configured.mac.and(link.mac),
            promisc: configured.promisc.map(|_| link.promisc),
            mtu: configured.mtu.map(|_| link.mtu),
            allmulti: configured.allmulti.map(|_| link.allmulti),
            txqlen: configured.txqlen.map(|_| link.txqlen),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        *self == InterfaceAttributes::default()
    }

    /// Sets the attributes one by one in the order of the reference, as the iterator advances.
    pub(super) fn set_on_link(
        &self,
        netlink: &Netlink,
        link: &Link,
    ) -> impl Iterator<Item = Result<()>> {
        let (new, on) = (LinkChange::new, |on| if on { "on" } else { "off" });
        let changes = [
            self.mac.map(|mac| (format!("mac {mac}"), new().set_mac(mac))),
            self.promisc.map(|yes| (format!("promisc {}", on(yes)), new().set_promisc(yes.into()))),
            self.mtu.map(|mtu| (format!("mtu {mtu}"), new().set_mtu(mtu))),
            self.allmulti
                .map(|yes| (format!("allmulti {}", on(yes)), new().set_allmulti(yes.into()))),
            self.txqlen.map(|length| (format!("txQLen {length}"), new().set_txqlen(length))),
        ];
        changes.into_iter().flatten().map(|(what, change)| {
            netlink.change_link(link.index, change).context(|| format!("set {what}"))
        })
    }

    /// Sets all attributes that can be set, then reports the errors.
    pub(super) fn restore_on_link(&self, netlink: &Netlink, link: &Link) -> Result<()> {
        let mut failures = Failures::new();
        for outcome in self.set_on_link(netlink, link) {
            failures.keep_error(outcome);
        }
        failures.into_result()
    }

    /// Verifies that the link has all attributes. The mode promiscuous is compared with the
    /// kernel's counter, which includes the requests of other programs, such as tcpdump.
    pub(super) fn verify_link(&self, link: &Link, ifname: &InterfaceName) -> Result<()> {
        let found = InterfaceAttributes::from_link(link, self);
        if let Some(on) = self.promisc.filter(|on| *on != (link.promiscuity != 0)) {
            let subject = format!("link {ifname} configured promisc");
            let count = link.promiscuity.to_string();
            return Err(mismatch_error(ifname, &subject, "promisc", &on.to_string(), &count));
        }
        require_same_value(ifname, ("Ethernet", "address"), self.mac, found.mac)?;
        require_same_value(ifname, ("MTU", "mtu"), self.mtu, found.mtu)?;
        require_same_value(
            ifname,
            ("all-multicast mode", "allmulticast"),
            self.allmulti,
            found.allmulti,
        )?;
        require_same_value(
            ifname,
            ("Transmit Queue Length", "txqueuelen"),
            self.txqlen,
            found.txqlen,
        )
    }
}

/// `keyword` is the attribute's name in ip-link(8).
fn require_same_value<T: PartialEq + ToString>(
    ifname: &InterfaceName,
    (what, keyword): (&str, &str),
    wanted: Option<T>,
    found: Option<T>,
) -> Result<()> {
    if wanted == found {
        return Ok(());
    }
    let [wanted, found] = [wanted, found].map(|v| v.map(|v| v.to_string()).unwrap_or_default());
    let subject = format!("configured {what} of {ifname}");
    Err(mismatch_error(ifname, &subject, keyword, &wanted, &found))
}

fn mismatch_error(
    ifname: &InterfaceName,
    subject: &str,
    keyword: &str,
    wanted: &str,
    found: &str,
) -> Error {
    let value = match wanted {
        "true" => "on",
        "false" => "off",
        value => value,
    };
    Error::internal(format!("Error: Tuning {subject} is {wanted}, current value is {found}"))
        .with_details(format!("{IN_CONTAINER}ip link set {ifname} {keyword} {value}"))
}
