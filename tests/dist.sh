#!/bin/sh
# dist.sh DIRECTORY: verifies the files of a release by unpacking and executing them. Prints the sizes.
#
# RELEASE, if set, is the tag of the release, and must be v and the version of Cargo.toml.
set -eu
out=$(readlink -f "$1")
cd "$(dirname "$0")/.."
peer=${PEER:-/usr/lib/cni}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
    echo "dist: $*" >&2
    exit 1
}

row=$(grep "^$(rustc -vV | sed -n 's/^host: \([^-]*-\).*/\1/p')" scripts/targets.txt | sed -n 1p)
read -r _ deb rpm go _ <<END
$row
END
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
[ "${RELEASE:-v$version}" = "v$version" ] || fail "the tag $RELEASE does not match version $version"
binary=$out/cnibox-$version-$go
names=$("$binary" list | sed 's/ .*//')
tools=" $("$binary" list | awk '$2 == "tool" { printf "%s ", $1 }')"

(cd "$out" && sha256sum --quiet -c SHA256SUMS) || fail "SHA256SUMS"
[ "$(wc -l <"$out/SHA256SUMS")" = "$(find "$out" -type f ! -name 'SHA256SUMS*' | wc -l)" ] || fail "SHA256SUMS lacks files"

# plugins DIRECTORY: every applet is a link to the released executable, and works.
plugins() {
    for name in $names; do
        [ "$(readlink "$1/$name")" = cnibox ] || fail "$1/$name is not a link to cnibox"
        case $tools in
            *" $name "*) "$1/$name" --help >/dev/null || fail "$1/$name" ;;
            *) CNI_COMMAND=VERSION "$1/$name" </dev/null | grep -q '"1.1.0"' || fail "VERSION of $1/$name failed" ;;
        esac
    done
    cmp "$1/cnibox" "$binary" || fail "$1/cnibox differs from the released executable"
}

mkdir "$work/tgz" "$work/image"
tar -xzf "$out/cni-plugins-linux-$go-v$version.tgz" -C "$work/tgz"
plugins "$work/tgz"
[ "$(tar -tzf "$out/cni-plugins-linux-$go-v$version.tgz" | head -n 1)" = ./ ] || fail "the first entry of the tgz is not ./"

