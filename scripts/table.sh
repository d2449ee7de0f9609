#!/bin/bash
# table.sh NAME PAGE: replaces what stands in PAGE between "<!-- NAME -->" and the next "<!-- end -->" by stdin, with the
# date.
set -euo pipefail

name=$1 page=$2
table=$(mktemp)
trap 'rm -f "$table"' EXIT
{
    echo "On $(date -u +%Y-%m-%d), Linux $(uname -r | cut -d. -f1,2) being the machine's:"
    echo
    cat
} >"$table"
for line in "<!-- $name -->" "<!-- end -->"; do
    grep -qFx "$line" "$page" || { echo "$page has no line \"$line\"" >&2; exit 1; }
done
awk -v begin="<!-- $name -->" -v table="$table" '
    $0 == "<!-- end -->" { inside = 0 }
    !inside { print }
    $0 == begin { inside = 1; while ((getline line < table) > 0) print line }
' "$page" >"$page.new"
cat "$page.new" >"$page"
rm "$page.new"
