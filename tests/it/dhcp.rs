//! dhcp: leases of real servers, misbehaving servers, and the life cycle of the daemon.

mod daemon;
mod directory;
mod doubt;
mod fake;
mod fake_v6;
mod guest;
mod hostile;
mod leases;
mod life;
mod life_v6;
mod routes;
mod sandbox;
mod v6;
mod world;
