"""Small tokenizers of the kinds that language models use, built on the spot.

Knows how each kind treats spaces and digits; knows nothing about prompts beyond the words it needs.
"""

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"


def word_level(texts: Sequence[str], *, adds_bos: bool = True, adds_eos: bool = False) -> PreTrainedTokenizerFast:
    """Words, single digits and signs; white space is dropped. Knows the words of ``texts`` and all digits."""
    pieces = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Whitespace(),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(r"[^\w\s]"), "isolated"),
        ]
    )
    words = {piece for text in texts for piece, _ in pieces.pre_tokenize_str(text)}
    vocabulary = {
        token: i for i, token in enumerate([UNKNOWN, BOS, EOS, *"0123456789", *sorted(words - set("0123456789"))])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pieces
    _add_specials(tokenizer, BOS if adds_bos else "", EOS if adds_eos else "")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN)


def llama_like(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Llama-2's kind: "▁" starts a word, a digit is a token, so the space before a number is one too; byte fallback."""
    prepare = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = sorted({word for text in texts for word in text.split() if word.isalpha()})
    merges: list[tuple[str, str]] = []
    symbols = [
        "▁",
        *"0123456789",
        *sorted({c for text in texts for c in text if not c.isspace() and not c.isdecimal()}),
    ]
    for word in words:  # a chain of merges spells each word out: ▁ p, ▁p l, ▁pl u, ▁plu s
        prefix = "▁"
        for character in word:
            if (prefix, character) not in merges:
                merges.append((prefix, character))
            prefix += character
    entries = [UNKNOWN, BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *symbols, *(a + b for a, b in merges)]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(entries))}
    model = models.BPE(vocabulary, merges, unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = prepare
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_specials(tokenizer, BOS, "")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN)


def gpt2_like(texts: Sequence[str], vocabulary_size: int = 900) -> PreTrainedTokenizerFast:
    """GPT-2's kind: byte-level BPE learned from ``texts``; " 47" is one token; adds no BOS and knows every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>"
    )


def _add_specials(tokenizer: Tokenizer, before: str, after: str) -> None:
    specials = [(token, tokenizer.token_to_id(token)) for token in (before, after) if token]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{before} $A {after}".strip(), special_tokens=specials
    )
