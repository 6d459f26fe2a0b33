"""Which role may make which call: every rpc has its row, and a row lets nobody else through."""

from __future__ import annotations

import re

import pytest

from kvpact.errors import NotPermitted
from kvpact.handoff.permissions import ANYBODY, CALLERS, check_announced, check_caller
from kvpact.tls import PeerRole
from kvpact.types import Role
from kvpact.v1 import coordinator_pb2, decode_pb2, handoff_pb2, prefill_pb2
from tests.repo.tree import ROOT

FILES = (coordinator_pb2, decode_pb2, handoff_pb2, prefill_pb2)
GUIDE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def every_rpc() -> set[str]:
    """Full names of the calls that the protos define."""
    services = (service for file in FILES for service in file.DESCRIPTOR.services_by_name.values())
    return {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}


def test_the_files_are_all_that_define_services() -> None:
    defining = [
        path.stem
        for path in (ROOT / "proto/kvpact/v1").glob("*.proto")
        if re.search(r"^service ", path.read_text(), re.M)
    ]
    assert sorted(file.DESCRIPTOR.name.rsplit("/")[-1] for file in FILES) == sorted(
        f"{name}.proto" for name in defining
    )


def test_every_rpc_has_its_row_and_every_row_an_rpc() -> None:
    assert set(CALLERS) == every_rpc()
    assert all(CALLERS.values())


def test_an_rpc_without_a_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(CALLERS, "/kvpact.v1.DecodeService/Push")
    assert set(CALLERS) != every_rpc()
    with pytest.raises(NotPermitted):
        check_caller("/kvpact.v1.DecodeService/Push", [role.dns_name() for role in PeerRole])


@pytest.mark.parametrize("method", sorted(CALLERS))
@pytest.mark.parametrize("role", PeerRole)
def test_a_call_is_for_the_roles_of_its_row_alone(method: str, role: PeerRole) -> None:
    if role in CALLERS[method]:
        check_caller(method, ["gpu-7.example", role.dns_name()])
        return
    with pytest.raises(NotPermitted, match=re.escape(role.dns_name())) as caught:
        check_caller(method, [role.dns_name()])
    assert caught.value.metadata() == {"method": method, "names": role.dns_name()}


@pytest.mark.parametrize("names", [(), ("10.0.0.7",), ("*.kvpact",), ("xprefill.kvpact",), ("prefill",)])
def test_names_that_are_no_role_may_ask_for_health_alone(names: tuple[str, ...]) -> None:
    for method in CALLERS:
        with pytest.raises(NotPermitted):
            check_caller(method, names)
    check_caller("/grpc.health.v1.Health/Check", names)


def test_what_is_not_listed_is_nobody_s() -> None:
    for method in ("/kvpact.v1.DecodeService/Unheard", "/grpc.reflection.v1.ServerReflection/Info", ""):
        assert not method.startswith(ANYBODY)
        with pytest.raises(NotPermitted, match="no certificate at all"):
            check_caller(method, [role.dns_name() for role in PeerRole])


@pytest.mark.parametrize("role", Role)
def test_a_worker_announces_itself_as_what_its_certificate_says(role: Role) -> None:
    other = next(each for each in Role if each is not role)
    check_announced("Register", [f"{role}.kvpact"], role)
    with pytest.raises(NotPermitted, match=f"expected {role}.kvpact"):
        check_announced("Register", [f"{other}.kvpact", "coordinator.kvpact"], role)


def test_the_guide_has_the_table_as_the_code_has_it() -> None:
    listed = {}
    for services, roles in re.findall(r"^\| (`[^|]+`) \| ([a-z, ]+) \|$", GUIDE, re.M):
        for name in re.findall(r"`(\w+)`", services):
            listed[name] = frozenset(re.findall(r"[a-z]+", roles))
    expected = {
        method.rpartition("/")[2]: frozenset(role.value for role in roles)
        for method, roles in CALLERS.items()
    }
    assert listed == expected
