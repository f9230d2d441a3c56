"""A head that tells another one where to look: an effect that goes through attention weights alone."""

import torch

from mathinterp.models.ground_truth.planted import Planted, prompt_of
from mathinterp.models.ground_truth.written import Written
from mathinterp.models.units import Head, Mlp

WHICH, READER = Head(0, 2), Head(1, 3)
UNREAD = (Head(0, 0), Head(0, 1))
PLACES = {"first": 3, "second": 2}  # how many tokens before END


@torch.no_grad()
def pointer() -> Planted:
    """ "3 5 first is" -> 3: head 0.2 copies "first" or "second" to END, and head 1.3 looks where that says and answers.

    Attention is saturated: the gradient through its weights is 0, so gradients at one input see nothing of head 0.2.
    """
    digits = [str(digit) for digit in range(10)]
    written = Written([*digits, *PLACES, "is"], {"digit": 10, "place": 2, "which": 2, "result": 10}, neurons=0, seed=1)
    for i, word in enumerate(digits):
        written.embed(word, {("digit", i): 1})
        written.answer(word, ("result", i))
    written.move(WHICH, 1, "place", "which")
    for head, back in zip(UNREAD, PLACES.values(), strict=True):
        written.move(head, back, "digit")
    written.clear(READER)
    written.copy(READER, "digit", "result")
    for i, (word, back) in enumerate(PLACES.items()):
        written.embed(word, {("place", i): 1})
        written.attend(READER, back, when=("which", i))
    prompts = []
    for a, b in [(a, b) for a in range(10) for b in range(10) if a != b]:
        for place, word in enumerate(PLACES):
            other = ((a + 3) % 10, (b + 4) % 10)
            answers = (a, b)[place], other[1 - place]
            if answers[0] != answers[1]:
                text, changed = f"{a} {b} {word} is", f"{other[0]} {other[1]} {list(PLACES)[1 - place]} is"
                prompts.append(prompt_of(text, answers[0], changed, answers[1], operation=word))
    circuit: dict[Head | Mlp, str] = {
        WHICH: "copies which place is meant to END",
        READER: "copies the digit in that place to END",
    }
    return Planted("pointer", written, tuple(prompts), circuit)
