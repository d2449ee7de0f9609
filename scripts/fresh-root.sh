#!/bin/bash
# fresh-root.sh COMMAND [ARG...]: runs a command in a clean clone of HEAD in a minimal Debian root, as on a machine
# that has only make, git and Rust. scripts/fresh-root.sh make test shows that scripts/prepare.sh names every program.
#
# Needs root and debootstrap. The root takes the machine's package sources, name servers, certificates and settings of
# cargo; the Rust toolchain is the machine's, read-only. All of it is deleted at the end.
#
#   SUITE   Debian's release, default bookworm
#   MIRROR  the archive for debootstrap, default its own
set -euo pipefail
[ $# -gt 0 ] || { sed -n 's/^# //p' "$0" | head -n 1 >&2; exit 2; }
cd "$(dirname "$0")/.."

# The mounts end with the mount namespace, before the root is deleted.
if [ -z "${CNIBOX_FRESH_ROOT-}" ]; then
    CNIBOX_FRESH_ROOT=$(mktemp -d /var/tmp/cnibox-root.XXXXXX)
    export CNIBOX_FRESH_ROOT
    trap 'rm -rf --one-file-system "$CNIBOX_FRESH_ROOT"' EXIT
    # For tests with the rights of other users.
    chmod 755 "$CNIBOX_FRESH_ROOT"
    unshare --mount --propagation private "$0" "$@"
    exit
fi
root=$CNIBOX_FRESH_ROOT
# pivot_root(2) needs a mount point.
mount --bind "$root" "$root"

debootstrap --variant=minbase --include=make,git,ca-certificates "${SUITE:-bookworm}" "$root" ${MIRROR:+"$MIRROR"} >/dev/null
cp -a /etc/apt/. "$root/etc/apt"
cp -L /etc/resolv.conf /etc/hosts "$root/etc"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs"
mkdir -p "$root/opt/rust" "$root/root/.cargo"
mount --rbind -o ro "$(rustc --print sysroot)" "$root/opt/rust"
cargo_home=${CARGO_HOME:-$HOME/.cargo}
[ ! -e "$cargo_home/config.toml" ] || cp "$cargo_home/config.toml" "$root/root/.cargo"
for directory in proc sys dev; do mount --rbind "/$directory" "$root/$directory"; done
mount -t tmpfs tmpfs "$root/run"
# In a container of continuous integration the checkout is not owned by root.
git -c 'safe.directory=*' clone --quiet --upload-pack "git -c 'safe.directory=*' upload-pack" . "$root/root/cnibox"
# Not chroot(2), after which the kernel creates no user namespace.
mkdir "$root/machine"
pivot_root "$root" "$root/machine"
cd /root/cnibox
export HOME=/root PATH=/opt/rust/bin:/root/.cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
umount --lazy /machine
rmdir /machine
exec env --unset=CARGO_HOME --unset=RUSTUP_HOME --unset=CARGO_TARGET_DIR --unset=CNIBOX_FRESH_ROOT "$@"
