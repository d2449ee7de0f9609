//! The keys of the plugin, and their validation.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::Deserialize;

use crate::netfilter::iptables::table;
use crate::netfilter::ports::conditions::{ConditionRefusal, MappingConditions};
use crate::netfilter::ports::{
    self, IptablesOptions, ListenAddresses, MappedPort, SourceTranslation,
};
use crate::netfilter::{IpFamily, PacketFilter, RuleBackend};
use crate::netlink::nftables::TransportProtocol;
use cni::error::{Error, ErrorCode, Result};
use cni::ip;

/// The default bit of packets' marks that requests masquerading.
const MARK_BIT: u8 = 13;

/// The maximum number of rules for the ports of a family: lists of networks multiply the rules.
const MOST_RULES: usize = 10_000;

/// The keys of a portmap plugin.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PortmapConfig {
    /// `iptables` or `nftables`. Default: [`RuleBackend::choose_for_add`].
    backend: String,
    /// Translate the source address where replies would not come back otherwise. Default: true.
    snat: Option<bool>,
    /// Translate the source address of all connections.
    masq_all: bool,
    /// The bit of packets' marks that requests masquerading, 0 to 31, with iptables. Default: 13.
    mark_masq_bit: Option<i64>,
    /// A chain of the table nat that sets such a mark, instead of our own; with iptables.
    external_set_mark_chain: Option<String>,
    /// Additional conditions for IPv4, as words of the back end.
    conditions_v4: Vec<String>,
    /// Additional conditions for IPv6.
    conditions_v6: Vec<String>,
    /// The networks and addresses of the clients that may use the ports. Default: all clients.
    allow_from: Option<Vec<String>>,
    runtime_config: PortmapRuntimeConfig,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PortmapRuntimeConfig {
    /// The ports (capability `portMappings`).
    port_mappings: Vec<PortMappingConfig>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PortMappingConfig {
    host_port: i64,
    container_port: i64,
    /// `tcp`, `udp` or `sctp`.
    protocol: String,
    /// The host's address. `0.0.0.0` and `::` are all addresses of their family. Default: all
    /// addresses.
    #[serde(rename = "hostIP")]
    host_ip: String,
}

impl PortmapConfig {
    /// The configured back end, after validation of all keys except the ports.
    pub(super) fn configured_backend(&self) -> Result<Option<RuleBackend>> {
        if self.external_set_mark_chain.is_some() && self.mark_masq_bit.is_some() {
            return Err(Error::config("Cannot specify externalSetMarkChain and markMasqBit"));
        }
        self.mark_bit()?;
        self.allowed_clients()?;
        let backend = RuleBackend::parse(Some(&self.backend), "unrecognized backend")?;
        backend.map_or(Ok(()), |backend| self.require_keys_of(backend))?;
        Ok(backend)
    }

    /// The back end for ADD.
    pub(super) fn choose_backend(&self, filter: &PacketFilter) -> Result<RuleBackend> {
        let backend =
            RuleBackend::choose_for_add(self.configured_backend()?, filter, &ports::FEATURE);
        self.require_keys_of(backend).map(|()| backend)
    }

    /// The networks of the clients that may use the ports; `None` means all clients.
    pub(super) fn allowed_clients(&self) -> Result<Option<Vec<IpNet>>> {
        let Some(texts) = &self.allow_from else { return Ok(None) };
        if texts.is_empty() {
            return Err(Error::config("\"allowFrom\" is empty: no client could use the ports")
                .with_details("list networks or addresses of clients, or leave the key out"));
        }
        let ports = self.port_count();
        if texts.len().saturating_mul(ports) > MOST_RULES {
            return Err(too_many_rules("allowFrom", ports));
        }
        ip::parse_networks("allowFrom", texts).map(Some)
    }

    /// The number of ports, at least 1.
    fn port_count(&self) -> usize {
        self.runtime_config.port_mappings.len().max(1)
    }

    /// The allowed networks of a family; none if all clients are allowed.
    fn allowed_networks(&self, family: IpFamily) -> Result<Vec<IpNet>> {
        let mut nets = self.allowed_clients()?.unwrap_or_default();
        nets.retain(|net| IpFamily::of_address(net.addr()) == family);
        Ok(nets)
    }

    fn mark_bit(&self) -> Result<u8> {
        let bit = self.mark_masq_bit.unwrap_or(MARK_BIT.into());
        u8::try_from(bit)
            .ok()
            .filter(|bit| *bit < 32)
            .ok_or_else(|| Error::config("MasqMarkBit must be between 0 and 31"))
    }

    /// A key that has no effect with the back end.
    pub(super) fn ineffective_key(&self, backend: RuleBackend) -> Option<Error> {
        let is_unused = backend == RuleBackend::Nftables && self.mark_masq_bit.is_some();
        is_unused.then(|| {
            Error::config("\"markMasqBit\" has no effect with the back end nftables")
                .with_details("choose the back end \"iptables\", or remove the key")
        })
    }

    /// Refuses keys for the other back end only.
    pub(super) fn require_keys_of(&self, backend: RuleBackend) -> Result<()> {
        let is_iptables = backend == RuleBackend::Iptables;
        let (name, other) =
            if is_iptables { ("iptables", "nftables") } else { ("nftables", "iptables") };
        let mut foreign = Vec::new();
        if !is_iptables && self.external_set_mark_chain.is_some() {
            foreign.push("externalSetMarkChain");
        }
        for (key, words) in self.condition_lists() {
            let first = words.first().filter(|first| !first.is_empty());
            if first.is_some_and(|first| first.starts_with(['-', '!']) != is_iptables) {
                foreign.push(key);
            }
        }
        if !foreign.is_empty() {
            let keys = foreign.join(" ");
            return Err(Error::config(format!(
                "{name} backend was requested but configuration contains {other}-specific options \
                 [{keys}]"
            )));
        }
        if is_iptables {
            self.require_iptables_words()
        } else {
            self.nftables_conditions(backend).map(drop)
        }
    }

    /// Validates the words that are passed to iptables.
    fn require_iptables_words(&self) -> Result<()> {
        if let Some(chain) = &self.external_set_mark_chain {
            table::require_chain_name("externalSetMarkChain", chain)?;
        }
        for (key, words) in self.condition_lists() {
            table::require_words(key, words)?;
            // iptables refuses a second source.
            let source = words.iter().find(|word| ["-s", "--src", "--source"].contains(&&***word));
            if let Some(source) = source.filter(|_| self.allow_from.is_some()) {
                return Err(Error::config(format!("\"{source}\" of {key} beside \"allowFrom\""))
                    .with_details("with iptables, sources can be in one of the two keys only"));
            }
        }
        Ok(())
    }

    fn condition_lists(&self) -> [(&'static str, &Vec<String>); 2] {
        [("conditionsV4", &self.conditions_v4), ("conditionsV6", &self.conditions_v6)]
    }

    /// The conditions with nftables, the allowed clients included. With iptables they are
    /// [`IptablesOptions`].
    pub(super) fn nftables_conditions(&self, backend: RuleBackend) -> Result<MappingConditions> {
        if backend == RuleBackend::Iptables {
            return Ok(MappingConditions::default());
        }
        let ports = self.port_count();
        let with_clients = |family, words: &[String], protocol| {
            let nets: Vec<_> =
                self.allowed_networks(family)?.iter().map(ToString::to_string).collect();
            let clients = format!("{protocol} saddr {{ {} }}", nets.join(", "));
            Ok::<_, Error>([words, &[clients][usize::from(nets.is_empty())..]].concat())
        };
        let v4 = with_clients(IpFamily::V4, &self.conditions_v4, "ip")?;
        let v6 = with_clients(IpFamily::V6, &self.conditions_v6, "ip6")?;
        MappingConditions::parse(&v4, &v6, MOST_RULES / ports).map_err(|(family, why)| {
            let [(v4, _), (v6, _)] = self.condition_lists();
            let key = if family == IpFamily::V4 { v4 } else { v6 };
            match why {
                ConditionRefusal::Word(word) => {
                    let msg = format!("\"{key}\": \"{word}\" is not supported with nftables");
                    Error::new(ErrorCode::UNSUPPORTED_FIELD, msg).with_details(
                        "supported are \"ip saddr\", \"ip daddr\" (\"ip6\" for IPv6) and \
                         \"iifname\", \"!=\", and lists in braces; or choose the back end \
                         \"iptables\"",
                    )
                }
                ConditionRefusal::TooMany => too_many_rules(key, ports),
            }
        })
    }

    pub(super) fn iptables_options(&self) -> Result<IptablesOptions> {
        self.require_iptables_words()?;
        Ok(IptablesOptions {
            mark_bit: self.mark_bit()?,
            set_mark_chain: self.external_set_mark_chain.clone(),
            conditions: [self.conditions_v4.clone(), self.conditions_v6.clone()],
            clients: self.allowed_clients()?.unwrap_or_default(),
        })
    }

    /// Which connections' source addresses are translated.
    pub(super) fn source_translation(&self) -> SourceTranslation {
        match (self.snat.unwrap_or(true), self.masq_all) {
            (false, _) => SourceTranslation::Never,
            (true, true) => SourceTranslation::Always,
            (true, false) => SourceTranslation::WhereNeeded,
        }
    }

    /// The ports, each once.
    pub(super) fn parse_mappings(&self) -> Result<Vec<MappedPort>> {
        let mut all: Vec<MappedPort> = Vec::new();
        for mapping in &self.runtime_config.port_mappings {
            let mapping = mapping.to_mapped_port()?;
            let shared = |other: &MappedPort| other.shares_port_with(&mapping);
            if all
                .iter()
                .any(|other| shared(other) && other.container_port != mapping.container_port)
            {
                let (port, proto) = (mapping.host_port, mapping.proto);
                let msg = format!("host port {port}/{proto} is mapped to two container ports");
                return Err(Error::config(msg).with_details(
                    "no hostIP, \"0.0.0.0\" and \"::\" mean all addresses: choose another \
                     hostPort for one of them",
                ));
            }
            if !all.iter().any(|other| shared(other) && other.includes_addresses_of(&mapping)) {
                // A mapping for all addresses replaces one for those of a family.
                all.retain(|other| !(shared(other) && mapping.includes_addresses_of(other)));
                all.push(mapping);
            }
        }
        Ok(all)
    }

    /// The valid ports, for DEL, which finds others without the configuration.
    pub(super) fn valid_mappings(&self) -> Vec<MappedPort> {
        let all = self.runtime_config.port_mappings.iter();
        all.filter_map(|mapping| mapping.to_mapped_port().ok()).collect()
    }
}

impl PortMappingConfig {
    fn to_mapped_port(&self) -> Result<MappedPort> {
        let container_port = parse_port("container", self.container_port)?;
        let host_port = parse_port("host", self.host_port)?;
        let proto = match self.protocol.to_ascii_lowercase().as_str() {
            "tcp" => TransportProtocol::Tcp,
            "udp" => TransportProtocol::Udp,
            "sctp" => TransportProtocol::Sctp,
            _ => {
                let msg =
                    format!("invalid protocol \"{}\" of host port {host_port}", self.protocol);
                return Err(Error::config(msg).with_details("use tcp, udp or sctp"));
            }
        };
        Ok(MappedPort { proto, listen: self.listen_addresses()?, host_port, container_port })
    }

    fn listen_addresses(&self) -> Result<ListenAddresses> {
        if self.host_ip.is_empty() {
            return Ok(ListenAddresses::Everywhere);
        }
        let addr: IpAddr = ip::parse_ip(&self.host_ip)
            .map_err(|_| Error::config(format!("invalid hostIP \"{}\"", self.host_ip)))?;
        let family = ListenAddresses::Family(IpFamily::of_address(addr));
        Ok(if addr.is_unspecified() { family } else { ListenAddresses::Address(addr) })
    }
}

fn too_many_rules(key: &str, ports: usize) -> Error {
    Error::config(format!("\"{key}\": more than {MOST_RULES} rules for {ports} ports"))
        .with_details("each list of networks multiplies the rules: write larger networks")
}

fn parse_port(side: &str, number: i64) -> Result<u16> {
    u16::try_from(number).ok().filter(|port| *port > 0).ok_or_else(|| {
        Error::config(format!("Invalid {side} port number: {number}"))
            .with_details("a port is a number from 1 to 65535")
    })
}
