#!/usr/bin/env python3
"""provenance.py DIRECTORY: writes DIRECTORY/provenance.json, an in-toto statement (v1) with SLSA provenance (v1) of all
files in the directory: commit, dependencies and builder. The build is reproducible (`make reproduce`).

SOURCE is the address of the repository, BUILDER_ID that of the builder; the project's own are names, not addresses."""

import hashlib
import os
import subprocess
import sys

import archive
from image import encoded


def said(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main(directory):
    sha256 = lambda path: {"sha256": hashlib.sha256(archive.read(path)).hexdigest()}
    names = sorted(name for name in os.listdir(directory) if os.path.isfile(os.path.join(directory, name)))
    commit = said("git", "rev-parse", "HEAD")
    source = os.environ.get("SOURCE", "urn:cnibox:source")
    rustc = said(os.environ.get("RUSTC", "rustc"), "--version")
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": sha256(os.path.join(directory, name))} for name in names],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:cnibox:make-dist",
                "externalParameters": {"source": {"uri": source, "digest": {"gitCommit": commit}}},
                "internalParameters": {"SOURCE_DATE_EPOCH": archive.EPOCH},
                "resolvedDependencies": [
                    {"name": "source", "uri": source, "digest": {"gitCommit": commit}},
                    {"name": "Cargo.lock", "digest": sha256("Cargo.lock")},
                    {"name": "rustc", "uri": "pkg:generic/rustc@" + rustc.split()[1], "annotations": {"version": rustc}},
                ],
            },
            "runDetails": {"builder": {"id": os.environ.get("BUILDER_ID", "urn:cnibox:make")}},
        },
    }
    archive.write(os.path.join(directory, "provenance.json"), encoded(statement) + b"\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
