#!/bin/sh
# static-pie.sh FILE: it needs no interpreter and no library, and runs at an address that the kernel
# chooses. Its type is that of a shared object, the flag PIE is set, and nothing asks for a loader.
set -eu
export LC_ALL=C
fail() {
    echo "static-pie: $1: $2" >&2
    exit 1
}
readelf -hW "$1" | grep -q 'Type: *DYN ' || fail "$1" "at a fixed address"
readelf -dW "$1" | grep -q 'FLAGS_1.* PIE' || fail "$1" "not an executable that is position independent"
if readelf -lW "$1" | grep -q INTERP || readelf -dW "$1" | grep -q NEEDED; then
    fail "$1" "not static"
fi
if readelf -lW "$1" | grep -E 'GNU_STACK|LOAD' | grep -q 'WE '; then
    fail "$1" "memory that can be written and executed"
fi
