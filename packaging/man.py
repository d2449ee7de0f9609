#!/usr/bin/env python3
"""man.py BINARY DIRECTORY: writes the manual pages: cnibox(1) with its commands, and those of the tools, from the
output of --help, cnibox-PLUGIN(8) from docs/plugins/, for the applets of the executable.

man.py --tool BINARY ABOUT DIRECTORY: writes the page of one tool."""

import os
import re
import subprocess
import sys

import archive


def says(binary, *args):
    return subprocess.run([binary, *args], check=True, capture_output=True, text=True).stdout


def escaped(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.M)


def page(name, section, about, body):
    head = f'.TH "{name.upper()}" "{section}" "" "cnibox" ""\n'
    return head + f".SH NAME\n{escaped(name)} \\- {escaped(about)}\n" + body


def literal(text):
    return ".nf\n" + escaped(text.rstrip()) + "\n.fi\n"


def inline(text):
    """Converts code, emphasis and links in a line of Markdown."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = escaped(text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"\\fB\1\\fR", text)
    return re.sub(r"`([^`]+)`", r"\\fB\1\\fR", text)


def row(line):
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
    first, rest = cells[0], [cell for cell in cells[1:] if cell]
    return f".TP\n{inline(first)}\n" + inline(". ".join(rest)).replace("\\|", "|") + "\n"


def from_markdown(text):
    """Converts headings, paragraphs, lists, tables and code of a page; the title is dropped."""
    out, code, skip = [], None, 0
    lines = text.splitlines()[1:]
    for number, line in enumerate(lines):
        if line.startswith("```"):
            if code is None:
                code = []
            else:
                out.append(literal("\n".join(code)))
                code = None
        elif code is not None:
            code.append(line)
        elif re.match(r"^\|[-| :]+\|$", line) or line.startswith("!["):
            # Delimiter rows of tables, and images.
            continue
        elif line.startswith("|"):
            # The section heading replaces the header row of a table.
            follows = lines[number + 1] if number + 1 < len(lines) else ""
            out.append("" if re.match(r"^\|[-| :]+\|$", follows) else row(line))
        elif line.startswith("#"):
            out.append(f".SH {inline(line.lstrip('# ').upper())}\n")
        elif line.startswith("- "):
            out.append(f".IP \\(bu 2\n{inline(line[2:])}\n")
        elif not line.strip():
            out.append(".PP\n")
        else:
            out.append(inline(line.strip()) + "\n")
    return "".join(out)


def tool(binary, about, directory):
    name = os.path.basename(binary)
    os.makedirs(directory + "/man1", exist_ok=True)
    body = ".SH SYNOPSIS\n" + literal(says(binary, "--help"))
    archive.write(f"{directory}/man1/{name}.1.gz", archive.gzipped(page(name, 1, about, body).encode()))


def main(binary, directory):
    os.makedirs(directory + "/man1", exist_ok=True)
    os.makedirs(directory + "/man8", exist_ok=True)
    save = lambda name, text: archive.write(f"{directory}/{name}.gz", archive.gzipped(text.encode()))
    applets = [line.split(None, 2) for line in says(binary, "list").splitlines()]
    usage = says(binary, "--help")
    # The lines "  cnibox COMMAND  description" of the help, without commands that have no help.
    commands = [name for name in re.findall(r"^  cnibox ([a-z]+)  ", usage, flags=re.M)
                if name not in ("help", "list", "version")]
    body = ".SH SYNOPSIS\n" + literal(usage)
    body += "".join(f".SH {name.upper()}\n" + literal(says(binary, name, "--help")) for name in commands)
    save("man1/cnibox.1", page("cnibox", 1, "every Linux CNI plugin in one executable", body))
    for name, kind, about in applets:
        if kind == "tool":
            body = ".SH SYNOPSIS\n" + literal(says(binary, name, "--help"))
            save(f"man1/{name}.1", page(name, 1, about, body))
            continue
        source = f"docs/plugins/{name}.md"
        if os.path.exists(source):
            body = ".SH DESCRIPTION\n" + from_markdown(archive.read(source).decode())
            save(f"man8/cnibox-{name}.8", page("cnibox-" + name, 8, about, body))


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "--tool":
        tool(*sys.argv[2:])
    elif len(sys.argv) == 3:
        main(*sys.argv[1:])
    else:
        sys.exit(__doc__)
