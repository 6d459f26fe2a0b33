"""Asks a running coordinator over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpact.config import Config
from kvpact.errors import BadRequest, KvpactError, Unavailable, UnreadableSource

if TYPE_CHECKING:
    import httpx

DEADLINE_S = 30.0
DEFAULT_URL = f"http://{Config().api.host}:{Config().api.port}"
UrlFlag = Annotated[str, typer.Option("--url", metavar="URL", help="The coordinator's HTTP side.")]
AdminKeyFlag = Annotated[
    Path | None,
    typer.Option(
        "--admin-key-file", metavar="FILE", help="File with an admin key; needed where api.admin_keys is set."
    ),
]


class CoordinatorClient:
    """One coordinator, for the length of a command."""

    def __init__(
        self,
        url: str,
        key: str | None,
        *,
        flag: str = "--url",
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`flag` is what names the coordinator on the command line."""
        import httpx

        self._flag = flag

        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._url = checked_url(url, flag)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=DEADLINE_S, transport=transport)

    def __enter__(self) -> CoordinatorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, *, even_if: tuple[int, ...] = ()) -> dict[str, Any]:
        """The answer to a GET; one with a status in `even_if` counts as well.

        Raises:
            Unavailable: nobody answers there.
            KvpactError: it answered with an error.
        """
        return self._ask(lambda: self._http.get(path), even_if)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a POST. Raises as `get`."""
        return self._ask(lambda: self._http.post(path, json=body), ())

    def _ask(self, call: Callable[[], httpx.Response], even_if: tuple[int, ...]) -> dict[str, Any]:
        import httpx

        try:
            response = call()
        except httpx.TransportError as error:
            raise Unavailable(f"no coordinator answers at {self._url}: {error}; see {self._flag}") from error
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            kind = Unavailable if response.status_code >= 500 else KvpactError
            told = f"{self._url} answered {response.status_code} without a JSON object"
            raise kind(f"{told}; it isn't a kvpact coordinator; see {self._flag}")
        if response.status_code not in (200, *even_if):
            if response.status_code == 404 and not isinstance(answer.get("error"), dict):
                raise BadRequest(
                    f"{self._url} isn't a kvpact coordinator; see {self._flag}", param=self._flag
                )
            raise _refused(self._url, response.status_code, answer)
        return answer


def checked_url(url: str, flag: str = "--url") -> str:
    """The URL of an HTTP server. Raises BadRequest where it is something else."""
    import httpx

    try:
        parsed = httpx.URL(url)
        is_http = parsed.scheme in ("http", "https") and bool(parsed.host)
    except httpx.InvalidURL:
        is_http = False
    if not is_http:
        raise BadRequest(f"{flag}: {url!r} is no server; expected a URL such as {DEFAULT_URL}", param=flag)
    return url


def read_key(path: Path | None) -> str | None:
    """The key in a file. Raises UnreadableSource where there is none."""
    if path is None:
        return None
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableSource(f"can't read the key in {path}: {error}", source=str(path)) from error
    if not key:
        raise UnreadableSource(f"{path} is empty; expected a key", source=str(path))
    return key


def _refused(url: str, status: int, answer: dict[str, Any]) -> KvpactError:
    told = answer.get("error")
    message = told.get("message", "") if isinstance(told, dict) else str(answer)
    text = f"{url} answered {status}: {message}"
    if status in (401, 403):
        return BadRequest(f"{text}; see --admin-key-file", param="--admin-key-file")
    return BadRequest(text) if 400 <= status < 500 else Unavailable(text)
