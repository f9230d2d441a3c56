"""Circuits in the JSON of MIB and EAP-IG (Graph.to_json): ``cfg``, ``nodes`` and ``edges``.

Nodes are called input, a0.h0, m0 and logits. A node may have ``score`` and ``neurons_scores``: one number for each
coordinate of what it writes into the residual stream, of a head the rows of all heads of its layer, as EAP-IG writes
them. Edges of a circuit of nodes follow from its nodes. Files of ours say in ``mathinterp`` what the scores are; other
readers pass over it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import mathinterp
from mathinterp.errors import UserError
from mathinterp.experiments.circuit.ranking import NodeScores, Place
from mathinterp.gates import check_file, shortened
from mathinterp.local_files import whole_file
from mathinterp.prompts.json_lines import json_value, read_text

if TYPE_CHECKING:
    from mathinterp.models.anatomy import ModelShape

FIELDS = ("cfg", "nodes", "edges")
SIZES = {"n_layers": "n_layers", "n_heads": "n_heads", "d_model": "d_model"}
_NUMBER = "(0|[1-9][0-9]{0,5})"
NODE = re.compile(rf"a{_NUMBER}\.h{_NUMBER}|m{_NUMBER}")


def read_circuit(path: str | Path, level: str, shape: ModelShape) -> NodeScores:
    """The scores of a circuit file; nodes without a score, or with NaN, are not scored.

    Args:
        level: "node", or "neuron" for ``neurons_scores``.
    Raises:
        UserError: no such file, no circuit, one of a model of other sizes, or one without scores of this level.
    """
    path = Path(path)
    graph = json_value(read_text(path, "a circuit"), f"'{path}'", constants=True)
    if not isinstance(graph, dict) or not all(isinstance(graph.get(name), dict) for name in FIELDS):
        raise UserError(f"'{path}' is no circuit of MIB: a JSON object with the objects {', '.join(FIELDS)}")
    for name in SIZES:
        if graph["cfg"].get(name) != getattr(shape, name):
            raise UserError(
                f"'{path}' is a circuit of a model with {name} {graph['cfg'].get(name)}, not {getattr(shape, name)}"
            )
    field = "neurons_scores" if level == "neuron" else "score"
    scores: dict[Place, np.ndarray] = {}
    for name, node in graph["nodes"].items():
        if not isinstance(node, dict):
            raise UserError(f"'{path}': the node '{shortened(name)}' must be an object")
        if name == "logits" or node.get(field) is None:
            continue
        site, layer, head = _place(name, shape, f"'{path}'")
        given, many = node[field], shape.d_model if level == "neuron" else None
        if many is not None and site == "head":
            given = _row_of(given, head, shape.n_heads)
        values = _numbers(given, many, f"'{path}': {name}")
        if site != "head":
            scores[site, layer] = values.reshape(-1)
            continue
        own = scores.setdefault((site, layer), np.full((shape.n_heads, *values.shape), np.nan))
        own[head] = values
    found = NodeScores(path.stem, path.name, scores)
    if not scores or not found.scored:
        raise UserError(
            f"'{path}' has no {field} of nodes; circuits are ranked by them here (scores of edges are not read)"
        )
    return found


def _place(name: str, shape: ModelShape, where: str) -> tuple[str, int, int]:
    """Site, layer and, of a head, which one."""
    if name == "input":
        return "input", 0, 0
    match = NODE.fullmatch(name)
    if match is None:
        raise UserError(f"{where}: '{shortened(name)}' is no node; nodes are input, a0.h0, m0 and logits")
    layer, head = int(match[1] or match[3] or 0), int(match[2] or 0)
    if layer >= shape.n_layers or head >= shape.n_heads:
        raise UserError(f"{where}: the model has no node '{name}'")
    return ("mlp" if match[3] else "head"), layer, head


def _row_of(given: Any, head: int, heads: int) -> Any:
    """Of the rows of all heads of a layer that of one; anything else as it is."""
    rows = isinstance(given, list) and len(given) == heads and all(isinstance(row, list) for row in given)
    return given[head] if rows else given


def _numbers(given: Any, many: int | None, where: str) -> np.ndarray:
    """The scores of one node; raises UserError for anything but one number, or ``many``; NaN is one, text is none."""
    parts = given if many is not None and isinstance(given, list) and len(given) == many else [given]
    try:
        fits = all(type(part) in (int, float) for part in parts) and len(parts) == (many or 1)
        values = np.array([float(part) for part in parts] if fits else [np.inf])
    except OverflowError:  # an integer beyond what a float holds
        values = np.array([np.inf])
    if np.isinf(values).any():
        form = "one number" if many is None else f"{many} numbers"
        raise UserError(f"{where} must have {form} for its scores, and none that is infinite")
    return values.reshape(() if many is None else many)


def write_circuit(
    path: str | Path,
    scores: NodeScores,
    count: int,
    ordering: str,
    shape: ModelShape,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write the circuit of the first ``count`` nodes with the scores of all; EAP-IG's Graph.from_json reads it.

    Folders above it are made. Raises UserError if the file cannot be written.

    Args:
        about: more to say of the scores, as plain JSON.
    """
    check_file(path, "a circuit")
    path = Path(path).expanduser()
    kept = scores.first(count, ordering)
    cfg = {**{name: getattr(shape, name) for name in SIZES}, "parallel_attn_mlp": shape.parallel}
    said = {
        **(about or {}), "runs": scores.source.split(","), "method": scores.method, "ordering": ordering,
        "nodes": count, "scored": scores.scored, "version": mathinterp.__version__,
    }  # fmt: skip
    nodes = {name: _node(name, scores, kept, shape) for name in _names(shape)}
    held = {name for name, node in nodes.items() if node["in_graph"]} | {"logits"}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary, temporary.open("x", encoding="utf-8") as file:
            begun = json.dumps({"mathinterp": said, "cfg": cfg, "nodes": nodes})
            file.write(f'{begun[:-1]}, "edges": {{')
            for number, (edge, parent, child) in enumerate(_edges(shape)):
                of = {"score": 0.0, "in_graph": parent in held and child in held}
                file.write(f'{", " if number else ""}"{edge}": {json.dumps(of)}')
            file.write("}}\n")
    except OSError as error:
        raise UserError(f"cannot write a circuit to {path}: {error.strerror}") from error


