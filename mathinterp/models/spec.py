"""What a user asks for when naming a model; imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ModelSpec:
    """What a user asks for; plain JSON through ``dataclasses.asdict``.

    ``name`` is ``bundled``, ``smollm2``, a Hugging Face folder, a ``.gguf`` file, a hub id, or ``random:<shape>``.
    ``adapter`` is a PEFT LoRA folder or the name of one that comes with the package. ``dtype`` is one of DTYPES or
    ``auto``: float32 on a CPU, bfloat16 on a GPU (float16 on one that has no bfloat16). ``load_in`` is "8bit" or
    "4bit": the layers' matrices are quantised by bitsandbytes as they are loaded; ``dtype`` is what is computed in.
    """

    name: str = "bundled"
    adapter: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    load_in: str | None = None

    @property
    def label(self) -> str:
        """A short name for tables: the model's, and the adapter's after a plus sign."""
        short = _short(self.name)
        whole = short if self.adapter is None else f"{short}+{_short(self.adapter)}"
        return whole if self.load_in is None else f"{whole} ({self.load_in})"


def _short(name: str) -> str:
    """The last part of a path, else the name itself."""
    return name if name.startswith("random:") else Path(name).name.removesuffix(".gguf") or name
