#!/usr/bin/env python3
"""matrix.py BINARY PAGE: runs the checks of run.sh with each installed container runtime, and updates the table in PAGE.

RUNTIMES is a colon-separated list of directories with further runtimes: each directory has the programs of one, such as containerd, ctr and
containerd-shim-runc-v2, and is prepended to PATH. Rows of versions that are not installed are kept."""

import os
import re
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
BEGIN, END = "<!-- matrix.py -->\n", "\n<!-- end -->"
HEADER = (
    "| runtime | starts containers with | kernel | checks that hold | the same node, switched from the reference and back | date |\n"
    "| --- | --- | --- | --- | --- | --- |"
)
# Runtime, and its low-level runtime in tests/runtimes.
RUNTIMES = {"containerd": "runc", "crio": "runc", "podman": "crun"}


def version(program, path):
    """Name and version, such as "containerd 1.6.20"; None if the program is not installed."""
    try:
        said = subprocess.run([program, "--version"], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    number = re.search(r"\d+\.\d+[.\d]*[-.\w]*", said.stdout)
    return f"{program} {re.split('[~+]', number[0])[0]}" if number else None


def checks(binary, scenario, path):
    """Runs a scenario and prints its output; returns passed and total checks as text, and whether all passed."""
    env = {**os.environ, "PATH": path}
    command = [os.path.join(HERE, "run.sh"), binary, scenario]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as run:
        said = []
        for line in run.stdout:
            print(line, end="", flush=True)
            said.append(line.split()[:1])
    hold, fail = said.count(["ok"]), said.count(["FAIL"])
    if run.returncode and not fail:
        fail = 1
    return f"{hold} of {hold + fail}" if hold + fail else "–", run.returncode == 0


def row(binary, runtime, path):
    name = version(runtime, path)
    print(f"=== {name}", flush=True)
    held, good = checks(binary, runtime, path)
    switched = "–"
    if runtime == "containerd":
        switched, as_good = checks(binary, "switch", path)
        good = good and as_good
    kernel = re.match(r"\d+\.\d+", os.uname().release)[0]
    starter = version(RUNTIMES[runtime], path)
    return name, f"| {name} | {starter} | {kernel} | {held} | {switched} | {time.strftime('%Y-%m-%d')} |", good


def main(binary, page):
    paths = [os.environ["PATH"]]
    paths += [f"{directory}:{paths[0]}" for directory in os.environ.get("RUNTIMES", "").split(":") if directory]
    found = {version(runtime, path): (runtime, path) for path in paths for runtime in RUNTIMES}
    done = [row(binary, runtime, path) for name, (runtime, path) in found.items() if name]
    with open(page, encoding="utf-8") as file:
        text = file.read()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    rows = {line.split("|")[1].strip(): line for line in text[start:end].split("\n")[2:]}
    rows.update({name: line for name, line, _ in done})
    table = "\n".join([HEADER, *(rows[name] for name in sorted(rows))])
    with open(page, "w", encoding="utf-8") as file:
        file.write(text[:start] + table + text[end:])
    return 0 if done and all(good for *_, good in done) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) == 3 else __doc__)
