//! Integration tests of the plugins from a runtime's view: the real executable on the real kernel.
//!
//! Every test creates a private host namespace on its own thread ([`support::node::Node`]) and
//! containers, which are namespaces held by a descriptor. Therefore tests run in parallel and need
//! no explicit clean-up. Root or `unshare -rn` is required; iproute2 and ping verify independently.
//!
//! | module | |
//! | --- | --- |
//! | **interface plugins** | |
//! | `bond` | failover, settings, links of the host and of the container |
//! | `bridge` | ports, gateways, VLANs, routes, CHECK, refusals |
//! | `dummy`, `vlan` | interfaces without a wire; tagged frames, masters, CHECK |
//! | `host_device` | devices played by veth ends and a fake sysfs; in the VM, real cards |
//! | `loopback` | `lo` up and down |
//! | `macvlan`, `ipvlan` | children of a link: modes, masters, traffic, CHECK |
//! | `mtu` | `"mtu": "auto"` in every plugin that supports it |
//! | `host_name` | names of the host's end by `hostInterfaceName` |
//! | `ptp` | routes on both sides, CHECK, refusals |
//! | `tap` | tap devices, and programs that read and write Ethernet frames |
//! | **IPAM plugins** | |
//! | `delegation` | IPAM plugins in the same process and in child processes |
//! | `dhcp` | leases of dnsmasq, ISC's server and hostile servers; the daemon's lifecycle |
//! | `host_local` | ranges, requested addresses, kills, the files of the store |
//! | `static_plugin` | the plugin static |
//! | **chained plugins** | |
//! | `bandwidth` | limits: measured, in every version, compatibility |
//! | `chain` | bridge, portmap and firewall for many containers at once |
//! | `egress` | policies: lifecycle, traffic, sources, ways out, flushes, the tool |
//! | `firewall` | its back ends, compared by traffic, with each other and with the reference |
//! | `flannel` | the derived configuration, records, delegates in this and in child processes |
//! | `masquerade`, `spoof` | `ipMasq` and `macspoofchk`: traffic, rules, compatibility |
//! | `xt_flavours`, `xt_modules` | nodes with both flavours of iptables; kernels without one of its modules |
//! | `portmap` | port mappings with nftables, both iptables, and the reference's layout |
//! | `route_override` | routes deleted and added: attributes, traffic, records, CHECK, compatibility |
//! | `sbr` | source-based routing: tables, rules, traffic over two uplinks, compatibility |
//! | `seven` | one container through a chain of seven plugins |
//! | `tc_redirect_tap` | the network of a container for a virtual machine: traffic, results, takeover from the original |
//! | `tuning` | kernel parameters and attributes, the allowlist, backups, compatibility |
//! | `vrf` | routing domains: membership, tables, overlapping addresses |
//! | **all plugins** | |
//! | `advertisements` | `acceptRA`, and kernel parameters against router advertisements |
//! | `concurrency` | concurrent calls, mixed with the reference's host-local |
//! | `detached` | DEL returns before the kernel's grace periods, and leaves no process |
//! | `edited` | configurations that were edited after ADD: DEL succeeds and leaves nothing |
//! | `examples` | the example on each plugin's page, run as a reader would |
//! | `footprint` | processes, sleeps, memory |
//! | `protocol` | environment, versions, errors, VERSION, what a plugin prints about itself |
//! | `restricted` | read-only kernel parameters, a kernel without IPv6, a user namespace |
//! | `scale` | every feature with state of all attachments, at 1, 20 and 200 |
//! | `second_network` | two networks with the same routes: which one is preferred, what moves them |
//! | `soak` | everything at once on one node, at random: half a minute, or an hour (`make soak`) |
//! | `status` | STATUS succeeds exactly if the next ADD does |
//! | **faults, dead and hostile containers** | |
//! | `alive` | no live container is declared dead, and what the dead leave is reclaimed |
//! | `attachment` | resources of a dead container, and the ways to reclaim them |
//! | `faults` | ADD failing or killed at each step, DEL killed at each step |
//! | `flush` | flushed rules: detection, and restoration by the next ADD |
//! | `hostile` | a container's changes to its links, and isolation from their effects |
//! | `sweep` | kills and errors at each step of twenty chains, with each way of cleaning up |
//! | `tenant` | directories and files that the author of a configuration names |
//! | **the reference plugins** | |
//! | `handover` | live state converted for the reference plugins |
//! | `in_doubt` | GC without attachments that the reference made |
//! | `migration` | a node with containers migrates from the reference plugins to cnibox and back |
//! | `packages` | the maintainer scripts of the debs |
//! | `parity` | comparison with the reference plugins |
//! | `takeover` | each implementation checks and deletes what the other added |
//! | `twins` | random sequences on two nodes, one with the reference plugins, compared after each step |
//! | **tools and the library** | |
//! | `buildkit` | calls as `BuildKit` makes them: its names of the plugins, a namespace for each step |
//! | `cnitool` | the tool with the real plugins: walk-through, chains, GC, STATUS |
//! | `conflists` | configurations of other projects, without false alarms of `cnibox lint` |
//! | `doctor` | injected defects of a node and of attachments, reported and repaired; `cnibox gc` |
//! | `install` | `cnibox install` and `uninstall`, on directories in use |
//! | `ipam` | `cnibox ipam`: leases listed, released, reclaimed |
//! | `language` | options, exit statuses and JSON that all tools have in common; words of the release before |
//! | `library` | the examples of `crates/cni`: a plugin and two runtimes |
//! | `lint` | mistakes in configurations, reported before a container is attached |
//! | `messages`, `advice` | what operators are told after mistakes, and what follows from following it |
//! | `repair` | `cnibox repair`: lost state of live containers is restored |
//! | `sanity` | `cni-sanity` on correct plugins, and on mutants with one defect each |
//! | `trace` | the flight recorder and `cnibox trace` |
//!
//! What they share is in `support`:
//!
//! | module | |
//! | --- | --- |
//! | `support::chained` | the verbs of a plugin behind `ptp` or `bridge`, and faults at each of its steps |
//! | `support::compare` | results without random parts; the directory of the reference plugins |
//! | `support::conflist` | the calls of a runtime for a list of plugins |
//! | `support::faults` | errors and kills at each system call of an interface plugin |
//! | `support::lifecycle` | the verbs in the orders of runtimes, for every version |
//! | `support::net` | a network of a node: its configuration, its calls, permitted remainders |
//! | `support::netlink` | links, addresses, routes and rules of a namespace as text |
//! | `support::node` | the private host, containers, calls of plugins |
//! | `support::parallel` | calls at the same time |
//! | `support::pause` | a call that is stopped at any of its system calls |
//! | `support::random` | random numbers that a seed repeats |
//! | `support::resolver` | the resolver for names in egress policies |
//! | `support::snapshot` | all state that plugins may leave, compared |
//! | `support::strace` | the system calls of a call, with errors and kills |
//! | `support::tap` | programs that open tap devices, and a machine behind one |
//! | `support::traffic` | pings, TCP and UDP between host and containers |
//!
//! Kernel features that a test needs, and where tests run without them: `cnibox::lane`.

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

mod advertisements;
mod advice;
mod alive;
mod attachment;
mod bandwidth;
mod bond;
mod bridge;
mod buildkit;
mod chain;
mod cnitool;
mod concurrency;
mod conflists;
mod delegation;
mod detached;
mod dhcp;
mod doctor;
mod dummy;
mod edited;
mod egress;
mod examples;
mod faults;
mod firewall;
mod flannel;
mod flush;
mod footprint;
mod handover;
mod host_device;
mod host_local;
mod host_name;
mod hostile;
mod in_doubt;
mod install;
mod ipam;
mod ipvlan;
mod language;
mod library;
mod lint;
mod loopback;
mod macvlan;
mod masquerade;
mod messages;
mod migration;
mod mtu;
mod packages;
mod parity;
mod portmap;
mod protocol;
mod ptp;
mod repair;
mod restricted;
mod route_override;
mod sanity;
mod sbr;
mod scale;
mod second_network;
mod seven;
mod soak;
mod spoof;
mod static_plugin;
mod status;
mod support;
mod sweep;
mod takeover;
mod tap;
mod tc_redirect_tap;
mod tenant;
mod trace;
mod tuning;
mod twins;
mod vlan;
mod vrf;
mod xt_flavours;
mod xt_modules;
