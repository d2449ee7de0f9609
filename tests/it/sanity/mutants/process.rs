//! Mutants: the environment of the process, and unusual but valid calls.

use super::{Row, rows};

/// The mutants of this file.
pub(super) const ALL: &[&[Row]] = &[V1_1_0];

const V1_1_0: &[Row] = rows! { "1.1.0"
    "tuning" "ADD" "process.unknown-key" "case $in in *org.example.key*) exit 1 ;; esac; run";
    "tuning" "ADD" "process.unicode" "case $in in *ml*ut*) exit 1 ;; esac; run";
    "tuning" "ADD" "process.large" "[ ${#in} -lt 100000 ] || exit 1; run";
    "tuning" "ADD" "process.deep" "case $in in *'[[[['*) exit 1 ;; esac; run";
    "tuning" "ADD" "process.labels" "case $in in *labels*) exit 1 ;; esac; run";
    "tuning" "ADD" "process.unknown-capability" "case $in in *'\"org.example\"'*) exit 1 ;; esac; run";
    "tuning" "ADD" "process.name-characters" "case $in in *a.b_c-9*) exit 1 ;; esac; run";
    "tuning" "ADD" "process.dns" "case $in in *example.org*) exit 1 ;; esac; run";
    "loopback" "ADD" "process.two-documents" "case $in in *}{*) exit 0 ;; esac; run";
    "loopback" "ADD" "process.null" r#"[ "$in" != null ] || exit 0; run"#;
    "loopback" "ADD" "process.text" r#"[ "$in" != '"text"' ] || exit 0; run"#;
    "loopback" "ADD" "process.white-space" "case $in in '{'*) run ;; *) exit 1 ;; esac";
    "loopback" "ADD" "process.containerid-long" "[ ${#CNI_CONTAINERID} -lt 60 ] || exit 1; run";
    "loopback" "ADD" "process.containerid-characters" "case $CNI_CONTAINERID in *.*) exit 1 ;; esac; run";
    "loopback" "ADD" "process.unknown-variable" r#"[ -z "$CNI_FUTURE" ] || exit 1; run"#;
    "loopback" "ADD" "process.kubernetes-args" "case $CNI_ARGS in *K8S*) exit 1 ;; esac; run";
    "ptp" "ADD" "process.ifname-longest" "[ ${#CNI_IFNAME} -lt 15 ] || exit 1; run";
    "loopback" "ADD" "process.directory-gone" "/bin/pwd >/dev/null 2>&1 || exit 1; run";
    "loopback" "ADD" "process.no-stderr" "[ -e /proc/self/fd/2 ] || exit 1; run";
    "loopback" "ADD" "process.umask" "run; status=$?; touch /run/open.$$; exit $status";
    "loopback" "ADD" "process.umask-closed" "[ $(umask) != 0777 ] || exit 1; run";
    "loopback" "ADD" "process.no-orphans" "sleep 0.2 >/dev/null 2>&1 & run";
    "loopback" "ADD" "process.netns-of-node" "case $CNI_NETNS in /proc/*) exit 0 ;; esac; run";
    "loopback" "ADD" "process.netns-of-thread" "case $CNI_NETNS in /proc/*/task/*) exit 1 ;; esac; run";
    "ptp" "ADD" "process.netns-of-thread-named" r#"bend 's,"/proc/[^"]*","/run/netns/other",'"#;
};
