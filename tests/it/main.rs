//! The plugins as a runtime sees them: the real executable, the real kernel.
//!
//! Every test makes a private host namespace on its own thread ([`node::Node`]) and containers
//! that are namespaces held by a descriptor, so tests run in parallel and clean up by ending.
//! Root, or `unshare -rn`, is required; iproute2 and ping are the independent eyes.
//!
//! | module | |
//! | --- | --- |
//! | `node` | the private host, calls of plugins, snapshots of everything a plugin may leave |
//! | `lane` | what a test needs of the kernel, and where it runs when this one lacks it |
//! | `net` | a network of a node: its configuration, its calls, what may remain of it |
//! | `traffic` | pings, TCP and UDP between host and containers |
//! | `lifecycle` | the verbs in the orders runtimes call them, for every version |
//! | `library` | the programs in examples/, which use `cnibox::runtime` |
//! | `cnitool` | the tool with the real plugins: walk-through, chains, GC, STATUS |
//! | `examples` | the example on each plugin's page, as a reader tries it |
//! | `strace`, `compare` | system calls of a call; results without what is random |
//! | `faults` | ADD failing or killed at each step, DEL killed at each step |
//! | `sweep` | kills and errors at each step of fifteen chains, and each way to clean up |
//! | `chained` | the verbs of a plugin behind `ptp`, and faults at each of its steps |
//! | `attachment` | what a dead container left, and who takes it back |
//! | `chain` | a whole chain of plugins for many containers at once |
//! | `seven` | one container through a chain of seven plugins |
//! | `concurrency` | many calls at once, and the reference's host-local in between |
//! | `delegation` | IPAM plugins in this process and in another |
//! | `dhcp` | leases of dnsmasq, of ISC's server and of hostile ones; the daemon's own life |
//! | `fixed` | the plugin static |
//! | `flush` | rules flushed in every way, noticed, and back with the next ADD |
//! | `footprint` | processes, sleeps, memory |
//! | `handover` | live state rewritten for the reference plugins |
//! | `lint` | mistakes in configurations, told before a container meets them |
//! | `ipam` | the tool: leases listed, freed, reclaimed |
//! | `masquerade`, `spoof` | `ipMasq` and `macspoofchk`: traffic, rules, the reference's |
//! | `migration` | a node moves from the reference plugins to cnibox and back, with its containers |
//! | `mtu` | `"mtu": "auto"` in every plugin that has it |
//! | `macvlan`, `ipvlan` | children of a link: modes, masters, traffic, CHECK |
//! | `sanity` | `cni-sanity` on sound plugins, and on mutants with one defect each |
//! | `doctor` | defects of a node and of attachments, injected, named and cured; `cnibox gc` |
//! | `dummy`, `vlan` | addresses and no wire; tagged frames, masters, CHECK |
//! | `parity` | the reference plugins side by side |
//! | `firewall` | its back ends, against traffic, each other and the reference |
//! | `hostile` | what a container does to its links, and what that must not reach |
//! | `host_device` | devices that come and go, played by veth ends and a sysfs of files; in the VM, real cards |
//! | `tap` | tap devices, and programs that speak Ethernet on them |
//! | `portmap` | port mappings with nftables, both iptables, and the reference's own |
//! | `install` | `cnibox install` and `uninstall`, on folders in use |
//! | `bandwidth` | limits: measured, in every version, the reference's |
//! | `tuning` | kernel parameters and attributes, the allowlist, backups, the reference's |
//! | `behind` | the verbs of a plugin behind bridge that works inside the container, for every version |
//! | `sbr` | source-based routing: tables, rules, traffic over two uplinks, the reference's |
//! | `vrf` | routing domains: membership, tables, the same addresses twice |
//! | `flannel` | the derived configuration, records, delegates in this process and others |
//! | `protocol` | what all plugins share: environment, versions, error objects, VERSION, about |

#![expect(clippy::too_many_lines, reason = "tables of cases stand whole in their tests")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    missing_docs,
    reason = "tests"
)]

mod attachment;
mod bandwidth;
mod bridge;
mod chain;
mod chained;
mod cnitool;
mod compare;
mod concurrency;
mod delegation;
mod dhcp;
mod doctor;
mod dummy;
mod examples;
mod faults;
mod firewall;
mod fixed;
mod flannel;
mod flush;
mod footprint;
mod handover;
mod host_device;
mod host_local;
mod hostile;
mod install;
mod ipam;
mod ipvlan;
mod lane;
mod library;
mod lifecycle;
mod lint;
mod loopback;
mod macvlan;
mod masquerade;
mod messages;
mod migration;
mod mtu;
mod net;
mod node;
mod parity;
mod portmap;
mod protocol;
mod ptp;
mod repair;
mod sanity;
mod sbr;
mod seven;
mod spoof;
mod status;
mod strace;
mod sweep;
mod tap;
mod trace;
mod traffic;
mod tuning;
mod vlan;
mod vrf;
