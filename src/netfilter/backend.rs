//! Selects the back end, `nf_tables` or iptables, as the reference plugins do. [`PacketFilter`]
//! holds the sockets and the iptables programs of one call, and lists the features that have rules.

use std::cell::{Cell, OnceCell};
use std::net::IpAddr;
use std::path::Path;

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use super::AttachmentId;
use super::elements::RecordedElements;
use super::iptables::{
    self, ChainScope, IptablesFlavour, IptablesHandle, IptablesPrograms, LACKING_MODULE,
    nft_table_for,
};
use super::layout::{CniboxTables, HandoverCount, RestorableState};
use super::rules::RecordedRules;
use crate::attachment::{RecordStore, StoredRecord, decode_part};
use crate::cmd;
use crate::netlink;
pub use crate::netlink::IpFamily;
use crate::netlink::nftables::{NftSocket, NftTable, XtExtension};
use cni::error::{Error, ErrorContext, Result, join_outcomes};
use cni::files;
use cni::json::Json;

/// A table that does not exist: the reply to a query for it shows whether the kernel has
/// `nf_tables`.
const PROBE_RULE: NftTable<'_> = NftTable::new_inet("cnibox_probe");

/// The errors of a kernel without `nf_tables`, for requests or for the socket.
const MISSING_MODULE_HELP: [Errno; 4] =
    [Errno::EINVAL, Errno::EOPNOTSUPP, Errno::EPROTONOSUPPORT, Errno::EAFNOSUPPORT];

/// The table and the chains by which kubelet marks the flavour of iptables that it uses, since 1.24
/// and before (`IPTablesHintChain`, `KubeletCanary`).
const MANGLE: &str = "mangle";
const KUBELET: [&str; 2] = ["KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"];

/// The interface by which rules are created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RuleBackend {
    /// `nf_tables`, over netlink.
    Nftables,
    /// iptables, over netlink or by its programs.
    Iptables,
}

impl RuleBackend {
    /// Parses a name; `None` if it is empty. `unknown` is the beginning of the error message:
    /// `unknown ipmasq backend "ebtables"`, code 7.
    pub fn parse(value: Option<&str>, unknown: &str) -> Result<Option<RuleBackend>> {
        match value.unwrap_or_default() {
            "" => Ok(None),
            "nftables" => Ok(Some(RuleBackend::Nftables)),
            "iptables" => Ok(Some(RuleBackend::Iptables)),
            other => Err(Error::config(format!("{unknown} \"{other}\""))
                .with_details("the back ends are \"iptables\" and \"nftables\"")),
        }
    }

    /// For ADD: the configured back end; by default iptables if it is installed and works for the
    /// feature's rules, else nftables.
    pub fn choose_for_add(
        configured: Option<RuleBackend>,
        filter: &PacketFilter,
        feature: &FilterFeature,
    ) -> RuleBackend {
        configured.unwrap_or_else(|| RuleBackend::default_backend(filter, feature))
    }

    /// For CHECK: verifies the rules with the back end in the attachment's record. The reference
    /// writes no record and has fewer back ends than can be configured: without a record, it is
    /// enough if the check succeeds with either back end. If both fail, the error is that of
    /// the configured or default back end.
    pub fn check_rules(
        configured: Option<RuleBackend>,
        filter: &PacketFilter,
        feature: &FilterFeature,
        owner: AttachmentId<'_>,
        check: &dyn Fn(RuleBackend) -> Result<()>,
    ) -> Result<()> {
        if let Some(recorded) = feature.state.kept.read_content::<RecordedBackend>(owner) {
            return check(recorded.backend);
        }
        let first = RuleBackend::choose_for_add(configured, filter, feature);
        let other = match first {
            RuleBackend::Nftables => RuleBackend::Iptables,
            RuleBackend::Iptables => RuleBackend::Nftables,
        };
        check(first).or_else(|error| check(other).map_err(|_| error))
    }

    /// The back end of a record's part, if its feature has a choice of them.
    pub(super) fn of_part(part: &Json) -> Option<RuleBackend> {
        decode_part::<RecordedBackend>(part).map(|recorded| recorded.backend)
    }

