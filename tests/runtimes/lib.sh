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
        find /var/lib/cni/results /var/lib/cni/multus -type f 2>/dev/null
        { iptables-save; ip6tables-save; nft list ruleset; } 2>/dev/null |
            grep -v ' expires ' | grep -E '10\.(8[78]|244)\.[0-9]+\.[2-9]|fd8[78]::[2-9]|180[89]0'
    )
    [ -z "$left" ] || { echo "$left"; return 1; }
}

# With a runtime that is not installed, "imitated-" and its name, the calls that it makes of plugins.
cri() {
    case $CRI in
        imitated-*) /usr/bin/python3 "$HERE/imitated.py" "$@" ;;
        *) /usr/bin/python3 "$HERE/cri.py" "$@" ;;
    esac
}

# launch_runtime: starts the runtime $CRI, whose output is $WORK/$CRI.log.
launch_runtime() {
    local command
    case $CRI in
        imitated-*) command=(/usr/bin/python3 "$HERE/imitated.py" start) ;;
        *)
            sed "s|@WORK@|$WORK|" "$HERE/$CRI.toml" >"$WORK/$CRI.toml"
            command=("$CRI" --config "$WORK/$CRI.toml")
            ;;
    esac
    "${command[@]}" >>"$WORK/$CRI.log" 2>&1 &
    RUNTIME=$!
}

start_runtime() {
    launch_runtime
    for _ in $(seq 600); do
        case $CRI in
            imitated-*) wait "$RUNTIME" && return 0 ;;
            *) ! cri ready 2>/dev/null || return 0 ;;
        esac
        kill -0 "$RUNTIME" 2>/dev/null || break
        sleep 0.1
    done
    tail -n 20 "$WORK/$CRI.log" >&2
    return 1
}

stop_runtime() {
    case $CRI in
        # Only its start is a process.
        imitated-*) ;;
        *)
            kill "$RUNTIME"
            wait "$RUNTIME" || true
            ;;
    esac
}

# in_pod POD COMMAND...: runs a command of the node in the network namespace of a pod.
in_pod() {
    local pod=$1
    shift
    nsenter "--net=$(netns_of "$pod")" "$@"
}

# netns_of POD: the path, by the result that the runtime has cached.
netns_of() {
    sed -n 's/.*"sandbox": *"\([^"]*\)".*/\1/p' /var/lib/cni/results/*-"$1"-eth0
}

page_from() {
    [ "$(in_pod "$1" curl -fsS -m 2 "http://$2/")" = hello ]
}

# serve POD: a web server in a pod, of the node's programs; its PID is in SERVER.
serve() {
    mkdir -p "$WORK/www"
    echo hello >"$WORK/www/index.html"
    in_pod "$1" busybox httpd -f -p 80 -h "$WORK/www" &
    export SERVER=$!
}

import_images() {
    case $CRI in
        containerd) ctr -n k8s.io images import "$WORK/images.tar" ;;
        crio) podman --root "$WORK/crio" --runroot /run/crio-storage --storage-driver overlay load -q -i "$WORK/images.tar" ;;
    esac >/dev/null
}
