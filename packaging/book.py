#!/usr/bin/env python3
"""book.py SOURCE BOOK: builds the documentation as a book (mdBook) in the directory BOOK, from copies of the pages in
the directory SOURCE. Fails if the book has a dead link.

mdBook reads one directory: the pages of the root, such as README.md, are copied beside those of docs/."""

import html.parser
import os
import re
import shutil
import subprocess
import sys
import urllib.parse

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "MAINTAINERS.md", "SECURITY.md"]
FILES = ["LICENSE"]


def gather(source):
    """Copies all pages, with links adapted to the new paths."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(os.path.join(ROOT, "docs"), source)
    for name in PAGES + FILES:
        shutil.copy(os.path.join(ROOT, name), source)
    up = re.compile(r"\]\(\.\./(" + "|".join(map(re.escape, PAGES)) + ")")
    for directory, _, names in os.walk(source):
        for name in filter(lambda name: name.endswith(".md"), names):
            path = os.path.join(directory, name)
            with open(path, encoding="utf-8") as file:
                text = file.read()
            if directory == source:
                text = re.sub(r'(\]\(|src=")docs/', r"\1", text) if name in PAGES else up.sub(r"](\1", text)
            # mdBook renames these pages to index.html, but does not adapt links.
            if name != "SUMMARY.md":
                text = re.sub(r"(\]\([^)]*)README\.md", r"\1index.md", text)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)


class Page(html.parser.HTMLParser):
    """The links of a page, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.links, self.names = [], {""}
        with open(path, encoding="utf-8") as file:
            self.feed(file.read())

    def handle_starttag(self, tag, attrs):
        for key, value in attrs:
            if key in ("href", "src") and value:
                self.links.append(value)
            elif key in ("id", "name"):
                self.names.add(value)


def dead(book):
    """Dead links of all pages, except pages that mdBook assembles from others."""
    found, pages = [], {}
    for directory, _, names in os.walk(book):
        for name in names:
            if name.endswith(".html") and name not in ("404.html", "print.html", "toc.html"):
                path = os.path.join(directory, name)
                pages[os.path.normpath(path)] = Page(path)
    for path, page in pages.items():
        for link in page.links:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = os.path.normpath(os.path.join(os.path.dirname(path), urllib.parse.unquote(url.path))) if url.path else path
            is_there = os.path.exists(target)
            if is_there and url.fragment and target in pages:
                is_there = urllib.parse.unquote(url.fragment) in pages[target].names
            if not is_there:
                found.append(f"{os.path.relpath(path, book)}: {link}")
    return len(pages), found


def main(source, book):
    source, book = os.path.abspath(source), os.path.abspath(book)
    gather(source)
    subprocess.run(["mdbook", "build", "-d", book, ROOT], env={**os.environ, "MDBOOK_BOOK__SRC": source}, check=True)
    pages, found = dead(book)
    if pages < 40:
        return f"book: only {pages} pages"
    if found:
        return "book: dead links:\n  " + "\n  ".join(found)
    print(f"{pages} pages, {book}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) == 3 else __doc__)