    /// The back end that the reference would select. Only an iptables that is not on top of
    /// `nf_tables`, and was never used, is tried, which starts a process.
    pub fn default_backend(filter: &PacketFilter, feature: &FilterFeature) -> RuleBackend {
        let is_usable = filter.default_programs(IpFamily::V4).is_some_and(|programs| {
            if programs.are_on_nf_tables() && filter.has_nf_tables() {
                return filter.find_missing_extension(feature).is_none();
            }
            filter.has_iptables_in_use() || probe_iptables().is_ok()
        });
        if is_usable || !filter.has_nf_tables() {
            RuleBackend::Iptables
        } else {
            RuleBackend::Nftables
        }
    }

    /// For STATUS: fails with code 50 and a remedy if this back end cannot work for the features.
    pub fn require_usable(self, filter: &PacketFilter, features: &[FilterFeature]) -> Result<()> {
        let usable = match self {
            RuleBackend::Nftables => filter.require_nf_tables(),
            RuleBackend::Iptables => filter.require_iptables(features),
        };
        usable.or_unavailable()
    }
}

/// The part that the records of all features with a choice of back ends have in common.
#[derive(Deserialize)]
struct RecordedBackend {
    backend: RuleBackend,
}

/// Fails unless iptables can look for a rule with a comment, as all rules here have one. Status 1
/// means that there is no such rule.
fn probe_iptables() -> Result<()> {
    let Some(program) = cmd::find_program("iptables") else {
        return Err(iptables::not_found_error(IpFamily::V4));
    };
    let rule = ["-m", "comment", "--comment", "cnibox", "-j", "ACCEPT"];
    let look = ["-w", "5", "-t", "filter", "-C", "INPUT"];
    let output = cmd::run_program(&program, &[&look[..], &rule].concat(), "")?;
    if matches!(output.code, Some(0 | 1)) {
        return Ok(());
    }
    Err(output.failure_error().with_details(LACKING_MODULE))
}

/// A feature of the packet filter: the rules and elements that the records of attachments ask for.
/// [`reconcile`](super::reconcile) compares them with the kernel.
#[derive(Debug)]
pub struct FilterFeature {
    /// The records of the feature, and its state in our tables of `nf_tables`.
    pub state: RestorableState,
    /// The elements of attachments in these tables.
    pub elements: Option<RecordedElements>,
    /// The rules of attachments in iptables.
    pub rules: Option<RecordedRules>,
    /// Fails unless the other objects of an attachment are as its part of the record wants them.
    pub check: fn(&PacketFilter, AttachmentId<'_>, &Json) -> Result<()>,
    /// Whether the reference has created what the part wants in `nf_tables`.
    pub is_of_reference: fn(&NftSocket, AttachmentId<'_>, &Json) -> netlink::NetlinkResult<bool>,
    /// The part of a record, without the settings that another record decides, such as the policy
    /// of a bridge.
    pub decided_part: DecidedPart,
    /// Restores other objects from the records.
    pub restore: fn(&PacketFilter) -> Result<()>,
    /// Deletes all rules and elements of an attachment in any back end. Some addresses of the
    /// attachment may be missing in the list.
    pub remove: fn(&PacketFilter, AttachmentId<'_>, &[IpAddr]) -> Result<()>,
    /// The layouts that are handed over to the reference plugins, by a description of their
    /// objects.
    pub hand_over: &'static [(&'static str, HandOverStep)],
}

impl FilterFeature {
    /// A feature without objects, which does nothing.
    pub const fn new(state: RestorableState) -> FilterFeature {
        FilterFeature {
            state,
            elements: None,
            rules: None,
            check: |_, _, _| Ok(()),
            is_of_reference: |_, _, _| Ok(false),
            decided_part: |_, stored, _| Ok(stored.content.clone()),
            restore: |_| Ok(()),
            remove: |_, _, _| Ok(()),
            hand_over: &[],
        }
    }
}

/// See [`FilterFeature::decided_part`].
type DecidedPart = fn(&PacketFilter, &StoredRecord<Json>, &[StoredRecord<Json>]) -> Result<Json>;

/// Rewrites our layout into the reference's.
pub type HandOverStep = fn(&PacketFilter) -> Result<HandoverCount>;

/// The packet filter of the calling thread's namespace, opened on first use. A call of a plugin
/// uses one: the kernel is slow to close a socket that deleted something.
#[derive(Debug)]
pub struct PacketFilter {
    /// All features: after a flush the state of all features is restored at once.
    pub features: &'static [FilterFeature],
    nft: OnceCell<NftSocket>,
    /// Whether the kernel has `nf_tables`.
    present: OnceCell<bool>,
    /// The node's default programs of iptables for IPv4 and IPv6.
    programs: [OnceCell<Option<IptablesPrograms>>; 2],
    /// See [`node_flavour`](PacketFilter::node_flavour).
    flavour: OnceCell<IptablesFlavour>,
    /// The names of the tables of iptables-legacy for IPv4 and IPv6, one in each line.
    legacy: [OnceCell<String>; 2],
    /// Whether this call has seen that the [`localhost`](super::localhost) rules exist.
    pub(super) is_localhost_closed: Cell<bool>,
}

impl PacketFilter {
    /// The packet filter with these features. Opens nothing yet.
    pub(super) fn with_features(features: &'static [FilterFeature]) -> PacketFilter {
        PacketFilter {
            features,
            nft: OnceCell::new(),
            present: OnceCell::new(),
            programs: Default::default(),
            flavour: OnceCell::new(),
            legacy: Default::default(),
            is_localhost_closed: Cell::new(false),
        }
    }

