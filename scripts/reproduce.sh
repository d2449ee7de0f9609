#!/bin/sh
# reproduce.sh DIRECTORY: builds the release a second time, from a clone in another directory and without
# earlier build output, and compares its checksums with those in DIRECTORY.
set -eu
first=$(readlink -f "$1")
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ -z "$(git status --porcelain)" ] || echo "reproduce: the working tree has changes that a clone lacks" >&2
git clone -q . "$work/elsewhere"
unset CARGO_TARGET_DIR
make -C "$work/elsewhere" dist >/dev/null
second=$work/elsewhere/target/dist
if diff "$first/SHA256SUMS" "$second/SHA256SUMS"; then
    echo "reproduce: the same $(wc -l <"$first/SHA256SUMS") files"
else
    exit 1
fi
