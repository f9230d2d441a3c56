"""transformers' fast tokenizer around one of the ``tokenizers`` library, which alone cuts the texts.

Importing transformers takes more than half a second, torch apart; ``QuickTokenizer`` does so only for what prompts need
seldom.
"""

from collections.abc import Sequence
from functools import cached_property
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


class QuickTokenizer:
    """What ``fast_tokenizer`` gives, but that texts are cut, and tokens named, before transformers is imported.

    Args:
        backend: JSON of the ``tokenizers`` library.
        options: of ``fast_tokenizer``.
    """

    is_fast = True

    def __init__(self, backend: str, options: dict[str, Any]):
        from tokenizers import Tokenizer

        self._backend, self._options = backend, options
        self._own = Tokenizer.from_str(backend)
        self._own.no_truncation()
        self._own.no_padding()

    def __call__(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True, return_offsets_mapping: bool = False,
        return_attention_mask: bool = False, return_token_type_ids: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Token ids, and the characters of each where they are asked for; of one text or of several."""
        assert not return_attention_mask, "nobody who reads prompts needs it"
        assert not return_token_type_ids, "nor these"
        texts = [text] if isinstance(text, str) else list(text)
        encoded = self._own.encode_batch(texts, add_special_tokens=add_special_tokens)
        found: dict[str, list[Any]] = {"input_ids": [each.ids for each in encoded]}
        if return_offsets_mapping:
            found["offset_mapping"] = [each.offsets for each in encoded]
        return {name: each[0] for name, each in found.items()} if isinstance(text, str) else found

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """The vocabulary entries."""
        return self._own.id_to_token(ids) if isinstance(ids, int) else [self._own.id_to_token(each) for each in ids]

    def __getattr__(self, name: str) -> Any:
        """A special token or its id; whatever else, of transformers' tokenizer."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name.endswith("_token_id"):
            token = self._options.get(name.removesuffix("_id"))
            return None if token is None else self._own.token_to_id(token)
        return self._options.get(name) if name.endswith("_token") else getattr(self._whole, name)

    def __len__(self) -> int:
        return len(self._whole)

    @cached_property
    def _whole(self) -> "PreTrainedTokenizerFast":
        from tokenizers import Tokenizer

        return fast_tokenizer(Tokenizer.from_str(self._backend), self._options)
