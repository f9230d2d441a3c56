"""The LoRA layer sweep: one adapter a layer, and how well the model does with each (paper A, section 5; method.md 6).

A scan like any other, so that trials run in parallel on Ray's replicas (whole GPUs, fractions or CPU cores), are tried
again when one dies, and are kept when they are finished: a trial is a shard, one (layer, learning rate). Its adapter is
written beside the rows, to a folder that all nodes see. Of the learning rates a view takes the one that does best on
samples kept from training, so that the test prompts choose nothing. SweepNeurons then compares the original with
each chosen adapter, neuron by neuron.
"""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from matplotlib.figure import Figure
from peft import PeftModel

from mathinterp.engine.scores import Answers, answers_of
from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment, NothingToShow, Shard, Subject
from mathinterp.experiments.columns import BASELINE, SHARED_TABLES
from mathinterp.experiments.results import Results, Shown, Summary
from mathinterp.experiments.scored import score_table, scores_of
from mathinterp.experiments.table import Table
from mathinterp.models.anatomy import ModelShape
from mathinterp.models.catalog import LoadedModel
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.tuning.about import read_about
from mathinterp.tuning.answers import evaluate
from mathinterp.tuning.attached import detached_after
from mathinterp.tuning.batches import padding_id
from mathinterp.tuning.controls import LoraJob
from mathinterp.tuning.data import Sample, data_fingerprint
from mathinterp.tuning.lora_sweep.tables import SWEEP_SCAN, TABLES
from mathinterp.tuning.sft import Row, SftConfig, train

RATES = (1e-3, 5e-4, 1e-4)
RANK, ALPHA = 32, 64
TARGETS = "attention"
ABOUT_FILE = "sweep.json"


@dataclass
class SweepState:
    """What a replica keeps between trials; the model is as loaded before and after each."""

    subject: Subject
    answers: Answers


