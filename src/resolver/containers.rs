//! The containers that may ask: an index of the records with names in their policies, kept current
//! by inotify(7).

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use futures::future::{LocalBoxFuture, Shared};
use tokio::sync::Semaphore;

use super::asked::{self, AskedNames};
use super::limits::TokenBucket;
use super::message::UpstreamAnswer;
use super::watch::{RecordChanges, RecordWatch};
use crate::attachment::{AttachmentId, AttachmentRecord, StoredRecord};
use crate::netfilter::egress::resolved::NamePolicies;
use crate::netfilter::egress::{EgressPart, RECORDS};
use cni::error::Result;

/// The queries per second of a container, and how many it may send at once.
const RATE: u32 = 100;
const BURST: u32 = 500;

/// The maximum number of its answers that wait for a thread, or are in one.
const MOST_GRANTS: usize = 8;

/// A question, whose answer several queries of a container wait for. With a query for each of them a
/// forger who works with the container would have many numbers and ports to hit.
pub type OpenQuestion = Shared<LocalBoxFuture<'static, Result<Rc<UpstreamAnswer>, String>>>;

/// The identity of a container, which the threads that open addresses need, too.
#[derive(Debug, PartialEq, Eq)]
pub struct ContainerOwner {
    network: String,
    ifname: String,
    id: String,
}

impl ContainerOwner {
    pub fn of(owner: AttachmentId<'_>) -> ContainerOwner {
        ContainerOwner {
            network: owner.network.to_owned(),
            ifname: owner.ifname.to_owned(),
            id: owner.id.to_owned(),
        }
    }

    pub fn attachment_id(&self) -> AttachmentId<'_> {
        AttachmentId { network: &self.network, ifname: &self.ifname, id: &self.id }
    }
}

/// What a container uses of the resolver. It stays the same when the policies change.
#[derive(Debug)]
pub struct ContainerUse {
    pub queries: RefCell<TokenBucket>,
    /// The number of queries that are not answered yet.
    pub outstanding: Rc<Cell<usize>>,
    /// The number of TCP connections.
    pub connections: Rc<Cell<usize>>,
    /// The questions that upstream servers have not answered yet.
    pub open: RefCell<HashMap<(String, u16), OpenQuestion>>,
    /// The answers that wait for a thread, or are in one.
    pub grants: Semaphore,
    pub asked: RefCell<AskedNames>,
    /// Whether `asked` will be written.
    pub is_asked_changed: Cell<bool>,
}

/// A container with names in its policies, as its record has it.
#[derive(Debug)]
pub struct Container {
    /// The [instance](AttachmentId::instance_id) of the attachment.
    pub instance: String,
    pub owner: Arc<ContainerOwner>,
    pub policies: Arc<NamePolicies>,
    pub usage: Rc<ContainerUse>,
    arrives_at: Vec<String>,
    ips: Vec<IpAddr>,
    routers: Vec<IpAddr>,
    /// The record, without its egress policy.
    record: AttachmentRecord,
}

impl Container {
    fn from_record(
        stored: &StoredRecord<EgressPart>,
        usage: Option<Rc<ContainerUse>>,
    ) -> Result<Container> {
        let (owner, part) = (stored.attachment_id(), &stored.content);
        let instance = owner.instance_id();
        let usage = usage.unwrap_or_else(|| {
            Rc::new(ContainerUse {
                queries: RefCell::new(TokenBucket::new(BURST, RATE, Instant::now())),
                outstanding: Rc::default(),
                connections: Rc::default(),
                open: RefCell::default(),
                grants: Semaphore::new(MOST_GRANTS),
                asked: RefCell::new(AskedNames::load(&instance)),
                is_asked_changed: Cell::new(false),
            })
        });
        Ok(Container {
            instance,
            owner: Arc::new(ContainerOwner::of(owner)),
            policies: Arc::new(NamePolicies::new(part)?),
            usage,
            arrives_at: part.arrives_at.clone(),
            ips: part.ips.clone(),
            routers: part.routers.clone(),
            record: stored.record.clone(),
        })
    }
}

