//! A plugin directory, its private host and the existing pods; and one timed call.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use cnibox::testing::netns::Netns;
use serde_json::{Value, json};

use crate::Result;
use crate::case::{BRIDGE, Case, EGRESS_NAMES, MASTER, NETWORK, SUBNET_ENV, SUBNET_FILE};
use crate::netfilter;
use crate::options::Options;

/// A container to attach.
pub(crate) struct Pod {
    number: usize,
    id: String,
    netns: Netns,
    /// The result of the last ADD, passed to chained plugins and, as `prevResult`, to DEL.
    result: Value,
    /// The result of the loopback network.
    loopback: Value,
}

impl Pod {
    pub(crate) fn new() -> Result<Pod> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let (id, netns) = (format!("pod-{number:06}"), Netns::create_unnamed()?);
        Ok(Pod { number, id, netns, result: Value::Null, loopback: Value::Null })
    }

    /// A pod with the result of another implementation's attachment.
    pub(crate) fn elsewhere(result: Value) -> Result<Pod> {
        Ok(Pod { result, ..Pod::new()? })
    }

    /// A number unique to this pod.
    pub(crate) fn number(&self) -> usize {
        self.number
    }

    pub(crate) fn netns(&self) -> &Netns {
        &self.netns
    }

    fn result(&mut self, plugin: &str) -> &mut Value {
        if plugin == "loopback" { &mut self.loopback } else { &mut self.result }
    }

    /// A VLAN ID distinct from those of concurrent and existing pods.
    fn vlan(&self) -> usize {
        4094 - self.number % 1024
    }

    /// Host ports distinct from those of concurrent pods.
    pub(crate) fn port_mappings(&self, ports: usize) -> Value {
        let host = |i| 1024 + (self.number * ports + i) % 64_000;
        let mapping = |i| json!({"hostPort": host(i), "containerPort": 80 + i, "protocol": "tcp"});
        (0..ports).map(mapping).collect()
    }
}

