#!/bin/bash
# kernels.sh BINARY SANITY TESTS: cni-sanity with each plugin, and the unit tests, on the kernels of several releases of
# Debian, in a VM (vm.sh). TESTS is the executable of the library's unit tests. Prints what failed on stderr, and then a
# table: the required assertions of the newest version of the specification that hold, for each plugin and kernel. Exit
# status 1 if anything failed, or a kernel did not start.
#
#   SUITES         the releases, separated by spaces [bullseye bookworm trixie sid]
#   TYPES          the plugins, separated by spaces [all that cni-sanity knows]
#   TESTS_ARGS     arguments of the unit tests, such as "netlink::"
set -euo pipefail

binary=$1 sanity=$2 tests=$3
read -ra suites <<<"${SUITES:-bullseye bookworm trixie sid}"
scripts=$(realpath "${0%/*}")
types=${TYPES:-$("$sanity" --list | sed -n 's/^Types that are known: //p' | sed 's/ ([a-z]*)//g; s/,//g')}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# The kernel of the machine's own release is that of the VM lane.
own=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)

# In the VM: a line for each plugin, and one for the unit tests.
cat >"$out/run" <<'RUN'
binary=$1 sanity=$2 tests=$3 types=$4
status=0
directory=$(mktemp -d)
"$binary" install "$directory" >/dev/null
echo "kernel $(uname -r | sed 's/[-+].*//')"
for type in $types; do
    "$sanity" --type "$type" --cni-version 1.1.0 "$directory" >report || status=1
    held=$(sed -n 's/^required: \([0-9]*\) of \([0-9]*\) passed/\1 of \2/p' report)
    ! grep -q '^SKIP.*lacks' report || held=lacks
    echo "$type ${held:-none}"
    grep -A 5 '^FAIL required\|^TROUBLE' report >&2
done
# shellcheck disable=SC2086 # several arguments
RUST_BACKTRACE=0 "$tests" --test-threads 1 $TESTS_ARGS >report 2>&1 || status=1
sed -n 's/^test result: .* \([0-9]*\) passed; \([0-9]*\) failed.*/unit-tests \1 passed, \2 failed/p' report
grep 'FAILED\|panicked' report >&2
exit $status
RUN

status=0
for suite in "${suites[@]}"; do
    start=$SECONDS
    [ "$suite" != "$own" ] || suite=
    (cd "$out" && CNIBOX_VM_SUITE=$suite CNIBOX_VM_TIMEOUT=${CNIBOX_VM_TIMEOUT:-5400} TESTS_ARGS=${TESTS_ARGS:-} \
        "$scripts/vm.sh" bash "$out/run" "$binary" "$sanity" "$tests" "$types") >"$out/of-$suite" || status=1
    echo "seconds $((SECONDS - start))" >>"$out/of-$suite"
done

for name in kernel $types unit-tests seconds; do
    line="| $name |"
    for suite in "${suites[@]}"; do
        [ "$suite" != "$own" ] || suite=
        line+=" $(sed -n "s/^$name //p" "$out/of-$suite") |"
    done
    echo "$line"
    [ "$name" != kernel ] || echo "| --- |$(printf ' --- |%.0s' "${suites[@]}")"
done
exit $status
