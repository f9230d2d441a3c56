"""JSON lists of known texts as an Arrow column, many rows at once.

Knows that most rows have no list (null) and that the texts are few: they are kept as they stand in a list, brackets
included, so that a list is one join.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch


def in_lists(texts: Sequence[str]) -> pa.Array:
    """Each text as it stands in a list: between others, as the first (with a bracket), the last, and the only one."""
    between = pa.array(texts, pa.string())
    first, last, only = (pc.binary_join_element_wise(*ends, "") for ends in (
        ("[", between), (between, "]"), ("[", between, "]")
    ))  # fmt: skip
    return pa.concat_arrays([between, first, last, only])


def json_lists(texts: pa.Array, numbers_n: torch.Tensor, lengths_N: np.ndarray) -> pa.Array:
    """JSON lists of texts, ``lengths_N`` of them a row: N strings, null where 0. texts: of ``in_lists``."""
    offsets, present_N = np.zeros(len(lengths_N) + 1, np.int32), lengths_N > 0
    np.cumsum(lengths_N, out=offsets[1:])
    form_n = np.zeros(len(numbers_n), np.int64)  # 0 between, 1 first, 2 last, 3 only
    form_n[offsets[:-1][present_N]] += 1
    form_n[offsets[1:][present_N] - 1] += 2
    items = texts.take(pa.array(numbers_n.numpy() + form_n * (len(texts) // 4)))
    return pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), items, mask=pa.array(~present_N)), ", ")
