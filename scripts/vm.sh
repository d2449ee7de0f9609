#!/bin/bash
# vm.sh COMMAND [ARG...]: runs a command as root on Debian's kernel, which has every link kind and
# packet filter that the machine's kernel may lack, and returns the exit status of the command.
#
# The kernel runs on KVM where a guest starts there, otherwise under QEMU's software emulation, so no
# virtualisation is needed. The VM sees the files of this machine; its writes are discarded at its end. It has its own
# network and an empty /run. Working directory, environment, stdout and stderr are the caller's; stdin is empty.
# Under emulation programs take 10 to 15 times as long as on the machine. vm.sh --setup only downloads the kernel and
# QEMU: once, 90 MB, with apt, without installing packages.
#
#   CNIBOX_VM_CACHE    directory of the downloads; default /var/cache/cnibox-vm
#   CNIBOX_VM_SUITE    the kernel of another release of Debian, such as trixie; in a directory beside the other's
#   CNIBOX_VM_TIMEOUT  timeout of the command in seconds, default 900; then exit status 124
#   CNIBOX_VM_ACCEL    QEMU's accelerator; default kvm if a guest starts within 20 seconds, otherwise tcg
#   CNIBOX_VM_CPU      the CPU; default host with kvm, Nehalem with tcg
#   CNIBOX_VM_MEM      memory, default 2G
#   CNIBOX_VM_QEMU     additional arguments of QEMU, such as "-device e1000"
#   CNIBOX_VM_LOG      file for the kernel's log
#
# Exit status 125: the VM cannot be started, or it died; the reason is on stderr.
set -euo pipefail

suite=${CNIBOX_VM_SUITE:-}
common=${CNIBOX_VM_CACHE:-/var/cache/cnibox-vm}
cache=$common${suite:+-$suite}
timeout=${CNIBOX_VM_TIMEOUT:-900}

# Maximum number of starts, and timeout of a boot in seconds: a boot takes three seconds, but minutes
# on a loaded machine. A VM that does not boot in time is reported, stopped and started again.
tries=3 boot=240

# A /dev/kvm without support of the processor opens, but its guests stop before their first message.
# The file contains the id of the boot in which a guest failed.
boot_on_kvm=20 no_kvm=$common/no-kvm

say() { echo "vm: $*" >&2; }

fail() {
    say "$@"
    exit 125
}

# --- fetching ----------------------------------------------------------------------------------------

# apt with separate lists and archives: neither locks nor changes those of the machine.
private_apt() {
    local program=$1 sources=()
    shift
    [ -z "$suite" ] || sources=(-o Dir::Etc::sourcelist="$new/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o Dir::State::status=/dev/null)
    "$program" -qq "${sources[@]}" -o Dir::State::lists="$new/apt/lists" -o Dir::Cache="$new/apt" -o Debug::NoLocking=1 \
        -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=3 "$@"
}

# depends_of PACKAGE: the parts of the kernel that the package depends on.
depends_of() {
    private_apt apt-cache depends "$1" | sed -n 's/.*Depends: \(linux-\(base\|binary\|image\|modules\)-[0-9].*\)/\1/p'
}

# Downloads the packages of the kernel, a static busybox and, unless installed, QEMU with its libraries.
download() {
    local kernel parts mirror
    # Another suite comes from the mirror that this machine uses.
    # shellcheck disable=SC2016 # a word of apt-get
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | sed -n 1p)
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$new/sources.list"
    private_apt apt-get update >&2 || return
    kernel=$(depends_of linux-image-amd64)
    [ -n "$kernel" ] || { say "apt knows no linux-image-amd64: is this Debian?"; return 1; }
    # Newer releases have the modules in packages of their own.
    parts=$(depends_of "$kernel")
    say "fetching $kernel into $cache"
    # shellcheck disable=SC2086 # several packages
    (cd "$new/apt/archives" && private_apt apt-get download "$kernel" $parts busybox-static >&2) || return
    [ -z "$suite" ] || return 0
    command -v qemu-system-x86_64 >/dev/null ||
        private_apt apt-get install -y --download-only --no-install-recommends qemu-system-x86 >&2
}

