#!/bin/bash
# lanes.sh host-and-vm | vm [PATTERN] | build: runs the tests in two lanes, or only compiles them.
#
# The host lane is cargo test on this machine's kernel: the unit tests, the tests of the documentation and
# the integration tests; the checks of texts belong to `make lint`. A test that needs a kernel feature which
# this kernel lacks (src/lane.rs) reports that and is skipped. The VM lane runs exactly the skipped
# tests, from the same executables, in a kernel with all features (scripts/vm.sh); if no test is
# skipped, no VM is started. At the end each skipped test is listed with the lane that ran it. A test
# that ran in neither lane fails the run, unless CNIBOX_NO_VM=1 disables the VM lane.
#
# Both lanes run concurrently: the tests of the host lane, two for each processor, sleep most of the time, while
# emulation is CPU-bound, so the VMs run at a low priority.
#
# "vm" runs the VM lane only. PATTERN, an extended regular expression, selects tests by name.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "lanes: $*"; }

# CNIBOX_LONG includes the long tests (#[ignore]).
flags=()
[ -z "${CNIBOX_LONG-}" ] || flags=(--include-ignored)

# Prints a line "executable<tab>test" for each failed test in the output of cargo or of run_list.
# Fails if the output is not that of complete runs in which every failure has a name: if an executable
# died, or a test of the documentation failed, which has no executable.
failed_tests() {
    awk '
        function enter(name) { incomplete += running; executable = name; running = 1 }
        /^executable / { enter(substr($0, 12)) }
        /^ +Running .*\(.*\)$/ { enter(substr($NF, 2, length($NF) - 2)) }
        /^ +Doc-tests / { enter("") }
        /^test result: / { running = 0; failed += $6 }
        # What another test prints on stderr may be before it in the line.
        match($0, /test [^ ]+ \.\.\. FAILED$/) || match($0, /^test .* \.\.\. FAILED$/) {
            named++
            if (executable == "") incomplete++
            print executable "\t" substr($0, RSTART + 5, RLENGTH - 16)
        }
        END { exit incomplete + running || named != failed }' "$1"
}

# Retries up to three failed tests of an output, each alone, in the executable in which it failed: two
# tests and all their processes share one slow processor. More than three failures are no accident.
try_again() {
    local executable name failed output status=0
    failed=$(failed_tests "$1") || return
    [ -n "$failed" ] && [ "$(wc -l <<<"$failed")" -le 3 ] || return
    while IFS=$'\t' read -r executable name; do
        echo "second try, alone: $name"
        # With one thread libtest prints the name before the test runs, and the test's output breaks the line.
        output=$("$executable" "${flags[@]}" --exact --test-threads=2 "$name" 2>&1 </dev/null) || status=1
        echo "$output"
        grep -q '^test result: ok\. 1 passed; 0 failed; 0 ignored;' <<<"$output" || status=1
    done <<<"$failed"
    return $status
}

# Runs the tests of a list, lines of "executable<tab>test<tab>features", on this kernel. The duration of
# each test is in its output.
run_list() {
    local executable output names status=0
    output=$(mktemp)
    while read -r executable; do
        mapfile -t names < <(awk -F '\t' -v wanted="$executable" '$1 == wanted { print $2 }' "$1")
        {
            echo "executable $executable"
            CNIBOX_TIMES=/dev/stderr "$executable" "${flags[@]}" --exact --test-threads=2 "${names[@]}" 2>&1 </dev/null
        } | tee "$output" || try_again "$output" || status=1
    done < <(cut -f 1 "$1" | sort -u)
    rm -f "$output"
    return $status
}

# Runs the tests of a list in VMs in the background, one VM for each processor, as a VM has one. The
# output is in shard.N.log.
start_vms() {
    local count shards shard
    count=$(wc -l <"$1")
    shards=$(nproc)
    [ "$shards" -le $(((count + 2) / 3)) ] || shards=$(((count + 2) / 3))
    split --number="r/$shards" --numeric-suffixes --additional-suffix=.list "$1" "$dir/shard."
    scripts/vm.sh --setup || return
    say "$count tests in the VM lane, which takes minutes; VMs at once: $shards"
    for shard in "$dir"/shard.*.list; do
        CNIBOX_LANE=vm CNIBOX_VM_TIMEOUT=${CNIBOX_VM_TIMEOUT:-2700} \
            CNIBOX_VM_QEMU=${CNIBOX_VM_QEMU:--device e1000,romfile= -device virtio-net-pci,romfile=} \
            nice -n 10 scripts/vm.sh bash scripts/lanes.sh list "$shard" >"${shard%.list}.log" 2>&1 &
        vms+=($!)
    done
}

