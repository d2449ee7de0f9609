#!/usr/bin/env python3
"""table.py NAME PAGE: puts the table of stdin between the lines "<!-- NAME -->" and "<!-- end -->" of PAGE.

Both are tables of Markdown, with the name of each row in its first column. Columns that only the page's table has are
kept, and are empty in new rows."""

import pathlib
import sys


def columns(lines):
    """The rows' names by that of their column, and the other columns likewise: name to cells by row."""
    rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines if line.startswith("|")]
    rows = [row for row in rows if row[0] != "---"]
    return {title: {row[0]: row[at] for row in rows[1:]} for at, title in enumerate(rows[0])} if rows else {}


def merged(old, new):
    """The lines of the new table with the other columns of the old one, in the order of the old one."""
    (corner, names), *_ = new.items()
    titles = [*dict.fromkeys([*list(old)[1:], *list(new)[1:]])]
    cells = {title: new.get(title) or old[title] for title in titles}
    rows = [[corner, *titles], ["---"] * (len(titles) + 1)]
    rows += [[name, *(cells[title].get(name, "") for title in titles)] for name in names]
    return [f"| {' | '.join(row)} |" for row in rows]


def main(name, page):
    page = pathlib.Path(page)
    lines = page.read_text().split("\n")
    first = lines.index(f"<!-- {name} -->") + 1
    last = lines.index("<!-- end -->", first)
    lines[first:last] = merged(columns(lines[first:last]), columns(sys.stdin.read().split("\n")))
    page.write_text("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
