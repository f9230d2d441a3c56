"""CPR and CMD by MIB's own code, for tests/test_mib_equality.py to compare with ours.

Two steps in two environments, as MIB's code needs an old TransformerLens:

    python benchmarks/mib_equality.py case FOLDER          # here: tiny random models, pairs of sentences and scores
    PYTHONPATH=EAP-IG/src:MIB-circuit-track python benchmarks/mib_equality.py figures FOLDER FILE.json

The second in an environment of Python 3.11 with torch 2.13.0, transformers 4.51.3, transformer-lens 2.15.4 (pip install
--no-deps; and einops fancy_einsum jaxtyping beartype==0.14.1 typeguard==4.2.1 better_abc rich pandas tqdm datasets
sentencepiece accelerate), with checkouts of github.com/hannamw/MIB-circuit-track b759df3 and of the EAP-IG 7af394a that
it names. FILE.json goes to tests/golden/mib_figures.json. Nothing of theirs is changed, but for mean ablation: their
mean of activations is one vector for all nodes, and evaluate_area_under_curve does not hand on what it is taken from;
here it is the mean over all tokens of the counterfactual sentences, node by node.
"""

import json
import sys
import types
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

MODELS = ("llama", "gpt2")
LAYERS, HEADS, WIDTH, HIDDEN = 3, 4, 32, 40
KINDS = ("all", "heads_only", "input_too", "neurons", "neurons_input")  # what has scores
ABLATIONS = {"resample": "patching", "zero": "zero", "mean": "mean"}  # ours -> MIB's
TEMPLATES = (("The sum of {} and {} is", "+", 1), ("{} minus {} is", "-", -1))
BATCH = 8


# ---- case ----


