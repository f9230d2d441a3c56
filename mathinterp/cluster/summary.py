"""How a call of run_scan ended, in numbers; imports nothing heavy."""

from dataclasses import dataclass, field

from mathinterp.cluster.dispatch import ShardFailure


@dataclass(frozen=True)
class RunSummary:
    """How a call of run_scan ended."""

    run_id: str
    store: str  # absolute path or URL
    shards: int  # of the whole run
    reused: int  # finished by earlier calls
    done: int  # finished by this call
    rows: int  # written by this call
    evaluations: int  # forward evaluations behind these rows
    seconds: float  # of this call
    device: str | None  # "cuda" or "cpu"; None: nothing was left to do
    replicas: int
    replicas_lost: int
    busy: float  # part of the ready replicas' time that went into shards
    peak_memory: int  # bytes, most of any replica
    failed: list[ShardFailure] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every shard of the run has its file."""
        return self.reused + self.done == self.shards
