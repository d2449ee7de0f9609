//! The packet filter: the back end of each plugin, and unrelated rules.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::Result;
use crate::case::Case;
use crate::world::feed;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backend {
    /// None is configured: each plugin chooses.
    Default,
    Nftables,
    Iptables,
}

impl Backend {
    pub(crate) fn parse(text: Option<&str>) -> Result<Backend> {
        match text.unwrap_or_default() {
            "default" => Ok(Backend::Default),
            "nftables" => Ok(Backend::Nftables),
            "iptables" => Ok(Backend::Iptables),
            other => Err(format!("--backend \"{other}\": default, nftables or iptables").into()),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Backend::Default => "default",
            Backend::Nftables => "nftables",
            Backend::Iptables => "iptables",
        }
    }

    /// The value of the plugins' keys, if they are configured.
    pub(crate) fn key(self) -> Option<&'static str> {
        (self != Backend::Default).then(|| self.name())
    }

    /// The back end that a plugin uses when `self` is requested: iptables if the plugin has no
    /// other.
    pub(crate) fn of(self, directory: &Path, plugin: &str) -> Backend {
        match self {
            Backend::Nftables if !knows_nftables(directory, plugin) => Backend::Iptables,
            _ => self,
        }
    }
}

/// The plugins of these cases that fall back to iptables although nftables is requested.
pub(crate) fn fallen_back(
    cases: impl Iterator<Item = &'static Case>,
    backend: Backend,
    directory: &Path,
) -> Vec<&'static str> {
    let mut plugins: Vec<_> = cases.flat_map(Case::filters).collect();
    plugins.sort_unstable();
    plugins.dedup();
    plugins.retain(|plugin| backend.of(directory, plugin) != backend);
    plugins
}

/// Whether a plugin is cnibox or a reference plugin built with the nftables library. The
/// reference's firewall contains the library but never calls it.
fn knows_nftables(directory: &Path, plugin: &str) -> bool {
    let program = fs::read(directory.join(plugin)).unwrap_or_default();
    let has = |text: &str| program.windows(text.len()).any(|part| part == text.as_bytes());
    has("cnibox_portmap") || plugin != "firewall" && has("sigs.k8s.io/knftables")
}

/// Loads unrelated rules. Their chain has no hook, so no packet traverses them.
pub(crate) fn load_foreign(backend: Backend, rules: usize) -> Result<()> {
    let address = |i: usize| format!("198.18.{}.{}", i / 256 % 256, i % 256);
    let numbers = 0..rules;
    let (program, lines): (&str, Vec<String>) = match backend {
        Backend::Nftables => {
            let rule = |i| format!("ip daddr {} tcp dport 80 counter accept", address(i));
            let start = "table inet foreign {\nchain foreign {".to_owned();
            ("nft", [start].into_iter().chain(numbers.map(rule)).chain(["}\n}".into()]).collect())
        }
        Backend::Default | Backend::Iptables => {
            let rule = |i| format!("-A FOREIGN -d {} -p tcp --dport 80 -j ACCEPT", address(i));
            let start = "*nat\n:FOREIGN - [0:0]".to_owned();
            let rules = [start].into_iter().chain(numbers.map(rule));
            ("iptables-restore", rules.chain(["COMMIT".into()]).collect())
        }
    };
    let mut command = Command::new(program);
    if backend == Backend::Nftables {
        command.args(["-f", "-"]);
    }
    command.stdin(Stdio::piped()).stderr(Stdio::piped());
    let input = lines.join("\n") + "\n";
    let output = feed(command.spawn(), &command, &input)?.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim()).into())
}
