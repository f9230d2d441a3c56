"""The golden runs: every experiment once or more, small, in float64, in this process.

Rows are stored as float32 and computed in float64, so that they are the same on every machine. ``python -m
tests.golden.runs`` writes them anew into tests/golden/rows; do so only when RESULT_FORMAT is raised.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mathinterp.cluster.replica import Replica, ReplicaJob
from mathinterp.cluster.run import open_run, prepare_work
from mathinterp.evaluation.evaluate import Origin, PromptSetEvaluation
from mathinterp.experiments.activation_patching import ActivationPatching
from mathinterp.experiments.attention import Attention
from mathinterp.experiments.attribution import Attribution
from mathinterp.experiments.attribution.tables import METHODS
from mathinterp.experiments.base import Experiment
from mathinterp.experiments.chain import Chain
from mathinterp.experiments.circuit import Circuit
from mathinterp.experiments.concept_zeroing import ConceptZeroing, NeuronSet
from mathinterp.experiments.concepts import Concepts
from mathinterp.experiments.concepts.summary import kept_neurons
from mathinterp.experiments.gender_neurons import GenderNeurons
from mathinterp.experiments.head_pairs import HeadPairs
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.iterative import Iterative
from mathinterp.experiments.knockout import Knockout
from mathinterp.experiments.mask import Mask
from mathinterp.experiments.mask_keep import MaskKeep
from mathinterp.experiments.mlp_probe import MlpProbe
from mathinterp.experiments.mlps import Mlps
from mathinterp.experiments.neuron_edit import NeuronEdit
from mathinterp.experiments.neuron_graph import NeuronGraph
from mathinterp.experiments.neurons import Keep, Neurons
from mathinterp.experiments.operand_map import OperandMap
from mathinterp.experiments.paths import Paths
from mathinterp.experiments.results import Results
from mathinterp.models.catalog import ModelSpec
from mathinterp.models.handle import NamedSource
from mathinterp.prompts import Prompt, load_prompts
from mathinterp.prompts.gender import bias_prompts, contrast_prompts
from mathinterp.store import Store
from mathinterp.store.manifest import RESULT_FORMAT
from mathinterp.tuning.data import Sample
from mathinterp.tuning.lora_sweep import LoraSweep
from mathinterp.tuning.prune import Condition, Prune
from mathinterp.tuning.sft import SftConfig
from mathinterp.tuning.sweep_neurons import SweepNeurons

FOLDER = Path(__file__).parent / "rows"
INDEX = FOLDER / "runs.json"
ARITHMETIC = ModelSpec("bundled", dtype="float64")
MEASURED = {"seconds"}  # columns that differ from run to run
HEADS = ((0, 1), (0, 2), (0, 6), (3, 1), (7, 5))


class GoldenStore:
    """A store in a folder of its own, and what was run in it."""

    def __init__(self, folder: Path):
        self.store = Store(folder)
        self.ids: dict[str, str] = {}

    def run(self, name: str, scan: Experiment, prompts: Sequence[Prompt], spec: ModelSpec = ARITHMETIC) -> str:
        """Compute every shard of a run in this process; its id."""
        work = prepare_work(scan, spec, prompts, on_gpu=False, store=self.store)
        run = open_run(self.store, work)
        replica = Replica(
            ReplicaJob(
                work.scan, NamedSource(spec), work.prompts, work.model.fingerprint, work.prompts_fingerprint,
                self.store.url, run.run_id, "cpu", 1,
            )
        )  # fmt: skip
        replica.load()
        for shard in work.shards:
            replica.run(shard)
        assert run.finish() == []
        self.ids[name] = run.run_id
        return run.run_id

    def records(self) -> list[dict[str, Any]]:
        """The record of every run."""
        return [json.loads(file.read_text("utf-8")) for file in Path(self.store.url).glob("runs/*.json")]

    def rows(self, name: str) -> dict[str, pa.Table]:
        """The rows of each table of a run, in the order in which they were computed."""
        folders = sorted(Path(self.store.url).glob(f"*/run_id={self.ids[name]}"))
        return {
            folder.parent.name: pa.concat_tables(_read(file) for file in sorted(folder.glob("*.parquet")))
            for folder in folders
        }


def _read(file: Path) -> pa.Table:
    rows = pq.ParquetFile(file).read().replace_schema_metadata()
    return rows.drop_columns([name for name in rows.column_names if name in MEASURED])


def run_all(golden: GoldenStore, gender_model: ModelSpec) -> None:
    """Run every golden run; ``gender_model`` is one whose tokenizer knows the gender sentences."""
    pairs, two_digit = load_prompts("pairs", limit=8), load_prompts("two_digit", limit=8)
    run = golden.run
    run("heads zero", Heads(heads=HEADS), two_digit)
    run("heads mean", Heads("mean", heads=HEADS), pairs)
    run("heads resample", Heads("resample", heads=HEADS), pairs)
    run("heads dataset_mean", Heads("dataset_mean", heads=HEADS), two_digit)
    run("head_pairs", HeadPairs(heads=HEADS[:3]), two_digit)
    run("head_pairs given", HeadPairs(heads=HEADS[3:], given="0.6"), two_digit)
    run("heads plain", Heads(engine="plain", positions="end", heads=HEADS), two_digit)
    run("mlps zero", Mlps(), two_digit)
    run("mlps mean", Mlps("mean", layers=(1, 7)), pairs)
    for freeze in ("heads", "all", "none"):
        run(f"paths {freeze}", Paths(freeze=freeze, keep_all=True, layers=(0, 6)), pairs)
    run("paths everywhere", Paths(freeze="none", positions="all", keep_all=True, layers=(6,)), pairs)
    for receiver in ("5.2.q", "6.3.v", "7.mlp"):
        run(f"paths {receiver}", Paths(receiver=receiver, keep_all=True, layers=(0, 4)), pairs)
    run("activation_patching", ActivationPatching(layers=(0, 6), keep_all=True), pairs[:4])
    opposed = load_prompts("operand_pairs", limit=4)
    for method in METHODS:
        run(f"attribution {method.replace('-', '_')}", Attribution(method=method, steps=2), opposed)
    run("attribution neurons", Attribution(method="relp", neurons=True), opposed[:2])
    run("mask", Mask(steps=2), opposed)
    operands = OperandMap(maps=2, ks=(50,), sample=16, layers=(7,), deep_layers=(7,))
    run("operands", operands, load_prompts("operands_add", limit=100))
    ids = golden.ids
    run("circuit", Circuit((ids["attribution relp"],)), opposed)
    run("circuit neurons", Circuit((ids["attribution neurons"],), level="neuron", ablation="mean"), opposed[:2])
    run("attention", Attention(heads=HEADS, keep_all=True), pairs)
    run("probe", MlpProbe(keep_all=True), pairs)
    run("probe written", MlpProbe("written", fold_norm=True, layers=(3, 7), keep_all=True), pairs)
    ranking = ((0, 6), (0, 1), (0, 2), (0, 7))
    run("knockout", Knockout(heads=ranking, key=(), ks=(1, 2, 4), control_seeds=2), pairs)
    run("knockout zero", Knockout("zero", heads=ranking, key=(), ks=(2,), control_seeds=1), two_digit)
    run("iterative", Iterative(steps=2, layers=(0, 1)), pairs)
    neurons = run("neurons head", Neurons("head:0.6", keep="topk:10", layers=(4, 5)), two_digit)
    run("neurons alone", Neurons(target="gold", keep=Keep(5, everything=True), layers=(7,)), two_digit[:2])
    run("neurons input", Neurons("input", rank="ratio", keep="topk:5", layers=(7,)), pairs[:4])
    run("maskkeep", MaskKeep(neurons, (10, 3), 1), two_digit)
    for by in ("prompt", "operation"):
        run(f"graph {by}", NeuronGraph(neurons, by, 6, ks=(6, 3), control_seeds=1), two_digit[:4])
    concepts = run("concepts", Concepts(top=5, layers=(0,), attention_layers=(1, 2)), two_digit[:2])
    kept = kept_neurons(Results(golden.store, concepts), [1])
    run("concept zeroing", ConceptZeroing(tuple(NeuronSet(*item) for item in kept.items()), concepts, 1), two_digit)
    run("chain", Chain(layers=(0, 1), n_heads=2, top=4), two_digit[:4])
    run("gender neurons", GenderNeurons(), contrast_prompts(), gender_model)
    edited = NeuronEdit(((1, 3), (2, 7)), 1, ((1, 20, 21, 22), (1, 30, 31, 32, 33)))
    run("edit", edited, bias_prompts()[:8], gender_model)
    run("prune", Prune((Condition("pruned", 0, ((7, 3), (7, 9))),), (7,)), two_digit)
    samples = [Sample((1, *range(5 + first, 11 + first)), (5, 6)) for first in range(6)]
    adapters = Path(golden.store.url) / "adapters"
    config = SftConfig(steps=2, batch_size=2, learning_rate=1e-2, micro_batch=2)
    trained = LoraSweep(samples[:4], samples[4:], config, str(adapters), (1e-2,), (5,), rank=2, alpha=4, base="bundled")
    sweep = run("lora_sweep", trained, two_digit[:4])
    run("sweep_neurons", SweepNeurons(sweep, ((5, 1e-2),), str(adapters), top=5), two_digit[:4])
    run("evaluate", PromptSetEvaluation("two_digit", 8, 0, "digest", Origin("bundled", "bundled")), two_digit)


def record(gender_model: Callable[[Path], ModelSpec]) -> None:
    """Write all rows into tests/golden/rows."""
    with tempfile.TemporaryDirectory() as folder:
        golden = GoldenStore(Path(folder) / "store")
        run_all(golden, gender_model(Path(folder) / "model"))
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir()
        for name in golden.ids:
            for table, rows in golden.rows(name).items():
                pq.write_table(rows, FOLDER / f"{name.replace(' ', '_')}-{table}.parquet", compression="zstd")
        INDEX.write_text(json.dumps({"result_format": RESULT_FORMAT, "run_ids": golden.ids}, indent=1) + "\n")


if __name__ == "__main__":
    from tests.golden.models import word_model

    record(word_model)
