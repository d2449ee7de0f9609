//! `CNI_ARGS`: `KEY=VALUE` pairs joined with `;`; deprecated by the specification, set by every
//! runtime.

use crate::error::{Error, Result};

/// The pairs of known keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CniArgPairs(Vec<(String, String)>);

impl CniArgPairs {
    /// Parses `text` for a plugin with the keys `known`. Another key is an error unless the pairs
    /// contain `IgnoreUnknown` with `1` or `true`, at any position (runtimes emit the pairs in
    /// random order). As in the reference plugins, every pair has exactly one `=`, and no pair
    /// is empty.
    ///
    /// ```
    /// # use cnibox_cni::args::CniArgPairs;
    /// assert!(CniArgPairs::parse("IP=10.1.2.3;K8S_POD_NAME=web;IgnoreUnknown=1", &["IP"]).is_ok());
    /// assert!(CniArgPairs::parse("IP=10.1.2.3;K8S_POD_NAME=web", &["IP"]).is_err());
    /// ```
    pub fn parse(text: &str, known: &[&str]) -> Result<CniArgPairs> {
        if text.is_empty() {
            return Ok(CniArgPairs::default());
        }
        let pairs: Vec<&str> = text.split(';').collect();
        let mut ignore_unknown = false;
        for pair in &pairs {
            if let Some(value) = pair.strip_prefix("IgnoreUnknown=") {
                ignore_unknown = parse_bool(pair, value)?;
            }
        }
        let (mut recognised, mut unknown) = (Vec::new(), Vec::new());
        for pair in pairs {
            let split = pair.split_once('=').filter(|(_, value)| !value.contains('='));
            let (key, value) =
                split.ok_or_else(|| Error::internal(format!("ARGS: invalid pair \"{pair}\"")))?;
            if known.contains(&key) {
                recognised.push((key.to_owned(), value.to_owned()));
            } else if key != "IgnoreUnknown" {
                unknown.push(format!("\"{pair}\""));
            }
        }
        if !unknown.is_empty() && !ignore_unknown {
            let list = unknown.join(" ");
            return Err(Error::internal(format!("ARGS: unknown args [{list}]")).with_details(
                "add IgnoreUnknown=1 to CNI_ARGS to ignore the keys of other plugins",
            ));
        }
        Ok(CniArgPairs(recognised))
    }

    /// The last value of `key`, which is case-sensitive, parsed by `parse`. An empty value is no
    /// request.
    ///
    /// ```
    /// # use cnibox_cni::args::CniArgPairs;
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let args = CniArgPairs::parse("MTU=1400", &["MTU", "IP"])?;
    /// let mtu = args.parse_value("MTU", |text| text.parse::<u32>().map_err(|error| error.to_string()))?;
    /// assert_eq!(mtu, Some(1400));
    /// # Ok(())
    /// # }
    /// ```
    pub fn parse_value<T>(
        &self,
        key: &str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Result<Option<T>> {
        let last = self.0.iter().rfind(|(k, _)| k == key);
        let Some((_, value)) = last.filter(|(_, value)| !value.trim().is_empty()) else {
            return Ok(None);
        };
        parse(value).map(Some).map_err(|why| bad_value_error(&format!("{key}={value}"), &why))
    }
}

fn parse_bool(pair: &str, value: &str) -> Result<bool> {
    match value.to_lowercase().as_str() {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        other => {
            Err(bad_value_error(pair, &format!("boolean unmarshal error: invalid input {other}")))
        }
    }
}

fn bad_value_error(pair: &str, why: &str) -> Error {
    Error::internal(format!("ARGS: error parsing value of pair \"{pair}\": {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::unnecessary_wraps, reason = "a converter may fail")]
    fn text(value: &str) -> Result<String, String> {
        Ok(value.to_owned())
    }

    fn parse(text: &str) -> Result<CniArgPairs> {
        CniArgPairs::parse(text, &["IP", "GATEWAY"])
    }

    #[test]
    fn args_keep_only_the_keys_of_the_plugin() {
        let args = parse("IP=10.0.0.5;GATEWAY=10.0.0.1").unwrap();
        assert_eq!(args.parse_value("IP", text).unwrap().as_deref(), Some("10.0.0.5"));
        assert_eq!(args.parse_value("ip", text).unwrap(), None);
        assert_eq!(parse("").unwrap(), CniArgPairs::default());
        for empty in ["IP=", "IP= ", "IP=10.0.0.5;IP="] {
            assert_eq!(parse(empty).unwrap().parse_value("IP", text).unwrap(), None, "{empty}");
        }
        let error = parse("IP=10.0.0.5;MAC=02:00:00:00:00:01").unwrap_err();
        assert_eq!(error.message(), r#"ARGS: unknown args ["MAC=02:00:00:00:00:01"]"#);
        let twice = parse("IP=1.1.1.1;IP=2.2.2.2").unwrap();
        assert_eq!(twice.parse_value("IP", text).unwrap().as_deref(), Some("2.2.2.2"));
    }

    #[test]
    fn unknown_keys_need_ignore_unknown() {
        let error = parse("A=1;B=2").unwrap_err();
        assert_eq!(error.message(), r#"ARGS: unknown args ["A=1" "B=2"]"#);
        for flag in ["1", "true", "TRUE"] {
            assert!(parse(&format!("K8S_POD_UID=x;IgnoreUnknown={flag}")).is_ok());
        }
        assert!(parse("IgnoreUnknown=0;A=1").is_err());
    }

    #[test]
    fn malformed_args_are_refused() {
        for bad in [
            "none",
            "A",
            "A=1;;B=2",
            "IP=a=b;IgnoreUnknown=1",
            "A=b=c;IgnoreUnknown=1",
            "IgnoreUnknown=1;",
            ";IgnoreUnknown=1",
        ] {
            let error = parse(bad).unwrap_err();
            assert!(error.message().starts_with("ARGS: invalid pair "), "{bad}: {error}");
        }
        assert_eq!(
            parse("IgnoreUnknown=Yes").unwrap_err().message(),
            r#"ARGS: error parsing value of pair "IgnoreUnknown=Yes": boolean unmarshal error: invalid input yes"#
        );
        let error = parse("IP=abc").unwrap().parse_value("IP", crate::ip::parse_ip_or_cidr);
        assert_eq!(
            error.unwrap_err().message(),
            r#"ARGS: error parsing value of pair "IP=abc": invalid IP address abc"#
        );
    }
}
