#!/bin/sh
# cross.sh TARGET: type-checks all crates and tests for another architecture; builds the static executable if a linker
# is installed; runs it if qemu-user is: VERSION, host-local, the installer, and state files exchanged with the
# executable of this machine.
set -eu
target=$1
cd "$(dirname "$0")/.."
say() {
    echo "cross: $target: $*"
}
row=$(grep "^$target " scripts/targets.txt) || {
    say "not in scripts/targets.txt" >&2
    exit 1
}
read -r _ deb _ _ gnu qemu <<END
$row
END
scripts/prepare.sh "$target" || true

# RUSTC may be another compiler with the standard library of the target, such as a distribution's.
sysroot=$("${RUSTC-rustc}" --print sysroot)
[ -d "$sysroot/lib/rustlib/$target/lib" ] || rustup target add "$target" >/dev/null 2>&1 || {
    say "no standard library: rustup target add $target; or set RUSTC=/usr/bin/rustc" >&2
    say "after apt install rustc-web libstd-rust-web-dev:$deb (Debian)" >&2
    exit 1
}
say "the standard library of $("${RUSTC-rustc}" --version), $sysroot"
cargo check --quiet --locked --workspace --target "$target" --all-targets
say checked
command -v "$gnu-gcc" >/dev/null || {
    say "SKIP build: no linker: install Debian's gcc-$gnu and libc6-dev-$deb-cross"
    exit 0
}
make --no-print-directory build TARGET="$target"
binary=${CARGO_TARGET_DIR-target}/$target/release/cnibox
scripts/static-pie.sh "$binary"
say "$(stat -c %s "$binary") bytes"
emulator=$(command -v "qemu-$qemu-static" || command -v "qemu-$qemu") || {
    say "SKIP run: no qemu-$qemu: install Debian's qemu-user-static"
    exit 0
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
there() {
    "$emulator" "$binary" "$@"
}
for plugin in $(there list | awk '$2 != "tool" { print $1 }'); do
    CNI_COMMAND=VERSION there "$plugin" </dev/null | grep -q '"1.1.0"'
done
# --no-verify: without binfmt_misc the installed links cannot be executed.
there install --no-verify "$work/bin" >/dev/null
[ "$(readlink "$work/bin/bridge")" = cnibox ]
say "runs under $(basename "$emulator"): versions, install"

# The executable of this machine, as there(); HOST is its target in the Makefile.
host=${HOST:-$("${RUSTC-rustc}" -vV | sed -n 's/^host: //p')}
make --no-print-directory build TARGET="$host"
here() {
    "${CARGO_TARGET_DIR-target}/$host/release/cnibox" "$@"
}
# call WHERE VERB CONTAINER: calls host-local; its result is in $work/VERB.
call() {
    echo '{"cniVersion": "1.1.0", "name": "n", "type": "host-local", "ipam": {"type": "host-local", "reuseDelay": 3600,
        "dataDir": "'"$work/leases"'", "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00::/64"}]]}}' |
        CNI_COMMAND=$2 CNI_CONTAINERID=$3 CNI_NETNS=/x CNI_IFNAME=eth0 CNI_PATH="$work" "$1" host-local >"$work/$2" || {
        cat "$work/$2" >&2
        exit 1
    }
}
# Each reads, and seals, the leases and the journal of the other; an address that is held back is not given out.
number=2
for pair in "there there" "there here" "here there"; do
    first=${pair% *} second=${pair#* }
    call "$first" ADD c1
    grep -q "10.1.0.$number/24" "$work/ADD" && grep -q "fd00::$number/64" "$work/ADD"
    inode=$(stat -c %i "$work/leases/n/.cnibox/leases")
    call "$second" CHECK c1
    call "$second" ADD c2
    call "$first" DEL c1
    call "$second" DEL c2
    # A journal that the other could not read would have been written anew.
    [ "$inode" = "$(stat -c %i "$work/leases/n/.cnibox/leases")" ]
    number=$((number + 2))
done
say "leases and their journal are exchanged with $host"
