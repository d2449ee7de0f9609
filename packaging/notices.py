#!/usr/bin/env python3
"""notices.py OUT TARGET: writes the licences of the packages that are linked into the executable on TARGET: for each
package its name, version and licence, and every licence text once, with its packages."""

import os
import re
import sys

import archive
import sbom

NAMES = re.compile(r"^(licen[cs]e|copying|copyright|notice|unlicense)", re.I)


def texts(package):
    """The licence texts in the package's source."""
    directory = os.path.dirname(package["manifest_path"])
    names = sorted(name for name in os.listdir(directory) if NAMES.match(name))
    paths = [os.path.join(directory, name) for name in names]
    return [archive.read(path).decode("utf-8", "replace").strip() for path in paths if os.path.isfile(path)]


def main(out, target):
    data = sbom.metadata(target)
    graph, packages = sbom.linked(data)
    linked = [packages[id] for id in graph if id != data["resolve"]["root"]]
    linked.sort(key=lambda package: (package["name"], package["version"]))
    title = lambda package: f"{package['name']} {package['version']}"
    lines = ["cnibox is linked with the Rust packages below, with Rust's standard library (MIT OR Apache-2.0) and",
             "with the GNU C library (LGPL-2.1-or-later; its source is that of the distribution it was built on).", ""]
    lines += [f"{title(package)}: {package['license']}" for package in linked]
    owners = {}
    for package in linked:
        for text in texts(package):
            owners.setdefault(text, []).append(title(package))
    for text, names in sorted(owners.items(), key=lambda item: item[1]):
        lines += ["", "-" * 100, ", ".join(names), "", text]
    archive.write(out, ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
