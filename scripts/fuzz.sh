#!/bin/bash
# fuzz.sh [SECONDS [TARGET...]]: runs the fuzz targets of fuzz/ one after the other, each for SECONDS,
# default 60. A finding fails the run; fuzz/artifacts has its input and the command that reproduces it.
#
# Requires cargo-fuzz and a nightly compiler (rustup toolchain install nightly; cargo install cargo-fuzz).
# Seeds are fuzz/seeds and the results in tests/it/golden; inputs with new coverage are kept in fuzz/corpus.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "fuzz: $*"; }

seconds=${1:-60}
shift || true
targets=("$@")
[ $# -gt 0 ] || mapfile -t targets < <(basename -s .rs fuzz/targets/*.rs)
cargo +nightly fuzz --version >/dev/null 2>&1 || {
    say "needs a nightly compiler and cargo-fuzz" >&2
    exit 2
}
status=0
for target in "${targets[@]}"; do
    seeds=("fuzz/seeds/$target")
    case $target in
        json | result) seeds=(fuzz/seeds/json tests/it/golden) ;;
    esac
    mkdir -p "fuzz/corpus/$target" "fuzz/artifacts/$target"
    say "$target, $seconds seconds"
    # The code under test uses a few MiB, whatever the input.
    cargo +nightly fuzz run "$target" "fuzz/corpus/$target" "${seeds[@]}" -- \
        -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -print_final_stats=1 \
        >"fuzz/artifacts/$target.log" 2>&1 || status=1
    grep -E '^(SUMMARY|Failing input|stat::number_of_executed_units)|panicked|cargo fuzz run' "fuzz/artifacts/$target.log" || true
done
if [ $status = 0 ]; then say "nothing found"; else say "findings: see above, and fuzz/artifacts"; fi
exit $status
