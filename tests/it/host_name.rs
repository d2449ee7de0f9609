//! The key `hostInterfaceName` of bridge and ptp: the host's end has a name of the operator's
//! choice.

use serde_json::{Value, json};

use crate::support::net::{Net, settles};
use crate::support::node::{Container, Node};
use crate::support::traffic::Place;

const PLUGINS: [&str; 2] = ["bridge", "ptp"];

fn net<'n>(node: &'n Node, plugin: &'static str, template: &str) -> Net<'n> {
    let ipam = node.host_local(&["10.1.2.0/24"]);
    let keys =
        json!({"bridge": "br0", "isGateway": true, "ipam": ipam, "hostInterfaceName": template});
    Net::new(node, plugin, "1.1.0", &keys)
}

/// The names of the host's ends of pairs.
fn ends(node: &Node) -> Vec<String> {
    let links = node.ip("link show type veth");
    let names = links.as_array().unwrap().iter();
    names.map(|link| link["ifname"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn the_name_has_the_values_of_its_variables() {
    for plugin in PLUGINS {
        let long = "a-deployment-7d4b9c-x2x4z";
        for (template, pod, expected) in [
            ("web0", "web", "web0"),
            ("v-{{pod}}", "web", "v-web"),
            ("{{network}}.{{ifname}}", "web", "net.eth0"),
            ("{{namespace}}{{container}}", "web", "shopc1"),
        ] {
            let (node, container) = (Node::new(), Container::new());
            let before = node.snapshot();
            let net = net(&node, plugin, template);
            let args = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME={pod}");
            let result = net.on("ADD", &container).env("CNI_ARGS", &args).result();
            assert_eq!(ends(&node), [expected], "{plugin} {template}");
            let names = result["interfaces"].as_array().unwrap().iter().map(|i| &i["name"]);
            assert!(names.into_iter().any(|name| name == expected), "{result}");
            assert!(container.reaches("10.1.2.1"));
            net.check(&container, &result).ok();
            net.del(&container);
            node.sh("ip link del br0 2>/dev/null; true");
            settles(&before, || node.snapshot());
        }
        let (node, one, two) = (Node::new(), Container::new(), Container::new());
        let net = net(&node, plugin, "v-{{pod}}");
        for (id, container, pod) in [("c1", &one, long), ("c2", &two, &format!("{long}2"))] {
            let args = format!("IgnoreUnknown=1;K8S_POD_NAME={pod}");
            net.call("ADD", id).netns(&container.path()).env("CNI_ARGS", &args).result();
        }
        let names = ends(&node);
        assert!(
            names.iter().all(|name| name.starts_with("v-a-depl-") && name.len() == 15),
            "{names:?}"
        );
        assert!(names.len() == 2 && names[0] != names[1], "{names:?}");
    }
}

#[test]
fn del_and_gc_find_the_pair() {
    for plugin in PLUGINS {
        for way in ["prevResult", "netns", "label", "GC"] {
            let (node, container) = (Node::new(), Container::new());
            let net = net(&node, plugin, "web0");
            let result = net.add(&container);
            match way {
                "prevResult" => {
                    net.with(&json!({"prevResult": result})).call("DEL", "c1").ok();
                }
                "netns" => net.del(&container),
                "label" => net.call("DEL", "c1").without("CNI_NETNS").ok(),
                _ => {
                    let nobody = json!({"cni.dev/valid-attachments": []});
                    net.with(&nobody).call("GC", "").without("CNI_CONTAINERID").ok();
                }
            }
            assert_eq!((ends(&node), net.leases()), (vec![], vec![]), "{plugin} {way}");
            net.add(&container);
        }
    }
}

#[test]
fn a_wrong_or_taken_name_is_refused() {
    for plugin in PLUGINS {
        let (node, one, two) = (Node::new(), Container::new(), Container::new());
        for (template, code, msg) in [
            ("{{port}}", 7, "hostInterfaceName \"{{port}}\" has an unknown variable"),
            (
                "a/b",
                4,
                "hostInterfaceName \"a/b\": interface name contains / or : or whitespace characters",
            ),
        ] {
            let error = net(&node, plugin, template).on("ADD", &one).error();
            assert_eq!((error.brief(), ends(&node)), ((code, msg), vec![]));
        }
        let net = net(&node, plugin, "web0");
        let result = net.add(&one);
        let error = net.call("ADD", "c2").netns(&two.path()).error();
        assert_eq!(error.brief(), (999, "the host has an interface \"web0\" already"));
        assert_eq!((ends(&node), net.leases()), (vec!["web0".into()], vec!["10.1.2.2".into()]));
        net.check(&one, &result).ok();
        let again: Value = net.on("ADD", &one).error().details.into();
        assert!(
            again.as_str().unwrap().contains("DEL"),
            "the container's name is told first: {again}"
        );
    }
}
