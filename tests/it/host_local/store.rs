//! The lease store: allocation order, exhaustion, old formats, reservations, unwritable
//! directories.

use std::fs;
use std::os::unix::fs::symlink;

use serde_json::json;

use super::{add, del, file, net, one_set, refused};
use crate::support::net::Net;
use crate::support::node::Node;
use crate::support::strace;

fn gc(net: &Net<'_>, valid: &[(&str, &str)]) {
    let valid: Vec<_> =
        valid.iter().map(|(id, ifname)| json!({"containerID": id, "ifname": ifname})).collect();
    net.with(&json!({"cni.dev/valid-attachments": valid})).call("GC", "").ok();
}

#[test]
fn addresses_go_round_robin_through_the_ranges_of_a_set() {
    let node = Node::new();
    let net = one_set(&node, &["10.0.0.0/30", "10.0.1.0/30", "10.0.2.0/29"]);
    let expected = [
        "10.0.0.2/30",
        "10.0.1.2/30",
        "10.0.2.2/29",
        "10.0.2.3/29",
        "10.0.2.4/29",
        "10.0.2.5/29",
        "10.0.2.6/29",
    ];
    for (n, address) in expected.iter().enumerate() {
        let id = format!("c{n}");
        assert_eq!(add(&net, &id), [*address]);
        del(&net, &id);
        assert_eq!(
            format!("{}/", file(&net, "last_reserved_ip.0")),
            address.split_inclusive('/').next().unwrap()
        );
    }
    assert_eq!(add(&net, "again"), ["10.0.0.2/30"]);
}

#[test]
fn the_references_last_reserved_address_is_respected() {
    for (last, next) in [
        ("10.0.0.5", "10.0.0.6/29"),
        ("10.0.0.6", "10.0.0.2/29"),
        ("10.0.0.5\n", "10.0.0.6/29"),
        ("192.0.2.1", "10.0.0.2/29"),
        ("garbage", "10.0.0.2/29"),
    ] {
        let node = Node::new();
        let net = one_set(&node, &["10.0.0.0/29"]);
        fs::create_dir_all(node.path("leases/net")).unwrap();
        fs::write(node.path("leases/net/last_reserved_ip.0"), last).unwrap();
        assert_eq!(add(&net, "c1"), [next], "{last:?}");
    }
}

#[test]
fn exhaustion_names_the_set_and_is_code_50_of_status() {
    for (subnets, count, set) in [
        (&["10.0.0.0/30"][..], 1, "10.0.0.1-10.0.0.2"),
        (&["10.0.0.0/29"], 5, "10.0.0.1-10.0.0.6"),
        (&["10.0.0.0/30", "10.0.1.0/30"], 2, "10.0.0.1-10.0.0.2,10.0.1.1-10.0.1.2"),
    ] {
        let node = Node::new();
        let net = one_set(&node, subnets);
        for n in 0..count {
            net.call("STATUS", "").ok();
            add(&net, &format!("c{n}"));
        }
        let msg = format!("no IP addresses available in range set: {set}");
        assert_eq!(net.call("STATUS", "").error().brief(), (50, msg.as_str()));
        refused(&net, "cx", 999, &format!("failed to allocate for range 0: {msg}"));
        gc(&net, &[("c0", "eth1")]);
        net.call("STATUS", "").ok();
        add(&net, "cx");
    }
}

#[test]
fn an_exhausted_second_set_releases_the_first_address() {
    let node = Node::new();
    let ranges = json!([[{"subnet": "10.0.0.0/24"}], [{"subnet": "10.1.0.0/30"}]]);
    let net = net(&node, "1.1.0", &json!({"ranges": ranges}));
    assert_eq!(add(&net, "c1"), ["10.0.0.2/24", "10.1.0.2/30"]);
    let msg =
        "failed to allocate for range 1: no IP addresses available in range set: 10.1.0.1-10.1.0.2";
    refused(&net, "c2", 999, msg);
    assert_eq!(net.leases(), ["10.0.0.2", "10.1.0.2"]);
}

