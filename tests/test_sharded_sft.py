"""Fine-tuning of a model whose frozen layers are shared out to workers: the losses and weights of one worker alone."""

import functools
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from benchmarks.sharded_sft import main as benchmark
from mathinterp.errors import UserError
from mathinterp.models.card_memory import ROOM, check_trainable, weights_of
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.models.random_shapes import random_config
from mathinterp.models.sharded import all_workers, introduce, kept_here
from mathinterp.tuning import sft
from mathinterp.tuning.answers import evaluate
from mathinterp.tuning.controls import FullJob, LoraJob
from mathinterp.tuning.finetune import prepare_tuning
from mathinterp.tuning.settings import TuneSettings
from tests.job_service import free_ports
from tests.test_sft import CONFIG, CPU, PRECISE, process_group, run_loop, samples
from tests.tiny import save_tiny

WAYS = {
    "llama": ("llama", PRECISE, {}),
    "gpt2": ("gpt2", PRECISE, {}),
    "tied embeddings": ("gemma2", PRECISE, {}),
    "lora": ("qwen2", LoraJob(rank=2), {}),
    "recomputed": ("llama", PRECISE, {"recompute": True}),
    "packed": ("llama", PRECISE, {"pack": 24}),
    "compiled": ("llama", PRECISE, {"compiled": True}),
}  # name -> family, job, changes of the configuration
HELD_OUT = samples(5)  # of two workers, one makes two passes and the other one


def run(way: str, folders: Path, rank: int = 0, workers=None, **places):
    """Adapter weights, rows, evaluations before and after, and how many numbers of the layers this worker keeps."""
    family, job, changes = WAYS[way]
    base = load(ModelSpec(str(folders / family), dtype="float64"), CPU, workers=workers)
    world_size = 1 if workers is None else workers.size()
    if workers is not None:
        introduce(base.anatomy)
    kept = sum(kept_here(parameter).numel() for parameter in base.anatomy.layers.parameters())

    def look():
        return evaluate(
            base.model, base.anatomy, HELD_OUT, device=CPU, pad_id=3, micro_batch=2, rank=rank, world_size=world_size
        )

    before = look()
    config = replace(CONFIG, **changes)
    weights, rows = run_loop(job, config, base=base, rank=rank, world_size=world_size, **places)
    return {n: w for n, w in weights.items() if "lora_" in n}, rows, (before, look()), kept


def one_of_two(rank: int, port: int, folders: Path) -> None:
    with process_group(rank, port):
        for way in WAYS:
            places = {"keep": folders / f"kept-{way}"} if rank == 0 else {}
            torch.save(run(way, folders, rank, all_workers(CPU), **places), folders / f"{way}-{rank}")
        torch.distributed.barrier()
        checkpoint = folders / "kept-llama" / "4"
        torch.save(run("llama", folders, rank, all_workers(CPU), resume=checkpoint), folders / f"resumed-{rank}")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Holds the models; afterwards also what two workers made of them, each way."""
    folders = tmp_path_factory.mktemp("sharded")
    for family in {family for family, _, _ in WAYS.values()}:
        save_tiny(folders / family, family)
    for way in WAYS:
        (folders / f"kept-{way}").mkdir()
    softmax, fork = torch.nn.functional.softmax, multiprocessing.get_context("fork")  # what is imported stays imported
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "compiled_layers", functools.partial(sft.compiled_layers, backend="eager"))
        # Gemma-2's eager attention takes it in float32, whose error grows with what is padded
        patch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim))
        port = free_ports(1)[0]
        workers = [fork.Process(target=one_of_two, args=(rank, port, folders)) for rank in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=600)
            worker.kill()
        assert [worker.exitcode for worker in workers] == [0, 0]
        yield folders


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd with GPUs does not survive a fork")
@pytest.mark.parametrize("way", WAYS)
def test_sharded_layers_train_what_whole_ones_train(way, folders):
    expected, expected_rows, looks, whole = run(way, folders)
    assert looks[1].loss < looks[0].loss
    for rank in range(2):
        found, rows, found_looks, kept = torch.load(folders / f"{way}-{rank}", weights_only=False)
        assert found.keys() == expected.keys()
        tolerance = 1e-6 if way == "packed" else 1e-11  # norms that compute in float32, over rows packed otherwise
        for name, weight in expected.items():
            assert torch.allclose(found[name], weight, rtol=0, atol=tolerance), name
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected_rows], rel=1e-6)
        assert rows[-1]["trained_parameters"] == expected_rows[-1]["trained_parameters"]
        for one, other in zip(found_looks, looks, strict=True):
            assert one.loss == pytest.approx(other.loss, abs=tolerance)
            assert replace(one, loss=other.loss) == other
        assert kept == pytest.approx(whole / 2, rel=0.02)  # rows of an odd number do not halve


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd with GPUs does not survive a fork")
def test_a_resumed_sharded_run_is_the_undisturbed_one(folders):
    """And a checkpoint of sharded layers holds what one of whole layers holds: the trained parts, plain."""
    for rank in range(2):
        undisturbed, *_ = torch.load(folders / f"llama-{rank}", weights_only=False)
        resumed, rows, *_ = torch.load(folders / f"resumed-{rank}", weights_only=False)
        assert all(torch.equal(undisturbed[name], resumed[name]) for name in undisturbed)
        assert [row["step"] for row in rows] == [6]
    unsharded, *_ = run("llama", folders, resume=folders / "kept-llama" / "4")
    assert all(torch.allclose(undisturbed[name], unsharded[name], rtol=0, atol=1e-11) for name in unsharded)
    stored = load_file(folders / "kept-llama" / "4" / "model.safetensors")
    assert {tuple(weight.shape) for weight in stored.values()} == {(16, 32), (32, 16), (8, 32), (32, 8)}


def settings(**changes) -> TuneSettings:
    return TuneSettings(lr=1e-3, data="one_digit", workers=2, shard_model=True, **changes)


def test_what_cannot_be_sharded_is_one_line():
    with pytest.raises(UserError, match="`workers` 2 or more"):
        TuneSettings(lr=1e-3, data="one_digit", shard_model=True)
    with pytest.raises(UserError, match="`cache` with `shard_model`"):
        settings(cache=True)
    with pytest.raises(UserError, match="full training freezes none"):
        prepare_tuning(FullJob(), resolve(ModelSpec("random:llama-tiny")), settings())


def test_weights_too_large_for_the_cards_are_told_before_they_are_loaded():
    base = resolve(ModelSpec("random:llama-2-70b", dtype="bfloat16"), "cuda")
    weights = weights_of(random_config("llama-2-70b"), 2)
    assert sum(weights.layers) + weights.rest == pytest.approx(138e9, rel=0.01)
    card = 80 * 10**9
    with pytest.raises(UserError, match=r"138 GB of weights on each card.*`shard_model` with `workers` 3"):
        check_trainable(base, 1, card)
    with pytest.raises(UserError, match="`workers` 3"):
        check_trainable(base, 2, card)
    check_trainable(base, 3, card)
    assert weights.on_worker(3) <= ROOM * card < weights.on_worker(2)
    with pytest.raises(UserError, match="no number of them holds it"):
        check_trainable(base, 1, 10**9)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_cards_losses_are_those_of_whole_models():
    words = ["--model", "random:llama-tiny", "--dtype", "float32", "--steps", "4", "--micro-batch", "4", "--compile"]
    done = CliRunner().invoke(benchmark, words)
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["sharded"]["losses"]) == 4
    assert found["largest_loss_difference"] < 1e-3  # products run in bfloat16