def write_case(folder: Path) -> None:
    """Models in float32, rows of MIB and circuit files."""
    import numpy as np
    import torch

    save_tiny = import_module("tests.tiny").save_tiny  # of the checkout's root
    rng = np.random.default_rng(7)

    def drawn(sign: int, unlike: int | None = None) -> tuple[int, int, int]:
        while True:
            a, b = (int(number) for number in rng.integers(0, 10, 2))
            if 0 <= a + sign * b <= 9 and a + sign * b != unlike:
                return a, b, a + sign * b

    rows = []
    for template, operator, sign in TEMPLATES:
        for _ in range(BATCH):
            a, b, label = drawn(sign)
            c, d, other = drawn(sign, label)
            rows.append(
                {"template": template, "prompt": template.format(a, b), "label": str(label), "operator": operator,
                 "operand1": a, "operand2": b,
                 "random_counterfactual": {"prompt": template.format(c, d), "label": other}}
            )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = {kind: _scores(kind, np.random.default_rng(100 + seed)) for seed, kind in enumerate(KINDS)}
    (folder / "scores.json").write_text(json.dumps(scores))
    for name in MODELS:
        own = save_tiny(folder / name, name, dtype=torch.float32)
        config = own / "tokenizer_config.json"  # an older transformers knows the class by its former name
        config.write_text(config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    for kind in KINDS:
        (folder / f"{kind}.json").write_text(json.dumps(circuit(scores[kind])))


def _scores(kind: str, rng: Any) -> dict[str, Any]:
    names = [f"a{layer}.h{head}" for layer in range(LAYERS) for head in range(HEADS)]
    names += [f"m{layer}" for layer in range(LAYERS)] if kind != "heads_only" else []
    names += ["input"] if "input" in kind else []
    size = WIDTH if kind.startswith("neurons") else None
    return {name: rng.normal(size=size).round(6).tolist() if size else round(float(rng.normal()), 6) for name in names}


def circuit(scores: dict[str, Any]) -> dict[str, Any]:
    """A circuit file with these scores, of a head those of all heads of its layer, as EAP-IG reads them."""
    nodes: dict[str, Any] = {name: {"in_graph": True} for name in ("input", *scores, "logits")}
    for name, score in scores.items():
        if not isinstance(score, list):
            nodes[name]["score"] = score
            continue
        layer = name.partition(".")[0]
        rows = [scores[f"{layer}.h{head}"] for head in range(HEADS)] if name[0] == "a" else score
        nodes[name] |= {
            "neurons_scores": rows,
            "neurons": [[True] * WIDTH] * HEADS if name[0] == "a" else [True] * WIDTH,
        }
    cfg = {"n_layers": LAYERS, "n_heads": HEADS, "parallel_attn_mlp": False, "d_model": WIDTH}
    return {"cfg": cfg, "nodes": nodes, "edges": {}}


# ---- figures, in MIB's environment ----


def write_figures(folder: Path, out: Path) -> None:
    """MIB's CPR, CMD and faithfulness of every model, circuit file, ablation and order."""
    wandb = types.ModuleType("wandb")  # TransformerLens imports it for training
    wandb.__spec__ = ModuleSpec("wandb", None)
    sys.modules["wandb"] = wandb
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    figures: dict[str, Any] = {}
    for name in MODELS:
        model = _lens(folder / name, name)
        figures[name] = {}
        for kind in KINDS:
            for ablation, theirs in ABLATIONS.items():
                for absolute in (False, True):
                    found = _evaluate(model, folder / f"{kind}.json", rows, theirs, absolute)
                    figures[name][f"{kind}/{ablation}/{'absolute' if absolute else 'signed'}"] = found
    scores = json.loads((folder / "scores.json").read_text())
    out.write_text(json.dumps({"made_by": "benchmarks/mib_equality.py", "prompts": rows, "scores": scores,
                               "figures": figures}) + "\n")  # fmt: skip


def _lens(folder: Path, name: str) -> Any:
    """A model as TransformerLens has it, in float64, weights as they are."""
    torch, lens = import_module("torch"), import_module("transformer_lens")
    convert = import_module("transformer_lens.pretrained.weight_conversions")
    transformers = import_module("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float64).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    own: dict[str, Any]
    if name == "llama":
        own = {"n_key_value_heads": 2, "act_fn": "silu", "normalization_type": "RMS", "eps": theirs.config.rms_norm_eps,
               "positional_embedding_type": "rotary", "rotary_dim": WIDTH // HEADS, "rotary_adjacent_pairs": False,
               "final_rms": True, "gated_mlp": True}  # fmt: skip
    else:
        own = {"act_fn": "gelu_new", "normalization_type": "LN", "eps": theirs.config.layer_norm_epsilon}
    cfg = lens.HookedTransformerConfig(
        n_layers=LAYERS, n_heads=HEADS, d_model=WIDTH, d_head=WIDTH // HEADS, d_mlp=HIDDEN, n_ctx=512,
        d_vocab=theirs.config.vocab_size, dtype=torch.float64, device="cpu", model_name=name, **own,
    )  # fmt: skip
    weights = (convert.convert_llama_weights if name == "llama" else convert.convert_gpt2_weights)(theirs, cfg)
    model = lens.HookedTransformer(cfg, tokenizer=tokenizer)
    model.load_and_process_state_dict(
        weights, fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
    for switch in ("split_qkv_input", "attn_result", "hook_mlp_in"):
        getattr(model, f"set_use_{switch}")(True)
    if name == "llama":
        model.set_ungroup_grouped_query_attention(True)
    with torch.no_grad():
        ids = model.to_tokens(TEMPLATES[0][0].format(3, 4))
        apart = float((model(ids) - theirs(ids).logits).abs().max())
    print(f"{name}: logits of TransformerLens and transformers differ by at most {apart:.1e}")
    return model


def _evaluate(model: Any, file: Path, rows: list[dict[str, Any]], theirs: str, absolute: bool) -> dict[str, Any]:
    evaluation: Any = import_module("MIB_circuit_track.evaluation")
    metrics = import_module("MIB_circuit_track.metrics")
    evaluate: Any = import_module("eap.evaluate")
    loader, tokenizer = _Loader(rows, model.tokenizer), model.tokenizer
    metric = partial(metrics.get_metric("logit_diff", "arithmetic_addition", tokenizer, model), mean=False, loss=False)
    if theirs == "mean":
        evaluate.compute_mean_activations = _means
        evaluation.evaluate_graph = lambda *given, **more: evaluate.evaluate_graph(
            *given, **{**more, "intervention_dataloader": loader}
        )
    _, cpr, cmd, _, faithfulness = evaluation.evaluate_area_under_curve(
        model, import_module("eap.graph").Graph.from_json(str(file)), loader, metric, quiet=True, absolute=absolute,
        level="neuron" if file.stem.startswith("neurons") else "node", intervention=theirs,
    )  # fmt: skip
    return {"cpr": cpr, "cmd": cmd, "faithfulness": faithfulness}


class _Loader:
    """Batches as MIB's dataset gives them."""

    def __init__(self, rows: list[dict[str, Any]], tokenizer: Any):
        self._rows, self._tokenizer = rows, tokenizer

    def __len__(self) -> int:
        return len(self._rows) // BATCH

    def __iter__(self) -> Iterator[tuple[list[str], list[str], list[list[int]]]]:
        for start in range(0, len(self._rows), BATCH):
            part = self._rows[start : start + BATCH]
            others = [row["random_counterfactual"] for row in part]
            labels = [
                [self._id(row["label"]), self._id(other["label"])] for row, other in zip(part, others, strict=True)
            ]
            yield [row["prompt"] for row in part], [other["prompt"] for other in others], labels

    def _id(self, label: Any) -> int:
        return int(self._tokenizer(str(label), add_special_tokens=False).input_ids[0])


def _means(model: Any, graph: Any, dataloader: Any, per_position: bool = False) -> Any:
    torch = import_module("torch")
    totals, tokens = torch.zeros(graph.n_forward, WIDTH, dtype=torch.float64), 0
    places = {node.out_hook: graph.forward_index(node) for name, node in graph.nodes.items() if name != "logits"}

    def keep(values: Any, hook: Any) -> None:
        totals[places[hook.name]] += values[0].sum(0)

    for _, others, _ in dataloader:
        for text in others:
            ids = model.to_tokens([text])
            tokens += ids.shape[1]
            with torch.no_grad(), model.hooks(fwd_hooks=[(name, keep) for name in places]):
                model(ids)
    return totals / tokens


if __name__ == "__main__":
    step, *paths = sys.argv[1:]
    write_case(Path(paths[0])) if step == "case" else write_figures(Path(paths[0]), Path(paths[1]))
