#!/bin/bash
# Pods with three networks by multus, thin and thick, in its layout of folders: 00-multus.conf is the first network of the
# runtime, the cluster's own list stays beside it, further networks are in /etc/cni/multus/net.d, and multus has a cache of
# its own. multus without an API server attaches each pod to all networks of "delegates". If it is not in PATH, multus.py
# does what it does; the daemon of the thick plugin is always imitated. Executed by node.sh.
# shellcheck disable=SC2317 # functions are called by check
# shellcheck source=/dev/null
. "$HERE/lib.sh"
CACHE=/var/lib/cni/multus
NETWORKS=/etc/cni/multus/net.d
cnibox=/opt/cni/bin/cnibox
# Newer runtimes ask STATUS of multus, CRI-O calls its GC, too.
version=$(sed -n 's/.*"cniVersion": "\([^"]*\)".*/\1/p' /etc/cni/net.d/10-pods.conflist)
mkdir -p $NETWORKS /etc/cni/net.d/multus.d
# A list, and a file of one plugin.
cat >$NETWORKS/storage.conflist <<'END'
{"cniVersion": "1.1.0", "name": "storage", "plugins": [
  {"type": "bridge", "bridge": "storage0",
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.87.1.0/24"}], [{"subnet": "fd87::/64"}]]}},
  {"type": "tuning", "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}}]}
END
cat >$NETWORKS/uplink.conf <<'END'
{"cniVersion": "1.0.0", "name": "uplink", "type": "macvlan", "master": "eth0",
 "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.87.2.0/24", "rangeStart": "10.87.2.10"}]]}}
END
ip -n outside address add 10.87.2.1/24 dev eth0
# What the installers of multus leave in the runtime's directory.
echo '{"kind": "Config"}' >/etc/cni/net.d/multus.d/multus.kubeconfig
echo '{"chrootDir": "/hostroot", "cniVersion": "0.3.1"}' >/etc/cni/net.d/multus.d/daemon-config.json

# configure TYPE: the configuration of multus, with the cluster's list as its first delegate.
configure() {
    {
        echo "{\"cniVersion\": \"$version\", \"name\": \"multus-cni-network\", \"type\": \"$1\","
        echo ' "capabilities": {"portMappings": true}, "delegates": ['
        cat /etc/cni/net.d/10-pods.conflist
        for file in $NETWORKS/storage.conflist $NETWORKS/uplink.conf; do
            echo ,
            cat "$file"
        done
        echo ']}'
    } >"$WORK/00-multus.conf"
    # Runtimes watch the directory.
    mv "$WORK/00-multus.conf" /etc/cni/net.d/
}

# install_multus thin|thick: prints the type of the plugin. The thick one's daemon has a mount namespace of its own, in
# which /hostroot is the node's root; there it starts the delegates.
install_multus() {
    local root=$WORK/hostroot
    if [ "$1" = thick ]; then
        mkdir "$root"
        mount --make-rshared /
        unshare --mount --propagation slave sh -c "mount --rbind / '$root' && mount -t tmpfs tmpfs /tmp && exec sleep 3600" &
        DAEMON=$!
        until nsenter --mount="/proc/$DAEMON/ns/mnt" test -e "$root/proc/self"; do sleep 0.1; done
        printf '#!/bin/sh\nexec nsenter --mount=/proc/%s/ns/mnt /usr/bin/python3 "%s" "%s"\n' \
            "$DAEMON" "$HERE/multus.py" "$root" >/opt/cni/bin/multus-shim
    elif command -v multus >/dev/null; then
        cp "$(command -v multus)" /opt/cni/bin/multus
    else
        printf '#!/bin/sh\nexec /usr/bin/python3 "%s"\n' "$HERE/multus.py" >/opt/cni/bin/multus
    fi
    chmod 755 /opt/cni/bin/multus*
}

# address POD IFNAME FAMILY: a pod's address.
address() {
    in_pod "$1" ip -o "-$3" addr show dev "$2" scope global | sed 's/.*inet6\? \([0-9a-f.:]*\).*/\1/'
}

ping_on() {
    in_pod "$1" ping -c 1 -W 2 -I "$2" "$3"
}