pub(crate) struct World {
    directory: PathBuf,
    /// The plugins in the order of ADD, with their configurations.
    links: Vec<(&'static str, Value)>,
    /// The directory of leases and records.
    data: PathBuf,
    host: Netns,
    /// The namespace with the far ends of the existing pods' links.
    _crowd: Netns,
    _resolver: Option<Resolver>,
}

/// The resolver of the names in egress policies, which ends with the world.
struct Resolver(Child);

impl Resolver {
    /// Starts the resolver in the calling thread's namespace. Its upstream is not asked.
    fn start(directory: &Path) -> Result<Resolver> {
        ip_batch(&["link set lo up".to_owned()])?;
        let mut command = Command::new(fs::canonicalize(directory.join("egress"))?);
        command.args(["egress", "resolver", "--upstream", "127.0.0.1"]);
        let mut resolver = Resolver(pipes(&mut command).spawn()?);
        // The line that says it is ready.
        let stderr = resolver.0.stderr.as_mut().ok_or("no stderr")?;
        BufReader::new(stderr).read_line(&mut String::new())?;
        Ok(resolver)
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

impl World {
    /// Creates a host with its own leases below `dir` and this number of existing pods.
    pub(crate) fn new(
        directory: &Path,
        dir: &Path,
        case: &Case,
        pods: usize,
        options: &Options,
    ) -> Result<World> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let data = dir.join(format!("leases-{}", COUNT.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir(&data)?;
        fs::write(data.join(SUBNET_FILE), SUBNET_ENV)?;
        let (host, crowd) = (Netns::create_unnamed()?, Netns::create_unnamed()?);
        write_leases(&data.join(NETWORK), case, pods)?;
        if case.child().is_some() {
            host.run_inside(|| ip_batch(&master()))??;
        }
        if pods > 0 && case.plugin != "host-local" {
            crowd.run_inside(|| disable_ipv6("1"))??;
            host.run_inside(|| crowded(case, pods, &crowd))??;
            crowd.run_inside(|| ip_batch(&links_up("far", pods)))??;
        }
        if options.foreign > 0 {
            host.run_inside(|| netfilter::load_foreign(options.backend, options.foreign))??;
        }
        let link =
            |plugin| (plugin, case.conf(plugin, &data, options.backend.of(directory, plugin)));
        let links = case.plugins().map(link).collect();
        let resolver = (case.name == EGRESS_NAMES)
            .then(|| host.run_inside(|| Resolver::start(directory))?)
            .transpose()?;
        let directory = directory.into();
        Ok(World { directory, links, data, host, _crowd: crowd, _resolver: resolver })
    }

    /// Runs `f` on this host; child processes inherit the namespace.
    pub(crate) fn on_host<T: Send>(&self, f: impl FnOnce() -> T + Send) -> Result<T> {
        Ok(self.host.run_inside(f)?)
    }

    /// Creates the host devices that the pods move: one per pod.
    pub(crate) fn prepare(&self, case: &Case, pods: &[Pod]) -> Result<()> {
        if case.plugin != "host-device" {
            return Ok(());
        }
        let add = |pod: &Pod| {
            let n = pod.number;
            format!("link add dev-{n} type veth peer name wire-{n}")
        };
        let lines: Vec<_> = pods.iter().map(add).collect();
        self.on_host(|| ip_batch(&lines))?
    }

    /// The time of the calls of all plugins, each from before the spawn to after the exit; VERSION
    /// calls only the first plugin. The caller runs [`on_host`](World::on_host).
    pub(crate) fn call(&self, case: &Case, verb: &str, pod: &mut Pod) -> Result<Duration> {
        let took = self.in_order(verb).map(|(plugin, conf)| {
            let stdin = stdin(case, (plugin, conf), pod);
            self.call_one(plugin, &stdin, verb, pod)
        });
        took.sum()
    }

    /// The plugins in the order that a runtime calls them for `verb`, with their configurations.
    fn in_order(&self, verb: &str) -> impl Iterator<Item = &(&'static str, Value)> {
        let mut links: Vec<_> = self.links.iter().collect();
        match verb {
            "DEL" => links.reverse(),
            "VERSION" => links.truncate(1),
            _ => {}
        }
        links.into_iter()
    }

    /// The same calls under strace(1): the number of programs that the plugins execute.
    pub(crate) fn started(&self, case: &Case, verb: &str, pod: &mut Pod) -> Result<u32> {
        let mut count = 0;
        for (plugin, conf) in self.in_order(verb) {
            let stdin = stdin(case, (plugin, conf), pod);
            let log = self.data.join("strace");
            let plain = self.command(plugin, verb, pod);
            run(&mut under_strace(&plain, &log), (plugin, verb), &stdin, pod)?;
            count += executed(&log)?;
        }
        Ok(count)
    }

    /// The call of the interface plugin alone.
    pub(crate) fn interface(&self, verb: &str, pod: &mut Pod) -> Result<Duration> {
        self.call_link(0, verb, pod)
    }

    /// The call of the first chained plugin alone.
    pub(crate) fn chained(&self, verb: &str, pod: &mut Pod) -> Result<Duration> {
        self.call_link(1, verb, pod)
    }

    fn call_link(&self, index: usize, verb: &str, pod: &mut Pod) -> Result<Duration> {
        let (plugin, conf) = &self.links[index];
        let mut conf = conf.clone();
        if !pod.result.is_null() {
            conf["prevResult"] = pod.result.clone();
        }
        self.call_one(plugin, &conf.to_string(), verb, pod)
    }

    /// The call of the chained plugin, with additional keys; `None` if it exceeds `limit` and is
    /// killed.
    pub(crate) fn limited(
        &self,
        verb: &str,
        pod: &Pod,
        more: &Value,
        limit: Duration,
    ) -> Result<Option<Duration>> {
        let (plugin, conf) = &self.links[1];
        let mut conf = conf.clone();
        conf["runtimeConfig"] = more.clone();
        conf["prevResult"] = pod.result.clone();
        let mut command = self.command(plugin, verb, pod);
        let start = Instant::now();
        let child = feed(command.spawn(), &command, &conf.to_string())?;
        let pid = child.id().to_string();
        let (ended, end) = mpsc::channel::<()>();
        let (output, killed) = thread::scope(|scope| {
            let watch = scope.spawn(move || {
                let late = end.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
                late && Command::new("kill").args(["-KILL", &pid]).status().is_ok()
            });
            let output = child.wait_with_output();
            let took = start.elapsed();
            drop(ended);
            (output.map(|output| (output, took)), watch.join().unwrap_or_default())
        });
        let (output, took) = output?;
        match (killed, output.status.success()) {
            (true, _) => Ok(None),
            (false, true) => Ok(Some(took)),
            (false, false) => Err(format!("{command:?}: {}", text(&output.stdout)).into()),
        }
    }

    fn call_one(&self, plugin: &str, stdin: &str, verb: &str, pod: &mut Pod) -> Result<Duration> {
        run(&mut self.command(plugin, verb, pod), (plugin, verb), stdin, pod)
    }

    /// Runs an ADD and returns the peak memory of its largest process, in bytes.
    pub(crate) fn watch_add(&self, case: &Case, pod: &mut Pod) -> Result<u64> {
        let mut peaks = self.links.iter().map(|(plugin, conf)| {
            let stdin = stdin(case, (plugin, conf), pod);
            self.watch_one(plugin, &stdin, pod)
        });
        peaks.try_fold(0, |most, peak| Ok(most.max(peak?)))
    }

    fn watch_one(&self, plugin: &str, stdin: &str, pod: &mut Pod) -> Result<u64> {
        let mut command = self.command(plugin, "ADD", pod);
        let mut child = feed(command.spawn(), &command, stdin)?;
        let mut peak = 0;
        while child.try_wait()?.is_none() {
            peak = peak.max(peak_memory(child.id()));
        }
        let mut out = String::new();
        if let Some(mut stdout) = child.stdout.take() {
            stdout.read_to_string(&mut out)?;
        }
        *pod.result(plugin) = serde_json::from_str(&out)?;
        Ok(peak)
    }

    fn command(&self, plugin: &str, verb: &str, pod: &Pod) -> Command {
        let ifname = if plugin == "loopback" { "lo" } else { "eth0" };
        let mut command = Command::new(self.directory.join(plugin));
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("CNI_COMMAND", verb).env("CNI_CONTAINERID", &pod.id);
        command.env("CNI_NETNS", pod.netns.path()).env("CNI_IFNAME", ifname);
        command.env("CNI_PATH", &self.directory);
        pipes(&mut command);
        command
    }
}

/// Runs one call, timed from before the spawn to after the exit; stores the result of ADD in `pod`.
fn run(
    command: &mut Command,
    (plugin, verb): (&str, &str),
    stdin: &str,
    pod: &mut Pod,
) -> Result<Duration> {
    let (stdout, took) = output(command, stdin)?;
    if verb == "ADD" {
        *pod.result(plugin) = serde_json::from_slice(&stdout)?;
    }
    Ok(took)
}

/// The output of a program that must succeed, and the time from before the spawn to after the exit.
pub(crate) fn output(command: &mut Command, stdin: &str) -> Result<(Vec<u8>, Duration)> {
    let start = Instant::now();
    let child = feed(pipes(command).spawn(), command, stdin)?;
    let output = child.wait_with_output()?;
    let took = start.elapsed();
    if !output.status.success() {
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        return Err(format!("{command:?} with {stdin}: {}: {out}{err}", output.status).into());
    }
    Ok((output.stdout, took))
}

/// The same command under strace(1), with its execve(2) calls logged to `log`.
pub(crate) fn under_strace(plain: &Command, log: &Path) -> Command {
    let mut command = Command::new("strace");
    command.args(["-f", "-qq", "-e", "trace=execve", "-e", "signal=none", "-o"]).arg(log);
    command.arg(plain.get_program()).args(plain.get_args()).env_clear();
    command.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command
}

/// The number of programs in such a log, without the command itself.
pub(crate) fn executed(log: &Path) -> Result<u32> {
    let text = fs::read_to_string(log)?;
    let executed = text.lines().filter(|l| l.contains("execve") && l.ends_with(" = 0"));
    Ok(u32::try_from(executed.count())?.checked_sub(1).ok_or("strace saw nothing")?)
}

/// Whether strace(1) is available to count programs.
pub(crate) fn has_strace() -> bool {
    Command::new("strace").arg("-V").stdout(Stdio::null()).status().is_ok_and(|s| s.success())
}

fn pipes(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped())
}

/// The configuration with the runtime's additions: port mappings and `prevResult`.
fn stdin(case: &Case, (plugin, conf): (&str, &Value), pod: &mut Pod) -> String {
    let mut conf = conf.clone();
    if plugin == "portmap" {
        conf["runtimeConfig"] = json!({"portMappings": pod.port_mappings(case.ports)});
    }
    if plugin == "vlan" {
        conf["vlanId"] = json!(pod.vlan());
    }
    if plugin == "host-device" {
        conf["device"] = json!(format!("dev-{}", pod.number));
    }
    let result = pod.result(plugin);
    if !result.is_null() {
        conf["prevResult"] = result.clone();
    }
    conf.to_string()
}

pub(crate) fn feed(child: std::io::Result<Child>, command: &Command, stdin: &str) -> Result<Child> {
    let mut child = child.map_err(|e| format!("start {}: {e}", command.get_program().display()))?;
    if let Some(mut pipe) = child.stdin.take() {
        // If the plugin exits without reading its input, its exit status and stderr give the
        // reason.
        drop(pipe.write_all(stdin.as_bytes()));
    }
    Ok(child)
}

/// The high-water mark of the larger of a process and its children; 0 if the process has exited.
fn peak_memory(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    let own = line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) * 1024;
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return own };
    let lists = tasks.flatten().filter_map(|t| fs::read_to_string(t.path().join("children")).ok());
    let children: Vec<u32> = lists
        .flat_map(|s| s.split(' ').filter_map(|p| p.parse().ok()).collect::<Vec<_>>())
        .collect();
    children.into_iter().map(peak_memory).fold(own, u64::max)
}

/// Writes leases in the reference plugin's format.
fn write_leases(store: &Path, case: &Case, pods: usize) -> Result<()> {
    if pods == 0 {
        return Ok(());
    }
    fs::create_dir(store)?;
    for i in 0..pods {
        let content = format!("crowd-{i}\r\neth0");
        fs::write(store.join(ipv4(i).to_string()), &content)?;
        if case.dual {
            fs::write(store.join(ipv6(i).to_string()), &content)?;
        }
    }
    fs::write(store.join("last_reserved_ip.0"), ipv4(pods - 1).to_string())?;
    if case.dual {
        fs::write(store.join("last_reserved_ip.1"), ipv6(pods - 1).to_string())?;
    }
    Ok(())
}

/// The address of pod `i`; the first address of the subnet is the gateway.
pub(crate) fn ipv4(i: usize) -> Ipv4Addr {
    let first = u32::from(Ipv4Addr::new(10, 1, 0, 2));
    Ipv4Addr::from(first + u32::try_from(i).unwrap_or_default())
}

fn ipv6(i: usize) -> Ipv6Addr {
    let first = u128::from(Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 0, 2));
    Ipv6Addr::from(first + i as u128)
}

