//! The packet filter. Until it speaks `nf_tables`, what needs it is refused by name.

pub mod backend;
pub mod iptables;
pub mod names;
pub mod ports;

use crate::error::{Code, Error, Result};

/// Refuses `ipMasq`, so that nobody believes traffic to be masqueraded that is not.
pub fn refuse_masquerade(wanted: bool) -> Result<()> {
    if wanted { Err(unsupported("ipMasq")) } else { Ok(()) }
}

/// Refuses `macspoofchk`.
pub fn refuse_source_mac_check(wanted: bool) -> Result<()> {
    if wanted { Err(unsupported("macspoofchk")) } else { Ok(()) }
}

fn unsupported(key: &str) -> Error {
    Error::new(Code::UNSUPPORTED_FIELD, format!("\"{key}\": true is not supported yet"))
        .with_details(format!("set {key} to false, or use the reference plugin for this network"))
}
