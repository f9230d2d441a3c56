"""What a service is started with; imports nothing heavy."""

from dataclasses import dataclass

from mathinterp.errors import UserError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def url_of(host: str, port: int) -> str:
    """Where a server of this machine is reached from this machine."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "", "localhost") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


@dataclass(frozen=True)
class Settings:
    """What a service is started with.

    host, port: where it listens; port 0: any that is free.
    token: that requests must bring; needed unless host is loopback.
    address, replicas, gpus_per_replica: as for runs: a Ray cluster, and the processes on it.
    card_gb, memory_gb: of weights on all cards of one process together, and in its host memory; None: a share of what
        there is.
    experiments: ``module:Class`` of experiments from outside the package.
    """

    host: str = "127.0.0.1"
    port: int = 8390
    token: str | None = None
    address: str | None = "local"
    replicas: int | None = None
    gpus_per_replica: float | None = None
    card_gb: float | None = None
    memory_gb: float | None = None
    experiments: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise UserError for a host that is open to others without a token."""
        if self.host not in LOOPBACK and self.token is None:
            raise UserError(
                f"`host` {self.host} can be reached by others: give a token, by `token_file` (mode 0600) or in"
                " MATHINTERP_SERVICE_TOKEN; without `host` the service answers this machine alone"
            )
