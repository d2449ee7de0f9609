//! What of an interface is not a kernel parameter: MAC, MTU, modes, the transmit queue.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::cni::IfName;
use crate::error::{Context, Error, Result};
use crate::iface::verify::IN_CONTAINER;
use crate::netlink::{Link, LinkChange, Mac, Netlink};

/// Attributes of an interface; `None` if not configured. Written as JSON, they are the
/// reference's backup.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Attributes {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(serialize_with = "write_mac", deserialize_with = "read_mac")]
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

#[expect(clippy::ref_option, clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn write_mac<S: Serializer>(mac: &Option<Mac>, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(&mac.map(|mac| mac.to_string()).unwrap_or_default())
}

fn read_mac<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Mac>, D::Error> {
    let text = String::deserialize(d)?;
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(D::Error::custom)
}

impl Attributes {
    /// The attributes of `link` that `asked` has as well.
    pub(super) fn of(link: &Link, asked: &Attributes) -> Attributes {
        Attributes {
            mac: asked.mac.and(link.mac),
            promisc: asked.promisc.map(|_| link.promisc),
            mtu: asked.mtu.map(|_| link.mtu),
            allmulti: asked.allmulti.map(|_| link.allmulti),
            txqlen: asked.txqlen.map(|_| link.txqlen),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        *self == Attributes::default()
    }

    /// Gives the link all of them, and stops at the first that it does not take.
    pub(super) fn set(&self, netlink: &Netlink, link: &Link) -> Result<()> {
        self.changes().into_iter().try_for_each(|change| change.make(netlink, link))
    }

    /// Gives the link all that it takes; the errors of the others.
    pub(super) fn restore(&self, netlink: &Netlink, link: &Link) -> Vec<Error> {
        let changes = self.changes().into_iter();
        changes.filter_map(|change| change.make(netlink, link).err()).collect()
    }

    /// The changes in the order of the reference, each by itself, so that an error is about one.
    fn changes(&self) -> Vec<Change> {
        let change =
            |name, value: String, change| Change { what: format!("{name} {value}"), change };
        let on = |on: bool| if on { "on" } else { "off" }.to_owned();
        let new = LinkChange::new;
        let all = [
            self.mac.map(|mac| change("mac", mac.to_string(), new().mac(mac))),
            self.promisc.map(|yes| change("promisc", on(yes), new().promisc(yes.into()))),
            self.mtu.map(|mtu| change("mtu", mtu.to_string(), new().mtu(mtu))),
            self.allmulti.map(|yes| change("allmulti", on(yes), new().allmulti(yes.into()))),
            self.txqlen.map(|len| change("txQLen", len.to_string(), new().txqlen(len))),
        ];
        all.into_iter().flatten().collect()
    }

    /// Verifies that the link has all attributes. For promiscuous mode the kernel's counter decides, whoever
    /// requested it.
    pub(super) fn verify(&self, link: &Link, ifname: &IfName) -> Result<()> {
        let now = Attributes::of(link, self);
        if let Some(promisc) = self.promisc
            && promisc != (link.promiscuity != 0)
        {
            let count = link.promiscuity;
            let value = if promisc { "on" } else { "off" };
            return Err(Error::internal(format!(
                "Error: Tuning link {ifname} configured promisc is {promisc}, current value is {count}"
            ))
            .with_details(format!("{IN_CONTAINER}ip link set {ifname} promisc {value}")));
        }
        let text = |mac: Option<Mac>| mac.map(|mac| mac.to_string());
        same(ifname, ("Ethernet", "address"), text(self.mac), text(self.mac.and(link.mac)))?;
        same(ifname, ("MTU", "mtu"), self.mtu, now.mtu)?;
        same(ifname, ("all-multicast mode", "allmulticast"), self.allmulti, now.allmulti)?;
        same(ifname, ("Transmit Queue Length", "txqueuelen"), self.txqlen, now.txqlen)
    }
}

/// `word` is what ip-link(8) calls it.
fn same<T: PartialEq + ToString>(
    ifname: &IfName,
    (what, word): (&str, &str),
    wanted: Option<T>,
    now: Option<T>,
) -> Result<()> {
    if wanted == now {
        return Ok(());
    }
    let [wanted, now] = [wanted, now].map(|v| v.map(|v| v.to_string()).unwrap_or_default());
    let value = match wanted.as_str() {
        "true" => "on",
        "false" => "off",
        value => value,
    };
    Err(Error::internal(format!(
        "Error: Tuning configured {what} of {ifname} is {wanted}, current value is {now}"
    ))
    .with_details(format!("{IN_CONTAINER}ip link set {ifname} {word} {value}")))
}

/// One change of a link, and its name for messages.
struct Change {
    what: String,
    change: LinkChange,
}

impl Change {
    fn make(self, netlink: &Netlink, link: &Link) -> Result<()> {
        let Change { what, change } = self;
        netlink.set_link(link.index, change).context(|| format!("set {what}"))
    }
}
