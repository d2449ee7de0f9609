# shellcheck shell=bash
# Functions of the scenarios; sourced on a node.
set -u
# Exit status of the scenarios.
export failed=0
export CRI=${CRI:-containerd}

# check NAME COMMAND...: reports whether the command succeeds.
check() {
    local what=$1 output
    shift
    if output=$("$@" 2>&1); then
        echo "  ok    $what"
    else
        echo "  FAIL  $what: $*: $output"
        failed=1
    fi
}

# Retries a command: the first packets may be lost until addresses are resolved.
again() {
    for _ in 1 2 3 4 5 6; do
        "$@" && return
        sleep 1
    done
    return 1
}

no() {
    ! "$@"
}

page() {
    [ "$(curl -fsS -m 5 "http://$1/")" = hello ]
}

# The same from another host.
page_outside() {
    [ "$(ip netns exec outside curl -fsS -m 5 "http://$1/")" = hello ]
}

# Prints leftovers of deleted containers: links, leases, cached results, rules with their addresses.
nothing_left() {
    local left
    left=$(
        # The links by which egress counts what it refuses stay, and the flows that it has recorded, until they expire.
        ip -br link show type veth | grep -Ev '^(eth0|cnibox-(refused|dropped))@'
        find /var/lib/cni/networks -name '[0-9f]*[.:]*'
        find /var/lib/cni/results -type f 2>/dev/null
        { iptables-save; ip6tables-save; nft list ruleset; } 2>/dev/null |
            grep -v ' expires ' | grep -E '10\.(8[78]|244)\.[0-9]+\.[2-9]|fd8[78]::[2-9]|180[89]0'
    )
    [ -z "$left" ] || { echo "$left"; return 1; }
}

cri() {
    /usr/bin/python3 "$HERE/cri.py" "$@"
}

# Starts the runtime $CRI, containerd or crio.
start_runtime() {
    sed "s|@WORK@|$WORK|" "$HERE/$CRI.toml" >"$WORK/$CRI.toml"
    "$CRI" --config "$WORK/$CRI.toml" >>"$WORK/$CRI.log" 2>&1 &
    RUNTIME=$!
    for _ in $(seq 600); do
        ! cri ready 2>/dev/null || return 0
        kill -0 "$RUNTIME" || break
        sleep 0.1
    done
    tail -n 20 "$WORK/$CRI.log" >&2
    return 1
}

stop_runtime() {
    kill "$RUNTIME"
    wait "$RUNTIME" || true
}

import_images() {
    case $CRI in
        containerd) ctr -n k8s.io images import "$WORK/images.tar" ;;
        crio) podman --root "$WORK/crio" --runroot /run/crio-storage --storage-driver overlay load -q -i "$WORK/images.tar" ;;
    esac >/dev/null
}
