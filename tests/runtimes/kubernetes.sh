#!/bin/bash
# Pods of a Kubernetes node, created over CRI as by the kubelet, in the network of docs/egress.md, as the page prints it:
# probes, cluster DNS, Services, node ports and host ports, with the rules of kube-proxy, in both of its modes. Executed by
# node.sh.
# shellcheck disable=SC2317 # functions are called by check
# shellcheck source=/dev/null
. "$HERE/lib.sh"
awk '/^### / { recipe = $0 == "### The pods of a Kubernetes node" }
    /^```$/ { list = 0 }
    list
    /^```json$/ { list = recipe }' "$HERE/../../docs/egress.md" >/etc/cni/net.d/10-pods.conflist

# The other host is a node, too, with a pod that has a web server.
FAR=10.244.2.2:8080
ip -n outside address add "${FAR%:*}/32" dev lo
for subnet in 10.244.1.0/24 10.96.0.0/16; do ip -n outside route add "$subnet" via 10.89.0.2; done
mkdir "$WORK/www"
echo hello >"$WORK/www/index.html"
ip netns exec outside busybox httpd -f -p 8080 -h "$WORK/www" &
start_runtime || exit 1
import_images || exit 1

# services ENDPOINT: the Services of the cluster: number, address, protocol, port, endpoint, and the port of each node,
# if it has one. The policy has the addresses of the first three.
services() {
    cat <<END
1 10.96.0.10 udp 53 $dns4:53
2 10.96.0.10 tcp 53 $dns4:53
3 10.96.7.20 tcp 443 $1 30443
4 10.96.7.21 tcp 443 $1
END
}

# What kube-proxy writes for the Services that it reads, in its mode iptables.
proxy_by_iptables() {
    local number address protocol port endpoint node_port
    cat <<END
*nat
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
-I PREROUTING -j KUBE-SERVICES
-I OUTPUT -j KUBE-SERVICES
-I POSTROUTING -j KUBE-POSTROUTING
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
END
    while read -r number address protocol port endpoint node_port; do
        cat <<END
:KUBE-SVC-$number - [0:0]
:KUBE-SEP-$number - [0:0]
-A KUBE-SERVICES -d $address/32 -p $protocol -m $protocol --dport $port -j KUBE-SVC-$number
-A KUBE-SVC-$number ! -s 10.244.0.0/16 -d $address/32 -p $protocol -m $protocol --dport $port -j KUBE-MARK-MASQ
-A KUBE-SVC-$number -j KUBE-SEP-$number
-A KUBE-SEP-$number -s ${endpoint%:*}/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-$number -p $protocol -m $protocol -j DNAT --to-destination $endpoint
END
        [ -z "$node_port" ] || cat <<END
:KUBE-EXT-$number - [0:0]
-A KUBE-NODEPORTS -p $protocol -m $protocol --dport $node_port -j KUBE-EXT-$number
-A KUBE-EXT-$number -j KUBE-MARK-MASQ
-A KUBE-EXT-$number -j KUBE-SVC-$number
END
    done
    # The last rule of the chain.
    cat <<END
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
COMMIT
*filter
:KUBE-FORWARD - [0:0]
-I FORWARD -j KUBE-FORWARD
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
END
}

# The same in its mode nftables.
proxy_by_nftables() {
    local number address protocol port endpoint node_port
    cat <<END
table ip kube-proxy {
    set cluster-ips { type ipv4_addr; }
    set nodeport-ips { type ipv4_addr; elements = { 10.89.0.2 }; }
    map service-ips { type ipv4_addr . inet_proto . inet_service : verdict; }
    map service-nodeports { type inet_proto . inet_service : verdict; }
    chain mark-for-masquerade { meta mark set meta mark or 0x4000; }
    chain masquerading {
        meta mark and 0x4000 == 0 return
        meta mark set meta mark xor 0x4000
        masquerade fully-random
    }
    chain services {
        ip daddr . meta l4proto . th dport vmap @service-ips
        ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
    }
    chain cluster-ips-check { ip daddr @cluster-ips reject; ip daddr 10.96.0.0/16 drop; }
    chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }
    chain nat-output { type nat hook output priority -100; jump services; }
    chain nat-postrouting { type nat hook postrouting priority srcnat; jump masquerading; }
    chain filter-forward { type filter hook forward priority filter; ct state new jump cluster-ips-check; }
    chain filter-output { type filter hook output priority filter; ct state new jump cluster-ips-check; }
}
END
    while read -r number address protocol port endpoint node_port; do
        cat <<END
