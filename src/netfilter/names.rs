//! Names and comments of an attachment's chains, rules and elements: the reference plugins' names,
//! so that either implementation finds the objects of the other.

use std::collections::HashSet;

use crate::attachment::AttachmentRecord;
pub use crate::attachment::{AttachmentId, network_hash, sha512_hex};
use crate::netlink::nftables::{SetElement, cut_comment};

/// The maximum length of a chain name in iptables.
const CHAIN: usize = 28;

/// The maximum length of the comment of an iptables rule: `XT_MAX_COMMENT_LEN` - 1.
pub const RULE_COMMENT: usize = 255;

impl AttachmentId<'_> {
    /// The name of the iptables chain of this container and network: `CNI-`, a prefix such as
    /// `DN-`, and a hash.
    pub fn iptables_chain(&self, prefix: &str) -> String {
        let start = format!("CNI-{prefix}");
        let hash = sha512_hex([self.network, self.id].concat(), CHAIN - start.len());
        start + &hash
    }

    /// The network and container of iptables rules, as the reference writes them.
    pub fn rule_name(&self) -> String {
        format!("{}{}\"", rule_comment_prefix(self.network), self.id)
    }

    /// The comment of this container's iptables rules: the [name](AttachmentId::rule_name), cut as
    /// the kernel does.
    pub fn rule_comment(&self) -> String {
        let mut text = self.rule_name();
        if text.len() > RULE_COMMENT {
            let end = (0..=RULE_COMMENT).rev().find(|at| text.is_char_boundary(*at));
            text.truncate(end.unwrap_or_default());
        }
        text
    }

    /// The comment of this attachment's rules in the reference's nftables layout.
    pub fn reference_comment(&self) -> String {
        let [network, ifname, id] = self.unquoted_names();
        cut_comment(&format!("{}, net: {network}, if: {ifname}, id: {id}", self.instance_id()))
            .to_owned()
    }

    /// The comment of this attachment's objects in our own layouts: as
    /// [`AttachmentId::reference_comment`], but if it is too long, the end of the network's
    /// name is cut rather than the container's id. Parsed by [`parse_label`].
    pub fn object_label(&self) -> String {
        let [network, ifname, id] = self.unquoted_names();
        cut_comment(&format!("{}, id: {id}, if: {ifname}, net: {network}", self.instance_id()))
            .to_owned()
    }

    fn unquoted_names(&self) -> [String; 3] {
        [self.network, self.ifname, self.id].map(|text| text.replace('"', ""))
    }

    /// Whether an object with this comment belongs to this attachment.
    pub fn owns_comment(&self, comment: Option<&str>) -> bool {
        self.comment_matcher()(comment)
    }

    /// Like [`AttachmentId::owns_comment`], for many comments.
    pub fn comment_matcher(&self) -> impl Fn(Option<&str>) -> bool + use<> {
        let instance = self.instance_id();
        move |comment| comment.is_some_and(|comment| comment.starts_with(&instance))
    }

    /// Whether an nftables object with this [label](AttachmentId::object_label) belongs to the same
    /// container in another network.
    pub fn is_of_same_container(&self, label: Option<&str>) -> bool {
        label.is_some_and(|label| {
            container_of_label(label) == Some(self.id)
                && !label.starts_with(&network_hash(self.network))
        })
    }
}

/// The comment of objects that all attachments of a network share.
pub fn network_label(network: &str) -> String {
    cut_comment(&format!("{}, net: {network}", network_hash(network))).to_owned()
}

/// The container's id in a [label](AttachmentId::object_label); `None` if it was cut.
pub fn container_of_label(label: &str) -> Option<&str> {
    Some(label.split_once(", id: ")?.1.split_once(", if: ")?.0)
}

/// The container's id, the interface and the network in a [label](AttachmentId::object_label). The
/// network's name may be cut; `None` if the interface or the id is cut.
pub fn parse_label(label: &str) -> Option<(&str, &str, &str)> {
    let (_, rest) = label.split_once(", id: ")?;
    let (id, rest) = rest.split_once(", if: ")?;
    let (ifname, network) = rest.split_once(", net: ")?;
    Some((id, ifname, network))
}

/// The prefix of the comments of a network's iptables rules, before the container's id and a
/// quotation mark.
pub fn rule_comment_prefix(network: &str) -> String {
    format!("name: \"{network}\" id: \"")
}

