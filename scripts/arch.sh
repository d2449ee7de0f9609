#!/bin/bash
# arch.sh ARCH BINARY SANITY NATIVE TESTS: runs the unit tests and cni-sanity on another architecture: arm64, armhf,
# ppc64el, riscv64, s390x. All executables but NATIVE are built for it; they run on Debian's kernel under QEMU's
# software emulation, with the programs of the unit tests beside them. TESTS is the executable of the library's unit
# tests. BINARY also takes over state files of NATIVE, the executable of this machine, and NATIVE those of BINARY
# (exchange.sh). Prints the failed unit tests and the whole report of cni-sanity. Exit status: 0 if all passed, 1 if
# not; 125 if the VM cannot be started.
#
#   CNIBOX_ARCH_CACHE    directory of the kernels, 100 MB each, downloaded once with apt; default /var/cache/cnibox-arch
#   CNIBOX_ARCH_TIMEOUT  timeout in seconds, default 5400
#   ARGS                 arguments of cni-sanity, such as "--type bridge"; default --cni-version 1.1.0
#   TESTS_ARGS           arguments of the unit tests, such as "netlink::"
set -euo pipefail

arch=$1 binary=$2 sanity=$3 native=$4 tests=$5
cache=${CNIBOX_ARCH_CACHE:-/var/cache/cnibox-arch}/$arch
timeout=${CNIBOX_ARCH_TIMEOUT:-5400}
arguments=${ARGS:---cni-version 1.1.0}

fail() {
    echo "arch: $*" >&2
    exit 125
}

# Debian's kernel, the suite if it is not that of this machine, QEMU's program, its package, and its options.
suite=
case $arch in
    # Cortex-A72: it lacks pointer authentication, which would take most of the time under emulation.
    arm64) kernel=arm64 program=qemu-system-aarch64 package=qemu-system-arm machine="virt -cpu cortex-a72 -serial stdio" console=ttyAMA0 ;;
    armhf) kernel=armmp-lpae program=qemu-system-arm package=qemu-system-arm machine="virt -cpu cortex-a15 -serial stdio" console=ttyAMA0 ;;
    ppc64el)
        kernel=powerpc64le program=qemu-system-ppc64 package=qemu-system-ppc console=hvc0
        machine="pseries,cap-cfpc=broken,cap-sbbc=broken,cap-ibs=broken,cap-ccf-assist=off -cpu power9 -serial stdio"
        ;;
    # The first release of Debian for riscv64 is 13.
    riscv64)
        kernel=riscv64 program=qemu-system-riscv64 package="qemu-system-misc opensbi" console=ttyS0 suite=trixie
        machine="virt -serial stdio"
        ;;
    s390x)
        kernel=s390x program=qemu-system-s390x package=qemu-system-misc console=ttysclp0
        machine="s390-ccw-virtio -cpu max -chardev stdio,id=console -device sclpconsole,chardev=console"
        ;;
    *) fail "ARCH is one of arm64, armhf, ppc64el, riscv64, s390x, not \"$arch\"" ;;
esac
read -ra machine <<<"$machine"

[ "$(id -u)" = 0 ] || fail "needs root"
for needed in "$program:$package" cpio:cpio depmod:kmod; do
    command -v "${needed%:*}" >/dev/null || fail "needs ${needed%:*}, Debian's package ${needed#*:}"
done

# apt for the architecture, with separate lists and archives.
foreign_apt() {
    local work=$cache.new sources=() tool=$1
    shift
    [ -z "$suite" ] || sources=(-o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null)
    "$tool" -qq -o APT::Architecture="$arch" -o APT::Architectures="$arch" -o Dir::State::status=/dev/null \
        -o Dir::State::lists="$work/lists" -o Dir::Cache="$work" -o APT::Sandbox::User=root \
        -o Acquire::Languages=none -o Acquire::Retries=3 "${sources[@]}" "$@"
}

# The programs that the unit tests call, and modprobe.
programs="bash coreutils dash iproute2 kmod netbase nftables"
# The directories of its modules.
modules="kernel/net kernel/lib kernel/crypto kernel/arch kernel/drivers/net kernel/drivers/virtio"
modules+=" kernel/drivers/block/virtio_blk.ko* kernel/fs/ext4 kernel/fs/jbd2 kernel/fs/mbcache.ko*"

