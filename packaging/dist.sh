#!/bin/sh
# dist.sh BINARY TARGET OUT [HOST-BINARY]: everything that is released for one architecture, into
# the folder OUT. HOST-BINARY runs here where BINARY does not.
#
# The same source gives the same bytes: times are SOURCE_DATE_EPOCH, names are sorted.
set -eu

binary=$1 target=$2 out=$3 host=${4-$1}
here=$(dirname "$0")
cd "$here/.."
: "${SOURCE_DATE_EPOCH:?}"
export SOURCE_DATE_EPOCH PYTHONDONTWRITEBYTECODE=1
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
names=$("$host" list | sed 's/ .*//')

# Debian's, Red Hat's and Go's names of it.
case $target in
    x86_64-*) deb=amd64 rpm=x86_64 go=amd64 ;;
    aarch64-*) deb=arm64 rpm=aarch64 go=arm64 ;;
    *)
        echo "dist: no names for the architecture of $target" >&2
        exit 1
        ;;
esac

work=$out/work-$go
rm -rf "$work"
mkdir -p "$work"

# tree PLUGINS ZSH ROOT: the tree of a package whose runtimes look for plugins in the folder
# PLUGINS and whose zsh looks for completions in ZSH.
tree() {
    plugins=$1 zsh=$2 root=$3
    "$host" install --root "$root" --no-backup "$plugins" >/dev/null
    rm -r "$root$plugins/.cnibox"
    install -m 755 "$binary" "$root$plugins/cnibox"
    share=$root/usr/share
    mkdir -p "$root/usr/bin" "$share/doc/cnibox" "$share/bash-completion/completions" \
        "$share/zsh/$zsh" "$share/fish/vendor_completions.d" \
        "$root/usr/lib/systemd/system" "$root/usr/lib/tmpfiles.d"
    for name in cnibox cnitool; do
        ln -s "../${plugins#/usr/}/cnibox" "$root/usr/bin/$name"
    done
    "$host" completion bash >"$share/bash-completion/completions/cnibox"
    "$host" completion zsh >"$share/zsh/$zsh/_cnibox"
    "$host" completion fish >"$share/fish/vendor_completions.d/cnibox.fish"
    python3 packaging/man.py "$host" "$share/man"
    cp README.md CHANGELOG.md "$share/doc/cnibox/"
    # The units of the source are for plugins in /opt/cni/bin.
    for unit in packaging/systemd/*; do
        sed "s,^ExecStart=/opt/cni/bin/,ExecStart=$plugins/," "$unit" >"$root/usr/lib/systemd/system/${unit##*/}"
    done
    cp packaging/tmpfiles.d/*.conf "$root/usr/lib/tmpfiles.d/"
    chmod -R u=rwX,go=rX "$root"
}

# Debian: containerd and podman look into /usr/lib/cni.
tree /usr/lib/cni vendor-completions "$work/deb"
doc=$work/deb/usr/share/doc/cnibox
cp packaging/copyright "$doc/copyright"
printf 'cnibox (%s) unstable; urgency=medium\n\n  * See CHANGELOG.md.\n\n -- %s  %s\n' "$version" \
    "$(sed -n 's/^Maintainer: //p' packaging/control.in)" "$(date -u -R -d "@$SOURCE_DATE_EPOCH")" |
    gzip -9n >"$doc/changelog.gz"
mkdir "$work/deb/DEBIAN"
size=$(du -sk --apparent-size "$work/deb" | cut -f1)
sed "s/@VERSION@/$version/; s/@ARCH@/$deb/; s/@SIZE@/$size/" packaging/control.in >"$work/deb/DEBIAN/control"
find "$work/deb" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
dpkg-deb --root-owner-group -Zxz --build "$work/deb" "$out/cnibox_${version}_$deb.deb" >/dev/null

# Fedora, RHEL: /usr/libexec/cni.
tree /usr/libexec/cni site-functions "$work/rpm"
cp LICENSE "$work/rpm/usr/share/doc/cnibox/"
find "$work/rpm" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
stage=$(readlink -f "$work")
(cd "$work/rpm" && find . ! -type d | sed 's,^\.,,' | sort) >"$work/files"
rpmbuild -bb --quiet --target "$rpm" \
    --define "_topdir $stage/rpmbuild" --define "_rpmdir $stage" --define "_buildhost cnibox" \
    --define "_rpmfilename cnibox-$version-1.$rpm.rpm" --define "_dbpath $stage/rpmdb" \
    --define "stage $stage/rpm" --define "filelist $stage/files" \
    --define "release_version $version" packaging/cnibox.spec >/dev/null
mv "$work/cnibox-$version-1.$rpm.rpm" "$out/"

# shellcheck disable=SC2086 # one word each
python3 packaging/tgz.py "$out/cni-plugins-linux-$go-v$version.tgz" "$binary" $names
python3 packaging/image.py "$out/cnibox-$version-$go.oci.tar" "$version" "$go=$binary"
python3 packaging/sbom.py "$out/cnibox-$version-$go.cdx.json" "$target"
install -m 755 "$binary" "$out/cnibox-$version-$go"
rm -rf "$work"
rm -f "$out/SHA256SUMS"
sums=$(cd "$out" && find . -maxdepth 1 -type f | sed 's,^\./,,' | sort | xargs sha256sum)
echo "$sums" >"$out/SHA256SUMS"
