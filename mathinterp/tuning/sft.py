"""Fine-tuning by transformers' Trainer: AdamW on the answers of a fixed data set, for heads, LoRA and whole models.

Knows a model with some parameters that require a gradient, samples and a clock; knows nothing about Ray or the store.
The Trainer brings accumulation, clipping, checkpoints, resume, mixed precision and (through accelerate) several
workers; ours are the batches, fixed by (seed, step), the loss on answer tokens alone, and what is reported. Layers
below the lowest trained one build no autograd graph: torch starts it at the first trained parameter.
"""

import contextlib
import math
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    get_scheduler,
)
from transformers.trainer_callback import PrinterCallback

from mathinterp.models.anatomy import Anatomy
from mathinterp.tuning.answers import AnswerLoss, computes_in_bfloat16
from mathinterp.tuning.data import FreshSamples, Sample
from mathinterp.tuning.layout import Batch, packed, padded
from mathinterp.tuning.lower_layers import InputCache
from mathinterp.tuning.steps import FreshSteps, Mixture, StepSampler

COMPILE_FROM = 3e17  # operations: about ten minutes on an H100, a quarter of which compiled layers save
Row = dict[str, float | int]
Reporter = Callable[[list[Row], Path | None], None]


@dataclass(frozen=True)
class SftConfig:
    """Everything that decides the weights, but for what trains and the data; and how it is computed and watched."""

    steps: int
    batch_size: int  # samples per step, all workers together
    learning_rate: float
    micro_batch: int = 16  # samples a forward on one worker; the rest of a step's share is accumulated
    seed: int = 0
    weight_decay: float = 0.0
    warmup_share: float = 0.03
    betas: tuple[float, float] = (0.9, 0.999)
    clip_norm: float = 1.0
    mixture: Mixture = ()  # samples and weight of each source; empty: all samples alike
    log_every: int = 10
    checkpoint_every: int = 100
    recompute: bool = False  # activations in the backward pass: less memory, more time
    pack: int = 0  # tokens of a row that holds several samples; 0: one sample a row
    cache: bool = False  # keep the inputs of the lowest trained layer across epochs
    schedule: str = "cosine"  # a name of transformers' schedulers, for example linear
    loader_processes: int = 0  # that read samples ahead, on each worker; pays where they are drawn and tokenized
    compiled: bool | None = None  # layers through torch.compile; None: on GPUs, where there is work enough

    def parameters(self) -> dict[str, Any]:
        """What decides the weights, as plain JSON; the way of computing changes only the order of sums."""
        names = ("steps", "batch_size", "learning_rate", "seed", "weight_decay", "warmup_share", "clip_norm")
        values = {name: getattr(self, name) for name in names}
        mixed = {"mixture": [list(part) for part in self.mixture]} if self.mixture else {}
        return {**values, **mixed, "betas": list(self.betas), "schedule": self.schedule, "optimizer": "AdamW"}

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        return math.ceil(self.warmup_share * self.steps)


@dataclass(frozen=True)
class Progress:
    """How far a run came."""

    step: int
    seconds: float  # spent in steps, those before a resume included


