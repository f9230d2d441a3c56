"""A prompt's numbers are those of the prompt alone, whatever is packed, padded or batched with it, or ran before it.

The twin of everything here is a fresh copy of the model that reads one prompt: no engine, no padding, no history.
"""

import copy
import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from mathinterp.engine.alone import alone_deviation, sampled
from mathinterp.engine.attention_rows import eager_attention, end_attention
from mathinterp.engine.choose import packing_deviation
from mathinterp.engine.end_rows import EndRows
from mathinterp.engine.hooks import edited_input
from mathinterp.engine.intervention import CLEAN, zeroed
from mathinterp.engine.lens.neurons import NeuronLens, end_activations
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.pairs import batches_of, ends_of
from mathinterp.engine.plain import PlainEngine
from mathinterp.engine.tree.forest import plant
from mathinterp.evaluation.greedy import GreedyDecoder
from mathinterp.evaluation.harness import Harness
from mathinterp.evaluation.task_files import task_file
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.positions import Positions
from mathinterp.models.units import Head
from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt
from mathinterp.tuning.answers import AnswerLoss
from mathinterp.tuning.data import Sample
from mathinterp.tuning.layout import padded
from tests.harness_twin import WORD_ITEMS, decode_by_hand, small
from tests.model_configs import CONFIGS, ORIGINAL
from tests.tiny import VOCABULARY, tiny_model, tiny_tokenizer

LENGTHS = (4, 5, 11, 12, 12, 13, 14, 20, 30, 30, 7)
EXACT = 1e-12


