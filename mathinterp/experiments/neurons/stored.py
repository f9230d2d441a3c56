"""A neuron scan's run, found and checked for what is built on it: graphs, mask and keep, cards.

Knows the store's views; knows nothing about models or how rows were computed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mathinterp.errors import UserError
from mathinterp.experiments.finished_run import finished_run
from mathinterp.prompts import Prompt

if TYPE_CHECKING:
    from mathinterp.store import Store


def neuron_run(store: "Store", run_id: str) -> dict[str, Any]:
    """The record of a finished neuron scan: a row of ``runs`` with the run's row of ``neuron_runs``, and against_label.

    Raises UserError if there is no such run, it is another kind of scan, or it is not finished.
    """
    run = finished_run(store, run_id, "neurons", ("neurons",))
    (more,) = store.rows(
        """SELECT n.* EXCLUDE (run_id), notes ->> 'against' AS against_label
           FROM neuron_runs AS n JOIN run_records USING (run_id) WHERE run_id = $run""",
        {"run": run_id},
    )
    return run | more


def check_model(run: dict[str, Any], fingerprint: str, label: str) -> None:
    """Raise UserError unless a model is the neuron scan's, or the one that it was compared with."""
    other = (run["against"] or "").partition(":")[2]
    if fingerprint not in (run["model_fingerprint"], other):
        raise UserError(
            f"run {run['run_id']} ranked the neurons of {run['model']}, not of {label}; give its `model` and `adapter`"
        )


def check_prompts(store: "Store", run: dict[str, Any], prompts: Sequence[Prompt]) -> None:
    """Raise UserError for a prompt that the neuron scan had not, by id, text and answer."""
    stored = store.rows(
        "SELECT prompt_id, text, answer FROM prompts WHERE prompts_fingerprint = $prompts",
        {"prompts": run["prompts_fingerprint"]},
    )
    known = {row["prompt_id"]: (row["text"], row["answer"]) for row in stored}
    for prompt in prompts:
        if known.get(prompt.prompt_id) != (prompt.text, prompt.answer):
            raise UserError(
                f"run {run['run_id']} ranked neurons on {run['prompts']}, without prompt '{prompt.prompt_id}'"
                f" ({prompt.text!r}); give its `prompts`, `limit` and `seed`, or a smaller `limit`"
            )
