//! Adds a network to a namespace that is there already, as a runtime would.
//!
//! ```text
//! add-network DIR NETWORK NETNS [IFNAME]
//! add-network /etc/cni/net.d pods /run/netns/testing eth1
//! ```
//!
//! `DIR` holds the configurations, `IFNAME` is `eth0` by default; plugins are those in the folders of
//! `CNI_PATH`, by default /opt/cni/bin. The namespace's file name is the container's id. Prints an address
//! a line, with the prefix of its subnet. Exit status: 0, or 1 with the reason on stderr.
//!
//! `cnitool del NETWORK NETNS --container-id NAME` takes it back: both use the cache in /var/lib/cni.

use std::env;
use std::error::Error;
use std::io::{Write, stderr, stdout};
use std::path::Path;
use std::process::ExitCode;

use cnibox::runtime::{Attach, NetworkList, OnAddError, Runtime};

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _nobody_reads_it = writeln!(stderr(), "add-network: {error}");
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
        // A failed ADD leaves nothing for us to DEL.
        on_add_error: OnAddError::Undo,
        ..Runtime::new(env::split_paths(&plugins).collect())
    };
    let network = NetworkList::load(Path::new(dir), network)?;
    let id = Path::new(netns).file_name().ok_or("NETNS is not a file")?.to_string_lossy();
    let result = runtime.add(&network, &Attach::new(&id, netns, ifname))?;
    for ip in result.iter().flat_map(|result| &result.ips) {
        writeln!(stdout(), "{}", ip.address)?;
    }
    Ok(())
}
