//! The tar file of a sysdump: files of bounded size, of bounded size together.

use std::io::{self, Write};

use tar::{Builder, Header};

/// Bytes that the whole archive has at most.
pub(super) const ARCHIVE_LIMIT: usize = 1_000_000;

/// Bytes of one file at most, unless [`Archive::add`] is told otherwise.
pub(super) const FILE_LIMIT: usize = 96 * 1024;

/// What is kept free for the last file, `README.txt`.
const RESERVE: usize = 24 * 1024;

/// The unit in which tar lays out headers and files, in bytes (POSIX.1-2017, pax, "ustar").
const BLOCK: usize = 512;

/// Which end of a text is kept if all of it is too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    Head,
    Tail,
}

/// The files so far.
#[derive(Debug)]
pub(super) struct Archive {
    /// The folder in front of each name.
    root: String,
    /// Seconds since 1970, the time of each file.
    time: u64,
    files: Vec<(String, Vec<u8>)>,
    /// Bytes that are used: with headers, padding and the two blocks at the end.
    used: usize,
    /// What is not there, and why: a line each.
    missing: Vec<String>,
}

impl Archive {
    pub(super) fn new(root: &str, time: u64) -> Archive {
        let (files, missing) = (Vec::new(), Vec::new());
        Archive { root: root.to_owned(), time, files, used: 2 * BLOCK + RESERVE, missing }
    }

    /// Notes that something is not in the archive.
    pub(super) fn miss(&mut self, what: impl Into<String>) {
        self.missing.push(what.into());
    }

    /// Bytes that a file may still have.
    pub(super) fn room(&self) -> usize {
        ARCHIVE_LIMIT.saturating_sub(self.used + BLOCK) / BLOCK * BLOCK
    }

    /// Adds a file, cut at a line if it is too long.
    pub(super) fn add(&mut self, name: &str, text: &str, keep: Keep) {
        let limit = self.room().min(FILE_LIMIT);
        let kept = cut(text, limit, keep);
        let left = text.len() - kept.len();
        if left > 0 {
            self.miss(format!("{name}: {left} of {} bytes", text.len()));
        }
        if !kept.is_empty() {
            self.push(name, kept.as_bytes().to_vec());
        }
    }

    fn push(&mut self, name: &str, bytes: Vec<u8>) {
        self.used += BLOCK + bytes.len().next_multiple_of(BLOCK);
        self.files.push((name.to_owned(), bytes));
    }

    /// Writes the archive, with `about` and what is missing as its first file.
    pub(super) fn write(mut self, about: &str, out: impl Write) -> io::Result<()> {
        let missing: Vec<String> = self.missing.iter().map(|line| format!("  {line}\n")).collect();
        let readme = match missing.as_slice() {
            [] => about.to_owned(),
            missing => format!("{about}\nNot in it:\n{}", missing.concat()),
        };
        let readme = cut(&readme, RESERVE - BLOCK, Keep::Head).as_bytes().to_vec();
        self.files.insert(0, ("README.txt".to_owned(), readme));
        let mut tar = Builder::new(out);
        for (name, bytes) in &self.files {
            let mut header = Header::new_gnu();
            header.set_mode(0o600);
            header.set_mtime(self.time);
            header.set_size(bytes.len() as u64);
            tar.append_data(&mut header, format!("{}/{name}", self.root), bytes.as_slice())?;
        }
        tar.into_inner()?.flush()
    }
}

/// The part of a text that has `limit` bytes at most and consists of whole lines; of one line, as much of it.
fn cut(text: &str, limit: usize, keep: Keep) -> &str {
    if text.len() <= limit {
        return text;
    }
    let is_boundary = |at: &usize| text.is_char_boundary(*at);
    match keep {
        Keep::Head => {
            let head = &text[..(0..=limit).rfind(is_boundary).unwrap_or(0)];
            head.rfind('\n').map_or(head, |end| &head[..=end])
        }
        Keep::Tail => {
            let start = (text.len() - limit..text.len()).find(is_boundary);
            let tail = &text[start.unwrap_or(text.len())..];
            tail.find('\n').map_or(tail, |end| &tail[end + 1..])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_lines_of_either_end_are_kept() {
        assert_eq!(cut("one\ntwo\n", 8, Keep::Head), "one\ntwo\n");
        assert_eq!(cut("one\ntwo\n", 7, Keep::Head), "one\n");
        assert_eq!(cut("one\ntwo\n", 7, Keep::Tail), "two\n");
        assert_eq!(cut("äöü", 3, Keep::Head), "ä");
        assert_eq!(cut("äöü", 3, Keep::Tail), "ü");
    }

    #[test]
    fn the_archive_is_bounded_and_says_what_it_lacks() {
        let mut archive = Archive::new("dump", 0);
        for i in 0..2000 {
            archive.add(&format!("{i}"), &"line of text\n".repeat(1 + i * 10), Keep::Head);
        }
        let mut tar = Vec::new();
        archive.write("about\n", &mut tar).unwrap();
        assert!((ARCHIVE_LIMIT - 64 * 1024..=ARCHIVE_LIMIT).contains(&tar.len()), "{}", tar.len());
        let mut read = tar::Archive::new(tar.as_slice());
        let mut first = read.entries().unwrap().next().unwrap().unwrap();
        let readme = io::read_to_string(&mut first).unwrap();
        assert_eq!(first.path().unwrap().to_str(), Some("dump/README.txt"));
        assert!(readme.starts_with("about\n\nNot in it:\n") && readme.len() < RESERVE, "{readme}");
    }
}
