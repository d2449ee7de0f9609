//! The filter is skipped: frames that pass an `ifb` device in the container keep a flag of the
//! device across the pair, and traffic control at the host's end passes them over. Only a container
//! with `CAP_NET_ADMIN` has such a device. The rules judge these frames as others.

use serde_json::json;

use super::ways::{Capture, Map, mac_of, udp, ways};
use super::{FAR, OUTSIDE, World};
use crate::hostile::{frame_socket, send_frame};
use crate::support::node::eventually;

/// A quarter of the frames that are redirected keeps the flag: those that a random number selects
/// once, not twice.
const IFB: [&str; 3] = [
    "ip link add ifb0 up type ifb",
    "tc qdisc add dev eth0 clsact",
    "tc filter add dev eth0 egress protocol all prio 1 bpf \
     bytecode '4,32 0 0 4294963256,69 0 1 1,6 0 0 1,6 0 0 0' \
     action mirred egress redirect dev ifb0",
];

/// How often each frame is sent.
const TIMES: usize = 24;

#[test]
fn the_rules_judge_what_skips_the_filter() {
    for kind in ["bridge", "ptp"] {
        let world = World::new(kind, &json!({"profile": "sandbox", "serve": ["tcp/80", "udp/53"]}));
        assert!(world.reaches(&world.outside, FAR[0], 9), "{kind}: resolved");
        let (map, socket) = (Map::of(&world), frame_socket(&world.inside));
        for line in IFB {
            world.inside.sh(line);
        }
        let [outside, neighbour] = [&world.outside, &world.neighbour].map(Capture::at);
        let mut frames = ways(&map);
        frames.push(("private", vec![map.v4(OUTSIDE[0], 17, &udp(5, 5)); 10]));
        let send_all = || {
            for (_, frames) in &frames {
                for frame in frames.iter().flat_map(|frame| vec![frame; TIMES]) {
                    socket.send(frame).unwrap();
                }
            }
        };
        send_all();
        let own = mac_of(&world.outside);
        let arrived = || {
            let (mut controls, mut others) = (0, neighbour.marked());
            // The device sends its frames later: half of these follow them.
            eventually("what is allowed does not arrive", || {
                send_frame(&world.inside, &map.v4(FAR[0], 17, &udp(7, 7)));
                // ICMP errors of the host outside contain the mark, too.
                for frame in outside.frames().iter().filter(|frame| frame[6..12] != own) {
                    let is_control = frame[34..38] == [0, 7, 0, 7];
                    controls += usize::from(is_control);
                    others += usize::from(!is_control);
                }
                controls >= TIMES
            });
            others + neighbour.marked()
        };
        assert_eq!(arrived(), 0, "{kind}");
        // The limit that the page states. It shows that frames skip the filter.
        world.node.sh("nft flush ruleset");
        send_all();
        assert!(arrived() > 0, "{kind}: the filter judges frames with the flag: correct the page");
    }
}
