//! The answer of an upstream server.
//!
//! Only its answer section is read, and of that only the chain of aliases that begins at the asked
//! name, and the records of the asked type at its end.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use domain::base::iana::{Class, Opcode, OptRcode, Rcode};
use domain::base::name::ToName;
use domain::base::rdata::UnknownRecordData;
use domain::base::record::Ttl;
use domain::base::wire::ParseError;
use domain::base::{Message, ParsedRecord, Rtype};
use domain::rdata::{A, Aaaa, Cname};

use super::{Question, WireName, service};

/// The longest chain of aliases that is followed.
const LONGEST_CHAIN: usize = 16;
/// The number of records at the end of the chain that are used.
const MOST_RECORDS: usize = 64;

/// What an upstream server answered, as far as the resolver uses it.
#[derive(Debug, Clone)]
pub struct UpstreamAnswer {
    /// The addresses of the asked family at the end of the chain, 64 at most, each once; with the
    /// smallest TTL on the way to it, in seconds.
    pub addresses: Vec<(IpAddr, u32)>,
    /// NOERROR or NXDOMAIN.
    pub(super) rcode: Rcode,
    /// The names that the asked one leads to, one after the other.
    pub(super) chain: Vec<WireName>,
    /// The smallest TTL of the aliases, in seconds; `u32::MAX` without any.
    pub(super) chain_ttl: u32,
    /// The records SVCB or HTTPS at the end of the chain, with their TTL as that of an address.
    pub(super) services: Vec<(UnknownRecordData<Vec<u8>>, u32)>,
}

/// Why a message is not the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoAnswer {
    /// It answers something else, or nothing: the right answer may still come.
    Foreign,
    /// The answer did not fit: it is to be asked for over TCP.
    Truncated,
    /// The server has no answer, or one that cannot be used; says why.
    Unusable(String),
}

impl fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoAnswer::Foreign => f.write_str("an answer to another question"),
            NoAnswer::Truncated => f.write_str("a truncated answer"),
            NoAnswer::Unusable(reason) => f.write_str(reason),
        }
    }
}

/// Where an alias leads.
struct Alias {
    target: WireName,
    /// In seconds.
    ttl: u32,
}

impl Question {
    /// Reads the answer to [`Question::upstream_query`] with the same `id`.
    pub fn read_answer(&self, id: u16, message: &[u8]) -> Result<UpstreamAnswer, NoAnswer> {
        let message = Message::from_slice(message).map_err(|_| NoAnswer::Foreign)?;
        let header = message.header();
        if header.id() != id || !header.qr() || header.opcode() != Opcode::QUERY {
            return Err(NoAnswer::Foreign);
        }
        let rcode = message.opt_rcode();
        let is_answer = rcode == OptRcode::NOERROR || rcode == OptRcode::NXDOMAIN;
        // A server that cannot read a query may return it without the question.
        let is_without_question = message.header_counts().qdcount() == 0 && !is_answer;
        if !is_without_question && !self.is_question_of(message) {
            return Err(NoAnswer::Foreign);
        }
        if !is_answer {
            return Err(NoAnswer::Unusable(rcode.to_string()));
        }
        if header.tc() {
            return Err(NoAnswer::Truncated);
        }
        self.collect_records(message)
    }

    fn is_question_of(&self, message: &Message<[u8]>) -> bool {
        // Names are compared without regard to upper and lower case.
        message.sole_question().is_ok_and(|question| question == self.asked)
    }

    fn collect_records(&self, message: &Message<[u8]>) -> Result<UpstreamAnswer, NoAnswer> {
        let aliases = read_aliases(message).map_err(malformed)?;
        let mut found = self.follow_aliases(&aliases)?;
        found.rcode = message.header().rcode();
        if found.rcode == Rcode::NOERROR && self.asked.qtype() != Rtype::CNAME {
            self.add_records(&mut found, message).map_err(malformed)?;
        }
        Ok(found)
    }

