//! The recipes of `docs/egress.md` with names, as the page prints them: programs of the container
//! fetch source code and packages by name from servers outside, and what else they try is refused.
//! A container of the same list without egress reaches whatever is refused.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use super::recipes::recipe;
use super::{OUTSIDE, add_outside};
use crate::lane;
use crate::support::conflist::{Attached, Conflist};
use crate::support::node::{Container, Node, Outcome, Running, eventually};
use crate::support::resolver::{is_ready, start_resolver};

/// What the name server outside knows.
const ZONE: [(&str, &str); 18] = [
    ("github.com", "203.0.113.10,2001:db8:f::10"),
    ("api.github.com", "203.0.113.11"),
    ("codeload.github.com", "203.0.113.12"),
    ("raw.githubusercontent.com", "203.0.113.13"),
    ("registry.npmjs.org", "203.0.113.20,2001:db8:f::20"),
    ("pypi.org", "203.0.113.30"),
    ("files.pythonhosted.org", "203.0.113.31,2001:db8:f::31"),
    ("index.crates.io", "198.51.100.40"),
    ("static.crates.io", "198.51.100.41"),
    ("deb.debian.org", "198.51.100.50"),
    // not in a recipe
    ("evil.example.com", "203.0.113.66"),
    ("registry.evil.example.com", "203.0.113.66"),
    ("githubusercontent.com", "203.0.113.13"),
    ("gist.github.com", "203.0.113.10"),
    ("dns.google", "8.8.8.8"),
    // in a recipe, with addresses that no name opens
    ("private.githubusercontent.com", PRIVATE[1]),
    ("metadata.githubusercontent.com", "169.254.169.254"),
    ("node.githubusercontent.com", "10.9.0.1"),
];

/// Private hosts outside: the registry of a recipe, and its neighbour.
const PRIVATE: [&str; 2] = ["10.20.0.7", "10.20.0.6"];
/// A name server outside that leads all names to one address.
const LIAR: &str = "8.8.8.8";
const LIE: &str = "203.0.113.66";

const HTTPS: [&str; 3] = ["443", "853", "8443"];

/// The exit statuses of curl: the name is not resolved; no connection; no answer.
const UNRESOLVED: i32 = 6;
const UNREACHABLE: i32 = 7;
const TIMED_OUT: i32 = 28;

/// A node with the resolver; a host outside with servers for all names of the zone; containers of
/// the list of a recipe: one with its policy, and one without egress.
struct Site {
    limited: Client,
    bare: Client,
    _programs: Vec<Running>,
    _outside: Container,
    node: Node,
}

impl Site {
    fn new(heading: &str) -> Site {
        let node = Node::new();
        let outside = add_outside(&node);
        outside.sh("ip link set lo up");
        for route in ["203.0.113.0/24", "198.51.100.0/24", "10.20.0.0/24", "2001:db8:f::/64"] {
            outside.sh(&format!("ip route add local {route} dev lo"));
        }
        outside.sh(&format!("ip addr add {LIAR}/32 dev lo"));
        fs::create_dir_all(node.path("outside")).unwrap();
        let mut programs = start_servers(&node, &outside);
        programs.push(start_resolver(&node, &[OUTSIDE[0]]));
        let conf = recipe(heading);
        let limited = Client::attach(&node, &conf, "limited");
        let mut without = conf;
        without["plugins"].as_array_mut().unwrap().pop();
        let bare = Client::attach(&node, &without, "bare");
        Site { limited, bare, _programs: programs, _outside: outside, node }
    }

    /// Requests that fail with this status, and not without the policy.
    #[track_caller]
    fn refuses(&self, status: i32, requests: &[&str]) {
        for request in requests {
            let others = self.bare.curl(request);
            assert_eq!(others.status, Some(0), "without a policy: {request}: {others:?}");
            let outcome = self.limited.curl(request);
            // Older kernels do not tell the container.
            let is_silent = status == UNREACHABLE && !lane::REJECT_AT_INGRESS.is_here();
            let expected = if is_silent { TIMED_OUT } else { status };
            assert_eq!(outcome.status, Some(expected), "{request}: {outcome:?}");
        }
    }
}

/// Name servers and web servers outside.
fn start_servers(node: &Node, outside: &Container) -> Vec<Running> {
    let directory = node.path("outside");
    let names: Vec<&str> = ZONE.iter().map(|(name, _)| *name).collect();
    let create = include_str!("recipes_by_name/files.sh");
    let output = Command::new("sh")
        .args(["-c", create, "files.sh"])
        .args(names)
        .current_dir(&directory)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");

    let serve = include_str!("recipes_by_name/servers.py");
    let log = node.path("servers.log");
    let stderr = File::create(&log).unwrap();
    let words = [&["-C", directory.to_str().unwrap(), "python3", "-c", serve, "80"], &HTTPS[..]];
    let web = node.tool("env", &words.concat()).program("env");
    let web = outside.run(|| Running::start_with(&web, stderr.into()));
    is_ready(&log);

    let records = ZONE.iter().map(|(name, ips)| format!("--host-record={name},{ips}"));
    let records: Vec<String> = records.collect();
    let truth: Vec<&str> = records.iter().map(String::as_str).collect();
    let lie = format!("--address=/#/{LIE}");
    vec![web, dnsmasq(node, outside, OUTSIDE[0], &truth), dnsmasq(node, outside, LIAR, &[&lie])]
}