unpack() {
    local package
    for package in "$new"/apt/archives/*.deb; do
        # Drivers of physical hardware are most of the kernel's size.
        dpkg --fsys-tarfile "$package" | tar -x -C "$new/root" --exclude='*/drivers/gpu' \
            --exclude='*/drivers/media' --exclude='*/drivers/scsi' --exclude='*/drivers/usb' \
            --exclude='*/net/wireless' --exclude='*/kernel/sound' --exclude='*/share/doc' || return
    done
}

# Extracts the uncompressed kernel, which QEMU boots fastest; if that fails, copies the compressed one.
make_kernel() {
    local packed=$new/root/boot/vmlinuz-$version at
    [ -e "$packed" ] || packed=$new/root/lib/modules/$version/vmlinuz
    at=$(LC_ALL=C grep -abom1 -P '\xfd7zXZ\x00' "$packed" | cut -d: -f1) || at=
    # The data after the compressed kernel makes xz fail.
    [ -z "$at" ] || tail -c "+$((at + 1))" "$packed" | xz -dcq >"$new/kernel" 2>/dev/null || true
    [ "$(head -c 4 "$new/kernel" 2>/dev/null | tail -c 3)" = ELF ] || cp "$packed" "$new/kernel"
}

# The initrd: busybox, the modules for 9p over virtio and overlayfs, and the init script.
make_initrd() {
    local module file number=100 tree=$new/tree
    mkdir -p "$tree"/{bin,dev,modules,new,proc,sys,lower,upper}
    cp "$new/root/bin/busybox" "$tree/bin/busybox"
    mknod -m 600 "$tree/dev/console" c 5 1
    for module in virtio_pci 9pnet_virtio 9p overlay; do
        modprobe -d "$new/root" -S "$version" --show-depends "$module" | sed -n 's/^insmod //p'
    done | while read -r file _; do
        number=$((number + 1))
        case $file in
            *.xz) xz -dc "$file" ;;
            *) cat "$file" ;;
        esac >"$tree/modules/$number"
    done
    first_stage >"$tree/init"
    chmod 755 "$tree/init"
    (cd "$tree" && find . | "$new/root/bin/busybox" cpio -o -H newc) >"$new/initrd" 2>/dev/null
}

setup() {
    [ "$(id -u)" = 0 ] || fail "needs root, to share the machine's files with the VM"
    [ "$(uname -m)" = x86_64 ] || fail "supports only x86_64, this is $(uname -m)"
    mkdir -p "${cache%/*}"
    # QEMU is that of this machine's release.
    [ -z "$suite" ] || CNIBOX_VM_SUITE='' "$0" --setup
    exec 9>"$cache.lock"
    flock 9
    if [ ! -e "$cache/version" ]; then
        for program in apt-get dpkg modprobe xz; do
            command -v "$program" >/dev/null || fail "needs $program to fetch a kernel and QEMU"
        done
        new=$cache.new
        rm -rf "$new"
        mkdir -p "$new"/apt/lists/partial "$new"/apt/archives/partial "$new/root/lib"
        { download && unpack; } || fail "could not fetch a kernel and QEMU"
        # Kernel packages contain /lib/modules or /usr/lib/modules, depending on the release.
        [ -d "$new/root/lib/modules" ] || ln -s ../usr/lib/modules "$new/root/lib/modules"
        mkdir -p "$new/root/bin"
        [ -e "$new/root/bin/busybox" ] || ln -s ../usr/bin/busybox "$new/root/bin/busybox"
        version=$(ls "$new/root/lib/modules")
        depmod -b "$new/root" "$version"
        { make_kernel && make_initrd; } || fail "could not create the kernel image and the initrd"
        rm -rf "$new/apt" "$new/tree" "$new/root/boot" "$cache"
        echo "$version" >"$new/version"
        mv "$new" "$cache"
    fi
    exec 9>&-
}

