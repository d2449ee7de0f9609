//! Addresses that were freed a short while ago, and are kept from the next owner until what is on
//! its way to the former one has arrived or is lost (`reuseDelay`).
//!
//! A line of `.cnibox/freed` is an address, the boot, the seconds since its start, and the time on
//! the wall. Within a boot the former counts, which nobody can set. After a boot the delay is over
//! when either clock says so: that of the boot began after the address was freed.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::fcntl::OFlag;
use nix::sys::stat::Mode;

use super::dir::Dir;
use super::note::uptime;
use super::{During, Result};

/// The list, in the folder that is ours, and its name until it is whole.
const FREED: &str = "freed";
const TEMP: &str = "freed.new";
/// So many lines are worth more than the time it takes to read them.
const MANY: usize = 256;
/// More than a list can be that is tidied now and then.
const MOST_BYTES: usize = 1 << 28;

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

    pub(super) fn parse(line: &str) -> Option<(IpAddr, Moment)> {
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
pub(super) fn add(root: &Dir, now: &Moment, ips: impl Iterator<Item = IpAddr>) -> Result<()> {
    let text: String = ips.map(|ip| now.line(ip)).collect();
    let flags = OFlag::O_WRONLY | OFlag::O_APPEND | OFlag::O_CREAT;
    // One write: a kill leaves all of it or nothing.
    let file = root.file(FREED, flags, Mode::S_IRUSR | Mode::S_IWUSR);
    let written = file.and_then(|(mut file, _)| file.write_all(text.as_bytes()));
    written.during("write", &root.path(FREED))
}

/// The addresses that are not to be given out yet, and for how long.
pub(super) fn kept_back(
    root: Option<&Dir>,
    boot: Option<&str>,
    delay: Duration,
) -> BTreeMap<IpAddr, Duration> {
    let Some(root) = root.filter(|_| !delay.is_zero()) else { return BTreeMap::new() };
    let now = Moment::now(boot);
    lines(root).into_iter().filter_map(|(ip, then)| Some((ip, now.left(&then, delay)?))).collect()
}

/// Forgets what is past, if it is worth it. For one who has the lock.
pub(super) fn tidy(root: &Dir, now: &Moment, delay: Duration) -> Result<()> {
    let lines = lines(root);
    if lines.len() < MANY {
        return Ok(());
    }
    let text: String = lines
        .iter()
        .filter(|(_, then)| !now.is_past(then, delay))
        .map(|(ip, then)| then.line(*ip))
        .collect();
    root.create(TEMP, text.as_bytes())?;
    root.rename(TEMP, FREED)
}

fn lines(root: &Dir) -> Vec<(IpAddr, Moment)> {
    // A list that cannot be read keeps nothing back: an address is worth more.
    let content = root.read(FREED, MOST_BYTES).map(|(content, _)| content).unwrap_or_default();
    String::from_utf8_lossy(&content).lines().filter_map(Moment::parse).collect()
}
