"""The served page's HTTP: who may ask, its files, how far runs are, and SQL.

    GET  /?token=...         once: keeps the token in a cookie
    GET  /                   the page; its scripts and data lie beside it
    GET  /state              JSON, with an ETag: the page's version, and runs that are not finished
    GET  /views              JSON: the store's views, what they say, their columns
    POST /sql                {"query": ...} -> JSON: the first rows as text, and how many there are
    POST /sql.csv            {"query": ...} -> all rows

Everything but the first needs the token. A POST must come from a page of ours. An error is {"error": one line}.
"""

import asyncio
import io
import json
import logging
import mimetypes
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, TypeVar, cast

from aiohttp import web

from mathinterp.errors import UserError
from mathinterp.gates import shortened
from mathinterp.report.asking import SECONDS, Asker
from mathinterp.report.contents import WEB
from mathinterp.report.live import Looking, Pages, State
from mathinterp.service.listening import is_ours, same_token
from mathinterp.store import Store
from mathinterp.store.listing import list_views
from mathinterp.text import one_line

ASKERS = 2  # queries at once
MOST_BYTES = 2**20  # of a query
LONGEST = 2_000  # characters of an error
VIEW_SECONDS = 2.0  # for counting rows of views
OWN = ("live.js", "sql.js", "sql.css")  # files of the served page alone
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
# A page, not a redirection, which would not bring the SameSite=Strict cookie along after a link on another site's page.
ENTER = '<!doctype html><html lang="en"><meta http-equiv="refresh" content="0;url=/"><title>mathinterp</title>'
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Found = TypeVar("Found")
logger = logging.getLogger(__name__)


def cookie_name(port: int) -> str:
    """Servers of one machine share their cookies, whatever their port."""
    return f"mathinterp_{port}"


