"""What every Ray Train worker runs: load, resume, train, and on worker 0 report, evaluate and export.

Knows Ray Train and the store; knows nothing about the loop itself.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
import ray.train
import ray.train.torch
import torch
from peft import PeftModel
from torch import nn

from mathinterp.errors import UserError
from mathinterp.models.card_memory import check_trainable
from mathinterp.models.catalog import LoadedModel, load, resolve
from mathinterp.models.sharded import all_workers, introduce
from mathinterp.models.sources import loadable_base
from mathinterp.store import Store
from mathinterp.tuning.about import card, evaluation_line, row_line
from mathinterp.tuning.answers import Evaluation, evaluate
from mathinterp.tuning.folders import TUNING_FILE
from mathinterp.tuning.layout import padding_id
from mathinterp.tuning.sft import Row, train
from mathinterp.tuning.tensorboard import Board
from mathinterp.tuning.training.tables import TUNING_RUNS

if TYPE_CHECKING:
    from mathinterp.tuning.sft_ray import Tuning

TABLE = "tuning_runs"
EXPORT_FOLDER = "model"  # in the last checkpoint: what was learnt
TRAINER_STATE = "trainer_state.json"  # in a checkpoint, by transformers' Trainer


def worker_loop(settings: dict[str, Any]) -> None:
    """What cannot be done (UserError, a loss that is not finite) is told to the driver: Ray would try it again."""
    lines = settings["lines"]
    rank = ray.train.get_context().get_world_rank()
    worker, problem = None, None
    try:
        worker = _Worker(settings["tuning"], lambda line: ray.get(lines.say.remote(line)) if rank == 0 else None)
    except UserError as error:
        problem = str(error)
    problems = _of_all_workers(problem)
    if worker is not None and not any(problems):
        try:
            worker.run()
        except (UserError, FloatingPointError) as error:  # both are raised by all workers alike
            hint = "; a lower `lr` may help" if isinstance(error, FloatingPointError) else ""
            problems = [f"{error}{hint}"]
    if rank == 0 and (found := next((problem for problem in problems if problem), None)) is not None:
        ray.get(lines.refuse.remote(found))


class _Worker:
    """One worker of a fine-tuning, with its model in memory."""

    def __init__(self, tuning: "Tuning", say: Callable[[str], None]) -> None:
        """Raises UserError if this node has another model, or lacks what was asked for."""
        context = ray.train.get_context()
        self.tuning, self.say = tuning, say
        self.rank, self.world_size = context.get_world_rank(), context.get_world_size()
        if self.world_size == 1:  # else accelerate would set up one process as if it were several, with more memory
            os.environ.pop("LOCAL_RANK", None)
        device = ray.train.torch.get_device()
        assert isinstance(device, torch.device)
        self.device = device
        torch.manual_seed(tuning.config.seed)
        workers = all_workers(device) if tuning.sharded else None
        resolved = resolve(tuning.model, device.type)
        if device.type == "cuda":
            card = torch.cuda.get_device_properties(device).total_memory
            check_trainable(resolved, self.world_size if tuning.sharded else 1, card)
        self.loaded: LoadedModel = load(resolved, device, workers=workers)
        if self.loaded.fingerprint != tuning.model_fingerprint:
            raise UserError(f"model '{tuning.model.name}' is another one on {ray.util.get_node_ip_address()}")
        self.model: nn.Module = tuning.job.build(self.loaded)
        self.pad_id = padding_id(self.loaded.tokenizer)
        self.store = Store(tuning.store_url)

    def run(self) -> None:
        """Train from the last checkpoint, or from the start, to the end."""
        tuning, config = self.tuning, self.tuning.config
        if tuning.sharded:
            introduce(self.loaded.anatomy)
        with latest_folder() as resume, tempfile.TemporaryDirectory() as scratch:
            done = 0 if resume is None else int(json.loads((resume / TRAINER_STATE).read_text())["global_step"])
            board = None
            if tuning.tensorboard is not None and self.rank == 0:
                board = Board(tuning.tensorboard, tuning.run_id, done + 1)
            last = Path(scratch) / "last"  # the last checkpoint, which goes out with what was learnt in it

            def on_row(row: Row) -> None:
                self.say(row_line(row, config.steps))
                if board is not None:
                    board.add(row)

            def report(rows: list[Row], folder: Path | None) -> None:
                step = int(rows[-1]["step"])
                if self.rank == 0:
                    table = pa.Table.from_pylist(rows, TUNING_RUNS)
                    shard = (step - 1) // config.checkpoint_every
                    self.store.write_shard(tuning.run_id, TABLE, shard, table, tuning.metadata)
                if step < config.steps:
                    report_folder({"step": step}, folder)
                elif folder is not None:
                    shutil.move(folder, last)

            before = self._look("before", board, 0)
            if done:
                self.say(f"going on after step {done}")
            progress = train(
                self.model, self.loaded.anatomy, tuning.samples, config,
                device=self.device, pad_id=self.pad_id, reporter=report, on_row=on_row, resume=resume,
                rank=self.rank, world_size=self.world_size,
            )  # fmt: skip
            after = self._look("after", board, progress.step)
            if self.rank == 0:
                if not last.exists():  # the last step was taken before, and only the end was missing
                    assert resume is not None
                    shutil.copytree(resume, last, ignore=shutil.ignore_patterns(EXPORT_FOLDER))
                self._export(last / EXPORT_FOLDER, before, after, progress.seconds)
            report_folder({"step": progress.step}, last if self.rank == 0 else None)

    def _look(self, when: str, board: Board | None, step: int) -> Evaluation | None:
        """All workers evaluate their share of the held-out data; None if there is none."""
        if not self.tuning.held_out:
            return None
        found = evaluate(
            self.model, self.loaded.anatomy, self.tuning.held_out, device=self.device, pad_id=self.pad_id,
            rank=self.rank, world_size=self.world_size,
        )  # fmt: skip
        self.say(f"{when}: {evaluation_line(found)}")
        if board is not None:
            board.add_evaluation(found, step)
        return found

    def _export(self, target: Path, before: Evaluation | None, after: Evaluation | None, seconds: float) -> None:
        tuning = self.tuning
        tuning.job.export(self.model, self.loaded.tokenizer, target, loadable_base(tuning.model.name))
        about = about_run(tuning, self.model, before, after, seconds, self.device)
        (target / TUNING_FILE).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        (target / "README.md").write_text(card(about), encoding="utf-8")


def about_run(
    tuning: "Tuning", model: nn.Module, before: Evaluation | None, after: Evaluation | None, seconds: float,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """The content of tuning.json: what was trained on what, and what came of it."""
    return {
        "run_id": tuning.run_id,
        "command": tuning.job.name,
        "method": tuning.job.method,
        "base": tuning.model.label,
        "base_fingerprint": tuning.model_fingerprint,
        "dtype": tuning.model.dtype,
        "data": tuning.data_label,
        "samples": len(tuning.samples),
        "samples_seen": tuning.config.steps * tuning.config.batch_size,
        "model": tuning.model.name,
        "adapter": isinstance(model, PeftModel),
        "chosen_from": tuning.chosen_from,
        "parameters": tuning.metadata["parameters"],
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "before": None if before is None else asdict(before),
        "after": None if after is None else asdict(after),
        "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "code_version": tuning.metadata["code_version"],
        "versions": tuning.metadata["versions"],
    }


def _of_all_workers(problem: str | None) -> list[str | None]:
    """Every worker's problem, so that all of them stop where one does."""
    if ray.train.get_context().get_world_size() == 1:
        return [problem]
    problems: list[str | None] = [None] * ray.train.get_context().get_world_size()
    torch.distributed.all_gather_object(problems, problem)
    return problems


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
