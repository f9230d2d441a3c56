"""How an MLP probe's rows are computed: cosines of MLP vectors at END with rows of the unembedding.

Shape legend: P prompt, B prompts of a batch, L layer, C target (a, b, c), M measure, D model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.nn.functional import cosine_similarity

from mathinterp.engine.lens.mlp_vectors import mlp_vectors, unembedding_rows
from mathinterp.engine.pairs import batches_of
from mathinterp.experiments.answered import kept_prompts
from mathinterp.experiments.base import Subject
from mathinterp.experiments.columns import cast_table
from mathinterp.experiments.mlp_probe.tables import MEASURES, MLP_PROBE, TARGETS
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.prompts.token_types import TypedTokens, scheme_of, typed_tokens

OPERANDS = {"operand_a": "a", "operand_b": "b"}


@dataclass
class ProbeState:
    """What a replica keeps between shards: P kept prompts, L layers, targets a, b, c, and the three measures M."""

    names: pa.Array  # P prompt ids
    targets: tuple[str, ...]  # C
    cosine_PLCM: np.ndarray
    notes: dict[str, Any]


def prepare(subject: Subject, vectors: str, fold_norm: bool, keep_all: bool) -> ProbeState:
    """The choice of prompts, and one pass over them; the vectors become cosines at once."""
    anatomy = subject.anatomy
    assert subject.tokenizer is not None, "the operands' tokens need the tokenizer"
    prompts, notes = kept_prompts(subject, keep_all)
    scheme = scheme_of([item.prompt for item in subject.prompts])
    names = target_names(prompts, scheme)
    targets = target_ids(prompts, typed_tokens(prompts, subject.tokenizer, scheme), names)
    cosine_PLCM = np.empty((len(prompts), anatomy.shape.n_layers, len(names), len(MEASURES)))
    for batch in batches_of([p.input_ids[: p.end + 1] for p in prompts], anatomy, subject.max_tokens):
        rows = batch.rows.cpu()
        ids_BC = targets[rows].to(anatomy.device)
        towards_BCD = unembedding_rows(anatomy, ids_BC.flatten(), fold_norm).unflatten(0, ids_BC.shape)
        before_BLD, after_BLD = mlp_vectors(anatomy, batch).input_and_output(vectors)
        found = [
            cosine_similarity(vectors_BLD[:, :, None], towards_BCD[:, None], dim=-1)
            for vectors_BLD in (before_BLD, after_BLD, after_BLD - before_BLD)
        ]
        cosine_PLCM[rows.numpy()] = torch.stack(found, dim=-1).cpu().numpy()
    return ProbeState(pa.array([item.prompt.prompt_id for item in prompts]), names, cosine_PLCM, notes)


def target_names(prompts: Sequence[TokenizedPrompt], scheme: str = "arithmetic") -> tuple[str, ...]:
    """What the MLPs are compared with: a, b (operands) and c (answer); of other prompts first, last and c.

    Then the types that the prompts name, and the distractor, if they have one. All prompts have the same.
    """
    one = prompts[0]
    own = [name for name, _ in one.prompt.token_types] + (["distractor"] if one.distractor is not None else [])
    return (*(TARGETS if scheme == "arithmetic" else ("first", "last", "c")), *own)


def target_ids(
    prompts: Sequence[TokenizedPrompt], typed: Sequence[TypedTokens], names: Sequence[str] = TARGETS
) -> torch.Tensor:
    """P x C token ids, as they stand in the sentence: first digit tokens of operand A, operand B and the answer.

    Of a number in words, and of other words, the first token; a minus sign is passed over.
    """
    ids = []
    for item, tokens in zip(prompts, typed, strict=True):
        answer = next((token for token in item.scored if token.kind == "digit"), item.scored[0])
        found = {"c": answer.token_id, "last": item.input_ids[item.end]}
        found["first"] = item.input_ids[next((i for i, kind in enumerate(tokens.types) if kind != "bos"), item.end)]
        found |= {OPERANDS.get(name, name): item.input_ids[index] for name, index in tokens.first_digit.items()}
        if item.distractor is not None:
            found["distractor"] = item.distractor.token_id
        ids.append([found[name] for name in names])
    return torch.tensor(ids)


def layer_rows(state: ProbeState, layer: int) -> pa.Table:
    """Rows of one layer: per prompt and target the cosines with the MLP's vectors."""
    cosine_PCM = state.cosine_PLCM[:, layer].astype(np.float32)
    prompts, targets, _ = cosine_PCM.shape
    columns: dict[str, Any] = {
        "layer": np.full(prompts * targets, layer),
        "prompt_id": state.names.take(pa.array(np.repeat(np.arange(prompts), targets))),
        "target": pa.array(state.targets).take(pa.array(np.tile(np.arange(targets), prompts))),
        **{name: cosine_PCM[..., i].ravel() for i, name in enumerate(MEASURES)},
    }
    return cast_table(MLP_PROBE, columns)
