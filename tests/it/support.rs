//! What the tests of several subjects share; nothing in it is a test of its own.

pub(crate) mod chained;
pub(crate) mod compare;
pub(crate) mod conflist;
pub(crate) mod faults;
pub(crate) mod lifecycle;
pub(crate) mod net;
pub(crate) mod netlink;
pub(crate) mod node;
pub(crate) mod parallel;
pub(crate) mod pause;
pub(crate) mod random;
pub(crate) mod resolver;
pub(crate) mod snapshot;
pub(crate) mod strace;
pub(crate) mod tap;
pub(crate) mod traffic;
