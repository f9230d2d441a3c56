"""Mean ablation over too few prompts: who is told, and of how many prompts."""

from pathlib import Path

import pytest

from mathinterp.experiments.thin_means import thin_mean_warnings
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.store import Store
from tests.small_store import FINGERPRINT, open_run, prompt


def warnings(folder: Path, prompts: list[TokenizedPrompt], ablation: str = "mean", positions: str = "end") -> list[str]:
    store = Store(folder)
    run = open_run(store, scan="knockout", parameters={"ablation": ablation, "positions": positions})
    store.write_prompts(FINGERPRINT, prompts)
    return thin_mean_warnings(store, run.run_id)


def of(**counts: int) -> list[TokenizedPrompt]:
    """So many prompts of each operation, all of one template; "none" is no operation."""
    return [
        prompt(f"{operation}-{i}", None if operation == "none" else operation)
        for operation, count in counts.items()
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("counts", "thin"),
    [({"add": 3, "sub": 3}, 0), ({"add": 1, "sub": 3}, 1), ({"add": 2, "sub": 1, "none": 4}, 3), ({"none": 2}, 2)],
)
def test_prompts_whose_mean_is_over_one_or_two_are_counted(tmp_path: Path, counts: dict[str, int], thin: int) -> None:
    found = warnings(tmp_path, of(**counts))
    assert len(found) == bool(thin)
    assert all(line.startswith(f"mean ablation: {thin} of {sum(counts.values())} prompts get a mean") for line in found)
    assert all("of one operation and template" in line and "\n" not in line for line in found)


def test_a_mean_over_all_tokens_is_over_all_prompts(tmp_path: Path) -> None:
    assert warnings(tmp_path / "three", of(add=2, sub=1), positions="all") == []
    (line,) = warnings(tmp_path / "two", of(add=1, sub=1), positions="all")
    assert "2 of 2 prompts get a mean over only 1 or 2 prompts (" in line


@pytest.mark.parametrize("ablation", ["zero", "resample"])
def test_other_ablations_take_no_mean(tmp_path: Path, ablation: str) -> None:
    assert warnings(tmp_path, of(add=1), ablation) == []
