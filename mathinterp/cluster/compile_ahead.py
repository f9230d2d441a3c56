"""What a replica does before it loads its weights: compile, and have the weights' files read meanwhile.

A scan that compiles layers does so on random layers of the model's own config: torch keeps what it compiled with the
functions that were compiled, not with a model, so the loaded model finds all of it. Compiling takes one core and
nearly no memory of the device, reading takes the disk: side by side they cost the longer of the two.
"""

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from mathinterp.experiments.base import Experiment, Subject
from mathinterp.models.catalog import ResolvedModel, files_to_load, stand_in
from mathinterp.prompts.prompt import TokenizedPrompt

READ_SHARE = 0.5  # of the memory that is free: files larger than this would push themselves out of the page cache
READ_AT_ONCE = 16 * 2**20  # bytes

logger = logging.getLogger(__name__)


def compile_ahead(
    scan: Experiment,
    resolved: ResolvedModel,
    prompts: Sequence[TokenizedPrompt],
    device: str,
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """Compile what ``scan`` will compile on the model, if it will, while the model's files are read; JSON notes.

    The notes are empty where nothing compiles. Else they hold ``compile_ahead_seconds``, or ``compile_ahead_skipped``
    with the reason: the model runs its own code, whose layers need not be of one kind, the device has no memory for
    even a few layers beside what others keep there, or they fail. Then the scan compiles later, in ``prepare``.
    """
    if not scan.compiles(resolved.shape, prompts, device):
        return {}
    if resolved.spec.load_in is not None:
        return {}
    if resolved.spec.trust_remote_code:
        return {"compile_ahead_skipped": "the model runs its own code"}
    started = time.time()
    with reading_ahead(files_to_load(resolved)):
        if device == "cuda":
            _start_compile_workers()
        try:
            scan.compile_ahead(Subject(stand_in(resolved, device), prompts, max_tokens), resolved.shape)
        except torch.cuda.OutOfMemoryError:
            return {"compile_ahead_skipped": "out of GPU memory"}
        except (RuntimeError, ArithmeticError) as error:  # nothing is lost but time: the model itself may well run
            logger.warning("compiling ahead on random layers failed, so the scan compiles later: %s", error)
            return {"compile_ahead_skipped": f"{type(error).__name__}: {error}"}
        finally:
            _free(device)
    return {"compile_ahead_seconds": time.time() - started}


@contextlib.contextmanager
def reading_ahead(files: Sequence[Path]) -> Iterator[None]:
    """Read ``files`` in the background while the block runs, so that loading them finds them in the page cache.

    Nothing is read if they take more than READ_SHARE of the free memory. A file that cannot be read is left to
    the load, which reports it. What is not read when the block ends stays unread.
    """
    ended = threading.Event()
    reader = threading.Thread(target=_read, args=(files, ended), name="reading-ahead", daemon=True)
    reader.start()
    try:
        yield
    finally:
        ended.set()
        reader.join()


def _read(files: Sequence[Path], ended: threading.Event) -> None:
    buffer = bytearray(READ_AT_ONCE)
    try:
        if sum(file.stat().st_size for file in files) > READ_SHARE * psutil.virtual_memory().available:
            return
        for file in files:
            with file.open("rb", buffering=0) as stream:
                while not ended.is_set() and stream.readinto(buffer):
                    pass
    except OSError:
        return


def _start_compile_workers() -> None:
    """Have torch start its compile workers, seconds before they are needed: else kernels compile one after another."""
    from torch._inductor.async_compile import AsyncCompile  # a slow import

    AsyncCompile.warm_pool()
    with contextlib.suppress(AttributeError):  # not in every version of torch; it only saves time
        AsyncCompile.wakeup()


def _free(device: str) -> None:
    """Modules and their hooks refer to each other in circles; their memory is for the weights to come."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
