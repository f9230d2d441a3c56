"""Fine-tuning by the Trainer: loss on the answers alone, exactly the masked full update, replayed, packed, cached."""

import contextlib
import math
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from torch.nn.functional import cross_entropy
from transformers import TrainingArguments

from mathinterp.errors import UserError
from mathinterp.models.anatomy import Anatomy, model_shape
from mathinterp.models.catalog import LoadedModel
from mathinterp.tuning import sft
from mathinterp.tuning.answers import AnswerLoss, evaluate
from mathinterp.tuning.controls import FullJob, LoraJob, control_heads
from mathinterp.tuning.data import Sample
from mathinterp.tuning.layout import packed, padded
from mathinterp.tuning.lower_layers import InputCache, cache_bytes, lowest_trained_layer
from mathinterp.tuning.precise import PreciseJob, Selection, parts_of
from mathinterp.tuning.sft import SftConfig, schedule_of, train
from mathinterp.tuning.steps import StepSampler, sample_order
from tests.job_service import free_ports
from tests.tiny import TINY_FAMILIES, tiny_config, tiny_model, tiny_tokenizer
from tests.trained_part import mask_of

CPU = torch.device("cpu")
PRECISE = PreciseJob(Selection(((1, 0), (1, 3), (2, 1))))
CONFIG = SftConfig(steps=6, batch_size=8, learning_rate=1e-2, micro_batch=3, log_every=2, checkpoint_every=4)


def samples(count: int = 20) -> list[Sample]:
    """Random tokens, but for a beginning that some share; the last three tokens are the answer."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(6, 14, (count,), generator=generator).tolist()
    drawn = [torch.randint(4, 160, (length,), generator=generator).tolist() for length in lengths]
    shared = [[7, 8, 9][: index % 4] for index in range(count)]
    return [
        Sample((*start, *ids[len(start) :]), tuple(range(len(ids) - 3, len(ids))))
        for start, ids in zip(shared, drawn, strict=True)
    ]


def loaded(family: str = "llama") -> LoadedModel:
    model = tiny_model(family)
    return LoadedModel(model, tiny_tokenizer(), Anatomy(model), "fingerprint", "float64")


def run_loop(job=PRECISE, config=CONFIG, family="llama", base=None, resume=None, keep=None, rank=0, world_size=1):
    """Weights after training and the rows; with ``keep`` its folder holds the checkpoints, named for their steps."""
    base = base or loaded(family)
    torch.manual_seed(0)
    model = job.build(base)
    rows = []

    def report(new_rows, folder):
        rows.extend(new_rows)
        if keep is not None:
            shutil.move(folder, keep / str(new_rows[-1]["step"]))

    train(
        model, base.anatomy, samples(), config,
        device=CPU, pad_id=3, reporter=report, resume=resume, rank=rank, world_size=world_size,
    )  # fmt: skip
    return {name: p.detach().clone() for name, p in model.named_parameters()}, rows


def assert_close(found, expected, tolerance=1e-11):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.allclose(found[name], expected[name], rtol=0, atol=tolerance), name


@pytest.fixture
def precise_softmax(monkeypatch):
    """Gemma-2's eager attention takes the softmax in float32, whose error grows with what is masked or padded."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim))


def trained_a_little(base):
    """A precise adapter whose gradients all tell something."""
    model = PRECISE.build(base)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


def loss_and_gradients(base, model, inputs, cache=None):
    model.zero_grad()
    loss = AnswerLoss(model, base.anatomy, cache)(**inputs, samples=[*range(6)])["loss"]
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad} | {"loss": loss.detach()}


