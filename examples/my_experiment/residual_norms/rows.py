"""One clean pass, and the norm of what enters each layer at END.

Shape legend: P prompt, B prompts of a batch, L layer, T token, D model width.
"""

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from mathinterp.engine.hooks import caught_input
from mathinterp.engine.pairs import batches_of
from mathinterp.experiments import Subject


@dataclass
class Norms:
    """What a replica keeps between shards."""

    names: list[str]  # P prompt ids
    norms_LP: np.ndarray


@torch.inference_mode()
def norms_at_end(subject: Subject, measure: str) -> Norms:
    """The norm of every layer's input at the last token before the answer, in float32."""
    anatomy = subject.anatomy
    norms_LP = np.empty((anatomy.shape.n_layers, len(subject.prompts)), np.float32)
    order = 2 if measure == "l2" else torch.inf
    for batch in batches_of([p.input_ids[: p.end + 1] for p in subject.prompts], anatomy, subject.max_tokens):
        with ExitStack() as hooks:
            inputs = [hooks.enter_context(caught_input(layer)) for layer in anatomy.layers]
            batch.forward(anatomy)
        for layer, (values_BTD,) in enumerate(inputs):
            norms_B = batch.at_end(values_BTD).float().norm(order, dim=-1)
            norms_LP[layer, batch.rows.cpu().numpy()] = norms_B.cpu().numpy()
    return Norms([p.prompt.prompt_id for p in subject.prompts], norms_LP)
