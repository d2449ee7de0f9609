#!/bin/bash
# reboot.sh BINARY: leases across a true reboot, of a VM with a disk (scripts/vm.sh). The attachments of a boot have ended in the
# next boot, and their addresses are assigned again; unless the boot was of another machine, or its id was a container
# manager's, which prove nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

# The networks; each has five addresses.
networks="pods foreign nested"

conf() {
    local subnet
    case $1 in
        pods) subnet=10.9.0.0/29 ;;
        foreign) subnet=10.9.1.0/29 ;;
        nested) subnet=10.9.2.0/29 ;;
    esac
    echo '{"cniVersion":"1.1.0","name":"'"$1"'","type":"bridge","bridge":"br-'"$1"'","isGateway":true,"ipMasq":true,
        "ipMasqBackend":"nftables","ipam":{"type":"host-local","ranges":[[{"subnet":"'$subnet'"}]]}}'
}

# call VERB NETWORK CONTAINER
call() {
    conf "$2" | CNI_COMMAND=$1 CNI_CONTAINERID=$3 CNI_NETNS=/run/netns/$3 CNI_IFNAME=eth0 CNI_PATH=/run/plugins \
        /run/plugins/bridge
}

fail() {
    echo "reboot: $*" >&2
    exit 1
}

prepare() {
    modprobe -a virtio_blk ext4 bridge veth nf_tables
    # Written in the VM only, which discards it.
    [ -s /etc/machine-id ] || echo fedcba9876543210fedcba9876543210 >/etc/machine-id
    mkdir -p /var/lib/cni
    mount /dev/vda /var/lib/cni
    "$1" install /run/plugins >/dev/null
}

# The first boot fills the networks.
first() {
    prepare "$1"
    echo 0123456789abcdef0123456789abcdef >/run/vm/id
    echo 01234567-89ab-cdef-0123-456789abcdef >/run/vm/boot
    for network in $networks; do
        case $network in
            foreign) mount --bind /run/vm/id /etc/machine-id ;;
            nested) mount --bind /run/vm/boot /proc/sys/kernel/random/boot_id ;;
        esac
        for n in 1 2 3 4 5; do
            ip netns add "$network-$n"
            call ADD "$network" "$network-$n" >/dev/null
        done
        ip netns add "$network-full"
        call ADD "$network" "$network-full" >/dev/null && fail "$network is not full"
        [ "$network" = pods ] || umount /etc/machine-id /proc/sys/kernel/random/boot_id 2>/dev/null || true
    done
    umount /var/lib/cni
}

# The second boot finds them.
second() {
    prepare "$1"
    /run/plugins/ipam ls
    for network in $networks; do
        ip netns add "$network-new"
        said=$(call ADD "$network" "$network-new" 2>&1) && added=yes || added=no
        case $network:$added in
            pods:yes) grep -q "it was made before the last boot" <<<"$said" || fail "$said" ;;
            foreign:no | nested:no) ;;
            *) fail "ADD of $network: $said" ;;
        esac
    done
    [ "$(find /var/lib/cni/networks/pods -name '10.*' | wc -l)" = 1 ] || fail "leases of the earlier boot are left"
    [ "$(find /var/lib/cni/networks/foreign /var/lib/cni/networks/nested -name '10.*' | wc -l)" = 10 ] ||
        fail "leases in doubt are gone"
}

case ${1-} in
    --first | --second) "${1#--}" "$2"; exit ;;
    "") echo "usage: tests/reboot.sh BINARY" >&2; exit 2 ;;
esac
disk=$(mktemp)
trap 'rm -f "$disk"' EXIT
truncate -s 64M "$disk"
mkfs.ext4 -q -F "$disk"
for boot in first second; do
    CNIBOX_VM_QEMU="-drive file=$disk,format=raw,if=virtio" scripts/vm.sh bash tests/reboot.sh "--$boot" "$(realpath "$1")"
done
echo "reboot: ok"
