//! Names and comments of an attachment's chains, rules and elements: the reference plugins' names, so that either
//! implementation finds the objects of the other.

use std::collections::HashSet;

pub use crate::attachment::{Owner, hash, network_hash};
use crate::netlink::nftables::cut;

/// The maximum length of a chain name in iptables.
const CHAIN: usize = 28;

/// The maximum length of the comment of an iptables rule: `XT_MAX_COMMENT_LEN` - 1.
pub const RULE_COMMENT: usize = 255;

impl Owner<'_> {
    /// The name of the iptables chain of this container and network: `CNI-`, a prefix such as `DN-`, and a hash.
    pub fn chain(&self, prefix: &str) -> String {
        let mut name = format!("CNI-{prefix}{}", hash(&[self.network, self.id]));
        name.truncate(CHAIN);
        name
    }

    /// The network and container of iptables rules, as the reference writes them.
    pub fn rule_name(&self) -> String {
        format!("{}{}\"", rule_comment_of(self.network), self.id)
    }

    /// The comment of this container's iptables rules: the [name](Owner::rule_name), cut as the kernel does.
    pub fn rule_comment(&self) -> String {
        let mut text = self.rule_name();
        if text.len() > RULE_COMMENT {
            let end = (0..=RULE_COMMENT).rev().find(|at| text.is_char_boundary(*at));
            text.truncate(end.unwrap_or_default());
        }
        text
    }

    /// The comment of this attachment's rules in the reference's nftables layout.
    pub fn comment(&self) -> String {
        let [network, ifname, id] = self.plain();
        cut(&format!("{}, net: {network}, if: {ifname}, id: {id}", self.instance())).to_owned()
    }

    /// The comment of this attachment's objects in our own layouts: as [`Owner::comment`], but if it is too long,
    /// the end of the network's name is cut rather than the container's id. Parsed by [`identity`].
    pub fn label(&self) -> String {
        let [network, ifname, id] = self.plain();
        cut(&format!("{}, id: {id}, if: {ifname}, net: {network}", self.instance())).to_owned()
    }

    fn plain(&self) -> [String; 3] {
        [self.network, self.ifname, self.id].map(|text| text.replace('"', ""))
    }

    /// Whether an object with this comment belongs to this attachment.
    pub fn owns(&self, comment: Option<&str>) -> bool {
        self.matcher()(comment)
    }

    /// As [`Owner::owns`], for many comments.
    pub fn matcher(&self) -> impl Fn(Option<&str>) -> bool + use<> {
        let instance = self.instance();
        move |comment| comment.is_some_and(|comment| comment.starts_with(&instance))
    }

    /// Whether an nftables object with this [label](Owner::label) belongs to the same container in another network.
    pub fn is_of_same_container(&self, label: Option<&str>) -> bool {
        label.is_some_and(|label| {
            container(label) == Some(self.id) && !label.starts_with(&network_hash(self.network))
        })
    }
}

/// The comment of objects that all attachments of a network share.
pub fn network_label(network: &str) -> String {
    cut(&format!("{}, net: {network}", network_hash(network))).to_owned()
}

/// The container's id in a [label](Owner::label); `None` if it was cut.
pub fn container(label: &str) -> Option<&str> {
    Some(label.split_once(", id: ")?.1.split_once(", if: ")?.0)
}

/// The container's id, the interface and the network in a [label](Owner::label). The network's name may be cut;
/// `None` if the interface or the id is cut.
pub fn identity(label: &str) -> Option<(&str, &str, &str)> {
    let (_, rest) = label.split_once(", id: ")?;
    let (id, rest) = rest.split_once(", if: ")?;
    let (ifname, network) = rest.split_once(", net: ")?;
    Some((id, ifname, network))
}

/// The prefix of the comments of a network's iptables rules, before the container's id and a quotation mark.
pub fn rule_comment_of(network: &str) -> String {
    format!("name: \"{network}\" id: \"")
}

/// Whether the object with a comment belongs to the network and to no valid attachment.
pub fn stale(network: &str, valid: &[Owner<'_>]) -> impl Fn(Option<&str>) -> bool + use<> {
    let ours = network_hash(network) + "-";
    let valid: HashSet<String> = valid.iter().map(Owner::instance).collect();
    move |comment| {
        comment.is_some_and(|text| {
            let instance = text.split(',').next().unwrap_or_default();
            text.starts_with(&ours) && !valid.contains(instance)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(network: &str, prefix: &str) -> String {
        Owner { network, ifname: "eth0", id: "1234" }.chain(prefix)
    }

    #[test]
    fn chain_names_are_the_references() {
        assert_eq!(chain("test", ""), "CNI-2bbe0c48b91a7d1b8a6753a8");
        assert_eq!(chain("testalongnamethatdoesnotmakesense", ""), "CNI-374f33fe84ab0ed84dcdebe3");
        assert_eq!(chain("test", "PREFIX-"), "CNI-PREFIX-2bbe0c48b91a7d1b8");
    }

    #[test]
    fn comments_are_the_references() {
        let owner = Owner { network: "unit-test", ifname: "eth0", id: "one" };
        assert_eq!(owner.instance(), "6fd94d501e58f0aa-287fc69eff0574a2");
        let comment = "6fd94d501e58f0aa-287fc69eff0574a2, net: unit-test, if: eth0, id: one";
        assert_eq!(owner.comment(), comment);
        assert!(owner.owns(Some(comment)) && !owner.owns(None));
        assert!(!Owner { ifname: "eth1", ..owner }.owns(Some(comment)));
        assert_eq!(owner.rule_comment(), "name: \"unit-test\" id: \"one\"");
    }

    #[test]
    fn long_comments_are_cut() {
        let id = "x".repeat(200);
        let owner = Owner { network: "n", ifname: "eth0", id: &id };
        for text in [owner.comment(), owner.label()] {
            assert_eq!(text.len(), 128);
            assert!(owner.owns(Some(&text)));
        }
        let network = "n".repeat(60);
        let comment = Owner { network: &network, ..owner }.rule_comment();
        assert!(comment.len() == 255 && comment.ends_with("xxx"));
        assert_eq!(identity(&owner.label()), None);
    }

    #[test]
    fn labels_identify_the_attachment() {
        let id = "f".repeat(64);
        let network = "a-network-with-a-rather-long-name";
        let label = Owner { network, ifname: "eth0", id: &id }.label();
        assert_eq!(identity(&label), Some((id.as_str(), "eth0", &network[..8])));
    }

    #[test]
    fn a_container_is_recognised_in_another_network() {
        // No room for the network, nor for the whole interface.
        let id = "f".repeat(64);
        let owner = Owner { network: "a", ifname: "a-long-ifname-0", id: &id };
        let label = owner.label();
        let same = |owner: Owner<'_>| owner.is_of_same_container(Some(&label));
        assert_eq!(identity(&label), None);
        assert!(same(Owner { network: "b", ..owner }) && !same(owner));
        assert!(!same(Owner { ifname: "eth1", ..owner }), "in the same network");
        assert!(!same(Owner { network: "b", id: &id[1..], ..owner }));
        assert!(!owner.is_of_same_container(None));
    }
}
