"""Which engine runs a scan: the packed one where the family allows, else the plain one.

The rule is one line (``choose``); what it chose is stored with the run.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from mathinterp.engine import ENGINES
from mathinterp.engine.alone import TOLERATED_DEVIATION, sampled, tolerated
from mathinterp.engine.intervention import CLEAN, Intervention, Tokens
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.plain import PlainEngine
from mathinterp.engine.rounding import Rounding, rounding_of
from mathinterp.engine.scores import Answers, Scores
from mathinterp.engine.tree.packing import BatchShape
from mathinterp.errors import UserError
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt

logger = logging.getLogger(__name__)
COMPILE_FROM_NODES = 20_000_000  # node evaluations (tree nodes x edits) from which compiling (some 20 s) pays on a GPU


class Runner(Protocol):
    """What scores answers under interventions: an ``Engine``, or ``EndRows``."""

    answers: Answers

    def run(self, interventions: Sequence[Intervention], base: Intervention = CLEAN) -> Scores:
        """Scores under each intervention by itself: E x A; CLEAN gives the unedited model's.

        Args:
            base: changes that all interventions hold: run once, and then each only from its lowest layer beyond them.
        Raises:
            FloatingPointError: NaN or infinity; names the intervention and the prompt.
        """


class Engine(Runner, Protocol):
    """What experiments need of an engine: ``PlainEngine``, ``PackedEngine``, ``PackedReplay``."""

    name: str

    def baseline(self) -> Scores:
        """Scores of the unedited model: 1 x A."""

    def activations(self, site: str, layer: int, tokens: Tokens) -> torch.Tensor:
        """Clean activations of n tokens at a site: n Z."""


def many_layers(engine: Engine) -> Engine:
    """The engine for batches of interventions that each change several layers: on trees where ``engine`` is packed."""
    return engine.replay if isinstance(engine, PackedEngine) else engine


def choose(asked: str, tree_mask: bool) -> str:
    """The engine that runs: "packed" iff asked for or on "auto", and the family takes a tree mask (families.py).

    Raises UserError where "packed" is asked of a family that takes none.
    """
    if asked not in ENGINES:
        raise UserError(f"engine '{asked}' is not known; take one of {', '.join(ENGINES)}")
    if asked == "packed" and not tree_mask:
        raise UserError("this model family takes no tree mask; use `engine` plain (or auto)")
    return "plain" if asked == "plain" or not tree_mask else "packed"


def pays_to_compile(device_type: str, prompts: Sequence[TokenizedPrompt], edits_in_all: int) -> bool:
    """Whether the packed engine compiles layers for a scan of that many edits: on a GPU, if there is much to run."""
    tokens = sum(len(prompt.fed) for prompt in prompts)
    return device_type == "cuda" and tokens * edits_in_all > COMPILE_FROM_NODES


def build_engine(
    anatomy: Anatomy,
    prompts: Sequence[TokenizedPrompt],
    *,
    asked: str = "auto",
    private_from: Sequence[int] | None = None,
    edits_per_batch: int = 16,
    edits_in_all: int = 16,
    max_tokens: int | None = None,
    compiled: bool | None = None,
    shape: BatchShape | None = None,
) -> Engine:
    """Make the engine and run its clean pass.

    Args:
        private_from: see ``tree.plant``.
        edits_per_batch: edits that a scan asks for at once.
        edits_in_all: edits of the whole scan; decides whether compiling pays.
        max_tokens: most token rows in one forward pass; None = by device.
        compiled: whether the packed engine compiles layers; None = ``pays_to_compile``.
        shape: of the packed engine's batches; None = the one of least work.
    """
    if choose(asked, anatomy.family.tree_mask) == "plain":
        rows = max_tokens or 8192
        return PlainEngine(anatomy, prompts, batch_size=max(1, rows // max(len(p.fed) for p in prompts)))
    if compiled is None:
        compiled = pays_to_compile(anatomy.device.type, prompts, edits_in_all)
    return PackedEngine(
        anatomy,
        prompts,
        private_from=private_from,
        edits_per_batch=edits_per_batch,
        max_tokens=max_tokens,
        compiled=compiled,
        shape=shape,
    )


def packing_deviation(engine: Engine, anatomy: Anatomy, prompts: Sequence[TokenizedPrompt]) -> float:
    """Largest difference (nats; logits too) between ``engine`` and each prompt alone, on a sample of prompts.

    Alone: one plain forward pass for each, so that nothing is padded and no neighbour sets the rotary frequencies. The
    shortest and the longest are in the sample. Guards against a library version that takes the tree mask silently
    wrong, and against whatever makes a prompt's number depend on its neighbours.

    In half precision rounding may move unlikely answers by more than the limit: then float32 decides (rounding.py).

    Raises:
        RuntimeError: the difference is beyond what rounding explains in the model's dtype.
    """
    sample = sampled([len(prompt.fed) for prompt in prompts], most=18)
    chosen = [prompts[index] for index in sample]
    alone = PlainEngine(anatomy, chosen, batch_size=1).baseline()
    together = engine.baseline().at(np.isin(engine.answers.prompt_A, sample))
    worst, limit = together.difference(alone), tolerated(anatomy)
    if worst <= limit:
        return worst
    dtype = str(anatomy.dtype).removeprefix("torch.")
    strays = f"the {engine.name} engine strays {worst:.3g} nats from plain forward passes (limit {limit:g} in {dtype})"
    rounding = None
    if np.isfinite(worst):
        kind = PlainEngine if engine.name == "plain" else PackedEngine
        rounding = rounding_of(together, alone, anatomy, chosen, lambda exact, items: kind(exact, items).baseline())
    if rounding is None or not rounding.explains:  # NaN is no agreement
        raise RuntimeError(f"{strays}: {_why_it_strays(engine, anatomy, chosen, rounding)}")
    logger.warning(f"{strays}: that is {dtype}'s rounding, not a wrong mask ({rounding}); `dtype` float32 has little")
    return worst


def _why_it_strays(
    engine: Engine, anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], rounding: Rounding | None
) -> str:
    """What is at fault, and what helps; the engine plain is advised only where it gives each prompt's own numbers."""
    alone = PlainEngine(anatomy, prompts, batch_size=1).baseline()
    dtype = str(anatomy.dtype).removeprefix("torch.")
    if not np.isfinite(alone.logprob_EA).all():
        narrow = anatomy.dtype == torch.float16
        return f"the model itself gives NaN or infinity in {dtype}" + ("; give `dtype` float32" if narrow else "")
    limit, kind, measured = tolerated(anatomy), anatomy.shape.model_type, f" ({rounding})" if rounding else ""
    if rounding is None and anatomy.dtype not in TOLERATED_DEVIATION:
        measured = f" (or {dtype} rounds so much, which `dtype` float32 shows: here it was not compared with float32)"
    if engine.name != "plain" and PlainEngine(anatomy, prompts).baseline().difference(alone) <= limit:
        return f"{kind} does not take the tree mask as expected{measured}; use `engine` plain and report this"
    return f"{kind} does not take padded batches either{measured} (no `engine` helps); report this"
