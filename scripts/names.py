#!/usr/bin/env python3
"""Counts the names of src/: types, names that several types share, functions named by one word.

scripts/names.py [--list]: prints the three figures and their goals; with --list the names behind them. Tests
are not counted. Exit status 1 if a goal is missed.
"""
import collections
import pathlib
import re
import sys

SHORTEST_MEAN = 10.0
MOST_SHARED = 15
MOST_ONE_WORD = 0.40

TYPE = re.compile(r"^\s*(?:pub(?:\([a-z ]*\))? )?(?:struct|enum|trait|type|union) ([A-Z]\w*)", re.M)
# An associated type belongs to its trait, not to the file.
ASSOCIATED = re.compile(r"^\s+type ")
FUNCTION = re.compile(r"^\s*(?:pub(?:\([a-z ]*\))? )?(?:const )?(?:unsafe )?fn (\w+)", re.M)


def sources(root):
    for path in sorted(root.rglob("*.rs")):
        parts = path.relative_to(root).parts
        if "tests" in parts or path.name == "tests.rs":
            continue
        text = path.read_text()
        yield path, text.split("#[cfg(test)]\nmod tests {")[0]


def main():
    root = pathlib.Path(__file__).resolve().parent.parent / "src"
    types, functions = collections.defaultdict(list), []
    for path, text in sources(root):
        for match in TYPE.finditer(text):
            if not ASSOCIATED.match(match.group(0).lstrip("\n")):
                types[match.group(1)].append(path.relative_to(root))
        functions += FUNCTION.findall(text)
    names = [name for name, where in types.items() for _ in where]
    mean = sum(map(len, names)) / len(names)
    shared = {name: where for name, where in types.items() if len(where) > 1}
    one_word = [name for name in functions if "_" not in name]
    share = len(one_word) / len(functions)
    print(f"types: {len(names)}, mean length of a name {mean:.1f} letters (goal: {SHORTEST_MEAN} or more)")
    print(f"names of several types: {len(shared)} (goal: fewer than {MOST_SHARED})")
    print(f"functions: {len(functions)}, named by one word {share:.0%} (goal: {MOST_ONE_WORD:.0%} or less)")
    if "--list" in sys.argv[1:]:
        for name, where in sorted(shared.items()):
            print(f"  {name}: {', '.join(map(str, where))}")
        for name, count in collections.Counter(one_word).most_common():
            print(f"  {name}(): {count}")
    return mean < SHORTEST_MEAN or len(shared) >= MOST_SHARED or share > MOST_ONE_WORD


if __name__ == "__main__":
    sys.exit(main())
