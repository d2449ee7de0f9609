//! Public threads that report or discuss failures of other projects' plugins.

/// Type (empty: every other type), assertion id, and thread as `OWNER/REPOSITORY#NUMBER` on GitHub.
const THREADS: &[(&str, &str, &str)] = &[
    ("", "error.cni-version", "containernetworking/cni#408"),
    ("bridge", "gc.releases-stale", "containernetworking/plugins#1013"),
    ("ptp", "gc.releases-stale", "containernetworking/plugins#1014"),
    ("", "gc.releases-stale", "containernetworking/plugins#1047"),
    ("ptp", "delegation.ipam.gc", "containernetworking/plugins#1014"),
    ("", "delegation.ipam.gc", "containernetworking/plugins#1013"),
    ("ptp", "delegation.ipam.gc-fails", "containernetworking/plugins#1014"),
    ("", "delegation.ipam.gc-fails", "containernetworking/plugins#1013"),
    ("", "delegation.ipam.refuses-del", "containernetworking/cni#530"),
    ("", "delegation.flannel.refuses-del", "containernetworking/cni#530"),
    ("", "delegation.ipam.dns", "containernetworking/plugins#733"),
    ("bridge", "add.ipam-missing-leaves-nothing", "containernetworking/plugins#29"),
    ("bridge", "delegation.ipam.leaves-nothing", "containernetworking/plugins#29"),
    ("ptp", "delegation.ipam.leaves-nothing", "containernetworking/plugins#97"),
    ("bridge", "del.second-interface", "containernetworking/plugins#151"),
    ("", "del.netns-gone-leaves-nothing", "containernetworking/plugins#810"),
    ("host-device", "del.twice", "containernetworking/plugins#766"),
    ("host-device", "del.never-added", "containernetworking/plugins#766"),
    ("host-device", "del.no-prev-result", "containernetworking/plugins#766"),
    ("host-device", "del.netns-gone", "containernetworking/plugins#1196"),
    ("host-device", "del.netns-gone-twice", "containernetworking/plugins#1196"),
    ("host-device", "del.no-netns-releases", "containernetworking/plugins#1196"),
    ("host-device", "delegation.ipam.del-no-netns", "containernetworking/plugins#1196"),
    ("portmap", "check.succeeds", "containernetworking/plugins#819"),
    ("portmap", "check.silent", "containernetworking/plugins#819"),
    ("sbr", "chained.add-after-del", "containernetworking/plugins#212"),
    ("sbr", "conf.prev-result-garbage", "containernetworking/plugins#297"),
    ("sbr", "damage.sbr.rule", "containernetworking/plugins#297"),
    ("tap", "add.interface-exists", "containernetworking/cni#112"),
];

/// The thread about a failure of a type.
pub fn thread(kind: &str, id: &str) -> Option<&'static str> {
    let mut threads = THREADS.iter().filter(|(of, _, _)| of.is_empty() || *of == kind);
    threads.find(|(_, about, _)| *about == id).map(|(_, _, thread)| *thread)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue;

    #[test]
    fn known_issues_name_existing_assertions() {
        for (_, id, thread) in THREADS {
            assert!(catalogue::find(id).is_some(), "{id}");
            let number = thread.rsplit_once('#').and_then(|(_, number)| number.parse::<u32>().ok());
            assert!(number.is_some(), "{thread}");
        }
    }
}