# Executes the machine's QEMU, or the downloaded one.
qemu() {
    local root=$common/root
    if command -v qemu-system-x86_64 >/dev/null; then
        exec setpriv --pdeathsig KILL qemu-system-x86_64 "$@"
    fi
    export LD_LIBRARY_PATH=$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu
    export QEMU_MODULE_DIR=$root/usr/lib/x86_64-linux-gnu/qemu
    # Modules that are installed on the machine, shared by QEMUs of all architectures, were not downloaded.
    [ -d "$QEMU_MODULE_DIR" ] || QEMU_MODULE_DIR=/usr/lib/x86_64-linux-gnu/qemu
    exec setpriv --pdeathsig KILL "$root/usr/bin/qemu-system-x86_64" \
        -L "$root/usr/share/qemu" -L /usr/share/qemu -L "$root/usr/share/seabios" -L "$root/usr/lib/ipxe/qemu" "$@"
}

# --- in the VM ---------------------------------------------------------------------------------------

# Process 1 in the initrd: mounts a tmpfs as overlay over the machine's files, and switches the root to
# it.
first_stage() {
    cat <<'END'
#!/bin/busybox sh
alias mount='/bin/busybox mount' mkdir='/bin/busybox mkdir' ln='/bin/busybox ln'
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /modules/*; do /bin/busybox insmod $module; done
shared=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o $shared,cache=loose,ro root /lower
mount -t tmpfs -o mode=755,size=75% upper /upper
mkdir /upper/files /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work root /new
mount -t tmpfs -o mode=755 run /new/run
mkdir -p /new/run/lock /new/run/netns /new/run/vm
mount -t 9p -o $shared,cache=none vm /new/run/vm
mkdir -p /new/lib/modules /dev/pts /dev/shm /dev/net
mount --bind "/lower$(/bin/busybox cat /new/run/vm/cache)/root/lib/modules" /new/lib/modules
/bin/busybox mknod /dev/net/tun c 10 200
mount -t devpts -o ptmxmode=666 pts /dev/pts
mount -t tmpfs shm /dev/shm
ln -sf /proc/self/fd /dev/fd
ln -sf /proc/self/fd/0 /dev/stdin
ln -sf /proc/self/fd/1 /dev/stdout
ln -sf /proc/self/fd/2 /dev/stderr
/bin/busybox ifconfig lo up
for directory in proc sys dev; do mount --move /$directory /new/$directory; done
/bin/busybox cp /bin/busybox /new/run/busybox
exec /bin/busybox switch_root /new /run/busybox sh /run/vm/init
END
}

# Process 1 after switch_root: runs the command, and powers the VM off.
second_stage() {
    cat <<'END'
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd /run/vm
: >up
bash command </dev/null >>stdout 2>>stderr
echo $? >status.new
/run/busybox mv status.new status
/run/busybox poweroff -f
END
}

# --- running -----------------------------------------------------------------------------------------

# Whether KVM may work: the device exists, and no guest has failed to start since the boot of the machine.
may_have_kvm() {
    # Not cmp -s, for which files differ whose sizes do; that of the second one is 0.
    [ -r /dev/kvm ] && [ -w /dev/kvm ] && [ "$(cat "$no_kvm" 2>/dev/null)" != "$(cat /proc/sys/kernel/random/boot_id)" ]
}

# start ACCELERATOR: starts the VM in the background.
start() {
    local accel=$1 cpu=Nehalem more
    [ "$accel" != kvm ] || cpu=host
    [ "$accel" != tcg ] || accel=tcg,thread=multi,tb-size=512
    read -ra more <<<"${CNIBOX_VM_QEMU:-}"
    # norandmaps: TCG reuses translated code only at the same address; programs start three times as
    # fast. Nehalem without rep_good: rep-prefixed instructions are slow under TCG. One processor:
    # several would wait for each other. no_timer_check, nowatchdog: on a loaded machine ticks are
    # late, and the kernel would report a broken timer or a stuck program.
    local options="console=ttyS0 quiet panic=-1 oops=panic mitigations=off nokaslr norandmaps"
    options+=" clearcpuid=rep_good init_on_alloc=0 lsm=landlock,capability audit=0 transparent_hugepage=never"
    options+=" randomize_kstack_offset=off random.trust_cpu=on rcupdate.rcu_expedited=1 tsc=reliable no_timer_check nowatchdog net.ifnames=0"
    qemu -machine pc -accel "$accel" -cpu "${CNIBOX_VM_CPU:-$cpu}" -smp 1 -m "${CNIBOX_VM_MEM:-2G}" \
        -nodefaults -no-user-config -display none -no-reboot -serial "file:$dir/log" \
        -kernel "$cache/kernel" -initrd "$cache/initrd" -append "$options" \
        -virtfs local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap \
        -virtfs "local,path=$dir,mount_tag=vm,security_model=none" "${more[@]}" \
        </dev/null >"$dir/qemu" 2>&1 &
    vm=$!
    # So that bash does not report the termination of the VM.
    disown "$vm"
}

stop() {
    [ -z "$vm" ] || kill -KILL "$vm" 2>/dev/null || true
    vm=
}

# await FILE SECONDS: waits until the file exists, the VM has ended, or the timeout.
await() {
    local file=$1 end=$((SECONDS + $2))
    while [ ! -e "$dir/$file" ] && kill -0 "$vm" 2>/dev/null && [ $SECONDS -lt $end ]; do
        sleep 0.1
    done
    [ -e "$dir/$file" ]
}

# shellcheck disable=SC2317 # called by trap
clean_up() {
    stop
    [ -z "${CNIBOX_VM_LOG:-}" ] || cp "$dir/log" "$CNIBOX_VM_LOG" || true
    rm -rf "$dir"
}

[ $# -gt 0 ] || fail "usage: scripts/vm.sh COMMAND [ARG...]"
setup
[ "$1" != --setup ] || exit 0

vm=
dir=$(mktemp -d)
trap clean_up EXIT
trap 'exit 130' INT TERM HUP
second_stage >"$dir/init"
realpath "$cache" >"$dir/cache"
touch "$dir/stdout" "$dir/stderr"
{
    export -p
    printf 'cd %q || exit 125\nexec' "$PWD"
    printf ' %q' "$@"
} >"$dir/command"

accel=${CNIBOX_VM_ACCEL:-tcg}
if [ -z "${CNIBOX_VM_ACCEL:-}" ] && may_have_kvm; then
    start kvm
    if await up $boot_on_kvm; then
        accel=kvm
    else
        stop
        say "no guest starts on /dev/kvm in $boot_on_kvm seconds: emulation"
        cat /proc/sys/kernel/random/boot_id >"$no_kvm"
    fi
fi
for ((try = 1; ; try++)); do
    [ -n "$vm" ] || start "$accel"
    ! await up $boot || break
    stop
    say "start $try of $tries: the VM did not boot in $boot seconds"
    tail -n 20 "$dir/qemu" "$dir/log" >&2 || true
    [ $try -lt $tries ] || exit 125
done
tail -f -s 0.1 -c +1 --pid="$vm" "$dir/stdout" &
out=$!
tail -f -s 0.1 -c +1 --pid="$vm" "$dir/stderr" >&2 &
err=$!
end=$((SECONDS + timeout))
await status "$timeout" || true
# The VM powers itself off.
[ ! -e "$dir/status" ] || await never 5 || true
stop
wait "$out" "$err" || true
[ ! -e "$dir/status" ] || exit "$(<"$dir/status")"
if [ $SECONDS -ge $end ]; then
    say "the command took more than $timeout seconds"
    exit 124
fi
say "the VM died before the command ended"
tail -n 40 "$dir/qemu" "$dir/log" >&2 || true
exit 125
