"""What is said of operand maps of digits that are tokens of their own, and of prompts that name no operation."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mathinterp as mi
from mathinterp.experiments.operand_map import OperandMap
from mathinterp.face import Run
from mathinterp.models.anatomy import Anatomy
from tests.operand_twin import prompts_of, tiny_pairs
from tests.tiny import tiny_model, tiny_tokenizer

PAIRS = [(a, b) for a in range(4, 19) for b in range(40, 50)]
SHORTER = "Sentences differ in their number of tokens: 'tens digit of a = 0' is also a shorter sentence."


def mapped(
    store: Path, pairs: list[tuple[int, int]], operation: str | None = "add", *, written: float = 1.0, seed: int = 0
) -> Run:
    """written: what the neurons of the deep layer write, times this."""
    prompts = [replace(prompt, operation=operation) for prompt in prompts_of(pairs)]
    scan = OperandMap(layers=(1,), maps=2, shuffles=1, sample=9, deep_layers=(2,))
    model = tiny_model("llama", seed)
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.mul_(written)
    return mi.run(scan, mi.wrap(model, tiny_tokenizer(), name="tiny"), prompts, store=str(store), progress=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return mapped(tmp_path_factory.mktemp("operands"), PAIRS, None)


@pytest.mark.slow
def test_a_tens_digit_of_zero_is_told_to_be_a_shorter_sentence(run: Run, tmp_path: Path) -> None:
    assert SHORTER in str(run.summary)
    assert SHORTER in " ".join(run.figure().to_dict()["title"]["subtitle"])
    equal = mapped(tmp_path, [(a, b) for a in range(20, 35) for b in range(40, 50)])
    assert "Sentences differ" not in str(equal.summary)


def test_both_operands_are_named_where_both_make_sentences_shorter(tmp_path: Path) -> None:
    both = mapped(tmp_path, [(a, b) for a in range(4, 16) for b in range(4, 16)])
    assert "'tens digit of a = 0' and 'tens digit of b = 0' are also shorter sentences." in str(both.summary)


@pytest.mark.slow
def test_the_figure_of_prompts_without_operation_is_named_by_the_model_alone(run: Run, tmp_path: Path) -> None:
    named, other = (" ".join(each.figure().to_dict()["title"]["text"]) for each in (run, mapped(tmp_path, PAIRS)))
    assert named.startswith("tiny: what heads and neurons do")
    assert other.startswith("tiny, a + b: what heads and neurons do")


def test_the_baseline_is_of_the_first_answer_token_in_every_view(run: Run) -> None:
    told = run.sql("SELECT DISTINCT scoring, position FROM scored_baseline WHERE run_id = $run")
    assert told.to_dict("records") == [{"scoring": "first_token", "position": 0}]
    (accuracy,) = run.sql("SELECT n, prompts FROM accuracies WHERE run_id = $run AND operation = 'all'").to_numpy()
    assert list(accuracy) == [len(PAIRS), len(PAIRS)]


@pytest.mark.parametrize(("written", "seed", "least", "most"), [(0.1, 0, -0.02, 0.02), (4.0, 3, -1.0, -0.02)])
def test_faithfulness_is_not_told_where_next_to_nothing_is_lost_by_keeping_none(
    tmp_path: Path, written: float, seed: int, least: float, most: float
) -> None:
    rows = mapped(tmp_path, PAIRS, written=written, seed=seed).table("operand_faithfulness")
    lost = rows["baseline_logprob"] - rows.loc[rows["k"] == 0, "logprob"].iloc[0]
    assert lost.between(least, most).all()
    assert rows["faithfulness"].isna().all()
    assert rows["drop"].notna().all()


def test_faithfulness_is_the_share_of_what_is_lost_by_keeping_none(tmp_path: Path) -> None:
    rows = mapped(tmp_path, PAIRS, written=4.0).table("operand_faithfulness").set_index(["ranking", "k"])
    none, top = rows.loc[("top", 0)], rows.loc[("top", 10)]
    lost = none["baseline_logprob"] - none["logprob"]
    assert lost > 0.05
    assert top["faithfulness"] == pytest.approx((top["logprob"] - none["logprob"]) / lost)
    assert none["faithfulness"] == 0


def test_choices_of_neurons_are_counted_as_they_are_run() -> None:
    items, shape = tiny_pairs(), Anatomy(tiny_model("llama")).shape
    scan = OperandMap()  # of 200, 50 and 10 a layer of 40 has 10 alone
    counted = {shard.table: scan.evaluations(shard, items) for shard in scan.shards(shape, items)}
    assert counted["operand_keep_scan"] == 3 * len(items)
