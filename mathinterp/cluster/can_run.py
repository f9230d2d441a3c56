"""Whether an experiment can run on a model where it is to run: asked before anything is loaded or written."""

from mathinterp.cluster.places import Cards
from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment
from mathinterp.experiments.costs import parameters
from mathinterp.models.card_memory import ROOM, check_fits, runs_own_code
from mathinterp.models.resolved import DTYPE_BYTES, ResolvedModel


def check_model(scan: Experiment | None, model: ResolvedModel, place: Cards) -> None:
    """Raise UserError for what this experiment cannot do with a model so loaded, or cards that cannot hold it.

    ``scan`` None: a question that is no experiment's and can be asked of any model.
    """
    cards, card_bytes = place.cards(), place.card_bytes()
    if cards > 1 and scan is not None and not scan.runs_split:
        raise UserError(f"`gpus_per_replica` {cards}: {scan.name} needs its model whole on one GPU; give 1 or less")
    if cards > (layers := model.shape.n_layers):
        raise UserError(f"`gpus_per_replica` {cards}: model '{model.label}' has only {layers} layers to deal out")
    if cards > 1 and model.spec.trust_remote_code and runs_own_code(model):
        raise UserError(f"`gpus_per_replica` {cards}: model '{model.label}' runs its own code; give 1 or less")
    if model.spec.load_in is not None and scan is not None and not scan.runs_quantised:
        raise UserError(
            f"`load_in` {model.spec.load_in}: {scan.name} reads or trains weights as numbers, and quantised ones are"
            " none; leave it out (`gpus_per_replica` 2 deals layers out to two GPUs)"
        )
    if card_bytes is not None and not _fits_easily(model, card_bytes):
        check_fits(model, cards, card_bytes)


def _fits_easily(model: ResolvedModel, card_bytes: int) -> bool:
    """Whether one card has room for all matrices twice over; counted from sizes, without the seconds that it takes to
    import the model's class and build it.
    """
    each = max(DTYPE_BYTES[model.dtype], 0 if model.adapter is None else 4)
    return 2 * each * parameters(model.shape) <= ROOM * card_bytes
