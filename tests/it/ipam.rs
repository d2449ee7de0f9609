//! `cnibox ipam`: listing and changing host-local's leases by hand.

use std::fs;

use serde_json::{Value, json};

use crate::support::net::merged;
use crate::support::node::{Call, Container, Node, Outcome, eventually};

/// The network `name`, with addresses that no other test assigns to an interface.
fn conf(node: &Node, name: &str) -> Value {
    json!({"name": name, "cniVersion": "1.1.0", "type": "host-local",
        "ipam": node.host_local(&["203.0.113.0/24"])})
}

fn add(node: &Node, name: &str, id: &str, netns: &str) -> Value {
    node.call("host-local", "ADD").conf(&conf(node, name)).id(id).netns(netns).result()
}

/// ADD of bridge, whose leases have the host's end of the attachment.
fn attach(node: &Node, name: &str, id: &str, container: &Container) {
    let bridge = merged(&conf(node, name), &json!({"type": "bridge", "bridge": "br0"}));
    node.call("bridge", "ADD").conf(&bridge).id(id).netns(&container.path()).result();
}

fn ipam(node: &Node, line: &str) -> Call {
    let dir = node.path("leases").display().to_string();
    let words: Vec<&str> = line.split_whitespace().chain(["--data-dir", &dir]).collect();
    node.tool("ipam", &words)
}

/// `cnibox gc` with the leases of this node only.
fn gc(node: &Node, line: &str) -> Call {
    let [dir, conf, cache] =
        ["leases", "net.d", "cache"].map(|name| node.path(name).display().to_string());
    let directories = ["--data-dir", &dir, "--conf-dir", &conf, "--cache-dir", &cache];
    let words: Vec<&str> =
        ["gc"].into_iter().chain(line.split_whitespace()).chain(directories).collect();
    node.cnibox(&words)
}

#[track_caller]
fn ends_with(status: i32, call: &Call) -> Outcome {
    let outcome = call.run();
    assert_eq!(outcome.status, Some(status), "{outcome:?}");
    outcome
}

fn listed(node: &Node, line: &str) -> Vec<Value> {
    let outcome = ends_with(0, &ipam(node, &format!("ls --json {line}")));
    assert_eq!(outcome.stderr, "");
    serde_json::from_str(&outcome.stdout).unwrap()
}

#[test]
fn the_list_shows_which_containers_live() {
    let node = Node::new();
    let (alive, dead, another) = (Container::new(), Container::new(), Container::new());
    attach(&node, "pods", "alive", &alive);
    attach(&node, "pods", "dead", &dead);
    add(&node, "pods", "unknown", &alive.path());
    attach(&node, "another", "alive", &another);
    fs::write(node.path("leases/pods/203.0.113.10"), "old-form").unwrap();
    drop(dead);
    eventually("the kernel removes the namespace", || {
        listed(&node, "--network pods")[1]["alive"] == false
    });

    let rows = listed(&node, "");
    let brief = |row: &Value| {
        let text = |key: &str| row[key].as_str().unwrap_or("-").to_owned();
        format!(
            "{} {} {} {} {}",
            text("network"),
            text("address"),
            text("container"),
            text("interface"),
            row["alive"]
        )
    };
    assert_eq!(
        rows.iter().map(brief).collect::<Vec<_>>(),
        [
            "another 203.0.113.2 alive eth0 true",
            "pods 203.0.113.2 alive eth0 true",
            "pods 203.0.113.3 dead eth0 false",
            "pods 203.0.113.4 unknown eth0 null",
            "pods 203.0.113.10 old-form - null",
        ]
    );
    assert_eq!(rows[2]["reason"], "its link on the host is gone");
    let in_doubt = "it has no link on the host that would show its end";
    assert_eq!(rows[3]["reason"], in_doubt);
    assert!(rows[1]["reason"].is_null() && rows[1]["age"].as_u64().unwrap() < 1000);
    assert_eq!(listed(&node, "--network another").len(), 1);

    let table = ends_with(0, &ipam(&node, "ls --network pods")).stdout;
    let lines: Vec<Vec<&str>> = table.lines().map(|l| l.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["NETWORK", "ADDRESS", "CONTAINER", "INTERFACE", "AGE", "ALIVE"]);
    assert_eq!(lines[1][..4], ["pods", "203.0.113.2", "alive", "eth0"]);
    assert_eq!((lines[1][5], lines[2][5], lines[3][5]), ("yes", "no:", "?:"));
    assert!(table.contains(&format!("  ?: {in_doubt}\n")), "{table}");
    assert!(table.contains("  ?: nothing was recorded of it\n"), "{table}");
}