# Loss


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_answer_loss_is_the_models_own_loss_on_the_labelled_tokens(family, precise_softmax):
    base = loaded(family)
    batch = samples(5)
    inputs = padded(batch, pad_id=3)
    total = AnswerLoss(base.model, base.anatomy)(**inputs)["loss"]
    expected, right, exact = 0.0, 0, 0
    for sample in batch:  # the slow twin: one sample, all logits
        logits_TV = base.model(input_ids=torch.tensor([sample.input_ids])).logits[0]
        gold = torch.tensor(sample.input_ids)[list(sample.answer)]
        rows = logits_TV[[i - 1 for i in sample.answer]]
        expected += cross_entropy(rows, gold, reduction="sum").item()
        right += int((rows.argmax(-1) == gold).sum())
        exact += bool((rows.argmax(-1) == gold).all())
    assert total.item() == pytest.approx(expected, abs=1e-10)
    found = evaluate(base.model, base.anatomy, batch, device=CPU, pad_id=3, micro_batch=2)
    assert (found.answer_tokens, found.samples) == (15, 5)
    assert found.loss == pytest.approx(expected / 15, abs=1e-10)
    assert (found.token_accuracy, found.exact_match) == (right / 15, exact / 5)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_packed_and_cached_have_the_loss_and_gradients_of_one_sample_a_row(family, precise_softmax):
    base, batch = loaded(family), samples(6)
    model = trained_a_little(base)
    in_rows = padded(batch, pad_id=3)
    expected = loss_and_gradients(base, model, in_rows)
    assert all(value.abs().max() > 1e-6 for value in expected.values())
    apart = [Sample((i, *sample.input_ids[1:]), sample.answer) for i, sample in enumerate(batch, start=10)]
    assert_close(
        loss_and_gradients(base, model, packed(apart, 32, base.anatomy)),
        loss_and_gradients(base, model, padded(apart, pad_id=3)),
    )
    # Beginnings that samples share are computed once; norms that compute in float32 then round their gradient once.
    together = packed(batch, 32, base.anatomy)
    assert (together["input_ids_BT"] > 0).sum() < sum(len(sample.input_ids) for sample in batch)
    in_float64 = isinstance(base.anatomy.final_norm, torch.nn.LayerNorm)
    shared_tolerance = 1e-11 if in_float64 else 1e-6
    assert_close(loss_and_gradients(base, model, together), expected, shared_tolerance)
    ran = []
    cache = InputCache(base.anatomy, model, batch, pad_id=3)
    with base.anatomy.layers[0].register_forward_hook(lambda *_: ran.append(0)):
        assert_close(loss_and_gradients(base, model, in_rows, cache), expected)
        assert_close(loss_and_gradients(base, model, in_rows, cache), expected)
        assert_close(loss_and_gradients(base, model, together, cache), expected, shared_tolerance)
    assert ran == [0]
    assert_close(loss_and_gradients(base, model, in_rows), expected)  # the decoder has its layers back
    assert sum(kept.nbytes for kept in cache._kept.values()) == cache_bytes(batch, 32, torch.float64)


