#!/bin/bash
# lanes.sh host-and-vm | vm [PATTERN]: runs the tests in two lanes.
#
# The host lane is cargo test on this machine's kernel. A test that needs a kernel feature which this
# kernel lacks (tests/it/lane.rs) reports that and is skipped. The VM lane runs exactly the skipped
# tests, from the same executables, in a kernel with all features (tests/vm.sh); if no test is
# skipped, no VM is started. At the end each skipped test is listed with the lane that ran it. A test
# that ran in neither lane fails the run, unless CNIBOX_NO_VM=1 disables the VM lane.
#
# Both lanes run concurrently: the host lane sleeps most of the time, while emulation is CPU-bound,
# so the VMs run at the lowest priority.
#
# "vm" runs the VM lane only. PATTERN, an extended regular expression, selects tests by name.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "lanes: $*"; }

# CNIBOX_SOAK includes the long tests (#[ignore]).
flags=()
[ -z "${CNIBOX_SOAK-}" ] || flags=(--include-ignored)

# Runs the tests of a list, lines of "executable<tab>test<tab>features", on this kernel. A failed test
# is retried alone: two tests and all their processes share one slow processor.
run_list() {
    local executable output names name status=0
    output=$(mktemp)
    while read -r executable; do
        mapfile -t names < <(awk -F '\t' -v wanted="$executable" '$1 == wanted { print $2 }' "$1")
        echo "executable $executable"
        # With one thread libtest prints the name before the test runs, and the test's output breaks the line.
        if "$executable" "${flags[@]}" --exact --test-threads=2 "${names[@]}" 2>&1 | tee "$output"; then
            continue
        fi
        mapfile -t names < <(sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' "$output")
        [ ${#names[@]} -gt 0 ] || status=1
        for name in "${names[@]}"; do
            echo "once more, alone: $name"
            "$executable" "${flags[@]}" --exact --test-threads=2 "$name" || status=1
        done
    done < <(cut -f 1 "$1" | sort -u)
    rm -f "$output"
    return $status
}

# Retries up to three failed tests of the host lane, each alone; more failures are not treated as accidental.
try_again() {
    local name names
    mapfile -t names < <(sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' "$dir/host")
    [ ${#names[@]} -gt 0 ] && [ ${#names[@]} -le 3 ] || return
    for name in "${names[@]}"; do
        echo "once more, alone: $name" | tee -a "$dir/vm"
        CNIBOX_SKIPPED=$dir/skipped cargo test --locked --quiet --lib --test it --test arch --test docs -- \
            "${flags[@]}" --exact "$name" || return
    done
    status=0
}

# Runs the tests of a list in VMs in the background, one VM for each processor, as a VM has one. The
# output is in shard.N.log.
start_vms() {
    local count shards shard
    count=$(wc -l <"$1")
    shards=$(nproc)
    [ "$shards" -le $(((count + 2) / 3)) ] || shards=$(((count + 2) / 3))
    split --number="r/$shards" --numeric-suffixes --additional-suffix=.list "$1" "$dir/shard."
    tests/vm.sh --setup || return
    say "$count tests in the VM lane, which takes minutes; VMs at once: $shards"
    for shard in "$dir"/shard.*.list; do
        CNIBOX_LANE=vm CNIBOX_VM_TIMEOUT=${CNIBOX_VM_TIMEOUT:-2700} \
            CNIBOX_VM_QEMU=${CNIBOX_VM_QEMU:--device e1000,romfile= -device virtio-net-pci,romfile=} \
            nice -n 19 tests/vm.sh bash tests/lanes.sh list "$shard" >"${shard%.list}.log" 2>&1 &
        vms+=($!)
    done
}

# Waits for the VMs and collects their output; a VM that died shows as tests that ran in no lane.
await_vms() {
    local vm
    [ ${#vms[@]} -gt 0 ] || return 0
    for vm in "${vms[@]}"; do wait "$vm" || true; done
    cat "$dir"/shard.*.log | tee -a "$dir/vm"
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
    host-and-vm | vm) ;;
    *) echo "usage: tests/lanes.sh host-and-vm | vm [PATTERN]" >&2 && exit 2 ;;
esac

dir=$(mktemp -d)
vms=()
trap end EXIT
trap 'exit 130' INT TERM HUP
touch "$dir/skipped" "$dir/vm"
status=0
cargo test --locked --no-run
# With CNIBOX_LANE=list tests record their missing features and are skipped or fail, but do not run.
CNIBOX_LANE=list CNIBOX_SKIPPED=$dir/skipped cargo test --locked --no-fail-fast --lib --test it -- "${flags[@]}" \
    >"$dir/host" 2>&1 || true
sort -u "$dir/skipped" | grep -E -- "${2-}" >"$dir/list" || true
if [ -s "$dir/list" ] && [ "${CNIBOX_NO_VM-}" != 1 ]; then
    start_vms "$dir/list" || say "no VM for the skipped tests; CNIBOX_NO_VM=1 disables the VM lane"
fi
host="not asked for"
if [ "$1" = host-and-vm ]; then
    : >"$dir/skipped"
    CNIBOX_SKIPPED=$dir/skipped cargo test --locked --no-fail-fast -- "${flags[@]}" 2>&1 | tee "$dir/host" || status=1
    host=$(awk '/^test result:/ { ok += $4; bad += $6 } END { print ok " passed, " bad " failed" }' "$dir/host")
    [ "$status" = 0 ] || try_again || status=1
    # A test that was skipped only when it ran is in no lane.
    sort -u -o "$dir/list" "$dir/list" "$dir/skipped"
fi
await_vms
skipped=$(wc -l <"$dir/list")

outcomes "$dir/list" >"$dir/outcomes"
ran=$(grep -c 'ran in the VM$' "$dir/outcomes" || true)
failed=$(grep -c 'failed in the VM$' "$dir/outcomes" || true)
sed -n 's/^once more, alone: /    had a second try: /p' "$dir/vm" >"$dir/again"
[ "$skipped" = 0 ] || say "this kernel, $(uname -r), lacks what these tests need:"
cat "$dir/outcomes" "$dir/again"
# cargo counts a skipped test as passed.
say "host lane: $host, of which $skipped skipped; VM lane: $ran passed, $failed failed, second tries: $(wc -l <"$dir/again"); in no lane: $((skipped - ran - failed))"
ignored=$(awk '/^test result:/ { ignored += $8 } END { print ignored + 0 }' "$dir/host")
[ "$ignored" = 0 ] || [ "$1" = vm ] || say "ignored, because they take minutes or only print (make soak): $ignored"
[ "$ran" = "$skipped" ] || [ "${CNIBOX_NO_VM-}" = 1 ] || status=1
exit $status