#[test]
fn free_releases_an_address_or_all_of_a_container() {
    let node = Node::new();
    let alive = Container::new();
    attach(&node, "pods", "c1", &alive);
    for id in ["c2", "c3", "c33"] {
        add(&node, "pods", id, "/no/such");
    }
    let call = node.call("host-local", "ADD").conf(&conf(&node, "pods")).id("c3").ifname("eth1");
    call.netns("/x").result();
    let outcome = ends_with(0, &ipam(&node, "free --network pods 203.0.113.3"));
    assert_eq!(
        (outcome.stdout.as_str(), outcome.stderr.as_str()),
        ("freed 203.0.113.3 of container c2, interface eth0 (network pods)\n", "")
    );
    let outcome = ends_with(0, &ipam(&node, "free --network pods c3"));
    assert_eq!(
        outcome.stdout,
        "freed 203.0.113.4 of container c3, interface eth0 (network pods)\n\
        freed 203.0.113.6 of container c3, interface eth1 (network pods)\n"
    );
    assert_eq!(node.leases("pods"), ["203.0.113.2", "203.0.113.5"]);
    ends_with(0, &ipam(&node, "free --network pods 203.0.113.2 --force"));
    // The plugin honours the journal entry.
    assert_eq!(
        node.call("host-local", "CHECK")
            .conf(&conf(&node, "pods"))
            .id("c1")
            .netns("/x")
            .error()
            .code,
        999
    );
    add(&node, "pods", "c1", "/x");
    for line in [
        "free --network pods 203.0.113.3",
        "free --network pods c2",
        "free --network pods c",
        "free --network none c2",
        "ls --network none",
    ] {
        let outcome = ends_with(1, &ipam(&node, line));
        assert!(
            outcome.stdout.is_empty() && outcome.stderr.starts_with("ipam: "),
            "{line}: {outcome:?}"
        );
    }
    assert!(!crate::support::node::exists(node.path("leases/none")));
}

#[test]
fn gc_releases_dead_leases_and_a_dry_run_lists_them() {
    let node = Node::new();
    let mut alive = Vec::new();
    for name in ["pods", "more"] {
        let dead = Container::new();
        alive.push(Container::new());
        attach(&node, name, "alive", &alive[alive.len() - 1]);
        add(&node, name, "unknown", "/no/such");
        attach(&node, name, "dead", &dead);
    }
    let line = |word: &str, name: &str| {
        format!(
            "{word} 203.0.113.4 of container dead, interface eth0: its link on the host is gone (network {name})\n"
        )
    };
    let [conf, cache, leases] =
        ["net.d", "cache", "leases"].map(|name| node.path(name).display().to_string());
    let options = format!(" --conf-dir {conf} --cache-dir {cache} --data-dir {leases}");
    let dry_line = |name: &str| {
        let doubt = "it has no link on the host that would show its end";
        line("would reclaim", name)
            + &format!(
                "in doubt: 203.0.113.3 of container unknown, interface eth0: {doubt} (network {name}); "
            )
            + &format!(
                "cnibox gc --network {name} --container unknown{options} # if it has ended\n"
            )
    };
    eventually("the kernel removes the namespaces", || {
        listed(&node, "").iter().filter(|row| row["alive"] == false).count() == 2
    });
    let dry = ends_with(1, &gc(&node, "--dry-run"));
    // The default directory of leases, which is this machine's, is searched, too.
    let own = dry.stdout.lines().filter(|line| line.contains(" 203.0.113."));
    let own = own.collect::<Vec<_>>().join("\n") + "\n";
    assert_eq!(own, dry_line("more") + &dry_line("pods"));
    assert_eq!((node.leases("pods").len(), node.leases("more").len()), (3, 3));
    let left = |count: u8| {
        format!(
            "{count} in doubt: cnibox gc --dry-run{options} lists them with the command for each\n"
        )
    };
    assert_eq!(
        ends_with(0, &gc(&node, "--network pods")).stdout,
        line("reclaimed", "pods") + &left(1)
    );
    assert_eq!((node.leases("pods").len(), node.leases("more").len()), (2, 3));
    assert_eq!(ends_with(0, &gc(&node, "")).stdout, line("reclaimed", "more") + &left(2));
    assert_eq!(
        ends_with(0, &gc(&node, "")).stdout,
        format!("no dead attachment was found\n{}", left(2))
    );
    // The advice is followed: the network has no configuration on this node.
    let named = "released 203.0.113.3 of container unknown, interface eth0: named by --container, it has no link on the \
        host that would show its end (network pods)\n";
    let advice = "--network pods --container unknown";
    assert_eq!(
        ends_with(1, &gc(&node, &format!("{advice} --dry-run"))).stdout,
        named.replacen("released", "would release", 1)
    );
    assert_eq!(ends_with(0, &gc(&node, advice)).stdout, named);
    assert_eq!((node.leases("pods"), node.leases("more").len()), (vec!["203.0.113.2".into()], 2));
    for nothing in
        [advice, "--network pods --container alive", "--network pods --container alive --json"]
    {
        let outcome = ends_with(1, &gc(&node, nothing));
        assert!(
            outcome.stdout.is_empty() && outcome.stderr.contains("container \""),
            "{nothing}: {outcome:?}"
        );
    }
}

