"""The bytes of a store: a local folder, or a prefix of an object store (s3://, gs://, memory://) through fsspec.

Knows how to write a file so that nobody ever sees half of it, how to list and read files, and what to say when a disk
or an object store fails. Knows nothing about runs, tables or Parquet. Names are relative to the store and use "/".
Links within a store are not followed.
"""

import errno
import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple
from uuid import uuid4

from mathinterp.errors import Unfinished, UserError
from mathinterp.gates import check_place
from mathinterp.local_files import resolved

if TYPE_CHECKING:
    import fsspec

    from mathinterp.store.remote import RemoteFiles

STALE_SECONDS = 3600.0  # a temporary file of another machine, older than this, belongs to a process that died
PROBE_BYTES = 2**16  # a full disk still takes empty files
PASSING = {None, errno.ENOENT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNREFUSED,
           errno.ECONNRESET, errno.EPIPE, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
           errno.EBUSY, errno.EAGAIN}  # None: an object store's own  # fmt: skip


class FileVersion(NamedTuple):
    """Changes whenever the content does; lets the result of an inspection be cached."""

    size: int
    stamp: str
    odd: str = ""  # why it cannot be read: a link, a pipe, a folder that cannot be listed


class StoreFailed(Unfinished, OSError):
    """The disk or object store gave out: full, read-only, gone, or not answering. The same call goes on from there."""

    @property
    def may_pass(self) -> bool:
        """Whether it may be over by itself, as a network's failures are; a full disk is not."""
        return getattr(self.__cause__, "errno", None) in PASSING


