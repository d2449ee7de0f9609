//! How many connections a container may open.

use serde::{Deserialize, Serialize};

use cni::error::{Error, Result};

/// The largest rate of new connections in its unit.
const HIGHEST_RATE: u64 = 1_000_000;

/// Limits as a policy has them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyLimits {
    /// The connections that are open at once, by any protocol that is tracked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<u32>,
    /// New connections in a second or minute: `50/s`, `600/m`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub new: String,
}

/// The limits of all policies of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionLimits {
    pub connections: Option<u32>,
    pub new: Option<ConnectionRate>,
}

/// A number of connections in a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionRate {
    pub count: u64,
    pub seconds: u64,
}

impl PolicyLimits {
    pub fn is_empty(&self) -> bool {
        *self == PolicyLimits::default()
    }

    /// Errors have code 7.
    pub fn compile(&self) -> Result<ConnectionLimits> {
        if self.connections == Some(0) {
            let remedy = "write a number from 1 on, or a policy that allows nothing";
            return Err(Error::config("limits.connections is 0").with_details(remedy));
        }
        let new = if self.new.is_empty() { None } else { Some(parse_rate(&self.new)?) };
        Ok(ConnectionLimits { connections: self.connections, new })
    }
}

fn parse_rate(text: &str) -> Result<ConnectionRate> {
    let units = [("/s", 1), ("/m", 60)];
    let rate = units.into_iter().find_map(|(unit, seconds)| {
        let digits = text.strip_suffix(unit)?;
        let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
        let count = digits.parse().ok().filter(|_| is_number)?;
        (1..=HIGHEST_RATE).contains(&count).then_some(ConnectionRate { count, seconds })
    });
    rate.ok_or_else(|| {
        Error::config(format!("limits.new {text:?}: not a rate")).with_details(
            "write the connections that may begin in a second or a minute, like 50/s or 600/m",
        )
    })
}

impl ConnectionLimits {
    /// The limits under which both hold.
    #[must_use]
    pub fn intersect(self, other: ConnectionLimits) -> ConnectionLimits {
        let connections = self.connections.into_iter().chain(other.connections).min();
        let per_minute = |rate: &ConnectionRate| rate.count * 60 / rate.seconds;
        let new = self.new.into_iter().chain(other.new).min_by_key(per_minute);
        ConnectionLimits { connections, new }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(connections: Option<u32>, new: &str) -> PolicyLimits {
        PolicyLimits { connections, new: new.to_owned() }
    }

    #[test]
    fn the_smaller_limits_hold() {
        let of = |connections, new| limits(connections, new).compile().unwrap();
        let both = of(Some(10), "50/s").intersect(of(Some(20), "600/m"));
        assert_eq!(both, of(Some(10), "600/m"));
        assert_eq!(of(None, "").intersect(both), both);
    }

    #[test]
    fn mistakes_name_the_key() {
        for (connections, new, problem) in [
            (Some(0), "", "limits.connections is 0"),
            (None, "50", "limits.new \"50\": not a rate"),
            (None, "0/s", "limits.new \"0/s\": not a rate"),
            (None, "+5/s", "limits.new \"+5/s\": not a rate"),
            (None, "5/h", "limits.new \"5/h\": not a rate"),
            (None, "1000001/s", "limits.new \"1000001/s\": not a rate"),
        ] {
            assert_eq!(limits(connections, new).compile().unwrap_err().message(), problem);
        }
    }
}
