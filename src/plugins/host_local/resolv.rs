//! What a resolv.conf(5) says, for the `dns` part of a result.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::libc::O_NONBLOCK;

use crate::error::{Error, Result};

/// More than any resolver configuration has.
const MAX_SIZE: u64 = 1 << 20;

/// The longest line that is accepted, as by the reference.
const MAX_LINE: usize = 64 * 1024;

/// The entries of a resolver configuration, not judged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvConf {
    /// Addresses of name servers, in order.
    pub nameservers: Vec<String>,
    /// The local domain: the last one named.
    pub domain: Option<String>,
    /// Search domains of all `search` lines.
    pub search: Vec<String>,
    /// Options of all `options` lines.
    pub options: Vec<String>,
}

impl ResolvConf {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<ResolvConf> {
        let text =
            read(path).map_err(|e| Error::io(format_args!("open {}", path.display()), &e))?;
        ResolvConf::parse(&String::from_utf8_lossy(&text))
    }

    /// Takes in a file's text; unknown keywords are passed over.
    pub fn parse(text: &str) -> Result<ResolvConf> {
        let mut conf = ResolvConf::default();
        for line in text.lines() {
            if line.len() >= MAX_LINE {
                return Err(Error::internal("parse resolv.conf: line too long"));
            }
            conf.take(line.trim());
        }
        Ok(conf)
    }

    fn take(&mut self, line: &str) {
        if line.starts_with(['#', ';']) {
            return;
        }
        let mut words = line.split_whitespace();
        let (Some(keyword), Some(value)) = (words.next(), words.next()) else { return };
        let values = || std::iter::once(value).chain(words).map(str::to_owned);
        match keyword {
            "nameserver" => self.nameservers.push(value.to_owned()),
            "domain" => self.domain = Some(value.to_owned()),
            "search" => self.search.extend(values()),
            "options" => self.options.extend(values()),
            _ => {}
        }
    }
}

/// A FIFO is not waited for, and nothing without an end is read.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path)?;
    let refuse = |why: &str| Err(io::Error::new(ErrorKind::InvalidInput, why));
    if !file.metadata()?.is_file() {
        return refuse("not a regular file");
    }
    let mut text = Vec::new();
    file.take(MAX_SIZE + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MAX_SIZE { refuse("larger than 1 MiB") } else { Ok(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(|&word| word.to_owned()).collect()
    }

    #[test]
    fn every_keyword() {
        let text = "# a comment\n; another\n\n  nameserver 192.0.2.1  \nnameserver 2001:db8::1 x\n\
                    domain example.com\r\ndomain example.net\nsearch a b\nsearch c\n\
                    options four\noptions five\tndots:2\nsortlist 10.0.0.0\nnameserver\nsearch\n";
        let conf = ResolvConf::parse(text).unwrap();
        assert_eq!(conf.nameservers, strings(&["192.0.2.1", "2001:db8::1"]));
        assert_eq!(conf.domain.as_deref(), Some("example.net"));
        assert_eq!(conf.search, strings(&["a", "b", "c"]));
        assert_eq!(conf.options, strings(&["four", "five", "ndots:2"]));
    }

    #[test]
    fn nothing_in_nothing_out() {
        assert_eq!(ResolvConf::parse("\n#nameserver 192.0.2.1"), Ok(ResolvConf::default()));
    }

    #[test]
    fn refusals() {
        let error = ResolvConf::parse(&"x".repeat(MAX_LINE)).unwrap_err();
        assert_eq!(error.msg(), "parse resolv.conf: line too long");
        let error = ResolvConf::read(Path::new("/nowhere")).unwrap_err();
        assert_eq!(error.msg(), "open /nowhere: no such file or directory");
        let error = ResolvConf::read(Path::new("/dev/zero")).unwrap_err();
        assert_eq!(error.msg(), "open /dev/zero: not a regular file");
        let huge = tempfile::NamedTempFile::new().unwrap();
        huge.as_file().set_len(MAX_SIZE + 1).unwrap();
        let error = ResolvConf::read(huge.path()).unwrap_err();
        assert!(error.msg().ends_with("larger than 1 MiB"), "{error}");
    }
}
