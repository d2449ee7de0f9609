//! `cnibox egress resolver`: answers the queries of containers whose egress policies have names,
//! and puts the addresses in force before it tells them.
//!
//! One thread for queries, and two that change the guards of containers. What is in force is in the
//! kernel and in records, so the resolver can be killed at any time, and the next one serves on.
//!
//! | file | |
//! | --- | --- |
//! | `options.rs` | the command line |
//! | `servers.rs` | the upstream servers of the command line, or of resolv.conf(5) |
//! | `listeners.rs` | the sockets of containers, from systemd or bound here |
//! | `transport.rs`, `datagram.rs` | messages by UDP, connections by TCP |
//! | `stream.rs` | messages over TCP |
//! | `containers.rs`, `watch.rs` | which container asks: the records, and their changes |
//! | `serve.rs` | the life of a query |
//! | `limits.rs` | rates |
//! | `message.rs`, `message/` | the protocol: pure functions on bytes |
//! | `upstream.rs` | the exchange with the servers that know the answer |
//! | `allow.rs`, `grants.rs` | puts addresses in force, in threads |
//! | `asked.rs` | names that were asked for, for `cnibox egress` |

mod allow;
pub mod asked;
mod containers;
mod datagram;
mod grants;
mod limits;
mod listeners;
pub mod message;
mod options;
mod serve;
mod servers;
mod stream;
mod transport;
mod upstream;
mod watch;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use futures::future::{LocalBoxFuture, select_all};
use nix::libc;
use nix::sys::signalfd::SignalFd;
use socket2::{Domain, Socket, Type};
use tokio::runtime;
use tokio::task::LocalSet;
use tokio::time::{MissedTickBehavior, interval};

use self::containers::Containers;
use self::grants::GrantThreads;
use self::listeners::Listeners;
use self::serve::Resolver;
use self::servers::ConfiguredServers;
use crate::attachment::file::{DIR, create_directory};
use crate::confine::{self, AccessFs, CapabilitySet, Confinement};
use crate::daemon::{block_signals, raise_file_limit, watch_readable};
use crate::options::{ParsedCommandLine, version_text};
use crate::stderr;
use cni::error::{Error, Result};

/// Runs the resolver with the arguments after `resolver`.
pub fn main(args: Vec<String>) -> ExitCode {
    let read = options::parse_arguments(args).and_then(|asked| match asked {
        ParsedCommandLine::Help => Ok(Err(options::help_text())),
        ParsedCommandLine::Version => Ok(Err(version_text())),
        ParsedCommandLine::Work(line) => options::upstream_servers(&line).map(Ok),
    });
    let servers = match read {
        Ok(Ok(servers)) => servers,
        Ok(Err(text)) => {
            stderr::write_line(text);
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            stderr::write_line(format_args!("{error}; see cnibox egress resolver --help"));
            return ExitCode::from(2);
        }
    };
    let Err(error) = run_resolver(servers) else { return ExitCode::SUCCESS };
    stderr::write_line(format_args!("cnibox egress resolver: {error}"));
    ExitCode::FAILURE
}

fn run_resolver(servers: Vec<SocketAddr>) -> Result<()> {
    // Each query has a socket to an upstream server.
    raise_file_limit();
    // Before any thread is started, so that every thread inherits the mask.
    let signals = block_signals()?;
    let servers = ConfiguredServers::read(servers)?;
    let listeners = Listeners::open()?;
    // Also the directory itself, which Landlock knows by its inode.
    create_directory(Path::new(DIR))?;
    confine::drop_privileges(&confinement(Path::new(DIR)))?;

    let containers = Containers::read_all()?;
    asked::forget_ended_attachments().unwrap_or_else(|error| warn!("could not {error}"));
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None);
    let socket = socket.map_err(|e| Error::io("open a socket", &e))?;
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Error::io("start the executor", &e))?;
    stderr::write_line(format_args!("ready, with {} containers", containers.len()));
    let resolver = Resolver::new(containers, servers, GrantThreads::start()?, socket);
    LocalSet::new().block_on(&runtime, serve_until_signal(Rc::new(resolver), listeners, signals))
}

