//! A table of ours that is handed over to the reference plugins, and how much of it was.

use std::fmt;

use crate::error::Result;
use crate::netlink;
use crate::netlink::nftables::{Batch, Nft, Table};

/// How much of one layout was handed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HandedOver {
    /// Objects that the reference has now: rules, ports, addresses or chains, as the layout counts.
    pub(super) objects: usize,
    /// Rules that are lost because their comments had no room for the container's id.
    pub(super) nameless: usize,
    /// Rules that are lost because they have conditions of one container.
    pub(super) conditional: usize,
}

impl HandedOver {
    /// So many objects, and nothing is lost.
    pub(super) fn all(objects: usize) -> HandedOver {
        HandedOver { objects, ..HandedOver::default() }
    }
}

impl fmt::Display for HandedOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} handed over", self.objects)?;
        for (lost, why) in [
            (self.nameless, "the container's id is too long for a comment"),
            (self.conditional, "the reference has no conditions of one container"),
        ] {
            if lost > 0 {
                write!(f, ", {lost} lost: {why}")?;
            }
        }
        Ok(())
    }
}

/// Deletes our table, if it is there, in one transaction with what `make` makes of it: no packet passes
/// in between.
pub(super) fn replace_table(
    nft: &Nft,
    table: Table<'_>,
    make: &dyn Fn(&Nft, &mut Batch) -> netlink::Result<HandedOver>,
) -> Result<HandedOver> {
    let mut handed = HandedOver::default();
    nft.update(&mut |nft| {
        let mut batch = Batch::new();
        handed = HandedOver::default();
        if nft.has(table)? {
            handed = make(nft, &mut batch)?;
            batch.del(table);
        }
        Ok(batch)
    })?;
    Ok(handed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_is_told_with_the_reason() {
        assert_eq!(HandedOver::all(3).to_string(), "3 handed over");
        let handed = HandedOver { objects: 1, nameless: 2, conditional: 3 };
        let expected = "1 handed over, 2 lost: the container's id is too long for a comment, \
                        3 lost: the reference has no conditions of one container";
        assert_eq!(handed.to_string(), expected);
    }
}
