"""Where scans are computed, for every command and workflow: in this process, on Ray, or by a service.

Knows ``run_scan`` and its places; knows nothing about experiments. Imports nothing heavy before a scan runs.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mathinterp.errors import UserError

if TYPE_CHECKING:
    from mathinterp.cluster.run import RunSummary
    from mathinterp.experiments.base import Experiment
    from mathinterp.models.catalog import ResolvedModel
    from mathinterp.models.handle import Model
    from mathinterp.models.spec import ModelSpec
    from mathinterp.prompts.prompt import Prompt
    from mathinterp.service.requests import Requests


@dataclass(frozen=True)
class Workers:
    """Where shards are computed; None everywhere: in this process, without Ray.

    replicas, gpus_per_replica, address: as for ``run_scan``.
    service: its URL, or what asks one, in place of this process and of Ray: ``address`` is left aside, ``replicas`` are
        the most of its replicas that a run takes. Raises UserError beside ``gpus_per_replica``.
    """

    replicas: int | None = None
    gpus_per_replica: float | None = None
    address: str | None = None
    service: "str | Requests | None" = None

    def __post_init__(self) -> None:
        if self.service is not None:
            check_cards_unsaid(self.gpus_per_replica)

    @property
    def without_service(self) -> dict[str, Any]:
        """The arguments of ``run_scan``."""
        return {"replicas": self.replicas, "gpus_per_replica": self.gpus_per_replica, "address": self.address}

    def attached(self) -> "Workers":
        """These, with a service that has answered; raises UserError where none does. Ray is not asked yet."""
        return self if self.service is None else replace(self, service=self._requests())

    def connected(self) -> AbstractContextManager[None]:
        """Several scans in the block share one connection to Ray, where they go to Ray."""
        if self.service is not None or self == HERE:
            return nullcontext()
        from mathinterp.cluster import ray_cluster

        return ray_cluster.connection(self.address)

    def described(self, model: "Model") -> "ResolvedModel":
        """The model as this process finds it, or as the service does; raises UserError for one it cannot be asked."""
        if self.service is None:
            return model.described
        from mathinterp.service.place import OnService

        return OnService(self._requests(), model).described()

    def _requests(self) -> "Requests":
        from mathinterp.service.requests import Requests

        assert self.service is not None
        return Requests(self.service) if isinstance(self.service, str) else self.service


HERE = Workers()


def check_cards_unsaid(gpus_per_replica: float | None) -> None:
    """Raise UserError for cards of a replica where replicas are a service's."""
    if gpus_per_replica is not None:
        raise UserError("`gpus_per_replica` is said when the service is started; leave it out")


def run_at(
    workers: Workers, scan: "Experiment", model: "Model | ModelSpec", prompts: "Sequence[Prompt]", store_url: str,
    **more: Any,
) -> "RunSummary":  # fmt: skip
    """``run_scan`` where ``workers`` says.

    Args:
        more: further arguments of ``run_scan``.
    Raises:
        UserError: as ``run_scan``; or the service cannot be asked for this model or experiment, before anything is
            written. It never runs elsewhere instead.
        Unfinished: the service ended meanwhile; the same call goes on.
    """
    from mathinterp.cluster.run import run_scan

    if workers.service is None:
        return run_scan(scan, model, prompts, store_url, **workers.without_service, **more)
    from mathinterp.models.handle import model_of
    from mathinterp.service.place import OnService

    named = model_of(model)
    place = OnService(workers._requests(), named, workers.replicas, scan=scan)
    return run_scan(scan, named, prompts, store_url, place=place, **more)
