"""What a GGUF file says about itself: its settings, and which tensors it holds.

Knows the file format (versions 2 and 3, little-endian), read here without transformers or the gguf package so that
what they make of a file can be held against the file; knows nothing about what the settings mean.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _FLOAT32 = 8, 9, 0


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies; shapes are in torch's order."""

    shape: tuple[int, ...]
    kind: int  # ggml's number for how it is stored; 0 is float32
    start: int  # of its data in the file


@dataclass(frozen=True)
class GgufMetadata:
    """All settings and all tensors of one file."""

    file: Path
    settings: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The prefix of the settings that say what the model computes."""
        return str(self.settings["general.architecture"])

    def of_architecture(self) -> dict[str, Any]:
        """The settings of the architecture, without its prefix."""
        start = f"{self.architecture}."
        return {key.removeprefix(start): value for key, value in self.settings.items() if key.startswith(start)}

    def float32(self, name: str) -> np.ndarray | None:
        """A small tensor's values; None if it is stored in another way."""
        tensor = self.tensors[name]
        if tensor.kind != _FLOAT32:
            return None
        count = prod(tensor.shape)
        return np.fromfile(self.file, dtype="<f4", count=count, offset=tensor.start).reshape(tensor.shape)


def read_gguf(file: Path) -> GgufMetadata:
    """Read the header of ``file``; raises ValueError or struct.error where it is damaged or of another version."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        cursor = _Cursor(content)
        if cursor.take(4) != b"GGUF":
            raise ValueError("its first four bytes are not 'GGUF'")
        version = cursor.number("I")
        if version not in (2, 3):
            raise ValueError(f"it is of GGUF version {version}, not 2 or 3 (or big-endian)")
        n_tensors, n_settings = cursor.number("Q"), cursor.number("Q")
        settings = {}
        for _ in range(n_settings):
            key = cursor.string()
            settings[key] = cursor.value(cursor.number("I"))
        if "general.architecture" not in settings:
            raise ValueError("it has no general.architecture")
        entries = [_tensor_entry(cursor) for _ in range(n_tensors)]
        alignment = int(settings.get("general.alignment", 32))
        data = -(-cursor.at // alignment) * alignment
    tensors = {name: GgufTensor(shape, kind, data + offset) for name, shape, kind, offset in entries}
    return GgufMetadata(file, settings, tensors)


def _tensor_entry(cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
    name, n_dimensions = cursor.string(), cursor.number("I")
    dimensions = [cursor.number("Q") for _ in range(n_dimensions)]
    return name, tuple(reversed(dimensions)), cursor.number("I"), cursor.number("Q")


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, content: mmap.mmap):
        self.content, self.at = content, 0

    def take(self, count: int) -> bytes:
        piece = self.content[self.at : self.at + count]
        if len(piece) != count:
            raise ValueError("it ends in the middle of its header")
        self.at += count
        return piece

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"it holds a setting of unknown type {kind}")
        element, count = self.number("I"), self.number("Q")
        if element in _NUMBERS:
            code = f"<{count}{_NUMBERS[element]}"
            return list(struct.unpack(code, self.take(struct.calcsize(code))))
        return [self.value(element) for _ in range(count)]
