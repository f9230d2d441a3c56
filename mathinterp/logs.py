"""What the package logs, as JSON: one object a line, with the run and the shard that it is about where known.

Imports nothing heavy. The command line prints (--log-format); replicas on Ray write to their own logs.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import Any

AS_JSON = False  # in this process
FACTS = "facts"  # attribute of a record: more entries for its line

_about: ContextVar[Mapping[str, str]] = ContextVar("about", default=MappingProxyType({}))


@contextmanager
def about(**facts: str) -> Iterator[None]:
    """What is logged within the block, by this thread, is about this ``run_id``, ``shard``, ..."""
    token = _about.set({**_about.get(), **facts})
    try:
        yield
    finally:
        _about.reset(token)


def as_here(work: Callable[[], None]) -> Callable[[], None]:
    """``work`` for another thread, about what this one is about."""
    return partial(copy_context().run, work)


def line_of(message: str, level: int = logging.INFO, logger: str = "mathinterp", **facts: Any) -> str:
    """One JSON object: time (UTC), level, logger, message, what it is about, and ``facts``."""
    said = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "level": logging.getLevelName(level),
        "logger": logger,
        "message": message,
    }
    return json.dumps({**said, **_about.get(), **facts}, ensure_ascii=False)


class JsonLines(logging.Formatter):
    """The lines of records."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message and the traceback."""
        facts = dict(getattr(record, FACTS, {}))
        if record.exc_info:
            facts["traceback"] = self.formatException(record.exc_info)
        return line_of(record.getMessage(), record.levelno, record.name, **facts)


def shown(logger: logging.Logger, message: str, **facts: Any) -> None:
    """Log at INFO what was asked for, whatever the level, as progress is."""
    logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, message, (), None, extra={FACTS: facts}))


def to_stderr() -> None:
    """Print what the package logs as JSON from now on, from INFO up, where nobody else takes it: in a replica."""
    package = logging.getLogger("mathinterp")
    if not package.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
        package.addHandler(handler)
        package.setLevel(logging.INFO)
