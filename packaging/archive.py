"""Reproducible archives: owned by root, in the order of the calls, with the timestamp
SOURCE_DATE_EPOCH (default 0)."""

import gzip
import io
import os
import tarfile

EPOCH = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))


class Archive:
    """A tar archive in memory."""

    def __init__(self):
        self.buffer = io.BytesIO()
        self.tar = tarfile.open(fileobj=self.buffer, mode="w", format=tarfile.USTAR_FORMAT)

    def _add(self, name, kind, mode, data=None, target=""):
        member = tarfile.TarInfo(name)
        member.type, member.mode, member.mtime, member.linkname = kind, mode, EPOCH, target
        member.uname = member.gname = "root"
        member.size = len(data) if data is not None else 0
        self.tar.addfile(member, None if data is None else io.BytesIO(data))

    def directory(self, name):
        self._add(name, tarfile.DIRTYPE, 0o755)

    def file(self, name, data, mode=0o644):
        self._add(name, tarfile.REGTYPE, mode, data)

    def link(self, name, target):
        self._add(name, tarfile.SYMTYPE, 0o777, target=target)

    def bytes(self):
        self.tar.close()
        return self.buffer.getvalue()


def gzipped(data):
    return gzip.compress(data, compresslevel=9, mtime=0)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def write(path, data):
    with open(path, "wb") as file:
        file.write(data)
