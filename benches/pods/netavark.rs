//! netavark, podman's network stack, compared with bridge with `ipMasq` and portmap: set-up and
//! teardown of the same container.
//!
//! netavark is not a CNI plugin: one process does the work of a chain, except for IPAM, which is
//! podman's task.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use cnibox::testing::netns::Netns;
use serde_json::{Value, json};

use crate::Result;
use crate::case::Case;
use crate::contest::{Times, ms};
use crate::world::{self, Pod, World};

/// The executable and its private host.
pub(crate) struct Netavark {
    program: PathBuf,
    /// The directory of netavark's firewall state.
    state: PathBuf,
    host: Netns,
}

impl Netavark {
    /// The executable that the environment variable `NETAVARK` names, if set.
    pub(crate) fn find(dir: &Path) -> Result<Option<Netavark>> {
        let Some(named) = std::env::var_os("NETAVARK").filter(|value| !value.is_empty()) else {
            return Ok(None);
        };
        let program = fs::canonicalize(&named)
            .map_err(|e| format!("NETAVARK \"{}\": {e}", named.display()))?;
        let state = dir.join("netavark");
        fs::create_dir_all(&state)?;
        Ok(Some(Netavark { program, state, host: Netns::create_unnamed()? }))
    }

    /// The version, such as "netavark 2.1.0".
    pub(crate) fn version(&self) -> Result<String> {
        let output = Command::new(&self.program).arg("--version").output()?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Sets up containers one after the other, alternating with the plugins of `ours`.
    pub(crate) fn rounds(&self, ours: &World, case: &Case, rounds: usize) -> Result<Times> {
        let mut times = Times::new(2);
        let mut used = Vec::new();
        for round in 0..=rounds {
            let mut pods = [Pod::new()?, Pod::new()?];
            for (verb, command) in [("ADD", "setup"), ("DEL", "teardown")] {
                let plugins = ours.on_host(|| ours.call(case, verb, &mut pods[0]))??;
                let netavark = self.call(command, &pods[1])?;
                let list = if verb == "ADD" { &mut times.add } else { &mut times.del };
                // The first round creates the objects that containers share.
                if round > 0 {
                    list[0].push(ms(plugins));
                    list[1].push(ms(netavark));
                }
            }
            used.extend(pods);
        }
        Ok(times)
    }

    /// The number of programs that each side executes, without the side's own process.
    pub(crate) fn started(&self, ours: &World, case: &Case) -> Result<Times> {
        let mut counts = Times::new(2);
        let mut pods = [Pod::new()?, Pod::new()?];
        for (verb, command) in [("ADD", "setup"), ("DEL", "teardown")] {
            let plugins = ours.on_host(|| ours.started(case, verb, &mut pods[0]))??;
            let log = self.state.join("strace");
            let mut traced = world::under_strace(&self.command(command, &pods[1]), &log);
            let stdin = stdin(&pods[1]).to_string();
            self.host.run_inside(|| world::output(&mut traced, &stdin))??;
            let list = if verb == "ADD" { &mut counts.add } else { &mut counts.del };
            list[0].push(f64::from(plugins));
            list[1].push(f64::from(world::executed(&log)?));
        }
        Ok(counts)
    }

    fn call(&self, command: &str, pod: &Pod) -> Result<Duration> {
        let stdin = stdin(pod).to_string();
        let mut command = self.command(command, pod);
        Ok(self.host.run_inside(|| world::output(&mut command, &stdin))??.1)
    }

    fn command(&self, command: &str, pod: &Pod) -> Command {
        let mut netavark = Command::new(&self.program);
        netavark.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        netavark.env("NETAVARK_FW", "nftables").arg("--config").arg(&self.state);
        netavark.arg(command).arg(pod.netns().path());
        netavark
    }
}

/// podman's description of a container: one address, one TCP port.
fn stdin(pod: &Pod) -> Value {
    let id = format!("{:064x}", pod.number());
    let port = &pod.port_mappings(1)[0];
    json!({
        "container_id": id, "container_name": format!("pod-{}", pod.number()),
        "port_mappings": [{"host_ip": "", "host_port": port["hostPort"], "container_port": port["containerPort"],
            "protocol": "tcp", "range": 1}],
        "networks": {"bench": {"interface_name": "eth0", "static_ips": [world::ipv4(pod.number())]}},
        "network_info": {"bench": {"name": "bench", "id": "b".repeat(64), "driver": "bridge",
            "network_interface": crate::case::BRIDGE, "subnets": [{"subnet": "10.1.0.0/16", "gateway": "10.1.0.1"}],
            "ipv6_enabled": false, "internal": false, "dns_enabled": false, "ipam_options": {"driver": "host-local"}}},
    })
}