fn dnsmasq(node: &Node, outside: &Container, ip: &str, records: &[&str]) -> Running {
    let listen = format!("--listen-address={ip}");
    let options = ["-k", "-C", "/dev/null", "-x", "", "-R", "-h", "-u", "root", "--local-ttl=300"];
    let words = [&options[..], &["--bind-interfaces", "--no-ping", &listen], records].concat();
    let server = node.tool("dnsmasq", &words).program("dnsmasq");
    let log = File::create(node.path(&format!("dnsmasq-{ip}.log"))).unwrap();
    outside.run(|| Running::start_with(&server, log.into()))
}

/// An attached container, in which programs run.
struct Client {
    container: Container,
    /// Its directory, with its `resolv.conf`.
    directory: PathBuf,
    /// The certificate of the servers.
    certificate: PathBuf,
}

impl Client {
    fn attach(node: &Node, conf: &Value, id: &str) -> Client {
        let container = Container::new();
        let (list, at) = (Conflist::new(node, conf.clone()), Attached::new(id, &container.path()));
        let result = list.add(&at).unwrap();
        list.check(&at, &result).unwrap();
        eventually("duplicate address detection", || {
            container.sh("ip -6 addr show tentative").trim().is_empty()
        });
        let directory = node.path(id);
        fs::create_dir(&directory).unwrap();
        let client = Client { container, directory, certificate: node.path("outside/tls.crt") };
        let servers = result["dns"]["nameservers"].as_array();
        let servers = servers.map_or(vec![OUTSIDE[0]], |servers| {
            servers.iter().map(|server| server.as_str().unwrap()).collect()
        });
        client.ask(&servers);
        client
    }

    /// Uses these name servers from now on.
    fn ask(&self, servers: &[&str]) {
        let lines = servers.iter().map(|server| format!("nameserver {server}\n"));
        fs::write(self.directory.join("resolv.conf"), lines.collect::<String>()).unwrap();
    }

    /// Runs a command line in the container, with its resolv.conf and no file of the host that
    /// could lead elsewhere.
    fn run(&self, line: &str) -> Outcome {
        let script = format!("mount --bind resolv.conf /etc/resolv.conf\nexec timeout 120 {line}");
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-euc", &script]).current_dir(&self.directory).env_clear();
        for key in ["CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "npm_config_cafile", "PIP_CERT"] {
            command.env(key, &self.certificate);
        }
        for key in ["npm_config_globalconfig", "GIT_CONFIG_GLOBAL", "PIP_CONFIG_FILE"] {
            command.env(key, "/dev/null");
        }
        command.env("GIT_CONFIG_NOSYSTEM", "1").env("PIP_DISABLE_PIP_VERSION_CHECK", "1");
        command.env("HOME", &self.directory).env("PATH", std::env::var_os("PATH").unwrap());
        let output = self.container.run(|| command.output().unwrap());
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let (stdout, stderr) = (text(output.stdout), text(output.stderr));
        Outcome { status: output.status.code(), stdout, stderr }
    }

    /// What a command line prints, which must succeed.
    #[track_caller]
    fn prints(&self, line: &str) -> String {
        let outcome = self.run(line);
        assert_eq!(outcome.status, Some(0), "{line}: {outcome:?}");
        outcome.stdout
    }

    fn curl(&self, words: &str) -> Outcome {
        self.run(&format!("curl -sS --connect-timeout 10 {words}"))
    }

    /// The index of each site is the one of the name.
    #[track_caller]
    fn reads(&self, sites: &[&str]) {
        for site in sites {
            let name = site.rsplit('/').next().unwrap();
            assert_eq!(self.prints(&format!("curl -sS {site}")), format!("this is {name}\n"));
        }
    }

    #[track_caller]
    fn clones_a_repository(&self) {
        if has("git") {
            self.prints("git clone --quiet https://github.com/example/project.git");
            let read = fs::read_to_string(self.directory.join("project/README")).unwrap();
            assert_eq!(read, "the source\n");
        }
    }

    #[track_caller]
    fn installs_a_package_of_npm(&self) {
        if has("npm") {
            self.prints("npm install --no-audit --no-fund --no-update-notifier example");
            assert!(self.directory.join("node_modules/example/package.json").exists());
            let other = "npm install --no-audit --fetch-retries=0 --prefer-online \
                         --registry=https://registry.evil.example.com/ other";
            let outcome = self.run(other);
            assert_ne!(outcome.status, Some(0), "{outcome:?}");
            assert!(outcome.stderr.contains("getaddrinfo"), "{outcome:?}");
        }
    }

