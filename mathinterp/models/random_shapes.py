"""Models with random weights, for timing, planning and compiling only: their answers mean nothing.

Knows published sizes, a tokenizer that cuts arithmetic prompts the way Llama-2's does, and how to stand in for a model
with few layers of its kind; knows nothing about files.
"""

import contextlib
import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from mathinterp.errors import UserError, did_you_mean
from mathinterp.gates import MOST_SEED, shortened, whole
from mathinterp.models.families import family_of
from mathinterp.prompts.number_words import TENS, UNITS
from mathinterp.prompts.templates import PAPER_A, PAPER_B

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def _llama_like(
    model_type: str, width: int, neurons: int, layers: int, heads: int, groups: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    """Config fields of the families that use Llama's names for them."""
    return {
        "model_type": model_type,
        "hidden_size": width,
        "intermediate_size": neurons,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        **more,
    }


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


# fmt: off
SHAPES: dict[str, dict[str, Any]] = {
    "llama-tiny": _llama_like("llama", 64, 128, 4, 4, 2, 1024),
    "smollm2-135m": _llama_like("llama", 576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True,
                                rope_parameters=_rope(1e5)),
    "llama-2-7b": _llama_like("llama", 4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": _llama_like("llama", 5120, 13824, 40, 40, 40, 32000),
    "llama-2-70b": _llama_like("llama", 8192, 28672, 80, 64, 8, 32000),
    "llama-3-8b": _llama_like("llama", 4096, 14336, 32, 32, 8, 128256, rope_parameters=_rope(5e5)),
    "mistral-7b": _llama_like("mistral", 4096, 14336, 32, 32, 8, 32000, sliding_window=4096),
    "qwen2.5-7b": _llama_like("qwen2", 3584, 18944, 28, 28, 4, 152064, rope_parameters=_rope(1e6)),
    "gemma-2-9b": _llama_like("gemma2", 3584, 14336, 42, 16, 8, 256000, head_dim=256),
    "gpt-j-6b": {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64,
                 "vocab_size": 50400},
    "pythia-6.9b": {"model_type": "gpt_neox", "hidden_size": 4096, "intermediate_size": 16384,
                    "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 50432},
}
# fmt: on
BUILT_BY_LAYERS = {"llama-2-70b"}  # each from a seed of its own, because no card holds them all


def parse_random(name: str) -> tuple[str, int]:
    """``random:<shape>`` or ``random:<shape>:<seed>`` -> (shape, seed); the seed is 0 when not given.

    Raises UserError for an unknown shape or a seed that is not a number.
    """
    _, shape, seed = [*name.split(":"), "0"][:3]
    if shape not in SHAPES:
        likely = did_you_mean(shape, SHAPES)
        raise UserError(
            f"model '{shortened(name)}': no shape '{shortened(shape)}' is known (known: {', '.join(SHAPES)}).{likely}"
        )
    try:
        if name.count(":") <= 2:
            return shape, whole(seed, most=MOST_SEED)
    except ValueError:
        pass
    raise UserError(f"model '{shortened(name)}': write random:{shape} or random:{shape}:SEED with a whole number")


def random_config(shape: str) -> PreTrainedConfig:
    """The config of a published shape."""
    fields = dict(SHAPES[shape])
    # "<s>" is 1, as in Llama-2: the tokenizer below is shared by all shapes.
    return AutoConfig.for_model(fields.pop("model_type"), bos_token_id=1, eos_token_id=2, pad_token_id=None, **fields)


def random_fingerprint(shape: str, seed: int) -> str:
    """16 hex digits that stand for config, seed and tokenizer (the weights themselves also depend on the device)."""
    content = json.dumps({"random": SHAPES[shape], "seed": seed, "words": tokenizer_words()}, sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def random_model(
    shape: str, seed: int, cards: Sequence[torch.device], dtype: torch.dtype,
    made: "Callable[[nn.Module], object]" = lambda layer: None,
) -> "PreTrainedModel":  # fmt: skip
    """Build the model directly on its device in ``dtype``, or its layers on several (split.py).

    Its weights do not depend on the number of cards. The generators' states are left as they were. ``made`` gets each
    layer of a shape that no card holds before the next one is built.
    """
    from mathinterp.models.split import dealt, layers_of, spread

    config = random_config(shape)
    if shape not in BUILT_BY_LAYERS:
        model = build_random(config, seed, cards[0], dtype)
        spread(list(layers_of(model)), cards)
        return model
    small = copy.deepcopy(config)
    small.num_hidden_layers = 1
    model, layers = build_random(small, seed, cards[0], dtype), []
    kind = type(layers_of(model)[0])
    for number, card in enumerate(dealt(config.num_hidden_layers, len(cards))):
        with _drawn(seed + 1 + number, cards[card], dtype):
            layers.append(kind(model.config, number))
            layers[-1].apply(model._init_weights)
        made(layers[-1])
    layers_of(model)[0] = layers[0]
    layers_of(model).extend(layers[1:])
    model.config.num_hidden_layers = len(layers)
    return model


@contextlib.contextmanager
def _drawn(seed: int, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Within the block parameters are made on ``device`` in ``dtype``, from ``seed``."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def build_random(config: PreTrainedConfig, seed: int, device: torch.device, dtype: torch.dtype) -> "PreTrainedModel":
    """A model of ``config`` with its family's attention backend, freshly initialised on ``device``."""
    backend = family_of(config.model_type).attention_backend
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=backend)
    return model


def without_weights(config: PreTrainedConfig) -> "PreTrainedModel":
    """A model of ``config`` with its family's attention backend on the meta device: names and shapes alone."""
    return build_random(config, 0, torch.device("meta"), torch.float32)


def stand_in_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of ``config`` with only as many layers as show every kind: the first, each kind between, the last.

    One layer between does for all where the config names no kinds (``layer_types``, as Gemma-2's windows in turn, or
    ``no_rope_layers``, as SmolLM3's layers without positions).
    """
    small = copy.deepcopy(config)
    last = config.num_hidden_layers - 1
    lists = {name: found for name in ("layer_types", "no_rope_layers") if (found := getattr(config, name, None))}
    kinds = list(zip(*lists.values(), strict=False)) or [()] * (last + 1)
    between = [kinds.index(kind, 1) for kind in dict.fromkeys(kinds[1:last])]
    if last + 1 > len(between) + 2:
        small.num_hidden_layers = len(between) + 2
        for name, of_layer in lists.items():
            setattr(small, name, [of_layer[layer] for layer in (0, *between, last)])
    return small


def tokenizer_words() -> list[str]:
    """The words of the arithmetic templates, of their neutral counterparts and of written numbers, and the signs."""
    texts = [template.text for sets in (PAPER_A, PAPER_B) for templates in sets.values() for template in templates]
    found = re.findall(r"[A-Za-z]+", " ".join(re.sub(r"{[ab]}", " ", text) for text in texts))
    neutral = json.loads((resources.files("mathinterp.prompts") / "neutral_words.json").read_text(encoding="utf-8"))
    words = [word for lists in neutral.values() for candidates in lists.values() for word in candidates]
    return list(dict.fromkeys([*found, *words, *UNITS, *TENS, "hundred", "thousand", *"+-*/=?:.,"]))


def llama_like_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer that cuts the arithmetic prompts into as many tokens as Llama-2's does.

    "Q: What is 15 plus 32?" -> <s> ▁Q : ▁What ▁is ▁ 1 5 ▁plus ▁ 3 2 ?  Digits are single, "▁" is a token of its own
    before them, and a word or sign takes the space before it along. Words outside the arithmetic prompts fall into
    characters and bytes. Filler entries take the place of the rest of ``vocabulary``.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *map(chr, range(33, 127))]
    words = tokenizer_words()
    tokens += sorted(set("".join(words)))
    merges = []
    # Every merge grows a known beginning by one letter, those that start with "▁" go first, so the longest known
    # beginning of a word always wins. Units also stand without "▁": "thirty-four" is ▁thirty - four.
    for word in [*("▁" + word for word in words), *UNITS]:
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            tokens.append(word[: end + 1])
    tokens = list(dict.fromkeys(tokens))
    tokens += [f"<filler{i}>" for i in range(vocabulary - len(tokens))]
    assert len(tokens) == vocabulary, f"{len(tokens)} tokens do not fit a vocabulary of {vocabulary}"
    bpe = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=list(dict.fromkeys(merges)),
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
