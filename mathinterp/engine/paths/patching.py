"""Activation patching, freeze="none": a node takes its X_c output and everything after it is computed anew.

- At END only (``EndPatching``): no token before END changes, so what END attends to there is cached once per pair, as
  in generation, and each (node, pair) is one END row that runs whole layers. Pairs of one length run together, so that
  rows need neither padding nor masks of their own.
- At every token (``EverywherePatching``): full forward passes with hooks, one node a pass. The slow way; with frozen
  heads it would change nothing, since then no token but END reaches the logits.

Shape legend: P pair, N node of one layer, R row (node, pair), B pair of one batch, T token, D model width.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import DynamicCache

from mathinterp.engine.hooks import caught_input, caught_site, edited_site
from mathinterp.engine.intervention import site_of
from mathinterp.engine.layers import Call, recorded
from mathinterp.engine.pairs import Batch, CleanPairs, Ends, Pairs, batches_of
from mathinterp.engine.paths.frozen import Measures, PathEngine, Scorer
from mathinterp.engine.paths.nodes import Node
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.positions import read_as
from mathinterp.models.units import Head


class ByLength:
    """Pairs of each length in an engine of their own; methods as in PathEngine.

    Args:
        make: the engine of some of the pairs.
    """

    def __init__(self, anatomy: Anatomy, clean: CleanPairs, make: Callable[[CleanPairs], PathEngine]):
        lengths = np.array([len(ids) for ids in clean.pairs.original])
        members = [np.flatnonzero(lengths == length) for length in np.unique(lengths)]
        self.engines = [make(clean.chosen(at)) for at in members]
        self.gold_P = torch.from_numpy(clean.pairs.gold_P).to(anatomy.device)
        self._place_P = torch.from_numpy(np.argsort(np.concatenate(members))).to(anatomy.device)
        self.baseline = self._measures([engine.baseline for engine in self.engines])

    def patched(self, nodes: Sequence[Node], freeze: str) -> Measures:
        """Measures under each node by itself, all of one layer: N P."""
        return self._measures([engine.patched(nodes, freeze) for engine in self.engines])

    def deviation(self) -> float:
        """See PathEngine."""
        return max(engine.deviation() for engine in self.engines)

    def noise_floor(self) -> float:
        """See PathEngine."""
        return max(engine.noise_floor() for engine in self.engines)

    def in_order(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Numbers of the pairs of each length (... P) side by side, in the order of the pairs."""
        return torch.cat(list(parts), dim=-1)[..., self._place_P]

    def _measures(self, parts: Sequence[Measures]) -> Measures:
        return Measures(*(self.in_order(columns) for columns in zip(*(part.columns for part in parts), strict=True)))


class EndPatching(ByLength):
    """Every node patched at END, the later layers' attention at END computed anew; freeze "none"."""

    def __init__(self, anatomy: Anatomy, clean: CleanPairs, *, max_rows: int | None = None):
        super().__init__(anatomy, clean, partial(OneLength, anatomy, max_rows=max_rows))


class OneLength(PathEngine):
    """A PathEngine whose rows run whole layers: END attends to its pair's cached tokens and to itself."""

    freezes: ClassVar[tuple[str, ...]] = ("none",)

    @torch.no_grad()
    def __init__(self, anatomy: Anatomy, clean: CleanPairs, *, max_rows: int | None = None):
        super().__init__(anatomy, clean, max_rows=max_rows, compiled=False)
        self.prefix = Prefix(anatomy, clean.pairs.original)
        whole = [
            self.scorer(self.carry(0, self.original.embedded_PD[pair_R], pair_R), self.gold_P[pair_R])[:kept]
            for pair_R, kept in self._batches(1)
        ]
        self.baseline = Measures.joined(whole)

    def carry(self, first: int, hidden_RD: torch.Tensor, pair_R: torch.Tensor, stop: int | None = None) -> torch.Tensor:
        """Rows that enter layer ``first``, taken through later layers whole, attention computed anew: R D."""
        cache = RowCache(self.prefix.read, pair_R)
        memo: dict[int, Any] = {}
        layers = range(first, self.anatomy.shape.n_layers if stop is None else stop)
        for layer in layers:
            call = self.prefix.call(self.prefix.layer_calls[layer], cache, memo)
            hidden_RD = call(self.anatomy.layers[layer], hidden_RD[:, None])[:, 0]
        assert cache.reads == len(layers), "a layer did not read the cached tokens"
        return hidden_RD


