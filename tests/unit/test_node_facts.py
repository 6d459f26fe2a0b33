"""Machines of one deployment: what is told of one, and what keeps several from serving together."""

from __future__ import annotations

from dataclasses import replace

from kvpact.cli.doctor import listed_once
from kvpact.errors import UnreadableSource
from kvpact.serving.node_facts import Finding, Level, NodeFacts, judge_nodes, node_facts

GOOD = NodeFacts(
    node="a",
    python="3.11.7",
    packages={"kvpact": "0.1.0", "ray": "2.60.0", "torch": "2.13.0"},
    cores=2,
    open_files=65536,
    shared_memory_bytes=1 << 30,
    model="/models/x",
    model_digest="ab" * 32,
)


def found(*nodes: NodeFacts) -> list[tuple[Level, str]]:
    return [(finding.level, finding.node) for finding in judge_nodes(nodes)]


def test_this_machine_is_listed_once_unless_its_ray_has_other_packages() -> None:
    here, own, other = replace(GOOD, node="this machine"), GOOD, replace(GOOD, node="b")
    assert listed_once(here, "a", [other, replace(own, open_files=1024)]) == [
        other,
        replace(own, open_files=1024),
    ]
    older = replace(own, packages=GOOD.packages | {"ray": "2.0.0"})
    assert listed_once(here, "a", [other, older]) == [here, other, older]
    assert listed_once(here, "", [other]) == [here, other]


def test_this_machine_tells_its_versions_limits_and_model() -> None:
    facts = node_facts("here", lambda: ("/models/x", "ab"))
    assert facts.packages["ray"].count(".") == 2
    assert facts.open_files > 0
    assert (facts.model, facts.model_digest) == ("/models/x", "ab")


def test_a_model_that_isn_t_there_is_an_error_of_that_machine() -> None:
    def identify() -> tuple[str, str | None]:
        raise UnreadableSource("no such folder", source="x")

    facts = node_facts("here", identify)
    assert judge_nodes([facts])[0] == Finding(
        level=Level.ERROR, node="here", text="model not found: no such folder"
    )


def test_machines_that_are_alike_have_no_findings() -> None:
    assert found(GOOD, replace(GOOD, node="b", python="3.11.9", model="/elsewhere")) == []
    assert found(GOOD, replace(GOOD, node="b", packages=GOOD.packages | {"torch": "2.13.0+cpu"})) == []


def test_other_versions_of_python_ray_and_kvpact_and_other_weights_are_errors() -> None:
    for change in (
        {"python": "3.12.1"},
        {"packages": GOOD.packages | {"ray": "2.59.0"}},
        {"packages": {"ray": "2.60.0", "torch": "2.13.0"}},
        {"model_digest": "cd" * 32},
    ):
        assert found(GOOD, replace(GOOD, node="b", **change)) == [(Level.ERROR, "b")]


def test_another_torch_few_files_and_little_shared_memory_are_warnings() -> None:
    for change in (
        {"packages": GOOD.packages | {"torch": "2.12.0"}},
        {"open_files": 1024},
        {"shared_memory_bytes": 8 << 20},
        {"shared_memory_bytes": None},
    ):
        assert found(GOOD, replace(GOOD, node="b", **change)) == [(Level.WARNING, "b")]


def test_errors_come_before_warnings() -> None:
    limited = replace(GOOD, node="b", open_files=64)
    assert found(GOOD, limited, replace(GOOD, node="c", python="3.13.0")) == [
        (Level.ERROR, "c"),
        (Level.WARNING, "b"),
    ]


def test_no_limit_on_open_files_is_enough() -> None:
    assert found(replace(GOOD, open_files=-1)) == []
