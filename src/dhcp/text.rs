//! Text from servers, for both families: domain names and human-readable messages.

/// The maximum number of domains, more than any resolver uses.
pub const MOST_DOMAINS: usize = 32;
/// The maximum length of a DNS name.
const LONGEST_NAME: usize = 253;
/// The maximum length of a message, in characters.
const LONGEST_SENTENCE: usize = 200;

/// The printable characters of a message.
pub fn printable_text(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().filter(|c| !c.is_control()).take(LONGEST_SENTENCE).collect()
}

/// A list of names in DNS wire format (RFC 1035, section 3.1); invalid names are skipped.
pub fn decode_domains(bytes: &[u8]) -> Vec<String> {
    let mut domains = Vec::new();
    let mut at = 0;
    while at < bytes.len() && domains.len() < MOST_DOMAINS {
        let Some((name, next)) = name_at(bytes, at) else { break };
        if is_domain(&name) {
            domains.push(name);
        }
        at = next;
    }
    domains
}

/// The name at `at`, and the offset of the next one. Compression pointers must point backwards, so
/// the loop ends.
fn name_at(bytes: &[u8], at: usize) -> Option<(String, usize)> {
    let mut name = String::new();
    let (mut at, mut limit, mut next) = (at, at, None);
    loop {
        let length = usize::from(*bytes.get(at)?);
        match length {
            0 => return Some((name, next.unwrap_or(at + 1))),
            1..0x40 => {
                let label = std::str::from_utf8(bytes.get(at + 1..=at + length)?).ok()?;
                if !name.is_empty() {
                    name.push('.');
                }
                name.push_str(label);
                if name.len() > LONGEST_NAME {
                    return None;
                }
                at += 1 + length;
            }
            0xc0.. => {
                let target = (length & 0x3f) << 8 | usize::from(*bytes.get(at + 1)?);
                if target >= limit {
                    return None;
                }
                next.get_or_insert(at + 2);
                (at, limit) = (target, target);
            }
            _ => return None,
        }
    }
}

/// Whether the text is safe to write to resolv.conf.
pub fn is_domain(text: &str) -> bool {
    text.len() <= LONGEST_NAME
        && text.split('.').all(|label| {
            (1..64).contains(&label.len())
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        })
}