class Front:
    """The handlers of one page."""

    def __init__(
        self,
        store: str,
        host: str,
        port: int,
        token: str,
        run_ids: Sequence[str] = (),
        compare: tuple[str, str] | None = None,
        query_seconds: float = SECONDS,
    ):
        self._host, self._token, self._seconds = host, token, query_seconds
        self._store, self._cookie = store, cookie_name(port)
        self._looking, self._pages = Looking(store, run_ids, compare), Pages(store, run_ids, compare)
        self._look, self._make = asyncio.Lock(), asyncio.Lock()
        self._askers = [Asker(store) for _ in range(ASKERS)]
        self._free: asyncio.Queue[Asker] = asyncio.Queue()
        for asker in self._askers:
            self._free.put_nowait(asker)
        self._threads = ThreadPoolExecutor(ASKERS + 3, "page")

    def app(self) -> web.Application:
        """To serve."""
        app = web.Application(middlewares=[self._guarded], client_max_size=MOST_BYTES)
        app.add_routes(
            [
                web.get("/", self._index),
                web.get("/state", self._state),
                web.get("/views", self._views),
                web.get("/favicon.ico", self._nothing),
                web.post("/sql", self._sql),
                web.post("/sql.csv", self._csv),
                web.get("/{name:.+}", self._file),
            ]
        )
        app.on_shutdown.append(self._stop)
        return app

    def close(self) -> None:
        """Let go of the threads; none of them writes anything."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _stop(self, app: web.Application) -> None:
        for asker in self._askers:
            asker.stop()

    # ---- who may ask ----

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse strangers; turn whatever is raised into one JSON object."""
        try:
            if (refused := self._refusal(request)) is not None:
                status, said = refused
            else:
                response = await handler(request)
                if not response.prepared:
                    response.headers.update(HEADERS)
                return response
        except web.HTTPException as error:
            status, said = error.status, f"{request.method} {request.path}: {error.reason}"
        except UserError as error:
            status, said = 400, str(error)
        except Exception as error:
            logger.exception(f"{request.method} {request.path}")
            status, said = 500, f"{type(error).__name__}: {error}; the terminal has the traceback"
        return web.json_response({"error": shortened(one_line(said), LONGEST)}, status=status, headers=HEADERS)

    def _refusal(self, request: web.Request) -> tuple[int, str] | None:
        """Status and reason, for whoever may not ask."""
        if not is_ours(request.host, self._host):
            return 403, f"this page is asked for as {request.host[:80]}; open the URL that the command printed"
        entering = request.method == "GET" and request.path == "/" and "token" in request.query
        given = request.query["token"] if entering else request.cookies.get(self._cookie, "")
        if not same_token(given, self._token):
            return 401, "this needs the token: open the URL that the command printed"
        if request.method == "POST":
            if request.headers.get("Origin") != f"http://{request.host}":
                return 403, "a query must come from this page"
            if request.content_type != "application/json":
                return 415, "a query is application/json"
        return None

    # ---- the page ----

    async def _index(self, request: web.Request) -> web.Response:
        if "token" in request.query:
            response = web.Response(text=ENTER, content_type="text/html")
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="Strict", path="/")
            return response
        files = await self._page()
        return web.Response(body=files["index.html"], content_type="text/html", charset="utf-8")

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        content = WEB.joinpath(name).read_bytes() if name in OWN else (await self._page()).get(name)
        if content is None:
            raise web.HTTPNotFound
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return web.Response(body=content, content_type=kind, charset="utf-8")

    async def _nothing(self, request: web.Request) -> web.Response:
        """Browsers ask for an icon by themselves."""
        return web.Response(status=204)

    async def _page(self) -> Any:
        version = (await self._now()).version
        async with self._make:
            return await self._in_thread(lambda: self._pages.files(version))

    async def _now(self) -> State:
        async with self._look:
            return await self._in_thread(self._looking.state)

    async def _state(self, request: web.Request) -> web.Response:
        state = await self._now()
        tags = {"ETag": state.tag}
        if request.headers.get("If-None-Match") == state.tag:
            return web.Response(status=304, headers=tags)
        return web.Response(body=state.body, content_type="application/json", headers=tags)

    async def _in_thread(self, work: Callable[[], Found]) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # ---- SQL ----

    async def _views(self, request: web.Request) -> web.Response:
        def listed() -> list[dict[str, Any]]:
            rows: list[dict[str, Any]] = list_views(Store(self._store), VIEW_SECONDS).to_pylist()
            return rows

        return web.json_response(await self._in_thread(listed))

    async def _sql(self, request: web.Request) -> web.Response:
        sql = await _query(request)
        answer = await self._asked(lambda asker: asker.table(sql, self._seconds))
        fields = ("columns", "numbers", "rows", "notes", "told")
        return web.json_response({name: getattr(answer, name) for name in fields})

    async def _csv(self, request: web.Request) -> web.StreamResponse:
        sql, loop = await _query(request), asyncio.get_running_loop()
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/csv; charset=utf-8"})

        async def send(data: bytes) -> None:
            if not response.prepared:  # now that there are rows, or none, and no error
                await response.prepare(request)
            await response.write(data)

        pipe = cast(BinaryIO, _Pipe(lambda data: asyncio.run_coroutine_threadsafe(send(data), loop).result()))
        try:
            await self._asked(lambda asker: asker.csv(sql, pipe))
        except Exception:
            if not response.prepared:
                raise
            if request.transport is not None:
                request.transport.abort()  # else what came would look like all
            return response
        await response.write_eof()
        return response

    async def _asked(self, work: Callable[[Asker], Found]) -> Found:
        """What an asker answers; whoever goes away before has their query stopped."""
        asker = await self._free.get()
        future = asyncio.get_running_loop().run_in_executor(self._threads, work, asker)

        def free(done: asyncio.Future[Found]) -> None:
            self._free.put_nowait(asker)
            if not done.cancelled():
                done.exception()  # looked at, also where nobody waits any more

        future.add_done_callback(free)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            asker.stop()
            raise


class _Pipe(io.RawIOBase):
    """A file whose bytes are sent on."""

    def __init__(self, send: Callable[[bytes], None]):
        self._send = send

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._send(bytes(data))
        return len(data)


async def _query(request: web.Request) -> str:
    try:
        found = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise UserError(f"SQL: the request is no JSON ({one_line(str(error))})") from error
    query = found.get("query") if isinstance(found, dict) else None
    if not isinstance(query, str) or not query.strip():
        raise UserError("SQL: no query was given")
    return query
