#!/bin/bash
# fuzz.sh [SECONDS [TARGET...]]: each fuzz target below fuzz/ for so many seconds, default 60, one after
# the other. What is found fails the run, and stays in fuzz/artifacts with the line that repeats it.
#
# Wants cargo-fuzz and a nightly compiler (rustup toolchain install nightly; cargo install cargo-fuzz).
# Inputs that reached something new are kept in fuzz/corpus; fuzz/seeds and the results below
# tests/it/golden are where it begins.
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
    # The project's own memory is a few MiB, whatever it reads.
    cargo +nightly fuzz run "$target" "fuzz/corpus/$target" "${seeds[@]}" -- \
        -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -print_final_stats=1 \
        >"fuzz/artifacts/$target.log" 2>&1 || status=1
    grep -E '^(SUMMARY|Failing input|stat::number_of_executed_units)|panicked|cargo fuzz run' "fuzz/artifacts/$target.log" || true
done
if [ $status = 0 ]; then say "nothing found"; else say "something was found: see above, and fuzz/artifacts"; fi
exit $status
