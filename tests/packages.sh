#!/bin/bash
# packages.sh [DEB]: installs the deb of cnibox over a stand-in of Debian's package of the reference, upgrades the reference,
# and removes the deb again, in a root of its own, while a loop calls the plugin. No call may fail, and nothing may be left.
# Without DEB the maintainer scripts are tested with a stand-in of cnibox.
#
# Exit status 77 without dpkg and apt.
set -euo pipefail
for program in dpkg dpkg-deb dpkg-divert apt-get; do
    command -v $program >/dev/null || exit 77
done
here=$(readlink -f "$(dirname "$0")/..")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
lib=/usr/lib/cni
arch=$(dpkg --print-architecture)
export SOURCE_DATE_EPOCH=0

fail() {
    echo "packages: $*" >&2
    exit 1
}

# plugin FILE TEXT: creates a plugin that prints the text.
plugin() {
    mkdir -p "$(dirname "$1")"
    printf '#!/bin/sh\necho %s\n' "$2" >"$1"
    chmod 755 "$1"
}

# reference VERSION: the stand-in of the reference, and its version as the output of its plugins.
reference() {
    local tree=$work/reference-$1 name
    for name in bridge portmap; do
        plugin "$tree$lib/$name" "reference $1"
    done
    mkdir "$tree/DEBIAN"
    printf '%s\n' "Package: containernetworking-plugins" "Version: $1" "Architecture: $arch" "Maintainer: none <none@localhost>" \
        "Provides: container-network-stack (= 1)" "Description: stand-in" >"$tree/DEBIAN/control"
    dpkg-deb --root-owner-group -Znone --build "$tree" "$work/reference-$1.deb" >/dev/null
}
reference 1.1.1
reference 1.1.2

deb=${1-}
if [ -z "$deb" ]; then
    tree=$work/cnibox
    plugin "$tree$lib/cnibox" '\"1.1.0\"'
    for name in bridge portmap tap; do
        ln -s cnibox "$tree$lib/$name"
    done
    mkdir -p "$tree/usr/lib/systemd/system"
    cp "$here"/packaging/systemd/*.service "$tree/usr/lib/systemd/system/"
    # The executable has some megabytes.
    head -c 4000000 /dev/urandom >"$tree$lib/ballast"
    COMPRESSION=none "$here/packaging/deb.sh" cnibox "$tree" "$work" 0.2.0 "$arch" $lib bridge portmap tap
    deb=$work/cnibox_0.2.0_$arch.deb
fi
deb=$(readlink -f "$deb")

mkdir -p "$root"/var/lib/dpkg/{info,updates,triggers} "$root"/var/lib/apt/lists/partial "$root"/var/cache/apt/archives/partial \
    "$root"/etc/apt/{apt.conf.d,preferences.d,trusted.gpg.d} "$root"/var/log/apt
touch "$root"/var/lib/dpkg/{status,available} "$root/etc/apt/sources.list"

options=(--root="$root" --force-not-root --force-script-chrootless --log="$work/dpkg.log")
# apt COMMAND...: apt-get in the root, without the host's packages and downloads.
apt() {
    local set=() option
    for option in "${options[@]}"; do
        set+=(-o "DPkg::Options::=$option")
    done
    apt-get -q -y -o Dir="$root" -o Dir::Bin::dpkg="$(command -v dpkg)" -o Dir::State::status="$root/var/lib/dpkg/status" \
        -o APT::Architecture="$arch" -o APT::Sandbox::User=root -o APT::Install-Recommends=false "${set[@]}" "$@" >"$work/apt" 2>&1 || {
        cat "$work/apt" >&2
        fail "apt-get $*"
    }
}

# calls FILE: calls the plugin until the flag is gone, and writes each answer as a line.
calls() {
    local answer
    while [ -e "$work/calling" ]; do
        answer=$(CNI_COMMAND=VERSION "$root$lib/bridge" 2>&1 </dev/null) || answer="failed: $answer"
        # The shell of a stand-in opens the file by its name, and found the executable that took its place meanwhile.
        case $answer in *"Syntax error"*) continue ;; esac
        echo "$answer"
    done >"$1"
}

# during WHAT BEFORE AFTER COMMAND...: no call fails while the command runs; BEFORE and AFTER are in the first and the last answer.
during() {
    local what=$1 before=$2 after=$3 caller bad
    shift 3
    touch "$work/calling"
    calls "$work/answers" &
    caller=$!
    sleep 0.2
    "$@"
    sleep 0.2
    rm "$work/calling"
    wait $caller
    bad=$(grep -vc -e "$before" -e "$after" "$work/answers" || true)
    echo "packages: $what: $(wc -l <"$work/answers") calls, $bad failed"
    [ "$bad" = 0 ] || fail "$what: $(grep -v -e "$before" -e "$after" "$work/answers" | sort | uniq -c | head -n 3)"
    head -n 1 "$work/answers" | grep -q -e "$before" || fail "$what: not $before before"
    tail -n 1 "$work/answers" | grep -q -e "$after" || fail "$what: not $after after"
}

status() {
    dpkg-query --admindir="$root/var/lib/dpkg" -W -f '${db:Status-Abbrev}' "$1" 2>/dev/null || true
}

unwanted=$work/unwanted
mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
apt install "$work/reference-1.1.1.deb"
during "apt install cnibox" "reference 1.1.1" 1.1.0 apt install "$deb"
[ "$(status containernetworking-plugins)" = "ii " ] || fail "the reference is not installed any more"
during "upgrade of the reference" 1.1.0 1.1.0 apt install "$work/reference-1.1.2.deb"
during "cnibox once more" 1.1.0 1.1.0 apt install --reinstall "$deb"
(cd "$root" && md5sum --quiet -c var/lib/dpkg/info/cnibox.md5sums) || fail "md5sums"
ln -s /usr/lib/systemd/system/cnibox-repair.service "$root/etc/systemd/system/multi-user.target.wants/"
during "apt purge cnibox" 1.1.0 "reference 1.1.2" apt purge cnibox
[ -z "$(dpkg-divert --admindir "$root/var/lib/dpkg" --list)" ] || fail "diversions are left: $(cat "$root/var/lib/dpkg/diversions")"
{
    find "$root" -name '*cnibox*' ! -path '*/var/*'
    find "$root$lib" -mindepth 1 ! -name bridge ! -name portmap
} >"$unwanted"
[ ! -s "$unwanted" ] || fail "left: $(cat "$unwanted")"

# Without the reference nothing is restored, and in the other order neither.
apt purge containernetworking-plugins
[ ! -e "$root$lib/bridge" ] || fail "the reference is still there"
apt install "$work/reference-1.1.1.deb" "$deb"
apt purge containernetworking-plugins
"$root$lib/bridge" </dev/null >/dev/null 2>&1 || CNI_COMMAND=VERSION "$root$lib/bridge" </dev/null >/dev/null || fail "cnibox is gone with the reference"
apt purge cnibox
[ ! -e "$root$lib" ] || fail "left: $(find "$root$lib")"