    /// Our tables of `nf_tables`.
    pub fn own_tables(&self) -> netlink::NetlinkResult<CniboxTables<'_>> {
        let state = self.features.iter().map(|feature| feature.state).collect();
        Ok(CniboxTables { nft: self.nft_socket()?, state })
    }

    /// The socket of `nf_tables`.
    pub fn nft_socket(&self) -> netlink::NetlinkResult<&NftSocket> {
        if let Some(nft) = self.nft.get() {
            return Ok(nft);
        }
        let opened = NftSocket::open()?;
        Ok(self.nft.get_or_init(|| opened))
    }

    /// The socket of `nf_tables`; `None` if the kernel has no `nf_tables`, which takes one query.
    pub fn nft_socket_if_present(&self) -> Result<Option<&NftSocket>> {
        let present = match self.present.get() {
            Some(present) => *present,
            None => match self.nft_socket().and_then(|nft| nft.has_object(PROBE_RULE)) {
                Ok(_) => true,
                Err(error) if error.errno().is_some_and(|e| MISSING_MODULE_HELP.contains(&e)) => {
                    false
                }
                Err(error) => return Err(error.into()),
            },
        };
        Ok(if *self.present.get_or_init(|| present) { Some(self.nft_socket()?) } else { None })
    }

    /// Fails with a remedy if the kernel has no `nf_tables`.
    fn require_nf_tables(&self) -> Result<()> {
        self.nft_socket_if_present()?.map(drop).ok_or_else(|| {
            Error::internal("the kernel has no nf_tables")
                .with_details("load the module nf_tables, or choose the back end \"iptables\"")
        })
    }

    fn has_nf_tables(&self) -> bool {
        self.require_nf_tables().is_ok()
    }