#[test]
fn leases_without_an_interface_are_used_and_released() {
    let node = Node::new();
    let net = one_set(&node, &["10.0.0.0/29"]);
    let lease = node.path("leases/net/10.0.0.2");
    let overwrite = |text: &str| fs::write(&lease, text).unwrap();
    add(&net, "c1");
    overwrite("c1");
    net.call("CHECK", "c1").netns("/x").ok();
    let msg = "failed to allocate for range 0: 10.0.0.2 has been allocated to c1, duplicate allocation is not allowed";
    refused(&net, "c1", 999, msg);
    gc(&net, &[("c1", "eth9")]);
    assert_eq!(net.leases(), ["10.0.0.2"], "the file does not say which interface");
    del(&net, "c2");
    assert_eq!(net.leases(), ["10.0.0.2"]);
    overwrite("c1\n");
    gc(&net, &[("c2", "eth0")]);
    assert_eq!(net.leases(), ["10.0.0.2"], "a word may be somebody's reservation");
    del(&net, "c1");
    assert_eq!(net.leases(), [""; 0]);
}

#[test]
fn leases_of_the_reference_are_adopted() {
    let node = Node::new();
    let net = one_set(&node, &["10.0.0.0/29"]);
    fs::create_dir_all(node.path("leases/net")).unwrap();
    for (ip, text) in [("10.0.0.2", "c1\r\neth0"), ("10.0.0.3", " c2 \r\neth0\n")] {
        fs::write(node.path("leases/net").join(ip), text).unwrap();
    }
    net.call("CHECK", "c1").netns("/x").ok();
    net.call("CHECK", "c2").netns("/x").ok();
    assert_eq!(add(&net, "c3"), ["10.0.0.4/29"]);
    del(&net, "c1");
    del(&net, "c2");
    assert_eq!(net.leases(), ["10.0.0.4"]);
}

#[test]
fn addresses_reserved_by_hand_are_never_leased() {
    let node = Node::new();
    let net = one_set(&node, &["10.0.0.0/29"]);
    let dir = node.path("leases/net");
    fs::create_dir_all(&dir).unwrap();
    let reserved = [
        ("10.0.0.2", ""),
        ("10.0.0.3", "reserved for the printer\n"),
        ("10.0.0.4", "printer"),
        ("10.0.0.5", "\0\0\0"),
    ];
    for (ip, text) in reserved {
        fs::write(dir.join(ip), text).unwrap();
    }
    net.call("STATUS", "").ok();
    assert_eq!(add(&net, "c1"), ["10.0.0.6/29"]);
    let msg = "no IP addresses available in range set: 10.0.0.1-10.0.0.6";
    assert_eq!(net.call("STATUS", "").error().brief(), (50, msg));
    let error = net.call("ADD", "c2").netns("/x").error();
    assert!(error.msg.ends_with(msg), "{error:?}");
    for word in
        ["3 of this network", "cnibox ipam ls", "cnibox ipam free", "cnibox ipam free --empty"]
    {
        assert!(error.details.contains(word), "{word}: {error:?}");
    }
    for ip in ["10.0.0.2", "10.0.0.4"] {
        let asked = net.with(&json!({"args": {"cni": {"ips": [ip]}}}));
        assert!(asked.call("ADD", "c2").netns("/x").error().msg.contains("is not available"));
    }
    net.call("CHECK", "c1").netns("/x").ok();
    del(&net, "c2");
    gc(&net, &[]);
    net.call("GC", "").ok();
    assert_eq!(net.leases().len(), 4);
    for (ip, text) in reserved {
        assert_eq!(file(&net, ip), text);
    }
    // DEL of a container with that id frees the reserved address, as the reference's DEL does.
    del(&net, "printer");
    assert_eq!(net.leases(), ["10.0.0.2", "10.0.0.3", "10.0.0.5"]);
}

