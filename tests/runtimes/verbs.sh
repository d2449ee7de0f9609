#!/bin/bash
# STATUS and GC as containerd 2 and CRI-O call them, with a list of 1.1.0, beside pods that live, come and go, and have
# been lost. A runtime that is not installed is imitated. Executed by node.sh.
#
# containerd 2 asks STATUS for each state that the kubelet wants, and never calls GC. CRI-O asks STATUS until it
# succeeds; then it calls GC of each network of the directory, with the pods that it has attached itself.
# shellcheck disable=SC2317 # functions are called by check
# shellcheck source=/dev/null
. "$HERE/lib.sh"
POD_NETWORK=/etc/cni/net.d/10-pods.conflist
# A network that only multus attaches pods to; its file is in the directory, too.
OTHER_NETWORK=/etc/cni/net.d/20-rt.conflist
MULTUS=/var/lib/cni/multus
cat >$OTHER_NETWORK <<'END'
{"cniVersion": "1.1.0", "name": "rt", "plugins": [
  {"type": "bridge", "bridge": "rt0", "isGateway": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.87.1.0/24"}], [{"subnet": "fd87::/64"}]]}},
  {"type": "firewall"}]}
END

libcni() {
    /usr/bin/python3 "$HERE/libcni.py" "$@"
}

# Whether an attachment is as ADD has made it: network, cache, ID, interface.
holds() {
    libcni check "$@"
}

leases() {
    find "/var/lib/cni/networks/$1" -name '[0-9f]*[.:]*' 2>/dev/null | wc -l
}

# The other network's interface in a namespace answers.
rt_answers() {
    ping -c 1 -W 2 "$1"
}

address_of() {
    ip -n "$1" -o -4 addr show dev "$2" | sed 's/.*inet \([0-9.]*\).*/\1/'
}

# Succeeds if the runtime says that the network is not ready, for this reason.
refuses() {
    local said
    said=$(cri ready 2>&1) && { echo "ready"; return 1; }
    grep -E -- "$1" <<<"$said" >/dev/null || { echo "$said"; return 1; }
}

# restart WHY: restarts the runtime, which may call GC. In this shell, which has its PID.
restart() {
    stop_runtime
    start_runtime || exit 1
    check "a restart $1" cri ready
}

# Pods that come and go, by two workers, while the runtime is asked; prints what was refused.
never_refused() {
    local worker workers=()
    rm -f "$WORK/refused"
    for worker in 1 2; do
        (
            for _ in 1 2 3 4; do
                pod=$(cri pod "churn$worker") || echo "no pod"
                cri remove "$pod" || echo "no end"
            done
        ) >>"$WORK/refused" 2>&1 &
        workers+=($!)
    done
    while kill -0 "${workers[@]}" 2>/dev/null; do
        cri ready >>"$WORK/refused" 2>&1 || true
    done
    wait "${workers[@]}"
    [ ! -s "$WORK/refused" ] || { cat "$WORK/refused"; return 1; }
}

start_runtime || exit 1
case $CRI in imitated-*) ;; *) import_images || exit 1 ;; esac
web=$(cri pod web) || exit 1
read -r web4 web6 <<<"$(cri ips "$web")"
serve "$web"
servers=("$SERVER")
client=$(cri pod client) || exit 1

check "page from pod to pod" again page_from "$client" "$web4"
check "page, IPv6" again page_from "$client" "[$web6]"
check "CHECK" holds pods /var/lib/cni "$web" eth0
check "STATUS beside pods that come and go" never_refused

