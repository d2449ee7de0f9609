//! Versions of the CNI specification: the seven releases, and the order of all versions.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::error::{Error, ErrorCode};
use crate::json::Json;

/// A released version of the specification.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum SpecVersion {
    /// 0.1.0: `ip4`/`ip6` results, ADD and DEL.
    #[default]
    V0_1_0,
    /// 0.2.0: VERSION, `args`.
    V0_2_0,
    /// 0.3.0: lists, `prevResult`, `interfaces` and `ips`.
    V0_3_0,
    /// 0.3.1: the same keys as 0.3.0.
    V0_3_1,
    /// 0.4.0: CHECK, `prevResult` on DEL.
    V0_4_0,
    /// 1.0.0: `ips` without `version`.
    V1_0_0,
    /// 1.1.0: GC, STATUS, `cniVersions`, route and interface attributes.
    V1_1_0,
}

/// The three layouts of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ResultLayout {
    /// 0.1.0 and 0.2.0.
    Ip4Ip6,
    /// 0.3.0, 0.3.1 and 0.4.0.
    TypedIps,
    /// 1.0.0 and 1.1.0.
    Current,
}

impl SpecVersion {
    /// Every version, ascending.
    pub const ALL: [SpecVersion; 7] = [
        SpecVersion::V0_1_0,
        SpecVersion::V0_2_0,
        SpecVersion::V0_3_0,
        SpecVersion::V0_3_1,
        SpecVersion::V0_4_0,
        SpecVersion::V1_0_0,
        SpecVersion::V1_1_0,
    ];

    /// The newest version this program speaks.
    pub const NEWEST: SpecVersion = SpecVersion::V1_1_0;

    /// The version in JSON.
    ///
    /// ```
    /// # use cnibox_cni::SpecVersion;
    /// assert_eq!(SpecVersion::V0_4_0.as_str(), "0.4.0");
    /// ```
    pub fn as_str(self) -> &'static str {
        ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"][self as usize]
    }

    /// Parses the exact text of a version (`1.0` is not `1.0.0`); the empty text stands for 0.1.0.
    ///
    /// ```
    /// # use cnibox_cni::SpecVersion;
    /// assert_eq!(SpecVersion::parse_exact("1.1.0"), Some(SpecVersion::NEWEST));
    /// assert_eq!(SpecVersion::parse_exact("1.1"), None);
    /// ```
    pub fn parse_exact(text: &str) -> Option<SpecVersion> {
        if text.is_empty() {
            return Some(SpecVersion::V0_1_0);
        }
        SpecVersion::ALL.into_iter().find(|v| v.as_str() == text)
    }

    /// The result layout of this version.
    #[doc(hidden)]
    pub fn result_layout(self) -> ResultLayout {
        match self {
            SpecVersion::V0_1_0 | SpecVersion::V0_2_0 => ResultLayout::Ip4Ip6,
            SpecVersion::V0_3_0 | SpecVersion::V0_3_1 | SpecVersion::V0_4_0 => {
                ResultLayout::TypedIps
            }
            SpecVersion::V1_0_0 | SpecVersion::V1_1_0 => ResultLayout::Current,
        }
    }
}

impl fmt::Display for SpecVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for SpecVersion {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// Any version, released or not, for comparisons: up to three decimal parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VersionNumber([i64; 3]);

impl FromStr for VersionNumber {
    type Err = Error;

