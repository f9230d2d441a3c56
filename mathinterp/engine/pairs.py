"""Pairs X_r and X_c as the model reads them, and what it does at END of each: clean passes and cached activations.

END is the last token that is read here: the one whose logits predict the scored token, the answer's first digit.
The sentences end there, so nothing after END is computed.

Shape legend: P pair, L layer, B pair of one batch, T token, H query head, Z o_proj input width, D model width.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from mathinterp.engine.batching import like_lengths
from mathinterp.engine.hooks import Look, watched
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.pairs import first_digit
from mathinterp.prompts.prompt import TokenizedPrompt

CPU_TOKENS, GPU_TOKENS = 2048, 32768  # tokens in one clean pass, padding included


@dataclass(frozen=True)
class Pairs:
    """Token ids of X_r and X_c up to END, and the token that is scored."""

    original: tuple[tuple[int, ...], ...]
    counterfactual: tuple[tuple[int, ...], ...]
    gold_P: np.ndarray

    def __len__(self) -> int:
        return len(self.original)

    def chosen(self, keep_P: np.ndarray) -> "Pairs":
        """The pairs at the indices ``keep_P`` alone."""
        return Pairs(
            tuple(self.original[i] for i in keep_P),
            tuple(self.counterfactual[i] for i in keep_P),
            self.gold_P[keep_P],
        )


def pairs_of(prompts: Sequence[TokenizedPrompt]) -> Pairs:
    """Cut the prompts and their counterfactuals after END; raises UserError for an answer without a digit."""
    scored = [first_digit(prompt) for prompt in prompts]
    counterfactual = []
    for prompt, token in zip(prompts, scored, strict=True):
        assert prompt.counterfactual_ids is not None, f"prompt {prompt.prompt.prompt_id} has no counterfactual"
        counterfactual.append(prompt.counterfactual_ids[: token.index])
    return Pairs(
        tuple(prompt.input_ids[: token.index] for prompt, token in zip(prompts, scored, strict=True)),
        tuple(counterfactual),
        np.array([token.token_id for token in scored]),
    )


@dataclass(frozen=True)
class Batch:
    """Sentences of like length, padded on the right; a pad is never seen by a token before it."""

    rows: torch.Tensor  # B indices of the sentences
    ends: torch.Tensor  # B index of each END
    token_ids: torch.Tensor  # B T

    def at_end(self, values_BTX: torch.Tensor) -> torch.Tensor:
        """B X: each sentence's END row."""
        return values_BTX[torch.arange(len(self.ends), device=values_BTX.device), self.ends]

    def keeper(self, kept: list[torch.Tensor]) -> Look:
        """For ``hooks.watched``: adds the END rows of what it sees to ``kept``."""
        return lambda values_BTX: kept.append(self.at_end(values_BTX))

    def forward(self, anatomy: Anatomy) -> None:
        """Run the decoder; what it computes is for hooks to see.

        No mask is given: causal attention never looks at what is padded on the right, and a padding row that sees no
        token, under a mask and a window, may be NaN, which reaches the others as 0 times NaN.
        """
        anatomy.decoder(input_ids=self.token_ids, use_cache=False)


def batches_of(
    sentences: Sequence[tuple[int, ...]], anatomy: Anatomy, max_tokens: int | None = None
) -> Iterator[Batch]:
    """Sentences in batches of about ``max_tokens`` tokens (None: by device), sorted by length.

    Those for which the model takes other rotary frequencies are in batches of their own.
    """
    device = anatomy.device
    max_tokens = max_tokens or (GPU_TOKENS if device.type == "cuda" else CPU_TOKENS)
    every = [len(sentence) for sentence in sentences]
    for rows in like_lengths(every, anatomy.shape.positions, max(1, max_tokens // max(every))):
        lengths = [every[i] for i in rows]
        token_ids = np.zeros((len(rows), max(lengths)), np.int64)
        for row, index in enumerate(rows):
            token_ids[row, : lengths[row]] = sentences[index]
        arrays = (np.array(rows), np.array(lengths) - 1, token_ids)
        yield Batch(*(torch.from_numpy(array).to(device) for array in arrays))


@dataclass(frozen=True)
class Ends:
    """Activations at END of each sentence in a clean pass."""

    embedded_PD: torch.Tensor  # input of layer 0
    heads_LPZ: torch.Tensor  # input of o_proj: the heads' outputs side by side
    attention_LPD: torch.Tensor  # output of o_proj
    mlp_LPD: torch.Tensor  # output of the MLP module
    final_PD: torch.Tensor  # input of the final norm

    def chosen(self, at: np.ndarray) -> "Ends":
        """The activations of some sentences alone."""
        return Ends(
            self.embedded_PD[at], self.heads_LPZ[:, at], self.attention_LPD[:, at], self.mlp_LPD[:, at],
            self.final_PD[at],
        )  # fmt: skip


@dataclass(frozen=True)
class CleanPairs:
    """Pairs, and what each side has at END in a clean pass."""

    pairs: Pairs
    original: Ends
    counterfactual: Ends

    def chosen(self, keep_P: np.ndarray) -> "CleanPairs":
        """The pairs at the indices ``keep_P`` alone."""
        ends = (side.chosen(keep_P) for side in (self.original, self.counterfactual))
        return CleanPairs(self.pairs.chosen(keep_P), *ends)


@torch.no_grad()
def ends_of(anatomy: Anatomy, sentences: Sequence[tuple[int, ...]], max_tokens: int | None = None) -> Ends:
    """One clean pass over the sentences; END activations in the model's dtype, on its device."""
    shape, P = anatomy.shape, len(sentences)
    like = torch.empty(0, dtype=anatomy.dtype, device=anatomy.device)
    ends = Ends(
        embedded_PD=like.new_empty(P, shape.d_model),
        heads_LPZ=like.new_empty(shape.n_layers, P, shape.n_heads * shape.d_head),
        attention_LPD=like.new_empty(shape.n_layers, P, shape.d_model),
        mlp_LPD=like.new_empty(shape.n_layers, P, shape.d_model),
        final_PD=like.new_empty(P, shape.d_model),
    )
    stores = [(anatomy.layers[0], True, ends.embedded_PD), (anatomy.final_norm, True, ends.final_PD)]
    for layer in range(shape.n_layers):
        projection = anatomy.output_projection(layer)
        stores += [(projection, True, ends.heads_LPZ[layer]), (projection, False, ends.attention_LPD[layer])]
        stores.append((anatomy.mlp(layer), False, ends.mlp_LPD[layer]))
    for batch in batches_of(sentences, anatomy, max_tokens):

        def keep(values_BTX: torch.Tensor, store_PX: torch.Tensor, batch: Batch = batch) -> None:
            store_PX[batch.rows] = batch.at_end(values_BTX)

        with ExitStack() as hooks:
            for module, of_input, store_PX in stores:
                hooks.enter_context(watched(module, of_input, partial(keep, store_PX=store_PX)))
            batch.forward(anatomy)
    return ends
