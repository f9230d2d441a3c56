"""How much a LoRA in one layer enlarges the coefficients of the neurons it enhances most (paper A, section 5)."""

from mathinterp.experiments.charts import curves
from mathinterp.experiments.figures import LAYER, Figure, Tip, titled
from mathinterp.experiments.results import Results


def draw(results: Results) -> Figure:
    """A line for each number of neurons, against the layer that has the LoRA."""
    rows = results.frame(
        """SELECT layer, k, 'first ' || k AS first, prompts, increase, increase_supporting, opposing,
                  importance_increase
           FROM lora_sweep_coefficients WHERE run_id = $run ORDER BY layer, k"""
    )
    increase = Tip("increase", "increase of coefficients", "%")
    tips = [
        LAYER, Tip("first", "neurons", "text"), increase,
        Tip("increase_supporting", "of those that supported the answer", "%"),
        Tip("opposing", "share that opposed it", "%"), Tip("importance_increase", "increase of importance", "nats"),
        Tip("prompts", "prompts", "whole"),
    ]  # fmt: skip
    names = [f"first {k}" for k in sorted(rows["k"].unique())]
    return titled(
        curves(rows, LAYER, increase, None, tips, series=Tip("first", "neurons"), order=names, rule=[0], panel=None),
        results, "What a LoRA in one layer does to the neurons it enhances most",
        "Curves of the relative increase of coefficients, mean over prompts, against the layer that has the LoRA.",
    )  # fmt: skip
