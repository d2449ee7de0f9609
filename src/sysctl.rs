//! Kernel parameters under `/proc/sys`.

use crate::error::{Error, Result};

/// The identity of this boot of the machine; every boot has another.
pub fn boot_id() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(path).map_err(|e| Error::io(format!("read {path}"), &e))?;
    Ok(text.trim().to_owned())
}
