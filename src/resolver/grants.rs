//! Threads that put addresses in force in both guards, which takes system calls that wait.
//!
//! A container is always served by the same thread, so that no two change its guards at once.

use std::cell::RefCell;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;

use tokio::sync::oneshot;

use super::allow::allow_addresses;
use super::containers::ContainerOwner;
use crate::netfilter::PacketFilter;
use crate::netfilter::egress::resolved::NamePolicies;
use crate::netlink::Netlink;
use cni::error::{Error, Result};

const THREADS: usize = 2;
/// The maximum number of answers that wait for a thread: a second's work.
const QUEUE: usize = 512;

/// Addresses with their time to live in seconds.
pub type Addresses = Vec<(IpAddr, u32)>;

/// The addresses of an answer.
#[derive(Debug)]
pub struct Grant {
    pub owner: Arc<ContainerOwner>,
    pub policies: Arc<NamePolicies>,
    pub name: String,
    pub addresses: Addresses,
}

/// A grant, and who waits for it.
type Job = (Grant, oneshot::Sender<Result<Addresses>>);

/// The queues of the threads.
#[derive(Debug)]
pub struct GrantThreads(RefCell<Vec<SyncSender<Job>>>);

impl GrantThreads {
    pub fn start() -> Result<GrantThreads> {
        let queues: Result<Vec<_>> = (0..THREADS).map(|_| start_thread()).collect();
        queues.map(|queues| GrantThreads(RefCell::new(queues)))
    }

    /// Puts the addresses in force. Returns those that the answer may have, with the time to live
    /// in the answer.
    ///
    /// Fails if the guards cannot be changed, or too many answers wait.
    pub async fn allow(&self, number: usize, grant: Grant) -> Result<Addresses> {
        let (sender, receiver) = oneshot::channel();
        self.enqueue(number % THREADS, (grant, sender))?;
        receiver.await.unwrap_or_else(|_| Err(Error::internal("the thread has ended")))
    }

    fn enqueue(&self, number: usize, job: Job) -> Result<()> {
        let mut queues = self.0.borrow_mut();
        match queues[number].try_send(job) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(_)) => Err(Error::internal("too many answers wait")),
            Err(TrySendError::Disconnected(_)) => {
                queues[number] = start_thread()?;
                Err(Error::internal("the thread has ended"))
            }
        }
    }
}

fn start_thread() -> Result<SyncSender<Job>> {
    let (sender, receiver) = sync_channel(QUEUE);
    let started = thread::Builder::new().name("grants".to_owned());
    started.spawn(move || serve(&receiver)).map_err(|e| Error::io("start a thread", &e))?;
    Ok(sender)
}

/// Does the jobs until the resolver ends.
fn serve(jobs: &Receiver<Job>) {
    let mut sockets = None;
    for (grant, waiting) in jobs {
        // The container has given up, or the resolver ends.
        if waiting.is_closed() {
            continue;
        }
        let outcome = put_in_force(&mut sockets, &grant);
        if outcome.is_err() {
            sockets = None;
        }
        drop(waiting.send(outcome));
    }
}

fn put_in_force(sockets: &mut Option<(PacketFilter, Netlink)>, grant: &Grant) -> Result<Addresses> {
    let (filter, host) = match sockets.take() {
        Some(open) => sockets.insert(open),
        None => sockets.insert((PacketFilter::new(), Netlink::open()?)),
    };
    let Grant { owner, policies, name, addresses } = grant;
    allow_addresses(filter, host, owner.attachment_id(), policies, name, addresses)
}
