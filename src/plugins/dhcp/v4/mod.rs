//! DHCP, RFC 2131.
//!
//! | file | |
//! | --- | --- |
//! | `message.rs` | BOOTP messages with options, RFC 2131 and 3396 |
//! | `option.rs` | the values of options, RFC 2132, 3397 and 3442 |
//! | `frame.rs` | Ethernet frames with UDP or ARP in them |
//! | `lease.rs` | the lease that an acknowledgement grants, and the CNI result of it |
//! | `socket.rs` | packet and UDP sockets, in the namespace of the calling thread |

pub mod frame;
pub mod lease;
pub mod message;
pub mod option;
pub mod socket;