/// Containers of networks with a `dataDir` of their own are found without an option.
#[test]
fn every_data_dir_of_the_node_is_searched() {
    let node = Node::new();
    let below = |name: &str| node.path(name).display().to_string();
    let (net_d, cache, bin) = (below("net.d"), below("cache"), below("bin"));
    fs::create_dir(&net_d).unwrap();
    let containers = [Container::new(), Container::new()];
    for (n, (name, dir)) in [("own", &*below("own")), ("state", "/run/cni")].iter().enumerate() {
        let ipam =
            json!({"type": "host-local", "dataDir": dir, "subnet": format!("203.0.{n}.0/24")});
        let list = json!({"name": name, "cniVersion": "1.1.0", "plugins": [{"type": "ptp", "ipam": ipam}]});
        fs::write(node.path(&format!("net.d/{n}.conflist")), list.to_string()).unwrap();
        let dirs = ["--conf-dir", &net_d, "--cache-dir", &cache, "--plugin-path", &bin];
        let netns = containers[n].path();
        node.tool("cnitool", &[&["add", name, &*netns], &dirs[..]].concat()).printed();
    }
    let ipam = |words: &[&str]| {
        let dirs = ["--conf-dir", &net_d, "--cache-dir", &cache];
        node.tool("ipam", &[words, &dirs[..]].concat()).run()
    };
    let networks = |outcome: &Outcome| {
        let rows: Vec<Value> = serde_json::from_str(&outcome.stdout).unwrap();
        let name = |row: &Value| format!("{} {}", row["network"].as_str().unwrap(), row["alive"]);
        rows.iter().map(name).collect::<Vec<_>>()
    };
    let outcome = ipam(&["ls", "--json"]);
    assert_eq!(
        (networks(&outcome), &*outcome.stderr),
        (vec!["own true".into(), "state true".into()], "")
    );
    // Only the cache, whose configurations tenants may write, names the directories.
    fs::remove_dir_all(&net_d).unwrap();
    let outcome = ipam(&["ls", "--json"]);
    assert_eq!(networks(&outcome), ["state true"]);
    let left_out = format!("network own: its leases in {} are left out", below("own"));
    assert!(outcome.stderr.contains(&left_out), "{outcome:?}");
    let outcome = ipam(&["ls", "--json", "--data-dir", &below("own")]);
    assert_eq!((networks(&outcome).len(), &*outcome.stderr), (2, ""));
    assert_eq!(ipam(&["free", "--network", "state", "203.0.1.2", "--force"]).status, Some(0));
    let outcome = ipam(&["ls", "--network", "none"]);
    assert_eq!(outcome.status, Some(1));
    assert!(outcome.stderr.contains("no network \"none\" in /var/lib/cni/networks"), "{outcome:?}");
}

