"""What path patching can patch, freeze and pass a change on through; needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mathinterp.errors import UserError
from mathinterp.gates import shortened
from mathinterp.models.units import Head, Mlp

if TYPE_CHECKING:
    from mathinterp.models.anatomy import ModelShape

FREEZES = ("heads", "all", "none")
Node = Head | Mlp


@dataclass(frozen=True)
class Receiver:
    """The query ("q"), key ("k") or value ("v") of a query head, or an MLP (head None)."""

    layer: int
    part: str
    head: int | None = None

    @staticmethod
    def parse(text: str) -> Receiver:
        """ "17.22.q" or "17.mlp"; raises UserError for anything else."""
        found = re.fullmatch(r"([0-9]{1,9})\.(?:([0-9]{1,9})\.([qkv])|mlp)", text.strip())
        if found is None:
            raise UserError(
                f"`receiver` '{shortened(text)}' cannot be read; write layer.head.q (or .k, .v) or layer.mlp, like"
                " 17.22.q"
            )
        layer, head, part = found.groups()
        return Receiver(int(layer), part or "mlp", None if head is None else int(head))

    def __str__(self) -> str:
        return f"{self.layer}.mlp" if self.head is None else f"{self.layer}.{self.head}.{self.part}"

    def check(self, shape: ModelShape) -> None:
        """Raise UserError unless the model has it."""
        shape.check_layer(self.layer)
        if self.head is not None:
            shape.check_head(self.layer, self.head)

    def hears(self, node: Node, parallel: bool) -> bool:
        """Whether a sender is before it: in an earlier layer, or a head of an MLP's own layer (no parallel block)."""
        own = node.layer == self.layer and self.head is None and isinstance(node, Head) and not parallel
        return node.layer < self.layer or own