def _names(shape: ModelShape) -> list[str]:
    layers = [[*(f"a{layer}.h{head}" for head in range(shape.n_heads)), f"m{layer}"] for layer in range(shape.n_layers)]
    return ["input", *(name for layer in layers for name in layer), "logits"]


def _node(
    name: str, scores: NodeScores, kept: Mapping[Place, np.ndarray], shape: ModelShape
) -> dict[str, bool | float]:
    if name == "logits":
        return {"in_graph": True}
    site, layer, head = _place(name, shape, name)
    if (site, layer) not in kept:
        return {"in_graph": True}
    score = float(scores.scores[site, layer][head])
    found: dict[str, bool | float] = {"in_graph": bool(kept[site, layer][head])}
    return found if np.isnan(score) else {**found, "score": score}


def _edges(shape: ModelShape) -> Iterator[tuple[str, str, str]]:
    """Name, parent and child of every edge, in EAP-IG's order."""
    before = ["input"]
    for layer in range(shape.n_layers):
        heads, mlp = [f"a{layer}.h{head}" for head in range(shape.n_heads)], f"m{layer}"
        for parent in before:
            yield from ((f"{parent}->{head}<{part}>", parent, head) for head in heads for part in "qkv")
            if shape.parallel:
                yield f"{parent}->{mlp}", parent, mlp
        before += heads
        if not shape.parallel:
            yield from ((f"{parent}->{mlp}", parent, mlp) for parent in before)
        before.append(mlp)
    yield from ((f"{parent}->logits", parent, "logits") for parent in before)
