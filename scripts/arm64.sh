#!/bin/bash
# arm64.sh BINARY SANITY: runs cni-sanity on arm64. Both executables are built for aarch64; they run on Debian's kernel
# under QEMU's software emulation, with only a busybox beside them. Prints the whole report. Exit status: that of
# cni-sanity; 125 if the VM cannot be started.
#
#   CNIBOX_ARM64_CACHE    directory of the kernel, 80 MB, downloaded once with apt; default /var/cache/cnibox-arm64
#   CNIBOX_ARM64_TIMEOUT  timeout in seconds, default 3000
#   ARGS                  arguments of cni-sanity, such as "--type bridge"; default --cni-version 1.1.0
set -euo pipefail

binary=$1 sanity=$2
cache=${CNIBOX_ARM64_CACHE:-/var/cache/cnibox-arm64}
timeout=${CNIBOX_ARM64_TIMEOUT:-3000}
arguments=${ARGS:---cni-version 1.1.0}

fail() {
    echo "arm64: $*" >&2
    exit 125
}

[ "$(id -u)" = 0 ] || fail "needs root"
for program in qemu-system-aarch64:qemu-system-arm cpio:cpio xz:xz-utils depmod:kmod; do
    command -v "${program%:*}" >/dev/null || fail "needs ${program%:*}, Debian's package ${program#*:}"
done

# apt for arm64, with separate lists and archives.
foreign_apt() {
    local program=$1 work=$cache.new
    shift
    "$program" -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State::status=/dev/null \
        -o Dir::State::lists="$work/lists" -o Dir::Cache="$work" -o APT::Sandbox::User=root \
        -o Acquire::Languages=none "$@"
}

# Downloads the kernel and creates the tree of the initrd, without the executables.
fetch() {
    local new=$cache.new kernel version file
    rm -rf "$new"
    mkdir -p "$new"/{lists/partial,archives/partial,debs,root,tree}
    foreign_apt apt-get update >&2
    kernel=$(foreign_apt apt-cache depends linux-image-arm64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p')
    [ -n "$kernel" ] || fail "apt knows no linux-image-arm64: is this Debian?"
    (cd "$new/debs" && foreign_apt apt-get download "$kernel" busybox-static >&2)
    for file in "$new"/debs/*.deb; do dpkg-deb -x "$file" "$new/root"; done
    version=$(ls "$new/root/lib/modules")
    cp "$new/root/boot/vmlinuz-$version" "$new/kernel"
    cd "$new/tree"
    mkdir -p bin sbin dev etc new proc run sys tmp var/lib/cni "lib/modules/$version"
    cp "$new"/root/lib/modules/"$version"/modules.{builtin,builtin.modinfo,order} "lib/modules/$version/"
    # Network modules, uncompressed, because busybox modprobe loads them on request of the kernel.
    (cd "$new/root/lib/modules/$version" && find kernel/net kernel/lib kernel/crypto kernel/arch kernel/drivers/net -maxdepth 4 -name '*.ko*' |
        grep -Ev '/(wireless|ethernet|bluetooth|can|phy|usb|wan)/' | cpio -pdm --quiet "$new/tree/lib/modules/$version")
    find lib/modules -name '*.xz' -exec xz -d {} +
    depmod -b . "$version"
    cp "$new/root/bin/busybox" bin/busybox
    ln -s ../bin/busybox sbin/modprobe
    mknod -m 600 dev/console c 5 1
    rm -rf "$new"/{lists,archives,debs,root} "$cache"
    mv "$new" "$cache"
}
[ -e "$cache/kernel" ] || (fetch) || fail "could not fetch a kernel"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -a "$cache/tree" "$work/tree"
mkdir -p "$work/tree/plugins"
install -m 755 "$binary" "$work/tree/plugins/cnibox"
install -m 755 "$sanity" "$work/tree/bin/cni-sanity"
# Copies the initramfs into a tmpfs: pivot_root does not work on the initramfs.
cat >"$work/tree/init" <<END
#!/bin/busybox sh
b=/bin/busybox
if [ ! -e /ready ]; then
    \$b mount -t tmpfs -o mode=755 tmpfs /new
    \$b cp -a /bin /sbin /lib /plugins /init /dev /etc /proc /run /sys /tmp /var /new/
    : >/new/ready
    exec \$b switch_root /new /init
fi
export PATH=/bin:/sbin
\$b mount -t proc proc /proc
\$b mount -t sysfs sys /sys
\$b mount -t devtmpfs dev /dev
\$b mkdir -p /dev/net
[ -e /dev/net/tun ] || \$b mknod /dev/net/tun c 10 200
echo /sbin/modprobe >/proc/sys/kernel/modprobe
\$b ip link set lo up
/plugins/cnibox install --no-backup /plugins >/dev/null
\$b uname -rm
/plugins/cnibox version
/bin/cni-sanity $arguments /plugins
echo "arm64: status \$?"
\$b poweroff -f
END
chmod 755 "$work/tree/init"
(cd "$work/tree" && find . | cpio -o -H newc --quiet) | gzip -1 >"$work/initrd"

started=$SECONDS
# Cortex-A72: it lacks pointer authentication, which would take most of the time under emulation.
timeout --foreground "$timeout" qemu-system-aarch64 -machine virt -cpu cortex-a72 -accel tcg,thread=multi -smp "$(nproc)" -m 3G \
    -nodefaults -display none -no-reboot -serial stdio -kernel "$cache/kernel" -initrd "$work/initrd" \
    -append "console=ttyAMA0 quiet panic=-1 nokaslr mitigations=off" </dev/null | tr -d '\r' | tee "$work/log" || true
status=$(sed -n 's/^arm64: status //p' "$work/log")
[ -n "$status" ] || fail "the VM died or exceeded $timeout seconds before cni-sanity ended"
echo "arm64: $((SECONDS - started)) seconds"
exit "$status"