/// Creates the links of this number of attached pods on the host.
fn crowded(case: &Case, pods: usize, crowd: &Netns) -> Result<()> {
    if case.is_bridge() {
        let bridge = [format!("link add {BRIDGE} type bridge"), format!("link set {BRIDGE} up")];
        ip_batch(&bridge)?;
    }
    disable_ipv6("1")?;
    ip_batch(&links(case, pods, crowd))?;
    if case.child().is_none() {
        ip_batch(&links_up("near", pods))?;
    }
    disable_ipv6("0")
}

/// The commands for a master link with carrier.
fn master() -> Vec<String> {
    let other = format!("{MASTER}-far");
    let up = |name: &str| format!("link set {name} up");
    vec![format!("link add {MASTER} type veth peer name {other}"), up(MASTER), up(&other)]
}

/// Whether the kernel supports links of this kind.
pub(crate) fn has_kind(kind: &str) -> Result<bool> {
    let probe = || {
        ip_batch(&master())?;
        let id = if kind == "vlan" { " id 5" } else { "" };
        let lower = if kind == "dummy" { String::new() } else { format!("link {MASTER} ") };
        Ok(ip_batch(&[format!("link add {lower}name probe type {kind}{id}")]).is_ok())
    };
    Netns::create_unnamed()?.run_inside(probe)?
}