# Each defect stops the next ADD, and its end is seen without a restart.
if [ "${CRI%containerd}" != "$CRI" ]; then
    mount -o remount,ro /var/lib/cni
    check "STATUS: leases cannot be written" again refuses 'read-only file system'
    mount -o remount,rw /var/lib/cni
    check "STATUS: they can be" again cri ready
    cat >/etc/cni/net.d/05-small.conflist <<'END'
{"cniVersion": "1.1.0", "name": "small", "plugins": [
  {"type": "bridge", "bridge": "small0", "isGateway": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.87.2.0/24", "rangeStart": "10.87.2.2", "rangeEnd": "10.87.2.2"}]]}}]}
END
    check "STATUS: a range of one address" again cri ready
    last=$(cri pod last)
    check "STATUS: it is exhausted" again refuses 'no IP addresses available in range set.*widen the range'
    cri remove "$last"
    check "STATUS: it has an address" again cri ready
    rm /etc/cni/net.d/05-small.conflist
    check "STATUS: the first network" again cri ready
fi

if [ "${CRI%crio}" != "$CRI" ]; then
    # Pods that the runtime has lost: one with its namespace, one whose namespace lives, but which the cache has lost, too.
    ip netns add lost
    libcni add $POD_NETWORK /var/lib/cni lostlostlost /run/netns/lost eth0
    ip netns delete lost
    ip netns add kept
    libcni add $POD_NETWORK "$WORK/nowhere" keptkeptkept /run/netns/kept eth0
    # Pods of multus, in the other network, of which CRI-O has none: one lives.
    for name in rt1 rt2; do
        ip netns add $name
        libcni add $OTHER_NETWORK $MULTUS "$name$name$name" /run/netns/$name net1
    done
    ip netns delete rt2
    rt4=$(address_of rt1 net1)
    check "leases before GC" [ "$(leases pods) $(leases rt)" = "8 4" ]
    restart "that calls GC"
    check "leases after GC: of the listed pods, and of what lives in multus's cache" [ "$(leases pods) $(leases rt)" = "4 2" ]
    check "the pod that multus has attached" again rt_answers "$rt4"
    check "its CHECK" holds rt $MULTUS rt1rt1rt1 net1
    check "the runtime's log says why it was kept" grep "GC keeps container rt1rt1rt1.*$MULTUS" "$WORK/$CRI.log"
    check "page from pod to pod after GC" again page_from "$client" "$web4"
    check "CHECK after GC" holds pods /var/lib/cni "$web" eth0
    check "nothing of the lost pods is left" no grep -lrE 'lostlost|keptkept|rt2rt2' /var/lib/cni/networks /var/lib/cni/results --exclude-dir=.cnibox

    # STATUS fails when the runtime starts: it waits, and calls GC when the network is ready.
    libcni add $POD_NETWORK "$WORK/nowhere" keptkeptkept /run/netns/kept eth1
    stop_runtime
    mount --bind /var/lib/cni/networks /var/lib/cni/networks
    mount -o remount,bind,ro /var/lib/cni/networks
    launch_runtime
    check "not ready: leases cannot be written" again refuses 'read-only file system'
    check "no GC before STATUS succeeds" [ "$(leases pods)" = 6 ]
    umount /var/lib/cni/networks
    check "ready" again cri ready
    check "GC after it" [ "$(leases pods)" = 4 ]

    # One spelling of the list.
    for key in cni.dev/valid-attachments cni.dev/attachments; do
        libcni add $POD_NETWORK "$WORK/nowhere" keptkeptkept /run/netns/kept eth1
        check "GC with $key" libcni gc $POD_NETWORK $key "$web:eth0" "$client:eth0"
        check "it keeps what it lists, and nothing else" [ "$(leases pods)" = 4 ]
        check "page after it" again page_from "$client" "$web4"
    done

    ip netns delete rt1
    restart "after the end of multus's pod"
    check "nothing of it is left" [ "$(leases rt)" = 0 ]
    rm -r "${MULTUS:?}"
fi

kill "${servers[@]}"
wait "${servers[@]}" 2>/dev/null
for pod in "$web" "$client"; do cri remove "$pod"; done
check "STATUS without pods" cri ready
check "doctor" /opt/cni/bin/cnibox doctor
check "nothing is left" nothing_left
stop_runtime
exit "${failed:-1}"