class Prefix:
    """What END attends to in sentences of one length: keys and values of all tokens before it, computed once.

    The arguments that END's layers and attention modules are called with do not depend on the sentence: they are
    recorded on the first one.
    """

    def __init__(self, anatomy: Anatomy, sentences: Sequence[tuple[int, ...]]):
        self.anatomy = anatomy
        self._length = len(sentences[0])
        token_ids = torch.tensor(sentences, device=anatomy.device)
        self.read: list[tuple[torch.Tensor, torch.Tensor]] = [
            (layer.keys, layer.values)  # type: ignore[union-attr, misc]
            for layer in self._filled(token_ids).layers
        ]
        self._first = self._filled(token_ids[:1])
        modules = [anatomy.attention(layer) for layer in range(anatomy.shape.n_layers)]
        with recorded(list(anatomy.layers)) as self.layer_calls, recorded(modules) as self.attention_calls:
            self._continue(token_ids[:1, -1:], self._first)
        assert len(self.layer_calls) == len(self.attention_calls) == len(modules), "a decoder layer did not run"

    def call(self, recorded: Call, cache: "RowCache", memo: dict[int, Any]) -> Call:
        """A recorded call for the rows of ``cache``; ``memo`` keeps what calls of one batch share."""
        call = recorded.repeated(1, len(cache.pair_R), memo)
        args = tuple(cache if value is self._first else value for value in call.args)
        return Call(args, {name: cache if value is self._first else value for name, value in call.kwargs.items()})

    def _filled(self, token_ids_PT: torch.Tensor) -> DynamicCache:
        cache = DynamicCache(config=self.anatomy.model.config)
        self._continue(token_ids_PT[:, :-1], cache)
        return cache

    @torch.no_grad()
    def _continue(self, token_ids: torch.Tensor, cache: DynamicCache) -> None:
        """Run the decoder on tokens that follow those in ``cache``, and add them to it."""
        decoder = self.anatomy.decoder
        known = inspect.signature(decoder.forward).parameters
        name = "cache" if "cache" in known else "past_key_values"  # renamed in transformers 5
        with read_as(decoder, self._length):  # END and what it attends to are of one sentence
            decoder(input_ids=token_ids, use_cache=True, **{name: cache})


class RowCache:
    """The tokens before END, for rows that each belong to a pair; what attention asks a cache for."""

    def __init__(self, prefix: Sequence[tuple[torch.Tensor, torch.Tensor]], pair_R: torch.Tensor):
        self.prefix, self.pair_R, self.reads = prefix, pair_R, 0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the cached tokens (the window's, in a windowed layer) and of END: R G T d_head each."""
        self.reads += 1
        before, pair_R = self.prefix[layer_idx], self.pair_R.to(keys.device)
        return torch.cat([before[0][pair_R], keys], 2), torch.cat([before[1][pair_R], values], 2)


class EverywherePatching:
    """Every node patched at all tokens of X_r, by full forward passes with hooks; methods as in PathEngine."""

    def __init__(self, anatomy: Anatomy, pairs: Pairs, original: Ends, max_tokens: int | None = None):
        self.anatomy, self.pairs, self.max_tokens = anatomy, pairs, max_tokens
        self.scorer = Scorer(anatomy)
        self.gold_P = torch.from_numpy(pairs.gold_P).to(anatomy.device)
        with torch.no_grad():
            self.baseline = self.scorer(original.final_PD, self.gold_P)

    @torch.no_grad()
    def patched(self, nodes: Sequence[Node], freeze: str = "none") -> Measures:
        """Measures under each node by itself, all of one layer: N P."""
        assert freeze == "none", "with frozen heads, END alone reaches the logits"
        finals_NPD = self.baseline.logit.new_empty(
            len(nodes), len(self.pairs), self.anatomy.shape.d_model, dtype=self.anatomy.dtype
        )
        originals, others = (
            batches_of(sentences, self.anatomy, self.max_tokens)
            for sentences in (self.pairs.original, self.pairs.counterfactual)
        )
        for original, other in zip(originals, others, strict=True):  # as long as each other: in the same batches
            assert torch.equal(original.rows, other.rows)
            for final_PD, node in zip(finals_NPD, nodes, strict=True):
                with self._patch(node, other), caught_input(self.anatomy.final_norm) as caught:
                    original.forward(self.anatomy)
                final_PD[original.rows] = original.at_end(caught[0])
        return Measures.stacked([self.scorer(final_PD, self.gold_P) for final_PD in finals_NPD])

    @contextmanager
    def _patch(self, node: Node, other: Batch) -> Iterator[None]:
        """Within the block, the node gives what it gives on X_c, at every token."""
        with caught_site(self.anatomy, site_of(node), node.layer) as caught:
            other.forward(self.anatomy)
        columns = self.anatomy.head_slice(node.head) if isinstance(node, Head) else slice(None)

        def put(clean_BTX: torch.Tensor) -> torch.Tensor:
            clean_BTX = clean_BTX.clone()
            clean_BTX[..., columns] = caught[0][..., columns]
            return clean_BTX

        with edited_site(self.anatomy, site_of(node), node.layer, put):
            yield

    def deviation(self) -> float:
        """The baseline is the clean forward pass itself."""
        return 0.0

    def noise_floor(self) -> float:
        """Passes with and without hooks have one shape: nothing differs."""
        return 0.0