@pytest.fixture(params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return drawn(CONFIGS[request.param])


def drawn(config) -> PreTrainedModel:
    """Random float64 weights large enough that a wrong frequency shows."""
    made = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float64, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return made.eval().requires_grad_(False)


def prompts_of(lengths: Sequence[int]) -> list[TokenizedPrompt]:
    """Random tokens; every second prompt shares its beginning with others, and has an answer of two tokens."""
    rng, found = random.Random(0), []
    for number, length in enumerate(lengths):
        answers = 1 + number % 2
        ids = [1, *([20, 30, 40] if number % 2 else [])]
        ids += [rng.randrange(4, VOCABULARY) for _ in range(length + answers - len(ids))]
        scored = tuple(ScoredToken(i, length + i, ids[length + i], "", "digit", None) for i in range(answers))
        found.append(TokenizedPrompt(Prompt(str(number), "", "1" * answers), tuple(ids), scored))
    return found


PROMPTS = prompts_of(LENGTHS)
SENTENCES = [prompt.input_ids[: prompt.end + 1] for prompt in PROMPTS]


@torch.no_grad()
def alone(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """T V log-probabilities from a copy of the model that has read nothing else."""
    return copy.deepcopy(model)(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].log_softmax(-1)


def scored_alone(model: PreTrainedModel) -> np.ndarray:
    return np.array(
        [float(alone(model, each.fed)[token.index - 1, token.token_id]) for each in PROMPTS for token in each.scored]
    )


def ends_alone(model: PreTrainedModel) -> torch.Tensor:
    return torch.stack([alone(model, sentence)[-1] for sentence in SENTENCES])


def test_the_prompts_would_show_a_shared_set_of_frequencies(model: PreTrainedModel) -> None:
    """Read in one padded batch, as transformers reads them, short prompts differ from the same prompts alone."""
    width = max(map(len, SENTENCES))
    batch = torch.tensor([[*sentence, *[3] * (width - len(sentence))] for sentence in SENTENCES])
    logprobs = copy.deepcopy(model)(input_ids=batch).logits.log_softmax(-1)
    assert (logprobs[0, len(SENTENCES[0]) - 1] - alone(model, SENTENCES[0])[-1]).abs().max() > 1e-2


@pytest.mark.parametrize("make", [
    PackedEngine,
    lambda anatomy, prompts: PackedEngine(anatomy, prompts, max_tokens=10**6),
    lambda anatomy, prompts: PackedEngine(anatomy, prompts, pack_size=31, private_from=[0] * len(prompts)),
    PlainEngine,
])  # fmt: skip
def test_engines_score_each_prompt_as_if_alone(model: PreTrainedModel, make) -> None:
    expected = scored_alone(model)
    engine = make(Anatomy(model), PROMPTS)
    assert np.abs(engine.baseline().logprob_EA[0] - expected).max() < EXACT
    assert packing_deviation(engine, engine.anatomy, PROMPTS) < EXACT


def test_an_edited_head_is_that_of_each_prompt_alone(model: PreTrainedModel) -> None:
    anatomy = Anatomy(model)
    expected = []
    for prompt in PROMPTS:
        own = Anatomy(copy.deepcopy(model))

        def zero(inputs: torch.Tensor, own: Anatomy = own) -> torch.Tensor:
            return inputs.index_fill(-1, torch.arange(*own.head_slice(2).indices(10**6)), 0)

        with torch.no_grad(), edited_input(own.output_projection(1), zero):
            logprobs = own.model(torch.tensor([prompt.fed])).logits[0].log_softmax(-1)
        expected += [float(logprobs[token.index - 1, token.token_id]) for token in prompt.scored]
    for engine in (PackedEngine(anatomy, PROMPTS), PlainEngine(anatomy, PROMPTS)):
        found = engine.run([zeroed(anatomy, [Head(1, 2)])])
        assert np.abs(found.logprob_EA[0] - np.array(expected)).max() < EXACT


@pytest.mark.slow
def test_what_is_read_at_end_is_that_of_each_sentence_alone(model: PreTrainedModel) -> None:
    expected = ends_alone(model)
    anatomy = Anatomy(model)
    first = expected[torch.arange(len(PROMPTS)), torch.tensor([p.scored[0].token_id for p in PROMPTS])]
    runner = EndRows(anatomy, PROMPTS)  # END rows on cached tokens: two passes for each sentence
    assert np.abs(runner.run([CLEAN]).logprob_EA[0] - first.numpy()).max() < EXACT
    assert np.abs(PackedEngine(anatomy, PROMPTS).replay.run([CLEAN]).logprob_EA[0]
                  - scored_alone(model)).max() < EXACT  # fmt: skip
    with torch.no_grad():
        for final_PD in (end_activations(anatomy, SENTENCES).final_PD.clone(), ends_of(anatomy, SENTENCES).final_PD):
            torch.testing.assert_close(anatomy.logits(final_PD).log_softmax(-1), expected, rtol=0, atol=EXACT)
    assert NeuronLens(anatomy).targets(PROMPTS, "predicted").tolist() == expected.argmax(-1).tolist()
    assert alone_deviation(anatomy, SENTENCES) < EXACT


def test_attention_rows_are_those_of_each_sentence_alone(model: PreTrainedModel) -> None:
    anatomy = Anatomy(model)
    for batch in batches_of(SENTENCES, anatomy):
        weights_BLHT = end_attention(anatomy, batch, [0, 2])
        for row, index in enumerate(batch.rows.tolist()):
            fresh = copy.deepcopy(model)
            with torch.no_grad(), eager_attention(fresh):
                rows = fresh(torch.tensor([SENTENCES[index]]), output_attentions=True).attentions
            length = len(SENTENCES[index])
            torch.testing.assert_close(weights_BLHT[row, 1, :, :length], rows[2][0, :, -1], rtol=0, atol=1e-6)
            assert (weights_BLHT[row, :, :, length:] == 0).all()


def test_a_long_prompt_leaves_nothing_behind_for_later_ones(model: PreTrainedModel) -> None:
    """Else a shard's rows would depend on what its replica ran before: a resumed run would not be the undisturbed one.

    A text of exactly the original length is where transformers keeps the frequencies of a longer one before it.
    """
    expected = alone(model, range(4, 4 + ORIGINAL))
    anatomy = Anatomy(model)
    with torch.no_grad():
        for before in (40, 13, 5):
            anatomy.model(torch.tensor([list(range(before))]))
            found = anatomy.model(torch.tensor([list(range(4, 4 + ORIGINAL))])).logits[0].log_softmax(-1)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_greedy_answers_are_those_of_each_prompt_decoded_alone(model: PreTrainedModel) -> None:
    tokenizer = tiny_tokenizer()
    decoder = GreedyDecoder(Anatomy(copy.deepcopy(model)).model, tokenizer)
    decoder.context = lambda prompt: list(prompt.input_ids[: prompt.end + 1])  # type: ignore[method-assign]
    for prompt, answer in zip(PROMPTS, decoder.answer(PROMPTS), strict=True):
        fresh = GreedyDecoder(copy.deepcopy(model), tokenizer)
        fresh.context = decoder.context  # type: ignore[method-assign]
        fresh_answer = fresh._decode([fresh.context(prompt)], 2 + 3)[0]
        assert answer.response == fresh_answer


def test_the_check_finds_prompts_that_touch_each_other(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain engine shares the fault, so the twin of the check must read one prompt a pass, the longest included."""
    lengths = [*[5] * 40, 30, *[6] * 40]  # the one that changes all others stands where an even spread misses it
    prompts = prompts_of(lengths)
    monkeypatch.setattr(Positions, "kind", lambda self, length: 0)
    anatomy = Anatomy(model)
    with pytest.raises(RuntimeError, match="stray"):
        alone_deviation(anatomy, [prompt.input_ids[: prompt.end + 1] for prompt in prompts])
    for engine in (PackedEngine(anatomy, prompts, max_tokens=10**6), PlainEngine(anatomy, prompts, batch_size=100)):
        with pytest.raises(RuntimeError, match="strays"):
            packing_deviation(engine, anatomy, prompts)


def test_the_shortest_and_the_longest_are_always_compared() -> None:
    lengths = [9] * 100
    lengths[37], lengths[71] = 2, 50
    assert {37, 71} <= set(sampled(lengths).tolist())
    assert len(sampled(lengths)) <= 8
    assert sampled([3]).tolist() == [0]


@pytest.mark.parametrize("multiple", [1, 3])
def test_packs_hold_one_kind_each_and_all_sequences(multiple: int) -> None:
    rng = random.Random(1)
    sequences = [[rng.randrange(3) for _ in range(rng.randrange(3, 12))] for _ in range(40)]
    kinds = [len(sequence) // 4 for sequence in sequences]
    forest = plant(sequences, pack_size=20, kinds=kinds, packs_multiple_of=multiple)
    for sequence, kind, nodes in zip(sequences, kinds, forest.node_of, strict=True):
        pack = int(nodes[0]) // forest.pack_size
        assert forest.kinds_P[pack] == kind
        assert forest.token_ids_PN.ravel()[nodes].tolist() == sequence
        assert forest.depths_PN.ravel()[nodes].tolist() == list(range(len(sequence)))
    runs = [len(list(group)) for _, group in itertools.groupby(forest.kinds_P.tolist())]
    assert len(runs) == len(set(kinds))
    assert all(run % multiple == 0 for run in runs)


# ---- padding ----


@pytest.fixture
def gemma2() -> Anatomy:
    """Eager attention whose softmax is summed in float32, as transformers has it; a window of four tokens."""
    return Anatomy(tiny_model("gemma2"))


def test_padding_beyond_a_window_changes_nothing_in_float64(gemma2: Anatomy) -> None:
    expected = ends_alone(gemma2.model)
    assert torch.isfinite(expected).all()
    found = gemma2.logits(ends_of(gemma2, SENTENCES).final_PD).log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    plain = PlainEngine(gemma2, PROMPTS)
    assert any(len(batch) > 1 for batch in plain.batches)
    assert np.abs(plain.baseline().logprob_EA[0] - scored_alone(gemma2.model)).max() < 1e-5
    assert packing_deviation(PackedEngine(gemma2, PROMPTS), gemma2, PROMPTS) < 1e-5


def test_the_harness_pads_on_the_left_without_changing_an_answer_in_float64(gemma2: Anatomy) -> None:
    task, tokenizer = small(task_file("svamp")), tiny_tokenizer()
    tested = Harness(gemma2.model, tokenizer)
    answers = tested.answer(task, WORD_ITEMS, [])
    assert tested.lm.batch_size_per_gpu >= 3  # contexts of unlike length share a batch
    for item, answer in zip(WORD_ITEMS, answers, strict=True):
        written = decode_by_hand(gemma2.model, tokenizer(task.text(item))["input_ids"], 8)
        assert answer.response == tokenizer.decode(written, skip_special_tokens=True).split("Question:")[0]


def test_the_harness_reads_items_one_by_one_where_the_longest_would_change_the_others() -> None:
    task, tokenizer = small(task_file("svamp")), tiny_tokenizer()
    model = Anatomy(drawn(CONFIGS["dynamic"])).model
    model.config.max_position_embeddings = ORIGINAL
    tested = Harness(model, tokenizer)
    assert tested.batch_size(ORIGINAL + 5, task) == 1


@pytest.mark.parametrize(("config", "length"), [
    (GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=13), 13),
    (CONFIGS["dynamic"], ORIGINAL),
    (CONFIGS["longrope"], ORIGINAL),
])  # fmt: skip
def test_rows_of_training_are_padded_no_further_than_positions_allow(config, length: int) -> None:
    """Widths are multiples of eight: 13 tokens would be padded to 16, which a table of 13 positions does not have."""
    model = drawn(config)
    samples = [Sample(tuple(range(4, 4 + length)), (length - 1,)), Sample((4, 5, 6, 7), (2, 3))]
    expected = [alone(model, s.input_ids)[index - 1] for s in samples for index in s.answer]
    anatomy = Anatomy(model)
    batch = padded(samples, 3, anatomy.shape.positions)
    assert batch["input_ids_BT"].shape[1] == length
    with torch.no_grad():
        logits_NV = AnswerLoss(model, anatomy).logits(batch["input_ids_BT"], batch["before_N"])
    torch.testing.assert_close(logits_NV.log_softmax(-1), torch.stack(expected), rtol=0, atol=1e-10)
