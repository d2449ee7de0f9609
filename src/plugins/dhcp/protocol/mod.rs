//! DHCP without any input or output: messages, frames, leases, the client's states.
//!
//! | file | |
//! | --- | --- |
//! | `message.rs` | BOOTP messages with options, RFC 2131 and 3396 |
//! | `option.rs` | the values of options, RFC 2132, 3397 and 3442 |
//! | `frame.rs` | Ethernet frames with UDP or ARP in them |
//! | `lease.rs` | what an acknowledgement comes to, and the CNI result of it |
//! | `machine.rs`, `client.rs` | the client's states, RFC 2131 section 4.4; what goes in and out |
//! | `v6/` | the same for IPv6, RFC 9915 (8415) |
//! | `family.rs` | what the daemon keeps, whichever family it is of |
//! | `timing.rs`, `text.rs` | for both: moments, waits, random numbers; texts from strangers |

pub mod client;
pub mod family;
pub mod frame;
pub mod lease;
pub mod machine;
pub mod message;
pub mod option;
pub mod text;
pub mod timing;
pub mod v6;
