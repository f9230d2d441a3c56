"""Which prompts the model answers rightly: reading heads and MLPs on the others would read its mistakes.

Paper B keeps the sentences that the model answers correctly (method.md section 1). Right means here: at END the
likeliest token is the first scored token of the answer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mathinterp.engine.hooks import caught_input
from mathinterp.engine.pairs import batches_of
from mathinterp.engine.scores import score
from mathinterp.errors import UserError
from mathinterp.experiments.base import Subject
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt


def kept_prompts(subject: Subject, keep_all: bool) -> tuple[list[TokenizedPrompt], dict[str, Any]]:
    """The prompts to read, in their order, and notes: how many were given, answered rightly and kept.

    Raises UserError if none is left.
    """
    right_P = answered_rightly(subject.anatomy, subject.prompts, subject.max_tokens)
    kept = [item for item, right in zip(subject.prompts, right_P, strict=True) if right or keep_all]
    if not kept:
        raise UserError(
            f"the model answers none of the {len(right_P)} prompts right (first token), so no prompt is kept; take"
            " prompts that it can answer, or `keep_all`"
        )
    return kept, {"prompts": len(right_P), "answered_rightly": int(right_P.sum()), "prompts_kept": len(kept)}


def kept_pairs(right_P: np.ndarray, keep_all: bool) -> np.ndarray:
    """P booleans: the pairs to read, those answered rightly unless all are; raises UserError if none is left."""
    if not keep_all and not right_P.any():
        raise UserError(
            f"the model answers none of the {len(right_P)} prompts right (first digit), so no pair is kept; take"
            " prompts that it can answer, or `keep_all`"
        )
    return np.ones_like(right_P) if keep_all else right_P


@torch.inference_mode()
def answered_rightly(anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], max_tokens: int | None = None) -> np.ndarray:
    """P booleans, from one pass over the prompts up to END under the model's own attention."""
    gold_P = torch.tensor([item.scored[0].token_id for item in prompts], device=anatomy.device)
    right_P = np.zeros(len(prompts), bool)
    for batch in batches_of([item.input_ids[: item.end + 1] for item in prompts], anatomy, max_tokens):
        with caught_input(anatomy.final_norm) as caught:
            batch.forward(anatomy)
        gold_B = gold_P[batch.rows]
        _, _, predicted_EB = score(anatomy, batch.at_end(caught[0])[None], gold_B)
        right_P[batch.rows.cpu().numpy()] = (predicted_EB[0] == gold_B).cpu().numpy()
    return right_P
