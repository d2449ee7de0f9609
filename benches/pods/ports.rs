//! portmap alone: few ports, many ports, and one port among those of other containers.
//!
//! `bridge` of the same directory has attached the pods. The mappings of other containers are
//! created by ADDs of the same plugin, with a thousand ports each, and so have the plugin's own
//! layout.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::Result;
use crate::contest::{Times, ms};
use crate::table::{self, Table, Unit};
use crate::world::{Pod, World};

/// The timeout of one call, and of the creation of other containers' mappings.
const PATIENCE: Duration = Duration::from_secs(20);

/// The number of rounds with hundreds of ports and more.
const ROUNDS: usize = 5;

/// The number of ports per other container.
const EACH: usize = 1_000;

/// The numbers of other containers' mappings.
pub(crate) const OTHERS: [usize; 4] = [0, 1_000, 10_000, 60_000];

/// A list of port mappings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    name: &'static str,
    proto: &'static str,
    count: usize,
    /// The container port of the first host port; the rest follow in the same order.
    to: usize,
}

/// The first host port.
const FIRST: usize = 2_000;

pub(crate) const LISTS: [List; 9] = [
    List { name: "1 TCP port", proto: "tcp", count: 1, to: 80 },
    List { name: "32 TCP ports", proto: "tcp", count: 32, to: 80 },
    List { name: "1,000 TCP ports", proto: "tcp", count: 1_000, to: 80 },
    List { name: "10,000 TCP ports", proto: "tcp", count: 10_000, to: 80 },
    List { name: "1 UDP port", proto: "udp", count: 1, to: 80 },
    List { name: "32 UDP ports", proto: "udp", count: 32, to: 80 },
    List { name: "1,000 UDP ports", proto: "udp", count: 1_000, to: 80 },
    List { name: "10,000 UDP ports", proto: "udp", count: 10_000, to: 80 },
    List { name: "60,000 contiguous", proto: "tcp", count: 60_000, to: FIRST },
];

impl List {
    fn mappings(&self, first: usize) -> Value {
        let port = |i: usize| {
            let (host, container) = (first + i, self.to + i);
            json!({"hostPort": host, "containerPort": container, "protocol": self.proto})
        };
        (0..self.count).map(port).collect()
    }
}

/// Measures this list on each side.
pub(crate) fn ports(table: &mut Table, worlds: &[World], list: List, rounds: usize) -> Result<()> {
    let (mut times, mut first) = (Times::new(worlds.len()), vec![Vec::new(); worlds.len()]);
    let rounds = if list.count > 32 { rounds.min(ROUNDS) } else { rounds };
    for (side, world) in worlds.iter().enumerate() {
        for round in 0..=rounds {
            let mut pod = Pod::new()?;
            world.on_host(|| world.interface("ADD", &mut pod))??;
            let portmap = json!({"portMappings": list.mappings(FIRST)});
            let call = |verb| world.on_host(|| world.limited(verb, &pod, &portmap, PATIENCE))?;
            let Some(added) = call("ADD")? else {
                gave_up(list.name, "ADD", side);
                break;
            };
            let arrived = first_packet(world, &pod, list)?;
            let Some(deleted) = call("DEL")? else {
                gave_up(list.name, "DEL", side);
                break;
            };
            world.on_host(|| world.interface("DEL", &mut pod))??;
            if round > 0 {
                times.add[side].push(ms(added));
                times.del[side].push(ms(deleted));
                first[side].push(ms(arrived));
            }
        }
    }
    table.row(list.name, "ADD", Unit::Ms, &times.add);
    table.row(list.name, "DEL", Unit::Ms, &times.del);
    table.row(list.name, "first packet", Unit::Ms, &first);
    Ok(())
}

/// The time from the first packet to the reply, through the mapping in the middle of the list.
fn first_packet(world: &World, pod: &Pod, list: List) -> Result<Duration> {
    let at = list.count / 2;
    let port = |first: usize| u16::try_from(first + at).unwrap_or_default();
    let target = SocketAddr::new(IpAddr::from([10, 1, 0, 1]), port(FIRST));
    let any = SocketAddr::new(IpAddr::from([0, 0, 0, 0]), port(list.to));
    let limit = Some(Duration::from_secs(5));
    if list.proto == "tcp" {
        let listener = pod.netns().run_inside(|| TcpListener::bind(any))??;
        return world.on_host(|| {
            let start = Instant::now();
            let mut near = TcpStream::connect(target)?;
            near.write_all(b"x")?;
            let (mut far, _) = listener.accept()?;
            far.set_read_timeout(limit)?;
            far.read_exact(&mut [0])?;
            Ok(start.elapsed())
        })?;
    }
    let far = pod.netns().run_inside(|| UdpSocket::bind(any))??;
    far.set_read_timeout(limit)?;
    world.on_host(|| {
        let near = UdpSocket::bind("0.0.0.0:0")?;
        let start = Instant::now();
        near.send_to(b"x", target)?;
        far.recv_from(&mut [0])?;
        Ok(start.elapsed())
    })?
}

fn gave_up(case: &str, verb: &str, side: usize) {
    let side = if side == 0 { "ours" } else { "peer" };
    table::note(case, &format!("{side}: {verb} was given up after {} s", PATIENCE.as_secs()));
}

/// Measures one port on each side, among this number of other containers' mappings.
pub(crate) fn others(
    table: &mut Table,
    worlds: &[World],
    others: usize,
    rounds: usize,
) -> Result<()> {
    let name = format!("1 port, {others} others");
    let mut times = Times::new(worlds.len());
    for (side, world) in worlds.iter().enumerate() {
        if !world.on_host(|| fill(world, others))?? {
            gave_up(&name, "the ports of others", side);
            continue;
        }
        for round in 0..=rounds {
            let mut pod = Pod::new()?;
            world.on_host(|| world.interface("ADD", &mut pod))??;
            let portmap = json!({"portMappings": LISTS[0].mappings(80)});
            for (verb, times) in [("ADD", &mut times.add), ("DEL", &mut times.del)] {
                let took = world.on_host(|| world.limited(verb, &pod, &portmap, PATIENCE))??;
                let took = took.ok_or("a call with one port takes too long")?;
                if round > 0 {
                    times[side].push(ms(took));
                }
            }
            world.on_host(|| world.interface("DEL", &mut pod))??;
        }
    }
    table.row(&name, "ADD", Unit::Ms, &times.add);
    table.row(&name, "DEL", Unit::Ms, &times.del);
    Ok(())
}

/// Creates the mappings of other containers; returns false after a timeout.
fn fill(world: &World, others: usize) -> Result<bool> {
    let until = Instant::now() + PATIENCE;
    let list = List { count: EACH, ..LISTS[0] };
    for at in 0..others / EACH {
        let result = json!({"cniVersion": "1.0.0", "interfaces": [], "dns": {},
            "ips": [{"address": format!("10.1.200.{}/16", at + 1)}]});
        let pod = Pod::elsewhere(result)?;
        let portmap = json!({"portMappings": list.mappings(FIRST + at * EACH)});
        let left = until.saturating_duration_since(Instant::now());
        if world.limited("ADD", &pod, &portmap, left)?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}
