//! The attributes of an interface: MAC, MTU, modes, length of the transmit queue.

use serde::{Deserialize, Serialize};

use crate::attachment::backup::mac_text;
use crate::cni::IfName;
use crate::error::{Context, Error, Result};
use crate::iface::verify::IN_CONTAINER;
use crate::netlink::{Link, LinkChange, Mac, Netlink};
use crate::skel::Failures;

/// Attributes of an interface; `None` if not configured. As JSON they are the reference's backup.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Attributes {
    #[serde(with = "mac_text", skip_serializing_if = "Option::is_none")]
    pub(super) mac: Option<Mac>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) promisc: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) mtu: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) allmulti: Option<bool>,
    #[serde(rename = "txQLen", skip_serializing_if = "Option::is_none")]
    pub(super) txqlen: Option<u32>,
}

impl Attributes {
    /// The link's values of the attributes that are `configured`.
    pub(super) fn of(link: &Link, configured: &Attributes) -> Attributes {
        Attributes {
            mac: configured.mac.and(link.mac),
            promisc: configured.promisc.map(|_| link.promisc),
            mtu: configured.mtu.map(|_| link.mtu),
            allmulti: configured.allmulti.map(|_| link.allmulti),
            txqlen: configured.txqlen.map(|_| link.txqlen),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        *self == Attributes::default()
    }

    /// Sets the attributes one by one in the order of the reference, as the iterator advances.
    pub(super) fn set(&self, netlink: &Netlink, link: &Link) -> impl Iterator<Item = Result<()>> {
        let (new, on) = (LinkChange::new, |on| if on { "on" } else { "off" });
        let changes = [
            self.mac.map(|mac| (format!("mac {mac}"), new().mac(mac))),
            self.promisc.map(|yes| (format!("promisc {}", on(yes)), new().promisc(yes.into()))),
            self.mtu.map(|mtu| (format!("mtu {mtu}"), new().mtu(mtu))),
            self.allmulti.map(|yes| (format!("allmulti {}", on(yes)), new().allmulti(yes.into()))),
            self.txqlen.map(|length| (format!("txQLen {length}"), new().txqlen(length))),
        ];
        changes.into_iter().flatten().map(|(what, change)| {
            netlink.set_link(link.index, change).context(|| format!("set {what}"))
        })
    }

    /// Sets all attributes that can be set, then reports the errors.
    pub(super) fn restore(&self, netlink: &Netlink, link: &Link) -> Result<()> {
        let mut failures = Failures::new();
        for outcome in self.set(netlink, link) {
            failures.keep(outcome);
        }
        failures.into_result()
    }

    /// Verifies that the link has all attributes. The mode promiscuous is compared with the kernel's counter, which
    /// includes the requests of other programs, such as tcpdump.
    pub(super) fn verify(&self, link: &Link, ifname: &IfName) -> Result<()> {
        let found = Attributes::of(link, self);
        if let Some(on) = self.promisc.filter(|on| *on != (link.promiscuity != 0)) {
            let subject = format!("link {ifname} configured promisc");
            let count = link.promiscuity.to_string();
            return Err(mismatch(ifname, &subject, "promisc", &on.to_string(), &count));
        }
        same(ifname, ("Ethernet", "address"), self.mac, found.mac)?;
        same(ifname, ("MTU", "mtu"), self.mtu, found.mtu)?;
        same(ifname, ("all-multicast mode", "allmulticast"), self.allmulti, found.allmulti)?;
        same(ifname, ("Transmit Queue Length", "txqueuelen"), self.txqlen, found.txqlen)
    }
}

/// `keyword` is the attribute's name in ip-link(8).
fn same<T: PartialEq + ToString>(
    ifname: &IfName,
    (what, keyword): (&str, &str),
    wanted: Option<T>,
    found: Option<T>,
) -> Result<()> {
    if wanted == found {
        return Ok(());
    }
    let [wanted, found] = [wanted, found].map(|v| v.map(|v| v.to_string()).unwrap_or_default());
    let subject = format!("configured {what} of {ifname}");
    Err(mismatch(ifname, &subject, keyword, &wanted, &found))
}

fn mismatch(ifname: &IfName, subject: &str, keyword: &str, wanted: &str, found: &str) -> Error {
    let value = match wanted {
        "true" => "on",
        "false" => "off",
        value => value,
    };
    Error::internal(format!("Error: Tuning {subject} is {wanted}, current value is {found}"))
        .with_details(format!("{IN_CONTAINER}ip link set {ifname} {keyword} {value}"))
}
