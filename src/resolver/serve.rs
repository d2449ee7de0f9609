//! The life of a query: who asks, whether the name is allowed, the upstream's answer, and the
//! addresses that are put in force before it is sent.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use futures::future::FutureExt;
use socket2::Socket;

use super::allow::{Addresses, Grant};
use super::asked::NameVerdict;
use super::containers::{Container, Containers};
use super::grants::GrantThreads;
use super::limits::{Counted, JournalLimit};
use super::message::{Question, Unanswered, UpstreamAnswer, parse_query};
use super::servers::ConfiguredServers;
use super::upstream::Upstreams;
use crate::netfilter::egress::probe::PROBE_NAME;
use cni::error::Result;

/// The maximum number of queries of a container, and of all, that are not answered yet.
const MOST_OF_CONTAINER: usize = 64;
const MOST_OF_ALL: usize = 4096;
/// The maximum number of files about names that one second writes.
const MOST_FILES: usize = 64;
const LOOPBACK: &str = "lo";

/// Who asks.
#[derive(Debug)]
pub enum Asker {
    Container(Rc<Container>),
    /// The node itself, which verifies that the resolver runs.
    Node,
}

/// The state of the resolver.
pub struct Resolver {
    containers: RefCell<Containers>,
    servers: RefCell<ConfiguredServers>,
    upstreams: RefCell<Rc<Upstreams>>,
    threads: GrantThreads,
    /// For questions about interfaces.
    socket: Socket,
    outstanding: Rc<Cell<usize>>,
    journal: RefCell<JournalLimit>,
    /// The containers whose names will be written.
    unwritten: RefCell<VecDeque<Rc<Container>>>,
}

/// A query that is not answered yet.
#[derive(Debug)]
pub struct Ticket {
    container: Rc<Container>,
    _counted: [Counted; 2],
}

impl Resolver {
    pub fn new(
        containers: Containers,
        servers: ConfiguredServers,
        threads: GrantThreads,
        socket: Socket,
    ) -> Resolver {
        Resolver {
            containers: RefCell::new(containers),
            upstreams: RefCell::new(servers.upstreams()),
            servers: RefCell::new(servers),
            threads,
            socket,
            outstanding: Rc::default(),
            journal: RefCell::new(JournalLimit::new(Instant::now())),
            unwritten: RefCell::default(),
        }
    }

    /// Takes changes of records over. To be called before each query that has arrived is looked at.
    ///
    /// Fails if records cannot be watched any more.
    pub fn refresh_containers(&self) -> Result<()> {
        self.containers.borrow_mut().refresh()
    }

    /// Who sends packets from `source` that enter the host by the interface of this index.
    pub fn find_asker(&self, interface: u32, source: IpAddr) -> Option<Asker> {
        // Not remembered: the kernel uses an index again.
        let name = rustix::net::netdevice::index_to_name(&self.socket, interface).ok()?;
        if name == LOOPBACK && source.is_loopback() {
            return Some(Asker::Node);
        }
        self.containers.borrow().find(&name, source).map(Asker::Container)
    }

    /// Who has connected from `source` to the host's address `local`, if only one container can
    /// have.
    pub fn find_asker_by_router(&self, local: IpAddr, source: IpAddr) -> Option<Asker> {
        self.containers.borrow().find_by_router(local, source).map(Asker::Container)
    }

    /// Admits a query; `None` if the container asks too often, or has too many queries that are not
    /// answered yet.
    pub fn admit(&self, container: &Rc<Container>) -> Option<Ticket> {
        let usage = &container.usage;
        if !usage.queries.borrow_mut().take(Instant::now()) {
            return None;
        }
        let of_container = Counted::new(&usage.outstanding, MOST_OF_CONTAINER)?;
        let of_all = Counted::new(&self.outstanding, MOST_OF_ALL)?;
        Some(Ticket { container: Rc::clone(container), _counted: [of_container, of_all] })
    }

    /// The answer to a message of a container; `None` for none. `limit` has the size of the largest
    /// answer to a question.
    pub async fn answer(
        &self,
        ticket: &Ticket,
        message: &[u8],
        limit: impl FnOnce(&Question) -> usize,
    ) -> Option<Vec<u8>> {
        let question = match parse_query(message) {
            Ok(question) => question,
            Err(Unanswered::Refused(answer)) => return Some(answer),
            Err(Unanswered::Dropped) => return None,
        };
        let container = &ticket.container;
        // ADD asks by the container whether the resolver can be reached.
        if question.name == PROBE_NAME {
            return Some(question.refusal());
        }
        let is_allowed = container.policies.answers(&question.name);
        let is_audited = container.policies.is_audited();
        if !is_allowed && !is_audited {
            if container.policies.has_prefix_of(&question.name) {
                return Some(question.absence());
            }
            self.note(container, &question.name, &[], NameVerdict::Refused);
            return Some(question.refusal());
        }
        let found = match self.ask_upstream(container, &question).await {
            Ok(found) => found,
            Err(why) => {
                self.log(format_args!("could not resolve \"{}\": {why}", question.name));
                return Some(question.failure());
            }
        };
        let told = if is_allowed {
            self.put_in_force(container, &question.name, &found.addresses).await
        } else {
            Ok(found.addresses.clone())
        };
        let allowed = match told {
            Ok(allowed) => allowed,
            Err(error) => {
                let name = &question.name;
                self.log(format_args!("could not allow the addresses of \"{name}\": {error}"));
                if !is_audited {
                    return Some(question.failure());
                }
                // Whatever happens, the mode audit changes nothing for the container.
                found.addresses.clone()
            }
        };
        self.note_addresses(container, &question.name, &found.addresses, &allowed);
        let limit = limit(&question);
        Some(question.answer(&found, &allowed, limit))
    }

