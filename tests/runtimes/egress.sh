#!/bin/bash
# Pods whose network has an egress policy, created over CRI as by the kubelet. Executed by node.sh. The policy allows
# pings to the other host, over IPv4 only.
# shellcheck source=/dev/null
. "$HERE/lib.sh"
start_runtime || exit 1
import_images || exit 1

# shellcheck disable=SC2317 # called by check
ping_from() {
    cri exec "$1" ping -c 1 -W 2 "$2"
}

# What the policy refuses is asked right after something that it allows.
# shellcheck disable=SC2317 # called by check
refused() {
    ping_from "$1" 10.89.0.1 && ! ping_from "$1" "$2"
}

web=$(cri pod web 18080:80) || exit 1
read -r web4 web6 <<<"$(cri ips "$web")"
cri run "$web" localhost/busybox:1 httpd -f -p 80 -h /www >/dev/null
client=$(cri pod client)
shell=$(cri run "$client" localhost/busybox:1 sleep 3600)
check "the other host, which is allowed" again ping_from "$shell" 10.89.0.1
check "replies of a published port" again page_outside 10.89.0.2:18080
for address in fd89::1 10.89.0.2 fd89::2 "$web4" "$web6"; do
    check "refused: $address" refused "$shell" "$address"
done
check "what was refused is listed" grep "fd89::1.*icmpv6" <<<"$(/opt/cni/bin/cnibox egress ls)"

for table in inet bridge netdev; do nft delete table "$table" cnibox_egress; done
check "refused without rules" refused "$shell" "$web4"
late=$(cri pod late 18090:80)
check "the next ADD restores the rules" nft list chain inet cnibox_egress prerouting
check "refused after it" refused "$shell" fd89::1

stop_runtime
start_runtime || exit 1
check "refused after a restart of the runtime" refused "$shell" "$web4"
for pod in "$web" "$client" "$late"; do cri remove "$pod"; done
check "nothing is left" nothing_left
stop_runtime
exit "${failed:-1}"