@dataclass(frozen=True)
class LoraSweep(Experiment):
    """Train a LoRA of one layer's attention in each trial and score the test prompts.

    samples, validation: what trains, and what chooses the learning rate.
    config: of every trial; its learning rate is replaced by the trial's.
    folder: for the adapters, seen by all nodes; see ``adapter_folder``.
    layers: None = all.
    base: what the adapters name as their base model.
    """

    samples: Sequence[Sample] = field(repr=False)
    validation: Sequence[Sample] = field(repr=False)
    config: SftConfig
    folder: str
    rates: tuple[float, ...] = RATES
    layers: tuple[int, ...] | None = None
    rank: int = RANK
    alpha: int = ALPHA
    base: str = ""

    name: ClassVar[str] = "lora_sweep"
    tables: ClassVar[Mapping[str, Table]] = {**SHARED_TABLES, **TABLES}

    def __post_init__(self) -> None:
        if not self.rates or min(self.rates) <= 0 or len(set(self.rates)) < len(self.rates):
            raise UserError("learning rates must be above 0, each given once")
        if not self.samples or not self.validation:
            raise UserError("the sweep needs samples to train on and others to choose the learning rate by")

    def job(self, layer: int) -> LoraJob:
        """What trains in a trial."""
        return LoraJob(self.rank, self.alpha, TARGETS, (layer,))

    def chosen(self, shape: ModelShape) -> list[int]:
        """The layers of the sweep; raises UserError for one that does not exist, or an impossible rank."""
        layers = list(range(shape.n_layers)) if self.layers is None else sorted(set(self.layers))
        for layer in layers:
            self.job(layer).check(shape)
        return layers

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row; samples are their fingerprints."""
        config = {name: value for name, value in self.config.parameters().items() if name != "learning_rate"}
        return {
            **config,
            "learning_rates": list(self.rates),
            "rank": self.rank,
            "alpha": self.alpha,
            "targets": TARGETS,
            "layers": None if self.layers is None else sorted(set(self.layers)),
            "data": data_fingerprint(self.samples),
            "validation": data_fingerprint(self.validation),
            "scoring": "token",
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """The base model's scores, and one trial for each layer and learning rate; low layers take longest."""
        trials = [(layer, rate) for layer in self.chosen(shape) for rate in self.rates]
        return [
            Shard("baseline", 0, cost=0.1),
            *(
                Shard("sweep_scan", index, {"layer": layer, "learning_rate": rate}, cost=2.0 - layer / shape.n_layers)
                for index, (layer, rate) in enumerate(trials)
            ),
        ]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """Samples trained, and prompts scored."""
        trained = self.config.steps * self.config.batch_size if shard.table == "sweep_scan" else 0
        return trained + len(prompts)

    def prepare(self, subject: Subject) -> SweepState:
        """Nothing yet."""
        return SweepState(subject, answers_of(subject.prompts))

    def notes(self, state: SweepState) -> dict[str, Any]:
        """The model's depth, which says where its layers stand in the paper's."""
        return {"n_layers": state.subject.anatomy.shape.n_layers}

    def run(self, state: SweepState, shard: Shard) -> pa.Table:
        """One trial: train, keep the adapter, score; or the base model's scores."""
        anatomy, prompts = state.subject.anatomy, state.subject.prompts
        if shard.table == "baseline":
            scores = scores_of(anatomy, prompts)
            return score_table(BASELINE, prompts, state.answers, scores, {})
        layer, rate = shard.work["layer"], shard.work["learning_rate"]
        trial = self._trained(state, layer, rate)
        with detached_after(trial.model):
            device, pad_id = anatomy.device, padding_id(_tokenizer(state.subject))
            found = evaluate(trial.model, anatomy, self.validation, device=device, pad_id=pad_id)
            scores = scores_of(anatomy, prompts)
            self._keep(trial.model, state, layer, rate)
        figures = {
            "layer": layer,
            "learning_rate": rate,
            "training_loss": trial.loss,
            "validation_loss": found.loss,
            "validation_accuracy": found.token_accuracy,
            "trained_parameters": trial.parameters,
            "seconds": trial.seconds,
        }
        return score_table(SWEEP_SCAN, prompts, state.answers, scores, figures)

    @classmethod
    def summarize(cls, results: Results, shown: NothingToShow) -> Summary:
        """The accuracy with a LoRA in each layer."""
        query = "SELECT * EXCLUDE (run_id) FROM paper_a_table9 WHERE run_id = $run ORDER BY layer"
        rows = results.rows(query)
        return Summary(
            parts=[Shown("Accuracy (%) with a LoRA in one layer (-1: none)", rows)],
            data={"accuracy": rows},
            queries=[results.query(query), "SELECT * FROM lora_sweep_trials ORDER BY layer, learning_rate"],
        )

    @classmethod
    def figure(cls, results: Results, shown: NothingToShow) -> Figure:
        """See figure.py."""
        from mathinterp.tuning.lora_sweep.figure import draw

        return draw(results)

    def _trained(self, state: SweepState, layer: int, rate: float) -> "_Trial":
        subject = state.subject
        tokenizer, anatomy = _tokenizer(subject), subject.anatomy
        loaded = LoadedModel(anatomy.model, tokenizer, anatomy, "", "")
        # Compiled layers would stay on a model that the next trial changes.
        config = replace(self.config, learning_rate=rate, checkpoint_every=self.config.steps, compiled=False)
        rows: list[Row] = []
        torch.manual_seed(config.seed)
        model = self.job(layer).build(loaded)
        assert isinstance(model, PeftModel)
        started = time.monotonic()
        try:
            train(
                model, anatomy, self.samples, config, device=anatomy.device, pad_id=padding_id(tokenizer),
                reporter=lambda new_rows, _: rows.extend(new_rows),
            )  # fmt: skip
        except BaseException:
            with detached_after(model):  # the replica goes on with a clean model
                raise
        return _Trial(model, rows[-1]["loss"], int(rows[-1]["trained_parameters"]), time.monotonic() - started)

    def _keep(self, model: PeftModel, state: SweepState, layer: int, rate: float) -> None:
        """Write the adapter, as a whole or not at all."""
        target = adapter_folder(self.folder, layer, rate)
        part = target.with_name(target.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        self.job(layer).export(model, _tokenizer(state.subject), part, self.base)
        shutil.rmtree(target, ignore_errors=True)
        part.replace(target)


@dataclass(frozen=True)
class _Trial:
    model: PeftModel
    loss: float
    parameters: int
    seconds: float


def adapter_folder(folder: str, layer: int, rate: float) -> Path:
    """Where the adapter of a trial is."""
    return Path(folder) / f"layer-{layer:02d}-lr-{rate:g}"


def claim_folder(folder: Path, scan: LoraSweep, model_fingerprint: str, dtype: str) -> None:
    """Make the folder the sweep's own, or find that it is; raises UserError if it holds anything else."""
    about = folder / ABOUT_FILE
    identity = {**scan.parameters(), "model_fingerprint": model_fingerprint, "dtype": dtype}
    if about.is_file():
        if read_about(about) != identity:
            raise UserError(f"--out '{folder}' holds another sweep (other settings, data or model); give a new folder")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out '{folder}' exists and holds something else; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    about.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")


def split_samples(samples: Sequence[Sample], validation: int, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Samples to train on, and ``validation`` others drawn from them; raises UserError if too few are left."""
    if not 1 <= validation <= len(samples) // 2:
        raise UserError(f"--validation {validation}: give between 1 and half of the {len(samples)} samples")
    order = np.random.default_rng(seed).permutation(len(samples))
    kept = set(order[:validation].tolist())
    return (
        [sample for index, sample in enumerate(samples) if index not in kept],
        [samples[index] for index in sorted(kept)],
    )


def _tokenizer(subject: Subject) -> Any:
    assert subject.tokenizer is not None
    return subject.tokenizer
