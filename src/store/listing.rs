//! What is in a store's directory, and how a lease's file is read.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::{AccessFlags, access};

use super::lease::Lease;
use super::{During, Result};
use crate::{error, log};

/// The addresses taken in a network at one moment, seen without its lock.
#[derive(Debug)]
pub struct Listing {
    /// Names are looked up faster from the directory itself. Absent if there is none.
    dir: Option<File>,
    ips: HashSet<IpAddr>,
}

/// How a lease file was found.
pub(super) enum Found {
    Lease(Lease),
    Debris,
    Nothing,
}

impl Listing {
    /// Lists the store of `network` and changes nothing. Fails if ADD could not write there; a
    /// store that is missing but could be created is empty.
    pub fn peek(data_dir: &Path, network: &str) -> error::Result<Listing> {
        let dir = data_dir.join(network);
        let existing = dir.ancestors().find(|dir| dir.symlink_metadata().is_ok()).unwrap_or(&dir);
        let rights = AccessFlags::R_OK | AccessFlags::W_OK | AccessFlags::X_OK;
        access(existing, rights).during("access", existing)?;
        if existing == dir {
            return Ok(Listing::read(&dir)?);
        }
        fs::read_dir(existing).during("list", existing)?;
        Ok(Listing { dir: None, ips: HashSet::new() })
    }

    pub(super) fn read(dir: &Path) -> Result<Listing> {
        let mut ips = HashSet::new();
        for entry in fs::read_dir(dir).during("list", dir)? {
            let name = entry.during("list", dir)?.file_name();
            ips.extend(name.to_str().and_then(parse_name));
        }
        Ok(Listing { dir: Some(File::open(dir).during("open", dir)?), ips })
    }

    /// The addresses that files are named by.
    pub fn taken(&self) -> &HashSet<IpAddr> {
        &self.ips
    }

    pub(super) fn into_taken(self) -> HashSet<IpAddr> {
        self.ips
    }

    /// Those whose files name a container: a crash may have left others, which ADD reclaims.
    pub fn leased(&self) -> HashSet<IpAddr> {
        self.leases().map(|lease| lease.ip).collect()
    }

    pub(super) fn leases(&self) -> impl Iterator<Item = Lease> {
        self.found()
            .filter_map(|(_, f)| if let Found::Lease(lease) = f { Some(lease) } else { None })
    }

    /// Reads the files one by one.
    pub(super) fn found(&self) -> impl Iterator<Item = (IpAddr, Found)> {
        self.dir.iter().flat_map(|dir| {
            self.ips.iter().map(move |ip| (*ip, read(dir, Path::new(&ip.to_string()), *ip)))
        })
    }
}

/// Reads the lease of `ip` at `path` below `dir`.
pub(super) fn read(dir: impl AsFd, path: &Path, ip: IpAddr) -> Found {
    #[cfg(test)]
    super::tests::READS.with(|reads| reads.set(reads.get() + 1));
    match content(dir, path) {
        Ok(content) => Lease::parse(ip, &content).map_or(Found::Debris, Found::Lease),
        Err(e) => {
            log::debug(format_args!("skip lease {}: {}", path.display(), error::io_text(&e)));
            Found::Nothing
        }
    }
}

/// The content of a file that is a few bytes long, at the cost of one read.
pub(super) fn content(dir: impl AsFd, path: &Path) -> io::Result<Vec<u8>> {
    let mut file =
        File::from(openat(dir, path, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?);
    let mut buffer = [0; 512];
    loop {
        match file.read(&mut buffer) {
            // The end of a file is where less is read than was asked for.
            Ok(n) if n < buffer.len() => return Ok(buffer[..n].to_vec()),
            Ok(_) => {
                let mut content = buffer.to_vec();
                return file.read_to_end(&mut content).map(|_| content);
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// The address that a file is named by. Only its canonical text: other names are not looked at
/// when an address is reserved, neither by us nor by the reference.
fn parse_name(name: &str) -> Option<IpAddr> {
    name.parse().ok().filter(|ip: &IpAddr| ip.to_canonical() == *ip && ip.to_string() == name)
}
