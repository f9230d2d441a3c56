"""``mathinterp serve``: start, look at and stop a service that keeps models loaded (see docs/service.md)."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli import interrupt
from mathinterp.cli.group import Group
from mathinterp.cli.options import Real, Whole, cluster_options, json_option
from mathinterp.cli.output import console, print_json, print_table
from mathinterp.cli.verbosity import say_on_stderr, verbosity
from mathinterp.cli.waiting import Waiting, found_in, last_word
from mathinterp.errors import UserError
from mathinterp.text import counted

if TYPE_CHECKING:
    from mathinterp.service.state import Running

PORT = 8390
START_SECONDS = 600.0  # a cluster may have to start a machine first
STOP_SECONDS = 8.0  # for one that was starting to end when this command is interrupted, which has 20 s in all


@click.group(cls=Group)
def serve() -> None:
    """Keep models loaded for many questions and users: a service that scans and notebooks attach to.

    \b
    Examples:
      mathinterp serve start
      mathinterp scan heads --heads 0.6,0.1 --limit 20 --service http://127.0.0.1:8390
      mathinterp serve status
      mathinterp serve stop
    """


@serve.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; other ones need a token.")
@click.option(
    "--port", type=Whole(0, 65535), default=PORT, show_default=True, help="Port to listen on; 0: one that is free."
)
@click.option(
    "--token-file", default=None, metavar="FILE",
    help="A file, mode 0600, with the token that requests must bring. Default: MATHINTERP_SERVICE_TOKEN, or the file"
    " that MATHINTERP_SERVICE_TOKEN_FILE names, if one is set.",
)  # fmt: skip
@cluster_options()
@click.option(
    "--card-gb",
    type=Real(0, above=True),
    default=None,
    help="Most GB of weights on all GPUs of one replica together. Default: 60 % of their memory, or of its part.",
)
@click.option(
    "--memory-gb", type=Real(0, above=True), default=None,
    help="Most GB of weights in host memory of one replica. Default: half of what is free on this machine, shared by"
    " all replicas; give it where they run on others.",
)  # fmt: skip
@click.option(
    "--experiment", "experiments", multiple=True, metavar="MODULE:CLASS",
    help="An experiment from outside the package that may be asked for; may be given more than once.",
)  # fmt: skip
@click.option("--foreground", is_flag=True, help="Serve in this process, until it is stopped; for containers.")
def start(foreground: bool, token_file: str | None, **options: Any) -> None:
    """Start a service on this machine, and return when it answers.

    \b
    Examples:
      mathinterp serve start
      mathinterp serve start --replicas 1 --memory-gb 8
      mathinterp serve start --gpus-per-replica 2
      mathinterp serve start --host 0.0.0.0 --token-file token --foreground
    """
    from mathinterp.experiments import registry
    from mathinterp.service import state
    from mathinterp.service.settings import Settings

    settings = Settings(token=state.token_of(token_file), **options)
    settings.check()
    state.made_folder()
    for name in settings.experiments:
        registry.find(name)
    if settings.port and (running := state.on_port(settings.port)) is not None:
        raise UserError(
            f"a service runs already at {running.url}, process {running.pid}; 'mathinterp serve stop' ends it"
        )
    if foreground:
        _serve(settings)
        return
    running = _spawn(token_file, options)
    console.print(f"A service runs at {running.url}, process {running.pid}; its log is {running.log}")
    console.print("Attach to it: --service URL, or mi.connect(URL); 'mathinterp serve stop' ends it")


def _serve(settings: Any) -> None:
    """Serve until a signal comes; a fault of the program keeps its traceback."""
    from mathinterp.service import state
    from mathinterp.service.serve import serving

    interrupt.say("the service was stopped")
    with serving(settings) as service:
        waiting, log = Waiting(), os.environ.get(LOG, "")
        running = state.write(service.host, service.port, log, ready=False)
        try:
            service.router.until_ready(lambda ready: waiting.tell(lambda: (ready, service.router.slots)))
            running = state.write(service.host, service.port, log)
            say_on_stderr(f"serving at {running.url}", url=running.url)
            service.router.until_ended()
        finally:
            state.remove(running)


LOG = "MATHINTERP_SERVICE_LOG"  # names the log to the process that is started


def _spawn(token_file: str | None, options: dict[str, Any]) -> "Running":
    """A process of its own that serves; raises what it says if it ends instead."""
    from mathinterp.service import state

    interrupt.say("interrupted; the service was not started")
    log = state.folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    words, replicas = ["serve", "start", "--foreground", *_words(token_file, options)], options["replicas"]
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "mathinterp", *words], stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True, env={**os.environ, LOG: str(log)},
        )  # fmt: skip
    waiting, until = Waiting(log), time.monotonic() + START_SECONDS
    try:
        while process.poll() is None:
            waiting.tell(lambda: found_in(log, replicas))
            for running in state.services():
                if running.pid == process.pid and running.ready:
                    return running
            if time.monotonic() > until:
                raise UserError(f"the service was not ready within {START_SECONDS:.0f} s; its log is {log}")
            time.sleep(0.1)
    except BaseException as error:
        if not isinstance(error, UserError):
            log.unlink(missing_ok=True)
        state.end(process.pid, STOP_SECONDS)
        process.wait()
        state.services()  # takes away the file of one that had to be killed
        raise
    last = last_word(log)
    if process.returncode == 2:
        log.unlink()
        raise UserError(last)
    raise click.ClickException(f"the service ended with exit code {process.returncode}: {last} (its log is {log})")


def _words(token_file: str | None, options: dict[str, Any]) -> list[str]:
    """The options again, as words; what is said, and how, too."""
    from mathinterp.cluster import dispatch

    words = [*verbosity(), "--hangs-after", str(dispatch.SILENCE)]
    words += [] if token_file is None else ["--token-file", token_file]
    for name in options["experiments"]:
        words += ["--experiment", name]
    for name, value in options.items():
        words += [] if value is None or name == "experiments" else [f"--{name.replace('_', '-')}", str(value)]
    return words


@serve.command()
@click.option("--service", default=None, metavar="URL", help="Which one. Default: the one of this machine.")
@click.option("--port", type=Whole(0, 65535), help="Of which service of this machine. Default: its only one.")
@json_option()
def status(service: str | None, port: int | None, as_json: bool) -> None:
    """Models with their level and bytes, replicas, queue and users.

    \b
    Example:
      mathinterp serve status --json
    """
    from mathinterp.service.requests import Requests

    if service is not None and port is not None:
        raise UserError("`service` and `port` both say which one; give one of them")
    url = _only(port).url if service is None else service
    found = Requests(url).json("GET", "/v1/status", seconds=10.0)
    if as_json:
        print_json({"url": url, **found})
        return
    replicas = [{name: fact for name, fact in row.items() if name != "card_bytes"} for row in found["replicas"]]
    each = found.get("gpus_per_replica", 0)
    gpus = f" ({each:g} GPU{'s' if each > 1 else ''} each)" if each else ""
    console.print(
        f"{url}: {counted(len(replicas), 'replica')} on {found['device']}{gpus}, {counted(found['queue'], 'request')}"
        f" waiting, up for {time.time() - found['started_at']:.0f} s, {counted(found['replaced'], 'replica')} replaced"
    )
    print_table(replicas, title="Replicas")
    print_table(found["models"], title="Models")
    print_table(found["users"], title="Users")


@serve.command()
@click.option("--port", type=Whole(0, 65535), help="Of which service. Default: the only one of this machine.")
def stop(port: int | None) -> None:
    """Stop the service of this machine, with all of its processes; what was stored stays.

    \b
    Example:
      mathinterp serve stop
    """
    from mathinterp.service import state

    running = _only(port)
    clean = state.stop(running)
    if running.log and clean:
        Path(running.log).unlink(missing_ok=True)
    console.print(f"The service at {running.url} {'was stopped' if clean else 'did not end and was killed'}")


def _only(port: int | None) -> "Running":
    """The service of this machine; raises UserError if there is none, or which one is not said."""
    from mathinterp.service import state

    found = [running for running in state.services() if port in (None, running.port)]
    if not found:
        at = "" if port is None else f" at `port` {port}"
        raise UserError(f"no service of yours runs on this machine{at}; 'mathinterp serve start' starts one")
    if len(found) > 1:
        raise UserError(f"several services run here: {', '.join(each.url for each in found)}; say which one by `port`")
    return found[0]
