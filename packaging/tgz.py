#!/usr/bin/env python3
"""tgz.py OUT NOTICES BINARY [NAME...]: an executable, its links, and the licences of what is linked into it. That of cnibox is the drop-in for the reference's
cni-plugins-linux-ARCH-VERSION.tgz: the same names in the same place, each a link to the one executable."""

import os
import sys

import archive


def main(out, notices, binary, *names):
    tar = archive.Archive()
    tar.folder("./")
    for name in ("LICENSE", "README.md"):
        tar.file("./" + name, archive.read(name))
    tar.file("./THIRD-PARTY", archive.read(notices))
    # First, so that a link leads somewhere from the moment it is there.
    target = os.path.basename(binary)
    tar.file("./" + target, archive.read(binary), 0o755)
    for name in sorted(names):
        tar.link("./" + name, target)
    archive.write(out, archive.gzipped(tar.bytes()))


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
