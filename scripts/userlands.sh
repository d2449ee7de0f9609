#!/bin/bash
# userlands.sh BINARY SANITY TESTS: the tests that depend on programs of a distribution, on this machine's kernel, with the
# programs of several releases of Debian: iptables, nft, iproute2, firewalld, containerd, dpkg, rpm and the reference
# plugins. SANITY and TESTS, the executable of the integration tests, are static like BINARY. Prints what failed on
# stderr, and then a table. Exit status 1 if anything failed.
#
# If DIST has the packages of cnibox, they are installed, upgraded and removed there with the programs of the release.
#
# A release is a root of debootstrap, which is made once; the tests write into a layer above it, in memory. The release
# "none" is the machine's release without iptables, nft, firewalld and reference plugins, where only cni-sanity is run.
# Needs root, debootstrap and a kernel with overlayfs.
#
#   SUITES                  the releases, separated by spaces [bullseye bookworm trixie sid none]
#   PATTERNS                parts of the names of tests [those about packet filters]
#   PAGE                    a page of the documentation, in whose table the columns of these releases are replaced if all passed
#   DIST                    directory of the files of a release [none]
#   CNIBOX_USERLANDS_CACHE  directory of the roots [/var/cache/cnibox-userlands]
# shellcheck disable=SC2317 # functions are called by name
set -euo pipefail

here=$(realpath "${0%/*}/..")
binary=$(realpath "$1") sanity=$(realpath "$2") tests=$(realpath "$3")
read -ra suites <<<"${SUITES:-bullseye bookworm trixie sid none}"
read -ra patterns <<<"${PATTERNS:-firewall:: flush:: handover:: masquerade:: portmap:: takeover:: xt_flavours:: doctor::forward bridge::reference ptp::reference}"
cache=${CNIBOX_USERLANDS_CACHE:-/var/cache/cnibox-userlands}
packages=(iproute2 iptables nftables firewalld procps conntrack iputils-ping kmod strace libcap2-bin dnsmasq-base
    containernetworking-plugins python3-dbus python3-gi rpm containerd runc busybox-static curl python3-grpcio)

# create SUITE: the root of a release, and its packages.
create() {
    local suite=$1 root=$cache/$1.new mirror own
    [ ! -e "$cache/$suite" ] || return 0
    mkdir -p "$cache"
    rm -rf --one-file-system "$root"
    # The mirror that this machine uses.
    # shellcheck disable=SC2016 # a word of apt-get
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | sed -n 1p)
    own=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
    [ "$suite" != none ] || suite=$own
    debootstrap --variant=minbase --include=ca-certificates "$suite" "$root" "$mirror"
    cp -L /etc/resolv.conf "$root/etc"
    add() { DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get -q -y --no-install-recommends install "$@"; }
    [ "$1" = none ] || add "${packages[@]}"
    # Debian 11's reference knows no version of the specification after 0.4.0.
    if [ "$1" = bullseye ]; then
        echo "deb $mirror $own main" >>"$root/etc/apt/sources.list"
        chroot "$root" apt-get -q update
        add -t "$own" containernetworking-plugins
    fi
    mv "$root" "$cache/$1"
}

# enter SUITE: moves the processes of the mount namespace into a root, with a layer in memory for its files. Not by
# chroot(2), after which the kernel creates no user namespace.
enter() {
    local layers=$cache/layers root=$cache/layers/root
    mkdir -p "$layers"
    mount -t tmpfs tmpfs "$layers"
    mkdir "$layers/upper" "$layers/work" "$root"
    mount -t overlay overlay -o "lowerdir=$cache/$1,upperdir=$layers/upper,workdir=$layers/work" "$root"
    for directory in proc sys dev; do mount --rbind "/$directory" "$root/$directory"; done
    mount -t tmpfs tmpfs "$root/run"
    mkdir "$root/run/lock" "$root/machine"
    # The directories of a runtime, which are themselves layers, in a file system that has none.
    mkdir -p "$cache/tmp"
    mount --bind "$cache/tmp" "$root/var/tmp"
    # The tests read files of the source.
    mkdir -p "$root$here"
    mount --rbind -o ro "$here" "$root$here"
    cp "$binary" "$root/usr/local/bin/cnibox"
    cp "$sanity" "$root/usr/local/bin/cni-sanity"
    cp "$tests" "$root/usr/local/bin/integration-tests"
    [ -z "${DIST-}" ] || cp "$DIST"/cnibox_*.deb "$DIST"/cnibox-[0-9]*.rpm "$root/root"
    cd "$root"
    pivot_root . machine
    cd "$here/tests"
    umount --lazy /machine
    export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    export CNIBOX_BIN=/usr/local/bin/cnibox
}

# What runs in a root, called by name: each function prints lines "name outcome" on stdout, and what failed on stderr.

# failures GREP-ARG...: prints what failed of a report, in which there may be nothing.
failures() { grep "$@" /root/report >&2 || true; }

