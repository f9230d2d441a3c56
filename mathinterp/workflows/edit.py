"""The gender edit: find the neurons that add to gender stereotypes, zero them, and export the model (paper A, 6.2)."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mathinterp.cluster.run import RunSummary
from mathinterp.errors import UserError
from mathinterp.experiments.base import NothingToShow
from mathinterp.experiments.gender_neurons import SHOWN, GenderNeurons
from mathinterp.experiments.neuron_edit import NeuronEdit
from mathinterp.experiments.results import Results, Summary
from mathinterp.models.catalog import ModelSpec, ResolvedModel, resolve
from mathinterp.models.reading import model_passages, read_prompts
from mathinterp.models.units import Neuron
from mathinterp.prompts.gender import bias_prompts, contrast_prompts
from mathinterp.service.attached import Workers, run_at
from mathinterp.store import Store
from mathinterp.tuning.edit import export_edited
from mathinterp.tuning.folders import check_free


@dataclass(frozen=True)
class GenderEdit:
    """What a gender edit found.

    found: the run that ranked neurons.
    edited: the run that zeroed the first of them; None where the ranking is incomplete.
    neurons: those that are zeroed, the one that adds most first; none where the ranking is incomplete.
    out: the folder of the edited model; None: none was asked for, or ``edited`` is incomplete.
    """

    found: RunSummary
    edited: RunSummary | None
    neurons: tuple[Neuron, ...]
    out: Path | None

    @property
    def complete(self) -> bool:
        """Whether every shard of both runs has its file."""
        return self.edited is not None and self.edited.complete

    def summaries(self) -> tuple[Summary, Summary]:
        """What the ranking and the edit say; only of a complete one."""
        assert self.edited is not None
        store, shown = Store(self.found.store), NothingToShow()
        return (
            GenderNeurons.summarize(Results(store, self.found.run_id), shown),
            NeuronEdit.summarize(Results(store, self.edited.run_id), shown),
        )


def edit_gender(
    spec: ModelSpec, store: str, *, top: int = SHOWN, control_seeds: int = 5, text: Path | None = None,
    out: Path | None = None, address: str | None = None, replicas: int | None = None,
    gpus_per_replica: float | None = None, service: str | None = None,
) -> GenderEdit:  # fmt: skip
    """Rank neurons by what they add to the stereotypes of professions, zero the first, and score bias and perplexity.

    Args:
        spec: the model; its tokenizer must know the words of the sentences.
        top: neurons to zero.
        control_seeds: draws of as many random neurons in the same layers.
        text: plain text for the perplexity, passages separated by blank lines; None: short pieces that come along.
        out: folder for the edited model, of Hugging Face's form; None: none is written.
        store, address, replicas, gpus_per_replica: as for every run, see run_scan.
        service: the URL of one that computes both runs, see Workers; the edited model is written by this process.
    Raises:
        UserError: a mistake in the arguments, before anything runs.
        NoReplicaLeft: replicas died or failed to load until none was left; the same call goes on from there.
    """
    workers = Workers(replicas, gpus_per_replica, address, service).attached()
    if out is not None:
        check_free(out)
    resolved = resolve(spec)
    resolved.shape.check_neurons()
    _check_top(top, resolved)
    Store(store)  # refuses what is no store before Ray starts
    _check_words(resolved)
    chosen = partial(NeuronEdit, seeds=control_seeds, passages=model_passages(text, resolved))
    run = partial(run_at, workers, model=spec, store_url=store)
    with workers.connected():
        found = run(GenderNeurons(), prompts=contrast_prompts(), prompts_label="gender")
        if not found.complete:
            return GenderEdit(found, None, (), None)
        neurons = _first(found, top)
        edited = run(chosen(neurons), prompts=bias_prompts(), prompts_label="gender bias")
    if not edited.complete:
        return GenderEdit(found, edited, neurons, None)
    if out is not None:
        export_edited(resolved, out, neurons=neurons, about={"edit": "gender", "run_id": edited.run_id})
    return GenderEdit(found, edited, neurons, out)


def _check_top(top: int, model: ResolvedModel) -> None:
    if not 0 < top <= model.shape.n_layers * model.shape.n_neurons:
        raise UserError(f"`top` {top}: {model.label} has only {model.shape.n_layers * model.shape.n_neurons} neurons")


def _check_words(model: ResolvedModel) -> None:
    try:
        read_prompts(contrast_prompts() + bias_prompts(), model)
    except UserError as error:
        raise UserError(
            f"`model` {model.label} cannot read the gender prompts ({error}); take `model` smollm2"
        ) from error


def _first(found: RunSummary, top: int) -> tuple[Neuron, ...]:
    rows = Results(Store(found.store), found.run_id).rows(
        "SELECT layer, neuron FROM gender_neurons WHERE run_id = $run AND rank <= $top ORDER BY rank", top=top
    )
    return tuple(Neuron(row["layer"], row["neuron"]) for row in rows)