#[test]
fn reservations_are_freed_on_request_only() {
    let node = Node::new();
    add(&node, "pods", "c1", "/x");
    let dir = node.path("leases/pods");
    fs::write(dir.join("203.0.113.7"), "").unwrap();
    fs::write(dir.join("203.0.113.8"), "reserved for the printer").unwrap();
    fs::write(dir.join("203.0.113.9"), " \n").unwrap();
    let rows = listed(&node, "--network pods");
    assert_eq!(rows.len(), 4);
    assert!(rows[1]["container"].is_null() && rows[1]["alive"].is_null(), "{rows:?}");
    assert_eq!(rows[1]["reason"], "reserved: the file is empty");
    assert_eq!(rows[2]["reason"], "reserved: the file names no container");
    let table = ends_with(0, &ipam(&node, "ls --network pods")).stdout;
    assert!(table.contains("?          ?    reserved: the file is empty\n"), "{table}");
    ends_with(0, &gc(&node, ""));
    assert_eq!(node.leases("pods").len(), 4);
    let lines = |word: &str| {
        let line = |n| {
            format!("{word} 203.0.113.{n}, which was reserved: the file is empty (network pods)\n")
        };
        line(7) + &line(9)
    };
    let dry = ends_with(1, &ipam(&node, "free --network pods --empty --dry-run"));
    assert_eq!(dry.stdout, lines("would free"));
    assert_eq!(node.leases("pods").len(), 4);
    assert_eq!(ends_with(0, &ipam(&node, "free --empty")).stdout, lines("freed"));
    assert_eq!(node.leases("pods"), ["203.0.113.2", "203.0.113.8"]);
    let free = |status, line: &str| {
        ends_with(status, &ipam(&node, &format!("free --network pods {line}"))).stdout
    };
    let what = "203.0.113.8, which was reserved: the file names no container (network pods)\n";
    assert_eq!(free(1, "203.0.113.8 --dry-run"), format!("would free {what}"));
    assert_eq!(node.leases("pods").len(), 2);
    assert_eq!(free(0, "203.0.113.8"), format!("freed {what}"));
    let what = "203.0.113.2 of container c1, interface eth0 (network pods)\n";
    assert_eq!(free(1, "c1 -n"), format!("would free {what}"));
    assert_eq!(node.leases("pods"), ["203.0.113.2"]);
    let check = node.call("host-local", "CHECK").conf(&conf(&node, "pods")).id("c1").netns("/x");
    check.ok();
}

#[test]
fn help_is_printed_and_wrong_arguments_are_refused() {
    let node = Node::new();
    let help = ends_with(0, &node.tool("ipam", &["--help"]));
    for word in [
        "ipam ls",
        "ipam free",
        "cnibox gc",
        "--data-dir",
        "--json",
        "--empty",
        "--dry-run",
        "Exit status",
    ] {
        assert!(help.stdout.contains(word), "{word}");
    }
    for words in [
        &["rm"][..],
        &["free", "--network", "pods"],
        &["ls", "a", "b"],
        &["ls", "--dry-run"],
        &["ls", "-x"],
    ] {
        let outcome = ends_with(2, &node.tool("ipam", words));
        assert!(outcome.stdout.is_empty() && outcome.stderr.contains("ipam --help"), "{outcome:?}");
    }
    for line in ["ls --network ../leases", "free --network / c1"] {
        ends_with(2, &ipam(&node, line));
    }
    // A node without networks is not an error.
    assert_eq!(ends_with(0, &ipam(&node, "ls --json")).stdout, "[]\n");
    assert_eq!(ends_with(0, &ipam(&node, "free --empty")).stdout, "nothing to free was found\n");
    // Nor is a directory without a network; nothing is written to it.
    fs::create_dir_all(node.path("leases/mine")).unwrap();
    ends_with(0, &gc(&node, ""));
    ends_with(1, &ipam(&node, "ls --network mine"));
    fs::remove_dir(node.path("leases/mine")).unwrap();
    fs::remove_dir(node.path("leases")).unwrap();
    fs::write(node.path("leases"), "").unwrap();
    let outcome = ends_with(1, &ipam(&node, "ls"));
    assert!(outcome.stderr.contains("not a directory"), "{outcome:?}");
    fs::remove_file(node.path("leases")).unwrap();
    // Listing needs no write permission; releasing does, and reports the lack of it.
    add(&node, "pods", "c1", "/x");
    let dir = node.path("leases").display().to_string();
    let script = format!("mount --bind -o ro {dir} {dir} && exec \"$0\" \"$@\"");
    let read_only = |line: &str| ipam(&node, line).in_script(&script);
    assert!(ends_with(0, &read_only("ls")).stdout.contains("203.0.113.2"));
    ends_with(0, &read_only("free --empty --dry-run"));
    let outcome = ends_with(1, &read_only("free --network pods c1"));
    assert!(outcome.stderr.contains("read-only file system"), "{outcome:?}");
    assert_eq!(node.leases("pods").len(), 1);
}

#[test]
fn the_tool_works_during_calls_of_plugins() {
    let node = Node::new();
    std::thread::scope(|scope| {
        for n in 0..8 {
            let node = &node;
            scope.spawn(move || {
                let id = format!("c{n}");
                for _ in 0..5 {
                    add(node, "pods", &id, "/x");
                    ends_with(0, &ipam(node, "ls"));
                    ends_with(0, &ipam(node, &format!("free --network pods {id}")));
                    ends_with(0, &ipam(node, "free --empty"));
                }
            });
        }
    });
    assert_eq!(node.leases("pods"), [""; 0]);
}