# The versions of the programs, the first number with a point in what they print.
versions() {
    program() { echo "$1 $("${@:2}" 2>&1 | grep -om 1 '[0-9]\+\.[0-9.]*[0-9]' | head -n 1)"; }
    program iptables iptables --version
    program nft nft --version
    program iproute2 ip -V
    package() { echo "$1 $(dpkg-query -W -f '${Version}' "$2" 2>/dev/null | sed 's/[+-].*//')"; }
    package firewalld firewalld
    package reference containernetworking-plugins
}

# What Debian 11's programs cannot do: its nft aborts when it lists the targets of egress, and does not read all rules
# that a test loads; its strace does not know the messages of nf_tables.
declare -A lacks=([bullseye]="egress::flush rules_that_depend_on_a_mark
    foreign_rules_are_evaluated a_killed_second_add a_killed_add")
rules() {
    local status=0 name
    for name in ${lacks[$suite]-}; do patterns+=(--skip "$name"); done
    RUST_BACKTRACE=0 integration-tests --test-threads $((2 * $(nproc))) "${patterns[@]}" >/root/report 2>&1 || status=1
    sed -n 's/^test result: .* \([0-9]*\) passed; \([0-9]*\) failed.*/tests \1 passed, \2 failed/p' /root/report
    failures -e FAILED -A 3 -e 'panicked at'
    return "$status"
}

conformance() {
    local status=0
    cnibox install /opt/cni/bin >/dev/null
    cni-sanity --cni-version 1.1.0 /opt/cni/bin >/root/report || status=1
    sed -n 's/^required: \([0-9]*\) of \([0-9]*\) passed/cni-sanity \1 of \2/p' /root/report
    failures -A 5 '^FAIL required\|^TROUBLE'
    return "$status"
}

# Older releases of containerd do not call STATUS: make test-runtimes.
runtimes() {
    local status=0
    containerd --version 2>&1 | grep -q ' v\?2\.' || return 0
    ./runtimes/run.sh "$CNIBOX_BIN" containerd kubernetes egress status verbs multus >/root/report 2>&1 || status=1
    echo "containerd $(dpkg-query -W -f '${Version}' containerd | sed 's/[~+-].*//'): $(grep -c '^  ok ' /root/report) passed, $(grep -c '^  FAIL' /root/report) failed"
    failures -A 3 '^  FAIL'
    return "$status"
}

debs() {
    "$PWD/packages.sh" /root/cnibox_*.deb >/root/report 2>&1 && echo deb ok && return
    echo deb failed
    tail -n 20 /root/report >&2
    return 1
}

# rpm knows no package of Debian, so no dependency is installed for it.
rpms() {
    fail() { echo rpm failed && echo "rpm: $*" >&2 && exit 1; }
    change() { rpm --nodeps "$@" >/root/report 2>&1 || fail "$* $(cat /root/report)"; }
    answers() { CNI_COMMAND=VERSION /usr/libexec/cni/bridge </dev/null | grep -q 1.1.0 || fail "bridge after $*"; }
    files() { find / -xdev ! -path '/var/*' ! -path '/root/*' | sort; }
    files >/root/before
    change -i /root/cnibox-*.rpm
    answers rpm -i
    change -U --replacepkgs /root/cnibox-*.rpm
    answers rpm -U
    change -e cnibox
    files >/root/after
    # Empty directories of the root are rpm's to delete, which does not know their packages.
    left=$(comm -13 /root/before /root/after)
    [ -z "$left" ] || fail "left: $left"
    echo rpm ok
}

if [ -n "${CNIBOX_USERLANDS_PART-}" ]; then
    read -r suite part <<<"$CNIBOX_USERLANDS_PART"
    enter "$suite"
    "$part"
    exit
fi

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
status=0
for suite in "${suites[@]}"; do
    start=$SECONDS
    create "$suite" >"$out/log" 2>&1 || { tail -n 5 "$out/log" >&2; exit 1; }
    parts=(versions rules runtimes)
    [ -z "${DIST-}" ] || parts+=(debs rpms)
    [ "$suite" != none ] || parts=(conformance)
    for part in "${parts[@]}"; do
        # The mounts end with the mount namespace.
        CNIBOX_USERLANDS_PART="$suite $part" unshare --mount --propagation private "$0" "$@" >>"$out/of-$suite" || status=1
    done
    echo "seconds $((SECONDS - start))" >>"$out/of-$suite"
    echo "date $(date -u +%Y-%m-%d), Linux $(uname -r | cut -d. -f1,2)" >>"$out/of-$suite"
done

print_table() {
    local name line suite
    echo "| programs of |$(printf ' %s |' "${suites[@]}")"
    echo "| --- |$(printf ' --- |%.0s' "${suites[@]}")"
    for name in iptables nft iproute2 firewalld reference tests cni-sanity containerd deb rpm seconds date; do
        line="| $name |"
        for suite in "${suites[@]}"; do
            line+=" $(sed -n "s/^$name //p" "$out/of-$suite") |"
        done
        echo "$line"
    done
}

print_table | tee "$out/table"
[ $status = 1 ] || [ -z "${PAGE-}" ] || "${0%/*}/table.py" userlands.sh "$PAGE" <"$out/table"
exit $status
