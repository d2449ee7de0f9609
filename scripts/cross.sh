#!/bin/sh
# cross.sh TARGET: type-checks all crates and tests for another architecture; builds the static
# executable if a linker is installed; runs it if qemu-user is: VERSION, host-local, the installer.
set -eu
target=$1
cd "$(dirname "$0")/.."
arch=${target%%-*}
# RUSTC may be another compiler with the standard library of the target, such as a distribution's.
sysroot=$("${RUSTC-rustc}" --print sysroot)
[ -d "$sysroot/lib/rustlib/$target/lib" ] || rustup target add "$target" >/dev/null 2>&1 || {
    echo "cross: no standard library for $target: rustup target add $target; or set RUSTC=/usr/bin/rustc" >&2
    echo "cross: after apt install rustc-web libstd-rust-web-dev:arm64 (Debian)" >&2
    exit 1
}
cargo check --quiet --locked --workspace --target "$target" --all-targets
echo "cross: $target: checked"
command -v "$arch-linux-gnu-gcc" >/dev/null || {
    echo "cross: SKIP build: no linker: install Debian's gcc-$arch-linux-gnu and libc6-dev-arm64-cross"
    exit 0
}
make --no-print-directory build TARGET="$target"
binary=${CARGO_TARGET_DIR-target}/$target/release/cnibox
echo "cross: $target: $(stat -c %s "$binary") bytes"
emulator=$(command -v "qemu-$arch-static" || command -v "qemu-$arch") || {
    echo "cross: SKIP run: no qemu-$arch: install Debian's qemu-user-static"
    exit 0
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
run() {
    "$emulator" "$@"
}
for plugin in $(run "$binary" list | awk '$2 != "tool" { print $1 }'); do
    CNI_COMMAND=VERSION run "$binary" "$plugin" </dev/null | grep -q '"1.1.0"'
done
conf='{"cniVersion": "1.1.0", "name": "n", "type": "host-local", "ipam": {"type": "host-local",
    "dataDir": "'$work/leases'", "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00::/64"}]]}}'
for verb in ADD CHECK DEL; do
    echo "$conf" | CNI_COMMAND=$verb CNI_CONTAINERID=c CNI_NETNS=/x CNI_IFNAME=eth0 CNI_PATH="$work" \
        run "$binary" host-local >"$work/$verb" || {
        cat "$work/$verb" >&2
        exit 1
    }
done
grep -q '10.1.0.2/24' "$work/ADD" && grep -q 'fd00::2/64' "$work/ADD"
# --no-verify: without binfmt_misc the installed links cannot be executed.
run "$binary" install --no-verify "$work/bin" >/dev/null
[ "$(readlink "$work/bin/bridge")" = cnibox ]
echo "cross: $target: runs under $(basename "$emulator"): versions, host-local, install"
