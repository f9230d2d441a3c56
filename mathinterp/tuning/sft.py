"""The fine-tuning loop: AdamW on the answers of a fixed data set, the same for heads, whole models and LoRA.

Knows a model with some parameters that require a gradient, samples and a clock; knows nothing about Ray or files.
Replay-safe: a step's batch depends on (seed, step) alone, so a resumed run sees what an undisturbed one sees, on any
number of workers. Layers below the lowest trained one build no autograd graph: torch starts it at the first trained
parameter.
"""

import contextlib
import copy
import math
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mathinterp.models.anatomy import Anatomy
from mathinterp.tuning.answers import AnswerLoss, autocast, collate
from mathinterp.tuning.data import Sample

State = dict[str, Any]
Row = dict[str, float | int]
Reporter = Callable[[list[Row], State | None], None]


@dataclass(frozen=True)
class SftConfig:
    """Everything that decides the weights, but for what trains and the data; and how often to look and to save."""

    steps: int
    batch_size: int  # samples a step, all workers together
    learning_rate: float
    micro_batch: int = 16  # samples a forward on one worker; the rest of a step's share is accumulated
    seed: int = 0
    weight_decay: float = 0.0
    warmup_share: float = 0.03
    betas: tuple[float, float] = (0.9, 0.999)
    clip_norm: float = 1.0
    log_every: int = 10
    checkpoint_every: int = 100
    recompute: bool = False  # activations in the backward pass: less memory, more time

    def parameters(self) -> dict[str, Any]:
        """What decides the weights, as plain JSON; micro-batches change only the order of sums."""
        names = ("steps", "batch_size", "learning_rate", "seed", "weight_decay", "warmup_share", "betas", "clip_norm")
        values = {name: getattr(self, name) for name in names}
        return {**values, "betas": list(self.betas), "schedule": "cosine", "optimizer": "AdamW"}

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        return math.ceil(self.warmup_share * self.steps)


@dataclass
class Progress:
    """How far a run is; part of every checkpoint."""

    step: int = 0
    seconds: float = 0.0  # spent in steps
    loss: float = float("nan")  # mean over the answer tokens since the last row
    rows: list[Row] = field(default_factory=list)  # since the last checkpoint


def learning_rate_factor(step: int, warmup_steps: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to 0 at ``steps``; ``step`` counts from 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))


@lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def step_samples(count: int, batch_size: int, seed: int, step: int) -> list[int]:
    """Which samples step ``step`` trains: epochs in their own random orders, one after the other."""
    places = range(step * batch_size, (step + 1) * batch_size)
    return [int(_epoch_order(count, seed, place // count)[place % count]) for place in places]


def micro_batches(
    samples: Sequence[Sample], chosen: Sequence[int], micro_batch: int, rank: int, world_size: int
) -> list[list[Sample]]:
    """This worker's share of a step, in pieces of samples of about the same length, so that little is padded."""
    by_length = sorted(chosen, key=lambda index: len(samples[index].input_ids))
    share = [samples[index] for index in by_length[rank::world_size]]
    return [share[first : first + micro_batch] for first in range(0, len(share), micro_batch)]


def train(
    model: nn.Module,
    anatomy: Anatomy,
    samples: Sequence[Sample],
    config: SftConfig,
    *,
    device: torch.device,
    pad_id: int,
    reporter: Reporter,
    on_row: Callable[[Row], None] = lambda row: None,
    resume: State | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Progress:
    """Train, in place, the parameters of ``model`` that require a gradient, and return how far it came.

    The loss of a step is the mean over its answer tokens, whoever computes them. ``reporter`` is called on every worker
    at every checkpoint, the last step included, with the rows of ``tuning_runs`` since the last one and (rank 0 only)
    a state that ``resume`` accepts; ``on_row`` with each row at once. With ``world_size`` above 1 the process group is
    already up.

    Raises FloatingPointError, naming the step, if the loss is not finite.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained, "nothing would train"
    optimizer = torch.optim.AdamW(
        trained,
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=device.type == "cuda",
    )
    progress = Progress() if resume is None else _restore(resume, model, optimizer)
    model.train()
    if config.recompute:
        _recompute_activations(anatomy)
    loss_sum = AnswerLoss(model, anatomy)
    parallel = DistributedDataParallel(loss_sum) if world_size > 1 else None
    meter = _Meter(config, progress, trained, device, world_size)
    while progress.step < config.steps:
        chosen = step_samples(len(samples), config.batch_size, config.seed, progress.step)
        answer_tokens = sum(len(samples[index].answer) for index in chosen)
        pieces = micro_batches(samples, chosen, config.micro_batch, rank, world_size)
        torch.manual_seed(hash((config.seed, progress.step, rank)))  # for models with dropout
        for number, piece in enumerate(pieces):
            arrays = [array.to(device) for array in collate(piece, pad_id)]
            wait = parallel is not None and number + 1 < len(pieces)
            with parallel.no_sync() if parallel is not None and wait else contextlib.nullcontext(), autocast(device):
                piece_loss = (parallel or loss_sum)(*arrays)
                # DistributedDataParallel averages over the workers; the sum over all tokens is wanted.
                (piece_loss * (world_size / answer_tokens)).backward()
            meter.add(piece_loss.detach(), piece)
        rate = config.learning_rate * learning_rate_factor(progress.step, config.warmup_steps, config.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        nn.utils.clip_grad_norm_(trained, config.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        last = progress.step == config.steps
        at_checkpoint = progress.step % config.checkpoint_every == 0 or last
        if progress.step % config.log_every == 0 or at_checkpoint:
            on_row(meter.read(rate))
        if at_checkpoint:
            rows, progress.rows = progress.rows, []
            reporter(rows, _state(model, optimizer, progress) if rank == 0 else None)
            meter.restart()
    return progress


class _Meter:
    """Loss, speed and memory between two readings. Other workers' losses are added; the rest is rank 0's times workers.

    Tokens are those of the samples, padding not counted.
    """

    def __init__(
        self, config: SftConfig, progress: Progress, trained: Sequence[nn.Parameter], device: torch.device, workers: int
    ) -> None:
        self.config, self.progress, self.device, self.workers = config, progress, device, workers
        self.trained = sum(parameter.numel() for parameter in trained)
        self.restart()

    def restart(self) -> None:
        """Begin an interval: what happened since the last reading (a checkpoint being written) does not count."""
        self.loss = torch.zeros((), device=self.device, dtype=torch.float64)
        self.answers = self.samples = self.tokens = 0
        self.started = time.monotonic()

    def add(self, loss: torch.Tensor, piece: Sequence[Sample]) -> None:
        """Count a forward and backward pass."""
        self.loss += loss
        self.answers += sum(len(sample.answer) for sample in piece)
        self.tokens += sum(len(sample.input_ids) for sample in piece)
        self.samples += len(piece)

    def read(self, learning_rate: float) -> Row:
        """Wait for the device, add a row to ``progress`` and begin the next interval."""
        counts = torch.tensor([self.answers, self.samples, self.tokens], device=self.device, dtype=torch.float64)
        totals = torch.cat([self.loss[None], counts])
        if self.workers > 1:
            torch.distributed.all_reduce(totals)
        loss_sum, answers, samples, tokens = totals.tolist()
        seconds = time.monotonic() - self.started
        progress = self.progress
        progress.loss = loss_sum / answers
        progress.seconds += seconds
        if not math.isfinite(progress.loss):
            raise FloatingPointError(f"the training loss is {progress.loss} at step {progress.step}")
        row: Row = {
            "step": progress.step,
            "loss": progress.loss,
            "lr": learning_rate,
            "samples_per_second": samples / seconds,
            "tokens_per_second": tokens / seconds,
            "memory": _peak_memory(self.device),
            "trained_parameters": self.trained,
        }
        progress.rows.append(row)
        self.restart()
        return row


def _peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch had on the GPU, else the most that this process had in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _recompute_activations(anatomy: Anatomy) -> None:
    anatomy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> State:
    trained = {name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer_state = copy.deepcopy(optimizer.state_dict())  # it shares its tensors with the optimizer
    return {"model": trained, "optimizer": optimizer_state, "progress": {**vars(progress), "rows": []}}


def _restore(state: State, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert parameters.keys() == state["model"].keys(), "the checkpoint is of another run"
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state["model"][name])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])
