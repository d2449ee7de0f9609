//! Calls at the same time.

use std::process::{Child, Command};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::support::node::Container;

/// The maximum number of concurrent calls.
pub(crate) const WORKERS: usize = 16;

/// Runs `work` for 0..count in [`WORKERS`] threads. The threads, and so their child processes,
/// inherit the caller's namespaces.
pub(crate) fn at_once<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    at_once_in(WORKERS, count, work)
}

/// As [`at_once`], in another number of threads.
pub(crate) fn at_once_in<T: Send>(
    workers: usize,
    count: usize,
    work: impl Fn(usize) -> T + Sync,
) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let worker = || -> Vec<(usize, T)> {
        let mut done = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                return done;
            }
            done.push((i, work(i)));
        }
    };
    let mut done: Vec<(usize, T)> = thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().flat_map(|w| w.join().unwrap()).collect()
    });
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, value)| value).collect()
}

/// A process in the namespace of a container, until it is dropped.
pub(crate) struct Holder(Child);

impl Holder {
    pub(crate) fn of(container: &Container) -> Holder {
        Holder(container.run(|| Command::new("sleep").arg("600").spawn().unwrap()))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}
