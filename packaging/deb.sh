#!/bin/sh
# deb.sh NAME ROOT OUT VERSION ARCH [DIRECTORY NAME...]: packs the tree ROOT as OUT/NAME_VERSION_ARCH.deb. The names are
# those of the plugins in DIRECTORY: the package replaces these files of other packages, and no name is ever missing.
#
# COMPRESSION: an algorithm of dpkg-deb(1). MAINTAINER: the maintainer of the packages.
set -eu
name=$1 root=$2 out=$3 version=$4 arch=$5 directory=${6-}
shift $(($# < 6 ? $# : 6))
here=$(dirname "$0")
maintainer=${MAINTAINER:-The cnibox authors <cnibox@localhost>}
: "${SOURCE_DATE_EPOCH:?}"

doc=$root/usr/share/doc/$name
mkdir -p "$doc" "$root/usr/share/lintian/overrides" "$root/DEBIAN"
cp "$here/copyright" "$doc/copyright"
sed "s/@PACKAGE@/$name/" "$here/lintian-overrides" >"$root/usr/share/lintian/overrides/$name"
printf '%s (%s) unstable; urgency=medium\n\n  * See CHANGELOG.md.\n\n -- %s  %s\n' "$name" "$version" \
    "$maintainer" "$(date -u -R -d "@$SOURCE_DATE_EPOCH")" |
    gzip -9n >"$doc/changelog.gz"
if [ -n "$directory" ]; then
    units=$(cd "$root/usr/lib/systemd/system" && echo *)
    for script in preinst postinst prerm postrm; do
        sed "s,@PACKAGE@,$name,; s,@DIRECTORY@,$directory,; s,@NAMES@,$*,; s,@UNITS@,$units," \
            "$here/maintainer-script" >"$root/DEBIAN/$script"
        chmod 755 "$root/DEBIAN/$script"
    done
fi
(cd "$root" && find . -path ./DEBIAN -prune -o -type f -printf '%P\n' | LC_ALL=C sort | xargs -d '\n' md5sum) >"$root/DEBIAN/md5sums"
chmod 644 "$root/DEBIAN/md5sums"
size=$(du -sk --apparent-size "$root" | cut -f1)
sed "s/@VERSION@/$version/; s/@ARCH@/$arch/; s/@SIZE@/$size/; s/@MAINTAINER@/$maintainer/" "$here/$name.control" >"$root/DEBIAN/control"
find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
dpkg-deb --root-owner-group "-Z${COMPRESSION:-xz}" --build "$root" "$out/${name}_${version}_$arch.deb" >/dev/null
