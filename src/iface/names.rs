//! Names of links that the node sees.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

/// A name for the host's end of a veth pair: `veth` and eight hexadecimal digits, as the
/// reference plugins choose them.
pub fn random_veth() -> String {
    // The standard library's hasher is keyed by the kernel's random numbers.
    let random = RandomState::new().build_hasher().finish();
    format!("veth{:08x}", random & 0xffff_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_and_variety() {
        let names: std::collections::HashSet<_> = (0..100).map(|_| random_veth()).collect();
        assert_eq!(names.len(), 100);
        assert!(names.iter().all(|n| n.len() == 12 && n.starts_with("veth")));
    }
}