    /// What the kernel lacks for the feature's rules of iptables on top of `nf_tables`.
    fn find_missing_extension(&self, feature: &FilterFeature) -> Option<&'static XtExtension> {
        let wanted = feature.rules.map_or(&[][..], |rules| rules.extensions);
        self.nft_socket().ok()?.find_missing_extension(IpFamily::V4, wanted)
    }

    fn require_iptables(&self, features: &[FilterFeature]) -> Result<()> {
        let programs = self
            .default_programs(IpFamily::V4)
            .ok_or_else(|| iptables::not_found_error(IpFamily::V4))?;
        if !programs.are_on_nf_tables() || !self.has_nf_tables() {
            return probe_iptables();
        }
        let missing = features.iter().find_map(|feature| self.find_missing_extension(feature));
        missing.map_or(Ok(()), |missing| Err(iptables::missing_extension_error(missing)))
    }

    /// The tables of the node's default iptables.
    pub fn default_iptables(&self, family: IpFamily) -> Result<IptablesHandle<'_>> {
        self.find_iptables(family, IptablesFlavour::Default)?
            .ok_or_else(|| iptables::not_found_error(family))
    }

    /// The tables of a flavour of iptables, if they can be changed.
    pub fn find_iptables(
        &self,
        family: IpFamily,
        flavour: IptablesFlavour,
    ) -> Result<Option<IptablesHandle<'_>>> {
        let flavour = match flavour {
            IptablesFlavour::Default => self.node_flavour(),
            other => other,
        };
        let is_on_nf_tables = match flavour {
            IptablesFlavour::Default => {
                self.default_programs(family).is_some_and(IptablesPrograms::are_on_nf_tables)
            }
            IptablesFlavour::Nft => true,
            IptablesFlavour::Legacy => false,
        };
        let nft = if is_on_nf_tables { self.nft_socket_if_present()? } else { None };
        Ok(IptablesHandle::open_if_usable(family, flavour, nft))
    }

    fn default_programs(&self, family: IpFamily) -> Option<&IptablesPrograms> {
        let programs = &self.programs[usize::from(family == IpFamily::V6)];
        let find = |flavour| IptablesPrograms::find_installed(family, flavour);
        programs
            .get_or_init(|| find(self.node_flavour()).or_else(|| find(IptablesFlavour::Default)))
            .as_ref()
    }

    /// The flavour of the node's rules: that of `iptables`, unless kubelet has marked the other one,
    /// in which kube-proxy has its rules. Starts a process only where both were used.
    pub fn node_flavour(&self) -> IptablesFlavour {
        *self.flavour.get_or_init(|| {
            let default = IptablesPrograms::find_installed(IpFamily::V4, IptablesFlavour::Default);
            let Some(default) = default else { return IptablesFlavour::Default };
            let (is_on_nf_tables, has_legacy) =
                (default.are_on_nf_tables(), self.has_legacy_table(IpFamily::V4, MANGLE));
            let in_nft = || self.has_any_chain(IpFamily::V4, MANGLE, &KUBELET).unwrap_or_default();
            let in_legacy = || has_legacy && iptables::has_legacy_chain(MANGLE, &KUBELET);
            let (other, is_marked) = if is_on_nf_tables {
                (IptablesFlavour::Legacy, has_legacy && !in_nft() && in_legacy())
            } else {
                (IptablesFlavour::Nft, in_nft() && !in_legacy())
            };
            let is_installed = || IptablesPrograms::find_installed(IpFamily::V4, other).is_some();
            if is_marked && is_installed() { other } else { IptablesFlavour::Default }
        })
    }

    /// The tables of each flavour of iptables that has one of the chains, or, without `chains`, a
    /// chain of any CNI plugin. For iptables-legacy it is enough that the table exists. Starts
    /// no process.
    pub fn iptables_with_chains(
        &self,
        family: IpFamily,
        table: &str,
        chains: &[&str],
    ) -> Result<Vec<IptablesHandle<'_>>> {
        let nft = self.has_any_chain(family, table, chains)?.then_some(IptablesFlavour::Nft);
        let legacy = self.has_legacy_table(family, table).then_some(IptablesFlavour::Legacy);
        let mut found = Vec::new();
        for flavour in nft.into_iter().chain(legacy) {
            found.extend(self.find_iptables(family, flavour)?);
        }
        Ok(found)
    }

    /// Deletes the rules of the table `name` that `plan` finds, in each family and flavour [with
    /// one of `chains`](Self::iptables_with_chains). Continues after an error; the errors are
    /// joined.
    pub(super) fn delete_iptables_rules(
        &self,
        name: &str,
        chains: &[&str],
        scope: ChainScope<'_>,
        plan: &dyn Fn(&mut iptables::IptablesTable, IpFamily),
    ) -> Result<()> {
        join_outcomes(IpFamily::BOTH.map(|family| {
            let found = self.iptables_with_chains(family, name, chains)?;
            join_outcomes(
                found.iter().map(|tables| {
                    tables.delete_from_table(name, scope, &|table| plan(table, family))
                }),
            )
        }))
    }

    /// DEL: warns of recorded rules in `chain` that are in a table of iptables-legacy, if none of
    /// its programs is installed any more.
    pub(super) fn warn_of_legacy_rules(
        &self,
        records: RecordStore,
        owner: AttachmentId<'_>,
        table: &str,
        chain: &str,
    ) {
        let has_programs = |family| {
            let find = |flavour| IptablesPrograms::find_installed(family, flavour);
            let default = || find(IptablesFlavour::Default);
            find(IptablesFlavour::Legacy).is_some()
                || default().is_some_and(|programs| !programs.are_on_nf_tables())
        };
        let is_lost = |family| {
            self.has_legacy_table(family, table)
                && !has_programs(family)
                && !self.has_any_chain(family, table, &[chain]).unwrap_or(true)
        };
        if IpFamily::BOTH.into_iter().any(is_lost)
            && records.read_content::<RecordedBackend>(owner).map(|it| it.backend)
                == Some(RuleBackend::Iptables)
        {
            warn!(
                "rules of container {} stay in chain {chain} of iptables-legacy, table {table}, \
                 none of whose programs is installed; install iptables-legacy, and call DEL again",
                owner.id
            );
        }
    }

    /// Whether `nf_tables` has one of these chains of iptables, or, without `chains`, one of any
    /// CNI plugin.
    pub(super) fn has_any_chain(
        &self,
        family: IpFamily,
        table: &str,
        chains: &[&str],
    ) -> Result<bool> {
        let table = nft_table_for(family, table);
        self.query_nft(&|nft| {
            if chains.is_empty() {
                let all = if nft.has_object(table)? { nft.dump_chains(table)? } else { Vec::new() };
                return Ok(all.iter().any(|chain| chain.name.starts_with("CNI-")));
            }
            for chain in chains {
                if nft.has_object(table.named_chain(chain))? {
                    return Ok(true);
                }
            }
            Ok(false)
        })
    }

    /// Whether a table of iptables is used in this namespace, and the kernel has matched comments
    /// for iptables-legacy.
    fn has_iptables_in_use(&self) -> bool {
        let matches = Path::new("/proc/thread-self/net/ip_tables_matches");
        ["nat", "filter"].iter().any(|name| self.has_legacy_table(IpFamily::V4, name))
            && files::read_text(matches, 64 << 10)
                .is_ok_and(|text| text.lines().any(|line| line == "comment"))
    }

    /// Whether iptables-legacy has used the table.
    pub(super) fn has_legacy_table(&self, family: IpFamily, table: &str) -> bool {
        let [v4, v6] = &self.legacy;
        let (names, file) = match family {
            IpFamily::V4 => (v4, "/proc/thread-self/net/ip_tables_names"),
            IpFamily::V6 => (v6, "/proc/thread-self/net/ip6_tables_names"),
        };
        let names =
            names.get_or_init(|| files::read_text(Path::new(file), 64 << 10).unwrap_or_default());
        names.lines().any(|name| name == table)
    }

    /// The lines of a built-in chain of iptables-legacy, if its table is used.
    pub fn list_legacy_chain(
        &self,
        family: IpFamily,
        table: &str,
        chain: &str,
    ) -> Option<Vec<String>> {
        self.has_legacy_table(family, table)
            .then(|| iptables::list_legacy_chain(family, table, chain))?
    }

    /// The result of a query; the default one if the kernel has no `nf_tables`.
    pub(super) fn query_nft<T: Default>(
        &self,
        query: &dyn Fn(&NftSocket) -> netlink::NetlinkResult<T>,
    ) -> Result<T> {
        Ok(self.nft_socket_if_present()?.map(query).transpose()?.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_end_names_are_parsed() {
        let parse = |value| RuleBackend::parse(value, "unknown ipmasq backend");
        assert_eq!(parse(None), Ok(None));
        assert_eq!(parse(Some("")), Ok(None));
        assert_eq!(parse(Some("nftables")), Ok(Some(RuleBackend::Nftables)));
        assert_eq!(parse(Some("iptables")), Ok(Some(RuleBackend::Iptables)));
        let error = parse(Some("ebtables")).unwrap_err();
        assert_eq!((error.code().0, error.message()), (7, "unknown ipmasq backend \"ebtables\""));
    }
}
