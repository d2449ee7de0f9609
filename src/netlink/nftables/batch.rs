//! Batches: changes that happen together or not at all.

use rtnetlink::packet_core::{NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL};

use super::super::attribute::{Attributes, HEADERS};
use super::super::packet::attrs;
use super::element::Element;
use super::object::{Chain, Family, Object, Set, Table, named};
use super::read::RuleInfo;
use super::rule::Rule;
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the kernel's names"))]
use super::uapi::*;
use super::userdata;

/// One change.
#[derive(Clone, Debug)]
pub(super) struct Change {
    /// `NFT_MSG_*`
    pub(super) message: u16,
    pub(super) flags: u16,
    pub(super) family: u8,
    pub(super) body: Vec<u8>,
    /// For what may be absent: the message that says so, on kernels that know it.
    pub(super) destroy: Option<u16>,
    /// What an error names.
    pub(super) op: &'static str,
    pub(super) target: String,
}

impl Change {
    /// The kind of expression at `offset` of the message, which the kernel blamed.
    pub(super) fn blamed(&self, offset: usize) -> Option<String> {
        if self.message != NFT_MSG_NEWRULE {
            return None;
        }
        let offset = offset.checked_sub(HEADERS)?;
        let list = attrs(&self.body).find(|attr| attr.kind == NFTA_RULE_EXPRESSIONS)?;
        let base = list.value.as_ptr().addr() - self.body.as_ptr().addr();
        let guilty = list.nested().find(|expr| {
            let at = base + (expr.value.as_ptr().addr() - list.value.as_ptr().addr());
            (at.saturating_sub(4)..at + expr.value.len()).contains(&offset)
        })?;
        let name = guilty.nested().find(|attr| attr.kind == NFTA_EXPR_NAME)?;
        Some(format!("in its {} expression", name.text()))
    }
}

/// Changes in their order. `ensure` makes what is not there, `add` fails when it is there, `del` does
/// nothing when it is not.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    pub(super) changes: Vec<Change>,
}

impl Batch {
    /// No change.
    pub fn new() -> Batch {
        Batch::default()
    }

    /// Whether something in the table changes.
    pub fn is_about(&self, table: Table<'_>) -> bool {
        let names = |change: &Change| {
            let name = attrs(&change.body).find(|attr| attr.kind == NFTA_TABLE_NAME);
            name.is_some_and(|name| name.text() == table.name)
        };
        let is_about = |change: &Change| change.family == table.family as u8 && names(change);
        self.changes.iter().any(is_about)
    }

    /// The changes of `other` behind these.
    pub fn append(&mut self, other: Batch) -> &mut Batch {
        self.changes.extend(other.changes);
        self
    }

    /// Makes the table, chain or set if it is not there; a chain that is there keeps its policy. The
    /// kernel notes an update of a chain, which makes closing the socket slow: where that matters, look
    /// before.
    pub fn ensure(&mut self, object: impl Into<Object>) -> &mut Batch {
        self.make(object.into(), NLM_F_CREATE, "ensure")
    }

    /// Makes the table, chain or set.
    pub fn add(&mut self, object: impl Into<Object>) -> &mut Batch {
        self.make(object.into(), NLM_F_CREATE | NLM_F_EXCL, "add")
    }

    fn make(&mut self, object: Object, flags: u16, op: &'static str) -> &mut Batch {
        let Object { family, message, name: mut body, made, text } = object;
        body.raw(made.as_bytes());
        if message == NFT_MSG_NEWSET {
            body.be32(NFTA_SET_ID, self.changes.len() + 1);
        }
        self.push(message, flags, family, body, (op, text))
    }

    /// Deletes the table with all that is in it, the chain with its rules, the set with its elements.
    /// Nothing may lead to a chain or use a set.
    pub fn del(&mut self, object: impl Into<Object>) -> &mut Batch {
        let Object { family, message, name, text, .. } = object.into();
        self.push(message + 2, 0, family, name, ("delete", text)).tolerate()
    }

    /// Deletes the rules of the chain, which must be there.
    pub fn flush_chain(&mut self, chain: Chain<'_>) -> &mut Batch {
        let body = named(chain.table, NFTA_RULE_CHAIN, chain.name);
        self.push(NFT_MSG_DELRULE, 0, chain.table.family, body, ("flush chain", chain.to_string()))
    }