#[test]
fn a_lost_lease_that_nobody_knows_is_freed_by_the_named_command() {
    let node = Node::new();
    let net = one_set(&node, &["10.0.0.0/30"]);
    add(&net, "c1");
    let dir = node.path("leases/net").display().to_string();
    node.sh(&format!(
        "cd {dir} && touch -r 10.0.0.2 .time && truncate -s 0 10.0.0.2 && touch -r .time 10.0.0.2"
    ));
    node.sh(&format!("rm -r {dir}/.cnibox {dir}/.time"));
    let said = net.call("ADD", "c2").netns("/x").run().stderr;
    assert_eq!(net.leases(), ["10.0.0.2"], "{said}");
    let command = said.split_once("if no container has the address: cnibox ").unwrap().1;
    let words: Vec<&str> = command.lines().next().unwrap().split(' ').collect();
    let printed = node.cnibox(&words).printed();
    assert_eq!(printed, "freed 10.0.0.2, which was reserved: the file is empty (network net)\n");
    assert_eq!(add(&net, "c2"), ["10.0.0.2/30"]);
}

#[test]
fn links_in_place_of_files_of_the_store_are_not_followed() {
    let node = Node::new();
    let net = one_set(&node, &["10.0.0.0/29"]);
    let (dir, victim) = (node.path("leases/net"), node.path("victim"));
    fs::create_dir_all(&dir).unwrap();
    fs::create_dir_all(victim.join("home")).unwrap();
    for name in ["leases", "leases.new", "freed", "tmp", "home/file", "file"] {
        fs::write(victim.join(name), "precious").unwrap();
    }
    symlink(&victim, dir.join(".cnibox")).unwrap();
    let before = node.sh(&format!("cd {} && find . -printf '%p %T@ %s\n'", victim.display()));
    let unchanged = |what: &str| {
        let after = node.sh(&format!("cd {} && find . -printf '%p %T@ %s\n'", victim.display()));
        assert_eq!(after, before, "{what}");
    };
    assert_eq!(add(&net, "c1"), ["10.0.0.2/29"]);
    net.call("CHECK", "c1").netns("/x").ok();
    net.call("STATUS", "").ok();
    gc(&net, &[("c1", "eth0")]);
    del(&net, "c1");
    unchanged("a link for the journal");
    for name in ["lock", "last_reserved_ip.0", "10.0.0.3"] {
        for target in ["file", "none"] {
            let path = dir.join(name);
            fs::remove_file(&path).ok();
            symlink(victim.join(target), &path).unwrap();
            let outcome = net.call("ADD", "c1").netns("/x").run();
            if name != "10.0.0.3" {
                let wanted = format!("{}: not a regular file", path.display());
                assert!(outcome.stdout.contains(&wanted), "{outcome:?}");
            }
            net.call("DEL", "c1").netns("/x").run();
            unchanged(name);
            fs::remove_file(&path).unwrap();
        }
    }
    assert_eq!(net.leases(), [""; 0]);
}

#[test]
fn a_fifo_in_place_of_a_file_blocks_no_call() {
    let node = Node::new();
    let fifo = node.path("resolv");
    let net = net(&node, "1.1.0", &json!({"subnet": "10.0.0.0/29", "resolvConf": fifo}));
    let dir = node.path("leases/net");
    let mkfifo = |path: &std::path::Path| node.sh(&format!("mkfifo {}", path.display()));
    mkfifo(&fifo);
    let error = net.call("ADD", "c1").netns("/x").error();
    assert_eq!(error.msg, format!("open {}: not a regular file", fifo.display()));
    fs::remove_file(&fifo).and_then(|()| fs::write(&fifo, "")).unwrap();
    fs::create_dir_all(dir.join(".cnibox")).unwrap();
    for name in ["10.0.0.2", ".cnibox/leases", ".cnibox/freed"] {
        mkfifo(&dir.join(name));
    }
    assert_eq!(add(&net, "c1"), ["10.0.0.3/29"]);
    net.call("CHECK", "c1").netns("/x").ok();
    net.call("STATUS", "").ok();
    gc(&net, &[]);
    assert_eq!(net.leases(), ["10.0.0.2"]);
    for (name, command) in
        [("last_reserved_ip.0", "mkdir"), ("last_reserved_ip.0", "mkfifo"), ("lock", "mkfifo")]
    {
        let path = dir.join(name);
        node.sh(&format!("rm -rf {0}; {command} {0}", path.display()));
        let error = net.call("ADD", "c1").netns("/x").error();
        assert!(error.msg.ends_with("not a regular file"), "{error:?}");
        assert!(error.msg.contains(&path.display().to_string()), "{error:?}");
        assert!(error.details.contains("move it away"), "{error:?}");
    }
}

