//! Attaches an existing network namespace to a network.
//!
//! ```text
//! add-network DIR NETWORK NETNS [IFNAME]
//! add-network /etc/cni/net.d pods /run/netns/testing eth1
//! ```
//!
//! `DIR` is the directory of configurations, `IFNAME` defaults to `eth0`. `CNI_PATH` lists the
//! directories of plugins, default /opt/cni/bin. The container ID is the file name of the
//! namespace. Prints one address per line in CIDR notation. Exit status: 0, or 1 with the reason on
//! stderr.
//!
//! `cnitool del NETWORK NETNS --container-id NAME` detaches it: both use the cache in /var/lib/cni.

use std::env;
use std::error::Error;
use std::io::{Write, stderr, stdout};
use std::path::Path;
use std::process::ExitCode;

use cnibox_cni::runtime::{AttachmentParams, NetworkList, OnAddError, Runtime};

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ignored = writeln!(stderr(), "add-network: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[String]) -> Result<(), Box<dyn Error>> {
    let (dir, network, netns, ifname) = match args {
        [dir, network, netns] => (dir, network, netns, "eth0"),
        [dir, network, netns, ifname] => (dir, network, netns, ifname.as_str()),
        _ => return Err("usage: add-network DIR NETWORK NETNS [IFNAME]".into()),
    };
    let plugins = env::var_os("CNI_PATH").unwrap_or("/opt/cni/bin".into());
    let runtime = Runtime {
        // After a failed ADD the library runs DEL itself.
        on_add_error: OnAddError::Undo,
        ..Runtime::new(env::split_paths(&plugins).collect())
    };
    let network = NetworkList::load(Path::new(dir), network)?;
    let id = Path::new(netns).file_name().ok_or("NETNS is not a file")?.to_string_lossy();
    let result = runtime.add(&network, &AttachmentParams::new(&id, netns, ifname))?;
    for ip in result.iter().flat_map(|result| &result.ips) {
        writeln!(stdout(), "{}", ip.address)?;
    }
    Ok(())
}
