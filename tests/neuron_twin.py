"""The slow twin of neuron importances: one prompt and one neuron, formulas as method.md section 5 has them."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from mathinterp.models.anatomy import Anatomy, Multiplied
from tests.exact import PROMPTS

SEQUENCES = [prompt.input_ids[: prompt.end + 1] for prompt in PROMPTS]


@dataclass
class Seen:
    """What one prompt's forward pass had at END, by hooks of this file's own."""

    x: list[torch.Tensor]  # each layer's input
    a: list[torch.Tensor]  # what attention gave, behind the norm if there is one
    z: list[torch.Tensor]  # o_proj's input
    c: list[torch.Tensor]  # down_proj's input
    f: list[torch.Tensor]  # down_proj's output
    o: list[torch.Tensor]  # o_proj's output
    last: torch.Tensor
    logits: torch.Tensor


def look(anatomy: Anatomy, ids: tuple[int, ...]) -> Seen:
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in "xazcfo"}

    def keep(name: str, of_input: bool):
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            value = (args[0] if args else kwargs["hidden_states"]) if of_input else output
            seen[name].append((value[0] if isinstance(value, tuple) else value)[0, -1].clone())

        return hook

    with ExitStack() as stack:
        for layer, block in enumerate(anatomy.layers):
            after = anatomy.family.attention_post_norm
            adds = getattr(block, after) if after else anatomy.attention(layer)
            for name, module, of_input in (
                ("x", block, True), ("a", adds, False), ("z", anatomy.output_projection(layer), True),
                ("c", anatomy.down_projection(layer), True), ("f", anatomy.down_projection(layer), False),
                ("o", anatomy.output_projection(layer), False),
            ):  # fmt: skip
                stack.enter_context(module.register_forward_hook(keep(name, of_input), with_kwargs=True))
        final: list[torch.Tensor] = []
        stack.enter_context(anatomy.final_norm.register_forward_pre_hook(lambda _, args: final.append(args[0][0, -1])))
        logits = anatomy.model(torch.tensor([ids])).logits[0, -1]
    seen["a"] = [times(anatomy, added) for added in seen["a"]]
    return Seen(*(seen[name] for name in "xazcfo"), final[0], logits)


def times(anatomy: Anatomy, added: torch.Tensor) -> torch.Tensor:
    """What a block gives, as Granite adds it to the stream."""
    return added * getattr(anatomy.model.config, "residual_multiplier", 1.0)


def spread(anatomy: Anatomy, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a norm divides ``x`` by; 1 where there is none, or a number in its place."""
    if isinstance(norm, nn.Identity | Multiplied):
        return torch.ones((), dtype=x.dtype)
    if isinstance(norm, nn.LayerNorm):
        return (x.var(unbiased=False) + norm.eps).sqrt()
    return (x.square().mean() + getattr(norm, "eps", getattr(norm, "variance_epsilon", None))).sqrt()


def gain(anatomy: Anatomy, norm: nn.Module) -> torch.Tensor:
    """What a norm multiplies by."""
    if isinstance(norm, nn.Identity | Multiplied):
        factor = 1.0 if isinstance(norm, nn.Identity) else anatomy.model.config.residual_multiplier
        return torch.full((anatomy.shape.d_model,), factor, dtype=torch.float64)
    return norm.weight + 1 if anatomy.shape.model_type.startswith("gemma") else norm.weight


def log_probability(anatomy: Anatomy, z: torch.Tensor, s: torch.Tensor, token: int) -> torch.Tensor:
    """log softmax(Lens(z))[token], the norm's scale frozen."""
    norm = anatomy.final_norm
    if isinstance(norm, nn.LayerNorm):
        normed = (z - z.mean()) / s * norm.weight + norm.bias
    else:
        normed = z / s * gain(anatomy, norm)
    logits = anatomy.unembedding(normed) / getattr(anatomy.model.config, "logits_scaling", 1.0)
    cap = anatomy.shape.logit_softcap
    return (logits if cap is None else cap * torch.tanh(logits / cap)).log_softmax(0)[token]


def behind(anatomy: Anatomy, layer: int, name: str | None, written: torch.Tensor, original: torch.Tensor):
    """What a block's share becomes behind the norm (if any) whose scale is that of ``original``."""
    if name is None:
        return times(anatomy, written)
    norm = getattr(anatomy.layers[layer], name)
    return written * gain(anatomy, norm) / spread(anatomy, norm, original)


def slow_neuron(anatomy: Anatomy, layer: int, k: int, run: Seen, original: Seen, token: int) -> float:
    s = spread(anatomy, anatomy.final_norm, original.last)
    r = run.x[layer] + run.a[layer]
    weight = anatomy.down_projection(layer).weight
    value = weight[k] if anatomy.shape.model_type == "gpt2" else weight[:, k]
    value = behind(anatomy, layer, anatomy.family.mlp_post_norm, value, original.f[layer])
    added = log_probability(anatomy, r + run.c[layer][k] * value, s, token)
    return float(added - log_probability(anatomy, r, s, token))


def slow_head(anatomy: Anatomy, layer: int, head: int, run: Seen, original: Seen, token: int) -> float:
    s = spread(anatomy, anatomy.final_norm, original.last)
    alone = torch.zeros_like(run.z[layer])
    alone[anatomy.head_slice(head)] = run.z[layer][anatomy.head_slice(head)]
    projection = anatomy.output_projection(layer)
    output = projection(alone[None])[0] - projection(torch.zeros_like(alone)[None])[0]
    output = behind(anatomy, layer, anatomy.family.attention_post_norm, output, original.o[layer])
    added = log_probability(anatomy, run.x[layer] + output, s, token)
    return float(added - log_probability(anatomy, run.x[layer], s, token))


def value_row(anatomy: Anatomy, layer: int, neuron: int) -> torch.Tensor:
    module = anatomy.down_projection(layer)
    row = module.weight[neuron] if type(module).__name__ == "Conv1D" else module.weight[:, neuron]
    post = anatomy.family.mlp_post_norm
    return times(anatomy, row) if post is None else row * gain(anatomy, getattr(anatomy.layers[layer], post))


def zero_columns(anatomy: Anatomy, neurons: list[tuple[int, int]]) -> None:
    with torch.no_grad():
        for layer, neuron in neurons:
            anatomy.value_vectors(layer)[neuron] = 0  # a view of down_proj's weight
