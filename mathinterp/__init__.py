"""mathinterp: find, explain and improve the parts of a language model that do arithmetic.

``import mathinterp as mi`` gives ``load``, ``wrap``, ``prompts``, ``run``, ``plan``, ``ablate``, ``stability``,
``league``, ``evaluate``, ``tune``, ``open_store``, ``connect`` and ``experiments``. They are imported when first used.

>>> import mathinterp as mi
>>> model = mi.load("bundled")
>>> prompts = mi.prompts("two_digit", limit=16)
>>> run = mi.run(mi.experiments.Heads(layers=[0]), model, prompts, store="results", progress=False)
>>> effects = run.table("head_effects").query("operation == 'all'").sort_values("drop", ascending=False)
>>> worst = int(effects["head"].iloc[0])
>>> bool(mi.ablate(model, prompts, heads=[(0, worst)]).drop == effects["drop"].iloc[0])
True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mathinterp import experiments as experiments
    from mathinterp import tune as tune
    from mathinterp.connected import connect as connect
    from mathinterp.errors import UserError as UserError
    from mathinterp.evaluation.jobs import evaluate as evaluate
    from mathinterp.experiments.question import ablate as ablate
    from mathinterp.face import load as load
    from mathinterp.face import open_store as open_store
    from mathinterp.face import plan as plan
    from mathinterp.face import run as run
    from mathinterp.face import stability as stability
    from mathinterp.face import wrap as wrap
    from mathinterp.prompts.given import prompts_of as prompts
    from mathinterp.workflows.league import league as league

__version__ = "0.1.0"
__all__ = [
    "UserError", "ablate", "connect", "evaluate", "experiments", "league", "load", "open_store", "plan", "prompts",
    "run", "stability", "tune", "wrap",
]  # fmt: skip

_ROOMS = {
    "UserError": "errors",
    "ablate": "experiments.question",
    "connect": "connected",
    "evaluate": "evaluation.jobs",
    "league": "workflows.league",
}  # of what is not in face.py


def __getattr__(name: str) -> Any:
    """A public function or room, imported now (PEP 562)."""
    if name in ("experiments", "prompts", "tune"):  # modules; that of prompts can be called
        return import_module(f"mathinterp.{name}")
    if name in __all__:
        return getattr(import_module(f"mathinterp.{_ROOMS.get(name, 'face')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
