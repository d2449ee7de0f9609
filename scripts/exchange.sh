#!/bin/bash
# exchange.sh write|read BINARY DISK: state files of one machine on another, of another architecture. DISK is a device,
# or its image, with ext4: the journal of leases needs inode numbers and times to the nanosecond as they were.
#
# write: attaches two containers, and leaves on the disk what cnibox keeps of them: leases with their journal, records,
# backups, the runtimes' cache. read: the same node, without the rules and routes, takes them over: leases are kept,
# "repair" restores the packet filter from the records, DEL restores the device and deletes the rest.
# Everything happens in private namespaces. Exit status 0 only if what was read is what was written.
set -euo pipefail
what=$1 binary=$(readlink -f "$2") disk=$(readlink -f "$3") plugins=/run/plugins state=/run/state

fail() {
    echo "exchange: $what on $(uname -m): $*" >&2
    exit 1
}

if [ "${4-}" != inside ]; then
    exec unshare -m -n bash "$0" "$what" "$binary" "$disk" inside
fi

# --- the node --------------------------------------------------------------------------------------------------

# The disk has the directories of state, and one boot id for both machines: in another boot the containers would have
# ended.
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
mkdir -p /run/cni /run/net.d "$state" /var/lib/cni
modprobe -aq virtio_blk ext4 || true
mount -t ext4 "$disk" "$state"
[ "$what" != write ] || rm -rf "${state:?}"/*
mkdir -p "$state"/{run,lib,seen}
[ -e "$state/boot" ] || cat /proc/sys/kernel/random/boot_id >"$state/boot"
mount --bind "$state/boot" /proc/sys/kernel/random/boot_id
mount --bind "$state/run" /run/cni
mount --bind "$state/lib" /var/lib/cni
"$binary" install --no-backup "$plugins" >/dev/null

# Of the three addresses of each family one is held back, and two are free.
cat >/run/net.d/pods.conflist <<END
{"cniVersion": "1.1.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isDefaultGateway": true, "ipMasq": true, "ipMasqBackend": "nftables",
   "ipam": {"type": "host-local", "reuseDelay": 36000, "ranges": [
     [{"subnet": "10.1.2.0/24", "rangeStart": "10.1.2.130", "rangeEnd": "10.1.2.132"}],
     [{"subnet": "fd00:1:2::/64", "rangeStart": "fd00:1:2::ab02", "rangeEnd": "fd00:1:2::ab04"}]]}},
  {"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": true}},
  {"type": "firewall", "backend": "nftables", "ingressPolicy": "same-bridge"},
  {"type": "egress", "allow": [{"to": ["192.0.2.0/23"], "ports": ["tcp/258-4097"]}]}]}
END
cat >/run/net.d/device.conflist <<END
{"cniVersion": "1.1.0", "name": "device", "plugins": [
  {"type": "host-device", "device": "hd0", "ipam": {"type": "static",
    "addresses": [{"address": "10.3.4.5/22"}],
    "routes": [{"dst": "203.0.113.0/24", "gw": "10.3.4.1", "priority": 258}]}},
  {"type": "tuning", "mtu": 1301, "txQLen": 771, "mac": "02:00:00:01:02:03"},
  {"type": "route-override", "delroutes": [{"dst": "203.0.113.0/24", "priority": 258}]}]}
END
export NETCONFPATH=/run/net.d CNI_PATH=$plugins
export CAP_ARGS='{"portMappings": [{"hostPort": 8081, "containerPort": 258, "protocol": "tcp"}]}'

tool() {
    "$plugins/cnitool" --container-id "$3" "$1" "$2" "/run/netns/$3" >/run/result || fail "cnitool $*"
}

# The device on the host; the kernel's numbers of links are part of its record.
make_device() {
    ip link add hd0 index 501 address 02:00:00:0a:0b:0c mtu 1402 txqlen 1026 type veth peer name hd1 index 502
}

# attributes ARGUMENT...: the attributes of a link, given arguments of ip.
attributes() {
    ip -o "$@" | sed 's/.* mtu \([0-9]*\).* qlen \([0-9]*\).*link.ether \([^ ]*\).*/mtu \1 qlen \2 mac \3/'
}

# The device on the host.
device() {
    attributes link show hd0
    ip -o addr show hd0 scope global | sed 's/.*inet/inet/; s/\\.*//'
    ip route show dev hd0 proto static
}

# The rules, each element of a set on a line of its own: sets have no order.
rules() {
    nft -s -y list ruleset |
        sed 's/ comment "[^"]*"//g; s/elements = { //; s/^[[:space:]]*//; s/[ ,}]*$//; s/, /\n/g' | sort
}

# The leases without the state of their containers, which is another one here.
leases() {
    "$plugins/ipam" ls --json | grep -E '"(network|address|container|interface)"'
}

# del PLUGIN: DEL of one plugin for the device.
del() {
    echo "{\"cniVersion\": \"1.1.0\", \"name\": \"device\", \"type\": \"$1\"}" |
        CNI_COMMAND=DEL CNI_CONTAINERID=c2 CNI_NETNS=/run/netns/c2 CNI_IFNAME=eth0 "$plugins/$1"
}

