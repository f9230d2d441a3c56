"""Several sites of several layers replaced in one pass: heads, MLPs and neurons together.

On the packed trees the layers run from the lowest edited one; the plain engine runs whole forward passes, as the slow,
obvious twin.

Shape legend: A answer token, D model width, N tree node or token, R row (pack or prompt), Z width of a site.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from mathinterp.engine.choose import Engine
from mathinterp.engine.edits import PlacedReplacement, Replacement
from mathinterp.engine.hooks import Edit as HookEdit
from mathinterp.engine.hooks import edited_site
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.parts import gather_rows
from mathinterp.engine.plain import PlainEngine
from mathinterp.engine.scores import ScoreBoard, Scores, check_finite, score
from mathinterp.models.anatomy import Anatomy


@dataclass(frozen=True)
class SiteEdit:
    """Some columns of one site of one layer, and what they become.

    site: "head", "mlp" or "neuron", see edits.site_width.
    columns_Z: boolean, which of the site's numbers are replaced.
    """

    layer: int
    site: str
    columns_Z: torch.Tensor
    replacement: Replacement


def score_together(engine: Engine, edits: Sequence[SiteEdit], label: str) -> Scores:
    """Scores (1 x A) with all ``edits`` made at once.

    Raises:
        FloatingPointError: a score is NaN or infinite; names ``label`` and the prompt.
    """
    assert edits, "nothing is edited"
    assert isinstance(engine, PackedEngine | PlainEngine)
    board = ScoreBoard(1, len(engine.answers), engine.anatomy)
    fill = _fill_packed if isinstance(engine, PackedEngine) else _fill_plain
    with torch.inference_mode():
        fill(engine, board, [(edit, engine.place(edit.replacement)) for edit in edits])  # type: ignore[arg-type]
    scores = board.scores(engine.answers.gold_A)
    check_finite(scores, [label], engine.answers, engine.prompts)
    return scores


def _fill_packed(engine: PackedEngine, board: ScoreBoard, edits: Sequence[tuple[SiteEdit, PlacedReplacement]]) -> None:
    anatomy, start = engine.anatomy, min(edit.layer for edit, _ in edits)
    for group, calls in zip(engine.groups, engine.calls, strict=True):
        rows = [_rows(placed, group.span) for _, placed in edits]
        hidden_RND = engine.residual_LPND[start, group.span].to(anatomy.device)
        with _edited(anatomy, [edit for edit, _ in edits], rows):
            for layer in range(start, anatomy.shape.n_layers):
                hidden_RND = calls.layer[layer](engine.layers[layer], hidden_RND)
        last_AD = gather_rows(hidden_RND, group.slots_PM)[group.answer_packs, group.answer_slots]
        board.fill(0, group.answers, score(anatomy, last_AD[None], group.gold))


def _fill_plain(engine: PlainEngine, board: ScoreBoard, edits: Sequence[tuple[SiteEdit, PlacedReplacement]]) -> None:
    for batch in engine.batches:
        with _edited(engine.anatomy, [edit for edit, _ in edits], [_rows(placed, batch) for _, placed in edits]):
            hidden_RND = engine._forward(batch)
        engine._score_batch(board, 0, batch, hidden_RND)


def _rows(placed: PlacedReplacement, rows: object) -> PlacedReplacement:
    if placed.where_RT is None:
        return placed
    return PlacedReplacement(placed.values[rows], placed.where_RT[rows])  # type: ignore[index]


@contextmanager
def _edited(anatomy: Anatomy, edits: Sequence[SiteEdit], placed: Sequence[PlacedReplacement]) -> Iterator[None]:
    with ExitStack() as hooks:
        for edit, new in zip(edits, placed, strict=True):
            hooks.enter_context(edited_site(anatomy, edit.site, edit.layer, _hook(edit, new)))
        yield


def _hook(edit: SiteEdit, placed: PlacedReplacement) -> HookEdit:
    def replaced(clean_RNZ: torch.Tensor) -> torch.Tensor:
        length, new = clean_RNZ.shape[1], placed
        if placed.where_RT is not None:  # a batch is as long as its longest sentence, the layout as the longest of all
            new = PlacedReplacement(placed.values[:, :length], placed.where_RT[:, :length])
        return torch.where(edit.columns_Z.to(clean_RNZ.device), new.apply(clean_RNZ), clean_RNZ)

    return replaced
