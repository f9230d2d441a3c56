"""Addition modulo 10 by angles, as arXiv 2502.00873 finds it in trained models: every neuron's coefficient is known."""

import math

import torch

from mathinterp.models.ground_truth.planted import Planted, prompt_of
from mathinterp.models.ground_truth.written import STEEP, Written
from mathinterp.models.units import Head, Mlp, Neuron

OPERAND_A, OPERAND_B, PRODUCTS, RESIDUES = Head(0, 3), Head(1, 1), Mlp(1), Mlp(2)
UNREAD = Head(0, 0)
# Neurons 2 i and 2 i + 1 of PRODUCTS multiply a coordinate of a with one of b, and add that, signed, to one of the sum.
TERMS = ((0, 0, 0, 1), (1, 1, 0, -1), (1, 0, 1, 1), (0, 1, 1, 1))  # a, b, sum, sign; 0: cosine, 1: sine
TWO_PI, LENGTH, SLOPE, THRESHOLD = 2 * math.pi, 2.0, 2.0, 2.95


def hand(number: int) -> tuple[float, float]:
    """Cosine and sine of the angle of a number: once around in 10."""
    return math.cos(TWO_PI * number / 10), math.sin(TWO_PI * number / 10)


@torch.no_grad()
def clock() -> Planted:
    """ "37 plus 45 is" -> 2, the sum modulo 10: heads copy angles to END, MLP 1 adds them, MLP 2 reads the sum.

    Numbers 0 to 99 are one token each. Head 0.3 copies operand A's angle, head 1.1 operand B's. With x of A and y of B
    (cosine or sine, over the norm's scale), neuron 2 i of MLP 1 has the coefficient silu(2 x) y and neuron 2 i + 1
    silu(-2 x) (-y): together 2 x y, of period 10 in each operand; cos(A + B) and sin(A + B) are sums of such products.
    Neuron r of MLP 2 fires iff the angle of the sum is that of r: iff (a + b) mod 10 = r.
    """
    numbers = [str(number) for number in range(100)]
    features = {"hand": 2, "name": 8, "a": 2, "b": 2, "sum": 2, "result": 10}
    written = Written([*numbers, "plus", "is"], features, neurons=10, seed=2)
    names = 0.3 * torch.randn(100, 8, generator=written.random, dtype=torch.float64)  # by which decoys know numbers
    for number, word in enumerate(numbers):
        written.embed(word, {("hand", i): LENGTH * part for i, part in enumerate(hand(number))})
        written.embed(word, {("name", i): float(part) for i, part in enumerate(names[number])})
    for head, back, write in ((OPERAND_A, 3, "a"), (OPERAND_B, 1, "b")):
        written.move(head, back, "hand", write)
    written.move(UNREAD, 1, "name")
    for pair, (a, b, total, sign) in enumerate(TERMS):
        for neuron, half in ((2 * pair, 1), (2 * pair + 1, -1)):
            down = {("sum", total): sign / SLOPE}
            written.neuron(PRODUCTS.layer, neuron, {("a", a): half * SLOPE}, {("b", b): half}, down)
    for residue in range(10):
        gate = {("sum", i): STEEP * part for i, part in enumerate(hand(residue))}
        gate["one", 0] = -THRESHOLD * STEEP
        written.neuron(RESIDUES.layer, residue, gate, {("one", 0): 1}, {("result", residue): 8 / STEEP})
        written.answer(str(residue), ("result", residue))
    prompts = [
        prompt_of(
            f"{a} plus {b} is", (a + b) % 10, f"{(a + 13) % 100} plus {(b + 24) % 100} is", (a + b + 7) % 10,
            operation="add", operand_a=str(a), operand_b=str(b),
        )
        for a in range(100) for b in range(100)
    ]  # fmt: skip
    circuit: dict[Head | Mlp, str] = {
        OPERAND_A: "copies operand A's angle to END", OPERAND_B: "copies operand B's angle to END",
        PRODUCTS: "adds the angles", RESIDUES: "tells which residue the sum is",
    }  # fmt: skip
    writers = tuple(Neuron(RESIDUES.layer, residue) for residue in range(10))
    neurons = (*(Neuron(PRODUCTS.layer, neuron) for neuron in range(2 * len(TERMS))), *writers)
    return Planted("clock", written, tuple(prompts), circuit, neurons, writers)
