"""Samples as tensors: one per row, padded on the right, or several per row with attention kept within each.

Knows tokens and the masks that a model takes; knows nothing about losses or training.
Shapes: B rows, T tokens of a row, N answer tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from mathinterp.engine.layers import tree_mask
from mathinterp.engine.tree.forest import plant
from mathinterp.errors import UserError
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.positions import ANY_LENGTH, Positions
from mathinterp.tuning.data import Sample

WIDTH_MULTIPLE = 8
Batch = dict[str, Any]  # input_ids_BT, before_N, labels_N; packed also position_ids_BT and attention_mask; see below


def padded(samples: Sequence[Sample], pad_id: int, positions: Positions = ANY_LENGTH) -> Batch:
    """One sample a row. Causal attention never looks at what is padded on the right, so no mask is needed.

    ``before_N`` are the flat positions (of B x T) that predict the answer tokens ``labels_N``; ``places`` are, sample
    by sample, the flat positions of all its tokens. Padding stays where the model's ``positions`` have room for it and
    change nothing.
    """
    longest = max(len(sample.input_ids) for sample in samples)
    width = positions.widest(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, longest)
    rows = [[*sample.input_ids, *[pad_id] * (width - len(sample.input_ids))] for sample in samples]
    places = [row * width + np.arange(len(sample.input_ids)) for row, sample in enumerate(samples)]
    return {"input_ids_BT": torch.tensor(rows), **_answers(samples, places)}


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What fills a row on the right; a causal model without labels there never sees it, so any token would do."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token_id for token_id in candidates if token_id is not None)


def packed(samples: Sequence[Sample], size: int, anatomy: Anatomy) -> Batch:
    """Several samples per row of about ``size`` tokens, on the model's device, with the mask in its family's form.

    Each sample attends to itself alone, from position 0 on. Beginnings that samples of a row share are there once,
    which changes neither values nor gradients. Raises UserError for a family that takes no 4-D mask.
    """
    if not anatomy.family.tree_mask:
        raise UserError(f"models of family '{anatomy.shape.model_type}' take no 4-D mask; train without `pack`")
    forest = plant([sample.input_ids for sample in samples], pack_size=size, alignment=WIDTH_MULTIPLE)
    return {
        "input_ids_BT": torch.from_numpy(forest.token_ids_PN),
        "position_ids": torch.from_numpy(forest.depths_PN),
        "attention_mask": tree_mask(anatomy, forest, np.arange(forest.n_packs)),
        **_answers(samples, list(forest.node_of)),
    }


def _answers(samples: Sequence[Sample], places: Sequence[np.ndarray]) -> Batch:
    before = [where[[index - 1 for index in s.answer]] for s, where in zip(samples, places, strict=True)]
    labels = [sample.input_ids[index] for sample in samples for index in sample.answer]
    return {
        "before_N": torch.from_numpy(np.concatenate(before)),
        "labels": torch.tensor(labels),
        "places": torch.from_numpy(np.concatenate(places)),
    }
