//! What a person runs.

pub mod cnitool;
