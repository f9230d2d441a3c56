"""What training loops on Ray Train share: checkpoints in and out, as a state or as a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray.train
import torch

STATE_FILE = "state.pt"
EXPORT_FOLDER = "model"
MOST_FAILURES = 3

State = dict[str, Any]


def latest_state() -> State | None:
    """The state of the last checkpoint; None at the first start."""
    with latest_folder() as folder:
        return None if folder is None else torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)


def report(metrics: dict[str, Any], state: State | None, folder: Path) -> None:
    """Every worker reports; only rank 0 has a state and therefore a checkpoint (``folder``, with all that is in it)."""
    if state is not None:
        torch.save(state, folder / STATE_FILE)
    report_folder(metrics, None if state is None else folder)


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
