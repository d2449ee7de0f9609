//! Integration tests of the plugins from a runtime's view: the real executable on the real kernel.
//!
//! Every test creates a private host namespace on its own thread ([`node::Node`]) and containers,
//! which are namespaces held by a descriptor. Therefore tests run in parallel and need no explicit
//! clean-up. Root or `unshare -rn` is required; iproute2 and ping verify independently.
//!
//! | module | |
//! | --- | --- |
//! | `node` | the private host, calls of plugins |
//! | `snapshot` | all state that plugins may leave, compared |
//! | `cnibox::lane` | kernel features that a test needs, and where tests run without them |
//! | `messages`, `advice` | what operators are told after mistakes, and what follows from following it |
//! | `net` | a network of a node: its configuration, its calls, permitted remainders |
//! | `traffic` | pings, TCP and UDP between host and containers |
//! | `conflist` | the calls of a runtime for a list of plugins |
//! | `conflists` | configurations of other projects, without false alarms of `cnibox lint` |
//! | `lifecycle` | the verbs in the orders of runtimes, for every version |
//! | `library` | the programs in examples/, which use `cnibox::runtime` |
//! | `cnitool` | the tool with the real plugins: walk-through, chains, GC, STATUS |
//! | `language` | options, exit statuses and JSON that all tools have in common; words of the release before |
//! | `buildkit` | calls as `BuildKit` makes them: its names of the plugins, a namespace for each step |
//! | `examples` | the example on each plugin's page, run as a reader would |
//! | `strace`, `compare` | system calls of a call; results without random parts |
//! | `faults` | ADD failing or killed at each step, DEL killed at each step |
//! | `sweep` | kills and errors at each step of fifteen chains, with each way of cleaning up |
//! | `chained` | the verbs of a plugin behind `ptp`, and faults at each of its steps |
//! | `alive` | no live container is declared dead, and what the dead leave is reclaimed |
//! | `attachment` | resources of a dead container, and the ways to reclaim them |
//! | `chain` | a whole chain of plugins for many containers at once |
//! | `seven` | one container through a chain of seven plugins |
//! | `scale` | every feature with state of all attachments, at 1, 20 and 200 |
//! | `concurrency` | concurrent calls, mixed with the reference's host-local |
//! | `delegation` | IPAM plugins in the same process and in child processes |
//! | `detached` | DEL returns before the kernel's grace periods, and leaves no process |
//! | `dhcp` | leases of dnsmasq, ISC's server and hostile servers; the daemon's lifecycle |
//! | `fixed` | the plugin static |
//! | `flush` | flushed rules: detection, and restoration by the next ADD |
//! | `footprint` | processes, sleeps, memory |
//! | `in_doubt` | GC without attachments that the reference made |
//! | `handover` | live state converted for the reference plugins |
//! | `lint` | mistakes in configurations, reported before a container is attached |
//! | `ipam` | the tool: leases listed, released, reclaimed |
//! | `masquerade`, `spoof` | `ipMasq` and `macspoofchk`: traffic, rules, compatibility |
//! | `migration` | a node with containers migrates from the reference plugins to cnibox and back |
//! | `mtu` | `"mtu": "auto"` in every plugin that supports it |
//! | `macvlan`, `ipvlan` | children of a link: modes, masters, traffic, CHECK |
//! | `sanity` | `cni-sanity` on correct plugins, and on mutants with one defect each |
//! | `doctor` | injected defects of a node and of attachments, reported and repaired; `cnibox gc` |
//! | `edited` | configurations that were edited after ADD: DEL succeeds and leaves nothing |
//! | `dummy`, `vlan` | interfaces without a wire; tagged frames, masters, CHECK |
//! | `parity` | comparison with the reference plugins |
//! | `twins` | random sequences on two nodes, one with the reference plugins, compared after each step |
//! | `takeover` | each implementation checks and deletes what the other added |
//! | `firewall` | its back ends, compared by traffic, with each other and with the reference |
//! | `hostile` | a container's changes to its links, and isolation from their effects |
//! | `tenant` | directories and files that the author of a configuration names |
//! | `host_device` | devices played by veth ends and a fake sysfs; in the VM, real cards |
//! | `tap` | tap devices, and programs that read and write Ethernet frames |
//! | `portmap` | port mappings with nftables, both iptables, and the reference's layout |
//! | `install` | `cnibox install` and `uninstall`, on directories in use |
//! | `bandwidth` | limits: measured, in every version, compatibility |
//! | `tuning` | kernel parameters and attributes, the allowlist, backups, compatibility |
//! | `behind` | the verbs of a plugin chained behind bridge in the container, for every version |
//! | `sbr` | source-based routing: tables, rules, traffic over two uplinks, compatibility |
//! | `vrf` | routing domains: membership, tables, overlapping addresses |
//! | `flannel` | the derived configuration, records, delegates in this and in child processes |
//! | `protocol` | behaviour common to all plugins: environment, versions, errors, VERSION, about |

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

use cnibox::lane;

mod advice;
mod alive;
mod attachment;
mod bandwidth;
mod bridge;
mod buildkit;
mod chain;
mod chained;
mod cnitool;
mod compare;
mod concurrency;
mod conflist;
mod conflists;
mod delegation;
mod detached;
mod dhcp;
mod doctor;
mod dummy;
mod edited;
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
mod in_doubt;
mod install;
mod ipam;
mod ipvlan;
mod language;
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
mod packages;
mod parity;
mod portmap;
mod protocol;
mod ptp;
mod repair;
mod restricted;
mod sanity;
mod sbr;
mod scale;
mod seven;
mod snapshot;
mod spoof;
mod status;
mod strace;
mod sweep;
mod takeover;
mod tap;
mod tenant;
mod trace;
mod traffic;
mod tuning;
mod twins;
mod vlan;
mod vrf;
