"""How replaced activations are computed: what they are replaced with, and rows from scores (see ablation.py)."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from mathinterp.engine.choose import Engine, build_engine, packing_deviation, pays_to_compile
from mathinterp.engine.intervention import Intervention, Tokens, Value, intervention
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.plain import PlainEngine
from mathinterp.engine.scores import Scores
from mathinterp.engine.tree.packing import BatchShape
from mathinterp.experiments.ablation import Ablation
from mathinterp.experiments.base import Subject
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Unit
from mathinterp.prompts.prompt import TokenizedPrompt, with_distractors


@dataclass
class AblationState:
    """What a replica keeps between shards."""

    anatomy: Anatomy
    prompts: Sequence[TokenizedPrompt]
    engine: Engine
    counterfactual: Engine | None  # the same prompts with X_c in place of X_r
    notes: dict[str, Any]
    values: dict[tuple[str, int], Value] = field(default_factory=dict)  # by site and layer; see ``ablated``
    whole: "AblationState | None" = None  # all prompts, where these are some of them and means are over all
    places: np.ndarray | None = None  # of these among them


def build_scan_engine(
    scan: Ablation, subject: Subject, edits_per_batch: int, compiled: bool, shape: BatchShape | None = None
) -> Engine:
    """The engine that runs the scan's edits."""
    return build_engine(
        subject.anatomy,
        with_distractors(subject.prompts),
        asked=scan.engine,
        private_from=private_from(scan, subject.prompts),
        edits_per_batch=edits_per_batch,
        max_tokens=subject.max_tokens,
        compiled=compiled,
        shape=shape,
    )


def prepare(scan: Ablation, subject: Subject, edits_per_batch: int, edits_in_all: int, **how: Any) -> AblationState:
    """``engines_of`` with the run's noise and what its means are over: done once per replica."""
    state = engines_of(scan, subject, edits_per_batch, edits_in_all, **how)
    assert isinstance(state.engine, PackedEngine | PlainEngine), f"the {state.engine.name} engine tells no noise"
    state.notes["noise_floor"] = state.engine.noise_floor(state.engine.baseline())
    state.notes |= means_noted(scan, subject.prompts)
    return state


def means_noted(scan: Ablation, prompts: Sequence[TokenizedPrompt]) -> dict[str, Any]:
    """For the run's notes: what the means are over, if there are any."""
    if scan.ablation not in ("mean", "dataset_mean"):
        return {}
    groups = Counter(_mean_groups(scan, prompts))
    return {"prompts_per_mean": {"fewest": min(groups.values()), "most": max(groups.values())}}


def engines_of(
    scan: Ablation,
    subject: Subject,
    edits_per_batch: int,
    edits_in_all: int,
    *,
    checked: bool = True,
    shape: BatchShape | None = None,
) -> AblationState:
    """Clean pass, and counterfactual pass where needed; the engine is checked against prompts alone, if ``checked``.

    Args:
        shape: of all batches, which are then compiled; None: by the number of edits.
    """
    anatomy, prompts = subject.anatomy, with_distractors(subject.prompts)
    compiled = shape is not None or pays_to_compile(anatomy.device.type, prompts, edits_in_all)
    engine = build_scan_engine(scan, subject, edits_per_batch, compiled, shape)
    counterfactual = None
    if scan.needs_counterfactuals:
        pairs = [dataclasses.replace(p, input_ids=_counterfactual_ids(p)) for p in prompts]
        counterfactual = build_engine(anatomy, pairs, asked=scan.engine, max_tokens=subject.max_tokens)
    notes: dict[str, Any] = {"engine": engine.name}
    if checked:
        notes["packing_deviation"] = packing_deviation(engine, anatomy, prompts)
    if isinstance(engine, PackedEngine):
        forest = engine.forest
        notes |= {"nodes": forest.n_nodes, "packs": forest.n_packs, "pack_size": forest.pack_size}
        notes["attention"] = "tree" if engine.tree_attention else "dense masks"
    return AblationState(anatomy, prompts, engine, counterfactual, notes)


def _mean_groups(scan: Ablation, prompts: Sequence[TokenizedPrompt]) -> list[tuple[str | None, str | None]]:
    """What each prompt's mean is taken over: its (operation, template) at END, else all prompts."""
    if scan.edited_positions == "all" or scan.ablation == "dataset_mean":
        return [(None, None)] * len(prompts)
    return [(p.prompt.operation, p.prompt.template) for p in prompts]


def _counterfactual_ids(prompt: TokenizedPrompt) -> tuple[int, ...]:
    assert prompt.counterfactual_ids is not None, f"prompt {prompt.prompt.prompt_id} has no counterfactual"
    return prompt.counterfactual_ids


def private_from(scan: Ablation, prompts: Sequence[TokenizedPrompt]) -> list[int] | None:
    """Per prompt, the token from which no other prompt may share its nodes, because they are edited for it alone.

    With END edits that holds for zeros too: one prompt's END may be an earlier token of a longer prompt.
    """
    if scan.edited_positions == "end":
        return [prompt.end for prompt in prompts]
    return [0] * len(prompts) if scan.ablation == "resample" else None


def value_of(scan: Ablation, state: AblationState, site: str, layer: int) -> Value:
    """What the activations of ``site`` in ``layer`` become."""
    if state.whole is not None:
        return _mean_of_whole(scan, state, site, layer)
    everywhere = scan.edited_positions == "all"
    tokens = (Tokens.every if everywhere else Tokens.ends)(state.prompts)
    if scan.ablation == "zero":
        return Value.zero(state.anatomy, site, layer, None if everywhere else tokens)
    assert state.counterfactual is not None or scan.ablation == "dataset_mean"
    rows_nZ = (state.counterfactual or state.engine).activations(site, layer, tokens)
    if scan.ablation == "resample":
        return Value(rows_nZ, tokens)
    return Value.mean(rows_nZ) if everywhere else Value.mean(rows_nZ, tokens, _mean_groups(scan, state.prompts))


def _mean_of_whole(scan: Ablation, state: AblationState, site: str, layer: int) -> Value:
    """The means over all prompts, at END of those that are here."""
    assert state.whole is not None
    known = state.whole.values
    if (site, layer) not in known:
        known[site, layer] = value_of(scan, state.whole, site, layer)
    value = known[site, layer]
    if value.tokens is None or value.rows is None:
        return value
    return Value(value.rows[torch.as_tensor(state.places, device=value.rows.device)], Tokens.ends(state.prompts))


def ablated(scan: Ablation, state: AblationState, units: Iterable[Unit]) -> Intervention:
    """The units ablated together, as ``scan`` says; values are computed once per replica."""

    def value(site: str, layer: int) -> Value:
        if (site, layer) not in state.values:
            state.values[site, layer] = value_of(scan, state, site, layer)
        return state.values[site, layer]

    return intervention(units, value)


def score_rows(state: AblationState, scores: Scores, schema: pa.Schema, ids: dict[str, list[int]]) -> pa.Table:
    """Rows of ``schema``, edit by edit: E * A of them; those of distractors have negative positions.

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
