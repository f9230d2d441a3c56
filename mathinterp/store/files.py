"""The bytes of a store: a local folder, or a prefix of an object store (s3://, gs://, memory://) through fsspec.

Knows how to write a file so that nobody ever sees half of it, and how to list and read files. Knows nothing
about runs, tables or Parquet. Names are relative to the store and use "/".
"""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from mathinterp.errors import UserError
from mathinterp.gates import check_place
from mathinterp.local_files import resolved

STALE_SECONDS = 3600.0  # a temporary file older than this belongs to a process that died


@dataclass(frozen=True)
class FileVersion:
    """Changes whenever the content does; lets the result of an inspection be cached."""

    size: int
    stamp: str


class StoreFiles:
    """Whole-file reads and atomic whole-file writes under one root."""

    def __init__(self, url: str | os.PathLike[str]):
        """Raises UserError for a path that is a file or that SQL cannot name, or a protocol that cannot be used."""
        text = os.fspath(url)
        check_place(text, "store")
        self.local = "://" not in text or text.startswith("file://")
        if self.local:
            self.root = str(resolved(Path(text.removeprefix("file://")).expanduser(), "store"))
            self.filesystem: Any = None
            if os.path.exists(self.root) and not os.path.isdir(self.root):
                raise UserError(f"store '{text}' is a file; give a folder")
        else:
            self.root = text.rstrip("/")
            self.filesystem, self._prefix = _open_filesystem(self.root)
        if re.search(r"[*?\[\]]", self.root):
            raise UserError(
                f"store '{text}' has one of the characters * ? [ ], which SQL reads as a pattern; rename it"
            )
        check_place(self.root, "store")
        # In a pattern DuckDB takes a backslash for the end of a folder's name; in a file's full name for itself.
        self.takes_patterns = "\\" not in self.root

    def address(self, name: str) -> str:
        """The absolute path or URL of a file, as DuckDB and people read it."""
        return f"{self.root}/{name}"

    def places(self) -> list[str]:
        """The folder or prefix under all names that DuckDB gives it, each with a "/" at its end."""
        if self.local:
            return [self.root.rstrip("/") + "/"]
        protocols = self.filesystem.protocol
        names = (protocols,) if isinstance(protocols, str) else protocols
        return [f"{self.root}/", *(f"{name}://{self._prefix}/" for name in names)]

    def check_writable(self) -> None:
        """Write and remove a small file; raises UserError if that fails."""
        name = f".probe-{uuid4().hex}"
        try:
            self.write(name, b"")
            self.remove(name)
        except Exception as error:  # object stores raise their vendors' own exception types
            raise UserError(
                f"store '{self.root}' is not writable ({_reason(error)}); choose another with --store"
            ) from error

    def write(self, name: str, content: bytes) -> None:
        """Replace a file as a whole: readers see the old content or the new, also after a crash.

        Locally through a temporary name, fsync and rename; on an object store, where a put is atomic, directly.
        """
        if not self.local:
            self.filesystem.pipe_file(self._key(name), content)
            return
        path = Path(self.root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        for folder in (path.parent, path.parent.parent):  # the rename, and the folder itself if it is new
            _fsync_folder(folder)

    def read(self, name: str) -> bytes:
        """The whole content; raises FileNotFoundError."""
        if self.local:
            return Path(self.root, name).read_bytes()
        content: bytes = self.filesystem.cat_file(self._key(name))
        return content

    def open(self, name: str) -> BinaryIO:
        """A seekable binary reader."""
        if self.local:
            return open(Path(self.root, name), "rb")
        opened: BinaryIO = self.filesystem.open(self._key(name), "rb")
        return opened

    def remove(self, name: str) -> None:
        """Delete one file."""
        if self.local:
            os.remove(Path(self.root, name))
        else:
            self.filesystem.rm_file(self._key(name))

    def find(self, folder: str, suffix: str) -> dict[str, FileVersion]:
        """All files below ``folder`` whose names end in ``suffix`` (temporary files never do); {} if it is absent."""
        if self.local:
            found = {name: FileVersion(stat.st_size, str(stat.st_mtime_ns)) for name, stat in self._walk(folder)}
        else:
            self.filesystem.invalidate_cache()  # other machines write too
            keys: dict[str, dict[str, Any]] = self.filesystem.find(self._key(folder), detail=True)
            found = {key[len(self._prefix) + 1 :]: _remote_version(info) for key, info in keys.items()}
        return {name: found[name] for name in sorted(found) if name.endswith(suffix)}

    def remove_stale(self, folder: str) -> None:
        """Delete temporary files that a killed process left below ``folder`` more than an hour ago."""
        if not self.local:
            return
        for name, stat in self._walk(folder):
            if name.endswith(".tmp") and time.time() - stat.st_mtime > STALE_SECONDS:
                Path(self.root, name).unlink(missing_ok=True)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _walk(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        try:
            entries = list(os.scandir(os.path.join(self.root, folder)))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            name = f"{folder}/{entry.name}"
            if entry.is_dir():
                yield from self._walk(name)
                continue
            try:
                yield name, entry.stat()
            except FileNotFoundError:  # renamed by another process since the listing
                continue


def _open_filesystem(url: str) -> tuple[Any, str]:
    try:
        filesystem, prefix = fsspec.url_to_fs(url)
    except ImportError as error:
        raise UserError(f"store '{url}' needs a package that is not installed: {error}") from error
    except Exception as error:  # each protocol's client has exceptions of its own
        raise UserError(f"store '{url}' cannot be opened: {_reason(error)}") from error
    if type(filesystem) is MemoryFileSystem:
        filesystem = _MemoryFiles()
    return filesystem, prefix.rstrip("/")


class _MemoryFiles(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """memory:// with readers of their own: fsspec gives all readers of a file one object with one position, so that
    two scans of it at once, as DuckDB makes them, miss each other's bytes.
    """

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        opened = super()._open(path, mode, **options)
        return BytesIO(opened.getvalue()) if mode == "rb" else opened


def _remote_version(info: dict[str, Any]) -> FileVersion:
    stamps = (info.get(key) for key in ("ETag", "etag", "mtime", "LastModified", "updated", "created"))
    return FileVersion(int(info["size"]), next((str(stamp) for stamp in stamps if stamp), ""))


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or " ".join(str(error).split()) or type(error).__name__
