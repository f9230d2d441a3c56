"""The course of a fine-tuning as TensorBoard shows it; the same figures are in the table tuning_runs."""

from typing import Any

from mathinterp.errors import UserError
from mathinterp.tuning.answers import Evaluation
from mathinterp.tuning.sft import Row


class Board:
    """Writes one run into its own folder; steps that are trained again replace their first figures."""

    def __init__(self, folder: str, run_id: str, first_step: int) -> None:
        """``first_step``: the step that training goes on with. Raises UserError where tensorboard is not installed."""
        self._writer = writer_class()(f"{folder}/{run_id}", purge_step=first_step)

    def add(self, row: Row) -> None:
        """A row of tuning_runs."""
        for name, value in row.items():
            if name not in ("step", "trained_parameters"):
                self._writer.add_scalar(f"train/{name}", value, int(row["step"]))
        self._writer.flush()

    def add_evaluation(self, found: Evaluation, step: int) -> None:
        """Figures on held-out data."""
        for name in ("loss", "token_accuracy", "exact_match"):
            self._writer.add_scalar(f"held_out/{name}", getattr(found, name), step)
        self._writer.flush()


def writer_class() -> Any:
    """torch's SummaryWriter; raises UserError where tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError("`tensorboard` needs the package tensorboard: pip install tensorboard") from error
    return SummaryWriter
