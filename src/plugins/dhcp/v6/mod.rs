//! DHCPv6 for one address (`IA_NA`), RFC 9915, which has replaced 8415.
//!
//! | file | |
//! | --- | --- |
//! | `message.rs` | messages and their options |
//! | `duid.rs` | the client's identity for servers |
//! | `lease.rs` | the lease that a Reply grants, and the CNI result of it |
//! | `retransmit.rs` | one exchange of messages: when to send again, section 15 |
//! | `reply.rs` | how the answers of servers are judged |
//! | `neighbour.rs` | duplicate address detection |
//! | `socket.rs` | UDP and packet sockets, in the namespace of the calling thread |

pub mod duid;
pub mod lease;
pub mod message;
pub mod neighbour;
pub mod reply;
pub mod retransmit;
pub mod socket;
