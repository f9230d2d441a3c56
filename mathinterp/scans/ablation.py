"""What head and MLP scans share: what an activation is replaced with, and rows from scores.

Replacements of method.md section 2: zero (0 at every token), mean (the average over counterfactual prompts),
resample (the paired counterfactual prompt's own activation).
"""

import dataclasses
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from mathinterp.errors import UserError
from mathinterp.forward.cells import Cells
from mathinterp.forward.edits import Edit, Replacement
from mathinterp.forward.engine import Engine, build_engine, choose, packing_deviation, pays_to_compile
from mathinterp.forward.replay import PackedEngine
from mathinterp.forward.scores import Scores
from mathinterp.models.anatomy import Anatomy, ModelShape
from mathinterp.models.families import family_of
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.scans.base import Scan, Subject

ABLATIONS = ("zero", "mean", "resample")
POSITIONS = ("all", "end")
SCORINGS = ("token", "first_token", "exact_match")


@dataclass(frozen=True)
class AblationScan(Scan):
    """Parameters that head and MLP scans share.

    ablation: "zero", "mean" or "resample".
    positions: tokens that are edited, "all" or "end"; None = all for zero, END for mean and resample.
    scoring: what counts as right, "token", "first_token" or "exact_match"; None = token, but first_token when only
        END is edited (later answer tokens see such an edit only through attention; they are stored all the same).
    engine: "auto", "packed" or "plain".
    """

    ablation: str = "zero"
    positions: str | None = None
    scoring: str | None = None
    engine: str = "auto"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("ablation", self.ablation, ABLATIONS),
            ("positions", self.positions, (None, *POSITIONS)),
            ("scoring", self.scoring, (None, *SCORINGS)),
        ):
            if value not in known:
                choices = ", ".join(k for k in known if k)
                raise UserError(f"--{name} '{value}' is not known; take one of {choices}")

    @property
    def edited_positions(self) -> str:
        """ "all" or "end", the default resolved."""
        return self.positions or ("all" if self.ablation == "zero" else "end")

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row or how it is counted."""
        scoring = self.scoring or ("token" if self.edited_positions == "all" else "first_token")
        return {
            "ablation": self.ablation,
            "positions": self.edited_positions,
            "scoring": scoring,
            "engine": self.engine,
        }

    @property
    def needs_counterfactuals(self) -> bool:
        """Mean and resample ablation take their values from X_c."""
        return self.ablation != "zero"

    def batches(self, shape: ModelShape) -> list[list[Edit]]:
        """All edits of the scan, as the engine is asked for them at once; none for scans too small to compile."""
        return []

    def edits_per_batch(self, shape: ModelShape) -> int:
        """Most edits that the engine is asked for at once."""
        return max(map(len, self.batches(shape)), default=1)

    def compiles(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt], device_type: str) -> bool:
        """The engine's own rule; the plain engine compiles nothing."""
        packed = choose(self.engine, family_of(shape.model_type).tree_mask) == "packed"
        return packed and pays_to_compile(device_type, prompts, sum(map(len, self.batches(shape))))

    def compile_ahead(self, stand_in: Subject, shape: ModelShape) -> None:
        """The passes of ``prepare``, and edits of each layer in every number that the scan asks for at once."""
        engine = build_scan_engine(self, stand_in, self.edits_per_batch(shape), compiled=True)
        assert isinstance(engine, PackedEngine)
        engine.noise_floor(engine.baseline())
        for edits in {len(edits): edits for edits in self.batches(shape)}.values():
            for layer in range(stand_in.anatomy.shape.n_layers):
                engine.compile_edits([dataclasses.replace(edit, layer=layer) for edit in edits])

    def cells(self, state: Any, subject: Subject) -> Cells:
        """The model's own, and the packed engine's."""
        engine = (state if isinstance(state, AblationState) else state.ablation).engine
        own = super().cells(state, subject)
        return Cells.joined([own, engine.cells()]) if isinstance(engine, PackedEngine) else own


@dataclass
class AblationState:
    """What a replica keeps between shards."""

    anatomy: Anatomy
    prompts: Sequence[TokenizedPrompt]
    engine: Engine
    counterfactual: Engine | None  # the same prompts with X_c in place of X_r
    notes: dict[str, Any]


def build_scan_engine(scan: AblationScan, subject: Subject, edits_per_batch: int, compiled: bool) -> Engine:
    """The engine that runs the scan's edits."""
    return build_engine(
        subject.anatomy,
        subject.prompts,
        asked=scan.engine,
        private_from=private_from(scan, subject.prompts),
        edits_per_batch=edits_per_batch,
        max_tokens=subject.max_tokens,
        compiled=compiled,
    )