fn links(case: &Case, pods: usize, crowd: &Netns) -> Vec<String> {
    let crowd = crowd.path().display();
    if let Some(kind) = case.child() {
        let child = |i| format!("link add link {MASTER} name far{i} netns {crowd} type {kind}");
        let more = |i| match kind {
            // The default mode is vepa.
            "macvlan" => " mode bridge".to_owned(),
            "vlan" => format!(" id {}", i + 1),
            _ => String::new(),
        };
        return (0..pods).map(|i| child(i) + &more(i)).collect();
    }
    let pair = |i| format!("link add near{i} type veth peer name far{i} netns {crowd}");
    let attach = |i| {
        if case.is_bridge() {
            vec![pair(i), format!("link set near{i} master {BRIDGE}")]
        } else {
            let address = format!("address add 10.1.0.1/32 dev near{i}");
            let route = format!("route add {}/32 dev near{i} scope link", ipv4(i));
            vec![pair(i), format!("link set near{i} up"), address, route]
        }
    };
    (0..pods).flat_map(attach).collect()
}

fn links_up(name: &str, pods: usize) -> Vec<String> {
    (0..pods).map(|i| format!("link set {name}{i} up")).collect()
}

/// Enables or disables IPv6 on future links. With IPv6, each link that comes up sends multicasts to
/// all ports of its bridge for a while, which would distort the following samples.
fn disable_ipv6(disabled: &str) -> Result<()> {
    let key = "/proc/sys/net/ipv6/conf/default/disable_ipv6";
    if Path::new(key).exists() {
        fs::write(key, disabled)?;
    }
    Ok(())
}

fn ip_batch(lines: &[String]) -> Result<()> {
    let mut command = Command::new("ip");
    command.args(["-batch", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped());
    let output = feed(command.spawn(), &command, &lines.join("\n"))?.wait_with_output()?;
    if output.status.success() { Ok(()) } else { Err(text(&output.stderr).into()) }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim().to_owned()
}
