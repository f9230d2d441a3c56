"""The chain's stages as rows: heads, deep neurons and prediction by zeroing, reads and shallow neurons by gradients.

Each function gives one list of rows per prompt; chain/__init__.py says what the stages are.
Shape legend: P prompt, E head, K neuron, B prompt of a batch, H query head, T token, V vocabulary.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from mathinterp.engine.choose import build_engine
from mathinterp.engine.intervention import Value, intervention, zeroed
from mathinterp.engine.lens.graph import GraphReader
from mathinterp.engine.lens.head_reads import GOALS, HeadReader, HeadReads
from mathinterp.engine.lens.neurons import EndActivations, NeuronLens, end_activations
from mathinterp.engine.lens.shares import NeuronShare, NeuronShares
from mathinterp.engine.lens.top_tokens import TopTokens
from mathinterp.engine.pairs import Batch, batches_of
from mathinterp.experiments.chosen_heads import most_at_once
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head, Neuron
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.prompts.token_types import TypedTokens

READ_TOKENS = {"cpu": 512, "cuda": 2048}  # tokens in a pass that keeps what gradients need, padding included
SHOWN = 5  # likeliest tokens

Row = dict[str, Any]


# ---- heads ----


@dataclass(frozen=True)
class HeadFalls:
    """What zeroing each head does to w; P E, heads layer by layer. logprob_P: of the unedited model, nats."""

    heads: list[Head]
    logprob_P: np.ndarray
    zeroed_PE: np.ndarray

    def order(self, row: int) -> list[int]:
        """Places in ``heads`` for one prompt, largest fall of the probability first; ties: the lower head."""
        falls_E = np.exp(self.zeroed_PE[row]) - np.exp(self.logprob_P[row])
        return [int(place) for place in np.argsort(falls_E, kind="stable")]

    def rows(self, row: int, arithmetic: Sequence[Head]) -> list[Row]:
        """One per head, by its fall."""
        before = float(self.logprob_P[row])
        found = []
        for place, number in enumerate(self.order(row)):
            after, (layer, head) = float(self.zeroed_PE[row, number]), self.heads[number]
            numbers = {"logprob": before, "logprob_zeroed": after}
            numbers |= {"probability": float(np.exp(before)), "probability_zeroed": float(np.exp(after))}
            named = {"stage": "head", "place": place + 1, "layer": layer, "unit": head}
            found.append({**named, **numbers, "arithmetic": (layer, head) in arithmetic})
        return found


def head_falls(anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], target_P: torch.Tensor) -> HeadFalls:
    """Every head of the model zeroed alone, at every position, and w scored."""
    shape = anatomy.shape
    first = [
        replace(prompt, scored=(replace(prompt.scored[0], token_id=target),))
        for prompt, target in zip(prompts, target_P.tolist(), strict=True)
    ]
    at_once = most_at_once(shape.n_heads)
    engine = build_engine(anatomy, first, edits_per_batch=at_once, edits_in_all=shape.n_layers * shape.n_heads)
    order = np.argsort(engine.answers.prompt_A)
    parts = []
    for layer in range(shape.n_layers):
        for start in range(0, shape.n_heads, at_once):
            heads = [Head(layer, head) for head in range(start, min(start + at_once, shape.n_heads))]
            value = Value.zero(anatomy, "head", layer)
            parts.append(engine.run([intervention([head], value) for head in heads]).logprob_EA)
    heads = [Head(layer, head) for layer in range(shape.n_layers) for head in range(shape.n_heads)]
    return HeadFalls(heads, engine.baseline().logprob_EA[0][order], np.concatenate(parts)[:, order].T)


# ---- deep neurons and prediction ----


@dataclass(frozen=True)
class Comparison:
    """Original against each prompt's first arithmetic head zeroed."""

    lens: NeuronLens
    graph: GraphReader
    tokens: TopTokens
    prompts: Sequence[TokenizedPrompt]
    heads: Sequence[Head]
    original: EndActivations
    zeroed: EndActivations
    target_P: torch.Tensor

    @staticmethod
    def of(
        lens: NeuronLens,
        tokens: TopTokens,
        prompts: Sequence[TokenizedPrompt],
        heads: Sequence[Head],
        target_P: torch.Tensor,
    ) -> "Comparison":
        """The passes; prompts with the same head share them, original and zeroed in the same batches."""
        anatomy = lens.anatomy
        places: list[int] = []
        originals, without = [], []
        for head in sorted(set(heads)):
            own = [place for place, other in enumerate(heads) if other == head]
            sentences = [prompts[place].input_ids[: prompts[place].end + 1] for place in own]
            originals.append(end_activations(anatomy, sentences))
            without.append(end_activations(anatomy, sentences, zeroed(anatomy, [head])))
            places += own
        order = torch.tensor(places).argsort()
        return Comparison(
            lens, GraphReader(anatomy), tokens, prompts, heads, _joined(originals, order), _joined(without, order),
            target_P,
        )  # fmt: skip

    def deep_neurons(self, top: int) -> list[list[Row]]:
        """Each prompt's neurons of largest change, in the head's layer and later; ties by (layer, neuron)."""
        scales = self.lens.frozen_scales(self.original)
        found: list[list[Row]] = [[] for _ in self.prompts]
        for layer in range(min(layer for layer, _ in self.heads), self.lens.anatomy.shape.n_layers):
            directions_KV = self.lens.directions(layer)
            before_PK, after_PK = (
                self.lens.layer(layer, side, scales, self.target_P, directions_KV).neurons_PK
                for side in (self.original, self.zeroed)
            )
            change_PK = before_PK - after_PK
            first = torch.sort(change_PK, dim=1, descending=True, stable=True).indices[:, :top].tolist()
            for row, numbers in enumerate(first):
                if layer < self.heads[row][0]:
                    continue
                for neuron in numbers:
                    found[row].append(
                        {
                            "layer": layer, "unit": neuron, "change": float(change_PK[row, neuron]),
                            "importance": float(before_PK[row, neuron]),
                            "importance_zeroed": float(after_PK[row, neuron]),
                            "coefficient": float(self.original.coefficients_PK[layer][row, neuron]),
                            "coefficient_zeroed": float(self.zeroed.coefficients_PK[layer][row, neuron]),
                        }
                    )  # fmt: skip
        ranked = [sorted(rows, key=lambda row: (-row["change"], row["layer"], row["unit"]))[:top] for rows in found]
        return [self._finished(rows, row) for row, rows in enumerate(ranked)]

    def _finished(self, rows: list[Row], row: int) -> list[Row]:
        signs_N1 = [[-1.0 if neuron["coefficient"] < 0 else 1.0] for neuron in rows]
        values_ND = self.graph.values([Neuron(neuron["layer"], neuron["unit"]) for neuron in rows])
        texts = self.tokens.of(values_ND * values_ND.new_tensor(signs_N1))
        layer, head = self.heads[row]
        via = {"via_layer": layer, "via_head": head}
        return [
            {"stage": "deep_neuron", "place": place + 1, **via, **neuron, "tokens": _text(text)}
            for place, (neuron, text) in enumerate(zip(rows, texts, strict=True))
        ]

    def prediction(self, tokenizer: PreTrainedTokenizerBase) -> list[list[Row]]:
        """w and the likeliest tokens of either side, by the original's rank."""
        before_PV, after_PV = (self.lens.logits(side).softmax(dim=-1) for side in (self.original, self.zeroed))
        count = min(SHOWN, before_PV.shape[1])
        found = []
        for row, (layer, head) in enumerate(self.heads):
            target = int(self.target_P[row])
            shown = {target, *before_PV[row].topk(count).indices.tolist(), *after_PV[row].topk(count).indices.tolist()}
            found.append(
                [
                    {
                        "stage": "prediction", "place": int((before_PV[row] > before_PV[row, token_id]).sum()) + 1,
                        "via_layer": layer, "via_head": head, "token_id": token_id,
                        "token": str(tokenizer.decode([token_id])), "target": token_id == target,
                        "probability": float(before_PV[row, token_id]),
                        "probability_zeroed": float(after_PV[row, token_id]),
                    }
                    for token_id in sorted(shown, key=lambda token_id: -float(before_PV[row, token_id]))
                ]
            )  # fmt: skip
        return found