def prepare(scan: AblationScan, subject: Subject, edits_per_batch: int, edits_in_all: int) -> AblationState:
    """Clean pass, counterfactual pass where needed, and the run's noise: done once per replica."""
    anatomy, prompts = subject.anatomy, subject.prompts
    compiled = pays_to_compile(anatomy.device.type, prompts, edits_in_all)
    engine = build_scan_engine(scan, subject, edits_per_batch, compiled)
    counterfactual = None
    if scan.needs_counterfactuals:
        pairs = [dataclasses.replace(p, input_ids=_counterfactual_ids(p)) for p in prompts]
        counterfactual = build_engine(anatomy, pairs, asked=scan.engine, max_tokens=subject.max_tokens)
    notes: dict[str, Any] = {"engine": engine.name, "packing_deviation": packing_deviation(engine, anatomy, prompts)}
    if isinstance(engine, PackedEngine):
        forest = engine.forest
        notes |= {"nodes": forest.n_nodes, "packs": forest.n_packs, "pack_size": forest.pack_size}
        notes["attention"] = "tree" if engine.tree_attention else "dense masks"
        notes["noise_floor"] = engine.noise_floor(engine.baseline())
    if scan.ablation == "mean":
        groups = Counter(_mean_groups(scan, prompts))
        notes["prompts_per_mean"] = {"fewest": min(groups.values()), "most": max(groups.values())}
    return AblationState(anatomy, prompts, engine, counterfactual, notes)


def _mean_groups(scan: AblationScan, prompts: Sequence[TokenizedPrompt]) -> list[tuple[str | None, str | None]]:
    """What each prompt's mean is taken over: its (operation, template) at END, all prompts where every token is."""
    if scan.edited_positions == "all":
        return [(None, None)] * len(prompts)
    return [(p.prompt.operation, p.prompt.template) for p in prompts]


def _counterfactual_ids(prompt: TokenizedPrompt) -> tuple[int, ...]:
    assert prompt.counterfactual_ids is not None, f"prompt {prompt.prompt.prompt_id} has no counterfactual"
    return prompt.counterfactual_ids


def private_from(scan: AblationScan, prompts: Sequence[TokenizedPrompt]) -> list[int] | None:
    """Per prompt, the token from which no other prompt may share its nodes, because they are edited for it alone.

    With END edits that holds for zeros too: one prompt's END may be an earlier token of a longer prompt.
    """
    if scan.edited_positions == "end":
        return [prompt.end for prompt in prompts]
    return [0] * len(prompts) if scan.ablation == "resample" else None


def replacement(scan: AblationScan, state: AblationState, site: str, layer: int) -> Replacement:
    """The new activations of ``site`` ("head" or "mlp") in ``layer``."""
    everywhere = scan.edited_positions == "all"
    prompt_n, token_n = _all_tokens(state.prompts) if everywhere else _end_tokens(state.prompts)
    if scan.ablation == "zero":
        zero = Replacement.zero(state.anatomy, site, layer)
        if everywhere:
            return zero
        return Replacement(zero.values.expand(len(prompt_n), -1), prompt_n, token_n)
    assert state.counterfactual is not None
    values = state.counterfactual.token_values(site, layer, prompt_n, token_n)
    if scan.ablation == "resample":
        return Replacement(values, prompt_n, token_n)
    if everywhere:
        return Replacement(values.mean(dim=0))
    return Replacement(_group_means(values, _mean_groups(scan, state.prompts)), prompt_n, token_n)


def _group_means(values_nZ: torch.Tensor, keys: Sequence[Hashable]) -> torch.Tensor:
    """Row i becomes the mean over the rows of equal key."""
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    group = torch.tensor([number[key] for key in keys], device=values_nZ.device)
    wide = values_nZ.to(torch.float64 if values_nZ.dtype == torch.float64 else torch.float32)
    sums = wide.new_zeros(len(number), values_nZ.shape[1]).index_add_(0, group, wide)
    counts = torch.bincount(group, minlength=len(number))
    return (sums / counts[:, None])[group].to(values_nZ.dtype)


def _end_tokens(prompts: Sequence[TokenizedPrompt]) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(len(prompts)), np.array([prompt.end for prompt in prompts])


def _all_tokens(prompts: Sequence[TokenizedPrompt]) -> tuple[np.ndarray, np.ndarray]:
    prompt_n = np.concatenate([np.full(len(p.fed), i) for i, p in enumerate(prompts)])
    return prompt_n, np.concatenate([np.arange(len(p.fed)) for p in prompts])


def score_rows(state: AblationState, scores: Scores, schema: pa.Schema, ids: dict[str, list[int]]) -> pa.Table:
    """Rows of ``schema``, edit by edit: E * A of them.

    Args:
        ids: the columns that name the edit (layer, head), one value an edit.
    """
    answers = state.engine.answers
    edits, count = scores.correct_EA.shape
    names = pa.array([p.prompt.prompt_id for p in state.prompts])
    columns: dict[str, Any] = {name: np.repeat(values, count) for name, values in ids.items()}
    columns["prompt_id"] = names.take(pa.array(np.tile(answers.prompt_A, edits)))
    columns["position"] = np.tile(answers.position_A, edits)
    columns["correct"] = scores.correct_EA.ravel()
    columns["logprob"] = scores.logprob_EA.ravel().astype(np.float32)
    columns["logit"] = scores.logit_EA.ravel().astype(np.float32)
    columns["predicted_id"] = scores.predicted_EA.ravel()
    return pa.Table.from_arrays([pa.array(columns[f.name]).cast(f.type) for f in schema], schema=schema)


def baseline_rows(state: AblationState, schema: pa.Schema) -> pa.Table:
    """Rows of the unedited model, computed in the same batch shapes as the edited ones."""
    return score_rows(state, state.engine.baseline(), schema, {})
