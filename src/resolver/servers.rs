//! The upstream servers: those of the command line, or of resolv.conf(5), which is read again when
//! it has changed.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::rc::Rc;

use super::upstream::Upstreams;
use crate::framework::resolv;
use cni::error::{Error, Result};

const DNS_PORT: u16 = 53;
/// systemd-resolved writes its own servers to the first; `/etc/resolv.conf` names its local stub
/// then. The first that exists counts.
const FILES: [&str; 2] = ["/run/systemd/resolve/resolv.conf", "/etc/resolv.conf"];

/// Parses `ADDRESS`, `ADDRESS:PORT` or `[ADDRESS]:PORT`.
pub fn parse_server(text: &str) -> Option<SocketAddr> {
    let ip = || text.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, DNS_PORT));
    text.parse().ok().or_else(ip).filter(|server| server.port() != 0)
}

/// What tells one content of a file from another.
type FileState = Option<(usize, u64, u64, i64, i64)>;

fn file_state(files: &[&Path]) -> FileState {
    files.iter().enumerate().find_map(|(at, path)| {
        let meta = fs::metadata(path).ok()?;
        Some((at, meta.ino(), meta.size(), meta.mtime(), meta.mtime_nsec()))
    })
}

/// The servers of the first of the files that exists.
fn read_servers(files: &[&Path]) -> Result<Vec<SocketAddr>> {
    let Some(path) = files.iter().find(|path| path.exists()) else { return Ok(Vec::new()) };
    let names = resolv::read_file(path)?.nameservers;
    Ok(names.iter().filter_map(|text| parse_server(text)).collect())
}

#[derive(Debug)]
pub struct ConfiguredServers {
    /// Those of the command line.
    fixed: Vec<SocketAddr>,
    state: FileState,
    found: Vec<SocketAddr>,
}

impl ConfiguredServers {
    /// The servers of the command line; without any those of the files.
    ///
    /// Fails if there are none.
    pub fn read(fixed: Vec<SocketAddr>) -> Result<ConfiguredServers> {
        let mut servers = ConfiguredServers { fixed, state: None, found: Vec::new() };
        servers.refresh()?;
        if servers.current().is_empty() {
            return Err(Error::config(format!("{} names no server", FILES.join(" or ")))
                .with_details("give --upstream"));
        }
        Ok(servers)
    }

    fn current(&self) -> &[SocketAddr] {
        if self.fixed.is_empty() { &self.found } else { &self.fixed }
    }

    pub fn upstreams(&self) -> Rc<Upstreams> {
        Rc::new(Upstreams::new(self.current().to_vec()))
    }

    /// Whether there are other servers than at the last call. A file without servers changes
    /// nothing: it may be in the course of being written.
    pub fn refresh(&mut self) -> Result<bool> {
        self.refresh_from(&FILES.map(Path::new))
    }

    fn refresh_from(&mut self, files: &[&Path]) -> Result<bool> {
        if !self.fixed.is_empty() {
            return Ok(false);
        }
        let state = file_state(files);
        if state == self.state {
            return Ok(false);
        }
        self.state = state;
        let found = read_servers(files)?;
        if found.is_empty() || found == self.found {
            return Ok(false);
        }
        self.found = found;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_have_a_port_or_the_usual_one() {
        for (text, server) in [
            ("192.0.2.1", Some("192.0.2.1:53")),
            ("192.0.2.1:5353", Some("192.0.2.1:5353")),
            ("2001:db8::1", Some("[2001:db8::1]:53")),
            ("[2001:db8::1]:5353", Some("[2001:db8::1]:5353")),
            ("192.0.2.1:0", None),
            ("192.0.2.1:65536", None),
            ("dns.example.org", None),
            ("", None),
        ] {
            assert_eq!(parse_server(text).map(|it| it.to_string()).as_deref(), server, "{text}");
        }
    }

    #[test]
    fn changed_files_are_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| dir.path().join(name));
        let files = [first.as_path(), second.as_path()];
        let mut servers = ConfiguredServers { fixed: Vec::new(), state: None, found: Vec::new() };
        let mut refresh = || {
            let changed = servers.refresh_from(&files).unwrap();
            (changed, servers.current().iter().map(|it| it.ip().to_string()).collect::<Vec<_>>())
        };
        assert_eq!(refresh(), (false, vec![]));
        fs::write(&second, "nameserver 192.0.2.2\nnameserver x\n").unwrap();
        let of_second = vec!["192.0.2.2".to_owned()];
        assert_eq!(refresh(), (true, of_second.clone()));
        assert_eq!(refresh(), (false, of_second.clone()));
        // It is being written.
        fs::write(&first, "").unwrap();
        assert_eq!(refresh(), (false, of_second));
        fs::write(&first, "nameserver 192.0.2.1\n").unwrap();
        assert_eq!(refresh(), (true, vec!["192.0.2.1".to_owned()]));
        let fixed = vec![parse_server("192.0.2.9").unwrap()];
        assert_eq!(ConfiguredServers::read(fixed.clone()).unwrap().current(), fixed);
    }
}