#[test]
fn gc_matches_id_and_interface_and_keeps_other_files() {
    let node = Node::new();
    let net = one_set(&node, &["10.0.0.0/24"]);
    for id in ["a", "b"] {
        add(&net, id);
        net.call("ADD", id).netns("/x").ifname("eth1").result();
    }
    fs::write(node.path("leases/net/README"), "mine").unwrap();
    gc(&net, &[("a", "eth1"), ("b", "eth0"), ("never", "eth0")]);
    assert_eq!(net.leases(), ["10.0.0.3", "10.0.0.4"]);
    assert_eq!(file(&net, "README"), "mine");
    assert_eq!(file(&net, "last_reserved_ip.0"), "10.0.0.5");
    let conf = json!({"cni.dev/valid-attachments": [{"containerID": 7}]});
    let error = net.with(&conf).call("GC", "").error();
    assert!(error.msg.contains("valid attachments"), "{error:?}");
    assert_eq!(net.leases().len(), 2, "a list that cannot be read is no empty list");
    let error = net.with(&json!({"cni.dev/valid-attachments": "none"})).call("GC", "").error();
    assert!(error.code == 6 && net.leases().len() == 2, "{error:?}");
}

#[test]
fn add_and_status_name_a_data_dir_that_is_no_directory() {
    let node = Node::new();
    let plain = node.path("plain");
    fs::write(&plain, "").unwrap();
    let net = net(&node, "1.1.0", &json!({"subnet": "10.0.0.0/24", "dataDir": plain}));
    let error = net.call("ADD", "c1").netns("/x").error();
    assert!(error.msg.contains(&plain.display().to_string()), "{error:?}");
    let error = net.call("STATUS", "").error();
    assert!(error.code == 50 && error.msg.contains(&plain.display().to_string()), "{error:?}");
}

#[test]
fn add_and_status_name_a_read_only_file_system() {
    let node = Node::new();
    let net = one_set(&node, &["10.0.0.0/24"]);
    let leases = node.path("leases");
    fs::create_dir(&leases).unwrap();
    let script = format!("mount -t tmpfs -o ro none {} && exec \"$0\"", leases.display());
    let error = net.call("ADD", "c1").netns("/x").in_script(&script).error();
    assert!(error.msg.contains("read-only file system"), "{error:?}");
    assert!(error.msg.contains(&leases.display().to_string()), "{error:?}");
    let error = net.call("STATUS", "").in_script(&script).error();
    assert_eq!(error.code, 50);
    assert!(error.msg.contains("read-only file system"), "{error:?}");
}

#[test]
fn add_names_a_full_file_system_and_leaves_no_lease() {
    let node = Node::new();
    let net = one_set(&node, &["10.0.0.0/24"]);
    let leases = node.path("leases");
    fs::create_dir(&leases).unwrap();
    let dir = leases.display();
    let script = format!(
        "mount -t tmpfs -o size=4k none {dir} && head -c 4096 /dev/zero > {dir}/fill || exit 9
         \"$0\"; status=$?; find {dir} -name '10.*' >&2; exit $status"
    );
    let outcome = net.call("ADD", "c1").netns("/x").in_script(&script).run();
    assert_eq!(outcome.status, Some(1), "{outcome:?}");
    assert!(outcome.stdout.contains("no space left on device"), "{outcome:?}");
    assert!(outcome.stdout.contains(&format!("{dir}/net")), "{outcome:?}");
    assert!(!outcome.stderr.contains("10."), "a lease was left: {outcome:?}");
}

