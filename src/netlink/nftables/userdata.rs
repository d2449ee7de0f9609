//! What nft keeps beside objects for itself: comments and how to print values. The kernel does
//! not look at it: one byte of type, one of length, the value.

/// The type of a comment on a table, chain, rule or element.
pub(super) const COMMENT: u8 = 0;

/// The longest comment of a rule, for nft; longer ones are cut.
const LONGEST: usize = 128;

const SET_KEY_BYTEORDER: u8 = 0;
const SET_DATA_BYTEORDER: u8 = 1;

fn write(kind: u8, value: &[u8], list: &mut Vec<u8>) {
    list.push(kind);
    list.push(u8::try_from(value.len()).unwrap_or(u8::MAX));
    list.extend_from_slice(value);
}

/// As much of a comment as nft allows.
pub fn cut(text: &str) -> &str {
    let end = (0..=text.len().min(LONGEST)).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

/// A comment.
pub(super) fn comment(text: &str) -> Vec<u8> {
    let value = [cut(text).as_bytes(), &[0]].concat();
    let mut list = Vec::new();
    write(COMMENT, &value, &mut list);
    list
}

/// The byte orders of a set's keys and data.
pub(super) fn set(key: u32, data: Option<u32>) -> Vec<u8> {
    let mut list = Vec::new();
    write(SET_KEY_BYTEORDER, &key.to_ne_bytes(), &mut list);
    if let Some(data) = data {
        write(SET_DATA_BYTEORDER, &data.to_ne_bytes(), &mut list);
    }
    list
}

/// The comment in what an object came with.
pub(super) fn read_comment(mut list: &[u8]) -> Option<String> {
    while let [kind, length, rest @ ..] = list {
        let (value, after) = rest.split_at_checked(usize::from(*length))?;
        if *kind == COMMENT {
            let value = value.strip_suffix(&[0]).unwrap_or(value);
            return Some(String::from_utf8_lossy(value).into_owned());
        }
        list = after;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_is_written_as_nft_does() {
        assert_eq!(comment("el"), [0, 3, b'e', b'l', 0]);
        assert_eq!(read_comment(&comment("el")), Some("el".to_owned()));
        assert_eq!(read_comment(&[1, 4, 1, 0, 0, 0, 0, 1, b'x']), Some("x".to_owned()));
        assert_eq!(read_comment(&[0, 9, b'x']), None);
    }

    #[test]
    fn a_long_comment_is_cut_between_characters() {
        let long = format!("{}\u{e4}", "x".repeat(127));
        assert_eq!(read_comment(&comment(&long)), Some("x".repeat(127)));
    }
}