    /// Deletes all elements of the set or map, which must be there.
    pub fn flush_set(&mut self, set: Set<'_>) -> &mut Batch {
        let body = named(set.table, NFTA_SET_ELEM_LIST_SET, set.name);
        self.push(NFT_MSG_DELSETELEM, 0, set.table.family, body, ("flush", set.to_string()))
    }

    /// Adds an element whose key is not there.
    pub fn add_element(&mut self, element: &Element) -> &mut Batch {
        self.put_element(element, NLM_F_CREATE | NLM_F_EXCL, "add element", "to")
    }

    /// Adds an element if its key is not there; a key with other data is an error, another comment
    /// stays. To replace whatever is there, delete and add in one batch.
    pub fn ensure_element(&mut self, element: &Element) -> &mut Batch {
        self.put_element(element, NLM_F_CREATE, "ensure element", "in")
    }

    fn put_element(
        &mut self,
        element: &Element,
        flags: u16,
        op: &'static str,
        to: &str,
    ) -> &mut Batch {
        let what = (op, format!("{element} {to} {}", element.set));
        self.push(NFT_MSG_NEWSETELEM, flags, element.set.table.family, element.write(true), what)
    }

    /// Deletes the element with this key.
    pub fn del_element(&mut self, element: &Element) -> &mut Batch {
        let what = ("delete element", format!("{element} from {}", element.set));
        let body = element.write(false);
        self.push(NFT_MSG_DELSETELEM, 0, element.set.table.family, body, what).tolerate()
    }

    /// Adds a rule at the end of the chain.
    pub fn append_rule(&mut self, chain: Chain<'_>, rule: &Rule) -> &mut Batch {
        let mut body = named(chain.table, NFTA_RULE_CHAIN, chain.name);
        body.nest(NFTA_RULE_EXPRESSIONS, |list| rule.write(chain.table.family, list));
        let mut named = String::new();
        if let Some(comment) = &rule.comment {
            body.bytes(NFTA_RULE_USERDATA, &userdata::comment(comment));
            named = format!("{comment:?} ");
        }
        let what = ("add rule", format!("{named}to chain {chain}"));
        self.push(NFT_MSG_NEWRULE, NLM_F_CREATE | NLM_F_APPEND, chain.table.family, body, what)
    }

    /// Deletes the rule with this handle.
    pub fn del_rule(&mut self, chain: Chain<'_>, handle: u64) -> &mut Batch {
        let mut body = named(chain.table, NFTA_RULE_CHAIN, chain.name);
        body.be64(NFTA_RULE_HANDLE, handle);
        let what = ("delete rule", format!("{handle} from chain {chain}"));
        self.push(NFT_MSG_DELRULE, 0, chain.table.family, body, what).tolerate()
    }

    /// Deletes these rules of the table.
    pub fn del_rules(&mut self, table: Table<'_>, rules: &[RuleInfo]) -> &mut Batch {
        for rule in rules {
            self.del_rule(table.chain(&rule.chain), rule.handle);
        }
        self
    }

    fn push(
        &mut self,
        message: u16,
        flags: u16,
        family: Family,
        body: Attributes,
        (op, target): (&'static str, String),
    ) -> &mut Batch {
        let (family, body) = (family as u8, body.into_bytes());
        self.changes.push(Change { message, flags, family, body, destroy: None, op, target });
        self
    }

    /// What the last change deletes may be absent.
    fn tolerate(&mut self) -> &mut Batch {
        if let Some(last) = self.changes.last_mut() {
            last.destroy = match last.message {
                NFT_MSG_DELTABLE => Some(NFT_MSG_DESTROYTABLE),
                NFT_MSG_DELCHAIN => Some(NFT_MSG_DESTROYCHAIN),
                NFT_MSG_DELRULE => Some(NFT_MSG_DESTROYRULE),
                NFT_MSG_DELSET => Some(NFT_MSG_DESTROYSET),
                _ => Some(NFT_MSG_DESTROYSETELEM),
            };
        }
        self
    }
}
