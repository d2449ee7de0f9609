#!/usr/bin/env python3
"""tgz.py OUT NOTICES BINARY [NAME...]: packs an executable, links to it, and the licences of linked packages. The
archive of cnibox replaces the reference's cni-plugins-linux-ARCH-VERSION.tgz: the same names in the same directory,
each a link to the executable."""

import os
import sys

import archive


def main(out, notices, binary, *names):
    tar = archive.Archive()
    tar.directory("./")
    for name in ("LICENSE", "README.md"):
        tar.file("./" + name, archive.read(name))
    tar.file("./THIRD-PARTY", archive.read(notices))
    # Before the links, so that an extracted link never dangles.
    target = os.path.basename(binary)
    tar.file("./" + target, archive.read(binary), 0o755)
    for name in sorted(names):
        tar.link("./" + name, target)
    archive.write(out, archive.gzipped(tar.bytes()))


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
