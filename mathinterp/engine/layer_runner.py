"""The layers of a model as the packed engine calls them: in two halves, the second of which also serves by itself.

Where attention is known (because of what was changed in it), the rest of a layer runs; in the last layer only answer
positions go on. Both halves may be compiled.

Shape legend: R row of a batch, N tree node, M answer slot, D model width.
"""

from collections.abc import Callable

import torch
from torch import nn

from mathinterp.engine import compiling
from mathinterp.engine.layers import Call, RecordedCalls, call_attention, call_layer
from mathinterp.engine.parts import attention_at_rows, gather_rows, known_twin
from mathinterp.engine.tree.attention import with_tree_attention
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.split import at_module

MOST_GRAPHS = 256


class Layers:
    """Calls layers with the arguments that a clean pass recorded.

    Args:
        tree_attention: attention without dense masks (tree/attention.py).
        compiled: compile both halves.
    """

    def __init__(self, anatomy: Anatomy, *, tree_attention: bool, compiled: bool):
        self.anatomy = anatomy
        self._call_layer: Callable[..., torch.Tensor] = call_layer
        self._call_attention: Callable[..., torch.Tensor] = call_attention
        if compiled:
            # each shape of a batch makes two graphs of a function; past the limit torch goes on uncompiled
            torch._dynamo.config.recompile_limit = max(MOST_GRAPHS, torch._dynamo.config.recompile_limit)
            backend = compiling.COMPILER
            self._call_layer = compiling.compiled(call_layer, dynamic=False, backend=backend)
            self._call_attention = compiling.compiled(call_attention, dynamic=False, backend=backend)
        numbers = range(anatomy.shape.n_layers)
        self._after_attention = [known_twin(anatomy, layer) for layer in numbers]
        self.modules = [
            with_tree_attention(anatomy, layer) if tree_attention else anatomy.layers[layer] for layer in numbers
        ]  # what the recorded calls are for
        self._attention_at_answers = attention_at_rows(anatomy, self.attention(numbers[-1]))

    def attention(self, layer: int) -> nn.Module:
        """The layer's attention module."""
        module = getattr(self.modules[layer], self.anatomy.family.attention)
        assert isinstance(module, nn.Module)
        return module

    def whole(self, layer: int, hidden: torch.Tensor, calls: RecordedCalls) -> torch.Tensor:
        """The layer's output R N D."""
        call, hidden = calls.attention[layer], self._at_layer(layer, hidden)
        norm, module = self.anatomy.attention_norm(layer), self.attention(layer)
        attention = self._call_attention(norm, module, hidden, call.args, dict(call.kwargs))
        return self.rest(layer, hidden, calls.layer[layer], attention)

    def rest(
        self, layer: int, hidden: torch.Tensor, call: Call, attention: torch.Tensor, mlp: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The layer's output at home, given that of its attention and perhaps of its MLP."""
        family, twin = self.anatomy.family, self._after_attention[layer]
        known = {family.attention: attention}
        if mlp is not None:
            twin = known_twin(self.anatomy, layer, family.mlp)
            known[family.mlp] = mlp
        output = self._call_layer(twin.load(**known), self._at_layer(layer, hidden), call.args, dict(call.kwargs))
        twin.check_used()
        return output.to(self.anatomy.device)

    def _at_layer(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return at_module(self.anatomy.layers[layer], hidden)

    def last(self, hidden: torch.Tensor, calls: RecordedCalls, rows_RM: torch.Tensor) -> torch.Tensor:
        """The last layer at answer slots only: keys and values of all nodes, the rest at M of them."""
        last, twin = self.anatomy.shape.n_layers - 1, self._attention_at_answers
        norm, call = self.anatomy.attention_norm(last), calls.attention[last]
        attention = self._call_attention(norm, twin.load_all(rows_RM), hidden, call.args, dict(call.kwargs))
        twin.check_used()
        return self.rest(last, gather_rows(hidden, rows_RM), calls.layer[last], attention)