#[test]
fn other_verbs_work_on_a_full_file_system() {
    let node = Node::new();
    let net = one_set(&node, &["10.0.0.0/29"]);
    let (leases, conf, gc) = (node.path("leases"), node.path("conf"), node.path("gc"));
    fs::create_dir(&leases).unwrap();
    fs::write(&conf, net.conf.to_string()).unwrap();
    let nobody = net.with(&json!({"cni.dev/valid-attachments": []}));
    fs::write(&gc, nobody.conf.to_string()).unwrap();
    let (dir, conf, gc) = (leases.display(), conf.display(), gc.display());
    let script = format!(
        "mount -t tmpfs -o size=64k none {dir} || exit 9
         call() {{ CNI_COMMAND=$1 CNI_CONTAINERID=$2 \"$plugin\" < $3 > /dev/null; }}
         plugin=$0
         for id in c1 c2 c3; do call ADD $id {conf} || exit 10; done
         head -c 1000000 /dev/zero > {dir}/fill 2> /dev/null
         call ADD c4 {conf} && exit 11
         call STATUS '' {conf} || exit 12
         call CHECK c1 {conf} || exit 13
         call DEL c1 {conf} || exit 14
         test -e {dir}/net/10.0.0.2 && exit 15
         call GC '' {gc} || exit 16
         test $(ls {dir}/net | grep -c ^10) = 0 || exit 17
         rm {dir}/fill
         for id in c4 c5 c6 c7 c8; do call ADD $id {conf} || exit 18; done
         for id in c4 c5 c6 c7 c8; do call CHECK $id {conf} && call DEL $id {conf} || exit 19; done
         test $(ls {dir}/net | grep -c ^10) = 0 || exit 20"
    );
    let outcome = net.call("ADD", "c1").netns("/x").in_script(&script).run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
}

#[test]
fn del_reports_a_read_only_file_system() {
    let node = Node::new();
    let net = one_set(&node, &["10.0.0.0/24"]);
    add(&net, "c1");
    let dir = node.path("leases");
    let script = format!("mount --bind -o ro {0} {0} && exec \"$0\"", dir.display());
    let read_only = |verb, id| net.call(verb, id).netns("/x").in_script(&script);
    read_only("CHECK", "c1").ok();
    read_only("DEL", "stranger").ok();
    let nobody = net.with(&json!({"cni.dev/valid-attachments": []}));
    for call in [read_only("DEL", "c1"), nobody.call("GC", "").in_script(&script)] {
        let error = call.error();
        let lease = dir.join("net/10.0.0.2");
        let msg = format!("remove {}: read-only file system", lease.display());
        assert_eq!(error.brief(), (5, msg.as_str()));
    }
    assert_eq!(net.leases(), ["10.0.0.2"]);
    del(&net, "c1");
}

#[test]
fn concurrent_adds_get_different_addresses() {
    let node = Node::new();
    let net = one_set(&node, &["10.0.0.0/27"]);
    let calls: Vec<_> = (0..24).map(|n| net.call("ADD", &format!("c{n}")).netns("/x")).collect();
    let addresses: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = calls
            .iter()
            .map(|call| scope.spawn(|| call.result()["ips"][0]["address"].to_string()))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let different: std::collections::HashSet<_> = addresses.iter().collect();
    assert_eq!((different.len(), net.leases().len()), (24, 24), "{addresses:?}");
}

#[test]
fn leases_work_without_hard_links() {
    for errno in ["EPERM", "EOPNOTSUPP", "ENOSYS", "EXDEV"] {
        let node = Node::new();
        let net = one_set(&node, &["10.1.2.0/29"]);
        let add = |id: &str| {
            let call = net.call("ADD", id).netns("/x");
            strace::inject(&node, &call, &format!("linkat:error={errno}"))
        };
        for (id, ip) in [("c1", "10.1.2.2"), ("c2", "10.1.2.3")] {
            let (outcome, failed) = add(id);
            assert!(outcome.status == Some(0) && !failed.is_empty(), "{errno}: {outcome:?}");
            assert_eq!(file(&net, ip), format!("{id}\r\neth0"));
        }
        let (outcome, _) = add("c2");
        assert!(
            outcome.status == Some(1) && outcome.stdout.contains("duplicate allocation"),
            "{outcome:?}"
        );
        del(&net, "c1");
        del(&net, "c2");
        assert_eq!(net.leases(), [""; 0]);
    }
}
