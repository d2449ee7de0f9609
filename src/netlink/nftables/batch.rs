//! Batches: changes that happen together or not at all.

use super::super::attribute::{Attributes, HEADERS};
use super::super::packet::attrs;
use super::element::Element;
use super::object::{Base, Chain, DataType, Set, Table};
use super::rule::Rule;
use super::userdata;
use super::value::{byteorder, length, type_number};

const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;
const NLM_F_APPEND: u16 = 0x800;

pub(super) const NEWTABLE: u16 = 0;
const DELTABLE: u16 = 2;
const NEWCHAIN: u16 = 3;
const DELCHAIN: u16 = 5;
const NEWRULE: u16 = 6;
const DELRULE: u16 = 8;
const NEWSET: u16 = 9;
const DELSET: u16 = 11;
const NEWSETELEM: u16 = 12;
const DELSETELEM: u16 = 14;

/// For each message that deletes, the one that also works when there is nothing to delete.
const DESTROY: [(u16, u16); 5] =
    [(DELTABLE, 26), (DELCHAIN, 27), (DELRULE, 28), (DELSET, 29), (DELSETELEM, 30)];

/// The type of data that is a verdict.
const DATA_VERDICT: u32 = 0xffff_ff00;

pub(super) const RULE_EXPRESSIONS: u16 = 4;

/// One change.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) kind: u16,
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
        if self.kind != NEWRULE {
            return None;
        }
        let offset = offset.checked_sub(HEADERS)?;
        let list = attrs(&self.body).find(|attr| attr.kind == RULE_EXPRESSIONS)?;
        let base = list.value.as_ptr().addr() - self.body.as_ptr().addr();
        let guilty = list.nested().find(|expr| {
            let at = base + (expr.value.as_ptr().addr() - list.value.as_ptr().addr());
            (at.saturating_sub(4)..at + expr.value.len()).contains(&offset)
        })?;
        let name = guilty.nested().find(|attr| attr.kind == 1)?;
        Some(format!("in its {} expression", name.text()))
    }
}

/// Changes in their order. `ensure_x` makes what is not there, `add_x` fails when it is there,
/// `del_x` does nothing when it is not.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    pub(super) changes: Vec<Change>,
}

impl Batch {
    /// No change.
    pub fn new() -> Batch {
        Batch::default()
    }

    /// Whether nothing would change.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Whether something in the table changes.
    pub fn is_about(&self, table: Table<'_>) -> bool {
        let names = |change: &Change| {
            let name = attrs(&change.body).find(|attr| attr.kind == 1);
            name.is_some_and(|name| name.text() == table.name)
        };
        let is_about = |change: &Change| change.family == table.family.number() && names(change);
        self.changes.iter().any(is_about)
    }

    /// The changes of `other` behind these.
    pub fn append(&mut self, other: Batch) -> &mut Batch {
        self.changes.extend(other.changes);
        self
    }

    /// Makes the table if it is not there.
    pub fn ensure_table(&mut self, table: Table<'_>) -> &mut Batch {
        self.table(table, NEWTABLE, NLM_F_CREATE, "ensure table")
    }

    /// Makes the table.
    pub fn add_table(&mut self, table: Table<'_>) -> &mut Batch {
        self.table(table, NEWTABLE, NLM_F_CREATE | NLM_F_EXCL, "add table")
    }

    /// Deletes the table with all that is in it.
    pub fn del_table(&mut self, table: Table<'_>) -> &mut Batch {
        let table = Table { comment: None, ..table };
        self.table(table, DELTABLE, 0, "delete table").tolerate()
    }

    fn table(&mut self, table: Table<'_>, kind: u16, flags: u16, op: &'static str) -> &mut Batch {
        let mut body = Attributes::new();
        body.text(1, table.name);
        if kind == NEWTABLE {
            body.be32(2, 0);
        }
        if let Some(comment) = table.comment {
            body.bytes(6, &userdata::comment(comment));
        }
        self.push((kind, flags), table, body, (op, table.to_string()))
    }

    /// Makes the chain if it is not there; one that is there keeps its policy. The kernel notes an
    /// update of it, which makes closing the socket slow: where that matters, look before.
    pub fn ensure_chain(&mut self, chain: Chain<'_>) -> &mut Batch {
        self.chain(chain, NLM_F_CREATE, "ensure chain")
    }

    /// Makes the chain.
    pub fn add_chain(&mut self, chain: Chain<'_>) -> &mut Batch {
        self.chain(chain, NLM_F_CREATE | NLM_F_EXCL, "add chain")
    }

    fn chain(&mut self, chain: Chain<'_>, flags: u16, op: &'static str) -> &mut Batch {
        let mut body = named(chain.table, 3, chain.name);
        if let Some(Base { kind, hook, priority }) = chain.base {
            body.nest(4, |list| {
                list.be32(1, hook.number()).bytes(2, &priority.to_be_bytes());
            });
            body.text(7, kind);
        }
        if let Some(comment) = chain.comment {
            body.bytes(12, &userdata::comment(comment));
        }
        self.push((NEWCHAIN, flags), chain.table, body, (op, chain.to_string()))
    }

    /// Deletes the chain and its rules; nothing may jump to it.
    pub fn del_chain(&mut self, chain: Chain<'_>) -> &mut Batch {
        let body = named(chain.table, 3, chain.name);
        let what = ("delete chain", chain.to_string());
        self.push((DELCHAIN, 0), chain.table, body, what).tolerate()
    }

