//! The keys beside `ipMasq`: destinations that see the container's own address, and random ports.

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::super::backend::IpFamily;
use cni::error::{Error, Result};
use cni::ip;

/// The maximum length of the exceptions in the name of a chain, which has 255 bytes: 50 are for the
/// longest subnet, and 7 for random ports.
pub(super) const LONGEST_SUFFIX: usize = 255 - 50 - 7;

/// The keys `ipMasqExcept` and `ipMasqRandomFully`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MasqueradeOptions {
    /// The destinations of packets that are not masqueraded.
    pub(super) except: Vec<IpNet>,
    /// Whether the source ports are random.
    pub(super) random_fully: bool,
}

impl MasqueradeOptions {
    pub fn parse(except: &[String], random_fully: bool) -> Result<MasqueradeOptions> {
        let except = ip::parse_networks("ipMasqExcept", except)?;
        let options = MasqueradeOptions { except, random_fully };
        for family in IpFamily::BOTH {
            let length = options.chain_suffix(family).len();
            if length > LONGEST_SUFFIX {
                return Err(Error::config(format!(
                    "\"ipMasqExcept\": {length} characters for networks of one family, \
                     {LONGEST_SUFFIX} are possible"
                ))
                .with_details("write fewer, larger networks"));
            }
        }
        Ok(options)
    }

    pub(super) fn is_default(&self) -> bool {
        *self == MasqueradeOptions::default()
    }

    /// The exceptions of a family.
    pub(super) fn exceptions(&self, family: IpFamily) -> impl Iterator<Item = IpNet> {
        self.except.iter().copied().filter(move |net| IpFamily::of_address(net.addr()) == family)
    }

    /// The exceptions of a family in the name of a chain of `nf_tables`.
    pub(super) fn chain_suffix(&self, family: IpFamily) -> String {
        self.exceptions(family).map(|net| format!("-{net}")).collect()
    }

    /// The warning about a key without `ipMasq`.
    pub fn ineffective_key(&self, ip_masq: bool) -> Option<Error> {
        let key = if self.except.is_empty() { "ipMasqRandomFully" } else { "ipMasqExcept" };
        (!ip_masq && !self.is_default()).then(|| {
            Error::config(format!("\"{key}\" has no effect without \"ipMasq\""))
                .with_details("add \"ipMasq\": true, or remove the key")
        })
    }
}
