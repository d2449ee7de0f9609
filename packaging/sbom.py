#!/usr/bin/env python3
"""sbom.py OUT TARGET: writes the SBOM of the executable, CycloneDX 1.5 in JSON: the packages that are
linked into it on TARGET, with licences and the checksums of Cargo.lock, the standard library and the C
library; and the assessed vulnerabilities (VEX) in packaging/vex.json."""

import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import uuid

import archive


def metadata(target):
    command = ["cargo", "metadata", "--format-version=1", "--locked", "--filter-platform", target]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def checksums():
    """Checksums of Cargo.lock by name and version."""
    found = {}
    for package in archive.read("Cargo.lock").decode().split("[[package]]")[1:]:
        value = lambda key: re.search(rf'^{key} = "(.*)"$', package, re.M)
        if value("checksum"):
            found[value("name")[1], value("version")[1]] = value("checksum")[1]
    return found


def linked(data):
    """The graph of linked packages by ID, without build, test and macro dependencies; and all packages by ID."""
    nodes = {node["id"]: node for node in data["resolve"]["nodes"]}
    packages = {package["id"]: package for package in data["packages"]}
    is_macro = lambda id: any("proc-macro" in t["kind"] for t in packages[id]["targets"])
    graph, queue = {}, [data["resolve"]["root"]]
    while queue:
        id = queue.pop()
        if id in graph:
            continue
        normal = lambda dep: any(kind["kind"] is None for kind in dep["dep_kinds"])
        deps = {dep["pkg"] for dep in nodes[id]["deps"] if normal(dep)}
        graph[id] = sorted(dep for dep in deps if not is_macro(dep))
        queue += graph[id]
    return graph, packages


def component(package, sums, kind="library"):
    purl = f"pkg:cargo/{package['name']}@{package['version']}"
    entry = {"type": kind, "bom-ref": purl, "name": package["name"],
             "version": package["version"], "purl": purl}
    if package["license"]:
        entry["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    checksum = sums.get((package["name"], package["version"]))
    if checksum:
        entry["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    return entry


def beside(name, version, license, vendor):
    """The entry of a linked library that is not a cargo package."""
    return {"type": "library", "bom-ref": f"pkg:generic/{name}@{version}", "name": name, "version": version,
            "purl": f"pkg:generic/{name}@{version}", "licenses": [{"expression": license}],
            "cpe": f"cpe:2.3:a:{vendor}:{version}:*:*:*:*:*:*:*"}


def libraries(target):
    """Rust's standard library and, where the target links it statically, the C library."""
    said = lambda *command: subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rust = said(os.environ.get("RUSTC", "rustc"), "--version").split()[1]
    found = [beside("rust-std", rust, "MIT OR Apache-2.0", "rust-lang:rust")]
    if "-gnu" in target:
        libc = said("getconf", "GNU_LIBC_VERSION").split()[1]
        found.append(beside("glibc", libc, "LGPL-2.1-or-later", "gnu:glibc"))
    if "-musl" in target:
        sysroot = said(os.environ.get("RUSTC", "rustc"), "--print", "sysroot").strip()
        library = pathlib.Path(sysroot, "lib/rustlib", target, "lib/self-contained/libc.a").read_bytes()
        # __libc_version, which `ldd --version` prints.
        libc = re.search(rb"\b1\.\d+\.\d+\b", library)[0].decode()
        found.append(beside("musl", libc, "MIT", "musl-libc:musl"))
    return found


def main(out, target):
    data = metadata(target)
    graph, packages = linked(data)
    root, sums = data["resolve"]["root"], checksums()
    ref = lambda id: f"pkg:cargo/{packages[id]['name']}@{packages[id]['version']}"
    components = libraries(target) + [component(packages[id], sums) for id in graph if id != root]
    top = component(packages[root], sums, "application")
    top["cpe"] = f"cpe:2.3:a:cnibox:cnibox:{top['version']}:*:*:*:*:*:*:*"
    time = datetime.datetime.fromtimestamp(archive.EPOCH, datetime.timezone.utc)
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": top,
            "properties": [{"name": "cargo:target", "value": target}],
        },
        "components": sorted(components, key=lambda c: c["bom-ref"]),
        "dependencies": sorted(
            ({"ref": ref(id), "dependsOn": [ref(dep) for dep in deps]}
             for id, deps in graph.items()), key=lambda d: d["ref"]),
        # VEX, maintained by hand.
        "vulnerabilities": json.loads(archive.read("packaging/vex.json")),
    }
    content = json.dumps(bom, sort_keys=True)
    bom["serialNumber"] = "urn:uuid:" + str(uuid.uuid5(uuid.NAMESPACE_URL, content))
    archive.write(out, (json.dumps(bom, indent=2) + "\n").encode())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