    /// The chain from the asked name, without the records at its end.
    fn follow_aliases(
        &self,
        aliases: &BTreeMap<WireName, Alias>,
    ) -> Result<UpstreamAnswer, NoAnswer> {
        let mut found = UpstreamAnswer {
            addresses: Vec::new(),
            rcode: Rcode::NOERROR,
            chain: Vec::new(),
            chain_ttl: u32::MAX,
            services: Vec::new(),
        };
        let mut end = self.asked.qname();
        while let Some(alias) = aliases.get(end) {
            end = &alias.target;
            found.chain_ttl = found.chain_ttl.min(alias.ttl);
            found.chain.push(alias.target.clone());
            if self.asked.qtype() == Rtype::CNAME {
                break;
            }
            if found.chain.len() > LONGEST_CHAIN {
                let msg = format!("more than {LONGEST_CHAIN} aliases, or a loop of them");
                return Err(NoAnswer::Unusable(msg));
            }
        }
        Ok(found)
    }

    /// Adds the records of the asked type at the end of the chain.
    fn add_records(
        &self,
        found: &mut UpstreamAnswer,
        message: &Message<[u8]>,
    ) -> Result<(), ParseError> {
        let end = found.chain.last().unwrap_or(self.asked.qname()).clone();
        for record in message.answer()? {
            let record = record?;
            let is_asked = record.class() == Class::IN
                && record.rtype() == self.asked.qtype()
                && record.owner() == end;
            if is_asked {
                found.add_record(record)?;
            }
        }
        Ok(())
    }
}

impl UpstreamAnswer {
    /// The addresses that are in `allowed`, with the smaller of both TTLs.
    pub(super) fn addresses_among(&self, allowed: &[(IpAddr, u32)]) -> Vec<(IpAddr, u32)> {
        let mut told = Vec::new();
        for (address, ttl) in &self.addresses {
            if let Some((_, limit)) = allowed.iter().find(|(other, _)| other == address) {
                told.push((*address, *ttl.min(limit)));
            }
        }
        told
    }

    fn add_record(&mut self, record: ParsedRecord<'_, [u8]>) -> Result<(), ParseError> {
        let ttl = seconds(record.ttl()).min(self.chain_ttl);
        match record.rtype() {
            Rtype::A => {
                if let Some(record) = record.into_record::<A>()? {
                    self.add_address(IpAddr::V4(record.data().addr()), ttl);
                }
            }
            Rtype::AAAA => {
                if let Some(record) = record.into_record::<Aaaa>()? {
                    self.add_address(IpAddr::V6(record.data().addr()), ttl);
                }
            }
            _ => {
                if let Some(data) = service::without_addresses(record)
                    && self.services.len() < MOST_RECORDS
                {
                    self.services.push((data, ttl));
                }
            }
        }
        Ok(())
    }

    fn add_address(&mut self, address: IpAddr, ttl: u32) {
        let is_known = self.addresses.iter().any(|(known, _)| *known == address);
        if !is_known && self.addresses.len() < MOST_RECORDS {
            self.addresses.push((address, ttl));
        }
    }
}

/// The aliases of an answer by the names that have them, whether the asked name leads there or not.
fn read_aliases(message: &Message<[u8]>) -> Result<BTreeMap<WireName, Alias>, ParseError> {
    let mut aliases = BTreeMap::new();
    for record in message.answer()? {
        let record = record?;
        if record.class() != Class::IN {
            continue;
        }
        if let Some(record) = record.into_record::<Cname<_>>()? {
            let alias =
                Alias { target: record.data().cname().to_vec(), ttl: seconds(record.ttl()) };
            aliases.entry(record.owner().to_vec()).or_insert(alias);
        }
    }
    Ok(aliases)
}

/// A TTL in seconds. One with the highest bit set counts as 0 (RFC 2181, section 8).
fn seconds(ttl: Ttl) -> u32 {
    let seconds = ttl.as_secs();
    if i32::try_from(seconds).is_ok() { seconds } else { 0 }
}

fn malformed(error: ParseError) -> NoAnswer {
    NoAnswer::Unusable(format!("malformed message: {error}"))
}
