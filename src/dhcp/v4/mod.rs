//! DHCP, RFC 2131.
//!
//! | file | |
//! | --- | --- |
//! | `message.rs` | BOOTP messages with options, RFC 2131 and 3396 |
//! | `option.rs` | option values, RFC 2132, 3397 and 3442 |
//! | `frame.rs` | Ethernet frames with UDP or ARP |
//! | `lease.rs` | the lease of a DHCPACK and its CNI result |

pub mod frame;
pub mod lease;
pub mod message;
pub mod option;
