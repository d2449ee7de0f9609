//! Limits of what one container may cost: queries per second, and lines in the journal.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Tokens that are used up one by one, and come back with time.
#[derive(Debug)]
pub struct TokenBucket {
    most: u32,
    /// The time in which one token comes back.
    interval: Duration,
    tokens: u32,
    /// The time up to which tokens have come back.
    filled: Instant,
}

impl TokenBucket {
    /// A full bucket of `most` tokens, of which `per_second` come back each second.
    pub fn new(most: u32, per_second: u32, now: Instant) -> TokenBucket {
        let interval = Duration::from_secs(1) / per_second.max(1);
        TokenBucket { most, interval, tokens: most, filled: now }
    }

    /// Takes a token. Returns false if there is none.
    pub fn take(&mut self, now: Instant) -> bool {
        let elapsed = now.saturating_duration_since(self.filled);
        let back = elapsed.as_nanos() / self.interval.as_nanos().max(1);
        let back = u32::try_from(back).unwrap_or(u32::MAX);
        if back >= self.most - self.tokens {
            (self.tokens, self.filled) = (self.most, now);
        } else {
            self.tokens += back;
            self.filled += self.interval * back;
        }
        let is_there = self.tokens > 0;
        self.tokens = self.tokens.saturating_sub(1);
        is_there
    }
}

/// One of a limited number of things. Its end makes room for another one.
#[derive(Debug)]
pub struct Counted(Rc<Cell<usize>>);

impl Counted {
    /// Counts one more, unless there are `most`.
    pub fn new(count: &Rc<Cell<usize>>, most: usize) -> Option<Counted> {
        if count.get() >= most {
            return None;
        }
        count.set(count.get() + 1);
        Some(Counted(Rc::clone(count)))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.set(self.0.get().saturating_sub(1));
    }
}

/// Admits a line of the journal now and then, whatever containers do.
#[derive(Debug)]
pub struct JournalLimit {
    bucket: TokenBucket,
    dropped: u64,
}

impl JournalLimit {
    pub fn new(now: Instant) -> JournalLimit {
        JournalLimit { bucket: TokenBucket::new(20, 1, now), dropped: 0 }
    }

    /// The number of lines that were dropped before this one, if it may be written.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.bucket.take(now) {
            return Some(std::mem::take(&mut self.dropped));
        }
        self.dropped += 1;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_followed_by_the_rate() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut bucket = TokenBucket::new(500, 100, start);
        let taken = |bucket: &mut TokenBucket, now| (0..2000).filter(|_| bucket.take(now)).count();
        assert_eq!(taken(&mut bucket, start), 500);
        assert_eq!(taken(&mut bucket, at(9)), 0);
        assert_eq!(taken(&mut bucket, at(10)), 1);
        assert_eq!(taken(&mut bucket, at(1010)), 100);
        // Queries that come more often than tokens do not stop them.
        let steps = (1010..2010).map(|millis| taken(&mut bucket, at(millis + 1)));
        assert_eq!(steps.sum::<usize>(), 100);
        assert_eq!(taken(&mut bucket, at(1_000_000)), 500);
    }

    #[test]
    fn a_thing_makes_room_when_it_ends() {
        let count = Rc::default();
        let first = Counted::new(&count, 2).unwrap();
        let second = Counted::new(&count, 2).unwrap();
        assert!(Counted::new(&count, 2).is_none());
        drop(first);
        assert!(Counted::new(&count, 2).is_some());
        drop(second);
        assert_eq!(count.get(), 0);
    }

    #[test]
    fn dropped_lines_are_counted() {
        let start = Instant::now();
        let mut limit = JournalLimit::new(start);
        assert_eq!((0..100).filter(|_| limit.admit(start).is_some()).count(), 20);
        assert_eq!(limit.admit(start + Duration::from_secs(1)), Some(80));
    }
}
