//! Addresses that were freed a short while ago, and are kept from the next owner until what is on
//! its way to the former one has arrived or is lost (`reuseDelay`).
//!
//! A line of `.cnibox/freed` is an address, the boot, the seconds since its start, and the time on
//! the wall. Within a boot the former counts, which nobody can set. After a boot the delay is over
//! when either clock says so: that of the boot began after the address was freed.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::atomic::Writer;
use super::index::{create_root, freed_path};
use super::listing;
use super::note::uptime;
use super::{During, Result};

/// So many lines are worth more than the time it takes to read them.
const MANY: usize = 256;

/// The moment of a command, on both clocks.
#[derive(Clone, Debug)]
pub(super) struct Moment {
    boot: String,
    uptime: u64,
    wall: u64,
}

impl Moment {
    pub(super) fn now(boot: Option<&str>) -> Moment {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Moment { boot: boot.unwrap_or("-").to_owned(), uptime: uptime().into(), wall }
    }

    /// Whether `delay` is over for what was freed at `then`.
    fn is_past(&self, then: &Moment, delay: Duration) -> bool {
        let delay = delay.as_secs();
        if self.boot == then.boot {
            return self.uptime >= then.uptime.saturating_add(delay);
        }
        self.uptime >= delay || self.wall >= then.wall.saturating_add(delay)
    }

    /// How long `delay` still lasts for what was freed at `then`; `None` if it is over.
    fn left(&self, then: &Moment, delay: Duration) -> Option<Duration> {
        if self.is_past(then, delay) {
            return None;
        }
        let gone = if self.boot == then.boot {
            self.uptime.saturating_sub(then.uptime)
        } else {
            self.uptime.max(self.wall.saturating_sub(then.wall))
        };
        Some(delay.saturating_sub(Duration::from_secs(gone)))
    }

    fn line(&self, ip: IpAddr) -> String {
        // A line that was cut short has no end, and the next one begins anew.
        format!("\n{ip} {} {} {} .", self.boot, self.uptime, self.wall)
    }

    fn parse(line: &str) -> Option<(IpAddr, Moment)> {
        let words: Vec<&str> = line.split(' ').collect();
        let [ip, boot, uptime, wall, "."] = words[..] else { return None };
        let boot = boot.to_owned();
        Some((
            ip.parse().ok()?,
            Moment { boot, uptime: uptime.parse().ok()?, wall: wall.parse().ok()? },
        ))
    }
}

/// Notes that these addresses are being freed.
pub(super) fn add(store: &Path, now: &Moment, ips: impl Iterator<Item = IpAddr>) -> Result<()> {
    let text: String = ips.map(|ip| now.line(ip)).collect();
    create_root(store)?;
    let path = freed_path(store);
    // One write: a kill leaves all of it or nothing.
    let file = OpenOptions::new().append(true).create(true).mode(0o600).open(&path);
    file.and_then(|mut file| file.write_all(text.as_bytes())).during("write", &path)
}

/// The addresses that are not to be given out yet, and for how long.
pub(super) fn kept_back(
    store: &Path,
    boot: Option<&str>,
    delay: Duration,
) -> BTreeMap<IpAddr, Duration> {
    if delay.is_zero() {
        return BTreeMap::new();
    }
    let now = Moment::now(boot);
    lines(store).into_iter().filter_map(|(ip, then)| Some((ip, now.left(&then, delay)?))).collect()
}

/// Forgets what is past, if it is worth it. For one who has the lock.
pub(super) fn tidy(store: &Path, now: &Moment, delay: Duration, writer: &Writer) -> Result<()> {
    let lines = lines(store);
    if lines.len() < MANY {
        return Ok(());
    }
    let text: String = lines
        .iter()
        .filter(|(_, then)| !now.is_past(then, delay))
        .map(|(ip, then)| then.line(*ip))
        .collect();
    writer.replace(&freed_path(store), text.as_bytes(), 0o600)
}

fn lines(store: &Path) -> Vec<(IpAddr, Moment)> {
    let path = freed_path(store);
    let content = listing::content(nix::fcntl::AT_FDCWD, &path).map(|(content, _)| content);
    // A list that cannot be read keeps nothing back: an address is worth more.
    let content = content.unwrap_or_default();
    String::from_utf8_lossy(&content).lines().filter_map(Moment::parse).collect()
}