# What the pods have on each interface.
traffic() {
    check "$mode: page on eth0" again page_from "$client" "$web4"
    check "$mode: page on eth0, IPv6" again page_from "$client" "[$web6]"
    check "$mode: another host through eth0, masqueraded" again ping_on "$client" eth0 10.89.0.1
    check "$mode: pod to pod on net1" again page_from "$client" "$(address "$web" net1 4)"
    check "$mode: pod to pod on net1, IPv6" again page_from "$client" "[$(address "$web" net1 6)]"
    check "$mode: another host on net2" again ping_on "$client" net2 10.87.2.1
    check "$mode: from another host on net2" again ip netns exec outside ping -c 1 -W 2 "$(address "$web" net2 4)"
    [ -z "$port" ] || check "$mode: host port" again page_outside "10.89.0.2:${port%:*}"
}

# CHECK of each attachment in the cache of multus.
holds() {
    local pod
    for pod in "$web" "$client"; do
        /usr/bin/python3 "$HERE/libcni.py" check pods "$CACHE" "$pod" eth0 &&
            /usr/bin/python3 "$HERE/libcni.py" check storage "$CACHE" "$pod" net1 &&
            /usr/bin/python3 "$HERE/libcni.py" check uplink "$CACHE" "$pod" net2 || return
    done
}

# says TEXT COMMAND...: fails, and prints what a tool says, unless its first line is this.
says() {
    local said
    said=$("${@:2}" 2>&1)
    [ "$(sed 1q <<<"$said")" = "$1" ] || { echo "$said"; return 1; }
}

# The tools of cnibox find nothing to do.
sound() {
    check "$mode: CHECK of all attachments, $1" holds
    check "$mode: doctor, $1" $cnibox doctor
    check "$mode: repair, $1" says "nothing was missing" $cnibox repair
    # Of networks without a link on the host nothing proves that a pod lives, so that it is in doubt, and stays.
    check "$mode: gc, $1" says "no dead attachment was found" $cnibox gc
}

# CRI-O has its own host ports.
port=18080:80
[ "${CRI%crio}" = "$CRI" ] || port=
for mode in thin thick; do
    install_multus $mode
    if [ $mode = thin ]; then configure multus; else configure multus-shim; fi
    start_runtime || exit 1
    [ $mode = thick ] || case $CRI in imitated-*) ;; *) import_images || exit 1 ;; esac
    # shellcheck disable=SC2086 # nothing, or one word
    web=$(cri pod web $port) || exit 1
    client=$(cri pod client) || exit 1
    serve "$web"
    web4=$(address "$web" eth0 4) web6=$(address "$web" eth0 6)
    check "$mode: multus has cached three networks of each pod" [ "$(find $CACHE/results -type f | wc -l)" = 6 ]
    traffic
    sound "with pods"
    check "$mode: STATUS" cri ready
    check "$mode: STATUS of the cluster's network" $cnibox cnitool status pods --plugin-path /opt/cni/bin

    # CRI-O calls GC of multus, which lists what is in its cache, and of the list beside it, of which it lists nothing.
    # Here the calls are made whatever the runtime is.
    (
        CRI=imitated-crio WORK=$WORK/other-$mode
        mkdir -p "$WORK/imitated"
        for pod in "$web" "$client"; do echo '{}' >"$WORK/imitated/$pod.json"; done
        start_runtime
    ) || exit 1
    traffic
    sound "after GC"

    iptables -t nat -F
    ip6tables -t nat -F
    check "$mode: repair after a flush" $cnibox repair
    traffic
    sound "after repair"
    # What is not in the runtime's cache is restored from that of multus.
    ip link delete cni0
    ip link delete storage0
    check "$mode: repair of deleted bridges" $cnibox repair
    traffic
    sound "after deleted bridges"

    stop_runtime
    start_runtime || exit 1
    late=$(cri pod late) || exit 1
    check "$mode: a pod after a restart of the runtime" again page_from "$late" "$(address "$web" net1 4)"
    kill "$SERVER"
    wait "$SERVER" 2>/dev/null
    for pod in "$web" "$client" "$late"; do cri remove "$pod"; done
    stop_runtime
    check "$mode: nothing is left" nothing_left
    check "$mode: doctor, without pods" $cnibox doctor
done
kill "$DAEMON"
exit "${failed:-1}"
