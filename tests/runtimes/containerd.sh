#!/bin/bash
# Pods, created over CRI as by the kubelet. Executed by node.sh.
# shellcheck source=/dev/null
. "$HERE/lib.sh"
start_runtime || exit 1
import_images || exit 1

web=$(cri pod web 18080:80) || exit 1
read -r web4 web6 <<<"$(cri ips "$web")"
server=$(cri run "$web" localhost/busybox:1 httpd -f -p 80 -h /www)
client=$(cri pod client)
shell=$(cri run "$client" localhost/busybox:1 sleep 3600)
check "addresses of both families: $web4 $web6" [ -n "$web6" ]
check "the server runs: ${server:0:12}" [ -n "$server" ]
check "pod to pod" again cri exec "$shell" ping -c 1 -W 2 "$web4"
check "pod to pod, IPv6" again cri exec "$shell" ping -c 1 -W 2 "$web6"
check "page from pod to pod" again cri exec "$shell" get "$web4"
check "pod to another host, masqueraded" again cri exec "$shell" ping -c 1 -W 2 10.89.0.1
check "pod to another host, IPv6" again cri exec "$shell" ping -c 1 -W 2 fd89::1
check "host port from the node" again page 10.89.0.2:18080
check "host port from another host" again page_outside 10.89.0.2:18080
check "host port from a pod" again cri exec "$shell" get 10.89.0.2 18080

# From what the runtime has cached.
if [ -e /opt/cni/bin/cnibox ]; then
    check "doctor" /opt/cni/bin/cnibox doctor
    ip link delete cni0
    check "repair of a deleted bridge" /opt/cni/bin/cnibox repair
    check "pod to pod after it" again cri exec "$shell" get "$web4"
    check "pod to another host after it" again cri exec "$shell" ping -c 1 -W 2 10.89.0.1
fi

if [ -e /opt/cni/bin/bandwidth ]; then
    slow=$(cri pod slow kubernetes.io/ingress-bandwidth=1M kubernetes.io/egress-bandwidth=1M)
    check "bandwidth annotation" grep -q tbf <<<"$(tc qdisc)"
    cri remove "$slow"
    check "limits are deleted with the pod" no grep -q tbf <<<"$(tc qdisc)"
fi

if [ -n "${SWITCH-}" ]; then
    check "switch from the reference to cnibox" "$SWITCH" install /opt/cni/bin
    check "pod to pod after the switch" again cri exec "$shell" get "$web4"
    check "host port after the switch" again page 10.89.0.2:18080
fi

stop_runtime
start_runtime || exit 1
check "pods survive a restart of the runtime" again page "$web4"
late=$(cri pod late 18090:80)
check "a pod after the restart" [ -n "$late" ]
cri run "$late" localhost/busybox:1 httpd -f -p 80 -h /www >/dev/null
check "its host port" again page 10.89.0.2:18090
cri remove "$client"

if [ -n "${SWITCH-}" ]; then
    check "switch back to the reference" "$SWITCH" uninstall /opt/cni/bin
    check "node to pod after the switch back" again page "$web4"
    check "host port after the switch back" again page 10.89.0.2:18090
fi
for pod in "$web" "$late"; do cri remove "$pod"; done
check "host port is closed" no page 10.89.0.2:18080
check "nothing is left" nothing_left
stop_runtime
exit "${failed:-1}"
