//! Routes with next hops of both networks, made by other programs or older versions: plugins find
//! their own next hops, and leave the others.

use serde_json::json;

use super::{DEFAULT, FIRST, NAMED, SECOND, World, network};
use crate::lane::{self, needs};
use crate::support::net::merged;

/// Makes the default routes of both networks one route in each family.
fn share(world: &World) {
    world.container.sh("ip route flush default; ip -6 route flush default
         ip route add default nexthop via 10.1.0.1 dev eth0 nexthop via 10.2.0.1 dev net1
         ip -6 route add default via fd01::1 dev eth0
         ip -6 route append default via fd02::1 dev net1");
    for to in DEFAULT {
        let shares = world.shares(to, None, None);
        assert!(shares[0] > 0 && shares[1] > 0, "{to}: {shares:?}");
    }
}

fn defaults(world: &World) -> [[usize; 2]; 2] {
    DEFAULT.map(|to| world.shares(to, None, None))
}

#[test]
fn sbr_moves_its_own_next_hops() {
    let world = World::new();
    let conf = network("macvlan", 2, &json!({}));
    let result = world.add_second(&conf);
    share(&world);
    world.check("net1", &conf, &result);
    world.check("eth0", &world.first.0, &world.first.1);
    let (conf, last) = world.chain(&result, &json!({"type": "sbr"}));
    assert_eq!(defaults(&world), [FIRST; 2]);
    for (to, from) in DEFAULT.into_iter().zip(super::ADDRESSES) {
        assert_eq!(world.shares(to, Some(from), None), SECOND, "{to}");
    }
    // As an older version left it.
    world.container.sh("ip -6 route append default via fd02::1 dev net1 onlink");
    let check = merged(&conf, &json!({"prevResult": last}));
    let msg = "sbr: the route of the main table to ::/0 has a next hop through net1";
    assert_eq!(world.call("CHECK", "net1", &check).error().brief(), (999, msg));
}

#[test]
fn route_override_deletes_its_own_next_hops() {
    let world = World::new();
    let result = world.add_second(&network("macvlan", 2, &json!({})));
    share(&world);
    let keys = json!({"type": "route-override", "flushgateway": true});
    let (conf, last) = world.chain(&result, &keys);
    assert_eq!(defaults(&world), [FIRST; 2]);
    world.container.sh("ip -6 route append default via fd02::1 dev net1 onlink");
    let check = merged(&conf, &json!({"prevResult": last}));
    let msg = "route-override: the container has the deleted route \"::/0 via fd02::1\"";
    assert_eq!(world.call("CHECK", "net1", &check).error().brief(), (999, msg));
}

#[test]
fn vrf_moves_its_own_next_hops() {
    needs!(lane::VRF);
    let world = World::new();
    let result = world.add_second(&network("macvlan", 2, &json!({})));
    share(&world);
    world.chain(&result, &json!({"type": "vrf", "vrfname": "red"}));
    assert_eq!(defaults(&world), [FIRST; 2]);
    for to in DEFAULT.into_iter().chain(NAMED) {
        assert_eq!(world.shares(to, None, Some("red")), SECOND, "{to}");
    }
}

/// The default routes of two interfaces in one VRF are two routes, too.
#[test]
fn two_interfaces_of_a_vrf_keep_their_routes() {
    needs!(lane::VRF);
    let world = World::new();
    let prev = &world.first.1;
    let vrf = json!({"cniVersion": "1.1.0", "name": "n1", "type": "vrf", "vrfname": "red",
        "prevResult": prev});
    world.call("ADD", "eth0", &vrf).result();
    let result = world.add_second(&network("macvlan", 2, &json!({})));
    let (conf, _) = world.chain(&result, &json!({"type": "vrf", "vrfname": "red"}));
    for to in DEFAULT.into_iter().chain(NAMED) {
        assert_eq!(world.shares(to, None, Some("red")), SECOND, "{to}");
    }
    world.call("CHECK", "eth0", &vrf).ok();
    world.call("DEL", "net1", &conf).ok();
    for to in DEFAULT.into_iter().chain(NAMED) {
        assert_eq!(world.shares(to, None, Some("red")), FIRST, "{to}");
    }
}
