//! The command line.

use crate::Result;
use crate::case::{CASES, Case};
use crate::netfilter::Backend;

pub(crate) const HELP: &str = "\
pods: attach and detach the same pods with two plugin folders in turn

Usage: cargo bench --bench pods -- [CASE ...] [OPTIONS]
       make bench ARGS=\"bridge ptp --pods 1000 --rounds 30\"

Cases (all of them without a choice):
  version        VERSION, spawn to exit
  link           what the kernel takes for the link of a pod on a bridge, without any plugin
  host-local     addresses only
  bridge         bridge + host-local, isDefaultGateway, IPv4
  bridge-dual    the same with IPv4 and IPv6
  bridge-masq    bridge with ipMasq
  ptp            ptp + host-local
  macvlan        macvlan + host-local
  ipvlan         ipvlan + host-local, where the kernel has it
  vlan           vlan + host-local, where the kernel has it; a VLAN for each pod
  dummy          dummy + host-local, where the kernel has it
  host-device    host-device + host-local, one end of a veth pair for each pod
  tap            tap + host-local
  portmap-1      bridge, then portmap with 1 port; a chain is one ADD, one DEL
  portmap-32     bridge, then portmap with 32 ports
  chain          loopback, bridge with ipMasq, portmap with 1 port
  bandwidth      bridge, then bandwidth with both directions
  tuning         bridge, then tuning
  sbr            bridge, then sbr
  flannel        flannel + bridge + host-local
  seven          loopback, bridge, portmap, bandwidth, firewall, tuning, sbr
  chain-firewall bridge, portmap with 1 port, firewall
  ports          portmap with 1 to 60,000 TCP and UDP ports, and the first packet through one
  others         portmap with one port among those of others, up to 60,000
  leases         host-local with 10, 1,000, 20,000 and 60,000 leases, and with one address left

Options:
  --pods N[,N]   pods already there, with their links and leases, but without rules in the packet
                 filter (0,1000; at most 1000)
  --rounds N     pods attached and detached one by one by each side (30)
  --parallel N   also attach and detach a batch, N at once (16; 0: do not)
  --batch N      pods in a batch (160)
  --backend B    what ipMasq, portmap and firewall use: nftables or iptables (nftables; a peer's
                 plugin that does not know it uses iptables, and the heading says so)
  --foreign N    rules of others in the packet filter of each host, loaded with nft or
                 iptables-restore as --backend says (0)
  --quick        a smoke test: 3 rounds, 0 and 20 pods, a batch of 8, unless said otherwise
  -h, --help     this text

Environment:
  PEER           plugin folder to compare with (/usr/lib/cni if it is there)
  CNIBOX_BIN     our executable (the one cargo has built)
  TMPDIR         where leases are kept; a folder on a disk, since leases are synced (/tmp)

Runs as root, or as an ordinary user where user namespaces are allowed. Everything happens in
private network namespaces and one temporary folder; nothing is left, even after Ctrl-C.
";

/// Cases that are no list of plugins.
const SPECIAL: [&str; 3] = ["leases", "ports", "others"];

/// More do not fit on a bridge beside those that are measured.
const MOST_PODS: usize = 1000;

#[derive(Debug)]
pub(crate) struct Options {
    names: Vec<String>,
    pods: Vec<usize>,
    pub(crate) rounds: usize,
    pub(crate) parallel: usize,
    pub(crate) batch: usize,
    pub(crate) batches: usize,
    pub(crate) backend: Backend,
    pub(crate) foreign: usize,
}

impl Options {
    /// `None` if help is asked for. `--bench` is what cargo adds.
    pub(crate) fn parse(args: impl Iterator<Item = String>) -> Result<Option<Options>> {
        let mut names = Vec::new();
        let (mut quick, mut pods) = (false, None);
        let (mut rounds, mut parallel, mut batch) = (None, None, None);
        let (mut backend, mut foreign) = (Backend::Nftables, 0);
        let mut args = args;
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--bench" => {}
                "--quick" => quick = true,
                "-h" | "--help" => return Ok(None),
                "--pods" => pods = Some(numbers(&arg, args.next())?),
                "--rounds" => rounds = Some(number(&arg, args.next().as_deref())?),
                "--parallel" => parallel = Some(number(&arg, args.next().as_deref())?),
                "--batch" => batch = Some(number(&arg, args.next().as_deref())?),
                "--backend" => backend = Backend::parse(args.next().as_deref())?,
                "--foreign" => foreign = number(&arg, args.next().as_deref())?,
                name if SPECIAL.contains(&name) || CASES.iter().any(|case| case.name == name) => {
                    names.push(arg);
                }
                _ => return Err(format!("unknown case or option \"{arg}\": see --help").into()),
            }
        }
        let choose = |full, small| if quick { small } else { full };
        Ok(Some(Options {
            names,
            pods: pods.unwrap_or_else(|| vec![0, choose(1000, 20)]),
            rounds: rounds.unwrap_or(choose(30, 3)).max(1),
            parallel: parallel.unwrap_or(choose(16, 4)),
            batch: batch.unwrap_or(choose(160, 8)).max(1),
            batches: choose(3, 1),
            backend,
            foreign,
        }))
    }

    pub(crate) fn wants(&self, name: &str) -> bool {
        self.names.is_empty() || self.names.iter().any(|wanted| wanted == name)
    }

    /// The numbers of pods to try a case with.
    pub(crate) fn pods_of(&self, case: &Case) -> &[usize] {
        if case.is_version() { &[0] } else { &self.pods }
    }
}

fn numbers(option: &str, text: Option<String>) -> Result<Vec<usize>> {
    let text = text.unwrap_or_default();
    let pods: Vec<usize> =
        text.split(',').map(|part| number(option, Some(part))).collect::<Result<_>>()?;
    match pods.iter().max() {
        Some(&most) if most > MOST_PODS => {
            Err(format!("{option} {most}: at most {MOST_PODS}, so that they fit on a bridge")
                .into())
        }
        _ => Ok(pods),
    }
}

fn number(option: &str, text: Option<&str>) -> Result<usize> {
    let text = text.unwrap_or_default();
    text.parse().map_err(|_| format!("{option} \"{text}\": not a number").into())
}
