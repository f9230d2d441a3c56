"""A test that holds the bundled model, or a larger one, carries the marker ``bundled``; one that does not fails.

``make check`` leaves marked tests out. Those of EXEMPT need no marker; models of subprocesses are not seen.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from transformers import PreTrainedModel

TINY = 4_000_000  # parameters; the bundled model has 6 million, random ones of the tests at most 3
EXEMPT = {"bundled", "ray", "alone", "gpu"}


@contextmanager
def larger_models_seen(test: list[pytest.Item]) -> Iterator[None]:
    """Within the block the last of ``test`` fails as soon as it makes or loads such a model without the marker."""

    def check(model: PreTrainedModel) -> None:
        count = sum(weight.numel() for weight in model.parameters() if not weight.is_meta)
        if count > TINY and EXEMPT.isdisjoint(marker.name for marker in test[-1].iter_markers()):
            pytest.fail(f"holds a model of {count:,} parameters: mark the test with pytest.mark.bundled")

    made, loaded = PreTrainedModel.post_init, PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def post_init(model: PreTrainedModel, *arguments: Any, **options: Any) -> None:
        made(model, *arguments, **options)
        check(model)

    def from_pretrained(cls: type[PreTrainedModel], *arguments: Any, **options: Any) -> Any:
        found = loaded(cls, *arguments, **options)
        check(found[0] if isinstance(found, tuple) else found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedModel, "post_init", post_init)
        patch.setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
        yield