table ip kube-proxy {
    chain endpoint-$number {
        ip saddr ${endpoint%:*} jump mark-for-masquerade
        meta l4proto $protocol dnat to $endpoint
    }
    chain service-$number {
        ip daddr $address ip saddr != 10.244.0.0/16 jump mark-for-masquerade
        numgen random mod 1 vmap { 0 : goto endpoint-$number }
    }
}
add element ip kube-proxy cluster-ips { $address }
add element ip kube-proxy service-ips { $address . $protocol . $port : goto service-$number }
END
        [ -z "$node_port" ] || cat <<END
table ip kube-proxy {
    chain external-$number {
        jump mark-for-masquerade
        goto service-$number
    }
}
add element ip kube-proxy service-nodeports { $protocol . $node_port : goto external-$number }
END
    done
}

# proxy MODE ENDPOINT: what kube-proxy writes for the Services, in place of what it wrote before.
proxy() {
    no_proxy
    case $1 in
        iptables) services "$2" | proxy_by_iptables | iptables-restore --noflush ;;
        nftables) services "$2" | proxy_by_nftables | nft -f - ;;
    esac
}

no_proxy() {
    # kube-proxy's own rules and chains only.
    iptables-save | grep -v KUBE- | iptables-restore
    nft add table ip kube-proxy
    nft delete table ip kube-proxy
}

# Another host reaches the server, the pod does not.
refused() {
    again page_outside "$2" && ! page_from "$1" "$2"
}

probe_by_tcp() {
    timeout 2 bash -c ": </dev/tcp/${1/:/\/}"
}

ask() {
    /usr/bin/python3 "$HERE/dns.py" ask "$@"
}

ask_from() {
    local pod=$1
    shift
    in_pod "$pod" /usr/bin/python3 "$HERE/dns.py" ask "$@"
}

# The same for the name server.
dns_refused() {
    ask "$2" "$3" && ! ask_from "$1" "$2" "$3"
}

# Replies by UDP from a port that is not in "serve".
unserved() {
    ask_from "$dns" udp 127.0.0.1 5353 && ask tcp "$dns4" 5353 && ! ask udp "$dns4" 5353
}

for mode in iptables nftables; do
    web=$(cri pod web 18080:8080) || exit 1
    dns=$(cri pod dns)
    client=$(cri pod client)
    web4=$(cri ips "$web")
    dns4=$(cri ips "$dns")
    cri run "$web" localhost/busybox:1 httpd -f -p 8080 -h /www >/dev/null
    in_pod "$dns" /usr/bin/python3 "$HERE/dns.py" serve 53 5353 &
    check "probe by HTTP" again page "$web4:8080"
    check "probe by TCP" probe_by_tcp "$web4:8080"
    for endpoint in "$web4:8080" "$FAR"; do
        proxy "$mode" "$endpoint"
        check "$mode: a Service, in front of $endpoint" again page_from "$client" 10.96.7.20:443
        # In front of a pod of this node: to a pod behind a policy.
        check "$mode: the Service, from the node" again page 10.96.7.20:443
        check "$mode: its node port, from the node" again page 10.89.0.2:30443
        check "$mode: its node port, from another host" again page_outside 10.89.0.2:30443
        check "$mode: refused: a Service that is not in the policy" refused "$client" 10.96.7.21:443
        check "$mode: refused: $endpoint itself" refused "$client" "$endpoint"
    done
    proxy "$mode" "$web4:8080"
    check "$mode: a pod reaches itself by its Service" page_from "$web" 10.96.7.20:443
    check "$mode: refused: a node port, whose address is the node's" refused "$client" 10.89.0.2:30443
    check "$mode: host port of a pod, from another host" again page_outside 10.89.0.2:18080
    check "$mode: probe by HTTP beside the rules" again page "$web4:8080"
    check "$mode: what was refused is listed as the pod wrote it" grep "10.96.7.21 tcp/443" <<<"$(/opt/cni/bin/cnibox egress ls)"
    for protocol in udp tcp; do
        check "$mode: cluster DNS by $protocol" again ask_from "$client" "$protocol" 10.96.0.10
        check "$mode: refused: the pod of cluster DNS by $protocol" dns_refused "$client" "$protocol" "$dns4"
    done
    check "replies by UDP pass from served ports only" unserved
    for pod in "$web" "$dns" "$client"; do cri remove "$pod"; done
    no_proxy
    check "nothing is left" nothing_left
done
stop_runtime
exit "${failed:-1}"