def _joined(parts: Sequence[EndActivations], order_P: torch.Tensor) -> EndActivations:
    """Parts one after another, then put in order."""
    joined: dict[str, Any] = {}
    for field in fields(EndActivations):
        values = [getattr(part, field.name) for part in parts]
        if field.name == "final_PD":
            joined[field.name] = torch.cat(values)[order_P]
        else:
            joined[field.name] = [torch.cat(of_layer)[order_P] for of_layer in zip(*values, strict=True)]
    return EndActivations(**joined)


# ---- reads and shallow neurons ----


@dataclass(frozen=True)
class Reading:
    """What END reads, of all prompts; heads_PN: each prompt's arithmetic heads, as many for each."""

    reader: HeadReader
    tokens: TopTokens
    prompts: Sequence[TokenizedPrompt]
    typed: Sequence[TypedTokens]
    arithmetic: Sequence[Sequence[Head]]
    top: int
    target_P: torch.Tensor

    def rows(self, deep: Sequence[Sequence[Row]]) -> list[list[Row]]:
        """Stages attention and shallow_neuron of each prompt, given its deep neurons."""
        anatomy, shares = self.reader.anatomy, NeuronShares(self.reader)
        sentences = [prompt.input_ids[: prompt.end + 1] for prompt in self.prompts]
        found: list[list[Row]] = [[] for _ in self.prompts]
        for batch in batches_of(sentences, anatomy, READ_TOKENS[anatomy.device.type]):
            members = batch.rows.tolist()
            target_B = self.target_P[batch.rows]
            neurons = [[Neuron(row["layer"], row["unit"]) for row in deep[i]] for i in members]
            reads = self.reader.read(batch, target_B, neurons)
            from_neurons: list[dict[Head, list[float]]] = [{} for _ in members]
            for number in range(len(self.arithmetic[0])):
                heads = [self.arithmetic[i][number] for i in members]
                first, total_BT = shares.first(batch, reads, heads, self.top)
                for place, (i, head) in enumerate(zip(members, heads, strict=True)):
                    from_neurons[place][head] = total_BT[place].tolist()
                    exact = shares.exact(batch, reads, target_B, place, head, first[place])
                    found[i] += self._shallow(shares, i, head, first[place], exact)
            for i, rows in zip(members, self._attention(batch, reads, members, from_neurons), strict=True):
                found[i] += rows
        return found

    def _shallow(
        self, shares: NeuronShares, i: int, head: Head, first: Sequence[NeuronShare], exact: Sequence[float]
    ) -> list[Row]:
        if not first:
            return []
        moved_ND = shares.moved([Neuron(share.layer, share.neuron) for share in first], head)
        signs_N1 = [[-1.0 if share.coefficient < 0 else 1.0] for share in first]
        texts = self.tokens.of(moved_ND * moved_ND.new_tensor(signs_N1))
        return [
            {
                "stage": "shallow_neuron", "place": place + 1, "layer": share.layer, "unit": share.neuron,
                "via_layer": head[0], "via_head": head[1], **self._token(i, share.token),
                "coefficient": share.coefficient, "effect": share.effect, "deep_effect": share.deep,
                "exact_effect": removed, "tokens": _text(text),
            }
            for place, (share, removed, text) in enumerate(zip(first, exact, texts, strict=True))
        ]  # fmt: skip

    def _attention(
        self, batch: Batch, reads: HeadReads, members: Sequence[int], from_neurons: Sequence[dict[Head, list[float]]]
    ) -> list[list[Row]]:
        """Per prompt: the first reads of all heads and tokens, and every token of the arithmetic heads."""
        layers = self.reader.layers
        answer_BLHT, deep_BLHT = (
            torch.stack([self.reader.effects(reads, layer, goal) for layer in layers], dim=1).cpu() for goal in GOALS
        )
        weight_BLHT = torch.stack(reads.weights_BHT, dim=1).cpu()
        found = []
        for place, i in enumerate(members):
            length = int(batch.ends[place]) + 1
            effect_LHT = answer_BLHT[place, ..., :length]
            order = torch.sort(effect_LHT.flatten(), descending=True, stable=True).indices.tolist()
            rows = []
            for rank, flat in enumerate(order):
                layer, head, token = (int(index) for index in np.unravel_index(flat, effect_LHT.shape))
                moved = from_neurons[place].get(Head(layer, head))
                if rank >= self.top and moved is None:
                    continue
                at = (place, layer, head, token)
                rows.append(
                    {
                        "stage": "attention", "place": rank + 1, "layer": layer, "unit": head, **self._token(i, token),
                        "weight": float(weight_BLHT[at]), "effect": float(answer_BLHT[at]),
                        "deep_effect": float(deep_BLHT[at]), "arithmetic": moved is not None,
                        "from_neurons": None if moved is None else moved[token],
                    }
                )  # fmt: skip
            found.append(rows)
        return found

    def _token(self, i: int, token: int) -> Row:
        """Which token of prompt ``i``, as text and by its kind."""
        token_id = self.prompts[i].input_ids[token]
        text = str(self.tokens.tokenizer.decode([token_id]))
        return {"position": token, "token_id": token_id, "token": text, "token_type": self.typed[i].types[token]}


def _text(tokens: Sequence[str]) -> str:
    return json.dumps(list(tokens), ensure_ascii=False)
