//! Who owns an element or a rule, ready to be compared with the comments of many.

use crate::netfilter::names;

/// An attachment as the owner of rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    network: Network,
    ifname: String,
    id: String,
    instance: String,
    comment: String,
}

/// A network as the owner of rules that all its attachments share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    name: String,
    hash: String,
    comment: String,
}

impl Network {
    /// The network `name`.
    pub fn new(name: &str) -> Network {
        let hash = names::network_hash(name);
        let mut comment = format!("{hash}, net: {name}");
        // Names of networks are ASCII.
        comment.truncate(LONGEST);
        Network { name: name.to_owned(), hash, comment }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What is written to what it owns.
    pub fn comment(&self) -> &str {
        &self.comment
    }

    /// Whether what has this comment belongs to the network or one of its attachments.
    pub fn owns(&self, comment: Option<&str>) -> bool {
        comment.is_some_and(|text| text.starts_with(&self.hash))
    }

    /// Whether what has this comment belongs to an attachment of the network, but to none of
    /// `valid`.
    pub fn has_stale(&self, comment: Option<&str>, valid: &[Owner]) -> bool {
        self.owns(comment) && !valid.iter().any(|owner| owner.owns(comment))
    }
}

impl Owner {
    /// The attachment with its hashes.
    pub fn new(of: names::Owner<'_>) -> Owner {
        let network = Network::new(of.network);
        let [ifname, id] = [of.ifname, of.id].map(str::to_owned);
        Owner { network, ifname, id, instance: of.instance(), comment: of.label() }
    }

    /// The attachment itself.
    pub fn attachment(&self) -> names::Owner<'_> {
        names::Owner { network: &self.network.name, ifname: &self.ifname, id: &self.id }
    }

    /// What is written to what it owns.
    pub fn comment(&self) -> &str {
        &self.comment
    }

    /// Whether what has this comment belongs to the attachment.
    pub fn owns(&self, comment: Option<&str>) -> bool {
        comment.is_some_and(|text| text.starts_with(&self.instance))
    }

    /// The attachment's network.
    pub fn network(&self) -> &Network {
        &self.network
    }
}

/// The longest comment that nft keeps.
const LONGEST: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(network: &str, id: &str) -> Owner {
        Owner::new(names::Owner { network, ifname: "eth0", id })
    }

    #[test]
    fn stale_is_what_the_network_owns_and_no_valid_attachment() {
        let (one, two, other) = (owner("n", "1"), owner("n", "2"), owner("m", "1"));
        let valid = [one.clone()];
        let network = Network::new("n");
        assert!(!network.has_stale(Some(one.comment()), &valid));
        assert!(network.has_stale(Some(two.comment()), &valid));
        assert!(!network.has_stale(Some(other.comment()), &valid));
        assert!(!network.has_stale(None, &[]));
        assert!(network.owns(Some(network.comment())) && !one.owns(Some(network.comment())));
    }
}
