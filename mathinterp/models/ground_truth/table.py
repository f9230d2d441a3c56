"""Addition and subtraction modulo 10 by three heads and a table; and the same with a backup head."""

import torch

from mathinterp.models.ground_truth.planted import Planted, prompt_of
from mathinterp.models.ground_truth.written import STEEP, Written
from mathinterp.models.units import Head, Mlp
from mathinterp.prompts.prompt import Prompt

SIGNS = {"plus": 1, "minus": -1}
OPERAND_A, OPERAND_B, OPERATOR, BACKUP, TABLE = Head(0, 1), Head(1, 0), Head(1, 2), Head(2, 1), Mlp(2)
UNREAD = Head(0, 0)
CASES = [(a, sign, b) for a in range(10) for sign in range(2) for b in range(10)]


def table() -> Planted:
    """ "3 plus 5 is" -> 8, modulo 10: head 0.1 copies operand A to END, 1.2 the operator, 1.0 operand B.

    MLP 2 is a table: its neuron 20 a + 10 s + b (s = 0 for plus, 1 for minus) fires iff END holds a, s and b, and
    writes the result.
    """
    return _planted("table", backup=False)


def backup() -> Planted:
    """ "3 plus 5 is" -> 8 as in the table, and head 2.1 copies operand A to END iff nothing has, else it rests on BOS.

    So zeroing head 0.1 alone changes nothing (self-repair), and neither does whatever is done to head 2.1 alone.
    """
    return _planted("backup", backup=True)


def result(a: int, sign: int, b: int) -> int:
    """Modulo 10."""
    return (a - b if sign else a + b) % 10


def _prompts() -> tuple[Prompt, ...]:
    """All 200; in the counterfactual of each, both operands, the operator and the result are others."""
    words = list(SIGNS)
    found = []
    for a, sign, b in CASES:
        other = ((a + 3) % 10, 1 - sign, (b + 4) % 10)
        texts = [f"{x} {words[s]} {y} is" for x, s, y in ((a, sign, b), other)]
        found.append(
            prompt_of(
                texts[0], result(a, sign, b), texts[1], result(*other), operation=("add", "sub")[sign],
                operand_a=str(a), operand_b=str(b),
            )
        )  # fmt: skip
    return tuple(found)


@torch.no_grad()
def _planted(name: str, *, backup: bool) -> Planted:
    digits = [str(digit) for digit in range(10)]
    features = {"bos": 1, "digit": 10, "sign": 2, "a": 10, "s": 2, "b": 10, "result": 10}
    written = Written([*digits, *SIGNS, "is"], features, neurons=len(CASES), seed=0)
    written.embed("<s>", {("bos", 0): 1})
    for i, word in enumerate(digits):
        written.embed(word, {("digit", i): 1})
        written.answer(word, ("result", i))
    for i, word in enumerate(SIGNS):
        written.embed(word, {("sign", i): 1})
    for head, back, read, write in (
        (OPERAND_A, 3, "digit", "a"), (OPERATOR, 2, "sign", "s"), (OPERAND_B, 1, "digit", "b"),
    ):  # fmt: skip
        written.move(head, back, read, write)
    written.move(UNREAD, 1, "digit")
    if backup:
        written.move(BACKUP, 3, "digit", "a")
        written.rest(BACKUP, ("bos", 0), while_="a")
    for neuron, (a, sign, b) in enumerate(CASES):
        gate = {("a", a): STEEP, ("s", sign): STEEP, ("b", b): STEEP, ("one", 0): -2.5 * STEEP}
        written.neuron(TABLE.layer, neuron, gate, {("one", 0): 1}, {("result", result(a, sign, b)): 2 / STEEP})
    circuit: dict[Head | Mlp, str] = {
        OPERAND_A: "copies operand A to END",
        OPERATOR: "copies the operator to END",
        OPERAND_B: "copies operand B to END",
        TABLE: "looks the result up",
    }
    if backup:
        circuit[BACKUP] = "copies operand A to END iff no other head has"
    stand_ins = {BACKUP: OPERAND_A} if backup else {}
    return Planted(name, written, _prompts(), circuit, stand_ins=stand_ins)
