"""transformers' fast tokenizer around one of the ``tokenizers`` library, which alone cuts the texts.

Importing it takes half a second, and no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def fast_tokenizer(own: "Tokenizer", options: dict[str, Any]) -> "PreTrainedTokenizerFast":
    """Texts cut by ``own``, nothing added to it; ``options``: see ``options_of`` and ``specials_of``."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, **options)
    # The constructor marks special tokens that the file does not mark, which changes how texts that hold them are cut.
    tokenizer._tokenizer = own
    return tokenizer


def options_of(tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """What a tokenizer is beside its special tokens and the way it cuts texts."""
    template = {} if tokenizer.chat_template is None else {"chat_template": tokenizer.chat_template}
    return {
        "model_max_length": tokenizer.model_max_length,
        "padding_side": tokenizer.padding_side,
        "clean_up_tokenization_spaces": tokenizer.clean_up_tokenization_spaces,
        **template,
    }


def specials_of(tokenizer: "PreTrainedTokenizerBase") -> dict[str, str]:
    """Its special tokens by transformers' name for them, "bos_token" for example."""
    found = {name: getattr(tokenizer, name) for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
    return {name: str(token) for name, token in found.items() if token}