ip link set lo up
ip link add cni0 address 02:00:00:0d:0e:0f type bridge
for container in c0 c1 c2 c3 c4; do
    ip netns add "$container"
done
make_device

# --- write -----------------------------------------------------------------------------------------------------

write() {
    ip link set hd1 up
    ip addr add 192.0.2.129/25 dev hd0
    ip link set hd0 up
    ip route add 198.51.100.0/24 via 192.0.2.130 metric 4660 proto static
    device >"$state/seen/device"
    tool add pods c0
    tool del pods c0
    tool add pods c1
    tool add device c2
    rules >"$state/seen/rules"
    leases >"$state/seen/leases"
    # Index, name, MAC and label of the host's end; the other end, as commands for "ip -batch".
    ip -o link show type veth |
        sed -n 's/^\([0-9]*\): \([^@]*\)@.*link.ether \([^ ]*\).*\\    alias \(.*\)/\1 \2 \3 \4/p' >"$state/seen/link"
    [ "$(wc -l <"$state/seen/link")" = 1 ] || fail "not one labelled link"
    ip -n c1 -o link show eth0 | sed 's/.*ether \([^ ]*\).*/link set eth0 up address \1/' >"$state/seen/container"
    ip -n c1 -o addr show eth0 scope global |
        sed 's/.*inet6* \([^ ]*\).*/addr add \1 dev eth0/' >>"$state/seen/container"
}

# --- read ------------------------------------------------------------------------------------------------------

# same NAME: what the function NAME prints is what was written.
same() {
    "$1" | diff "$state/seen/$1" - >&2 || fail "other $1 than those that were written: < written, > read"
}

# The number of the host's namespace in the record of a container.
host_of() {
    grep -h "\"id\":\"$1\"" /run/cni/cnibox/attachments/*.json | grep -o '"host":[0-9]\+' | cut -d: -f2
}

# The kernel's numbers of namespaces are the only part of the records that cannot be the same on two machines.
adopt() {
    local theirs ours
    theirs=$(host_of c1) ours=$(host_of c3)
    sed -i "s/\"host\":$theirs,/\"host\":$ours,/; s/\"end\":{\"netns\":$theirs,/\"end\":{\"netns\":$ours,/" \
        /run/cni/cnibox/attachments/*.json
    sed -i "s/\"netnsId\":{[^}]*}/\"netnsId\":{$(stat -c '"dev":%d,"ino":%i,"ctime":%.9Z' /run/netns/c2 | tr -d .)}/" \
        /run/cni/host-device/device/*.json
    sed -i 's/"netns":[0-9]*/"netns":null/' /run/cni/route-override/*.json
}

read_all() {
    local journal=/var/lib/cni/networks/pods/.cnibox/leases inode index name mac label address

    # The container lives on: where its link is missing it has ended, if both machines have the same number for the
    # namespace of the host.
    read -r index name mac label <"$state/seen/link"
    ip link add "$name" index "$index" address "$mac" type veth peer name eth0 netns c1
    ip link set "$name" alias "$label" up
    ip -n c1 -batch "$state/seen/container"

    # Leases and journal: the free address is given out, then none: c1 has the second one, and the third is held back.
    same leases
    inode=$(stat -c %i "$journal")
    # c1 has the port; its mappings come from the cache.
    unset CAP_ARGS
    tool add pods c3
    for address in 10.1.2.132/24 fd00:1:2::ab04/64; do
        grep -q "\"$address\"" /run/result || fail "c3 did not get $address: $(cat /run/result)"
    done
    ! "$plugins/cnitool" --container-id c4 add pods /run/netns/c4 &>/run/result || fail "c4 got an address of another"
    grep -q "10.1.2.130" /run/result || fail "no word of the address that is held back: $(cat /run/result)"
    [ "$inode" = "$(stat -c %i "$journal")" ] || fail "the journal was written anew"
    adopt
    tool del pods c3

    # Records of rules, and the runtimes' cache: the same rules for the same container, after a flush.
    nft flush ruleset
    "$plugins/cnibox" repair >/run/result || fail "repair: $(cat /run/result)"
    same rules
    tool check pods c1
    tool del pods c1
    ! rules | grep -e 10.1.2.131 -e "$name" >&2 || fail "rules are left"

    # Records of devices, and backups.
    ip link set hd0 netns c2 name eth0 alias hd0 mtu 1301 txqueuelen 771 address 02:00:00:01:02:03
    ip link set hd1 up
    ip -n c2 addr add 10.3.4.5/22 dev eth0
    ip -n c2 link set eth0 up
    del route-override
    ip -n c2 route | grep -q '203.0.113.0/24 via 10.3.4.1 dev eth0.* metric 258' ||
        fail "the route is not restored: $(ip -n c2 route)"
    del tuning
    attributes -n c2 link show eth0 | diff <(sed -n 1p "$state/seen/device") - >&2 || fail "tuning restored others"
    tool del device c2
    same device

    ! find /run/cni /var/lib/cni/results -name '*eth0*' -o -name '*.json' | grep . >&2 || fail "records are left"
    [ -z "$(leases)" ] || fail "leases are left"
}

case $what in
    write) write ;;
    read) read_all ;;
    *) fail "write or read" ;;
esac
umount /var/lib/cni /run/cni /proc/sys/kernel/random/boot_id "$state"