# unpack PACKAGE: unpacks its deb and its rpm.
unpack() {
    mkdir -p "$work/$1-deb" "$work/$1-rpm"
    dpkg-deb -x "$out/$1_${version}_$deb.deb" "$work/$1-deb"
    rpm2cpio "$out/$1-$version-1.$rpm.rpm" | (cd "$work/$1-rpm" && cpio -idm --quiet)
    owner=$(dpkg-deb -c "$out/$1_${version}_$deb.deb" | awk '$2 != "root/root"')
    [ -z "$owner" ] || fail "files not owned by root: $owner"
    for root in "$work/$1-deb" "$work/$1-rpm"; do
        gzip -t "$root/usr/share/doc/$1/THIRD-PARTY.gz" || fail "no licences of linked packages: $root"
    done
}
unpack cnibox
unpack cnibox-kubernetes
unpack cni-sanity
plugins "$work/cnibox-deb/usr/lib/cni"
plugins "$work/cnibox-rpm/usr/libexec/cni"
plugins "$work/cnibox-kubernetes-deb/opt/cni/bin"
plugins "$work/cnibox-kubernetes-rpm/opt/cni/bin"
# 77: without dpkg and apt.
tests/packages.sh "$out/cnibox_${version}_$deb.deb" || [ $? = 77 ] || fail "the deb in place of the reference's"
for package in "$out"/*_"$deb".deb; do
    dpkg-deb --ctrl-tarfile "$package" | tar -tf - | grep -qx ./md5sums || fail "no md5sums in $package"
done
# podman's packages depend on this name, which the reference's package provides; without it podman
# would be removed together with the reference.
stack=container-network-stack
dpkg-deb -f "$out/cnibox_${version}_$deb.deb" Provides | grep -q "$stack (= 1)" || fail "the deb does not provide $stack"
rpm -qp --provides "$out/cnibox-$version-1.$rpm.rpm" | grep -qx "$stack = 1" || fail "the rpm does not provide $stack"
trees="$work/cnibox-deb $work/cnibox-rpm $work/cnibox-kubernetes-deb $work/cnibox-kubernetes-rpm"
for root in $trees; do
    "$root/usr/bin/cnibox" version >/dev/null || fail "usr/bin/cnibox"
    "$root/usr/bin/cnitool" --help >/dev/null || fail "usr/bin/cnitool"
    for name in $names; do
        page=$root/usr/share/man/man8/cnibox-$name.8.gz
        case $tools in *" $name "*) page=$root/usr/share/man/man1/$name.1.gz ;; esac
        gzip -t "$page" || fail "no manual page for $name"
        ! zcat "$page" | grep -q '^!' || fail "an image in the manual page of $name"
    done
    [ -z "$(find "$root" -name .cnibox)" ] || fail "the installer's state directory .cnibox is in the package"
done
(cd "$out" && sha256sum --quiet -c ./*.sha256 && sha512sum --quiet -c ./*.sha512) || fail "checksums of the archives"
if command -v lintian >/dev/null; then
    found=$(lintian --allow-root --fail-on error,warning "$out"/*.deb) || fail "lintian: $found"
fi
if command -v rpmlint >/dev/null; then
    found=$(rpmlint -c packaging/rpmlint.toml "$out"/*.rpm) || fail "rpmlint: $found"
fi

# The conformance suite has separate packages, and is in none of cnibox's.
mkdir "$work/sanity-tgz" "$work/sanity-image"
tar -xzf "$out/cni-sanity-linux-$go-v$version.tgz" -C "$work/sanity-tgz"
sanity=$work/sanity-tgz/cni-sanity
"$sanity" --help >/dev/null || fail "cni-sanity"
scripts/static-pie.sh "$sanity" || fail "$sanity"
for root in "$work/cni-sanity-deb" "$work/cni-sanity-rpm"; do
    cmp "$root/usr/bin/cni-sanity" "$sanity" || fail "cni-sanity in $root"
    gzip -t "$root/usr/share/man/man1/cni-sanity.1.gz" || fail "no manual page for cni-sanity"
done
# shellcheck disable=SC2086 # several directories
[ -z "$(find $trees "$work/tgz" -name 'cni-sanity*')" ] || fail "cni-sanity is in a package of cnibox"

# image ARCHIVE DIRECTORY BINARY ENTRYPOINT: verifies hashes, the entry point, and that the binary is the only file.
image() {
tar -xf "$1" -C "$2"
python3 - "$2" "$3" "$4" <<'END' || fail "the image $1"
import gzip, hashlib, io, json, os, sys, tarfile
root, binary, entry = sys.argv[1:]
name = entry.split()[0].strip("/")
def blob(descriptor):
    data = open(os.path.join(root, "blobs", *descriptor["digest"].split(":")), "rb").read()
    assert descriptor["digest"] == "sha256:" + hashlib.sha256(data).hexdigest()
    assert descriptor["size"] == len(data)
    return data
index = json.load(open(root + "/index.json"))
manifest = json.loads(blob(index["manifests"][0]))
config = json.loads(blob(manifest["config"]))
assert config["config"]["Entrypoint"] == entry.split(), config
layers = [gzip.decompress(blob(layer)) for layer in manifest["layers"]]
digests = ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers]
assert config["rootfs"]["diff_ids"] == digests
files = tarfile.open(fileobj=io.BytesIO(layers[0]))
assert files.getnames() == [name], files.getnames()
assert files.extractfile(name).read() == open(binary, "rb").read()
assert files.getmember(name).mode == 0o755
END
}
image "$out/cnibox-$version-$go.oci.tar" "$work/image" "$binary" "/cnibox install"
image "$out/cni-sanity-$version-$go.oci.tar" "$work/sanity-image" "$sanity" /cni-sanity

python3 - "$out/cnibox-$version-$go.cdx.json" <<'END' || fail "the SBOM"
import json, sys
bom = json.load(open(sys.argv[1]))
assert bom["vulnerabilities"] == json.load(open("packaging/vex.json"))
assert bom["bomFormat"] == "CycloneDX" and bom["metadata"]["component"]["name"] == "cnibox"
names = {component["name"] for component in bom["components"]}
assert {"rtnetlink", "serde_json", "nix", "rust-std"} <= names and names & {"glibc", "musl"} and "tempfile" not in names, names
crates = [component for component in bom["components"] if component["purl"].startswith("pkg:cargo/")]
# A crate of this workspace is in no registry, which alone has checksums.
assert all("licenses" in crate and ("hashes" in crate or crate["name"] == "cnibox-cni") for crate in crates)
END
python3 - "$out" <<'END' || fail "the provenance"
import hashlib, json, os, re, sys
statement = json.load(open(sys.argv[1] + "/provenance.json"))
for subject in statement["subject"]:
    data = open(os.path.join(sys.argv[1], subject["name"]), "rb").read()
    assert subject["digest"]["sha256"] == hashlib.sha256(data).hexdigest(), subject
# SLSA 1.0: types, builders and sources are URIs; a dependency has an address, a digest or content.
is_uri = lambda text: re.fullmatch(r"[a-z][a-z0-9+.-]*:\S+", text)
build, run = (statement["predicate"][key] for key in ("buildDefinition", "runDetails"))
assert is_uri(build["buildType"]) and is_uri(run["builder"]["id"]), build
for dependency in build["resolvedDependencies"]:
    assert is_uri(dependency.get("uri", "a:a")) and {"uri", "digest", "content"} & set(dependency), dependency
assert any("gitCommit" in dependency.get("digest", {}) for dependency in build["resolvedDependencies"])
others = set(os.listdir(sys.argv[1])) - {subject["name"] for subject in statement["subject"]}
assert others <= {"provenance.json", "SHA256SUMS", "SHA256SUMS.sig"}, others
END
objdump -h "$binary" | grep -q dep-v0 || fail "no list of dependencies in the executable"

# 77: what it needs is not here, such as on a machine without a network.
python3 scripts/manifests.py "$binary" "$out/cnibox-chart-$version.tgz" || [ $? = 77 ] || fail "the manifests for Kubernetes"
# units ROOT: every program that a unit starts is in the package, and systemd finds nothing wrong.
units() {
    directory=$1/usr/lib/systemd/system
    for unit in "$directory"/*.service; do
        programs=$(sed -n 's/^Exec[A-Za-z]*=[-@:+!]*\([^ ]*\).*/\1/p' "$unit")
        for program in $programs; do
            [ -x "$1$program" ] || fail "$unit starts $program, which is not in the package"
        done
    done
    command -v systemd-analyze >/dev/null || return 0
    # The targets that the units refer to are in no package; --man=no, because the manual pages are not installed.
    for target in sysinit basic shutdown sockets network multi-user; do
        [ -e "$directory/$target.target" ] || printf '[Unit]\nDescription=%s\n' "$target" >"$directory/$target.target"
    done
    said=$(systemd-analyze verify --man=no --root="$1" "$directory"/*.service "$directory"/*.socket 2>&1) ||
        fail "units: ${said:-systemd-analyze verify failed}"
    [ -z "$said" ] || fail "units: $said"
    for unit in cni-dhcp.service cnibox-egress-resolver.service; do
        exposure=$(systemd-analyze security --offline=true --threshold=55 --no-pager --root="$1" "$unit" 2>&1) ||
            fail "$unit exceeds its exposure limit: $(echo "$exposure" | tail -n 1)"
    done
}
for root in $trees; do
    units "$root"
done
scripts/static-pie.sh "$binary" || fail "$binary"

# --- the other architectures -------------------------------------------------------------------------

# The name of the architecture is right in each package, and the executable is the released one.
released=
while read -r target deb rpm go _; do
    other=$out/cnibox-$version-$go
    [ -e "$other" ] || continue
    # The two rows of x86-64 have the same names.
    [ "$target" != x86_64-unknown-linux-gnu ] || continue
    released="$released $go"
    scripts/static-pie.sh "$other" || fail "$other"
    for name in cnibox cnibox-kubernetes cni-sanity; do
        [ "$(dpkg-deb -f "$out/${name}_${version}_$deb.deb" Architecture)" = "$deb" ] || fail "the architecture of $name for $target"
        [ "$(rpm -qp --qf '%{arch}' "$out/$name-$version-1.$rpm.rpm")" = "$rpm" ] || fail "the architecture of $name for $target"
    done
    dpkg-deb --fsys-tarfile "$out/cnibox_${version}_$deb.deb" | tar -xO ./usr/lib/cni/cnibox | cmp - "$other" || fail "the deb for $target"
    rpm2cpio "$out/cnibox-$version-1.$rpm.rpm" | cpio -i --quiet --to-stdout ./usr/libexec/cni/cnibox | cmp - "$other" || fail "the rpm for $target"
    tar -xzO -f "$out/cni-plugins-linux-$go-v$version.tgz" ./cnibox | cmp - "$other" || fail "the tgz for $target"
done <scripts/targets.txt
if [ -e "$out/cnibox-$version.oci.tar" ]; then
    # shellcheck disable=SC2086 # one word each
    python3 - "$out/cnibox-$version.oci.tar" $released <<'END' || fail "the image index"
import json, sys, tarfile
archive = tarfile.open(sys.argv[1])
read = lambda name: json.load(archive.extractfile(name))
blob = lambda descriptor: read("blobs/" + descriptor["digest"].replace(":", "/"))
images = blob(read("index.json")["manifests"][0])["manifests"]
assert sorted(image["platform"]["architecture"] for image in images) == sorted(sys.argv[2:]), images
for image in images:
    config = blob(blob(image)["config"])
    assert image["platform"].items() <= config.items() and image["platform"]["os"] == "linux", image
    assert image["platform"].get("variant") == {"arm": "v7"}.get(image["platform"]["architecture"]), image
END
fi

# --- sizes -----------------------------------------------------------------------------------------

kilobytes() {
    echo "$((($1 + 500) / 1000)) kB"
}
size() {
    kilobytes "$(stat -c %s "$1")"
}
xzipped() {
    kilobytes "$(tar --sort=name -C "$1" -c . | xz -9 | wc -c)"
}
mkdir "$work/one"
cp "$binary" "$work/one/cnibox"
reference=-
reference_xz=-
if [ -e "$peer/bridge" ]; then
    reference=$(kilobytes "$(du -sb --apparent-size "$peer" | cut -f1)")
    reference_xz=$(xzipped "$peer")
fi
# Of this machine again.
read -r _ deb rpm go _ <<END
$row
END
echo "| what | cnibox | reference |"
echo "| --- | --- | --- |"
echo "| installed | $(size "$binary") | $reference |"
echo "| compressed (tar, xz -9) | $(xzipped "$work/one") | $reference_xz |"
echo "| image | $(size "$out/cnibox-$version-$go.oci.tar") | - |"
echo "| tgz | $(size "$out/cni-plugins-linux-$go-v$version.tgz") | - |"
echo "| deb | $(size "$out/cnibox_${version}_$deb.deb") | - |"
echo "| rpm | $(size "$out/cnibox-$version-1.$rpm.rpm") | - |"
