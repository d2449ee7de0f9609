//! Programs that open a tap device, as a virtual machine monitor does.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::{Value, json};

use crate::support::node::Container;

/// The flags of a device with one queue.
pub(crate) const SINGLE: i32 = libc::IFF_TAP | libc::IFF_NO_PI;
/// The flags of a device with several queues.
pub(crate) const MULTI: i32 = SINGLE | libc::IFF_MULTI_QUEUE;

#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: u16,
    rest: [u8; 22],
}

/// Opens a queue of the device `name` in the calling thread's namespace; creates the device if it
/// is missing.
#[expect(unsafe_code, reason = "a tap device is opened by ioctl(2)")]
pub(crate) fn open(device: &str, flags: i32) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    let mut name = [0; 16];
    name[..device.len()].copy_from_slice(device.as_bytes());
    let mut request = Request { name, flags: u16::try_from(flags).unwrap(), rest: [0; 22] };
    // SAFETY: the kernel reads and writes one `struct ifreq`, which `Request` has the layout of.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    Errno::result(done)?;
    Ok(file)
}

/// The next frame, or `None` after the deadline.
pub(crate) fn frame(tap: &mut File, deadline: Instant) -> Option<Vec<u8>> {
    let left = deadline.saturating_duration_since(Instant::now()).as_millis();
    let mut fds = [PollFd::new(std::os::fd::AsFd::as_fd(tap), PollFlags::POLLIN)];
    let ready = poll(&mut fds, PollTimeout::try_from(left).unwrap()).unwrap();
    if ready == 0 {
        return None;
    }
    let mut buffer = vec![0; 65536];
    let length = tap.read(&mut buffer).unwrap();
    buffer.truncate(length);
    Some(buffer)
}

/// A virtual machine: a network stack of its own, whose `eth0` exchanges raw frames with a tap
/// device until this value is dropped.
pub(crate) struct Machine {
    pub(crate) inside: Container,
    stop: Arc<AtomicBool>,
    pumps: Vec<JoinHandle<()>>,
}

impl Machine {
    /// Starts the machine of the container `c1` with the configuration that its result has, as
    /// firecracker-go-sdk reads it.
    pub(crate) fn boot(container: &Container, result: &Value) -> Machine {
        let interfaces = result["interfaces"].as_array().unwrap();
        let index = interfaces.iter().position(|entry| entry["sandbox"] == "c1").unwrap();
        let entry = &interfaces[index];
        let machine = Machine::start(container, entry["name"].as_str().unwrap());
        let inside = &machine.inside;
        inside.sh(&format!("ip link set eth0 address {} up", entry["mac"].as_str().unwrap()));
        let own = |ip: &&Value| ip["interface"] == json!(index);
        for ip in result["ips"].as_array().unwrap().iter().filter(own) {
            let (address, gateway) =
                (ip["address"].as_str().unwrap(), ip["gateway"].as_str().unwrap());
            let (family, more) = if address.contains(':') { ("-6", "nodad") } else { ("-4", "") };
            inside.sh(&format!("ip {family} addr add {address} dev eth0 {more}"));
            inside.sh(&format!("ip {family} route add default via {gateway}"));
        }
        machine
    }

    /// Opens the device `tap` of a container.
    pub(crate) fn start(container: &Container, tap: &str) -> Machine {
        let inside = Container::new();
        let ends = [
            container.run(|| open(tap, SINGLE)).unwrap(),
            inside.run(|| open("eth0", SINGLE)).unwrap(),
        ];
        let stop = Arc::new(AtomicBool::new(false));
        let pumps = [(0, 1), (1, 0)].map(|(from, to)| {
            let (mut from, mut to) =
                (ends[from].try_clone().unwrap(), ends[to].try_clone().unwrap());
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    if let Some(bytes) =
                        frame(&mut from, Instant::now() + Duration::from_millis(50))
                    {
                        // Refused while the other end is down, as by a card without a link.
                        drop(to.write_all(&bytes));
                    }
                }
            })
        });
        Machine { inside, stop, pumps: pumps.into() }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.pumps.drain(..).for_each(|pump| drop(pump.join()));
    }
}