/// What the resolver keeps: the packet filter and traffic control of the host, and records with the
/// addresses that are in force.
fn confinement(directory: &Path) -> Confinement<'_> {
    Confinement {
        capabilities: CapabilitySet::NET_ADMIN,
        families: &[libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK],
        enters_namespaces: false,
        directory,
        changes: AccessFs::WriteFile
            | AccessFs::MakeReg
            | AccessFs::MakeSym
            | AccessFs::MakeDir
            | AccessFs::RemoveFile,
        removed: &[],
    }
}

async fn serve_until_signal(
    resolver: Rc<Resolver>,
    listeners: Listeners,
    signals: SignalFd,
) -> Result<()> {
    let failed = |e| Error::io("wait for signals", &e);
    let signals = watch_readable(signals).map_err(failed)?;
    let end = async move { signals.readable().await.map(drop).map_err(failed) };
    let mut tasks: Vec<LocalBoxFuture<'_, Result<()>>> = vec![Box::pin(end)];
    for socket in listeners.datagrams {
        tasks.push(Box::pin(transport::serve_datagrams(Rc::clone(&resolver), socket)));
    }
    let connections = Rc::default();
    for socket in listeners.streams {
        let served =
            transport::serve_connections(Rc::clone(&resolver), socket, Rc::clone(&connections));
        tasks.push(Box::pin(served));
    }
    tasks.push(Box::pin(async { work_each_second(&resolver).await.map(|never| match never {}) }));
    select_all(tasks).await.0
}

async fn work_each_second(resolver: &Resolver) -> Result<Infallible> {
    let mut seconds = interval(Duration::from_secs(1));
    seconds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        seconds.tick().await;
        resolver.work_of_second()?;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::ErrorKind;
    use std::net::UdpSocket;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixStream;
    use std::process::Command;

    use super::*;
    use crate::netlink::Netlink;
    use crate::netns::{Netns, isolate_test_thread, on_scratch_thread};

    #[test]
    fn the_confined_resolver_can_do_its_work_and_no_more() {
        isolate_test_thread();
        let dir = tempfile::tempdir().unwrap();
        let [own, foreign] = ["own", "foreign"].map(|name| dir.path().join(name));
        for path in [&own, &foreign] {
            fs::create_dir(path).unwrap();
        }
        let namespace = Netns::open_current().unwrap();
        let confined = || {
            confine::drop_privileges(&confinement(&own)).unwrap();
            // Records, locks, links and logs.
            fs::create_dir(own.join("new")).unwrap();
            fs::write(own.join("new/.tmp"), "x").unwrap();
            fs::rename(own.join("new/.tmp"), own.join("new/record")).unwrap();
            symlink(own.join("new/record"), own.join("new/link")).unwrap();
            fs::remove_file(own.join("new/record")).unwrap();
            // Upstream servers, the kernel, threads.
            UdpSocket::bind("127.0.0.1:0").unwrap();
            std::thread::spawn(|| Netlink::open().unwrap()).join().unwrap();
            let denied = [
                UnixStream::connect("/nonexistent").map(drop),
                Command::new("true").status().map(drop),
                UdpSocket::bind("127.0.0.1:52").map(drop),
            ];
            for attempt in denied {
                assert_eq!(attempt.unwrap_err().kind(), ErrorKind::PermissionDenied);
            }
            assert!(namespace.run_inside(|| ()).is_err());
            // Without Landlock the files of root are not protected.
            fs::write(foreign.join("file"), "x").is_err()
        };
        let is_protected = on_scratch_thread(confined).unwrap();
        let lsm = fs::read_to_string("/sys/kernel/security/lsm").unwrap_or_default();
        assert!(is_protected || !lsm.contains("landlock"));
    }
}
