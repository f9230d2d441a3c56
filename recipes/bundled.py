"""The bundled arithmetic model: its tokenizer and its shape.

Knows the words of the prompt sets and the Llama configuration; knows nothing about training or evaluation.
"""

import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, PreTrainedTokenizerFast

from mathinterp.prompts.number_words import TENS, UNITS
from mathinterp.prompts.pairs import NEUTRAL_WORDS
from mathinterp.prompts.templates import OPERATIONS
from recipes.examples import UNKNOWN, templates_of

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL_TOKENS = (PAD, BOS, EOS, UNK)
PIECE = r"\d|\p{L}+|[^\s\p{L}\d]"  # a digit, a word, or any other single character
PUNCTUATION = [*"+-*/=?:.,;()<>|&~%$'\"!−×÷«≈"]
CONTEXT_LENGTH = 256


def vocabulary() -> list[str]:
    """Every token of the bundled model in id order: special tokens, digits, signs, words.

    The words are those of all templates, number words and neutral words, and the answer "unknown".
    """
    sentences = [UNKNOWN, "hundred thousand", *UNITS, *TENS]
    for operation in OPERATIONS:
        sentences += [template.fill("", "") for template in templates_of(operation)]
        for operator, replacements in NEUTRAL_WORDS[operation].items():
            sentences += [operator, *replacements]
    pieces = set(re.findall(r"[^\W\d_]+|[^\w\s]", " ".join(sentences)))
    digits = [str(digit) for digit in range(10)]
    words = sorted(piece for piece in pieces if piece.isalpha())
    signs = sorted(pieces - set(words) - set(PUNCTUATION))
    return [*SPECIAL_TOKENS, *digits, *PUNCTUATION, *signs, *words]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer: one token per digit, word and sign; white space separates and is dropped.

    Exactly one BOS is put in front. Decoding writes digits together: "15 plus 32 is 47".
    """
    tokens = vocabulary()
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(PIECE), behavior="isolated")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokens.index(BOS))]
    )
    units = "|".join(UNITS[1:10])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=False),  # a space between tokens
            decoders.Fuse(),
            decoders.Replace(Regex(r"(?<=\d) (?=\d)"), ""),
            decoders.Replace(Regex(r" (?=[?:.,;!])"), ""),
            decoders.Replace(Regex(rf"(?<=ty) - (?=(?:{units})\b)"), "-"),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        model_max_length=CONTEXT_LENGTH,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def bundled_config(
    *, layers: int = 8, heads: int = 8, d_model: int = 256, d_ff: int = 608, vocab_size: int | None = None
) -> LlamaConfig:
    """A Llama of 5.9 M parameters by default: under 12 MB in bfloat16."""
    return LlamaConfig(
        vocab_size=vocab_size or len(vocabulary()),
        hidden_size=d_model,
        intermediate_size=d_ff,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
    )
