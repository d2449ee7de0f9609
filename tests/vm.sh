#!/bin/bash
# vm.sh COMMAND [ARG...]: runs the command as root in Debian's own kernel, which has every link kind
# and filter that the machine's kernel may lack, and ends with its exit status.
#
# The kernel runs under QEMU's software emulation, so no virtualisation is needed. It sees this
# machine's files: all of them writable, nothing written survives. Its network is its own, /run is
# empty. Folder, environment, stdout and stderr are the caller's; stdin is empty. Programs take 10
# to 15 times as long as here. vm.sh --setup only fetches what is needed: once, 90 MB, with apt,
# installing nothing.
#
#   CNIBOX_VM_CACHE    where what was fetched is kept; default /var/cache/cnibox-vm
#   CNIBOX_VM_TIMEOUT  seconds the command may take, default 900; then exit status 124
#   CNIBOX_VM_ACCEL    QEMU's accelerator, default tcg; CNIBOX_VM_CPU the CPU it shows, default Nehalem
#   CNIBOX_VM_MEM      memory, default 2G
#   CNIBOX_VM_QEMU     more arguments for QEMU, such as "-device e1000"
#   CNIBOX_VM_LOG      file for the kernel's log
#
# Exit status 125: there is no VM to be had, or it died; stderr says why.
set -euo pipefail

cache=${CNIBOX_VM_CACHE:-/var/cache/cnibox-vm}
timeout=${CNIBOX_VM_TIMEOUT:-900}

# How often a VM is started, and how many seconds it has to come up: a boot takes three, and minutes
# where others want the processors. One that does not come up is stopped, told of and started again.
tries=3 boot=240

say() { echo "vm: $*" >&2; }

fail() {
    say "$@"
    exit 125
}

# --- fetching ----------------------------------------------------------------------------------------

# apt with lists and archives of its own: neither locks nor changes the machine's.
private_apt() {
    local program=$1
    shift
    "$program" -qq -o Dir::State::lists="$new/apt/lists" -o Dir::Cache="$new/apt" -o Debug::NoLocking=1 \
        -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=3 "$@"
}

# The archives of the kernel, a static busybox and, unless it is installed, QEMU with its libraries.
download() {
    local kernel
    private_apt apt-get update >&2 || return
    kernel=$(private_apt apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p')
    [ -n "$kernel" ] || { say "apt knows no linux-image-amd64: is this Debian?"; return 1; }
    say "fetching $kernel and qemu-system-x86 into $cache"
    (cd "$new/apt/archives" && private_apt apt-get download "$kernel" busybox-static >&2) || return
    command -v qemu-system-x86_64 >/dev/null ||
        private_apt apt-get install -y --download-only --no-install-recommends qemu-system-x86 >&2
}

unpack() {
    local package
    for package in "$new"/apt/archives/*.deb; do
        # The drivers of the machines out there are most of a kernel's size.
        dpkg --fsys-tarfile "$package" | tar -x -C "$new/root" --exclude='*/drivers/gpu' \
            --exclude='*/drivers/media' --exclude='*/drivers/scsi' --exclude='*/drivers/usb' \
            --exclude='*/net/wireless' --exclude='*/kernel/sound' --exclude='*/share/doc' || return
    done
}

# The kernel as QEMU starts it fastest, unpacked; where that fails, as it is.
make_kernel() {
    local packed=$new/root/boot/vmlinuz-$version at
    at=$(LC_ALL=C grep -abom1 -P '\xfd7zXZ\x00' "$packed" | cut -d: -f1) || at=
    # Behind the kernel there is more, which xz complains about.
    [ -z "$at" ] || tail -c "+$((at + 1))" "$packed" | xz -dcq >"$new/kernel" 2>/dev/null || true
    [ "$(head -c 4 "$new/kernel" 2>/dev/null | tail -c 3)" = ELF ] || cp "$packed" "$new/kernel"
}

# The first files that the kernel sees: busybox, the drivers to reach the others with, a script.
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
    [ "$(uname -m)" = x86_64 ] || fail "knows only x86_64, this is $(uname -m)"
    mkdir -p "${cache%/*}"
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
        # Where a kernel's package has them depends on the release.
        [ -d "$new/root/lib/modules" ] || ln -s ../usr/lib/modules "$new/root/lib/modules"
        [ -e "$new/root/bin/busybox" ] || ln -s ../usr/bin/busybox "$new/root/bin/busybox"
        version=$(ls "$new/root/lib/modules")
        depmod -b "$new/root" "$version"
        { make_kernel && make_initrd; } || fail "could not make the files to boot from"
        rm -rf "$new/apt" "$new/tree" "$new/root/boot" "$cache"
        echo "$version" >"$new/version"
        mv "$new" "$cache"
    fi
    exec 9>&-
}

