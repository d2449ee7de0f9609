//! Programs for people.

pub mod multicall;
