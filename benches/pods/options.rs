//! The command line.

use std::path::PathBuf;

use cnibox::testing::options::{
    self, CommandOption, ParsedCommandLine, long_option, unknown_word_error,
};

use crate::Result;
use crate::case::{CASES, Case};
use crate::netfilter::Backend;

const CASES_HELP: &str = "\
pods: attach and detach the same pods with two plugin directories in turn

Usage: cargo bench -p cnibox-tests --bench pods -- [CASE ...] [OPTIONS]
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
  netavark       bridge with ipMasq and portmap with 1 port, beside netavark's setup and teardown
  tc-redirect-tap  the chained plugin alone, beside what the kernel takes for the same requests, without and with a process
  chain          loopback, bridge with ipMasq, portmap with 1 port
  bandwidth      bridge, then bandwidth with both directions
  tuning         bridge, then tuning
  egress         bridge, then egress with the profile sandbox; not for the reference
  egress-names   bridge, then egress with a name, and the resolver; not for the reference
  sbr            bridge, then sbr
  flannel        flannel + bridge + host-local
  seven          loopback, bridge, portmap, bandwidth, firewall, tuning, sbr
  chain-firewall bridge, portmap with 1 port, firewall
  ports          portmap with 1 to 60,000 TCP and UDP ports, and the first packet through one
  others         portmap with one port among those of others, up to 60,000
  leases         host-local with 10, 1,000, 20,000 and 60,000 leases, and with one address left
";

const NOTES: &str = "
Environment:
  NETAVARK       netavark's executable, for that case
  PEER           plugin directory to compare with (/usr/lib/cni if it is there)
  CNIBOX_BIN     our executable (that of cargo build --release)
  TMPDIR         where leases are kept; a directory on a disk, since leases are synced (/tmp)

Runs as root, or as an ordinary user where user namespaces are allowed. Everything happens in
private network namespaces and one temporary directory; nothing is left, even after Ctrl-C.
";

const OPTIONS: &[CommandOption] = &[
    long_option(
        "--pods",
        "N[,N]",
        "pods already there, with their links and leases, but without rules in the\n\
         packet filter (0,1000; at most 5000, on a bridge 1000)",
    ),
    long_option("--rounds", "N", "pods attached and detached one by one by each side (30)"),
    long_option("--parallel", "N[,N]", "also attach and detach a batch, N at once (16; 0: do not)"),
    long_option("--batch", "N", "pods in a batch (160)"),
    long_option(
        "--backend",
        "B",
        "what ipMasq, portmap and firewall use: nftables, iptables, or default, which\n\
         configures nothing (default; a peer's plugin that does not know nftables uses\n\
         iptables, and the heading says so)",
    ),
    long_option(
        "--foreign",
        "N",
        "rules of others in the packet filter of each host, loaded with nft or\n\
         iptables-restore (default, iptables) (0)",
    ),
    long_option(
        "--quick",
        "",
        "a smoke test: 3 rounds, 0 and 20 pods, a batch of 8, unless said otherwise",
    ),
    long_option("--json", "FILE", "also write machine, versions and all rows to a file"),
    long_option("--peer-name", "TEXT", "what the peer is called in that file (reference)"),
    long_option("--bench", "", "what cargo adds; without effect"),
];

/// The text of `--help`.
pub(crate) fn help() -> String {
    format!("{CASES_HELP}\nOptions:\n{}{NOTES}", options::help_text(OPTIONS))
}

/// Cases that are not chains of plugins.
const SPECIAL: [&str; 3] = ["leases", "ports", "others"];

/// An upper limit: more pods take minutes to create.
const MOST_PODS: usize = 5000;

#[derive(Debug)]
pub(crate) struct Options {
    names: Vec<String>,
    pods: Vec<usize>,
    pub(crate) rounds: usize,
    pub(crate) parallel: Vec<usize>,
    pub(crate) batch: usize,
    pub(crate) batches: usize,
    pub(crate) backend: Backend,
    pub(crate) foreign: usize,
    /// The file to write the rows to as JSON, and the peer's name in it.
    pub(crate) json: Option<PathBuf>,
    pub(crate) peer_name: String,
}

impl Options {
    /// Returns `Err` with the text to print if the help or the version is requested.
    pub(crate) fn parse(args: Vec<String>) -> Result<std::result::Result<Options, String>> {
        let line = match options::parse_args(args, OPTIONS)? {
            ParsedCommandLine::Help => return Ok(Err(help())),
            ParsedCommandLine::Version => return Ok(Err(options::version_text())),
            ParsedCommandLine::Work(line) => line,
        };
        let known: Vec<_> = SPECIAL.into_iter().chain(CASES.iter().map(|case| case.name)).collect();
        if let Some(word) = line.words.iter().find(|word| !known.contains(&word.as_str())) {
            return Err(unknown_word_error("case", word, &known).into());
        }
        let quick = line.has_option("--quick");
        let choose = |full, small| if quick { small } else { full };
        let number =
            |flag, default| line.last_value(flag).map_or(Ok(default), |text| number(flag, text));
        let pods = || vec![0, choose(1000, 20)];
        Ok(Ok(Options {
            pods: line
                .last_value("--pods")
                .map_or_else(|| Ok(pods()), |text| numbers("--pods", text))?,
            rounds: number("--rounds", choose(30, 3))?.max(1),
            parallel: line
                .last_value("--parallel")
                .map_or_else(|| Ok(vec![choose(16, 4)]), |text| numbers("--parallel", text))?,
            batch: number("--batch", choose(160, 8))?.max(1),
            batches: choose(3, 1),
            backend: Backend::parse(line.last_value("--backend").or(Some("default")))?,
            foreign: number("--foreign", 0)?,
            json: line.last_value("--json").map(PathBuf::from),
            peer_name: line.last_value("--peer-name").unwrap_or("reference").to_owned(),
            names: line.words,
        }))
    }

    pub(crate) fn wants(&self, name: &str) -> bool {
        self.names.is_empty() || self.names.iter().any(|wanted| wanted == name)
    }

    /// The numbers of existing pods to measure a case with.
    pub(crate) fn pods_of(&self, case: &Case) -> &[usize] {
        if case.is_version() { &[0] } else { &self.pods }
    }
}

fn numbers(option: &str, text: &str) -> Result<Vec<usize>> {
    let list: Vec<usize> =
        text.split(',').map(|part| number(option, part)).collect::<Result<_>>()?;
    match list.iter().max() {
        Some(&most) if most > MOST_PODS => {
            Err(format!("{option} {most}: at most {MOST_PODS}").into())
        }
        _ => Ok(list),
    }
}

fn number(option: &str, text: &str) -> Result<usize> {
    text.parse().map_err(|_| format!("{option} \"{text}\": not a number").into())
}
