//! DHCPv6 for one address (`IA_NA`), RFC 9915, which has replaced 8415, without input or output.
//!
//! | file | |
//! | --- | --- |
//! | `message.rs` | messages and their options |
//! | `identity.rs` | what servers know the client as |
//! | `lease.rs` | what a reply comes to, and the CNI result of it |
//! | `exchange.rs` | one exchange of messages: when to send again, section 15 |
//! | `machine.rs` | the client's states, section 18.2 |
//! | `verdict.rs` | what the answers of servers come to |
//! | `neighbour.rs` | frames that ask the link who has an address |

pub mod exchange;
pub mod identity;
pub mod lease;
pub mod machine;
pub mod message;
pub mod neighbour;
pub mod verdict;
