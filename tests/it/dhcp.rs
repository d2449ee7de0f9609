//! dhcp: leases of real servers, of servers that misbehave, and the daemon's own life.

mod daemon;
mod fake;
mod hostile;
mod leases;
mod life;
mod v6;
mod world;