/// Whether the object with a comment belongs to the network and to no valid attachment.
pub fn stale_matcher(
    network: &str,
    valid: &[AttachmentId<'_>],
) -> impl Fn(Option<&str>) -> bool + use<> {
    let ours = network_hash(network) + "-";
    let valid: HashSet<String> = valid.iter().map(AttachmentId::instance_id).collect();
    move |comment| {
        comment.is_some_and(|text| {
            let instance = text.split(',').next().unwrap_or_default();
            text.starts_with(&ours) && !valid.contains(instance)
        })
    }
}

/// The [instance](AttachmentId::instance_id) in a comment.
pub fn instance_in_comment(comment: Option<&str>) -> Option<&str> {
    comment?.split(',').next()
}

/// Whether the comments name one owner.
pub fn has_same_owner(found: &SetElement, wanted: &SetElement) -> bool {
    instance_in_comment(found.comment.as_deref()) == instance_in_comment(wanted.comment.as_deref())
}

/// Whether an attachment leaves the element that was found for the key of `wanted` in place: its
/// owner is another attachment, and not certainly gone.
pub fn is_left_in_place(found: &SetElement, wanted: &SetElement) -> bool {
    !has_same_owner(found, wanted) && !is_owner_gone(found.comment.as_deref())
}

/// Whether the owner in a comment is certainly gone.
pub fn is_owner_gone(comment: Option<&str>) -> bool {
    instance_in_comment(comment)
        .and_then(AttachmentRecord::find_by_instance)
        .is_some_and(|record| record.is_gone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(network: &str, prefix: &str) -> String {
        AttachmentId { network, ifname: "eth0", id: "1234" }.iptables_chain(prefix)
    }

    #[test]
    fn chain_names_equal_the_references() {
        assert_eq!(chain("test", ""), "CNI-2bbe0c48b91a7d1b8a6753a8");
        assert_eq!(chain("testalongnamethatdoesnotmakesense", ""), "CNI-374f33fe84ab0ed84dcdebe3");
        assert_eq!(chain("test", "PREFIX-"), "CNI-PREFIX-2bbe0c48b91a7d1b8");
    }

    #[test]
    fn comments_equal_the_references() {
        let owner = AttachmentId { network: "unit-test", ifname: "eth0", id: "one" };
        assert_eq!(owner.instance_id(), "6fd94d501e58f0aa-287fc69eff0574a2");
        let comment = "6fd94d501e58f0aa-287fc69eff0574a2, net: unit-test, if: eth0, id: one";
        assert_eq!(owner.reference_comment(), comment);
        assert!(owner.owns_comment(Some(comment)) && !owner.owns_comment(None));
        assert!(!AttachmentId { ifname: "eth1", ..owner }.owns_comment(Some(comment)));
        assert_eq!(owner.rule_comment(), "name: \"unit-test\" id: \"one\"");
    }

    #[test]
    fn long_comments_are_cut() {
        let id = "x".repeat(200);
        let owner = AttachmentId { network: "n", ifname: "eth0", id: &id };
        for text in [owner.reference_comment(), owner.object_label()] {
            assert_eq!(text.len(), 128);
            assert!(owner.owns_comment(Some(&text)));
        }
        let network = "n".repeat(60);
        let comment = AttachmentId { network: &network, ..owner }.rule_comment();
        assert!(comment.len() == 255 && comment.ends_with("xxx"));
        assert_eq!(parse_label(&owner.object_label()), None);
    }

    #[test]
    fn quotes_of_names_do_not_end_a_comment() {
        let owner = AttachmentId { network: "n", ifname: "a\"b", id: "c" };
        let instance = owner.instance_id();
        assert_eq!(owner.object_label(), format!("{instance}, id: c, if: ab, net: n"));
        assert_eq!(owner.reference_comment(), format!("{instance}, net: n, if: ab, id: c"));
    }

    #[test]
    fn labels_identify_attachments() {
        let id = "f".repeat(64);
        let network = "a-network-with-a-rather-long-name";
        let label = AttachmentId { network, ifname: "eth0", id: &id }.object_label();
        assert_eq!(parse_label(&label), Some((id.as_str(), "eth0", &network[..8])));
    }

    #[test]
    fn a_container_is_recognised_in_another_network() {
        // No room for the network, nor for the whole interface.
        let id = "f".repeat(64);
        let owner = AttachmentId { network: "a", ifname: "a-long-ifname-0", id: &id };
        let label = owner.object_label();
        let same = |owner: AttachmentId<'_>| owner.is_of_same_container(Some(&label));
        assert_eq!(parse_label(&label), None);
        assert!(same(AttachmentId { network: "b", ..owner }) && !same(owner));
        assert!(!same(AttachmentId { ifname: "eth1", ..owner }), "in the same network");
        assert!(!same(AttachmentId { network: "b", id: &id[1..], ..owner }));
        assert!(!owner.is_of_same_container(None));
    }
}
