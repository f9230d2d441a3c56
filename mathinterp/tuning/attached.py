"""An adapter or other layers put on a model in memory for a while, and the model as it was afterwards.

Knows PEFT and anatomy. The adapter stays beside the weights, which are never changed; scoring runs through it.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from peft import PeftModel
from torch import nn

from mathinterp.errors import UserError
from mathinterp.models.anatomy import Anatomy


@contextmanager
def attached(anatomy: Anatomy, folder: Path) -> Iterator[nn.Module]:
    """Within the block, forward passes of ``anatomy.model`` go through the adapter of ``folder``.

    Raises UserError if there is no adapter.
    """
    if not (folder / "adapter_config.json").is_file():
        raise UserError(f"the adapter {folder} is not there: give the folder it was written to, which all nodes see")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # PEFT uses the old name
        put_on = PeftModel.from_pretrained(anatomy.model, str(folder), torch_device=str(anatomy.device))
    with detached_after(put_on) as tuned:
        yield tuned


@contextmanager
def other_layers(anatomy: Anatomy, layers: Iterable[nn.Module]) -> Iterator[None]:
    """Within the block the decoder runs ``layers`` in place of its own."""
    decoder, name = anatomy.decoder, anatomy.family.layers
    own = getattr(decoder, name)
    setattr(decoder, name, nn.ModuleList(layers))
    try:
        yield
    finally:
        setattr(decoder, name, own)


@contextmanager
def detached_after(tuned: PeftModel) -> Iterator[PeftModel]:
    """Within the block, the adapter is there in evaluation mode; after it the model has its own plain modules again."""
    tuned.eval()
    base = tuned.get_base_model()
    try:
        yield tuned
    finally:
        tuned.unload()
        base.eval().requires_grad_(False)
