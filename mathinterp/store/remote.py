"""Object stores through fsspec: one listing, whole small files, and a face of both for DuckDB.

Knows fsspec and its retries; knows nothing about what files hold. A small file is fetched once per version and kept, so
that looking at its footer and querying it take one request.
"""

import errno
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from io import BytesIO
from typing import Any, BinaryIO, cast

import fsspec

from mathinterp.errors import UserError

WHOLE_BYTES = 2**23  # files up to this size are fetched whole: less than a few requests for parts of them
KEPT_BYTES = 2**28  # of such files, in memory
# How often, and how patiently, requests are repeated; gcsfs and adlfs do so without being told. s3fs itself repeats
# each of these five times: more attempts, and a store that is down for good is told after many minutes.
RETRIES: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"retries": {"max_attempts": 4, "mode": "standard"}}},
}
TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")
STAMPS = ("ETag", "etag", "mtime", "LastModified", "updated", "created")


def open_filesystem(url: str) -> tuple[Any, str]:
    """The filesystem of a URL and the prefix within it; raises UserError if it cannot be used."""
    protocol = url.partition("://")[0].replace("s3a", "s3")
    options = {name: value for name, value in RETRIES.get(protocol, {}).items() if name not in _configured(protocol)}
    try:
        google = protocol in ("gs", "gcs")
        filesystem, prefix = _google(url) if google else fsspec.url_to_fs(url, **options)
    except ImportError as error:
        extra = {"s3": "s3", "gs": "gcs", "gcs": "gcs"}.get(protocol)
        advice = f"; pip install 'mathinterp[{extra}]'" if extra else ""
        raise UserError(f"store '{url}' needs a package that is not installed: {error}{advice}") from error
    except ValueError as error:
        raise UserError(f"store '{url}' cannot be opened: {error}") from error
    if type(filesystem).__module__ == "s3fs.core":
        from s3fs.core import set_custom_error_handler

        set_custom_error_handler(_is_throttled)
    return filesystem, prefix.rstrip("/")


def _google(url: str) -> tuple[Any, str]:
    """A filesystem that does not ask by gRPC, at each request, of what kind the bucket is, and is silent on stderr.

    Where gRPC does not get through, each such question takes a minute. Only zonal buckets need it: whoever has one sets
    GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT. What gcsfs logs still reaches whoever has set up logging.
    """
    from gcsfs.core import GCSFileSystem

    if not (logger := logging.getLogger("gcsfs")).handlers:
        logger.addHandler(logging.NullHandler())
    if "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT" in os.environ:
        return cast(tuple[Any, str], fsspec.url_to_fs(url))
    return GCSFileSystem(), GCSFileSystem._strip_protocol(url)


def _is_throttled(error: Exception) -> bool:
    """429 in answer to a HEAD, which has no text that would name the error: botocore takes it for a final answer."""
    answer = getattr(error, "response", {})
    return bool(answer.get("ResponseMetadata", {}).get("HTTPStatusCode") == 429)


def _configured(protocol: str) -> dict[str, Any]:
    """What the user's own fsspec configuration says about a protocol."""
    configured: dict[str, Any] = fsspec.config.conf.get(protocol, {})
    return configured


