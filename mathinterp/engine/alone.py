"""Every run's own proof that prompts which share a pass do not touch each other: compared with prompts truly alone.

Alone means one forward pass for each, unpadded, unpacked, as the model's own code runs it. Padding, packing, windows
and rotary frequencies that depend on the longest sentence could all make a prompt's number that of its neighbours, and
two fast paths that share the fault would agree.
"""

from collections.abc import Sequence

import numpy as np
import torch

from mathinterp.engine.hooks import caught_input
from mathinterp.engine.pairs import batches_of
from mathinterp.engine.scores import answer_logits
from mathinterp.models.anatomy import Anatomy

MOST = 8  # sentences compared
TOLERATED_DEVIATION = {torch.float64: 1e-4, torch.float32: 1e-2}  # nats, of log-probabilities and logits
TOLERATED_HALF_DEVIATION = 1.0  # bfloat16 and float16 round differently in every batch shape


def tolerated(anatomy: Anatomy) -> float:
    """Nats that rounding may explain; quantised layers round what they read by all that shares a pass."""
    half = anatomy.quantised or anatomy.dtype not in TOLERATED_DEVIATION
    return TOLERATED_HALF_DEVIATION if half else TOLERATED_DEVIATION[anatomy.dtype]


def sampled(lengths: Sequence[int], most: int = MOST) -> np.ndarray:
    """Indices of at most ``most`` sentences spread over all, the shortest and the longest among them."""
    ends = [int(np.argmin(lengths)), int(np.argmax(lengths))]
    spread = np.linspace(0, len(lengths) - 1, num=min(max(most - 2, 1), len(lengths)), dtype=int)
    return np.unique([*ends, *spread])


@torch.inference_mode()
def alone_deviation(anatomy: Anatomy, sentences: Sequence[tuple[int, ...]]) -> float:
    """Largest difference at END of the likeliest token's log-probability and logit, together against alone.

    Args:
        sentences: token ids up to END; a sample of them is run in the batches that scans use.
    Raises:
        RuntimeError: the difference is beyond what rounding explains in the model's dtype.
    """
    chosen = [tuple(sentences[i]) for i in sampled([len(sentence) for sentence in sentences])]
    worst = 0.0
    for batch in batches_of(chosen, anatomy):
        with caught_input(anatomy.final_norm) as caught:
            batch.forward(anatomy)
        for final_D, index in zip(batch.at_end(caught[0]), batch.rows.tolist(), strict=True):
            together, alone = answer_logits(anatomy, final_D[None])[0], _alone(anatomy, chosen[index])
            token = int(alone.argmax())
            for mine, other in ((together, alone), (together.log_softmax(-1), alone.log_softmax(-1))):
                worst = float(np.maximum(worst, abs(float(mine[token] - other[token]))))  # keeps NaN
    limit = tolerated(anatomy)
    if not worst <= limit:  # NaN is no agreement
        raise RuntimeError(
            f"prompts that share a forward pass stray {worst:.3g} nats from the same prompts alone (limit {limit:g} in"
            f" {str(anatomy.dtype).removeprefix('torch.')}): {anatomy.shape.model_type} lets neighbours or padding"
            f" change a prompt{_or_rounds(anatomy)}; report this"
        )
    return worst


def _or_rounds(anatomy: Anatomy) -> str:
    half = anatomy.dtype not in TOLERATED_DEVIATION
    return ", unless this dtype rounds so much: then it runs with `dtype` float32. If not" if half else ""


def _alone(anatomy: Anatomy, sentence: tuple[int, ...]) -> torch.Tensor:
    """V logits behind the sentence's last token, from a pass of its own."""
    with caught_input(anatomy.final_norm) as caught:
        anatomy.model(input_ids=torch.tensor([sentence], device=anatomy.device), use_cache=False)
    return answer_logits(anatomy, caught[0][0, -1:])[0]
