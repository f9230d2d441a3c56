"""What is asked of a fine-tuning: data, steps, places. The command line makes its options of these fields.

Knows numbers and names; knows nothing about models. Needs no torch.
"""

import math
from dataclasses import MISSING, dataclass
from functools import partial

from mathinterp.engine.lens import TARGETS
from mathinterp.errors import UserError
from mathinterp.experiments.options import check_options, normalized, option, read_heads, read_layers, read_neurons
from mathinterp.gates import MOST_DRAWS, MOST_SEED, real, shortened
from mathinterp.models.units import Head, Neuron

DEFAULT_STORE = "results"
LORA_EPOCHS = 4.0
MOST_SAMPLES = 10**8  # of a training, whose order is drawn before it begins
LONGEST_ROW = 2**17  # tokens of a packed row
CONTROLS = ("random", "random_layer", "bottom")
DEFAULT_TOP = 32
read_mlps, read_deep = (partial(read_layers, field=field) for field in ("mlps", "deep"))


@dataclass(frozen=True)
class TuneSettings:
    """One fine-tuning; whoever gives neither ``steps`` nor ``epochs`` gets one pass over the data."""

    lr: float  # peak learning rate
    data: tuple[str, ...] = option(
        MISSING,
        "JSON lines (prompt/response, messages, GSM8K, prompt files) or a prompt set; repeatable. With weights on all"
        " of them samples are drawn in that mixture; short files repeat.",
        metavar="FILE[:WEIGHT]",
    )
    held_out: tuple[str, ...] = option((), "Data to evaluate before and after, likewise.", metavar="FILE")
    steps: int | None = option(None, "Optimizer steps.", least=1)
    epochs: float | None = option(None, "Passes over the data instead.", least=0, shown="1")
    batch: int = option(128, "Samples per step, all workers together.", least=1)
    micro_batch: int = option(16, "Samples per forward pass on one worker; the rest is accumulated.", least=1)
    weight_decay: float = option(0.0, "AdamW's, of trained weights.", least=0)
    max_tokens: int = option(512, "Longer samples are left out and counted.", least=2)
    seed: int = option(0, "Order of the data.", least=0, most=MOST_SEED)
    workers: int = option(1, "Data-parallel workers, a GPU each.", least=1)
    shard_model: bool = option(
        False, "Spread the frozen layers over the workers (FSDP2), for a model larger than a card; heads and LoRA only."
    )
    checkpoint_every: int = option(100, "Steps.", least=1)
    log_every: int = option(10, "Steps.", least=1)
    recompute: bool = option(False, "Recompute activations: less memory, more time.")
    pack: int | None = option(
        None,
        "Several short samples in a row of so many tokens, each attending to itself alone.",
        least=8,
        most=LONGEST_ROW,
        metavar="TOKENS",
    )
    cache: bool = option(
        False, "Keep the inputs of the lowest trained layer in memory: later epochs skip what lies below."
    )
    compiled: bool | None = None  # layers through torch.compile; None: in long runs on GPUs
    gpu: bool | None = None  # None: if there are enough
    tensorboard: str | None = None  # folder for the course of training
    storage: str | None = None  # checkpoints: folder or URI; None: the result's folder with "-training" added
    address: str | None = None  # of a Ray cluster; None: RAY_ADDRESS, else a local Ray
    store: str = DEFAULT_STORE

    def __post_init__(self) -> None:
        check_options(self)
        normalized(self, data=_names(self.data), held_out=_names(self.held_out))
        if self.shard_model and self.workers < 2:
            raise UserError("`shard_model` spreads a model over workers: give `workers` 2 or more")
        if self.shard_model and self.cache:
            raise UserError("`cache` with `shard_model`: workers gather layers together, and each keeps other samples")


@dataclass(frozen=True)
class Choice:
    """What a precise fine-tuning trains, before the store and the model are asked."""

    heads: tuple[Head, ...] | None = option(None, "layer.head, for example 17.22,14.19.", parse=read_heads)
    heads_from: str | None = option(
        None, "The first heads of a head scan, path scan or masking.",
        flag="from", former=("heads-from",), metavar="RUN_ID",
    )  # fmt: skip
    heads_sql: str | None = option(None, "Any query on the store that returns layer and head.", metavar="SQL")
    top: int | None = option(None, "So many heads of the ranking.", least=1, shown=str(DEFAULT_TOP))
    control: str | None = option(
        None,
        "Train others instead: random; random_layer, as many in each layer; or bottom, the ranking's last, which under"
        " signed effects are those that help when they are out.",
        choices=(*CONTROLS, None),
    )
    control_seed: int = option(
        0, "Which draw of random heads: 0, 1, 2, ...", flag="control-draw", former=("control-seed",),
        least=0, most=MOST_SEED,
    )  # fmt: skip
    with_groups: bool = option(False, "Grouped-query models: train the heads' k and v groups too.")
    mlps: tuple[int, ...] | None = option(
        None, "Also all MLP neurons of these layers, for example 12-14.", parse=read_mlps
    )
    neurons: tuple[Neuron, ...] | None = option(None, "Also these MLP neurons, layer.neuron.", parse=read_neurons)
    neurons_sql: str | None = option(None, "Also those of a query that returns layer and neuron.", metavar="SQL")

    def __post_init__(self) -> None:
        normalized(self, heads=read_heads(self.heads), mlps=read_mlps(self.mlps), neurons=read_neurons(self.neurons))
        check_options(self)
        if self.heads is not None and self.top is not None:
            raise UserError("`top` takes the first of a ranking (`heads_from`, `heads_sql`); with `heads` leave it out")
        if sum(given is not None for given in (self.heads, self.heads_from, self.heads_sql)) > 1:
            raise UserError("give the heads in one way: `heads`, `heads_from` or `heads_sql`")
        if self.neurons is not None and self.neurons_sql is not None:
            raise UserError("give the neurons in one way: `neurons` or `neurons_sql`")

    @property
    def chosen_from(self) -> str | None:
        """Which run or SQL names the heads, for people."""
        return self.heads_sql if self.heads_from is None else f"run {self.heads_from}"