class RemoteFiles:
    """The files below one prefix."""

    def __init__(self, url: str, filesystem: Any, prefix: str):
        self._url, self._filesystem, self._prefix = url, filesystem, prefix
        self._known: dict[str, tuple[int, str]] = {}  # name -> size and stamp, when it was last listed
        self._times: dict[str, float] = {}  # name -> when it was written, where the listing says so
        self._kept: OrderedDict[tuple[str, tuple[int, str]], bytes] = OrderedDict()

    def find(self, folder: str) -> dict[str, tuple[int, str]]:
        """Every file below a folder, with its size and a stamp that changes with its content."""
        self._filesystem.invalidate_cache()  # other machines write too
        try:
            with _usual_errors():
                keys = self._filesystem.find(self._key(folder).rstrip("/"), detail=True)
        except FileNotFoundError:  # nothing was ever written there
            keys = {}
        found = {key[len(self._prefix) + 1 :]: _version(info) for key, info in keys.items()}
        gone = [name for name in self._known if name.startswith(f"{folder}/" if folder else "") and name not in found]
        for name in gone:
            del self._known[name]
        self._known |= found
        for key, info in keys.items():
            if (seconds := _written(info)) is not None:
                self._times[key[len(self._prefix) + 1 :]] = seconds
        return found

    def modified(self, name: str) -> float | None:
        """When a file that was listed was written, in seconds since 1970; None: the store does not say."""
        return self._times.get(name)

    def listed(self) -> list[str]:
        """Names of all files that were listed so far."""
        return list(self._known)

    def write(self, name: str, content: bytes) -> None:
        """Put a file as a whole."""
        self._known.pop(name, None)
        try:
            with _usual_errors():
                self._filesystem.pipe_file(self._key(name), content)
        except FileNotFoundError as error:  # there are no folders: nothing else can be missing
            raise FileNotFoundError(errno.ENOENT, error.strerror or "The specified bucket does not exist") from error

    def remove(self, name: str) -> None:
        """Delete a file; one that is gone may have been deleted by a request whose answer was lost."""
        self._known.pop(name, None)
        with suppress(FileNotFoundError), _usual_errors():
            self._filesystem.rm_file(self._key(name))

    def open(self, name: str) -> BinaryIO:
        """A reader of its own; raises FileNotFoundError."""
        with _usual_errors():
            return self._open(name)

    def read_now(self, name: str) -> bytes:
        """The content as it is, whatever was listed; raises FileNotFoundError."""
        with _usual_errors():
            content: bytes = self._filesystem.cat_file(self._key(name))
        return content

    def for_reading(self) -> fsspec.AbstractFileSystem:
        """A filesystem of the files that were listed, at their URLs."""
        return _Listed(self._url, dict(self._known), self.open)

    def _open(self, name: str) -> BinaryIO:
        version = self._known.get(name)
        if version is None or not version[1]:  # not listed, or nothing tells its versions apart
            return BytesIO(self._filesystem.cat_file(self._key(name)))
        if version[0] > WHOLE_BYTES:
            return cast(BinaryIO, self._filesystem.open(self._key(name), "rb", size=version[0]))
        content = self._kept.pop((name, version), None)
        if content is None:
            content = self._filesystem.cat_file(self._key(name))
        self._kept[name, version] = content
        while sum(map(len, self._kept.values())) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return BytesIO(content)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


class _Listed(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Reads listed files by URL; says what is there without a request. DuckDB asks thrice for each."""

    cachable = False

    def __init__(self, url: str, known: dict[str, tuple[int, str]], opened: Callable[[str], BinaryIO]):
        super().__init__()
        self.protocol: Any = url.partition("://")[0]
        self._url, self._files, self._opened = url, known, opened

    def _name(self, url: str) -> str:
        return url.removeprefix(f"{self._url}/")

    def open(self, path: str, mode: str = "rb", **_: Any) -> BinaryIO:
        """A reader."""
        return self._opened(self._name(path))

    def glob(self, path: str, **_: Any) -> list[str]:
        """URLs of listed files that match; a name without a pattern matches itself."""
        if self._name(path) in self._files:
            return [path]
        return sorted(url for name in self._files if fnmatchcase(url := f"{self._url}/{name}", path))

    def exists(self, path: str, **_: Any) -> bool:
        """Whether the file was listed."""
        return self._name(path) in self._files

    def size(self, path: str) -> int:
        """Bytes."""
        return self._files[self._name(path)][0]

    def modified(self, path: str) -> datetime:
        """A time that is the same for all: whoever asks has the version of the listing."""
        return datetime.fromtimestamp(0, UTC)


@contextmanager
def _usual_errors() -> Iterator[None]:
    """gcsfs tells what is forbidden by an OSError without a number, or by an exception of its own."""
    try:
        yield
    except Exception as error:
        if str(error).startswith("Forbidden: ") or getattr(error, "code", None) == 401:
            raise PermissionError(errno.EACCES, " ".join(str(error).split())) from error
        raise


def _written(info: dict[str, Any]) -> float | None:
    for name in TIMES:
        value = info.get(name)
        if isinstance(value, str):
            with suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None


def _version(info: dict[str, Any]) -> tuple[int, str]:
    stamps = (info.get(key) for key in STAMPS)
    return int(info["size"]), next((str(value) for value in stamps if value), "")
