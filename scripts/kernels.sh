#!/bin/bash
# kernels.sh BINARY SANITY TESTS...: cni-sanity with each plugin, the integration tests of each plugin, and the unit tests,
# on the kernels of several releases of Debian, in VMs (vm.sh), as many at once as there are processors. TESTS are the
# executables of tests: the one that is called it-... has the integration tests. Prints what failed on stderr, and then a
# table: for each plugin and kernel the required assertions of the newest version of the specification that hold, and
# the integration tests that passed. Exit status 1 if anything failed, or a kernel did not start.
#
#   SUITES         the releases, separated by spaces [bullseye bookworm trixie sid]
#   TYPES          the plugins, separated by spaces [all that cni-sanity knows]
#   SELECT         the integration tests, as an extended regular expression [.]
#   PAGE           a page of the documentation, in whose table the columns of the releases are replaced for which all passed
set -euo pipefail

[ $# -ge 3 ] || { sed -n '2,6s/^# //p' "$0" && exit 2; }
binary=$1 sanity=$2
shift 2
read -ra suites <<<"${SUITES:-bullseye bookworm trixie sid}"
scripts=$(realpath "${0%/*}")
types=${TYPES:-$("$sanity" --list | sed -n 's/^Types that are known: //p' | sed 's/ ([a-z]*)//g; s/,//g')}
out=$(mktemp -d)
vms=()
# Commands in the background ignore SIGINT.
end() {
    [ ${#vms[@]} = 0 ] || kill "${vms[@]}" 2>/dev/null || true
    wait
    rm -rf "$out"
}
trap end EXIT
trap 'exit 130' INT TERM
# The kernel of the machine's own release is that of the VM lane.
own=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)

# In the VM: a line for each plugin, and one for the unit tests.
cat >"$out/run" <<'RUN'
binary=$1 sanity=$2 types=$3 select=$4
shift 4
export RUST_BACKTRACE=0 CNIBOX_BIN=$binary
status=0 limit=90m
directory=$(mktemp -d)
cd "$(mktemp -d)" || exit
"$binary" install "$directory" >/dev/null
echo "kernel $(uname -r | sed 's/[-+].*//')"

# run_tests EXECUTABLE [NAME...]: prints how many passed and failed.
run_tests() {
    local executable=$1
    shift
    timeout -k 9 "$limit" "$executable" --exact --test-threads=2 "$@" >report 2>&1 </dev/null ||
        [ $? -lt 124 ] || { echo "no end within $limit: ${1-} ..." >&2 && status=1; }
    grep -A 4 '\.\.\. FAILED\|panicked at\|^error: ' report >&2
    # A test that starts the executable again prints a result before.
    read -r passed failed < <(sed -n 's/^test result: .* \([0-9]*\) passed; \([0-9]*\) failed.*/\1 \2/p' report | tail -n 1)
    # As in the lanes of the suite: what fails has a second try, alone, which the table tells.
    mapfile -t again < <(sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' report)
    local second=
    if [ "${failed:-1}" != 0 ]; then
        if [ ${#again[@]} != 0 ] && timeout -k 9 "$limit" "$executable" --exact --test-threads=1 "${again[@]}" >second 2>&1 </dev/null; then
            echo "passed at the second try: ${again[*]}" >&2
            passed=$((passed + failed)) second=", $failed at the second try" failed=0
        else
            grep -A 4 '\.\.\. FAILED\|panicked at\|^error: ' second >&2
            status=1
        fi
    fi
    passed=${passed:+$passed passed, $failed failed$second}
    # A test of what this kernel lacks returns at once.
    skipped=$(grep -c '^skipped: ' report)
    passed="${passed:-none}$([ "$skipped" = 0 ] || echo ", of them $skipped lack a feature")"
}

for executable; do
    case ${executable##*/} in
        it-*) it=$executable ;;
        *)
            run_tests "$executable"
            units="${units:+$units; }$passed"
            ;;
    esac
done
for type in $types; do
    timeout -k 9 "$limit" "$sanity" --type "$type" --cni-version 1.1.0 "$directory" >report || status=1
    held=$(sed -n 's/^required: \([0-9]*\) of \([0-9]*\) passed/\1 of \2/p' report)
    ! grep -q '^SKIP.*lacks' report || held=lacks
    grep -A 5 '^FAIL required\|^TROUBLE' report >&2
    passed=
    case $type in
        static) module=static_plugin ;;
        *) module=${type//-/_} ;;
    esac
    mapfile -t names < <([ -z "${it-}" ] || "$it" --list 2>/dev/null | sed -n "s/^\($module::.*\): test$/\1/p" | grep -E "$select")
    [ ${#names[@]} = 0 ] || run_tests "$it" "${names[@]}"
    ran=$((${ran:-0} + ${#names[@]}))
    echo "$type ${held:-none}${passed:+; $passed}"
done
[ -z "${units-}" ] || echo "unit-tests $units"
[ -z "${it-}" ] || [ "$ran" != 0 ] || { echo "no integration test ran" >&2 && status=1; }
printf 'seconds %s\ndate %s\nstatus %s\n' $SECONDS "$(date -u +%Y-%m-%d)" $status
RUN

for suite in "${suites[@]}"; do
    [ "$(jobs -rp | wc -l)" -lt "$(nproc)" ] || wait -n || true
    of_vm=$suite
    [ "$suite" != "$own" ] || of_vm=
    CNIBOX_VM_SUITE=$of_vm CNIBOX_VM_TIMEOUT=${CNIBOX_VM_TIMEOUT:-10800} "$scripts/vm.sh" bash "$out/run" \
        "$binary" "$sanity" "$types" "${SELECT:-.}" "$@" >"$out/of-$suite" &
    vms+=($!)
done
for vm in "${vms[@]}"; do wait "$vm" || true; done
vms=()

# print_table SUITE...
print_table() {
    local name line suite
    echo "| release of Debian |$(printf ' %s |' "$@")"
    echo "| --- |$(printf ' --- |%.0s' "$@")"
    for name in kernel $types unit-tests seconds date; do
        line="| $name |"
        for suite; do
            line+=" $(sed -n "s/^$name //p" "$out/of-$suite") |"
        done
        echo "$line"
    done
}

print_table "${suites[@]}"
# A VM that died has no status.
mapfile -t passed < <(grep -lx 'status 0' "$out"/of-* | sed 's/.*of-//')
[ -z "${PAGE-}" ] || [ ${#passed[@]} = 0 ] || print_table "${passed[@]}" | "$scripts/table.py" kernels.sh "$PAGE"
[ ${#passed[@]} = ${#suites[@]} ]