/// All containers that may ask.
#[derive(Debug)]
pub struct Containers {
    watch: RecordWatch,
    by_instance: HashMap<String, Rc<Container>>,
    /// The containers by each of their addresses. Containers of different networks may have the
    /// same one.
    by_source: HashMap<IpAddr, Vec<Rc<Container>>>,
}

impl Containers {
    /// Reads all records, and begins to watch them.
    pub fn read_all() -> Result<Containers> {
        let watch = RecordWatch::start()?;
        let (by_instance, by_source) = Default::default();
        let mut containers = Containers { watch, by_instance, by_source };
        containers.read_again();
        Ok(containers)
    }

    /// Takes changes of records over that were made before the call.
    ///
    /// Fails if records cannot be watched any more.
    pub fn refresh(&mut self) -> Result<()> {
        match self.watch.read_changes()? {
            RecordChanges::Of(instances) => {
                for instance in instances {
                    match RECORDS.find_part(&instance) {
                        Some(stored) => self.take_over(&instance, &stored),
                        None => self.forget(&instance),
                    }
                }
            }
            RecordChanges::All => self.read_again(),
        }
        Ok(())
    }

    fn read_again(&mut self) {
        let mut ended: HashSet<String> = self.by_instance.keys().cloned().collect();
        for stored in RECORDS.iter_parts::<EgressPart>() {
            let instance = stored.attachment_id().instance_id();
            ended.remove(&instance);
            self.take_over(&instance, &stored);
        }
        for instance in ended {
            self.forget(&instance);
        }
    }

    /// Puts the container of a record in the index, in place of an earlier state of it.
    fn take_over(&mut self, instance: &str, stored: &StoredRecord<EgressPart>) {
        let known = self.by_instance.get(instance);
        // The resolver itself rewrites records with the addresses that it opens.
        if known.is_some_and(|known| {
            known.record == stored.record && known.policies.are_of(&stored.content)
        }) {
            return;
        }
        let usage = known.map(|known| Rc::clone(&known.usage));
        self.remove(instance);
        if !stored.content.has_names() {
            return;
        }
        match Container::from_record(stored, usage) {
            Ok(container) => self.insert(Rc::new(container)),
            // Nothing is answered: the record is of a newer version, or damaged.
            Err(error) => warn!("could not compile the policies of {instance}: {error}"),
        }
    }

    fn insert(&mut self, container: Rc<Container>) {
        for ip in &container.ips {
            self.by_source.entry(*ip).or_default().push(Rc::clone(&container));
        }
        self.by_instance.insert(container.instance.clone(), container);
    }

    fn remove(&mut self, instance: &str) {
        let Some(container) = self.by_instance.remove(instance) else { return };
        for ip in &container.ips {
            if let Some(all) = self.by_source.get_mut(ip) {
                all.retain(|other| other.instance != instance);
                if all.is_empty() {
                    self.by_source.remove(ip);
                }
            }
        }
    }

    /// Forgets an attachment that has ended, or one without a policy.
    fn forget(&mut self, instance: &str) {
        if self.by_instance.contains_key(instance) {
            self.remove(instance);
            asked::forget_names(instance).unwrap_or_else(|error| debug!("could not {error}"));
        }
    }

    pub fn has_instance(&self, instance: &str) -> bool {
        self.by_instance.contains_key(instance)
    }

    /// The number of containers.
    pub fn len(&self) -> usize {
        self.by_instance.len()
    }

    /// The container whose packets from `source` enter the host by the interface `arrival`. Of
    /// several records the last one counts: the others are of containers that ended without DEL.
    pub fn find(&self, arrival: &str, source: IpAddr) -> Option<Rc<Container>> {
        let all = self.by_source.get(&source)?.iter();
        let at_interface = all.filter(|it| it.arrives_at.iter().any(|name| name == arrival));
        at_interface.max_by_key(|container| container.record.created).cloned()
    }

