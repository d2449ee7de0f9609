#!/bin/bash
# set-repository.sh URL: writes the address of the published repository into every file that names it, in place of the
# one in Cargo.toml.
set -euo pipefail
[ $# = 1 ] || { echo "usage: scripts/set-repository.sh URL" >&2; exit 2; }
cd "$(dirname "$0")/.."
old=$(sed -n 's/^repository = "\(.*\)"$/\1/p' Cargo.toml)
git grep -lF -- "$old" | xargs -d '\n' sed -i "s|${old//./\\.}|${1%/}|g"
