"""A Llama whose weights are written by hand: the parts from which the models of this folder are made.

The residual stream has named features, each some coordinates of its own. The feature ``one`` is sqrt(D) at every token:
with k other features of size 1 an RMSNorm divides by sqrt(1 + k / D), near 1, and a threshold that is a multiple of
``one`` scales as what it is compared with. All that is not written is a decoy: a random head or MLP, which reads all
features and writes into ``free``, that only decoys read, and a little into all others. Scores of written heads are so
far apart that their softmax is exactly 0 and 1 in float32 and float64, and gates so large that SiLU is ReLU.

Shape legend: D model width, Z width of a head.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from mathinterp.models.units import Head

WIDTH, HEADS, LAYERS = 64, 4, 4
Z = WIDTH // HEADS
ONE = math.sqrt(WIDTH)
SHARP = 2000.0  # queries of written heads: the scores of neighbouring tokens lie at least 229 apart
STEEP = 400.0  # gates of written neurons: off, SiLU is 0; on, its argument
LOUD = 12.0  # logit of a result of size 1
MIXING, LEAK = 0.15, 0.02  # of decoys: what they read and write into ``free``, and what they write elsewhere
DECOYS = 24  # neurons beyond the written ones; however many are decoys, an MLP of them writes as much as so many
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
Term = tuple[str, int]  # a coordinate of a feature


class Written:
    """A model in the making, in float64.

    Args:
        words: the vocabulary.
        features: their names and widths; ``one`` and ``free``, the rest of the width, come by themselves.
        neurons: that are written, at most, in one MLP.
        seed: of the decoys.
    """

    def __init__(self, words: Sequence[str], features: Mapping[str, int], neurons: int, seed: int):
        self.vocabulary = {word: i for i, word in enumerate((*SPECIAL, *words))}
        widths = {"one": 1, **features}
        widths["free"] = WIDTH - sum(widths.values())
        assert widths["free"] > 0, "the features do not fit the width"
        self.features, start = dict[str, slice](), 0
        for name, width in widths.items():
            self.features[name] = slice(start, start + width)
            start += width
        config = LlamaConfig(
            vocab_size=len(self.vocabulary), hidden_size=WIDTH, intermediate_size=neurons + DECOYS,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
            max_position_embeddings=64, tie_word_embeddings=False,
            bos_token_id=1, eos_token_id=2, pad_token_id=3,
        )  # fmt: skip
        self.model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        self.model.eval().requires_grad_(False)
        self.random = torch.Generator().manual_seed(seed)
        self._decoys(math.sqrt(DECOYS / (neurons + DECOYS)))
        self.model.model.embed_tokens.weight[:, self.features["one"]] = ONE

    def coordinate(self, term: Term) -> int:
        """The index of a feature's coordinate in the residual stream."""
        return int(self.features[term[0]].start) + term[1]

    def embed(self, word: str, terms: Mapping[Term, float]) -> None:
        """What the embedding of a word says besides ``one``."""
        for term, value in terms.items():
            self.model.model.embed_tokens.weight[self.vocabulary[word], self.coordinate(term)] = value

    def move(self, head: Head, back: int, read: str, write: str = "free") -> None:
        """The head copies a feature of the token ``back`` places before its own, and does nothing else.

        Into ``free``, it is a decoy whose output changes from prompt to prompt as that of a head of the circuit.
        """
        self.clear(head)
        self.attend(head, back)
        self.copy(head, read, write)

    def clear(self, head: Head) -> None:
        """The head does nothing."""
        for part in self._of(head):
            part.zero_()

    def attend(self, head: Head, back: int, when: Term | None = None) -> None:
        """The head attends to the token ``back`` places before its own; with ``when``, as far as that feature is 1.

        Rotary embeddings turn the first pair of a query by 1 radian a token: scores are SHARP cos(distance - back).
        """
        query, key, _, _ = self._of(head)
        read, size = (self.features["one"].start, ONE) if when is None else (self.coordinate(when), 1.0)
        query[0, read] = SHARP * math.cos(back) / size
        query[Z // 2, read] = -SHARP * math.sin(back) / size
        key[0, self.features["one"]] = 1 / ONE

    def rest(self, head: Head, at: Term, while_: str) -> None:
        """The head attends to the token with the feature ``at`` instead, as long as ``while_`` sums to 1.

        The last pair of queries and keys, which rotary embeddings hardly turn: 3 SHARP (2 sum - 1) for that token.
        """
        query, key, _, _ = self._of(head)
        query[Z // 2 - 1, self.features[while_]] = 6 * SHARP
        query[Z // 2 - 1, self.features["one"]] = -3 * SHARP / ONE
        key[Z // 2 - 1, self.coordinate(at)] = 1.0

    def copy(self, head: Head, read: str, write: str) -> None:
        """The head copies a feature, coordinate by coordinate, of the token it attends to."""
        _, _, value, output = self._of(head)
        source, target = self.features[read], self.features[write]
        for i in range(source.stop - source.start):
            value[i, source.start + i] = 1.0
            output[target.start + i, i] = 1.0

    def neuron(
        self, layer: int, neuron: int, gate: Mapping[Term, float], up: Mapping[Term, float], down: Mapping[Term, float]
    ) -> None:
        """One SwiGLU neuron: adds silu(gate . x) (up . x) times ``down``; a term of ``one`` is of size 1."""
        mlp = self.model.model.layers[layer].mlp
        for row, terms in ((mlp.gate_proj.weight[neuron], gate), (mlp.up_proj.weight[neuron], up)):
            row.zero_()
            for term, weight in terms.items():
                row[self.coordinate(term)] = weight / (ONE if term[0] == "one" else 1)
        mlp.down_proj.weight[:, neuron] = 0
        for term, weight in down.items():
            mlp.down_proj.weight[self.coordinate(term), neuron] = weight

    def answer(self, word: str, term: Term) -> None:
        """The word's logit is LOUD times a coordinate; words that answer stand above all others."""
        row = self.model.lm_head.weight[self.vocabulary[word]]
        row[self.coordinate(term)] = LOUD
        row[self.features["one"]] = LOUD / ONE

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token a word; BOS is added."""
        tokenizer = Tokenizer(models.WordLevel(self.vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
        names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)

    def _of(self, head: Head) -> tuple[torch.Tensor, ...]:
        """Views of a head's query, key and value rows (Z D) and output columns (D Z)."""
        attention, own = self.model.model.layers[head.layer].self_attn, slice(head.head * Z, (head.head + 1) * Z)
        rows = [getattr(attention, f"{name}_proj").weight[own] for name in "qkv"]
        return (*rows, attention.o_proj.weight[:, own])

    def _decoys(self, of_neurons: float) -> None:
        """Every head and MLP random, neurons' sizes times a factor; embeddings and unembedding empty, norms plain."""
        for name, parameter in self.model.named_parameters():
            if "norm" in name:
                continue
            drawn = torch.randn(parameter.shape, generator=self.random, dtype=torch.float64)
            if "embed_tokens" in name or "lm_head" in name:
                parameter.zero_()
            elif "o_proj" in name or "down_proj" in name:
                size = torch.full((WIDTH, 1), LEAK, dtype=torch.float64)
                size[self.features["free"]] = MIXING
                size[self.features["one"]] = 0
                parameter.copy_(drawn * size * (of_neurons if "down_proj" in name else 1))
            else:
                parameter.copy_(drawn * MIXING)
                parameter[:, self.features["one"]] = 0
