#!/usr/bin/env python3
"""helm.py OUT: packs the Helm chart in the format of `helm package`, reproducibly."""

import pathlib
import sys

import archive

CHART = pathlib.Path("packaging/helm/cnibox")


def main(out):
    tar = archive.Archive()
    # `helm package` writes this file first.
    first = CHART / "Chart.yaml"
    others = sorted(path for path in CHART.rglob("*") if path.is_file() and path != first)
    for path in [first, *others]:
        tar.file(str(path.relative_to(CHART.parent)), archive.read(path))
    archive.write(out, archive.gzipped(tar.bytes()))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