@dataclass(frozen=True)
class LoraSettings:
    """What the layer sweep and pruning share: data, test prompts, the LoRA and its training."""

    data: str = option("signed_two_digit_train", "What trains: a set or file.")
    test: str = option("signed_two_digit_test", "What is scored: prompts.")
    test_limit: int | None = option(None, "At most so many of them.", least=1)
    cases: str = option("one_digit", "Prompts that neurons are compared on.")
    case_limit: int | None = option(None, "At most so many of them.", least=1)
    rank: int = option(32, "Of the LoRA.", least=1)
    alpha: int = option(64, "Of the LoRA.", least=1)
    steps: int | None = option(None, "Optimizer steps.", least=1)
    epochs: float | None = option(None, "Passes over the data instead.", least=0, shown=f"{LORA_EPOCHS:g}")
    batch: int = option(128, "Samples per step.", least=1)
    micro_batch: int = option(128, "Samples per forward pass; the rest is accumulated.", least=1)
    max_tokens: int = option(512, "Longer samples are left out and counted.", least=2)
    seed: int = option(0, "Of data and training.", least=0, most=MOST_SEED)
    target: str = option(
        "predicted",
        "The token that neurons are compared on: predicted by the original model, or gold.",
        choices=TARGETS,
    )
    store: str = DEFAULT_STORE
    replicas: int | None = None
    gpus_per_replica: float | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if (self.gpus_per_replica or 0) > 1:
            raise UserError(
                f"`gpus_per_replica` {self.gpus_per_replica:g}: what is trained lies whole on one GPU; give 1 or less"
            )


def read_rates(given: str | tuple[float, ...]) -> tuple[float, ...]:
    """ "1e-3,5e-4" -> (0.001, 0.0005); raises UserError for anything else."""
    try:
        rates = tuple(real(part, 0) for part in (given.split(",") if isinstance(given, str) else given))
    except ValueError:
        rates = ()
    if not rates or not all(rates):
        raise UserError(f"`rates` '{shortened(given)}' cannot be read; write them like 1e-3,5e-4")
    return rates


@dataclass(frozen=True)
class SweepSettings(LoraSettings):
    """A LoRA in each layer by itself."""

    layers: tuple[int, ...] | None = option(None, "Layers, for example 0-3,17.", parse=read_layers, shown="all")
    rates: tuple[float, ...] = option(
        (1e-3, 5e-4, 1e-4), "Learning rates, of which the best is taken.", parse=read_rates, shown="1e-3,5e-4,1e-4"
    )
    validation: int = option(500, "Samples kept from training, by which the learning rate is chosen.", least=1)
    top: int = option(50, "Neurons kept per prompt.", least=50)

    def __post_init__(self) -> None:
        super().__post_init__()
        normalized(self, layers=read_layers(self.layers), rates=read_rates(self.rates))


@dataclass(frozen=True)
class PruneSettings(LoraSettings):
    """Deep layers pruned to the neurons that a LoRA enhances."""

    layer: int | None = option(None, "With the LoRA.", least=0, shown="by depth (9 of 32)")
    deep: tuple[int, ...] | None = option(
        None,
        "Layers to prune, for example 17-31.",
        parse=read_deep,
        shown="by depth (17-31 of 32)",
    )
    top: int | None = option(None, "Neurons kept per case.", least=1, shown="the share 500 is of 165,120")
    lr: float = option(5e-4, "Peak learning rate of every LoRA.", least=0)
    control_seeds: int = option(1, "Draws of random neurons; each trains a LoRA of its own.", least=0, most=MOST_DRAWS)
    workers: int = option(1, "Data-parallel workers of a training.", least=1)
    gpu: bool | None = None  # of the trainings; None: if there are enough
    storage: str | None = None  # checkpoints: folder or URI; None: inside the result's folder

    def __post_init__(self) -> None:
        super().__post_init__()
        normalized(self, deep=read_deep(self.deep))
        if not self.lr > 0:
            raise UserError(f"`lr` {self.lr:g}: give a number above 0")
        if self.gpu is False and self.gpus_per_replica is None:
            normalized(self, gpus_per_replica=0.0)


def count_steps(settings: TuneSettings | LoraSettings, samples: int, epochs: float) -> int:
    """Optimizer steps, ``epochs`` passes over the data where neither is given; raises UserError where both are."""
    if settings.steps is not None and settings.epochs is not None:
        raise UserError("give `steps` or `epochs`, not both")
    passes = epochs if settings.epochs is None else settings.epochs
    if not passes > 0:
        raise UserError(f"`epochs` {passes:g}: give a number above 0")
    steps = math.ceil(passes * samples / settings.batch) if settings.steps is None else settings.steps
    if steps * settings.batch > MOST_SAMPLES:
        raise UserError(
            f"`steps` {steps:,} with `batch` {settings.batch:,} would draw more than {MOST_SAMPLES:,} samples"
        )
    return steps


def _names(given: str | tuple[str, ...]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