def schedule_of(config: SftConfig, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """transformers' schedule, its warm-up counted from 1: at 0 the first step of all would change nothing."""
    unused = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    curve = get_scheduler(config.schedule, unused, config.warmup_steps, config.steps).lr_lambdas[0]
    return LambdaLR(optimizer, lambda step: curve(step + (step < config.warmup_steps)))


def step_sampler(samples: Sequence[Sample], config: SftConfig, rank: int = 0, world_size: int = 1) -> StepSampler:
    """Which of the samples each step trains, on this worker."""
    sizes: dict[str, Any] = {
        "steps": config.steps, "batch_size": config.batch_size, "micro_batch": config.micro_batch,
        "rank": rank, "world_size": world_size,
    }  # fmt: skip
    if isinstance(samples, FreshSamples):
        return FreshSteps(samples.mean_length, **sizes)
    lengths = [len(sample.input_ids) for sample in samples]
    return StepSampler(lengths, seed=config.seed, mixture=config.mixture, **sizes)


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
    resume: Path | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Progress:
    """Train, in place, the parameters of ``model`` that require a gradient, and return how far it came.

    The loss of a step is the mean over its answer tokens, whoever computes them. ``reporter`` is called on every worker
    at every checkpoint, the last step included, with the rows of ``tuning_runs`` since the last one and (rank 0 only)
    a folder that ``resume`` accepts, which it may move away; ``on_row`` with each row at once. With ``world_size``
    above 1 the process group is already up.

    Raises FloatingPointError, naming the step, if the loss is not finite; UserError for a cache or packing that the
    model does not allow.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained, "nothing would train"
    sampler = step_sampler(samples, config, rank, world_size)
    cache = InputCache(anatomy, model, samples, pad_id) if config.cache else None
    compiled = worth_compiling(model, device, sampler, world_size) if config.compiled is None else config.compiled

    def lay_out(chosen: list[int]) -> Batch:
        piece = samples.read(chosen) if isinstance(samples, FreshSamples) else [samples[index] for index in chosen]
        positions = anatomy.shape.positions
        batch = packed(piece, config.pack, anatomy) if config.pack else padded(piece, pad_id, positions)
        return {**batch, "samples": chosen}

    optimizer = torch.optim.AdamW(
        trained, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay,
        fused=device.type == "cuda",
    )  # fmt: skip
    loader: DataLoader[int] = DataLoader(
        range(len(samples)), batch_sampler=sampler, collate_fn=lay_out, num_workers=config.loader_processes,  # type: ignore[arg-type]
        worker_init_fn=_start_loader_process,
    )  # fmt: skip
    with contextlib.ExitStack() as during:
        folder = during.enter_context(tempfile.TemporaryDirectory())
        if config.recompute:
            anatomy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            during.callback(anatomy.model.gradient_checkpointing_disable)
        if compiled:
            during.enter_context(compiled_layers(anatomy))
        watch = _Watch(config, sampler, device, reporter, on_row, rank)
        trainer = AnswerTrainer(
            AnswerLoss(model, anatomy, cache), _arguments(config, sampler, folder, device, anatomy.dtype),
            loader=loader, optimizers=(optimizer, schedule_of(config, optimizer)), callbacks=[watch],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return Progress(trainer.state.global_step, watch.seconds)


class AnswerTrainer(Trainer):
    """transformers' Trainer on given batches: not shuffled, cut or shared out by it, since all that is in them."""

    def __init__(
        self, model: AnswerLoss, arguments: TrainingArguments, *, loader: DataLoader[Any], **rest: Any
    ) -> None:
        self._loader = loader
        super().__init__(model, arguments, **rest)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This worker's micro-batches of all steps."""
        return self._loader


def _start_loader_process(_: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tokenizers' thread pool does not survive a fork
    torch.set_num_threads(1)


def _arguments(
    config: SftConfig, sampler: StepSampler, folder: str, device: torch.device, dtype: torch.dtype
) -> TrainingArguments:
    """What of the configuration is the Trainer's to do. The last step is always logged and saved (``_Watch``)."""
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=config.steps,
        per_device_train_batch_size=config.micro_batch,
        gradient_accumulation_steps=sampler.per_step,
        max_grad_norm=config.clip_norm,
        seed=config.seed,
        bf16=computes_in_bfloat16(device, dtype),
        use_cpu=device.type == "cpu",
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,  # a loss that is not a number must show, and looking costs a wait for the device
        save_steps=config.checkpoint_every,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_backend=None if sampler.world_size == 1 else "gloo" if device.type == "cpu" else "nccl",
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
    )
    if arguments.n_gpu > 1:  # one process sees several GPUs: the Trainer would spread the model over all of them
        arguments._n_gpu = 1  # there is no public way
    return arguments


class _Watch(TrainerCallback):
    """Rows of ``tuning_runs`` as training goes on, and every checkpoint handed to the reporter.

    Time counts between rows; a checkpoint being written does not count.
    """

    def __init__(
        self, config: SftConfig, sampler: StepSampler, device: torch.device, reporter: Reporter,
        on_row: Callable[[Row], None], rank: int,
    ) -> None:  # fmt: skip
        self.config, self.sampler, self.device, self.rank = config, sampler, device, rank
        self.reporter, self.on_row = reporter, on_row
        self.rows: list[Row] = []
        self.seconds = 0.0
        self._begin(0)

    def _begin(self, step: int) -> None:
        self.since, self.started = step, time.monotonic()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the clock, where a resumed run stopped it."""
        self.seconds = next((log["seconds"] for log in reversed(state.log_history) if "seconds" in log), 0.0)
        self._begin(state.global_step)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """For models with dropout: what is drawn depends on the step alone."""
        torch.manual_seed(hash((self.config.seed, state.global_step, self.rank)))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Before every checkpoint there is a row, and after the last step there are both."""
        last = state.global_step == self.config.steps
        control.should_save |= last
        control.should_log |= control.should_save

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **found: Any) -> None:
        """A row; raises FloatingPointError if the loss since the last one is not finite."""
        logs = found["logs"]
        if "loss" not in logs:  # the Trainer's closing summary
            return
        seconds = time.monotonic() - self.started
        steps = state.global_step - self.since
        if not math.isfinite(logs["loss"]):
            raise FloatingPointError(f"the training loss is {logs['loss']} at step {state.global_step}")
        row: Row = {
            "step": state.global_step,
            "loss": logs["loss"],
            "lr": logs["learning_rate"],
            "samples_per_second": steps * self.config.batch_size / seconds,
            "tokens_per_second": self.sampler.tokens(self.since, state.global_step) / seconds,
            "memory": _peak_memory(self.device),
            "trained_parameters": sum(p.numel() for p in found["model"].parameters() if p.requires_grad),
        }
        self.rows.append(row)
        self.on_row(row)
        self.seconds += seconds
        state.log_history[-1]["seconds"] = self.seconds  # goes into the checkpoint
        self._begin(state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Hand over the rows since the last checkpoint, and on rank 0 the checkpoint's folder."""
        rows, self.rows = self.rows, []
        assert args.output_dir is not None
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.reporter(rows, folder if self.rank == 0 else None)
        self._begin(state.global_step)


def worth_compiling(model: nn.Module, device: torch.device, sampler: StepSampler, world_size: int) -> bool:
    """Whether compiled layers, which take about a minute to make, save more than that: long runs on GPUs."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    operations = 4 * parameters * sampler.tokens(0, sampler.steps) / world_size  # forward, and backward to activations
    return device.type == "cuda" and operations > COMPILE_FROM


@contextlib.contextmanager
def compiled_layers(anatomy: Anatomy, backend: str = "inductor") -> Iterator[None]:
    """Inside the block every decoder layer is one program that torch.compile made; what they compute stays.

    Layers alike share a program; layers with other adapters or ranks, and batches of another shape, have their own.
    """
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    for layer in anatomy.layers:
        layer.compile(backend=backend)
    try:
        yield
    finally:
        for layer in anatomy.layers:
            layer._compiled_call_impl = None  # what compile() has set; there is no public way back


def _peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch had on the GPU, else the most that this process had in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
