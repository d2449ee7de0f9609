#!/bin/bash
# run.sh PLUGINS [SCENARIO...]: tests containerd and podman with these plugins, each on a temporary node.
# PLUGINS is the executable of cnibox, or a directory of other plugins. With cnibox further scenarios have
# egress policies (egress), those of a Kubernetes node (kubernetes), STATUS while pods come and go (status), STATUS and GC
# as containerd 2 and CRI-O call them (verbs), pods with three networks by multus (multus), the same with CRI-O (crio) and,
# with the reference plugins in PEER, a node that is switched from the reference and back (switch). Of runtimes that are
# not in PATH verbs and multus imitate the calls, and crio is left out.
set -eu
[ "$(id -u)" = 0 ] || { echo "test-runtimes: needs root" >&2; exit 1; }
[ $# -ge 1 ] || { sed -n '2,7s/^# //p' "$0"; exit 2; }
given=$(readlink -f "$1")
shift
peer=${PEER:-/usr/lib/cni}
HERE=$(dirname "$(readlink -f "$0")")
# Neither tmpfs nor overlayfs, because it holds the overlays of the runtimes.
base=$(mktemp -d /var/tmp/cnibox-runtimes.XXXXXX)
export HERE PATH=$PATH:/usr/sbin:/sbin PYTHONDONTWRITEBYTECODE=1
trap 'rm -rf "$base"' EXIT
/usr/bin/python3 "$HERE/image.py" "$base/images.tar"

# newest_version RUNTIME: the newest version of the specification that a runtime knows; with 1.1.0 containerd 2 asks
# STATUS, and CRI-O calls GC.
newest_version() {
    case $1,$("$1" --version 2>/dev/null) in
        containerd,*" "[vV]2.* | containerd,*" 2."* | crio,* | imitated-*) echo 1.1.0 ;;
        *) echo 1.0.0 ;;
    esac
}

# conf PLUGINS [LAST]: prints a network of bridge, the chained plugins in the directory, and one more plugin.
conf() {
    local chained="" name
    for name in portmap firewall tuning bandwidth; do
        [ -e "$1/$name" ] || continue
        case $name in
            portmap) name='{"type": "portmap", "capabilities": {"portMappings": true}}' ;;
            bandwidth) name='{"type": "bandwidth", "capabilities": {"bandwidth": true}}' ;;
            *) name="{\"type\": \"$name\"}" ;;
        esac
        chained="$chained, $name"
    done
    chained="$chained${2:+, $2}"
    cat <<END
{"cniVersion": "$version", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}], [{"subnet": "fd88::/64"}]],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}}$chained]}
END
}

# scenario NAME SCRIPT: runs a script with the plugins in $base/NAME/plugins.
status=0
scenario() {
    local name=$1 script=$2 started
    export WORK=$base/$name PLUGINS=$base/$name/plugins CONF=$base/$name/conf
    version=$(newest_version "${CRI:-containerd}")
    mkdir -p "$CONF"
    conf "$PLUGINS" "${LAST-}" >"$CONF/10-pods.conflist"
    cp --reflink=auto "$base/images.tar" "$WORK/"
    echo "$name"
    started=$(date +%s)
    "$HERE/node.sh" "$HERE/$script" || { status=1; echo "  FAILED"; }
    echo "  $(($(date +%s) - started)) s"
}

plugins_for() {
    mkdir -p "$base/$1/plugins"
    if [ -d "$given" ]; then
        cp "$given"/* "$base/$1/plugins/"
        return
    fi
    # Plugins in podman's configurations that cnibox lacks.
    [ ! -e "$peer/bridge" ] || cp "$peer"/* "$base/$1/plugins/"
    "$given" install "$base/$1/plugins" >/dev/null
    # As in `make image`; the architecture is not checked when the image runs.
    /usr/bin/python3 "$HERE/../../packaging/image.py" cnibox "$base/$1/cnibox.oci.tar" test amd64="$given" >/dev/null
}

policy='{"type": "egress", "allow": [{"to": ["10.89.0.1"], "ports": ["icmp"]}], "capabilities": {"portMappings": true}}'
wanted="${*:-containerd podman egress kubernetes crio status verbs multus switch}"
for name in $wanted; do
    case $name in
        containerd | podman)
            plugins_for "$name"
            scenario "$name" "$name.sh"
            ;;
        egress)
            [ ! -d "$given" ] || continue
            plugins_for egress
            LAST=$policy scenario egress egress.sh
            ;;
        kubernetes | status)
            [ ! -d "$given" ] || continue
            plugins_for "$name"
            scenario "$name" "$name.sh"
            ;;
        verbs)
            [ ! -d "$given" ] || continue
            for runtime in containerd crio; do
                # The installed containerd, if it asks STATUS; CRI-O itself is in the scenario crio.
                if [ "$runtime,$(newest_version $runtime)" != containerd,1.1.0 ]; then runtime=imitated-$runtime; fi
                plugins_for "verbs-$runtime"
                CRI=$runtime scenario "verbs-$runtime" verbs.sh
            done
            ;;
        multus)
            [ ! -d "$given" ] || continue
            for runtime in containerd imitated-crio; do
                plugins_for "multus-$runtime"
                CRI=$runtime scenario "multus-$runtime" multus.sh
            done
            ;;
        crio)
            if [ -d "$given" ] || ! command -v crio >/dev/null; then continue; fi
            for script in containerd egress kubernetes verbs multus; do
                plugins_for "crio-$script"
                if [ "$script" = egress ]; then LAST=$policy; else LAST=; fi
                CRI=crio scenario "crio-$script" "$script.sh"
            done
            ;;
        switch)
            if [ -d "$given" ] || [ ! -e "$peer/bridge" ]; then continue; fi
            mkdir -p "$base/switch/plugins"
            cp "$peer"/* "$base/switch/plugins/"
            SWITCH=$given scenario switch containerd.sh
            ;;
    esac
done
exit $status
