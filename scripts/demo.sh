#!/bin/sh
# demo.sh BIN: two containers on one bridge, in private namespaces: attach, inspect, ping, check,
# detach, and verify that nothing is left. Exit status 0 only if all steps succeeded.
# demo.sh --check: only checks whether the namespaces can be created.
set -eu

fail() {
    echo "demo: $*" >&2
    exit 1
}

PATH=$PATH:/usr/sbin:/sbin
[ $# -eq 1 ] || fail "usage: scripts/demo.sh <the cnibox executable>"
bin=--check
[ "$1" = --check ] || bin=$(readlink -f "$1") || bin=
[ "$1" = --check ] || [ -x "$bin" ] || fail "\"$1\": not an executable; run make demo"
run=$(readlink -f /var/run)

# --- in the caller's namespaces: start again in new ones ------------------------------------------------------

if [ "${CNIBOX_DEMO_INSIDE-}" != yes ]; then
    for program in ip ping unshare nsenter; do
        command -v "$program" >/dev/null || fail "needs $program: run scripts/prepare.sh demo"
    done
    case $bin in "$run"/*) fail "\"$bin\": move it to another directory, the demo mounts a tmpfs over $run" ;; esac
    set -- unshare --net --mount
    if ! first=$("$@" true 2>&1); then
        set -- unshare --user --map-root-user --net --mount
        why=$("$@" true 2>&1) || fail "needs root (in a container: a privileged one), or user namespaces
demo: as $(id -un): $first
demo: in a user namespace: $why
demo: allow them: sysctl kernel.unprivileged_userns_clone=1 (Debian)
demo:             sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu)"
    fi
    [ "$bin" != --check ] || exit 0
    # All network namespaces share the size limit of the IPv6 neighbour table. After hundreds of links
    # have come up elsewhere it is full, and no address can be resolved: wait until entries expire.
    neighbours=/proc/net/stat/ndisc_cache
    for _ in $([ ! -r $neighbours ] || seq 60); do
        [ $((0x$(sed -n '2s/ .*//p' $neighbours))) -gt 400 ] || break
        sleep 1
    done
    # The kernel removes mounts and namespaces with the last process, so no cleanup is needed.
    CNIBOX_DEMO_INSIDE=yes exec "$@" sh "$0" "$bin"
fi

# --- in the new namespaces ----------------------------------------------------------------------------------------

mount -t tmpfs tmpfs "$run" || fail "no tmpfs over $run"
ip link set lo up
dir=$run/demo
mkdir -p "$dir/bin" "$dir/net.d" "$dir/cache"
containers="blue green"

bold='' plain=''
if [ -t 1 ] && [ -z "${NO_COLOR-}" ] && [ "${TERM-dumb}" != dumb ]; then
    bold=$(printf '\033[1m') plain=$(printf '\033[0m')
fi

step() {
    printf '%s%-33s%s %s\n' "$bold" "$1" "$plain" "$2"
}

now() {
    date +%s%N
}

# Runs cnitool; $ms is the duration in milliseconds.
tool() {
    start=$(now)
    "$dir/bin/cnitool" --cache-dir "$dir/cache" "$@" || fail "cnitool $*: exit status $?"
    took=$((($(now) - start) / 10000))
    ms=$((took / 100)).$(printf %02d $((took % 100)))
}

# Prints the addresses in a result of ADD.
addresses() {
    sed -n 's/^ *"address": "\([^"]*\)".*/\1/p' "$1"
}

# Prints the kernel's addresses of eth0, without link-local ones.
in_kernel() {
    ip -n "$1" -br addr show dev eth0 | tr -s ' ' '\n' | sed -n '3,${/^fe80:/d;p;}'
}

# Prints the host end of a container's veth pair: the link with the index in eth0@if<index>.
host_end() {
    number=$(ip -n "$1" -br link show dev eth0 | sed -n 's/^eth0@if\([0-9]*\).*/\1/p')
    ip -o link show | sed -n "s/^$number: \([^@:]*\).*/\1/p"
}

# Prints what DEL must delete: veth pairs, leases, cached results.
leftovers() {
    ip -o link show type veth | sed 's/^/link /'
    for container in $containers; do
        ip -n "$container" -o link show | sed -n "/: lo:/!s/^/$container /p"
    done
    find "$dir/leases/demo" -maxdepth 1 -type f -name '*[.:]*' ! -name 'last_reserved_ip.*'
    find "$dir/cache" -type f
}

step "private namespaces" "own network and mounts, a tmpfs on $run; nothing outside changes"

for name in bridge host-local loopback cnitool; do
    ln -s "$bin" "$dir/bin/$name"
done
step "a plugin directory" "bridge host-local loopback cnitool, each a link to ${bin##*/}"

ranges='[{"subnet": "10.88.0.0/24"}]'
versions="4 6"
if [ -e /proc/sys/net/ipv6/conf/all/disable_ipv6 ]; then
    ranges="$ranges, [{\"subnet\": \"fd00:88::/64\"}]"
else
    versions=4
fi
cat >"$dir/net.d/10-demo.conflist" <<END
{"cniVersion": "1.1.0", "name": "demo", "plugins": [
  {"type": "bridge", "bridge": "demo0", "isDefaultGateway": true,
   "ipam": {"type": "host-local", "dataDir": "$dir/leases",
            "ranges": [$ranges]}}]}
END
step "a network, 10-demo.conflist" "a bridge with IPAM, which is the containers' default gateway"
sed 's/^/    /' "$dir/net.d/10-demo.conflist"

for container in $containers; do
    ip netns add "$container"
done
step "two containers" "ip netns add, once for each of: $containers"

export NETCONFPATH="$dir/net.d" CNI_PATH="$dir/bin"
for container in $containers; do
    tool add demo "$run/netns/$container" >"$dir/$container.json"
    got=$(addresses "$dir/$container.json")
    [ -n "$got" ] || fail "no address for $container: $(cat "$dir/$container.json")"
    [ "$got" = "$(in_kernel "$container")" ] ||
        fail "$container: the result has $got, the kernel has $(in_kernel "$container")"
    step "cnitool add demo .../$container" "$(echo "$got" | tr '\n' ' ') in $ms ms"
done

# Prints lines of the diagram: one cell for each container.
cells() {
    printf "    %-24s %s\n" "$@"
}

blue4=$(addresses "$dir/blue.json" | sed -n 1p) blue6=$(addresses "$dir/blue.json" | sed -n 2p)
green4=$(addresses "$dir/green.json" | sed -n 1p) green6=$(addresses "$dir/green.json" | sed -n 2p)
gateways=$(ip -br addr show dev demo0 | tr -s ' ' '\n' | sed -n '3,${/^fe80:/d;p;}' | paste -sd ' ')
ports=$(ip -br link show master demo0 | wc -l)
[ "$ports" = 2 ] || fail "the bridge has $ports ports"
blue_end=$(host_end blue) green_end=$(host_end green)
[ -n "$blue_end" ] || fail "no host end of blue's eth0"
[ -n "$green_end" ] || fail "no host end of green's eth0"
echo
cells "[ blue ]" "[ green ]"
cells "$blue4" "$green4"
[ -z "$blue6" ] || cells "$blue6" "$green6"
cells "eth0" "eth0"
cells " |" " |"
cells "$blue_end" "$green_end"
cells " |" " |"
echo "    =+=== demo0 ==============+=================="
echo "        $gateways"
echo

# ping_from CONTAINER RESULT-OF-THE-OTHER
ping_from() {
    for version in $versions; do
        line=1
        [ "$version" = 4 ] || line=2
        target=$(addresses "$2" | sed -n "${line}s,/.*,,p")
        nsenter --net="$run/netns/$1" ping -n -c 1 -W 5 "$target" >"$dir/ping" ||
            fail "$1 cannot reach $target (when IPv6 only: is the neighbour table of the kernel full?
demo: dmesg, sysctl net.ipv6.neigh.default.gc_thresh3): $(cat "$dir/ping")"
        printf '%s in %s  ' "$target" "$(sed -n 's/.*time=//p' "$dir/ping")"
    done
}
there=$(ping_from blue "$dir/green.json")
step "ping from blue to green" "$there"
back=$(ping_from green "$dir/blue.json")
step "ping from green to blue" "$back"

for container in $containers; do
    tool check demo "$run/netns/$container"
done
step "cnitool check demo ..." "both attachments are unchanged"

for container in $containers; do
    tool del demo "$run/netns/$container"
    step "cnitool del demo .../$container" "in $ms ms"
done
tool gc demo --keep-none
step "cnitool gc demo --keep-none" "would remove leftovers of a crash"

left=$(leftovers)
[ -z "$left" ] || fail "left behind:
$left"
step "leftovers" "no links, leases or cached results; the bridge remains"
for container in $containers; do
    ip netns del "$container"
done
