#!/bin/sh
# static-pie.sh FILE: verifies that FILE is a static executable: no PT_INTERP, no DT_NEEDED; on x86-64 position
# independent: type ET_DYN with the flag PIE; and that no segment is writable and executable.
set -eu
export LC_ALL=C
fail() {
    echo "static-pie: $1: $2" >&2
    exit 1
}
# For other architectures rustc 1.95 links static executables only at a fixed address.
if readelf -hW "$1" | grep -q 'Machine:.*X86-64'; then
    readelf -hW "$1" | grep -q 'Type: *DYN ' || fail "$1" "at a fixed address"
    readelf -dW "$1" | grep -q 'FLAGS_1.* PIE' || fail "$1" "not a position independent executable"
fi
if readelf -lW "$1" | grep -q INTERP || readelf -dW "$1" | grep -q NEEDED; then
    fail "$1" "not static"
fi
if readelf -lW "$1" | grep -E 'GNU_STACK|LOAD' | grep -q 'WE '; then
    fail "$1" "a segment is writable and executable"
fi
