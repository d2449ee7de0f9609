//! resolv.conf(5) as the `dns` of a result.

use std::path::Path;

use cni::DnsConfig;
use cni::error::{Error, Result};
use cni::files;

/// The maximum size of a file, in bytes.
const MAX_SIZE: usize = 1 << 20;

/// The maximum length of a line, in bytes, as in the reference.
const MAX_LINE: usize = 64 * 1024;

/// Reads a file of at most 1 MiB. Its values are not validated.
pub fn read_file(path: &Path) -> Result<DnsConfig> {
    parse_lines(
        &files::read_text(path, MAX_SIZE)
            .map_err(|e| Error::io(format_args!("open {}", path.display()), &e))?,
    )
}

/// Parses the lines; of several domains the last one counts. Unknown keywords are ignored.
fn parse_lines(text: &str) -> Result<DnsConfig> {
    let mut dns = DnsConfig::default();
    for line in text.lines() {
        if line.len() >= MAX_LINE {
            return Err(Error::internal("parse resolv.conf: line too long"));
        }
        let mut words = line.split_whitespace();
        let (Some(keyword), Some(value)) = (words.next(), words.next()) else { continue };
        let values = std::iter::once(value).chain(words).map(str::to_owned);
        match keyword {
            "nameserver" => dns.nameservers.push(value.to_owned()),
            "domain" => value.clone_into(&mut dns.domain),
            "search" => dns.search.extend(values),
            "options" => dns.options.extend(values),
            _ => {}
        }
    }
    Ok(dns)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(|&word| word.to_owned()).collect()
    }

    #[test]
    fn every_keyword_of_resolv_conf_is_read() {
        let text = "# a comment\n; another\n\n  nameserver 192.0.2.1  \nnameserver 2001:db8::1 \
                    x\ndomain example.com\r\ndomain example.net\nsearch a b\nsearch c\noptions \
                    four\noptions five\tndots:2\nsortlist 10.0.0.0\nnameserver\nsearch\n";
        let conf = parse_lines(text).unwrap();
        assert_eq!(conf.nameservers, strings(&["192.0.2.1", "2001:db8::1"]));
        assert_eq!(conf.domain, "example.net");
        assert_eq!(conf.search, strings(&["a", "b", "c"]));
        assert_eq!(conf.options, strings(&["four", "five", "ndots:2"]));
    }

    #[test]
    fn a_file_without_values_is_valid() {
        assert_eq!(parse_lines("\n#nameserver 192.0.2.1"), Ok(DnsConfig::default()));
    }

    #[test]
    fn unreadable_files_are_refused() {
        let error = parse_lines(&"x".repeat(MAX_LINE)).unwrap_err();
        assert_eq!(error.message(), "parse resolv.conf: line too long");
        let error = read_file(Path::new("/nowhere")).unwrap_err();
        assert_eq!(error.message(), "open /nowhere: no such file or directory");
        let error = read_file(Path::new("/dev/zero")).unwrap_err();
        assert_eq!(error.message(), "open /dev/zero: not a regular file");
        let huge = tempfile::NamedTempFile::new().unwrap();
        huge.as_file().set_len(MAX_SIZE as u64 + 1).unwrap();
        let error = read_file(huge.path()).unwrap_err();
        assert!(error.message().ends_with("larger than 1024 KiB"), "{error}");
    }
}
