"""Checkpoints of Ray Train, in and out as folders."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray.train

EXPORT_FOLDER = "model"
MOST_FAILURES = 3


@contextmanager
def latest_folder() -> Iterator[Path | None]:
    """The last checkpoint's folder, to read from inside the block; None at the first start."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as folder:
        yield Path(folder)


def report_folder(metrics: dict[str, Any], folder: Path | None) -> None:
    """Every worker reports; rank 0's folder becomes the checkpoint."""
    checkpoint = None if folder is None else ray.train.Checkpoint.from_directory(folder)
    ray.train.report(metrics, checkpoint=checkpoint)