    /// Missing parts are 0, the empty text is 0.1.0.
    fn from_str(text: &str) -> Result<VersionNumber, Error> {
        if text.is_empty() {
            return Ok(SpecVersion::V0_1_0.into());
        }
        parse_parts(text)
            .map(VersionNumber)
            .ok_or_else(|| Error::new(ErrorCode::DECODE, format!("invalid version \"{text}\"")))
    }
}

fn parse_parts(text: &str) -> Option<[i64; 3]> {
    let mut parts = [0; 3];
    for (i, part) in text.split('.').enumerate() {
        *parts.get_mut(i)? = part.parse().ok()?;
    }
    Some(parts)
}

impl From<SpecVersion> for VersionNumber {
    fn from(version: SpecVersion) -> VersionNumber {
        VersionNumber(parse_parts(version.as_str()).unwrap_or_default())
    }
}

/// The version of `supported`, which is ascending, that the author of `text` probably means: the
/// same number in another spelling, else the next older one, else the oldest.
#[doc(hidden)]
pub fn nearest_supported(text: &str, supported: &[SpecVersion]) -> Option<SpecVersion> {
    let wanted = parse_parts(text.trim().trim_start_matches(['v', 'V'])).map(VersionNumber);
    supported
        .iter()
        .rfind(|v| wanted.is_none_or(|wanted| VersionNumber::from(**v) <= wanted))
        .or(supported.first())
        .copied()
}

/// The remedy for a version that is not a text: `write "1.1.0", in quotes`.
#[doc(hidden)]
pub fn quoting_remedy(version: &Json) -> String {
    let text = if let Json::Number(number) = version { number.to_string() } else { String::new() };
    let nearest = nearest_supported(&text, &SpecVersion::ALL).unwrap_or(SpecVersion::NEWEST);
    format!("write \"{nearest}\", in double quotes")
}

/// The versions in Go's text of a list of strings: `["0.1.0" "0.2.0"]`.
#[doc(hidden)]
pub fn quoted_list(versions: &[SpecVersion]) -> String {
    let quoted: Vec<_> = versions.iter().map(|v| format!("\"{v}\"")).collect();
    format!("[{}]", quoted.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_of_versions_agree() {
        for version in SpecVersion::ALL {
            assert_eq!(version.as_str().parse::<VersionNumber>().unwrap(), version.into());
            assert_eq!(SpecVersion::parse_exact(version.as_str()), Some(version));
        }
        assert!(SpecVersion::ALL.is_sorted());
    }

    #[test]
    fn the_nearest_supported_version_is_suggested() {
        let old = [SpecVersion::V0_4_0, SpecVersion::V1_0_0];
        for (text, expected) in [
            ("1.1", "1.1.0"),
            ("0.4", "0.4.0"),
            ("1", "1.0.0"),
            ("v1.0.0", "1.0.0"),
            (" 0.3.1", "0.3.1"),
            ("0.5.1", "0.4.0"),
            ("2.0.0", "1.1.0"),
            ("0.0.1", "0.1.0"),
            ("latest", "1.1.0"),
        ] {
            assert_eq!(
                nearest_supported(text, &SpecVersion::ALL).map(SpecVersion::as_str),
                Some(expected)
            );
        }
        assert_eq!(nearest_supported("0.3.1", &old), Some(SpecVersion::V0_4_0));
        assert_eq!(nearest_supported("1.1.0", &old), Some(SpecVersion::V1_0_0));
        assert_eq!(nearest_supported("1.1.0", &[]), None);
        assert_eq!(quoting_remedy(&Json::Number(1.into())), "write \"1.0.0\", in double quotes");
    }

    #[test]
    fn incomplete_version_numbers_are_parsed() {
        assert_eq!("".parse::<VersionNumber>().unwrap(), SpecVersion::V0_1_0.into());
        assert_eq!("1".parse::<VersionNumber>().unwrap(), SpecVersion::V1_0_0.into());
        assert_eq!("+1.0".parse::<VersionNumber>().unwrap(), SpecVersion::V1_0_0.into());
        for bad in ["asdf.", ".asdfas", "0.", "..", "1.2.3.4", "1.2.3.4.5", "1.x", " 1"] {
            assert!(bad.parse::<VersionNumber>().is_err(), "{bad}");
        }
        assert_eq!(SpecVersion::parse_exact("1.0"), None);
        assert!("0.10.0".parse::<VersionNumber>().unwrap() > SpecVersion::V0_4_0.into());
    }
}