    /// The answer of the upstream servers; that to an equal question of the container, if one is open.
    async fn ask_upstream(
        &self,
        container: &Container,
        question: &Question,
    ) -> Result<Rc<UpstreamAnswer>, String> {
        let (key, open) = (question.key(), &container.usage.open);
        let known = open.borrow().get(&key).cloned();
        let asked = known.unwrap_or_else(|| {
            let (upstreams, question) = (Rc::clone(&self.upstreams.borrow()), question.clone());
            let asked = async move { upstreams.resolve(&question).await.map(Rc::new) };
            let asked = asked.boxed_local().shared();
            open.borrow_mut().insert(key, asked.clone());
            asked
        });
        let answer = asked.clone().await;
        // A later question may be open under the same key already.
        open.borrow_mut().retain(|_, other| !other.ptr_eq(&asked));
        answer
    }

    /// The answer to the node's own query.
    pub fn answer_node(message: &[u8]) -> Option<Vec<u8>> {
        let question = parse_query(message).ok()?;
        (question.name == PROBE_NAME).then(|| question.no_records())
    }

    /// Puts the addresses in force, and returns those that may be told.
    async fn put_in_force(
        &self,
        container: &Container,
        name: &str,
        addresses: &Addresses,
    ) -> Result<Addresses> {
        if addresses.is_empty() {
            return Ok(Vec::new());
        }
        let grant = Grant {
            owner: container.owner.clone(),
            policies: container.policies.clone(),
            name: name.to_owned(),
            addresses: addresses.clone(),
        };
        // Any number that is always the same for a container.
        let number = container.instance.bytes().map(usize::from).sum();
        // Others' answers do not wait behind many of one container.
        self.threads.allow(number, grant, &container.usage.grants).await
    }

    /// Notes the addresses that were left out of an answer; in the mode audit those that it has.
    fn note_addresses(
        &self,
        container: &Rc<Container>,
        name: &str,
        found: &Addresses,
        allowed: &Addresses,
    ) {
        let ips = |all: &Addresses| all.iter().map(|(ip, _)| *ip).collect::<Vec<IpAddr>>();
        let (mut refused, allowed) = (ips(found), ips(allowed));
        refused.retain(|ip| !allowed.contains(ip));
        if !refused.is_empty() && self.note(container, name, &refused, NameVerdict::Refused) {
            let id = container.owner.attachment_id().id;
            self.log(format_args!("\"{name}\" must not lead container {id} to {refused:?}"));
        }
        if container.policies.is_audited() {
            self.note(container, name, &allowed, NameVerdict::Noted);
        }
    }

    /// Notes a name. Returns whether the name, or an address, was not noted before.
    fn note(
        &self,
        container: &Rc<Container>,
        name: &str,
        ips: &[IpAddr],
        verdict: NameVerdict,
    ) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let usage = &container.usage;
        let is_new = usage.asked.borrow_mut().note(name, ips, verdict, now);
        if !usage.is_asked_changed.replace(true) {
            self.unwritten.borrow_mut().push_back(Rc::clone(container));
        }
        is_new
    }

    /// Writes a line to the journal, unless there are too many.
    pub fn log(&self, line: fmt::Arguments<'_>) {
        match self.journal.borrow_mut().admit(Instant::now()) {
            Some(0) => warn!("{line}"),
            Some(dropped) => warn!("{line} (before it {dropped} lines were dropped)"),
            None => {}
        }
    }

    /// The work of each second: changed records, names that were asked for, other servers.
    ///
    /// Fails if records cannot be watched any more.
    pub fn work_of_second(&self) -> Result<()> {
        self.refresh_containers()?;
        self.write_names();
        let mut servers = self.servers.borrow_mut();
        match servers.refresh() {
            Ok(true) => *self.upstreams.borrow_mut() = servers.upstreams(),
            Ok(false) => {}
            Err(error) => self.log(format_args!("could not read the servers: {error}")),
        }
        Ok(())
    }

    fn write_names(&self) {
        for _ in 0..MOST_FILES {
            let Some(container) = self.unwritten.borrow_mut().pop_front() else { return };
            container.usage.is_asked_changed.set(false);
            // It may have ended meanwhile.
            if !self.containers.borrow().has_instance(&container.instance) {
                continue;
            }
            let saved = container.usage.asked.borrow().save(&container.instance);
            if let Err(error) = saved {
                self.log(format_args!("could not write the names of a container: {error}"));
            }
        }
    }
}
