//! Everything that is kept on disk.

pub mod atomic;
