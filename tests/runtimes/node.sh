#!/bin/bash
# node.sh COMMAND...: runs a command as root on a temporary node: private mounts, network, PIDs, cgroups
# and host name. The machine is not changed except for the directory WORK.
#
# eth0 of the node has 10.89.0.2 and fd89::2; 10.89.0.1 and fd89::1 belong to another host, the
# namespace "outside". PLUGINS is mounted at /opt/cni/bin, CONF at /etc/cni/net.d.
set -eu
: "${WORK:?}" "${PLUGINS:?}" "${CONF:?}"

# Prints the cgroup directories of this process, one for each hierarchy, version 1 or 2.
own_cgroups() {
    while IFS=: read -r _ controllers path; do
        case $controllers in
            '') root=/sys/fs/cgroup && [ -e $root/cgroup.controllers ] || root=$root/unified ;;
            *) root=/sys/fs/cgroup/${controllers#name=} ;;
        esac
        [ ! -e "$root/cgroup.procs" ] || echo "$root${path%/}"
    done </proc/self/cgroup
}

if [ "${1-}" != --inside ]; then
    groups=()
    for parent in $(own_cgroups); do
        group=$parent/cnibox-test.$$
        mkdir "$group"
        groups+=("$group")
        for file in cpuset.cpus cpuset.mems; do
            # A cpuset without CPUs or memory nodes accepts no process.
            [ ! -e "$group/$file" ] || cat "$parent/$file" >"$group/$file" 2>/dev/null || true
        done
    done
    # shellcheck disable=SC2317 # called by the trap
    clean() {
        for group in "${groups[@]}"; do
            for _ in $(seq 100); do
                find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
                [ -d "$group" ] || break
                sleep 0.1
            done
        done
    }
    trap clean EXIT
    (
        for group in "${groups[@]}"; do echo "$BASHPID" >"$group/cgroup.procs"; done
        exec unshare --mount --net --pid --cgroup --uts --ipc --fork --kill-child=KILL --mount-proc \
            --propagation private "$0" --inside "$@"
    ) &
    child=$!
    trap 'kill -KILL $child 2>/dev/null' INT TERM HUP
    status=0
    wait $child || status=$?
    exit $status
fi
shift

# Mount all cgroup hierarchies again, so that their roots are those of the cgroup namespace.
hierarchies=$(awk '$5 ~ "^/sys/fs/cgroup" { for (i = 6; i < NF; i++) if ($i == "-") print $5, $(i + 1) }' /proc/self/mountinfo)
umount -R -l /sys/fs/cgroup
mount -t sysfs sysfs /sys
if grep -qx "/sys/fs/cgroup cgroup2" <<<"$hierarchies"; then
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
else
    mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
    while read -r point type; do
        name=${point#/sys/fs/cgroup/}
        [ "$type" != tmpfs ] || continue
        mkdir -p "$point"
        case $type,$name in
            cgroup2,*) mount -t cgroup2 cgroup2 "$point" ;;
            *,systemd) mount -t cgroup -o none,name=systemd cgroup "$point" ;;
            *) mount -t cgroup -o "$name" cgroup "$point" ;;
        esac
    done <<<"$hierarchies"
fi
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/netns /run/lock /var/lib/cni /opt/cni/bin /etc/cni
mount -t tmpfs tmpfs /var/lib/cni
mount -t tmpfs -o mode=755 tmpfs /etc/cni
mkdir /etc/cni/net.d
mount --bind "$PLUGINS" /opt/cni/bin
mount --bind "$CONF" /etc/cni/net.d
hostname node
ip link set lo up
ip netns add outside
ip link add eth0 type veth peer name eth0 netns outside
for end in "2 ip" "1 ip -n outside"; do
    read -r number command <<<"$end"
    $command addr add "10.89.0.$number/24" dev eth0
    $command addr add "fd89::$number/64" dev eth0 nodad
    $command link set lo up
    $command link set eth0 up
done
ip route add default via 10.89.0.1
ip -6 route add default via fd89::1
exec "$@"
