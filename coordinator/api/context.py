"""What the routes share."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request

from coordinator.accounting import Account
from coordinator.api.errors import MODEL_NOT_FOUND, ApiError, from_kvpact
from coordinator.attempt import GenerationRequest
from coordinator.fleet import Fleet
from coordinator.lifecycle import Lifecycle
from coordinator.model_folder import ModelText
from coordinator.router import choose_pair, served_context
from coordinator.scaling import Scaling
from kvpact.clock import Clock
from kvpact.config import Config
from kvpact.errors import BadRequest, KvpactError
from kvpact.metrics import Metrics
from kvpact.serving.exposure import is_loopback

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """Parts of one coordinator. `started_s` is in seconds since the epoch."""

    config: Config
    model: ModelText
    model_name: str
    fleet: Fleet
    lifecycle: Lifecycle
    metrics: Metrics
    clock: Clock
    started_s: int
    scaling: Scaling | None = None
    """None where workers are started by somebody else."""

    def check_model(self, name: str | None) -> None:
        """Raises BadRequest with code model_not_found unless the model that is served is meant."""
        if name not in (None, self.model_name, self.config.model):
            raise BadRequest(
                f"the model {name!r} does not exist; this server serves {self.model_name!r}",
                param="model",
                code=MODEL_NOT_FOUND,
            )

    def account(self, request: GenerationRequest) -> Account:
        """Opens the account of one generation."""
        return Account(
            self.metrics,
            self.clock,
            endpoint=request.endpoint,
            prompt_tokens=len(request.prompt),
            max_output_tokens=request.sampling.max_output_tokens,
        )

    def context_tokens(self) -> int:
        """Prompt and output tokens of one request, at most: what every worker that may get it serves."""
        return served_context(self.fleet.snapshot(), self.model.context)

    def obstacle(self) -> KvpactError | None:
        """Why no request that needs a handoff can be served now; None if one can."""
        try:
            choose_pair(self.fleet.snapshot())
        except KvpactError as error:
            return error
        return None

    def told(self, error: KvpactError, request: Request, *, about_body: bool = False) -> ApiError:
        """What this client is told of an error; the log has what it isn't told. See from_kvpact."""
        with_values = may_see_values(request)
        if not with_values and not about_body:
            logger.info("request %s: %s: %s", request.state.request_id, error.reason, error)
        return from_kvpact(error, with_values=with_values, about_body=about_body)


def may_see_values(request: Request) -> bool:
    """Whether a client may see contract values and worker names.

    Where admin keys are set it showed one; else it showed a user's key or is on this machine.
    """
    is_admin: bool | None = request.state.is_admin
    if is_admin is not None:
        return is_admin
    return request.state.has_key or is_on_this_machine(request)


def check_admin(request: Request) -> None:
    """Lets operators pass: whoever showed an admin key, or, where none are set, is on this machine.

    Raises:
        HTTPException: neither; 403.
    """
    is_admin: bool | None = request.state.is_admin
    if not (is_on_this_machine(request) if is_admin is None else is_admin):
        raise HTTPException(403, "operators only: set api.admin_keys and show one, or ask from this machine")


def is_on_this_machine(request: Request) -> bool:
    """Whether the client's address is a loopback one, and the one that it asked for too.

    A page of another site, whose name its owner lets lead here, asks for that name.
    """
    client = request.client.host if request.client else ""
    try:
        asked = urlsplit("//" + request.headers.get("host", "")).hostname or ""
    except ValueError:
        return False
    return is_loopback(client) and is_loopback(asked)
