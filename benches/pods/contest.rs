//! Measurements that alternate between worlds.

use std::path::Path;
use std::process::Command;
use std::slice;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crate::Result;
use crate::case::Case;
use crate::kernel;
use crate::options::Options;
use crate::world::{Pod, World, output};

/// The pause before a call, in which the kernel ends what the call before has left to it, such as
/// the release of deleted rules: else the wait for that is part of the next call, which is the
/// other side's.
const SETTLE: Duration = Duration::from_millis(50);

/// Samples in milliseconds, per world.
pub(crate) struct Times {
    /// The first ADD, which the other samples leave out.
    pub(crate) first: Vec<Vec<f64>>,
    pub(crate) add: Vec<Vec<f64>>,
    pub(crate) del: Vec<Vec<f64>>,
}

impl Times {
    pub(crate) fn new(sides: usize) -> Times {
        let empty = || vec![Vec::new(); sides];
        Times { first: empty(), add: empty(), del: empty() }
    }
}

/// Times VERSION calls.
pub(crate) fn versions(worlds: &[World], case: &Case, rounds: usize) -> Result<Vec<Vec<f64>>> {
    let mut times = vec![Vec::new(); worlds.len()];
    let mut pod = Pod::new()?;
    for round in 0..=rounds {
        for i in turn(worlds, round) {
            let took = worlds[i].on_host(|| worlds[i].call(case, "VERSION", &mut pod))??;
            if round > 0 {
                times[i].push(ms(took));
            }
        }
    }
    Ok(times)
}

/// Attaches and detaches one pod after the other in each world.
pub(crate) fn rounds(worlds: &[World], case: &Case, rounds: usize) -> Result<Times> {
    let mut times = Times::new(worlds.len());
    // Kept until the end: the kernel deletes namespaces asynchronously while holding its locks.
    let mut used = Vec::new();
    for round in 0..=rounds {
        let mut pods = worlds.iter().map(|_| Pod::new()).collect::<Result<Vec<_>>>()?;
        worlds.iter().zip(&pods).try_for_each(|(w, pod)| w.prepare(case, slice::from_ref(pod)))?;
        for i in turn(worlds, round) {
            thread::sleep(SETTLE);
            let took = worlds[i].on_host(|| worlds[i].call(case, "ADD", &mut pods[i]))??;
            let list = if round == 0 { &mut times.first } else { &mut times.add };
            list[i].push(ms(took));
        }
        for i in turn(worlds, round) {
            thread::sleep(SETTLE);
            let took = worlds[i].on_host(|| worlds[i].call(case, "DEL", &mut pods[i]))??;
            if round > 0 {
                times.del[i].push(ms(took));
            }
        }
        used.append(&mut pods);
    }
    Ok(times)
}

/// Gives the network of one pod after the other to a virtual machine: by the chained plugin; by the
/// kernel's part of that alone; and by that with the start of `empty`.
pub(crate) fn redirected_taps(
    world: &World,
    case: &Case,
    rounds: usize,
    empty: Option<&Path>,
) -> Result<[Vec<f64>; 3]> {
    let mut times = [const { Vec::new() }; 3];
    let mut used = Vec::new();
    for round in 0..=rounds {
        let mut pods = [Pod::new()?, Pod::new()?];
        for pod in &mut pods {
            world.on_host(|| world.interface("ADD", pod))??;
        }
        let [plugins, kernel] = &mut pods;
        let plugin = world.on_host(|| world.chained("ADD", plugins))??;
        let requests = kernel::redirected_tap(kernel.netns())?;
        let start = empty.map(|empty| output(&mut Command::new(empty), "{}")).transpose()?;
        let took = [plugin, requests, requests + start.map_or(Duration::ZERO, |(_, took)| took)];
        world.on_host(|| world.call(case, "DEL", plugins))??;
        world.on_host(|| world.interface("DEL", kernel))??;
        for (list, took) in times.iter_mut().zip(took).filter(|_| round > 0) {
            list.push(ms(took));
        }
        used.extend(pods);
    }
    Ok(times)
}

/// The peak memory of ADD in MB: that of the largest process involved.
pub(crate) fn memory(worlds: &[World], case: &Case) -> Result<Vec<Vec<f64>>> {
    let mut peaks = vec![Vec::new(); worlds.len()];
    for round in 0..5 {
        for i in turn(worlds, round) {
            let mut pod = Pod::new()?;
            worlds[i].prepare(case, slice::from_ref(&pod))?;
            let peak = worlds[i].on_host(|| worlds[i].watch_add(case, &mut pod))??;
            let mb = u32::try_from(peak / 1024).map_or(f64::INFINITY, f64::from) / 1024.0;
            // Zero: the process exited between two samples.
            if peak > 0 {
                peaks[i].push(mb);
            }
            worlds[i].on_host(|| worlds[i].call(case, "DEL", &mut pod))??;
        }
    }
    Ok(peaks)
}

/// The number of programs that the plugins execute, without the plugins themselves, once all shared
/// objects exist.
pub(crate) fn started(worlds: &[World], case: &Case) -> Result<Times> {
    let mut counts = Times::new(worlds.len());
    for (i, world) in worlds.iter().enumerate() {
        let mut pod = Pod::new()?;
        world.prepare(case, slice::from_ref(&pod))?;
        let mut count = |verb| world.on_host(|| world.started(case, verb, &mut pod))?;
        counts.add[i].push(f64::from(count("ADD")?));
        counts.del[i].push(f64::from(count("DEL")?));
    }
    Ok(counts)
}

/// Attaches many pods with several concurrent calls; measures the time of the whole batch.
pub(crate) fn batches(
    worlds: &[World],
    case: &Case,
    options: &Options,
    at_once: usize,
) -> Result<Times> {
    let mut times = Times::new(worlds.len());
    for round in 0..options.batches {
        for i in turn(worlds, round) {
            let mut pods = (0..options.batch).map(|_| Pod::new()).collect::<Result<Vec<_>>>()?;
            worlds[i].prepare(case, &pods)?;
            let mut run = |verb| batch(&worlds[i], case, verb, &mut pods, at_once);
            times.add[i].push(ms(run("ADD")?));
            times.del[i].push(ms(run("DEL")?));
        }
    }
    Ok(times)
}

fn batch(
    world: &World,
    case: &Case,
    verb: &str,
    pods: &mut [Pod],
    at_once: usize,
) -> Result<Duration> {
    let queue = Mutex::new(pods.iter_mut());
    let next = || queue.lock().ok().and_then(|mut queue| queue.next());
    let work = || -> Result<()> {
        while let Some(pod) = next() {
            world.call(case, verb, pod)?;
        }
        Ok(())
    };
    // Threads inherit the network namespace of the host.
    world.on_host(|| {
        let start = Instant::now();
        thread::scope(|scope| {
            let workers: Vec<_> = (0..at_once).map(|_| scope.spawn(work)).collect();
            workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| "a panic")?)
        })?;
        Ok(start.elapsed())
    })?
}

/// The order of worlds in a round; the first world changes from round to round.
fn turn(worlds: &[World], round: usize) -> impl Iterator<Item = usize> + use<> {
    let count = worlds.len();
    (0..count).map(move |i| (i + round) % count)
}

pub(crate) fn ms(took: Duration) -> f64 {
    took.as_secs_f64() * 1000.0
}
