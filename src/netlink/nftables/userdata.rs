//! The user data of objects, in the format of nft, which the kernel stores and does not read:
//! comments, and how nft is to list the key of a set.

use super::super::attribute::AttributeBuilder;
use super::value::ValueType;

/// The type of a comment in user data.
const COMMENT: u8 = 0;

/// The maximum length of a comment in nft, in bytes.
const MAX_COMMENT: usize = 128;

/// Appends user data in the format of nft, which the kernel stores with an object: a type, a
/// length, the value.
pub(super) fn write_userdata(kind: u8, value: &[u8], list: &mut Vec<u8>) {
    list.extend([kind, u8::try_from(value.len()).unwrap_or(u8::MAX)]);
    list.extend_from_slice(value);
}

/// The key of a set as the expression that nft lists behind `typeof`, in the form of libnftnl: the
/// kinds of expressions, their parameters, and the parts of a concatenation, each by its number.
pub(super) fn key_expression(key: &[ValueType]) -> Vec<u8> {
    const PAYLOAD: u32 = 7;
    const CONCATENATION: u32 = 13;
    let expression = |kind: u32, data: &[u8]| {
        let mut list = Vec::new();
        write_userdata(0, &kind.to_ne_bytes(), &mut list);
        write_userdata(1, data, &mut list);
        list
    };
    let mut parts: Vec<Vec<u8>> = Vec::new();
    for part in key {
        // The header and its field; or none, the transport header, the offset and length in bits.
        let parameters: &[u32] = match part {
            ValueType::DiscoveryTarget => &[0, 0, 3, 64, 128],
            _ => &[17, 2],
        };
        let mut data = Vec::new();
        for (number, parameter) in (0..).zip(parameters) {
            write_userdata(number, &parameter.to_ne_bytes(), &mut data);
        }
        parts.push(expression(PAYLOAD, &data));
    }
    if let [alone] = parts.as_slice() {
        return alone.clone();
    }
    let mut all = Vec::new();
    for (number, part) in (0..).zip(&parts) {
        write_userdata(number, part, &mut all);
    }
    expression(CONCATENATION, &all)
}

/// A comment, truncated to the length that nft allows.
pub fn cut_comment(text: &str) -> &str {
    let end = (0..=text.len().min(MAX_COMMENT)).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

/// Writes a comment, if there is one, as the user data of an object.
pub(super) fn write_comment<'a>(
    body: &'a mut AttributeBuilder,
    kind: u16,
    comment: Option<&str>,
) -> &'a mut AttributeBuilder {
    let Some(comment) = comment else { return body };
    let mut list = Vec::new();
    write_userdata(COMMENT, &[cut_comment(comment).as_bytes(), &[0]].concat(), &mut list);
    body.put_bytes(kind, &list)
}

/// The comment in the user data of an object.
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
    use super::super::super::attribute::find_attribute;
    use super::*;

    fn comment(text: &str) -> Vec<u8> {
        let mut body = AttributeBuilder::new();
        write_comment(&mut body, 1, Some(text));
        find_attribute(body.as_bytes(), 1).unwrap().value.to_vec()
    }

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
