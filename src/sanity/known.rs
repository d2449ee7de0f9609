//! Public threads in which what the suite finds in plugins of others is reported or discussed.

/// Type (empty: every type), assertion, and the thread: `OWNER/REPOSITORY#NUMBER` on GitHub.
const THREADS: &[(&str, &str, &str)] = &[
    ("", "error.cni-version", "containernetworking/cni#408"),
    ("", "gc.releases-stale", "containernetworking/plugins#1047"),
    ("", "delegation.ipam.gc", "containernetworking/plugins#1013"),
    ("", "delegation.ipam.gc-fails", "containernetworking/plugins#1013"),
    ("", "delegation.ipam.refuses-del", "containernetworking/cni#530"),
    ("", "delegation.ipam.unusable-del", "containernetworking/cni#530"),
    ("", "delegation.flannel.refuses-del", "containernetworking/cni#530"),
    ("", "delegation.ipam.dns", "containernetworking/plugins#733"),
    ("bridge", "del.netns-gone-leaves-nothing", "containernetworking/plugins#810"),
    ("ptp", "del.netns-gone-leaves-nothing", "containernetworking/plugins#810"),
    ("bridge", "add.ipam-missing-leaves-nothing", "containernetworking/plugins#29"),
    ("bridge", "delegation.ipam.leaves-nothing", "containernetworking/plugins#29"),
    ("ptp", "delegation.ipam.leaves-nothing", "containernetworking/plugins#97"),
    ("host-device", "del.twice", "containernetworking/plugins#773"),
    ("host-device", "del.never-added", "containernetworking/plugins#773"),
    ("host-device", "del.no-prev-result", "containernetworking/plugins#773"),
    ("loopback", "check.no-prev-result", "containernetworking/plugins#374"),
    ("sbr", "damage.sbr.rule", "containernetworking/plugins#297"),
    ("tap", "add.interface-exists", "containernetworking/cni#112"),
];

/// The thread about an assertion that fails for a type.
pub fn thread(kind: &str, id: &str) -> Option<&'static str> {
    let is_it =
        |(of, about, _): &&(&str, &str, &str)| *about == id && (of.is_empty() || *of == kind);
    THREADS.iter().find(is_it).map(|(_, _, thread)| *thread)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue;

    #[test]
    fn threads_are_about_assertions_that_exist() {
        for (_, id, thread) in THREADS {
            assert!(catalogue::find(id).is_some(), "{id}");
            let number = thread.rsplit_once('#').and_then(|(_, number)| number.parse::<u32>().ok());
            assert!(number.is_some(), "{thread}");
        }
    }
}
