//! dhcp: leases of real servers, of servers that misbehave, and the daemon's own life.

mod daemon;
mod fake;
mod fake_v6;
mod folder;
mod hostile;
mod leases;
mod life;
mod life_v6;
mod v6;
mod world;
