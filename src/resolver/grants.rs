//! Threads that put addresses in force in both guards, which takes system calls that wait.
//!
//! A container is always served by the same thread, so that no two change its guards at once.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::thread;

use tokio::sync::{Semaphore, oneshot};

use super::allow::{Addresses, Grant};
use crate::netfilter::PacketFilter;
use crate::netlink::Netlink;
use cni::error::{Error, Result};

const THREADS: usize = 2;
/// The maximum number of answers that wait for a thread: a second's work.
const QUEUE: usize = 512;

/// A grant, and who waits for it; nobody waits for one to be renewed.
type Job = (Arc<Grant>, Option<oneshot::Sender<Result<Addresses>>>);

/// The queues of the threads.
#[derive(Debug)]
pub struct GrantThreads(RefCell<Vec<SyncSender<Job>>>);

impl GrantThreads {
    pub fn start() -> Result<GrantThreads> {
        let queues: Result<Vec<_>> = (0..THREADS).map(|_| start_thread()).collect();
        queues.map(|queues| GrantThreads(RefCell::new(queues)))
    }

    /// Puts the addresses in force. Returns those that the answer may have, with the time to live
    /// in the answer. The time of those that are in force already begins again after the answer.
    /// `number` is always the same for a container, `permits` are its answers that may wait.
    ///
    /// Fails if the guards cannot be changed, or too many answers wait.
    pub async fn allow(
        &self,
        number: usize,
        grant: Grant,
        permits: &Semaphore,
    ) -> Result<Addresses> {
        let (queue, grant) = (number % THREADS, Arc::new(grant));
        let told = if let Some(told) = grant.find_in_force() {
            told
        } else {
            let _permit = permits.acquire().await;
            let (sender, receiver) = oneshot::channel();
            self.enqueue(queue, (Arc::clone(&grant), Some(sender)))?;
            let told = receiver.await;
            told.unwrap_or_else(|_| Err(Error::internal("the thread has ended")))?
        };
        if grant.is_due() {
            let queued = self.enqueue(queue, (grant, None));
            queued.unwrap_or_else(|error| debug!("an address is not renewed: {error}"));
        }
        Ok(told)
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

/// Does the jobs until the resolver ends; renewals only while nobody waits for an answer.
fn serve(jobs: &Receiver<Job>) {
    let (mut sockets, mut renewals) = (None, VecDeque::<Arc<Grant>>::new());
    loop {
        let job = match jobs.try_recv() {
            Err(TryRecvError::Empty) => match renewals.pop_front() {
                Some(grant) => {
                    let renewed =
                        with_sockets(&mut sockets, |filter, host| grant.renew(filter, host));
                    if let Err(error) = renewed {
                        debug!("could not renew the addresses of \"{}\": {error}", grant.name);
                    }
                    continue;
                }
                None => jobs.recv().ok(),
            },
            job => job.ok(),
        };
        match job {
            None => return,
            Some((grant, None)) if renewals.len() < QUEUE => renewals.push_back(grant),
            Some((_, None)) => {}
            // The container has given up, or the resolver ends.
            Some((_, Some(waiting))) if waiting.is_closed() => {}
            Some((grant, Some(waiting))) => {
                let told = with_sockets(&mut sockets, |filter, host| grant.allow(filter, host));
                drop(waiting.send(told));
            }
        }
    }
}

/// Opens sockets if there are none, and closes them after a failure.
fn with_sockets<T>(
    sockets: &mut Option<(PacketFilter, Netlink)>,
    change: impl FnOnce(&PacketFilter, &Netlink) -> Result<T>,
) -> Result<T> {
    let (filter, host) = match sockets.take() {
        Some(open) => open,
        None => (PacketFilter::new(), Netlink::open()?),
    };
    let changed = change(&filter, &host)?;
    *sockets = Some((filter, host));
    Ok(changed)
}