# Waits for the VMs and collects their output. Fails if a VM died, or a test in it failed.
await_vms() {
    local vm status=0
    [ ${#vms[@]} -gt 0 ] || return 0
    for vm in "${vms[@]}"; do wait "$vm" || status=1; done
    cat "$dir"/shard.*.log | tee -a "$dir/vm"
    return $status
}

# slowest LANE FILE: prints the 20 longest durations among the lines "seconds<tab>test" of a file.
slowest() {
    grep -E $'^[0-9.]+\t' "$2" >"$dir/sorted" || return 0
    say "the slowest tests of the $1 lane, in seconds:"
    sort -rn "$dir/sorted" | awk -F '\t' 'NR <= 20 { printf "%9.1f %s\n", $1, $2 }'
}

# reasons FILE...: prints why tests failed: the first lines of each panic, up to 20 panics.
reasons() {
    awk '/^stack backtrace:/ { left = 0 } / panicked at / { left = ++panics <= 20 ? 8 : 0 } left-- > 0 { print "    " substr($0, 1, 400) }' "$@" >"$dir/reasons"
    [ ! -s "$dir/reasons" ] || { say "why tests failed:" && cat "$dir/reasons"; }
}

# shellcheck disable=SC2317 # called by trap
end() {
    # vm.sh stops QEMU when it is terminated.
    [ ${#vms[@]} = 0 ] || kill "${vms[@]}" 2>/dev/null || true
    wait
    rm -rf "$dir"
}

# Prints a line "test (needs features): outcome" for each test of a list.
outcomes() {
    awk -F '\t' -v list="$1" '
        FILENAME != list && /^executable / { executable = substr($0, 12) }
        FILENAME != list && /^test .* \.\.\. (ok|FAILED)$/ { split($0, word, " "); got[executable, word[2]] = word[4] }
        FILENAME != list { next }
        { end = got[$1, $2]; text = end == "ok" ? "ran in the VM" : end ? "failed in the VM" : "in no lane" }
        { print "    " $2 " (needs " $3 "): " text }' "$dir/vm" "$1"
}

case ${1-} in
    list) run_list "$2"; exit ;;
    host-and-vm | vm | build) ;;
    *) echo "usage: scripts/lanes.sh host-and-vm | vm [PATTERN] | build" >&2 && exit 2 ;;
esac

# The whole workspace, so that all of them share the library and its dependencies.
workspace=(--locked --workspace)
tests=("${workspace[@]}" --no-fail-fast --lib --bin cni-sanity --test it)
executables=(--bin cni-sanity --examples)
[ -n "${CNIBOX_BIN-}" ] || executables+=(--bin cnibox)
cargo build "${workspace[@]}" "${executables[@]}"
cargo test "${tests[@]}" --no-run
[ "$1" != build ] || exit 0

dir=$(mktemp -d)
vms=()
trap end EXIT
trap 'exit 130' INT TERM HUP
touch "$dir/skipped" "$dir/vm" "$dir/retried" "$dir/times"
status=0
# With CNIBOX_LANE=list tests record their missing features and are skipped or fail, but do not run.
RUST_BACKTRACE=0 CNIBOX_LANE=list CNIBOX_SKIPPED=$dir/skipped cargo test "${tests[@]}" -- "${flags[@]}" \
    >"$dir/host" 2>&1 || true
sort -u "$dir/skipped" | grep -E -- "${2-}" >"$dir/list" || true
if [ -n "${2-}" ] && [ ! -s "$dir/list" ]; then
    say "no test that needs a feature which this kernel lacks has a name with $2"
    exit 1
fi
if [ -s "$dir/list" ] && [ "${CNIBOX_NO_VM-}" != 1 ]; then
    start_vms "$dir/list" || say "no VM for the skipped tests; CNIBOX_NO_VM=1 disables the VM lane"
fi
host="not asked for"
if [ "$1" = host-and-vm ]; then
    : >"$dir/skipped"
    export CNIBOX_SKIPPED=$dir/skipped CARGO_TERM_COLOR=never
    {
        CNIBOX_TIMES=$dir/times cargo test "${tests[@]}" -- --test-threads=$((2 * $(nproc))) "${flags[@]}" || status=1
        cargo test "${workspace[@]}" --doc -- "${flags[@]}" || status=1
        exit $status
    } 2>&1 | tee "$dir/host" || status=1
    host=$(awk '/^test result:/ { ok += $4; bad += $6 } END { print ok + 0 " passed, " bad + 0 " failed" }' "$dir/host")
    if [ "$status" = 1 ] && try_again "$dir/host" >"$dir/retried"; then
        status=0
        host=$(awk '/^test result:/ { ok += $4 + $6 } END { print ok " passed, 0 failed" }' "$dir/host")
    fi
    cat "$dir/retried"
    # A test that was skipped only when it ran is in no lane.
    sort -u -o "$dir/list" "$dir/list" "$dir/skipped"
fi
await_vms || status=1
skipped=$(wc -l <"$dir/list")

outcomes "$dir/list" >"$dir/outcomes"
ran=$(grep -c 'ran in the VM$' "$dir/outcomes" || true)
failed=$(grep -c 'failed in the VM$' "$dir/outcomes" || true)
cat "$dir/retried" "$dir/vm" | sed -n 's/^second try, alone: /    had a second try: /p' >"$dir/again"
slowest host "$dir/times"
slowest VM "$dir/vm"
[ "$skipped" = 0 ] || say "this kernel, $(uname -r), lacks what these tests need:"
cat "$dir/outcomes" "$dir/again"
reasons "$dir/host" "$dir/vm"
# cargo counts a skipped test as passed.
say "host lane: $host, of which $skipped skipped; VM lane: $ran passed, $failed failed; second tries: $(wc -l <"$dir/again"); in no lane: $((skipped - ran - failed))"
ignored=$(awk '/^test result:/ { ignored += $8 } END { print ignored + 0 }' "$dir/host")
[ "$ignored" = 0 ] || [ "$1" = vm ] || say "ignored, because they take minutes or only print (make test-long): $ignored"
[ "$ran" = "$skipped" ] || [ "${CNIBOX_NO_VM-}" = 1 ] || status=1
if [ -n "${CNIBOX_LONG-}" ] && [ -s "$dir/again" ]; then
    say "a test that passes only at the second try fails make test-long"
    status=1
fi
exit $status