    /// Deletes the rules of the chain, which must be there.
    pub fn flush_chain(&mut self, chain: Chain<'_>) -> &mut Batch {
        let body = named(chain.table, 2, chain.name);
        self.push((DELRULE, 0), chain.table, body, ("flush chain", chain.to_string()))
    }

    /// Makes the set or map if it is not there.
    pub fn ensure_set(&mut self, set: Set<'_>) -> &mut Batch {
        self.set(set, NLM_F_CREATE, "ensure")
    }

    /// Makes the set or map.
    pub fn add_set(&mut self, set: Set<'_>) -> &mut Batch {
        self.set(set, NLM_F_CREATE | NLM_F_EXCL, "add")
    }

    fn set(&mut self, set: Set<'_>, flags: u16, op: &'static str) -> &mut Batch {
        let mut body = named(set.table, 2, set.name);
        let id = u32::try_from(self.changes.len()).unwrap_or_default() + 1;
        body.be32(3, set.flags()).be32(4, type_number(set.key)).be32(5, wire(length(set.key)));
        match set.data {
            Some(DataType::Values(types)) => {
                body.be32(6, type_number(types)).be32(7, wire(length(types)));
            }
            Some(DataType::Verdict) => {
                body.be32(6, DATA_VERDICT).be32(7, 0);
            }
            None => {}
        }
        let data = match set.data {
            Some(DataType::Values(types)) => Some(byteorder(types)),
            Some(DataType::Verdict) => Some(0),
            None => None,
        };
        body.be32(10, id).bytes(13, &userdata::set(byteorder(set.key), data, set.comment));
        self.push((NEWSET, flags), set.table, body, (op, set.to_string()))
    }

    /// Deletes the set or map with its elements; no rule may use it.
    pub fn del_set(&mut self, set: Set<'_>) -> &mut Batch {
        let body = named(set.table, 2, set.name);
        self.push((DELSET, 0), set.table, body, ("delete", set.to_string())).tolerate()
    }

    /// Deletes all elements of the set or map, which must be there.
    pub fn flush_set(&mut self, set: Set<'_>) -> &mut Batch {
        let body = named(set.table, 2, set.name);
        self.push((DELSETELEM, 0), set.table, body, ("flush", set.to_string()))
    }

    /// Adds an element whose key is not there.
    pub fn add_element(&mut self, set: Set<'_>, element: &Element) -> &mut Batch {
        let flags = NLM_F_CREATE | NLM_F_EXCL;
        self.element(set, element, (NEWSETELEM, flags), ("add element", "to"))
    }

    /// Adds an element if its key is not there; a key with other data is an error, another comment
    /// stays. To replace whatever is there, delete and add in one batch.
    pub fn ensure_element(&mut self, set: Set<'_>, element: &Element) -> &mut Batch {
        self.element(set, element, (NEWSETELEM, NLM_F_CREATE), ("ensure element", "in"))
    }

    /// Deletes the element with this key.
    pub fn del_element(&mut self, set: Set<'_>, element: &Element) -> &mut Batch {
        let what = ("delete element", "from");
        self.element(set, &element.bare(), (DELSETELEM, 0), what).tolerate()
    }

    fn element(
        &mut self,
        set: Set<'_>,
        element: &Element,
        kind: (u16, u16),
        (op, preposition): (&'static str, &str),
    ) -> &mut Batch {
        let body = element_body(set, element);
        self.push(kind, set.table, body, (op, format!("{element} {preposition} {set}")))
    }

    /// Adds a rule at the end of the chain.
    pub fn append_rule(&mut self, chain: Chain<'_>, rule: &Rule) -> &mut Batch {
        let mut body = named(chain.table, 2, chain.name);
        body.nest(RULE_EXPRESSIONS, |list| rule.write(chain.table.family, list));
        if let Some(userdata) = rule.userdata() {
            body.bytes(7, &userdata);
        }
        let named = rule.comment.as_ref().map(|c| format!("{c:?} ")).unwrap_or_default();
        let what = ("add rule", format!("{named}to chain {chain}"));
        self.push((NEWRULE, NLM_F_CREATE | NLM_F_APPEND), chain.table, body, what)
    }

    /// Deletes the rule with this handle.
    pub fn del_rule(&mut self, chain: Chain<'_>, handle: u64) -> &mut Batch {
        let mut body = named(chain.table, 2, chain.name);
        body.be64(3, handle);
        let what = ("delete rule", format!("{handle} from chain {chain}"));
        self.push((DELRULE, 0), chain.table, body, what).tolerate()
    }

    fn push(
        &mut self,
        (kind, flags): (u16, u16),
        table: Table<'_>,
        body: Attributes,
        (op, target): (&'static str, String),
    ) -> &mut Batch {
        let (family, body) = (table.family.number(), body.into_bytes());
        self.changes.push(Change { kind, flags, family, body, destroy: None, op, target });
        self
    }

    /// The last change may be unnecessary.
    fn tolerate(&mut self) -> &mut Batch {
        if let Some(last) = self.changes.last_mut() {
            last.destroy = DESTROY.iter().find(|(del, _)| *del == last.kind).map(|pair| pair.1);
        }
        self
    }
}

/// The table's name, and that of something in it.
pub(super) fn named(table: Table<'_>, kind: u16, name: &str) -> Attributes {
    let mut body = Attributes::new();
    body.text(1, table.name).text(kind, name);
    body
}

/// What names elements, to change or to find them.
pub(super) fn element_body(set: Set<'_>, element: &Element) -> Attributes {
    let mut body = named(set.table, 2, set.name);
    body.nest(3, |list| element.write(list));
    body
}

fn wire(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
