"""The training loop: AdamW on fresh samples, the same for a whole model and for an adapter.

Knows a model, its batches and a clock; knows nothing about arithmetic, and about Ray only that somebody else
keeps the states it reports. Shapes: B samples, T tokens.
"""

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mathinterp.tuning.batches import FreshBatches, stream

State = dict[str, Any]
Reporter = Callable[[dict[str, float], State | None], None]


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that decides the weights, but for the model and the data. One step is one batch of every worker."""

    steps: int
    learning_rate: float
    seed: int = 0
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    warmup_steps: int = 200
    clip_norm: float = 1.0
    minutes: float | None = None  # a time budget: the decay is planned so that it ends with the budget
    log_every: int = 50
    checkpoint_every: int = 1000
    loader_processes: int = 0
    compiled: bool = True  # on CUDA: pays in long runs of small models; a deep one takes minutes to compile


@dataclass
class Progress:
    """How far a run is; part of every checkpoint."""

    step: int = 0
    planned_steps: int = 0  # where the decay ends: the configured steps, or fewer if the time budget is less
    seconds: float = 0.0
    loss: float = float("nan")


def learning_rate_factor(step: int, warmup_steps: int, planned_steps: int) -> float:
    """Linear warm-up, then linear decay to zero at ``planned_steps``; ``step`` counts from 0."""
    warm = min(1.0, (step + 1) / max(1, warmup_steps))
    return warm * max(0.0, 1 - step / planned_steps)


def train(
    model: nn.Module,
    batches: FreshBatches,
    config: TrainingConfig,
    *,
    device: torch.device,
    reporter: Reporter,
    resume: State | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Progress:
    """Train ``model`` in place and return how far it came.

    ``model`` is a causal model on ``device`` whose forward takes ``input_ids`` and ``labels``; parameters that do
    not require a gradient stay as they are. With ``world_size`` above 1 the process group is already up, and
    gradients are averaged over the workers. ``reporter`` is called on every worker at every checkpoint, the last
    step included, with the metrics and (rank 0 only) a state that ``resume`` accepts.
    A resumed run takes the same batches and, without a time budget, ends with the same weights as an undisturbed one.

    Raises FloatingPointError, naming the step, if the loss is not finite.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=device.type == "cuda",
    )
    progress = Progress(planned_steps=config.steps)
    if resume is not None:
        progress = _restore(resume, model, optimizer, device)
    _say(rank, f"training {sum(p.numel() for p in parameters):,} parameters on {device}, {world_size} worker(s), "
               f"{batches.batch_size} samples of {batches.width} tokens each, from step {progress.step}")  # fmt: skip
    if progress.step >= progress.planned_steps:
        return progress
    model.train()
    loader = stream(batches, progress.step, config.steps, config.loader_processes, pin=device.type == "cuda")
    ready = iter(loader)  # starts the loader processes, before the compiler starts its threads: forks want few threads
    loss_of = _loss_function(model, batches, device, world_size, rank, config.compiled)
    clock = _Clock(config, progress, world_size, device, rank)
    loss_sum = torch.zeros((), device=device)
    for input_ids_BT, labels_BT in ready:
        factor = learning_rate_factor(progress.step, config.warmup_steps, progress.planned_steps)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * factor
        loss = loss_of(input_ids_BT.to(device, non_blocking=True), labels_BT.to(device, non_blocking=True))
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, config.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_sum += loss.detach()
        progress.step += 1
        last = progress.step == progress.planned_steps
        if progress.step % config.log_every == 0 or last:
            clock.read(loss_sum, batches.batch_size * world_size)
            last = progress.step >= progress.planned_steps
        if progress.step % config.checkpoint_every == 0 or last:
            reporter(_metrics(progress), _state(model, optimizer, progress) if rank == 0 else None)
        if last:
            break
    return progress


