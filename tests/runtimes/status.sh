#!/bin/bash
# STATUS while pods come and go over CRI. Executed by node.sh.
#
# containerd 2 asks STATUS every five seconds and at every pod, and sets the node NotReady after a failure. Older ones do
# not ask, and do not take lists of version 1.1.0: cnitool asks with such a list of the same network.
# shellcheck disable=SC2317 # functions are called by check
# shellcheck source=/dev/null
. "$HERE/lib.sh"
SECONDS_OF_CHURN=${SECONDS_OF_CHURN:-20}
mkdir "$WORK/asked"
sed 's/"cniVersion": "1.0.0"/"cniVersion": "1.1.0"/' /etc/cni/net.d/10-pods.conflist >"$WORK/asked/10-pods.conflist"
start_runtime || exit 1
import_images || exit 1

ask_status() {
    CNI_PATH=/opt/cni/bin NETCONFPATH=$WORK/asked /opt/cni/bin/cnitool status pods /run/netns/none
}

# Asks until the file "stop" exists; each failure is a line of "refused".
watch_status() {
    local count=0
    while [ ! -e "$WORK/stop" ]; do
        ask_status >/dev/null 2>"$WORK/status.err" || tr '\n' ' ' <"$WORK/status.err" >>"$WORK/refused"
        cri ready || echo "NetworkReady is false" >>"$WORK/refused"
        count=$((count + 1))
    done
    echo "$count" >"$WORK/count"
}

# Starts and removes pods until the file "stop" exists, and asks at each.
churn() {
    local pod count=0
    while [ ! -e "$WORK/stop" ]; do
        if pod=$(cri pod "churn$1-$count" "$((19000 + $1)):80"); then
            ask_status >/dev/null 2>"$WORK/status.$1.err" || tr '\n' ' ' <"$WORK/status.$1.err" >>"$WORK/refused"
            cri remove "$pod"
        else
            echo "no pod" >>"$WORK/refused"
        fi
        count=$((count + 1))
    done
    echo "$count" >"$WORK/pods.$1"
}

# Waits for all of what runs in the background but containerd.
stop_churn() {
    touch "$WORK/stop"
    wait "${workers[@]}"
}

start_churn() {
    rm -f "$WORK/stop" "$WORK/refused"
    workers=()
    for number in 1 2 3; do
        churn "$number" &
        workers+=($!)
    done
    watch_status &
    workers+=($!)
}

# Succeeds if STATUS was asked often enough beside enough pods, and never failed.
never_refused() {
    if [ -e "$WORK/refused" ]; then
        sort "$WORK/refused" | uniq -c | sort -rn | head -n 3
        return 1
    fi
    [ "$(cat "$WORK/count")" -ge 10 ] && cat "$WORK"/pods.* | awk '{ pods += $1 } END { exit pods < 10 }'
}

# Deletes the rules of one pod in the table nat; fails if it has none.
delete_rules_of() {
    local rule deleted=1
    while read -r rule; do
        # The words of iptables-save are quoted as for a shell.
        eval "iptables -t nat ${rule/#-A/-D}" && deleted=0
    done < <(iptables-save -t nat | grep -- "$1")
    return "$deleted"
}

web=$(cri pod web 18080:80) || exit 1
read -r web4 _ <<<"$(cri ips "$web")"
cri run "$web" localhost/busybox:1 httpd -f -p 80 -h /www >/dev/null
client=$(cri pod client 18081:80)
shell=$(cri run "$client" localhost/busybox:1 sleep 3600)
check "host port from another host" again page_outside 10.89.0.2:18080

start_churn
sleep "$SECONDS_OF_CHURN"
stop_churn
check "STATUS beside pods that come and go" never_refused

start_churn
for _ in 1 2 3 4 5 6 7 8; do
    check "a rule of a pod is deleted" delete_rules_of "${web4}[:/]"
    check "the host port is there again" again page_outside 10.89.0.2:18080
done
stop_churn
check "STATUS beside damage, and pods that come and go" never_refused

for _ in 1 2 3; do
    for command in iptables ip6tables; do
        for table in nat filter; do $command -t "$table" -F; $command -t "$table" -X; done
    done
    check "STATUS after a flush" ask_status
    check "the host port is there without an ADD" again page_outside 10.89.0.2:18080
    check "masquerading, too" again cri exec "$shell" ping -c 1 -W 2 10.89.0.1
done

for pod in "$web" "$client"; do cri remove "$pod"; done
check "STATUS without pods" ask_status
check "nothing is left" nothing_left
stop_runtime
exit "${failed:-1}"
