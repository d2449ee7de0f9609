//! Names of links of the host.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

/// A name for the host's end of a veth pair: `veth` and eight hexadecimal digits, as in the reference plugins.
pub fn random_veth() -> String {
    // The standard library's hasher is keyed by the kernel's random numbers.
    let random = RandomState::new().build_hasher().finish();
    format!("veth{:08x}", random & 0xffff_ffff)
}

/// Whether a name has the pattern of [`random_veth`].
pub fn is_random_veth(name: &str) -> bool {
    let digits = name.strip_prefix("veth").unwrap_or_default();
    digits.len() == 8 && digits.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_and_variety() {
        let names: std::collections::HashSet<_> = (0..100).map(|_| random_veth()).collect();
        assert_eq!(names.len(), 100);
        assert!(names.iter().all(|name| is_random_veth(name)));
        for other in ["veth", "veth1234567", "vethABCDEF01", "br0.100", "veth123456789"] {
            assert!(!is_random_veth(other), "{other}");
        }
    }
}
