"""Rules over all objects of a rendering hold, and each finds the fault that it is there for."""

from __future__ import annotations

import pytest

from coordinator.coordinator import check_exposure
from kvpact.errors import BadRequest
from kvpact.serving.exposure import check_plaintext
from kvpact.tls import PeerRole
from kvpact.types import AxisOrder, KeyState
from tests.k8s import kvpact_rules, rules
from tests.k8s.faults import FAULTS, group, head
from tests.k8s.manifests import RENDERED, SERVING, documents, of_kind, only
from tests.k8s.rules import Rule
from tests.k8s.settings import settings

RULES = (*rules.RULES, *kvpact_rules.RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", RENDERED)
def test_a_rule_holds(name: str, rule: Rule) -> None:
    assert rule(documents(name)) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    rule, make = FAULTS[fault]
    found = documents("base")
    make(found)
    assert rule(found) != []


def test_every_rule_has_a_fault() -> None:
    assert {rule for rule, _ in FAULTS.values()} == set(RULES)


@pytest.mark.parametrize("name", RENDERED)
def test_the_settings_are_what_kvpact_reads(name: str) -> None:
    config = settings(documents(name))
    assert (config.prefill.port, config.decode.port, config.coordinator.port) == (7101, 7102, 7100)


def test_an_unknown_setting_is_refused() -> None:
    found = documents("base")
    only(found, "ConfigMap", "kvpact-config")["data"]["kvpact.yaml"] += "\nprefil: {port: 1}\n"
    with pytest.raises(BadRequest, match="did you mean prefill"):
        settings(found)


def test_an_unknown_variable_is_refused() -> None:
    found = documents("base")
    only(found, "ConfigMap", "kvpact-settings")["data"]["KVPACT_PREFILL__PORTS"] = "1"
    with pytest.raises(BadRequest, match="did you mean port"):
        settings(found)


def test_the_mixed_overlay_keeps_caches_differently() -> None:
    config = settings(documents("overlays/mixed"))
    prefill, decode = config.prefill.cache, config.decode.cache
    assert (prefill.key_state, prefill.axis_order, prefill.block_size) == (KeyState.RAW, AxisOrder.HND, 32)
    assert (decode.key_state, decode.axis_order, decode.block_size) == (KeyState.ROTATED, AxisOrder.NHD, 16)


@pytest.mark.parametrize("name", RENDERED)
def test_only_overlays_with_certificates_go_without_plaintext(name: str) -> None:
    config = settings(documents(name))
    insecure = [part.insecure for part in (config.coordinator, config.prefill, config.decode)]
    assert insecure == [not name.startswith("overlays/secure")] * 3


@pytest.mark.parametrize("name", SERVING)
def test_users_are_served_with_the_secrets_keys_alone(name: str) -> None:
    found = documents(name)
    with pytest.raises(BadRequest, match="api_keys is empty"):
        check_exposure(settings(found).api)
    variables = {each["name"] for each in head(found)["containers"][1]["env"] if "valueFrom" in each}
    keys = {variable: '["key"]' for variable in variables if variable.startswith("KVPACT_")}
    config = settings(found, keys)
    assert (config.api.api_keys, config.api.admin_keys) == (("key",), ("key",))
    check_exposure(config.api)


@pytest.mark.parametrize("name", RENDERED)
def test_kvpact_listens_where_others_reach_it_only_encrypted_or_where_that_is_said(name: str) -> None:
    config = settings(documents(name))
    for role in (PeerRole.COORDINATOR, PeerRole.PREFILL, PeerRole.DECODE):
        part = getattr(config, role.value)
        encrypted = config.tls.paths(role) is not None
        assert encrypted is name.startswith("overlays/secure")
        check_plaintext(f"{role}.bind", part.bind, insecure=part.insecure, encrypted=encrypted)


@pytest.mark.parametrize("name", ["overlays/secure", "overlays/secure-cert-manager"])
def test_each_role_finds_its_certificate_where_it_is_mounted(name: str) -> None:
    found = documents(name)
    config = settings(found)
    for place, role in ((head(found), "coordinator"), (group(found, 0), "prefill"), (group(found), "decode")):
        spec = place if role == "coordinator" else place["template"]["spec"]
        container = spec["containers"][1 if role == "coordinator" else 0]
        mount = next(each["mountPath"] for each in container["volumeMounts"] if each["name"] == "tls")
        secret = next(each["secret"]["secretName"] for each in spec["volumes"] if each["name"] == "tls")
        files = getattr(config.tls, role)
        wanted = [f"{mount}/{file}" for file in ("tls.crt", "tls.key", "ca.crt")]
        assert [str(files.cert), str(files.key), str(files.ca)] == wanted
        assert secret == f"kvpact-tls-{role}"


def test_cert_manager_names_roles_and_fills_the_mounted_secrets() -> None:
    issued = of_kind(documents("overlays/secure-cert-manager"), "Certificate")
    roles = {each["spec"]["secretName"]: each["spec"].get("dnsNames") for each in issued}
    assert roles.pop("kvpact-ca") is None
    names = ("coordinator", "prefill", "decode")
    assert roles == {f"kvpact-tls-{role}": [f"{role}.kvpact"] for role in names}


def test_the_batch_overlay_brings_one_cluster_of_its_own_and_serves_nobody() -> None:
    found = documents("overlays/batch")
    assert of_kind(found, "RayCluster") == []
    assert [each["metadata"]["name"] for each in of_kind(found, "Service")] == ["kvpact-ray-metrics"]
    assert settings(found).api.host == "127.0.0.1"
    spec = only(found, "RayJob")["spec"]["rayClusterSpec"]
    assert [each["groupName"] for each in spec["workerGroupSpecs"]] == ["prefill", "decode"]