class StoreFiles:
    """Whole-file reads and atomic whole-file writes under one root."""

    def __init__(self, url: str | os.PathLike[str]):
        """Raises UserError for a path that is a file or that SQL cannot name, or a protocol that cannot be used."""
        text = os.fspath(url)
        check_place(text, "store")
        self.local = "://" not in text or text.startswith("file://")
        self._remote = None if self.local else _remote_files(text)
        if self.local:
            self.root = str(resolved(Path(text.removeprefix("file://")).expanduser(), "store"))
            if os.path.exists(self.root) and not os.path.isdir(self.root):
                raise UserError(f"store '{text}' is a file; give a folder")
        else:
            self.root = text.rstrip("/")
        if re.search(r"[*?\[\]]", self.root):
            raise UserError(
                f"store '{text}' has one of the characters * ? [ ], which SQL reads as a pattern; rename it"
            )
        check_place(self.root, "store")
        # In a pattern DuckDB takes a backslash for the end of a folder's name; in a file's full name for itself.
        self.takes_patterns = "\\" not in self.root

    @property
    def filesystem(self) -> "fsspec.AbstractFileSystem | None":
        """What DuckDB reads an object store through; None for a local folder."""
        return None if self._remote is None else self._remote.for_reading()

    def address(self, name: str) -> str:
        """The absolute path or URL of a file, as DuckDB and people read it."""
        return f"{self.root}/{name}"

    def check_writable(self) -> None:
        """Write and remove a small file; raises UserError if that fails, StoreFailed if an object store is down."""
        name = f".probe-{uuid4().hex}"
        try:
            if self._remote is not None:
                self._remote.write(name, bytes(PROBE_BYTES))
                self._remote.remove(name)
            else:
                os.makedirs(self.root, exist_ok=True)
                with _temporary(Path(self.root, name), bytes(PROBE_BYTES)):
                    pass
        except Exception as error:  # object stores raise their vendors' own exception types
            message = f"store '{self.root}' is not writable ({_reason(error)})"
            if self._remote is not None and _may_be_down(error):
                raise StoreFailed(message) from error
            raise UserError(f"{message}; choose another `store`") from error

    def write(self, name: str, content: bytes) -> None:
        """Replace a file as a whole: readers see the old content or the new, also after a crash.

        Locally through a temporary name, fsync and rename; on an object store, where a put is atomic, directly.
        Raises StoreFailed, leaving nothing behind, also where the store's own folder is not there: only
        ``check_writable`` makes it, so that no store is begun in the place of one that is away.
        """
        with self._told("cannot be written"):
            if self._remote is not None:
                self._remote.write(name, content)
                return
            path = Path(self.root, name)
            for below in reversed(path.relative_to(self.root).parents[:-1]):
                Path(self.root, below).mkdir(exist_ok=True)
            with _temporary(path, content) as temporary:
                os.replace(temporary, path)
            for folder in (path.parent, path.parent.parent):  # the rename, and the folder itself if it is new
                _fsync_folder(folder)

    def require_local(self, name: str) -> None:
        """Raise StoreFailed if a local store has no such file: then it is not there, and must not be begun again."""
        if self._remote is None and not os.path.exists(os.path.join(self.root, name)):
            raise StoreFailed(
                f"store '{self.root}' is not there, or has lost {name}, as {socket.gethostname()} sees it"
            )

    def read(self, name: str, *, now: bool = False) -> bytes:
        """The whole content; raises FileNotFoundError, or OSError for what is no regular file.

        Args:
            now: of an object store, not as it was when it was last listed.
        """
        if now and self._remote is not None:
            with self._told("cannot be read", FileNotFoundError, PermissionError):
                return self._remote.read_now(name)
        with self.open(name) as file:
            return file.read()

    def open(self, name: str) -> BinaryIO:
        """A seekable binary reader; raises as ``read`` does."""
        if self._remote is None:
            return _open_regular(os.path.join(self.root, name))
        with self._told("cannot be read", FileNotFoundError, PermissionError):
            return self._remote.open(name)

    def remove(self, name: str) -> None:
        """Delete one file."""
        with self._told("cannot be written", FileNotFoundError):
            if self._remote is None:
                os.remove(Path(self.root, name))
            else:
                self._remote.remove(name)

    def modified(self, name: str) -> float | None:
        """When a file that was listed was written, in seconds since 1970; None: gone, or the store does not say."""
        if self._remote is not None:
            return self._remote.modified(name)
        with suppress(OSError):
            return os.lstat(os.path.join(self.root, name)).st_mtime
        return None

    def remove_folder(self, name: str) -> None:
        """Delete a folder if there is nothing in it; object stores have none."""
        if self._remote is None:
            with suppress(OSError):  # not empty, or a link, or gone
                os.rmdir(os.path.join(self.root, name))

    def has_in_it(self, name: str) -> bool:
        """Whether a folder of that name, which is no link, has something in it; object stores have none."""
        path = os.path.join(self.root, name)
        return self._remote is None and os.path.isdir(path) and not os.path.islink(path) and bool(os.listdir(path))

    def find(self, folder: str, suffix: str) -> dict[str, FileVersion]:
        """All files below ``folder`` whose names end in ``suffix``, and all that is odd; {} if it is absent.

        Temporary files never are among them. ``folder`` may be "", which takes one listing of everything.
        """
        if self._remote is None:
            found: dict[str, FileVersion] = {}
            self._walk(folder, found)
        else:
            with self._told("cannot be read"):
                listed = self._remote.find(folder)
            found = {name: FileVersion(size, stamp) for name, (size, stamp) in listed.items()}
        return {name: found[name] for name in sorted(found) if name.endswith(suffix) or found[name].odd}

    def folders(self, *, anew: bool = False) -> list[str]:
        """Names of the folders in the store itself; ``anew``: of an object store too, not as it was last listed."""
        if self._remote is None:
            with suppress(FileNotFoundError), os.scandir(self.root) as listing:
                return sorted(entry.name for entry in listing if entry.is_dir(follow_symlinks=False))
            return []
        if anew:
            self.find("", "")
        return sorted({name.split("/")[0] for name in self._remote.listed() if "/" in name})

    def remove_stale(self, *folders: str) -> None:
        """Delete temporary files in ``folders`` that no living process writes; on other machines: old ones."""
        for folder in folders if self._remote is None else ():
            for path in sorted(Path(self.root, folder).glob(".*.tmp")):
                with suppress(OSError):  # locked by its writer, gone meanwhile, or not ours to delete
                    _remove_if_stale(path)

    def leftovers(self, *folders: str) -> list[str]:
        """Temporary files in ``folders`` that no living process writes; on other machines: old ones."""
        names = [f"{folder}/{path.name}".lstrip("/") for folder in (folders if self._remote is None else ())
                 for path in sorted(Path(self.root, folder).glob(".*.tmp")) if _is_stale(path)]  # fmt: skip
        return names

    def _walk(self, folder: str, found: dict[str, FileVersion]) -> None:
        """Add every regular file below a folder, and whatever else is there with its reason."""
        parts = folder.split("/") if folder else []
        for place in ("/".join(parts[: end + 1]) for end in range(len(parts))):
            if os.path.islink(os.path.join(self.root, place)):
                found[place] = FileVersion(0, "", "a link, and links are not followed")
                return
        self._list(folder, found)

    def _list(self, folder: str, found: dict[str, FileVersion]) -> None:
        try:
            with os.scandir(os.path.join(self.root, folder)) as listing:
                entries = list(listing)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            found[folder] = FileVersion(0, "", f"cannot be listed ({_reason(error)})")
            return
        prefix = f"{folder}/" if folder else ""
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                self._list(prefix + entry.name, found)
                continue
            try:
                found[prefix + entry.name] = _local_version(entry)
            except FileNotFoundError:  # renamed by another process since the listing
                continue

    @contextmanager
    def _told(self, what: str, *passing: type[OSError]) -> Iterator[None]:
        """Failures of the disk or object store in one line: a UserError for what the user has to allow first.

        Args:
            passing: what the caller tells about the one file.
        """
        try:
            yield
        except Exception as error:  # object stores raise their vendors' own exception types
            if isinstance(error, (UserError, StoreFailed, *passing)):
                raise
            message = f"store '{self.root}' {what} ({_reason(error)})"
            if not self.local and (isinstance(error, PermissionError) or "Credentials" in type(error).__name__):
                raise UserError(f"{message}; give this machine the right to it") from error
            raise StoreFailed(message) from error


