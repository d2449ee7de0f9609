#!/usr/bin/env python3
"""record.py OUT.svg COMMAND...: records the output of a command as an animated SVG.

A CSS animation shows the lines one after the other; without animation (print, "reduce motion", a
viewer without CSS animations) all lines are visible. Colours follow the reader's light or dark
theme. The delays are fixed, independent of the timing of the command.
"""

import os
import pty
import re
import subprocess
import sys
from xml.sax.saxutils import escape

COLUMNS = 100
# In pixels: the advance width of common monospaced fonts is 0.6 of the font size.
SIZE = 13
ADVANCE = SIZE * 0.6
HEIGHT = 18
MARGIN = 16
# Delay in seconds before a line that begins a step, and before any other line.
STEP, LINE = 0.9, 0.06

STYLE = """
  .t { font: %dpx ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
    white-space: pre; fill: #1f2328; animation: appear 0.2s backwards }
  .b { font-weight: bold; fill: #0550ae }
  .w { fill: #f6f8fa; stroke: #d1d9e0 }
  @keyframes appear { from { opacity: 0 } }
  @media (prefers-color-scheme: dark) {
    .t { fill: #d1d7e0 } .b { fill: #79c0ff } .w { fill: #0d1117; stroke: #3d444d } }
  @media (prefers-reduced-motion: reduce) { .t { animation: none } }
""" % SIZE


def output_of(command):
    """The output lines of the command on a terminal; SystemExit if it fails."""
    ours, theirs = pty.openpty()
    env = dict(os.environ, TERM="xterm", LC_ALL="C.UTF-8")
    env.pop("NO_COLOR", None)
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    data = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # EIO: all processes have closed the terminal.
            break
        if not piece:
            break
        data += piece
    os.close(ours)
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    if child.wait() != 0:
        raise SystemExit("record: %s: exit status %d\n%s" % (command[0], child.returncode, text))
    return text.rstrip("\n").split("\n")


def spans(line):
    """A line as a list of (text, is bold); other escape sequences are dropped."""
    found, bold = [], False
    for part in re.split("(\x1b\\[[0-9;]*[A-Za-z])", line):
        if part.startswith("\x1b["):
            bold = part.endswith("m") and part[2:-1] == "1"
        elif part:
            found.append((part, bold))
    return found


def wrapped(line):
    """The line wrapped to COLUMNS characters; continuation lines are indented by 4 more."""
    rows, row, width = [], [], 0
    plain = "".join(text for text, _ in line)
    indent = len(plain) - len(plain.lstrip()) + 4
    for text, bold in line:
        while width + len(text) > COLUMNS:
            room = COLUMNS - width
            cut = text.rfind(" ", 1, room + 1)
            cut = room if cut <= 0 else cut
            rows.append(row + [(text[:cut], bold)])
            text = text[cut:].lstrip()
            row, width = [(" " * indent, False)], indent
        row = row + [(text, bold)]
        width += len(text)
    return rows + [row]


def picture(title, lines):
    """The SVG."""
    rows, when = [], 0.0
    for line in lines:
        line = spans(line)
        when += STEP if any(bold for _, bold in line) else LINE
        rows += [(when, row) for row in wrapped(line)]
    width = round(COLUMNS * ADVANCE) + 2 * MARGIN
    height = len(rows) * HEIGHT + 2 * MARGIN
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" role="img">'
        % (width, height, width, height),
        "<title>%s</title>" % escape(title),
        "<style>%s</style>" % STYLE,
        '<rect class="w" x="0.5" y="0.5" width="%d" height="%d" rx="6"/>' % (width - 1, height - 1),
    ]
    for number, (at, row) in enumerate(rows):
        y = MARGIN + (number + 1) * HEIGHT - 5
        # Each piece is positioned by its column, because advance widths differ slightly between fonts.
        pieces, column = "", 0
        for text, bold in row:
            start = column + len(text) - len(text.lstrip(" "))
            column += len(text)
            if text.strip():
                pieces += '<tspan x="%.1f"%s>%s</tspan>' % (
                    MARGIN + start * ADVANCE, ' class="b"' if bold else "", escape(text.strip(" ")))
        if pieces:
            out.append('<text class="t" xml:space="preserve" y="%d" style="animation-delay:%.2fs">%s</text>'
                       % (y, at, pieces))
    return "\n".join(out + ["</svg>", ""])


def main():
    if len(sys.argv) < 3:
        raise SystemExit("usage: packaging/record.py OUT.svg COMMAND [ARGUMENT...]")
    out, command = sys.argv[1], sys.argv[2:]
    title = "make demo" if command[0].endswith("demo.sh") else " ".join(command)
    lines = ["\x1b[1m$ %s\x1b[0m" % title] + output_of(command)
    with open(out, "w", encoding="utf-8") as file:
        file.write(picture(title, lines))


if __name__ == "__main__":
    main()
