#!/usr/bin/env python3
"""image.py OUT: writes test images in the format of `docker save`: localhost/busybox:1, and
localhost/pause:1, which sleeps. Both contain Debian's static busybox and a web page."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../packaging"))
import archive  # noqa: E402

# The wget of a static busybox crashes; this script prints the last line of an HTTP response.
GET = rb"""#!/bin/sh
printf 'GET / HTTP/1.0\r\n\r\n' | nc -w 3 $1 ${2:-80} | tail -n 1 | grep .
"""


def layer():
    busybox = shutil.which("busybox")
    tar = archive.Archive()
    for name in ("bin", "etc", "proc", "sys", "dev", "run", "tmp", "www"):
        tar.directory(name)
    tar.file("bin/busybox", archive.read(busybox), 0o755)
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    for applet in applets.stdout.split():
        if applet != "busybox":
            tar.link("bin/" + applet, "busybox")
    tar.file("bin/get", GET, 0o755)
    tar.file("etc/passwd", b"root:x:0:0:root:/:/bin/sh\n")
    tar.file("etc/group", b"root:x:0:\n")
    tar.file("www/index.html", b"hello\n")
    return tar.bytes()


def main(out):
    data = layer()
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    digest = hashlib.sha256(data).hexdigest()
    tar, manifest = archive.Archive(), []
    tar.file("layer.tar", data)
    for name, command in (("busybox", ["/bin/sh"]), ("pause", ["/bin/sleep", "2147483647"])):
        config = {"architecture": machine, "os": "linux", "created": "2026-01-01T00:00:00Z",
                  "config": {"Cmd": command, "Env": ["PATH=/bin"]},
                  "rootfs": {"type": "layers", "diff_ids": ["sha256:" + digest]}}
        data = json.dumps(config).encode()
        file = hashlib.sha256(data).hexdigest() + ".json"
        tar.file(file, data)
        manifest.append({"Config": file, "RepoTags": [f"localhost/{name}:1"], "Layers": ["layer.tar"]})
    tar.file("manifest.json", json.dumps(manifest).encode())
    archive.write(out, tar.bytes())


if __name__ == "__main__":
    main(sys.argv[1])
