"""How processes reach and serve each other: in plaintext, or by mutual TLS with roles by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from kvpact.errors import KvpactError, Unavailable
from kvpact.handoff.certificate_store import CertificateStore
from kvpact.handoff.certificates import Certificates
from kvpact.handoff.channel_transport import RenewedChannel
from kvpact.handoff.guard_transport import RoleGuard
from kvpact.handoff.malformed_transport import MalformedRefusal
from kvpact.handoff.status import from_rpc_error
from kvpact.tls import PeerRole, TlsConfig

logger = logging.getLogger(__name__)

NO_CONNECTION = "failed to connect to all addresses"
"""How grpc begins to tell of a connection that never came about."""
HUNG_UP = ("Socket closed", "Connection reset", "Broken pipe", "FD Shutdown")

Options = Sequence[tuple[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A channel to one endpoint, host:port. Whoever opened it closes the channel."""

    endpoint: str
    channel: grpc.aio.Channel
    explain: Callable[[str], str | None]
    """From grpc's words for a connection that never came about to what is wrong and what to do."""

    def failure(self, error: grpc.aio.AioRpcError) -> KvpactError:
        """What a failed call on this link means, as `from_rpc_error`, or why there is no connection."""
        details = error.details() or ""
        if error.code() is grpc.StatusCode.UNAVAILABLE and details.startswith(NO_CONNECTION):
            why = self.explain(details)
            if why is not None:
                return Unavailable(f"can't reach {self.endpoint}: {why}")
        return from_rpc_error(error, peer=self.endpoint)


class Security(Protocol):
    """Opens channels and ports of one process."""

    encrypted: bool

    def link(self, endpoint: str, server: PeerRole) -> Link:
        """A channel to host:port, where `server` is expected."""

    def make_server(self, options: Options = ()) -> grpc.aio.Server:
        """A server that checks its callers as far as it can know them."""

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """Binds host:port before the server starts; the port. Raises Unavailable where that can't be."""


class Plaintext:
    """No encryption and no names: for loopback, or where the operator said so."""

    encrypted = False

    def link(self, endpoint: str, server: PeerRole) -> Link:
        """See Security."""
        return Link(endpoint=endpoint, channel=grpc.aio.insecure_channel(endpoint), explain=_maybe_tls)

    def make_server(self, options: Options = ()) -> grpc.aio.Server:
        """See Security."""
        return grpc.aio.server(interceptors=[MalformedRefusal()], options=list(options))

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """See Security."""
        return _bound(address, lambda: server.add_insecure_port(address))


PLAINTEXT = Plaintext()


class MutualTls:
    """Both ends show a certificate: servers the role that is expected, callers one that may make the call."""

    encrypted = True

    def __init__(self, store: CertificateStore) -> None:
        self._store = store

    def link(self, endpoint: str, server: PeerRole) -> Link:
        """See Security. New files are used by calls that begin after the change."""
        options = [("grpc.ssl_target_name_override", server.dns_name())]

        def open_channel(certificates: Certificates) -> grpc.aio.Channel:
            pem = certificates.pem
            credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
            return grpc.aio.secure_channel(endpoint, credentials, options=options)

        return Link(
            endpoint=endpoint,
            channel=RenewedChannel(open_channel, self._store),
            explain=lambda details: self._explain(details, server),
        )

    def make_server(self, options: Options = ()) -> grpc.aio.Server:
        """See Security."""
        return grpc.aio.server(interceptors=[RoleGuard(), MalformedRefusal()], options=list(options))

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """See Security. New files are used by connections that begin after the change."""
        shown = self._store.current()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            current = self._store.current()
            if current is shown:
                return None
            shown = current
            return _configuration(current)

        credentials = grpc.dynamic_ssl_server_credentials(
            _configuration(shown),
            renewed,  # type: ignore[arg-type]  # None is "no change"; the stubs don't know
            require_client_authentication=True,
        )
        return _bound(address, lambda: server.add_secure_port(address, credentials))

    def _explain(self, details: str, server: PeerRole) -> str | None:
        files = self._store.files
        if "CERTIFICATE_VERIFY_FAILED" in details:
            if "expired" in details or "not yet valid" in details:
                return "its certificate has expired or isn't valid yet; give that side a new one"
            return f"its certificate isn't signed by a CA in {files.ca}; was it made by another CA?"
        if "Hostname Verification" in details:
            return f"its certificate isn't for {server.dns_name()}; does another role serve at this address?"
        if "WRONG_VERSION_NUMBER" in details:
            return "it speaks plaintext, and tls is set here; set tls on that side too"
        if any(word in details for word in HUNG_UP):
            return (
                f"it ended the connection; if it runs, it doesn't take the certificate {files.cert}: is that "
                "signed by another CA than those it knows, or expired?"
            )
        return None


def make_security(tls: TlsConfig, role: PeerRole) -> Security:
    """What the settings give a process of this role.

    Raises:
        BadRequest: certificates are set and can't be used.
    """
    files = tls.paths(role)
    if files is None:
        return PLAINTEXT
    store = CertificateStore(files, role)
    logger.info("mutual TLS as %s, by %s", role.dns_name(), files.cert)
    return MutualTls(store)


def _maybe_tls(details: str) -> str | None:
    if not any(word in details for word in HUNG_UP):
        return None
    return (
        "it ended the connection; if it runs, it takes only callers with a certificate: set tls in the "
        "settings (tls.directory, or --tls DIR)"
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pem = certificates.pem
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], root_certificates=pem.ca)


def _bound(address: str, bind: Callable[[], int]) -> int:
    try:
        return bind()
    except RuntimeError as error:
        raise Unavailable(f"can't bind {address}; is another process on that port?") from error
