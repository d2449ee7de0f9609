#!/bin/bash
# Containers of podman with its CNI back end. Executed by node.sh.
# shellcheck source=/dev/null
. "$HERE/lib.sh"
mkdir -p "$WORK/podman/net.d"
cat >"$WORK/containers.conf" <<END
[network]
network_backend = "cni"
cni_plugin_dirs = ["/opt/cni/bin"]
network_config_dir = "$WORK/podman/net.d"
default_subnet = "10.87.0.0/24"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "crun"
[containers]
log_driver = "k8s-file"
END
cat >"$WORK/storage.conf" <<END
[storage]
driver = "overlay"
graphroot = "$WORK/podman/storage"
runroot = "/run/containers/storage"
END
: >"$WORK/registries.conf"
export CONTAINERS_CONF=$WORK/containers.conf CONTAINERS_STORAGE_CONF=$WORK/storage.conf \
    CONTAINERS_REGISTRIES_CONF=$WORK/registries.conf
image=localhost/busybox:1
podman load -q -i "$WORK/images.tar" >/dev/null || exit 1

# shellcheck disable=SC2317 # called by check
listed() {
    /opt/cni/bin/cnibox egress ls | grep -F "$1"
}

check "the CNI back end" [ "$(podman info --format '{{.Host.NetworkBackend}}')" = cni ]
check "a container" podman run -d --name web -p 18080:80 -p 127.0.0.1:18090:80 "$image" httpd -f -p 80 -h /www
check "published on loopback" again page 127.0.0.1:18080
check "published on the node's address" again page 10.89.0.2:18080
check "published for other hosts" again page_outside 10.89.0.2:18080
check "published on 127.0.0.1 only, from the node" again page 127.0.0.1:18090
check "published on 127.0.0.1 only, not from other hosts" no page_outside 10.89.0.2:18090
check "container to published port" again podman run --rm "$image" get 10.89.0.2 18080
check "container to another host" again podman run --rm "$image" ping -c 1 -W 2 10.89.0.1
if [ -e /opt/cni/bin/cnibox ]; then
    check "doctor" /opt/cni/bin/cnibox doctor
    ip link delete "$(ip -br link show type bridge | cut -d ' ' -f 1)"
    check "repair of a deleted bridge" /opt/cni/bin/cnibox repair
    check "published for other hosts after it" again page_outside 10.89.0.2:18080
fi
check "a network of both families" podman network create --subnet 10.88.1.0/24 --subnet fd88::/64 --ipv6 two
check "requested address and MAC address" podman run --rm --network two:ip=10.88.1.77,mac=02:11:22:33:44:55 "$image" \
    sh -c 'ip addr show eth0 | grep 10.88.1.77/24 && ip link show eth0 | grep 02:11:22:33:44:55'
check "IPv6 to another host" again podman run --rm --network two "$image" ping -c 1 -W 2 fd89::1
check "a second network for a running container" podman network connect two web
check "second interface exists" podman exec web ip addr show eth1
check "disconnect the second network" podman network disconnect two web
check "second interface is deleted" no podman exec web ip addr show eth1
check "reload of a running container" podman network reload web
check "published after the reload" again page 127.0.0.1:18080
check "restart" podman restart -t 0 web
check "published after the restart" again page 127.0.0.1:18080

# The init container of the DaemonSet with its restricted privileges, on a temporary directory in place of the
# node's plugins, and the main container of the uninstalling DaemonSet, which only waits.
if [ -e "$WORK/cnibox.oci.tar" ]; then
    mkdir "$WORK/installed"
    podman load -q -i "$WORK/cnibox.oci.tar" >/dev/null
    cnibox=localhost/cnibox:test
    confined=(--network host --read-only --cap-drop all --security-opt no-new-privileges)
    check "the DaemonSet's init container" podman run --rm "${confined[@]}" --memory 64m \
        -v "$WORK/installed:/host/opt/cni/bin" "$cnibox" /host/opt/cni/bin
    check "installed plugins reply to VERSION" env CNI_COMMAND=VERSION "$WORK/installed/bridge"
    check "the uninstalling DaemonSet's main container" podman run -d --name pause "${confined[@]}" --memory 16m --user 65534:65534 \
        --entrypoint '["/cnibox", "pause"]' "$cnibox"
    check "is running" [ "$(podman inspect --format '{{.State.Status}}' pause)" = running ]
    check "stops on SIGTERM" podman stop -t 5 pause
    check "exits with 0" [ "$(podman inspect --format '{{.State.ExitCode}}' pause)" = 0 ]

    # The DaemonSet's resolver, and a network that allows a name, which leads to the other host.
    cat >"$WORK/podman/net.d/named.conflist" <<'END'
{"cniVersion": "1.0.0", "name": "named", "plugins": [
  {"type": "bridge", "bridge": "named0", "isGateway": true, "ipMasq": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.87.9.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "egress", "allow": [{"to": ["api.example.org"], "ports": ["tcp/80"]}]}]}
END
    ip -n outside address add 198.51.100.7/32 dev lo
    ip route add 198.51.100.7 via 10.89.0.1
    ADDRESS=198.51.100.7 ip netns exec outside /usr/bin/python3 "$HERE/dns.py" serve 53 &
    names=$!
    mkdir "$WORK/www"
    echo hello >"$WORK/www/index.html"
    ip netns exec outside busybox httpd -f -p 80 -h "$WORK/www" &
    pages=$!
    check "without the resolver a network with names is refused" no podman run --rm --network named "$image" true
    check "the DaemonSet's resolver" podman run -d --name resolver "${confined[@]}" --cap-add net_admin --cap-add net_bind_service \
        --memory 128m -v /run:/run --entrypoint '["/cnibox", "egress", "resolver", "--upstream=10.89.0.1"]' "$cnibox"
    check "a container with names" again podman run -d --name named --network named "$image" sleep 3600
    check "before the question" no podman exec named get 198.51.100.7
    check "the question" again podman exec named nslookup api.example.org 10.87.9.1
    check "behind the answer" podman exec named get 198.51.100.7
    check "another name" no podman exec named nslookup www.example.org 10.87.9.1
    check "is listed" again listed www.example.org
    check "the resolver stops on SIGTERM" podman stop -t 5 resolver
    check "what is open stays open" podman exec named get 198.51.100.7
    kill "$names" "$pages"
fi
check "remove all" podman rm -af -t 0
check "remove the network" podman network rm two
check "nothing is left" nothing_left
exit "${failed:-1}"