def _loss_function(
    model: nn.Module, batches: FreshBatches, device: torch.device, world_size: int, rank: int, compile_wanted: bool
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Mean cross-entropy over the labelled tokens; on CUDA in bfloat16, compiled if wanted and possible."""
    if world_size > 1:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    def loss_of(forward: Callable[..., Any], input_ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return forward(input_ids=input_ids_BT, labels=labels_BT, use_cache=False).loss

    def eager(input_ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        return loss_of(model, input_ids_BT, labels_BT)

    if device.type != "cuda" or not compile_wanted:
        return eager
    compiled_model = torch.compile(model)

    def compiled(input_ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        return loss_of(compiled_model, input_ids_BT, labels_BT)

    begun = time.monotonic()
    input_ids_BT, labels_BT = (tensor.to(device) for tensor in batches[0])
    try:
        compiled(input_ids_BT, labels_BT).backward()
        torch.cuda.synchronize(device)
    except Exception as problem:  # whatever the compiler raises: without it training is slower, not different
        _say(rank, f"torch.compile failed, training goes on without it: {type(problem).__name__}: {problem}")
        return eager
    finally:
        model.zero_grad(set_to_none=True)
    _say(rank, f"compiled in {time.monotonic() - begun:.0f} s")
    return compiled


class _Clock:
    """Measures speed every ``log_every`` steps and, under a time budget, plans the last step from it."""

    def __init__(
        self, config: TrainingConfig, progress: Progress, world_size: int, device: torch.device, rank: int
    ) -> None:
        self.config, self.progress, self.world_size, self.device, self.rank = config, progress, world_size, device, rank
        self.last_step, self.last_time = progress.step, time.monotonic()
        self.first_reading: tuple[int, float] | None = None  # later speed leaves out what starting up cost

    def read(self, loss_sum: torch.Tensor, samples_per_step: int) -> None:
        """Wait for the device, log, move ``progress`` on, and set ``loss_sum`` back to zero."""
        progress = self.progress
        steps = progress.step - self.last_step
        progress.loss = loss_sum.item() / steps
        loss_sum.zero_()
        now = time.monotonic()
        interval = now - self.last_time
        self.last_step, self.last_time = progress.step, now
        progress.seconds += interval
        if not progress.loss < float("inf"):
            raise FloatingPointError(f"the training loss is {progress.loss} near step {progress.step}")
        if self.first_reading is None:
            self.first_reading = progress.step, now
            speed = steps / interval
        else:
            speed = (progress.step - self.first_reading[0]) / (now - self.first_reading[1])
        near_the_end = progress.step + self.config.log_every >= progress.planned_steps
        if self.config.minutes is not None and not near_the_end:  # no step at a raised rate after the decay
            left = max(0.0, self.config.minutes * 60 - progress.seconds)
            progress.planned_steps = self._agreed(min(self.config.steps, progress.step + round(left * speed)))
        _say(self.rank, f"step {progress.step}/{progress.planned_steps}  loss {progress.loss:.4f}  "
                        f"{steps * samples_per_step / interval:,.0f} samples/s  {progress.seconds:.0f} s")  # fmt: skip

    def _agreed(self, planned_steps: int) -> int:
        """Rank 0's plan, so that all workers stop together."""
        if self.world_size == 1:
            return planned_steps
        plan = torch.tensor(planned_steps, device=self.device)
        torch.distributed.broadcast(plan, src=0)
        return int(plan.item())


def _metrics(progress: Progress) -> dict[str, float]:
    return {"step": progress.step, "loss": progress.loss, "seconds": progress.seconds}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> State:
    trained = {name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer_state = copy.deepcopy(optimizer.state_dict())  # it shares its tensors with the optimizer
    return {"model": trained, "optimizer": optimizer_state, "progress": dict(vars(progress))}


def _restore(state: State, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Progress:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert parameters.keys() == state["model"].keys(), "the checkpoint is of another model"
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state["model"][name].to(device))
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def _say(rank: int, message: str) -> None:
    if rank == 0:
        sys.stderr.write(message + "\n")  # print would be shown twice: Ray Train also logs it
