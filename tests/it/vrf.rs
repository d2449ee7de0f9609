//! vrf.
