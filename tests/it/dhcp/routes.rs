//! Routes of the configuration beside those of the server, and those that were not requested.

use serde_json::{Value, json};

use super::fake::{ACK, DISCOVER, Fake, NAK, OFFER, REQUEST};
use super::world::{World, addresses};
use crate::support::node::{Container, eventually};

const FIVE: [u8; 4] = [192, 168, 1, 5];
const SIX: [u8; 4] = [192, 168, 1, 6];
/// Options of the DHCPACK, whatever was requested: router, MTU, and domain.
const UNASKED: [(u8, &[u8]); 3] = [(3, &[192, 168, 1, 1]), (26, &[5, 0x14]), (15, b"example.com")];

fn routes(container: &Container) -> String {
    container.sh("ip route; ip route show table 77 2>/dev/null || true")
}

/// A server that refuses the first lease, and then grants another address.
fn moving() -> Fake {
    Fake::start(|seen, earlier| match seen.kind() {
        DISCOVER => vec![seen.answer(OFFER, if earlier == 0 { FIVE } else { SIX }, &UNASKED)],
        REQUEST if seen.ciaddr().octets() == FIVE => vec![seen.answer(NAK, [0; 4], &[])],
        REQUEST if seen.option(50) == Some(&FIVE) => vec![seen.answer(ACK, FIVE, &UNASKED)],
        REQUEST => vec![seen.answer(ACK, SIX, &UNASKED)],
        _ => vec![],
    })
}

#[test]
fn configured_routes_are_added_to_those_of_the_server() {
    let world = World::new();
    let _server =
        world.dnsmasq(9, &["--dhcp-option=121,10.8.0.0/16,192.168.1.2,10.9.0.0/16,192.168.1.2"]);
    let _daemon = world.daemon(&[]);
    let keys = json!({"request": [{"option": "121"}], "priority": 50, "routes": [
        {"dst": "10.9.0.0/16", "gw": "192.168.1.3", "mtu": 1300},
        {"dst": "10.7.0.0/16", "priority": 9}, {"dst": "10.6.0.0/16", "table": 77, "scope": 253}]});
    let net = world.net("1.1.0").with(&json!({"ipam": world.ipam(&keys)}));
    let container = Container::new();
    let result = net.add(&container);
    let expected = json!([{"dst": "10.8.0.0/16", "gw": "192.168.1.2", "priority": 50},
        {"dst": "10.9.0.0/16", "gw": "192.168.1.3", "mtu": 1300, "priority": 50},
        {"dst": "10.7.0.0/16", "priority": 9},
        {"dst": "10.6.0.0/16", "table": 77, "scope": 253, "priority": 50}]);
    assert_eq!(result["routes"], expected);
    net.check(&container, &result).ok();
    net.del(&container);
}

#[test]
fn configured_routes_are_set_again_with_the_next_address() {
    let world = World::new();
    let _server = moving();
    let _daemon = world.daemon(&["-timeout", "500ms", "-resendmax", "1s"]);
    let keys = json!({"routes": [{"dst": "10.9.0.0/16", "gw": "192.168.1.3", "mtu": 1200},
        {"dst": "10.7.0.0/16"}, {"dst": "10.6.0.0/16", "table": 77, "scope": 253}]});
    let conf = json!({"ipam": world.ipam(&keys), "defaultRoute": false});
    let net = world.net("1.1.0").with(&conf);
    let container = Container::new();
    net.add(&container);
    let expected = routes(&container).replace("src 192.168.1.5", "src 192.168.1.6");
    for route in [
        "10.9.0.0/16 via 192.168.1.3 dev eth0 mtu 1200",
        "10.7.0.0/16 via 192.168.1.1 dev eth0",
        "10.6.0.0/16 dev eth0 scope link",
    ] {
        assert!(expected.contains(route), "{route}: {expected}");
    }
    assert!(!expected.contains("default"), "{expected}");
    eventually("no other address", || addresses(&container) == ["192.168.1.6/24"]);
    eventually("other routes", || routes(&container) == expected);
    net.del(&container);
}

#[test]
fn options_that_were_not_requested_are_not_used() {
    let world = World::new();
    let _server = moving();
    let _daemon = world.daemon(&["-timeout", "500ms", "-resendmax", "1s"]);
    let keys = json!({"request": [{"skipDefault": true, "option": "subnet-mask"}]});
    let net = world.net("1.1.0").with(&json!({"ipam": world.ipam(&keys)}));
    let container = Container::new();
    let result = net.add(&container);
    assert_eq!((&result["routes"], &result["dns"]), (&Value::Null, &Value::Null), "{result}");
    assert_eq!(result["ips"][0]["gateway"], Value::Null);
    let before = routes(&container).replace("src 192.168.1.5", "src 192.168.1.6");
    assert!(!before.contains("default"), "{before}");
    eventually("no other address", || addresses(&container) == ["192.168.1.6/24"]);
    eventually("other routes", || routes(&container) == before);
    net.del(&container);
}
