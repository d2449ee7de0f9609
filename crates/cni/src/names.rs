//! The names in requests that become parts of paths and names of links, checked once.

use std::fmt;

use crate::error::{Error, ErrorCode, Result};

/// A container id: `[a-zA-Z0-9][a-zA-Z0-9_.-]*` (spec, "Parameters").
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContainerId(String);

/// A network's name, of the form of a container id.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NetworkName(String);

/// A name of a network interface that the kernel accepts: 1 to 15 bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InterfaceName(String);

impl ContainerId {
    /// Checks `text`. Empty is code 3, a bad character code 4.
    ///
    /// ```
    /// # use cnibox_cni::ContainerId;
    /// assert!(ContainerId::parse("3f2a").is_ok() && ContainerId::parse("../x").is_err());
    /// ```
    pub fn parse(text: &str) -> Result<ContainerId> {
        if text.is_empty() {
            return Err(Error::new(ErrorCode::UNKNOWN_CONTAINER, "missing containerID"));
        }
        if !is_identifier(text) {
            let error =
                Error::new(ErrorCode::INVALID_ENVIRONMENT, "invalid characters in containerID");
            return Err(error.with_details(text));
        }
        Ok(ContainerId(text.to_owned()))
    }
}

impl NetworkName {
    /// Checks `text`; code 7 if it is invalid.
    ///
    /// ```
    /// # use cnibox_cni::NetworkName;
    /// assert!(NetworkName::parse("pods").is_ok() && NetworkName::parse("").is_err());
    /// ```
    pub fn parse(text: &str) -> Result<NetworkName> {
        if text.is_empty() {
            return Err(Error::config("missing network name"));
        }
        if !is_identifier(text) {
            return Err(Error::config("invalid characters found in network name").with_details(
                format!(
                    "{text}; use letters, digits, \".\", \"_\" and \"-\", the first a letter or a \
                     digit"
                ),
            ));
        }
        Ok(NetworkName(text.to_owned()))
    }
}

impl InterfaceName {
    /// The longest name, in bytes: `IFNAMSIZ` without the terminating zero.
    pub const MAX_LENGTH: usize = 15;

    /// Checks `text`; code 4 if it is invalid.
    ///
    /// ```
    /// # use cnibox_cni::InterfaceName;
    /// assert!(InterfaceName::parse("eth0").is_ok() && InterfaceName::parse("a-name-too-long-for-it").is_err());
    /// ```
    pub fn parse(text: &str) -> Result<InterfaceName> {
        let refuse = |msg| Err(Error::new(ErrorCode::INVALID_ENVIRONMENT, msg));
        if text.is_empty() {
            return refuse("interface name is empty");
        }
        if text.len() > Self::MAX_LENGTH {
            return refuse("interface name is too long")
                .map_err(|e| e.with_details("interface name should be less than 16 characters"));
        }
        if text == "." || text == ".." {
            return refuse("interface name is . or ..");
        }
        if text.chars().any(|c| c == '/' || c == ':' || c.is_whitespace()) {
            return refuse("interface name contains / or : or whitespace characters");
        }
        if text.chars().any(char::is_control) {
            return refuse("interface name contains control characters");
        }
        // The kernel replaces `%d` by a free number.
        if text.contains('%') {
            return refuse("interface name contains %").map_err(|e| e.with_details(text));
        }
        Ok(InterfaceName(text.to_owned()))
    }
}

/// Whether `text` has the form of container ids and network names.
///
/// ```
/// # use cnibox_cni::names::is_identifier;
/// assert!(is_identifier("pods.v4_2") && !is_identifier("-pods"));
/// ```
pub fn is_identifier(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

macro_rules! text_of {
    ($($name:ident)*) => {$(
        impl $name {
            /// The name.
            ///
            /// ```
            /// # use cnibox_cni::NetworkName;
            /// # fn main() -> cnibox_cni::Result<()> {
            /// assert_eq!(NetworkName::parse("pods")?.as_str(), "pods");
            /// # Ok(())
            /// # }
            /// ```
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}
text_of!(ContainerId NetworkName InterfaceName);

/// The known word that was probably meant: at most two letters and a third of the word differ.
#[doc(hidden)]
pub fn nearest_word<'w>(word: &str, known: impl Iterator<Item = &'w str>) -> Option<&'w str> {
    let distance = |known: &str| strsim::osa_distance(word, known);
    let found = known.map(|known| (distance(known), known)).min_by_key(|(distance, _)| *distance);
    found.filter(|(distance, near)| *distance <= 2.min(near.len() / 3)).map(|(_, near)| near)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_identifiers_are_refused() {
        for good in ["a", "1", "a-b_c.d", "0123456789abcdef"] {
            assert!(ContainerId::parse(good).is_ok() && NetworkName::parse(good).is_ok(), "{good}");
        }
        for bad in ["-a", ".a", "_", "a/b", "..", "a b", "a%", "ä", "a\n"] {
            let error = ContainerId::parse(bad).unwrap_err();
            assert_eq!(error.code(), ErrorCode::INVALID_ENVIRONMENT, "{bad}");
            assert_eq!(error.details(), bad);
            assert_eq!(NetworkName::parse(bad).unwrap_err().code(), ErrorCode::INVALID_CONFIG);
        }
        assert_eq!(ContainerId::parse("").unwrap_err().code(), ErrorCode::UNKNOWN_CONTAINER);
    }

    #[test]
    fn invalid_interface_names_are_refused() {
        assert!(InterfaceName::parse("fifteen-bytes-x").is_ok());
        for (bad, msg) in [
            ("", "interface name is empty"),
            ("sixteen-bytes-xx", "interface name is too long"),
            (".", "interface name is . or .."),
            ("..", "interface name is . or .."),
            ("a/b", "interface name contains / or : or whitespace characters"),
            ("a:b", "interface name contains / or : or whitespace characters"),
            ("a\u{a0}b", "interface name contains / or : or whitespace characters"),
            ("a\u{1b}[2J", "interface name contains control characters"),
            ("a\u{7f}", "interface name contains control characters"),
            ("eth%d", "interface name contains %"),
        ] {
            assert_eq!(InterfaceName::parse(bad).unwrap_err().message(), msg, "{bad}");
        }
    }
}