def _remote_files(url: str) -> "RemoteFiles":
    from mathinterp.store.remote import RemoteFiles, open_filesystem  # importing fsspec takes a while

    return RemoteFiles(url.rstrip("/"), *open_filesystem(url.rstrip("/")))


@contextmanager
def _temporary(path: Path, content: bytes) -> Iterator[Path]:
    """``content`` under a temporary name beside ``path``, gone after the block unless it was renamed.

    It is locked as long as its writer lives, so that the leftover of a killed one is known at once.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{uuid4().hex}.tmp")
    try:
        with _locked_new_file(temporary) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _locked_new_file(path: Path) -> BinaryIO:
    while True:
        file = open(path, "xb")  # noqa: SIM115  # closed by the caller
        with suppress(OSError):  # a file system without locks: leftovers go by their age
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:  # else it was taken for a leftover before it was locked
            return file
        file.close()


def _remove_if_stale(path: Path) -> None:
    """Delete a temporary file whose writer is dead: its lock is free, or, if it is another machine's, it is old."""
    with _open_regular(str(path)) as file:
        if _writer_is_dead(path, file):
            path.unlink(missing_ok=True)


def _writer_is_dead(path: Path, file: BinaryIO) -> bool:
    """Raises OSError where a process of this machine has it locked."""
    if path.name[:-36].endswith(f".{socket.gethostname()}."):  # before 32 digits and .tmp
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return time.time() - os.fstat(file.fileno()).st_mtime >= STALE_SECONDS


def _is_stale(path: Path) -> bool:
    with suppress(OSError), _open_regular(str(path)) as file:
        return _writer_is_dead(path, file)
    return False


def _open_regular(path: str) -> BinaryIO:
    """A reader of a regular file; never waits for the other end of a pipe, and follows no link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb")


def _local_version(entry: "os.DirEntry[str]") -> FileVersion:
    found = entry.stat(follow_symlinks=False)
    if stat.S_ISREG(found.st_mode):
        return FileVersion(found.st_size, f"{found.st_mtime_ns}.{found.st_ctime_ns}")
    if stat.S_ISLNK(found.st_mode):
        return FileVersion(0, "", "a link, and links are not followed")
    return FileVersion(0, "", "no regular file, but a pipe, socket or device")


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _may_be_down(error: Exception) -> bool:
    """Whether an object store's refusal of a write may pass: not a missing bucket, a right or a wrong name."""
    whoever_asks = isinstance(error, PermissionError | FileNotFoundError | ValueError | TypeError)
    named = re.search("Credentials|Validation|NotFound", type(error).__name__)
    return not whoever_asks and named is None and getattr(error, "errno", None) in PASSING


def _reason(error: Exception) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or " ".join(str(error).split()) or type(error).__name__
