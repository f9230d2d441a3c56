"""Rows of a layer sweep: each trial trains on the replica's model, is scored, and leaves the model as it was."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pyarrow as pa
import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from mathinterp.experiments.base import Subject
from mathinterp.experiments.scored import ScoredState, score_table, scores_of
from mathinterp.local_files import whole_folder
from mathinterp.models.catalog import LoadedModel
from mathinterp.tuning.answers import evaluate
from mathinterp.tuning.attached import detached_after
from mathinterp.tuning.layout import padding_id
from mathinterp.tuning.lora_sweep import LoraSweep, adapter_folder
from mathinterp.tuning.lora_sweep.tables import SWEEP_SCAN
from mathinterp.tuning.sft import Row, train


@dataclass(frozen=True)
class _Trial:
    model: PeftModel
    loss: float
    parameters: int
    seconds: float


def trial_rows(sweep: LoraSweep, state: ScoredState, layer: int, rate: float) -> pa.Table:
    """One trial: train, keep the adapter, score."""
    anatomy, prompts, tokenizer = state.subject.anatomy, state.subject.prompts, _tokenizer(state.subject)
    trial = _train(sweep, state, layer, rate)
    with detached_after(trial.model):
        found = evaluate(trial.model, anatomy, sweep.validation, device=anatomy.device, pad_id=padding_id(tokenizer))
        scores = scores_of(anatomy, prompts)
        with whole_folder(adapter_folder(sweep.folder, layer, rate)) as part:
            sweep.job(layer).export(trial.model, tokenizer, part, sweep.base)
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


def _train(sweep: LoraSweep, state: ScoredState, layer: int, rate: float) -> _Trial:
    tokenizer, anatomy = _tokenizer(state.subject), state.subject.anatomy
    loaded = LoadedModel(anatomy.model, tokenizer, anatomy, "", "")
    # Compiled layers would stay on a model that the next trial changes.
    config = replace(sweep.config, learning_rate=rate, checkpoint_every=sweep.config.steps, compiled=False)
    rows: list[Row] = []
    torch.manual_seed(config.seed)
    model = sweep.job(layer).build(loaded)
    assert isinstance(model, PeftModel)
    started = time.monotonic()
    with _detached_if_it_fails(model):
        train(
            model, anatomy, sweep.samples, config, device=anatomy.device, pad_id=padding_id(tokenizer),
            reporter=lambda new_rows, _: rows.extend(new_rows),
        )  # fmt: skip
    return _Trial(model, rows[-1]["loss"], int(rows[-1]["trained_parameters"]), time.monotonic() - started)


@contextmanager
def _detached_if_it_fails(model: PeftModel) -> Iterator[None]:
    """The replica goes on with a clean model."""
    try:
        yield
    except BaseException:
        with detached_after(model):
            raise


def _tokenizer(subject: Subject) -> PreTrainedTokenizerBase:
    assert subject.tokenizer is not None
    return subject.tokenizer