@pytest.mark.slow
def test_compiled_layers_have_the_same_loss_and_gradients():
    base, batch = loaded(), samples(6)
    model = trained_a_little(base)
    expected = loss_and_gradients(base, model, padded(batch, pad_id=3))
    torch._dynamo.utils.counters.clear()
    with sft.compiled_layers(base.anatomy, backend="eager"):  # as traced; inductor takes half a minute on a CPU
        assert_close(loss_and_gradients(base, model, padded(batch, pad_id=3)), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # not the last layer: it runs at answers
    assert not torch._dynamo.utils.counters["graph_break"]
    assert all(layer._compiled_call_impl is None for layer in base.anatomy.layers)


def test_long_runs_on_gpus_are_compiled():
    model, cuda = tiny_model("llama"), torch.device("cuda")
    parameters = sum(p.numel() for p in model.parameters())
    tokens = int(sft.COMPILE_FROM / (4 * parameters)) // 10
    short, long = (StepSampler([tokens], steps=n, batch_size=1, micro_batch=1, seed=0) for n in (9, 11))
    assert [sft.worth_compiling(model, cuda, plan, 1) for plan in (short, long)] == [False, True]
    assert not sft.worth_compiling(model, CPU, long, 1)
    assert not sft.worth_compiling(model, cuda, long, 2)


def test_the_lowest_trained_layer():
    def lowest(job):
        base = loaded()
        return lowest_trained_layer(base.anatomy, job.build(base))

    assert lowest(PRECISE) == 1
    assert lowest(FullJob((2,))) == 2
    assert lowest(FullJob()) == lowest(LoraJob(rank=2)) == 0
    base = loaded()
    with pytest.raises(UserError, match="`cache` keeps what lies below"):
        InputCache(base.anatomy, FullJob().build(base), samples(), pad_id=3)
    dropping = loaded("gpt2")
    dropping.anatomy.mlp(0).dropout.p = 0.1
    with pytest.raises(UserError, match="drop out at random"):
        InputCache(dropping.anatomy, PRECISE.build(dropping), samples(), pad_id=3)
    dropping = loaded("opt")
    dropping.anatomy.layers[0].dropout = 0.1  # a number, no module
    with pytest.raises(UserError, match="drop out at random"):
        InputCache(dropping.anatomy, PRECISE.build(dropping), samples(), pad_id=3)


# Which samples when


def sampler(**changes) -> StepSampler:
    chosen = {"steps": 10, "batch_size": 6, "micro_batch": 2, "seed": 3, **changes}
    return StepSampler([len(sample.input_ids) for sample in samples()], **chosen)


def test_an_epoch_is_every_sample_once():
    seen = [int(index) for step in range(10) for index in sampler().samples_of(step)]
    assert sorted(seen[:20]) == sorted(seen[20:40]) == sorted(seen[40:]) == list(range(20))
    assert seen[:20] != seen[20:40]
    shares = [sampler(rank=rank, world_size=2).micro_batches(1) for rank in range(2)]
    assert [[len(piece) for piece in share] for share in shares] == [[2, 1], [2, 1]]
    assert sorted(index for share in shares for piece in share for index in piece) == sorted(seen[6:12])
    assert len([*sampler()]) == len(sampler()) == 10 * sampler().per_step
    assert sampler().tokens(1, 3) == sum(len(samples()[index].input_ids) for index in seen[6:18])


def test_a_mixture_has_its_shares_and_every_source_its_own_epochs():
    order = sample_order(30, 3000, seed=1, mixture=((10, 3.0), (20, 1.0)))
    first = order[order < 10]
    assert len(first) == pytest.approx(2250, abs=75)  # three standard deviations
    assert all(sorted(first[i : i + 10]) == list(range(10)) for i in range(0, len(first) - 9, 10))
    assert sorted(order[order >= 10][:20]) == list(range(10, 30))
    assert np.array_equal(order[:100], sample_order(30, 3000, seed=1, mixture=((10, 3.0), (20, 1.0)))[:100])
    assert not np.array_equal(order, sample_order(30, 3000, seed=2, mixture=((10, 3.0), (20, 1.0))))


def by_hand(step: int, warmup: int, steps: int) -> float:
    """Linear warm-up from 1 / warmup, then half a cosine down to 0."""
    return (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def factors_of(config: SftConfig) -> list[float]:
    schedule = schedule_of(config, torch.optim.SGD([torch.zeros(1)], lr=1.0))
    return [schedule.lr_lambdas[0](step) for step in range(config.steps + 1)]


def test_warm_up_then_linear():
    factors = factors_of(SftConfig(steps=100, batch_size=1, learning_rate=1, warmup_share=0.1, schedule="linear"))
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[9] == factors[10] == 1
    assert factors[55] == pytest.approx(0.5)
    assert factors[100] == 0


def test_warm_up_then_cosine():
    factors = factors_of(SftConfig(steps=100, batch_size=1, learning_rate=1))
    assert factors == [pytest.approx(by_hand(step, 3, 100)) for step in range(101)]
    assert factors[:3] == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1]
    assert factors[3] == 1
    assert factors[100] == pytest.approx(0)
    assert all(later < earlier for earlier, later in pairwise(factors[3:]))
    assert SftConfig(steps=100, batch_size=1, learning_rate=1).warmup_steps == 3


# Training


def train_by_hand(family: str) -> torch.nn.Module:
    """The slow, obvious twin: full weights, gradients outside the heads set to 0, a sample at a time, all logits."""
    model = tiny_model(family)
    weights = []
    for part in parts_of(Anatomy(model), PRECISE.selection):
        weight, mask = model.get_submodule(part.module).weight, mask_of(model, part)
        weight.requires_grad_(True).register_hook(lambda gradient, mask=mask: gradient * mask)
        weights.append(weight)
    optimizer = torch.optim.AdamW(weights, lr=0.0, weight_decay=0.0)
    order = sample_order(20, 6 * 8, seed=0)
    for step in range(6):
        chosen = [samples()[index] for index in order[8 * step : 8 * step + 8]]
        loss = 0
        for sample in chosen:
            ids = torch.tensor([sample.input_ids])
            logits_TV = model(input_ids=ids, use_cache=False).logits[0]
            loss = loss + cross_entropy(logits_TV[-4:-1], ids[0, -3:], reduction="sum")
        (loss / (3 * len(chosen))).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.param_groups[0]["lr"] = 1e-2 * by_hand(step, 1, 6)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_trainer_does_masked_full_training(family):
    base = loaded(family)
    model = PRECISE.build(base)
    before = dict(tiny_model(family).named_parameters())
    train(model, base.anatomy, samples(), CONFIG, device=CPU, pad_id=3, reporter=lambda *_: None)
    merged = model.merge_and_unload()
    moved = 0
    for name, expected in train_by_hand(family).named_parameters():
        assert torch.allclose(merged.get_parameter(name), expected, rtol=0, atol=1e-12), name
        moved += (expected - before[name]).abs().sum().item()
    assert moved > 1


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Weights, rows and the folder of checkpoints of a plain precise run."""
    keep = tmp_path_factory.mktemp("undisturbed")
    return *run_loop(keep=keep), keep


@pytest.mark.slow
@pytest.mark.parametrize("way", [{"micro_batch": 8}, {"pack": 24}, {"cache": True}, {"recompute": True}], ids=str)
def test_the_way_of_computing_changes_nothing_but_round_off(way, undisturbed):
    weights, rows = run_loop(config=replace(CONFIG, **way))
    expected, expected_rows, _ = undisturbed
    assert_close(weights, expected, 1e-6 if "pack" in way else 1e-10)
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected_rows], rel=1e-6)
    assert rows[-1]["trained_parameters"] == 2 * 3 * 8 * 32
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_checkpoint_holds_what_trains_and_nothing_else(undisturbed):
    _, _, keep = undisturbed
    trained = 2 * 3 * 8 * 32 * 8  # bytes in float64
    assert trained < (keep / "4" / "model.safetensors").stat().st_size < 1.2 * trained
    assert 2 * trained < (keep / "4" / "optimizer.pt").stat().st_size < 2.4 * trained


@pytest.mark.slow
@pytest.mark.parametrize("job", [PRECISE, FullJob(), LoraJob(rank=2)], ids=lambda job: job.name)
def test_a_resumed_run_is_the_undisturbed_one(job, undisturbed, tmp_path):
    if job is PRECISE:
        weights, _, keep = undisturbed
    else:
        weights, _ = run_loop(job, keep=tmp_path)
        keep = tmp_path
    assert sorted(folder.name for folder in keep.iterdir()) == ["4", "6"]
    resumed, rows = run_loop(job, resume=keep / "4")
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    assert [row["step"] for row in rows] == [6]


def test_resuming_a_finished_run_trains_nothing(undisturbed):
    weights, _, keep = undisturbed
    resumed, rows = run_loop(resume=keep / "6")
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    assert rows == []


def test_a_checkpoint_of_another_run_is_refused(undisturbed):
    with pytest.raises(AssertionError, match="of another run"):
        run_loop(PreciseJob(Selection(((0, 1),))), resume=undisturbed[2] / "4")


@pytest.mark.slow
def test_dropout_replays(tmp_path):
    def run(**where):
        base = loaded("gpt2")
        for module in base.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2
        return run_loop(base=base, **where)[0]

    weights = run(keep=tmp_path)
    again = run(resume=tmp_path / "4")
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@contextlib.contextmanager
def process_group(rank: int, port: int) -> Iterator[None]:
    """Be one of two gloo workers, as Ray Train sets them up, for accelerate to find."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    torch.distributed.destroy_process_group()


def one_of_two(rank: int, port: int, file: Path) -> None:
    with process_group(rank, port):
        weights, rows = run_loop(rank=rank, world_size=2)
        base = loaded()
        held_out = evaluate(base.model, base.anatomy, samples(7), device=CPU, pad_id=3, rank=rank, world_size=2)
        torch.save((weights, rows, held_out), f"{file}{rank}")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd with GPUs does not survive a fork")
def test_two_workers_train_what_one_trains(undisturbed, tmp_path):
    port, file = free_ports(1)[0], tmp_path / "weights"
    fork = multiprocessing.get_context("fork")  # what is imported stays imported
    workers = [fork.Process(target=one_of_two, args=(rank, port, file)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    expected, expected_rows, _ = undisturbed
    base = loaded()
    alone = evaluate(base.model, base.anatomy, samples(7), device=CPU, pad_id=3)
    for rank in range(2):
        weights, rows, held_out = torch.load(f"{file}{rank}", weights_only=False)
        assert_close(weights, expected)
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected_rows], rel=1e-6)
        assert held_out.loss == pytest.approx(alone.loss, abs=1e-12)
        assert replace(held_out, loss=alone.loss) == alone


class SeesTwo(TrainingArguments):
    """As on a machine with two GPUs."""

    def __post_init__(self):
        super().__post_init__()
        self._n_gpu = 2


@pytest.mark.slow
def test_one_process_that_sees_two_gpus_trains_on_one(undisturbed, monkeypatch):
    monkeypatch.setattr("mathinterp.tuning.sft.TrainingArguments", SeesTwo)
    weights, _ = run_loop()
    assert_close(weights, undisturbed[0], 0)


def test_a_loss_that_is_not_a_number_stops_the_run():
    with pytest.raises(FloatingPointError, match="at step"):
        run_loop(config=replace(CONFIG, learning_rate=float("inf")))


# Controls


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_whole_layers_train_and_nothing_else_under_weight_decay(family):
    before = dict(tiny_model(family).named_parameters())
    after, _ = run_loop(FullJob((1,)), replace(CONFIG, weight_decay=0.1), family)
    for name, weight in after.items():
        assert torch.equal(weight, before[name]) == (".layers.1." not in name), name


@pytest.mark.slow
def test_full_training_touches_everything_and_keeps_weights_tied():
    before = dict(tiny_model("gemma2").named_parameters())
    after, _ = run_loop(FullJob(), family="gemma2")
    assert after.keys() == before.keys()
    assert "lm_head.weight" not in after
    assert not any(torch.equal(after[name], before[name]) for name in after)


def test_lora_trains_the_modules_asked_for():
    count = {
        name: sum(p.numel() for p in LoraJob(2, 4, *asked).build(loaded()).parameters() if p.requires_grad)
        for name, asked in {"all": ("all",), "attention": ("attention",), "one": ("attention", (1,))}.items()
    }
    assert count["attention"] == 3 * count["one"] == 3 * 2 * (32 + 32 + 2 * (32 + 16) + 32 + 32)
    assert count["all"] == count["attention"] + 3 * 2 * 3 * (32 + 40)
    with pytest.raises(UserError, match="`targets`"):
        LoraJob(targets="heads").check(model_shape(tiny_config("llama")))


def test_control_heads():
    shape = model_shape(tiny_config("llama"))
    key = [(0, 1), (2, 2), (2, 3)]
    ranking = [*key, *[(layer, head) for layer in range(3) for head in range(4) if (layer, head) not in key]]
    draws = [control_heads("random", key, (), shape, seed) for seed in range(3)]
    assert all(len(set(draw)) == 3 and not set(draw) & set(key) for draw in draws)
    assert draws[0] != draws[1]
    matched = control_heads("random_layer", key, (), shape, 0)
    assert sorted(layer for layer, _ in matched) == [0, 2, 2]
    assert control_heads("bottom", key, ranking, shape, 0) == ranking[-3:]
    with pytest.raises(UserError, match="needs a ranking"):
        control_heads("bottom", key, key, shape, 0)
    with pytest.raises(UserError, match="all 12 heads, and this one has 11"):  # its last heads may well matter
        control_heads("bottom", key, ranking[:-1], shape, 0)
    others = [(0, 0), (0, 2), (1, 0), (2, 0)]  # key heads that are not chosen
    for kind in ("random", "random_layer", "bottom"):
        draws = [control_heads(kind, [(0, 1), (2, 2)], ranking, shape, seed, others) for seed in range(20)]
        assert not {head for draw in draws for head in draw} & {(0, 1), (2, 2), *others}
    with pytest.raises(UserError, match=r"layer 2: 3 of 4 heads are chosen or key heads, which leaves 1 for .* of 2"):
        control_heads("random_layer", key, (), shape, 0, others)
    with pytest.raises(UserError, match=r"8 of 12 heads are chosen or key heads, which leaves 4 for a control of 5"):
        control_heads("random", [(1, head) for head in range(4)] + [(0, 3)], (), shape, 0, [(0, 0), (0, 1), (0, 2)])
    with pytest.raises(UserError, match="`alpha` 0"):
        LoraJob(alpha=0).check(shape)
    with pytest.raises(UserError, match="not known"):
        control_heads("top", key, ranking, shape, 0)
