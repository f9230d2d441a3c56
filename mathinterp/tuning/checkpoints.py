"""What training loops on Ray Train share: state in and out of checkpoints."""

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
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return torch.load(Path(folder) / STATE_FILE, map_location="cpu", weights_only=True)


def report(metrics: dict[str, Any], state: State | None, folder: Path) -> None:
    """Every worker reports; only rank 0 has a state and therefore a checkpoint (``folder``, with all that is in it)."""
    checkpoint = None
    if state is not None:
        torch.save(state, folder / STATE_FILE)
        checkpoint = ray.train.Checkpoint.from_directory(folder)
    ray.train.report(metrics, checkpoint=checkpoint)
