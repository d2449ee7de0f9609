//! What of an interface is not a kernel parameter: MAC, MTU, modes, the transmit queue.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::cni::IfName;
use crate::error::{Context, Error, Result};
use crate::netlink::{Link, LinkChange, Mac, Netlink};

/// Attributes of an interface; `None` is one that nobody asks for. Written as JSON, they are the
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
    /// Those of `link` that `asked` has.
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

    /// The link has all of them. Whether it is promiscuous for somebody counts, not for whom.
    pub(super) fn verify(&self, link: &Link, ifname: &IfName) -> Result<()> {
        let now = Attributes::of(link, self);
        if let Some(promisc) = self.promisc
            && promisc != (link.promiscuity != 0)
        {
            let count = link.promiscuity;
            return Err(Error::internal(format!(
                "Error: Tuning link {ifname} configured promisc is {promisc}, current value is {count}"
            )));
        }
        let text = |mac: Option<Mac>| mac.map(|mac| mac.to_string());
        same(ifname, "Ethernet", text(self.mac), text(self.mac.and(link.mac)))?;
        same(ifname, "MTU", self.mtu, now.mtu)?;
        same(ifname, "all-multicast mode", self.allmulti, now.allmulti)?;
        same(ifname, "Transmit Queue Length", self.txqlen, now.txqlen)
    }
}

fn same<T: PartialEq + ToString>(
    ifname: &IfName,
    what: &str,
    wanted: Option<T>,
    now: Option<T>,
) -> Result<()> {
    if wanted == now {
        return Ok(());
    }
    let [wanted, now] = [wanted, now].map(|v| v.map(|v| v.to_string()).unwrap_or_default());
    Err(Error::internal(format!(
        "Error: Tuning configured {what} of {ifname} is {wanted}, current value is {now}"
    )))
}

/// One change, and what it is called.
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