    #[track_caller]
    fn downloads_a_package_of_pip(&self) {
        if has("pip3") {
            self.prints("pip3 download --quiet --no-deps --dest packages example");
            assert!(self.directory.join("packages/example-1.0.0-py3-none-any.whl").exists());
        }
    }
}

/// Whether the machine has the program.
fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap();
    let is_there = std::env::split_paths(&path).any(|directory| directory.join(program).exists());
    if !is_there {
        println!("skipped: no {program}");
    }
    is_there
}

/// What is refused with every policy of names: other names and addresses, and other ways to ask.
#[track_caller]
fn refuses_what_is_not_named(site: &Site) {
    site.refuses(
        UNRESOLVED,
        &[
            "https://evil.example.com/",
            "https://githubusercontent.com/",
            "https://gist.github.com/",
            "https://dns.google/dns-query --insecure",
        ],
    );
    site.refuses(
        UNREACHABLE,
        &[
            // Allowed names at other ports.
            "https://github.com:8443/",
            "http://github.com/",
            "https://pypi.org:8443/",
            // Addresses that no name has led to.
            "--resolve evil.example.com:443:203.0.113.66 https://evil.example.com/",
            "--resolve github.com:443:203.0.113.99 https://github.com/",
            "--resolve github.com:443:[2001:db8:f::99] https://github.com/",
            // Another resolver, by TLS and by HTTPS.
            "--insecure https://8.8.8.8:853/",
            "--insecure https://8.8.8.8/dns-query",
            "--resolve dns.google:443:8.8.8.8 --insecure https://dns.google/",
        ],
    );
    // Names below an allowed one that lead to private addresses.
    for name in ["private", "metadata", "node"] {
        let outcome = site.limited.curl(&format!("https://{name}.githubusercontent.com/"));
        assert_eq!(outcome.status, Some(UNRESOLVED), "{name}: {outcome:?}");
    }
    let listed = site.node.cnibox(&["egress", "ls", "--container", "limited"]);
    eventually("the refused names are listed", || {
        let listed = listed.printed();
        listed.contains("evil.example.com dns") && listed.contains("dns: 169.254.169.254")
    });
    asks_no_resolver_of_its_choice(site);
}

/// A fixed resolver is not asked: the one of the node answers in its place.
#[track_caller]
fn asks_no_resolver_of_its_choice(site: &Site) {
    for client in [&site.bare, &site.limited] {
        client.ask(&[LIAR]);
    }
    let remote = "--insecure -w %{remote_ip} -o /dev/null";
    let led = |client: &Client, name: &str| client.curl(&format!("{remote} https://{name}/"));
    assert_eq!(led(&site.bare, "github.com").stdout, LIE);
    let outcome = led(&site.limited, "github.com");
    assert!(["203.0.113.10", "2001:db8:f::10"].contains(&outcome.stdout.as_str()), "{outcome:?}");
    let outcome = led(&site.limited, "evil.example.com");
    assert_eq!(outcome.status, Some(UNRESOLVED), "{outcome:?}");
}

#[test]
fn a_coding_agent_by_name() {
    if !has("curl") || !has("openssl") || !has("python3") {
        return;
    }
    let site = Site::new("A coding agent, by name");
    let agent = &site.limited;
    // Nobody has asked for the name.
    let known = "--resolve api.github.com:443:203.0.113.11 https://api.github.com";
    site.refuses(UNREACHABLE, &[known]);
    agent.reads(&[
        "https://api.github.com",
        "https://raw.githubusercontent.com",
        "-6 https://github.com",
        "-4 https://github.com",
        known,
    ]);
    agent.clones_a_repository();
    agent.installs_a_package_of_npm();
    agent.downloads_a_package_of_pip();
    refuses_what_is_not_named(&site);
    // The private registry.
    let registry = PRIVATE[0];
    agent.prints(&format!("curl -sS --insecure https://{registry}/"));
    let others = [format!("http://{registry}/"), format!("--insecure https://{}/", PRIVATE[1])];
    site.refuses(UNREACHABLE, &others.each_ref().map(String::as_str));
}

#[test]
fn a_ci_runner_by_name() {
    if !has("curl") || !has("openssl") || !has("python3") {
        return;
    }
    let site = Site::new("A CI runner, by name");
    let runner = &site.limited;
    let known = "--resolve deb.debian.org:80:198.51.100.50 http://deb.debian.org";
    site.refuses(UNREACHABLE, &[known]);
    runner.reads(&[
        "http://deb.debian.org",
        known,
        "https://api.github.com",
        "https://codeload.github.com",
        "https://raw.githubusercontent.com",
        "https://index.crates.io",
        "https://static.crates.io",
        "-6 https://files.pythonhosted.org",
    ]);
    runner.clones_a_repository();
    runner.installs_a_package_of_npm();
    runner.downloads_a_package_of_pip();
    refuses_what_is_not_named(&site);
    site.refuses(UNREACHABLE, &["https://deb.debian.org/", "http://registry.npmjs.org/"]);
}
