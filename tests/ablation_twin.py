"""A slow twin of head and MLP ablation: one prompt per forward pass, plain hooks."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache

import numpy as np
import pyarrow as pa
import torch
from torch import nn
from transformers import PreTrainedModel

from mathinterp.engine.hooks import edited_input
from mathinterp.experiments.ablation import Ablation
from mathinterp.experiments.base import Subject
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head
from mathinterp.prompts.prompt import TokenizedPrompt
from tests import tiny
from tests.made_prompts import PROMPTS

D_HEAD, N_HEADS, N_LAYERS = 8, 4, 3


STORED = {"rtol": 1e-6, "atol": 1e-6}  # rows are float32


Row = tuple[bool, float, float, int]  # correct, logprob, logit, predicted_id


Rows = dict[tuple[str, int], Row]  # (prompt_id, position) -> row


Hook = Callable[[torch.Tensor], torch.Tensor]


tiny_model = cache(tiny.tiny_model)  # no test here changes weights


def site_of(model: PreTrainedModel, site: str, layer: int) -> nn.Module:
    if model.config.model_type == "gpt2":
        block = model.transformer.h[layer]
        return block.attn.c_proj if site == "head" else block.mlp
    block = model.model.layers[layer]
    return block.self_attn.o_proj if site == "head" else block.mlp


def forward(model: PreTrainedModel, ids: tuple[int, ...], site: str, layer: int, hook: Hook) -> torch.Tensor:
    """Logits T V of one prompt whose activation 1 T Z at the site goes through ``hook``."""
    module = site_of(model, site, layer)
    if site == "head":
        handle = module.register_forward_pre_hook(lambda _, args: (hook(args[0]),))
    else:
        handle = module.register_forward_hook(lambda _, args, output: hook(output))
    try:
        return model(torch.tensor([ids])).logits[0]
    finally:
        handle.remove()


def activations(model: PreTrainedModel, ids: tuple[int, ...], site: str, layer: int) -> torch.Tensor:
    kept: list[torch.Tensor] = []

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept.append(value[0].clone())
        return value

    forward(model, ids, site, layer, keep)
    return kept[0]


def rows_of(logits: torch.Tensor, prompt: TokenizedPrompt) -> Rows:
    rows: Rows = {}
    for position, token in enumerate(prompt.scored):
        at = logits[token.index - 1]
        best = int(at.argmax())
        logprob = float(at[token.token_id] - at.logsumexp(0))
        rows[prompt.prompt.prompt_id, position] = (best == token.token_id, logprob, float(at[token.token_id]), best)
    return rows


def counterfactual_fed(prompt: TokenizedPrompt) -> tuple[int, ...]:
    assert prompt.counterfactual_ids is not None
    return prompt.counterfactual_ids[: len(prompt.fed)]


class Twin:
    """Slow rows of one ablation of one site; activations of X_c are computed once."""

    def __init__(self, model: PreTrainedModel, site: str, layer: int, ablation: str, positions: str):
        self.model, self.site, self.layer, self.positions = model, site, layer, positions
        neutral = [activations(model, counterfactual_fed(p), site, layer) for p in PROMPTS]
        kinds = [(p.prompt.operation, p.prompt.template) for p in PROMPTS]
        self.new: list[torch.Tensor] = []  # T Z for each prompt
        for prompt, own, kind in zip(PROMPTS, neutral, kinds, strict=True):
            if ablation == "zero":
                value = torch.zeros_like(own)
                if site == "mlp" and model.config.model_type == "gpt2":
                    value = value + model.transformer.h[layer].mlp.c_proj.bias
            elif ablation == "resample":
                value = own
            elif positions == "all":
                value = torch.cat(neutral).mean(0).expand_as(own)
            else:
                ends = [n[p.end] for n, p, k in zip(neutral, PROMPTS, kinds, strict=True) if k == kind]
                value = torch.stack(ends).mean(0).expand_as(own)
            assert len(value) == len(prompt.fed)
            self.new.append(value)

    def rows(self, head: int | None) -> Rows:
        rows: Rows = {}
        columns = slice(None) if head is None else slice(head * D_HEAD, (head + 1) * D_HEAD)
        for prompt, new in zip(PROMPTS, self.new, strict=True):
            tokens = slice(None) if self.positions == "all" else slice(prompt.end, prompt.end + 1)

            def put(value: torch.Tensor, new: torch.Tensor = new, tokens: slice = tokens) -> torch.Tensor:
                value = value.clone()
                value[0, tokens, columns] = new[tokens, columns]
                return value

            rows |= rows_of(forward(self.model, prompt.fed, self.site, self.layer, put), prompt)
        return rows


@cache
def twin_rows(family: str, site: str, layer: int, head: int | None, ablation: str, positions: str) -> Rows:
    return Twin(tiny_model(family), site, layer, ablation, positions).rows(head)


def subject(model: PreTrainedModel, prompts: list[TokenizedPrompt] = PROMPTS, max_tokens: int | None = None) -> Subject:
    return Subject(Anatomy(model), prompts, max_tokens)


def run_all(scan: Ablation, on: Subject) -> dict[str, pa.Table]:
    """Table name -> rows of all its shards."""
    state = scan.prepare(on)
    parts: dict[str, list[pa.Table]] = {}
    for shard in scan.shards(on.anatomy.shape, on.prompts):
        table = scan.run(state, shard)
        assert table.schema.equals(scan.tables[shard.table].schema)
        parts.setdefault(shard.table, []).append(table)
    return {name: pa.concat_tables(tables) for name, tables in parts.items()}


def rows_where(table: pa.Table, **ids: int) -> Rows:
    rows: Rows = {}
    for r in table.to_pylist():
        if all(r[name] == value for name, value in ids.items()):
            key = (r["prompt_id"], r["position"])
            assert key not in rows, f"{key} is there twice"
            rows[key] = (r["correct"], r["logprob"], r["logit"], r["predicted_id"])
    return rows


def assert_rows(found: Rows, expected: Rows) -> None:
    assert list(found) == list(expected)
    for key, row in expected.items():
        assert found[key][0] == row[0], key
        assert found[key][3] == row[3], key
        np.testing.assert_allclose(found[key][1:3], row[1:3], **STORED, err_msg=str(key))


def slow_rows(family: str, heads: Sequence[Head], ablation: str, positions: str) -> Rows:
    """One prompt a forward pass, plain hooks in every edited layer, the new values from the twin of the head scan."""
    model, rows = tiny_model(family), {}
    twins = {layer: Twin(model, "head", layer, ablation, positions) for layer, _ in heads}
    for number, item in enumerate(PROMPTS):
        with ExitStack() as hooks:
            for layer, head in heads:
                new = twins[layer].new[number]
                tokens = slice(None) if positions == "all" else slice(item.end, item.end + 1)

                def put(value: torch.Tensor, new=new, tokens=tokens, head=head) -> torch.Tensor:
                    value = value.clone()
                    columns = slice(head * D_HEAD, (head + 1) * D_HEAD)
                    value[0, tokens, columns] = new[tokens, columns]
                    return value

                hooks.enter_context(edited_input(site_of(model, "head", layer), put))
            logits = model(torch.tensor([item.fed])).logits[0]
        rows |= rows_of(logits, item)
    return rows
