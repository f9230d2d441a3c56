"""The precise fine-tuning's job script, submitted to a real head node: rows in the store and an adapter that loads."""

import io

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from mathinterp.cluster.submit import submit
from mathinterp.store import Store
from tests.json_lines import write
from tests.tiny import save_tiny


@pytest.mark.ray
@pytest.mark.own_ray
def test_the_precise_sft_job_leaves_rows_and_an_adapter(job_address, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    base = save_tiny(tmp_path / "base", "llama")
    data = write(tmp_path / "data.jsonl", *({"prompt": f"{i} plus 1 is", "response": str(i + 1)} for i in range(8)))
    log, told = io.StringIO(), []
    words = [
        "--model",
        base,
        "--heads",
        "1.0,2.1",
        "--data",
        data,
        "--steps",
        3,
        "--batch",
        4,
        "--cpu",
        "--log-every",
        1,
    ]
    places = {name: str(tmp_path / name) for name in ("store", "storage", "out")}
    words += [word for name, place in places.items() for word in (f"--{name}", place)]
    words = [*map(str, words), "--cpu"]
    code = submit("ray_jobs/precise_sft.py", words, job_address, output=log, announce=told.append)
    assert code == 0, (told, log.getvalue())
    assert "heads that train: 1.0, 2.1" in log.getvalue()
    store = Store(places["store"])
    (run,) = store.rows("SELECT run_id, scan, status FROM runs")
    assert (run["scan"], run["status"]) == ("tune_precise", "finished")
    assert f"Run {run['run_id']}: {2 * 2 * 8 * 32:,} parameters trained" in log.getvalue()
    rows = store.rows("SELECT step, trained_parameters FROM tuning_runs ORDER BY step")
    assert rows == [{"step": step, "trained_parameters": 2 * 2 * 8 * 32} for step in (1, 2, 3)]
    model = AutoModelForCausalLM.from_pretrained(base)
    ids = torch.tensor([[1, 20, 30, 40]])
    with torch.no_grad():
        before = model(ids).logits
        after = PeftModel.from_pretrained(model, places["out"])(ids).logits
    assert (after - before).abs().max() > 1e-5