    /// The only container with the address `source` and the router `router`.
    pub fn find_by_router(&self, router: IpAddr, source: IpAddr) -> Option<Rc<Container>> {
        let mut all = self.by_source.get(&source)?.iter().filter(|it| it.routers.contains(&router));
        let first = all.next()?;
        all.next().is_none().then(|| Rc::clone(first))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::attachment::file::record_path;
    use crate::netns::isolate_test_thread;

    /// The attachments of a test, each test with a network of its own. Their records are removed at
    /// the end.
    struct Attachments(&'static str);

    impl Attachments {
        /// In a network namespace of its own, so that no other records are of this host.
        fn of_network(network: &'static str) -> Attachments {
            isolate_test_thread();
            Attachments(network)
        }

        fn owner(&self, id: &'static str) -> AttachmentId<'static> {
            AttachmentId { network: self.0, ifname: "eth0", id }
        }
    }

    impl Drop for Attachments {
        fn drop(&mut self) {
            for id in ["c1", "c2"] {
                RECORDS.remove_part(self.owner(id)).unwrap();
            }
        }
    }

    fn addr(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// A container behind these interfaces that may reach `name`.
    fn part(arrives_at: &[&str], name: &str) -> EgressPart {
        let policy = format!(r#"{{"allow": [{{"to": ["{name}"], "ports": ["tcp/443"]}}]}}"#);
        EgressPart {
            arrives_at: arrives_at.iter().map(|name| (*name).to_owned()).collect(),
            ips: vec![addr("10.1.0.2"), addr("fd00::2")],
            routers: vec![addr("10.1.0.1")],
            policies: vec![serde_json::from_str(&policy).unwrap()],
            ..EgressPart::default()
        }
    }

    #[test]
    fn a_record_appears_changes_and_goes() {
        let attachments = Attachments::of_network("resolver-1");
        let owner = attachments.owner("c1");
        let mut containers = Containers::read_all().unwrap();
        assert_eq!(containers.len(), 0);
        RECORDS.add_part(owner, part(&["br0", "br0.5"], "a.example.org"));
        assert!(containers.find("br0", addr("10.1.0.2")).is_none());
        containers.refresh().unwrap();
        let first = containers.find("br0", addr("10.1.0.2")).unwrap();
        assert!(Rc::ptr_eq(&first, &containers.find("br0.5", addr("fd00::2")).unwrap()));
        assert_eq!(first.owner.attachment_id(), owner);
        assert!(first.policies.answers("a.example.org"));
        for (arrival, source) in [("br1", "10.1.0.2"), ("br0", "10.1.0.3"), ("", "10.1.0.2")] {
            assert!(containers.find(arrival, addr(source)).is_none(), "{arrival} {source}");
        }
        // A record that is written again changes nothing.
        RECORDS.add_part(owner, part(&["br0", "br0.5"], "a.example.org"));
        containers.refresh().unwrap();
        assert!(Rc::ptr_eq(&first, &containers.find("br0", addr("10.1.0.2")).unwrap()));
        // Other policies do, and limits continue.
        RECORDS.add_part(owner, part(&["br0"], "b.example.org"));
        containers.refresh().unwrap();
        let second = containers.find("br0", addr("10.1.0.2")).unwrap();
        assert!(second.policies.answers("b.example.org"));
        assert!(!second.policies.answers("a.example.org"));
        assert!(Rc::ptr_eq(&first.usage, &second.usage));
        assert!(containers.find("br0.5", addr("fd00::2")).is_none());
        // A policy without names, and the end of the attachment.
        RECORDS.add_part(owner, part(&["br0"], "192.0.2.1"));
        containers.refresh().unwrap();
        assert_eq!((containers.len(), containers.by_source.len()), (0, 0));
        RECORDS.add_part(owner, part(&["br0"], "b.example.org"));
        containers.refresh().unwrap();
        assert_eq!(containers.len(), 1);
        RECORDS.remove_part(owner).unwrap();
        containers.refresh().unwrap();
        assert_eq!((containers.len(), containers.by_source.len()), (0, 0));
    }

    #[test]
    fn containers_with_one_address_are_told_apart() {
        let attachments = Attachments::of_network("resolver-2");
        let (owner, other) = (attachments.owner("c1"), attachments.owner("c2"));
        RECORDS.add_part(owner, part(&["br0"], "a.example.org"));
        RECORDS.add_part(other, part(&["br1"], "b.example.org"));
        let mut containers = Containers::read_all().unwrap();
        let source = addr("10.1.0.2");
        assert_eq!(containers.find("br0", source).unwrap().owner.id, "c1");
        assert_eq!(containers.find("br1", source).unwrap().owner.id, "c2");
        // By the router it may be either.
        assert!(containers.find_by_router(addr("10.1.0.1"), source).is_none());
        let distant = EgressPart { routers: vec![addr("10.1.0.9")], ..part(&["br1"], "b.org") };
        RECORDS.add_part(other, distant);
        containers.refresh().unwrap();
        assert_eq!(containers.find_by_router(addr("10.1.0.9"), source).unwrap().owner.id, "c2");
        assert!(containers.find_by_router(addr("10.1.0.8"), source).is_none());
    }

    /// A container that ended without DEL, and the one that got its address and its interface.
    #[test]
    fn of_several_records_the_last_one_counts() {
        let attachments = Attachments::of_network("resolver-4");
        for id in ["c1", "c2"] {
            RECORDS.add_part(attachments.owner(id), part(&["br0"], "a.example.org"));
        }
        let mut containers = Containers::read_all().unwrap();
        let mut last_is = |id: &'static str, created| {
            let instance = attachments.owner(id).instance_id();
            let mut stored = RECORDS.find_part::<EgressPart>(&instance).unwrap();
            stored.record.created = created;
            containers.take_over(&instance, &stored);
            containers.find("br0", addr("10.1.0.2")).unwrap().owner.id.clone()
        };
        let later = i64::MAX / 2;
        assert_eq!(last_is("c1", later), "c1");
        assert_eq!(last_is("c2", later + 1), "c2");
        // It is attached again, with the same policies.
        assert_eq!(last_is("c1", later + 2), "c1");
    }

    #[test]
    fn changes_that_were_lost_are_taken_over() {
        let attachments = Attachments::of_network("resolver-5");
        let mut containers = Containers::read_all().unwrap();
        containers.watch.lose_changes();
        RECORDS.add_part(attachments.owner("c1"), part(&["br0"], "a.example.org"));
        containers.refresh().unwrap();
        assert!(containers.find("br0", addr("10.1.0.2")).is_some());
        RECORDS.add_part(attachments.owner("c2"), part(&["br1"], "a.example.org"));
        containers.refresh().unwrap();
        assert!(containers.find("br1", addr("10.1.0.2")).is_some());
    }

    #[test]
    fn lost_events_are_made_up_for() {
        let attachments = Attachments::of_network("resolver-3");
        let owner = attachments.owner("c1");
        RECORDS.add_part(owner, part(&["br0"], "a.example.org"));
        let mut containers = Containers::read_all().unwrap();
        // As after an overflow of the queue.
        RECORDS.add_part(attachments.owner("c2"), part(&["br1"], "b.example.org"));
        fs::remove_file(record_path(RECORDS.0, &owner.instance_id())).unwrap();
        containers.read_again();
        assert!(containers.find("br0", addr("10.1.0.2")).is_none());
        assert!(containers.find("br1", addr("10.1.0.2")).is_some());
        RECORDS.link_part(owner).unwrap();
        containers.refresh().unwrap();
        assert!(containers.find("br0", addr("10.1.0.2")).is_some());
    }
}
