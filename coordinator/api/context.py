"""What the routes share."""

from __future__ import annotations

import ipaddress
import logging
from dataclasses import dataclass

from starlette.requests import Request

from coordinator.accounting import Account
from coordinator.api.errors import MODEL_NOT_FOUND, ApiError, from_kvpact
from coordinator.attempt import GenerationRequest
from coordinator.fleet import Fleet
from coordinator.lifecycle import Lifecycle
from coordinator.model_folder import ModelText
from coordinator.router import choose_pair, served_context
from kvpact.clock import Clock
from kvpact.config import Config
from kvpact.errors import BadRequest, KvpactError
from kvpact.metrics import Metrics

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
    """Whether a client may see contract values and worker names: it is on this machine, or showed a key."""
    if request.state.has_key:
        return True
    host = request.client.host if request.client else ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
