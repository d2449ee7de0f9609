//! What a person runs.

pub mod cnitool;
pub mod multicall;