# Downloads the kernel and the programs, and creates the tree of the initrd, without the executables.
fetch() {
    local new=$cache.new image version file directory mirror
    rm -rf "$new"
    mkdir -p "$new"/{lists/partial,archives/partial,root,tree}
    # Another suite comes from the mirror that this machine uses.
    # shellcheck disable=SC2016 # a word of apt-get
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | sed -n 1p)
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$new/sources.list"
    foreign_apt apt-get update >&2
    image=$(foreign_apt apt-cache depends "linux-image-$kernel" | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p')
    [ -n "$image" ] || fail "apt knows no linux-image-$kernel: is this Debian?"
    (cd "$new/root" && foreign_apt apt-get download "$image" >&2 && dpkg-deb -x ./*.deb .) || return
    # shellcheck disable=SC2086 # one word each
    foreign_apt apt-get install -y --download-only --no-install-recommends busybox-static $programs >&2 || return
    [ -d "$new/root/lib/modules" ] || ln -sfn usr/lib "$new/root/lib"
    version=$(ls "$new/root/lib/modules")
    cp "$new"/root/boot/vmlinu[xz]-"$version" "$new/kernel"
    cd "$new/tree"
    mkdir -p dev etc new proc run sys tmp var/lib/cni
    for directory in bin lib lib64 sbin; do
        mkdir -p "usr/$directory"
        ln -s "usr/$directory" "$directory"
    done
    for file in "$new"/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$file" | tar -x --keep-directory-symlink --exclude='./usr/share/*' --exclude='*/perl*' || return
    done
    # What maintainer scripts create.
    [ -e bin/sh ] || ln -s dash bin/sh
    echo "root:x:0:0::/:/bin/sh" >etc/passwd
    mkdir -p "lib/modules/$version"
    cp "$new"/root/lib/modules/"$version"/modules.{builtin,builtin.modinfo,order} "lib/modules/$version/"
    # shellcheck disable=SC2086 # one word each
    (cd "$new/root/lib/modules/$version" && find $modules -maxdepth 4 -name '*.ko*' 2>/dev/null |
        grep -Ev '/(wireless|ethernet|bluetooth|can|phy|usb|wan)/' | cpio -pdm --quiet "$new/tree/lib/modules/$version")
    depmod -b . "$version"
    echo "$programs $modules" >"$new/content"
    mknod -m 600 dev/console c 5 1
    rm -rf "$new"/{lists,archives,root,sources.list} "$cache"
    mv "$new" "$cache"
}
[ "$(cat "$cache/content" 2>/dev/null)" = "$programs $modules" ] || (fetch) || fail "could not fetch a kernel"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# take_state write|read: exchange.sh with the executable of this machine, in a VM of its own.
take_state() {
    CNIBOX_VM_QEMU="-drive file=$work/state,format=raw,if=virtio" scripts/vm.sh scripts/exchange.sh "$1" "$native" /dev/vda
    echo "arch: state files, $1 on $(uname -m): status 0"
}
truncate -s 32M "$work/state"
mkfs.ext4 -q -I 256 "$work/state"
take_state write
cp -a "$cache/tree" "$work/tree"
mkdir -p "$work/tree/plugins"
install -m 755 "$binary" "$work/tree/plugins/cnibox"
install -m 755 "$sanity" "$work/tree/bin/cni-sanity"
install -m 755 "$tests" "$work/tree/bin/unit-tests"
install -m 755 scripts/exchange.sh "$work/tree/bin/exchange"
# Files that unit tests read.
mkdir -p "$work/tree$PWD"
cp -a README.md src "$work/tree$PWD"
# Copies the initramfs into a tmpfs: pivot_root does not work on the initramfs.
cat >"$work/tree/init" <<END
#!/bin/busybox sh
b=/bin/busybox
if [ ! -e /ready ]; then
    \$b mount -t tmpfs -o mode=755 tmpfs /new
    for entry in /*; do [ \$entry = /new ] || \$b cp -a \$entry /new/; done
    \$b mkdir /new/new
    : >/new/ready
    exec \$b switch_root /new /init
fi
export PATH=/bin:/sbin
\$b mount -t proc proc /proc
\$b mount -t sysfs sys /sys
\$b mount -t devtmpfs dev /dev
\$b mkdir -p /dev/net
\$b ln -s /proc/self/fd /dev/fd
[ -e /dev/net/tun ] || \$b mknod /dev/net/tun c 10 200
\$b --install -s /bin 2>/dev/null
echo /sbin/modprobe >/proc/sys/kernel/modprobe
ip link set lo up
/plugins/cnibox install --no-backup /plugins >/dev/null
uname -rm
/plugins/cnibox version
modprobe -q virtio_pci
exchange read /plugins/cnibox /dev/vda && exchange write /plugins/cnibox /dev/vda
echo "arch: state files, read and written on $arch: status \$?, \$(cut -d. -f1 /proc/uptime) seconds after boot"
unit-tests ${TESTS_ARGS-} >/tmp/tests 2>&1
echo "arch: unit tests: status \$?, \$(cut -d. -f1 /proc/uptime) seconds after boot"
sed -n '/^failures:/,\$p; /^test result/p; /^running/p' /tmp/tests
cni-sanity $arguments /plugins
echo "arch: cni-sanity: status \$?, \$(cut -d. -f1 /proc/uptime) seconds after boot"
reboot -f
END
chmod 755 "$work/tree/init"
(cd "$work/tree" && find . | cpio -o -H newc --quiet) | gzip -1 >"$work/initrd"

started=$SECONDS
timeout --foreground "$timeout" "$program" -machine "${machine[@]}" -accel tcg,thread=multi -smp "$(nproc)" -m 2G \
    -drive "file=$work/state,format=raw,if=virtio" \
    -nodefaults -display none -no-reboot -kernel "$cache/kernel" -initrd "$work/initrd" \
    -append "console=$console quiet panic=-1 nokaslr mitigations=off" </dev/null | sed -u 's,\r,,g' | tee "$work/log" || true
echo "arch: $arch: $((SECONDS - started)) seconds"
case $(grep -c '^arch: .*: status [0-9]' "$work/log"):$(grep -c '^arch: .*: status 0' "$work/log") in
    3:3) ;;
    3:*) exit 1 ;;
    *) fail "the VM died or exceeded $timeout seconds before cni-sanity ended" ;;
esac
take_state read