# QEMU: the machine's, or the one that was fetched.
qemu() {
    local root=$cache/root
    if command -v qemu-system-x86_64 >/dev/null; then
        exec setpriv --pdeathsig KILL qemu-system-x86_64 "$@"
    fi
    export LD_LIBRARY_PATH=$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu
    export QEMU_MODULE_DIR=$root/usr/lib/x86_64-linux-gnu/qemu
    # apt does not fetch what the machine has, which shares it between QEMUs of all architectures.
    [ -d "$QEMU_MODULE_DIR" ] || QEMU_MODULE_DIR=/usr/lib/x86_64-linux-gnu/qemu
    exec setpriv --pdeathsig KILL "$root/usr/bin/qemu-system-x86_64" \
        -L "$root/usr/share/qemu" -L /usr/share/qemu -L "$root/usr/share/seabios" -L "$root/usr/lib/ipxe/qemu" "$@"
}

# --- in the VM ---------------------------------------------------------------------------------------

# Process 1 as long as there is nothing but the initrd: puts the machine's files below a file system
# in memory, and goes over to them.
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
for folder in proc sys dev; do mount --move /$folder /new/$folder; done
/bin/busybox cp /bin/busybox /new/run/busybox
exec /bin/busybox switch_root /new /run/busybox sh /run/vm/init
END
}

# Process 1 from then on: runs the command, and switches off.
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

# Starts the VM in the background.
start() {
    local accel=${CNIBOX_VM_ACCEL:-tcg} more
    [ "$accel" != tcg ] || accel=tcg,thread=multi,tb-size=512
    read -ra more <<<"${CNIBOX_VM_QEMU:-}"
    # norandmaps: translated code is used again only at the same address, which makes programs start
    # three times as fast. Nehalem without rep_good: loops of single instructions cost TCG too much.
    # One processor: with more, they wait for each other. no_timer_check, nowatchdog: where others want
    # the processors, ticks come late, and the kernel would take its timer for broken or a program for
    # stuck.
    local options="console=ttyS0 quiet panic=-1 oops=panic mitigations=off nokaslr norandmaps"
    options+=" clearcpuid=rep_good init_on_alloc=0 lsm=capability audit=0 transparent_hugepage=never"
    options+=" randomize_kstack_offset=off random.trust_cpu=on rcupdate.rcu_expedited=1 tsc=reliable no_timer_check nowatchdog net.ifnames=0"
    qemu -machine pc -accel "$accel" -cpu "${CNIBOX_VM_CPU:-Nehalem}" -smp 1 -m "${CNIBOX_VM_MEM:-2G}" \
        -nodefaults -no-user-config -display none -no-reboot -serial "file:$dir/log" \
        -kernel "$cache/kernel" -initrd "$cache/initrd" -append "$options" \
        -virtfs local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap \
        -virtfs "local,path=$dir,mount_tag=vm,security_model=none" "${more[@]}" \
        </dev/null >"$dir/qemu" 2>&1 &
    vm=$!
    # Its end is nothing to report.
    disown "$vm"
}

stop() {
    [ -z "$vm" ] || kill -KILL "$vm" 2>/dev/null || true
    vm=
}

# Waits until the file is there, or the VM is not, or the time is over.
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

[ $# -gt 0 ] || fail "usage: tests/vm.sh COMMAND [ARG...]"
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

for ((try = 1; ; try++)); do
    start
    ! await up $boot || break
    stop
    say "start $try of $tries: it did not come up"
    tail -n 20 "$dir/qemu" "$dir/log" >&2 || true
    [ $try -lt $tries ] || exit 125
done
tail -f -s 0.1 -c +1 --pid="$vm" "$dir/stdout" &
out=$!
tail -f -s 0.1 -c +1 --pid="$vm" "$dir/stderr" >&2 &
err=$!
end=$((SECONDS + timeout))
await status "$timeout" || true
# It switches itself off.
[ ! -e "$dir/status" ] || await never 5 || true
stop
wait "$out" "$err" || true
[ ! -e "$dir/status" ] || exit "$(<"$dir/status")"
if [ $SECONDS -ge $end ]; then
    say "the command took more than $timeout seconds"
    exit 124
fi
say "it died before the command ended"
tail -n 40 "$dir/qemu" "$dir/log" >&2 || true
exit 125
