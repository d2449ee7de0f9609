#!/bin/sh
# dist.sh BINARY TARGET OUT [HOST-BINARY]: builds all files of a release for one architecture in the directory OUT.
# HOST-BINARY is executed if BINARY is for another architecture. A cni-sanity must be beside each of them.
#
# The output is reproducible: timestamps are SOURCE_DATE_EPOCH, names are sorted.
set -eu

binary=$1 target=$2 out=$3 host=${4-$1}
sanity=$(dirname "$binary")/cni-sanity host_sanity=$(dirname "$host")/cni-sanity
here=$(dirname "$0")
cd "$here/.."
: "${SOURCE_DATE_EPOCH:?}"
export SOURCE_DATE_EPOCH PYTHONDONTWRITEBYTECODE=1
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
names=$("$host" list | sed 's/ .*//')

row=$(grep "^$target " scripts/targets.txt) || {
    echo "dist: $target is not in scripts/targets.txt" >&2
    exit 1
}
read -r _ deb rpm go _ <<END
$row
END

work=$out/work-$go
rm -rf "$work"
mkdir -p "$work"

python3 packaging/notices.py "$work/THIRD-PARTY" "$target"

# tree PLUGINS ZSH ROOT: creates the file tree of a package in ROOT. PLUGINS is the plugin directory,
# ZSH the directory of completions below /usr/share/zsh.
tree() {
    plugins=$1 zsh=$2 root=$3
    "$host" install --root "$root" --no-backup "$plugins" >/dev/null
    rm -r "$root$plugins/.cnibox"
    install -m 755 "$binary" "$root$plugins/cnibox"
    share=$root/usr/share
    mkdir -p "$root/usr/bin" "$share/doc/cnibox" "$share/bash-completion/completions" \
        "$share/zsh/$zsh" "$share/fish/vendor_completions.d" \
        "$root/usr/lib/systemd/system" "$root/usr/lib/tmpfiles.d" \
        "$root/usr/lib/systemd/network" "$root/usr/lib/NetworkManager/conf.d"
    for name in cnibox cnitool; do
        ln -sr "$root$plugins/cnibox" "$root/usr/bin/$name"
    done
    "$host" completion bash >"$share/bash-completion/completions/cnibox"
    "$host" completion zsh >"$share/zsh/$zsh/_cnibox"
    "$host" completion fish >"$share/fish/vendor_completions.d/cnibox.fish"
    python3 packaging/man.py "$host" "$share/man"
    cp README.md CHANGELOG.md "$share/doc/cnibox/"
    gzip -9n <"$work/THIRD-PARTY" >"$share/doc/cnibox/THIRD-PARTY.gz"
    # The units in the source refer to /opt/cni/bin.
    for unit in packaging/systemd/*; do
        sed "s,^ExecStart=/opt/cni/bin/,ExecStart=$plugins/," "$unit" >"$root/usr/lib/systemd/system/${unit##*/}"
    done
    cp packaging/tmpfiles.d/*.conf "$root/usr/lib/tmpfiles.d/"
    cp packaging/links/*.network "$root/usr/lib/systemd/network/"
    cp packaging/links/*.conf "$root/usr/lib/NetworkManager/conf.d/"
    chmod -R u=rwX,go=rX "$root"
}

# pack_deb NAME ROOT [DIRECTORY NAME...]: packs a tree as a deb, with the names in its plugin directory.
pack_deb() {
    name=$1 root=$2
    shift 2
    packaging/deb.sh "$name" "$root" "$out" "$version" "$deb" "$@"
}

# pack_rpm NAME ROOT: packs a tree as an rpm.
pack_rpm() {
    name=$1 root=$2
    cp LICENSE "$root/usr/share/doc/$name/"
    find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
    stage=$(readlink -f "$work")
    units=$(cd "$root/usr/lib/systemd/system" 2>/dev/null && echo * || echo none)
    # The directories that a minimal system lacks are the package's, too; otherwise its removal leaves them.
    (cd "$root" && find . ! -type d -printf '/%P\n' -o \( -path './opt/cni*' -o -path './usr/libexec/cni*' \
        -o -path './usr/lib/NetworkManager*' -o -path './usr/share/doc/?*' -o -path './usr/share/fish*' \
        -o -path './usr/share/zsh*' -o -path './usr/share/bash-completion*' \) -printf '%%dir /%P\n' | sort) >"$work/files"
    rpmbuild -bb --quiet --target "$rpm" \
        --define "_topdir $stage/rpmbuild" --define "_rpmdir $stage" --define "_buildhost cnibox" \
        --define "_rpmfilename $name-$version-1.$rpm.rpm" --define "_dbpath $stage/rpmdb" \
        --define "stage $(readlink -f "$root")" --define "filelist $stage/files" \
        --define "package $name" --define "release_version $version" --define "units $units" packaging/package.spec >/dev/null
    mv "$work/$name-$version-1.$rpm.rpm" "$out/"
}

# The plugin directory of containerd and podman: /usr/lib/cni in Debian, /usr/libexec/cni in Fedora and RHEL.
tree /usr/lib/cni vendor-completions "$work/deb"
# shellcheck disable=SC2086 # one word each
pack_deb cnibox "$work/deb" /usr/lib/cni $names
tree /usr/libexec/cni site-functions "$work/rpm"
pack_rpm cnibox "$work/rpm"

# cnibox-kubernetes replaces the package kubernetes-cni on nodes of kubeadm: /opt/cni/bin.
for kind in deb rpm; do
    zsh=vendor-completions
    [ $kind = deb ] || zsh=site-functions
    tree /opt/cni/bin $zsh "$work/kubernetes-$kind"
    mv "$work/kubernetes-$kind/usr/share/doc/cnibox" "$work/kubernetes-$kind/usr/share/doc/cnibox-kubernetes"
    # This unit would install into the directory of this package.
    rm "$work/kubernetes-$kind/usr/lib/systemd/system/cnibox-install.service"
    # shellcheck disable=SC2086 # one word each
    "pack_$kind" cnibox-kubernetes "$work/kubernetes-$kind" /opt/cni/bin $names
done

# The conformance suite has separate packages, because nodes do not need it.
for kind in deb rpm; do
    root=$work/sanity-$kind
    mkdir -p "$root/usr/bin" "$root/usr/share/doc/cni-sanity"
    install -m 755 "$sanity" "$root/usr/bin/cni-sanity"
    cp docs/cni-sanity.md "$root/usr/share/doc/cni-sanity/"
    gzip -9n <"$work/THIRD-PARTY" >"$root/usr/share/doc/cni-sanity/THIRD-PARTY.gz"
    python3 packaging/man.py --tool "$host_sanity" "a conformance suite for CNI plugins" "$root/usr/share/man"
    chmod -R u=rwX,go=rX "$root"
    "pack_$kind" cni-sanity "$root"
done
python3 packaging/tgz.py "$out/cni-sanity-linux-$go-v$version.tgz" "$work/THIRD-PARTY" "$sanity"
python3 packaging/image.py cni-sanity "$out/cni-sanity-$version-$go.oci.tar" "$version" "$go=$sanity"

# shellcheck disable=SC2086 # one word each
python3 packaging/tgz.py "$out/cni-plugins-linux-$go-v$version.tgz" "$work/THIRD-PARTY" "$binary" $names
for tgz in "$out"/*-linux-"$go"-v"$version".tgz; do
    # The names of the checksum files in the reference's releases, which installers download.
    (cd "$out" && sha256sum "${tgz##*/}" >"${tgz##*/}.sha256" && sha512sum "${tgz##*/}" >"${tgz##*/}.sha512")
done
python3 packaging/image.py cnibox "$out/cnibox-$version-$go.oci.tar" "$version" "$go=$binary"
python3 packaging/helm.py "$out/cnibox-chart-$version.tgz"
python3 packaging/sbom.py "$out/cnibox-$version-$go.cdx.json" "$target"
install -m 755 "$binary" "$out/cnibox-$version-$go"
rm -rf "$work"
rm -f "$out/SHA256SUMS" "$out/SHA256SUMS.sig" "$out/provenance.json"
python3 packaging/provenance.py "$out"
sums=$(cd "$out" && find . -maxdepth 1 -type f | sed 's,^\./,,' | sort | xargs sha256sum)
echo "$sums" >"$out/SHA256SUMS"
# SIGNING_KEY: a key of ssh-keygen(1); verification is described in docs/image-builder.md.
[ -z "${SIGNING_KEY-}" ] || ssh-keygen -q -Y sign -f "$SIGNING_KEY" -n cnibox-release "$out/SHA256SUMS"
