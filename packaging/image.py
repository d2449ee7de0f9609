#!/usr/bin/env python3
"""image.py NAME OUT VERSION ARCH=BINARY...: writes an OCI archive of an image with one file. The image of cnibox
installs the executable, that of cni-sanity tests a directory. Usage: `podman load -i OUT`, `ctr images import OUT`,
`skopeo copy oci-archive:OUT ...`.

No container engine is needed. ARCH is Go's name of the architecture: amd64, arm64, arm (ARMv7), ..."""

import datetime
import hashlib
import json
import sys

import archive

MEDIA = "application/vnd.oci.image."
PREFIX = "localhost/"
# By name: description, entry point and default arguments of the image.
IMAGES = {
    "cnibox": ("every Linux CNI plugin in one executable", ["/cnibox", "install"], ["/host/opt/cni/bin"]),
    "cni-sanity": ("a conformance suite for CNI plugins", ["/cni-sanity"], ["/opt/cni/bin"]),
}


# The variants of architectures in image indexes.
VARIANTS = {"arm": "v7"}


class Layout:
    """An OCI image layout: blobs, named by their hashes."""

    def __init__(self):
        self.blobs = {}

    def add(self, media_type, data):
        """Stores a blob; returns its descriptor."""
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return {"mediaType": MEDIA + media_type, "digest": "sha256:" + digest, "size": len(data)}

    def add_json(self, media_type, value):
        return self.add(media_type, encoded(value))

    def archive(self, index):
        out = archive.Archive()
        out.directory("blobs")
        out.directory("blobs/sha256")
        for digest in sorted(self.blobs):
            out.file("blobs/sha256/" + digest, self.blobs[digest])
        out.file("index.json", encoded(index))
        out.file("oci-layout", encoded({"imageLayoutVersion": "1.0.0"}))
        return out.bytes()


def encoded(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def image(name, layout, version, arch, binary):
    """Stores the image of one architecture; returns its descriptor."""
    layer = archive.Archive()
    about, entry, arguments = IMAGES[name]
    layer.file(name, archive.read(binary), 0o755)
    layer = layer.bytes()
    created = datetime.datetime.fromtimestamp(archive.EPOCH, datetime.timezone.utc)
    created = created.strftime("%Y-%m-%dT%H:%M:%SZ")
    labels = {
        "org.opencontainers.image.title": name,
        "org.opencontainers.image.description": about,
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.version": version,
    }
    platform = {"architecture": arch, "os": "linux"}
    if arch in VARIANTS:
        platform["variant"] = VARIANTS[arch]
    config = layout.add_json("config.v1+json", {
        **platform,
        "created": created,
        "config": {
            "Entrypoint": entry,
            "Cmd": arguments,
            "Labels": labels,
            "WorkingDir": "/",
        },
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]},
        "history": [{"created": created, "created_by": "packaging/image.py"}],
    })
    manifest = layout.add_json("manifest.v1+json", {
        "schemaVersion": 2,
        "mediaType": MEDIA + "manifest.v1+json",
        "config": config,
        "layers": [layout.add("layer.v1.tar+gzip", archive.gzipped(layer))],
        "annotations": labels,
    })
    return {**manifest, "platform": platform}


def main(name, out, version, *binaries):
    layout = Layout()
    images = [image(name, layout, version, *pair.split("=", 1)) for pair in sorted(binaries)]
    tag = f"{PREFIX}{name}:{version}"
    annotations = {"org.opencontainers.image.ref.name": tag, "io.containerd.image.name": tag}
    if len(images) == 1:
        top = images[0]
    else:
        top = layout.add_json("index.v1+json", {
            "schemaVersion": 2, "mediaType": MEDIA + "index.v1+json", "manifests": images})
    index = {"schemaVersion": 2, "mediaType": MEDIA + "index.v1+json",
             "manifests": [{**top, "annotations": annotations}]}
    archive.write(out, layout.archive(index))


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
