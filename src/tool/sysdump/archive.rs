//! The tar file of a sysdump: the size of each file and of the whole archive is bounded.

use std::fmt::Display;
use std::io::{self, Write};

use tar::{Builder, Header};

use crate::secrets;

/// Limit of the archive's size in bytes.
const ARCHIVE_LIMIT: usize = 1_000_000;

/// Limit of a file's size in bytes.
const FILE_LIMIT: usize = 96 * 1024;

/// Bytes that are reserved for `README.txt` with its header.
const RESERVE: usize = 24 * 1024;

/// The size of a header, and the unit of padding, in bytes (POSIX.1-2017, pax, "ustar").
const BLOCK: usize = 512;

pub(super) struct SysdumpArchive {
    /// The directory of all files.
    root: String,
    /// The modification time of all files, in seconds since 1970.
    time: u64,
    files: Vec<(String, String)>,
    /// The size in bytes, with headers, padding and the two blocks at the end.
    used: usize,
    /// One line for each text that is missing or was cut.
    missing: Vec<String>,
}

impl SysdumpArchive {
    pub(super) fn new(root: &str, time: u64) -> SysdumpArchive {
        SysdumpArchive {
            root: root.to_owned(),
            time,
            files: Vec::new(),
            used: 2 * BLOCK + RESERVE,
            missing: Vec::new(),
        }
    }

    /// Lists something as missing.
    pub(super) fn add_missing(&mut self, what: &str, why: impl Display) {
        let why = secrets::redact_text(&why.to_string());
        self.missing.push(format!("  {what}: {why}\n"));
    }

    /// The size of the largest file that still fits, in bytes.
    pub(super) fn free_bytes(&self) -> usize {
        ARCHIVE_LIMIT.saturating_sub(self.used + BLOCK) / BLOCK * BLOCK
    }

    /// Adds a file, or lists it as missing.
    pub(super) fn add_result(&mut self, name: &str, text: Result<String, impl Display>) {
        match text {
            Ok(text) => self.add_text(name, &text),
            Err(error) => self.add_missing(name, error),
        }
    }

    /// As [`SysdumpArchive::add_result`]; of a text that is too long the end is kept.
    pub(super) fn add_tail(&mut self, name: &str, text: Result<String, impl Display>) {
        match text {
            Ok(text) => self.add_part(name, &text, keep_end),
            Err(error) => self.add_missing(name, error),
        }
    }

    /// Adds a file, cut at a line if it is too long.
    pub(super) fn add_text(&mut self, name: &str, text: &str) {
        self.add_part(name, text, keep_start);
    }

    /// Adds what `keep` keeps of a text. An empty file is left out.
    fn add_part(&mut self, name: &str, text: &str, keep: fn(&str, usize) -> &str) {
        let kept = keep(text, self.free_bytes().min(FILE_LIMIT));
        let left = text.len() - kept.len();
        if left > 0 {
            self.add_missing(name, format_args!("{left} of {} bytes", text.len()));
        }
        if !kept.is_empty() {
            self.used += BLOCK + kept.len().next_multiple_of(BLOCK);
            self.files.push((name.to_owned(), kept.to_owned()));
        }
    }

    /// Writes the archive. Its first file has the text `about` and the list of what is missing.
    pub(super) fn write_tar(mut self, about: &str, out: impl Write) -> io::Result<()> {
        let heading = if self.missing.is_empty() { "" } else { "\nNot in it:\n" };
        let readme = [about, heading, &self.missing.concat()].concat();
        let readme = keep_start(&readme, RESERVE - BLOCK).to_owned();
        self.files.insert(0, ("README.txt".to_owned(), readme));
        let mut tar = Builder::new(out);
        for (name, text) in &self.files {
            let mut header = Header::new_gnu();
            header.set_mode(0o600);
            header.set_mtime(self.time);
            header.set_size(text.len() as u64);
            tar.append_data(&mut header, format!("{}/{name}", self.root), text.as_bytes())?;
        }
        tar.into_inner()?.flush()
    }
}

/// The first whole lines of a text, at most `limit` bytes; a part of the line if the text has only
/// one.
fn keep_start(text: &str, limit: usize) -> &str {
    if text.len() <= limit {
        return text;
    }
    let end = (0..=limit).rfind(|at| text.is_char_boundary(*at));
    let start = &text[..end.unwrap_or(0)];
    start.rfind('\n').map_or(start, |end| &start[..=end])
}

/// As [`keep_start`], the last lines.
fn keep_end(text: &str, limit: usize) -> &str {
    if text.len() <= limit {
        return text;
    }
    let start = (text.len() - limit..text.len()).find(|at| text.is_char_boundary(*at));
    let end = &text[start.unwrap_or(text.len())..];
    end.find('\n').map_or(end, |line| &end[line + 1..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncation_keeps_whole_lines_of_both_ends() {
        assert_eq!(keep_start("one\ntwo\n", 8), "one\ntwo\n");
        assert_eq!(keep_start("one\ntwo\n", 7), "one\n");
        assert_eq!(keep_end("one\ntwo\n", 7), "two\n");
        assert_eq!(keep_start("äöü", 3), "ä");
        assert_eq!(keep_end("äöü", 3), "ü");
    }

    #[test]
    fn the_archive_is_bounded_and_lists_what_is_missing() {
        let mut archive = SysdumpArchive::new("dump", 0);
        for i in 0..2000 {
            archive.add_text(&format!("{i}"), &"line of text\n".repeat(1 + i * 10));
        }
        let mut tar = Vec::new();
        archive.write_tar("about\n", &mut tar).unwrap();
        assert!((ARCHIVE_LIMIT - 64 * 1024..=ARCHIVE_LIMIT).contains(&tar.len()), "{}", tar.len());
        let mut read = tar::Archive::new(tar.as_slice());
        let mut first = read.entries().unwrap().next().unwrap().unwrap();
        let readme = io::read_to_string(&mut first).unwrap();
        assert_eq!(first.path().unwrap().to_str(), Some("dump/README.txt"));
        assert!(readme.starts_with("about\n\nNot in it:\n") && readme.len() < RESERVE, "{readme}");
    }
}
