//! host-local: addresses from configured ranges, one file per reservation.
pub mod allocate;
pub mod range;
pub mod resolv;
