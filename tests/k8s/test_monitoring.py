"""Dashboard and alerts ask for what the coordinator exposes, and each alert has a runbook."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvpact.errors import ERROR_CODES
from kvpact.metrics import Metrics
from kvpact.types import (
    BlockCounts,
    Difference,
    DifferenceAction,
    FinishReason,
    Relation,
    Role,
    VerdictWord,
    WorkerLoad,
)
from tests.k8s.manifests import documents, only
from tests.repo.tree import ROOT

OPERATIONS = ROOT / "docs" / "operations.md"
WORDS = {"sum", "max", "rate", "increase", "histogram_quantile", "absent", "vector", "min_over_time", "by"}
WORDS |= {"on", "and", "or"}
STRING = re.compile(r'"[^"]*"')
LABEL_LIST = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
MATCHERS = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
NAME = re.compile(r"(?<![\w:.$])[a-zA-Z_:][\w:]*")
PAIR_WORDS = {word.value for word in VerdictWord} | {"quarantined", "pending"}
VALUES = {
    "verdict": PAIR_WORDS,
    "state": {"free", "used"},
    "code": {error.reason.lower() for error in ERROR_CODES},
    "result": {"committed", "cancelled", "passed", "failed"},
}
"""What a label may be compared with."""


@functools.cache
def exposed() -> dict[str, frozenset[str]]:
    """Sample name -> its labels, of metrics in which everything happened once."""
    metrics = Metrics("model")
    metrics.request_started(prompt_tokens=1, max_output_tokens=1)
    metrics.first_tokens(1, 0.1)
    metrics.next_tokens(1, 0.1)
    metrics.request_ended(endpoint="/", finish_reason=FinishReason.STOP, tokens=2, ttft_s=0.1, e2e_s=0.2)
    metrics.request_failed(endpoint="/", code="internal")
    metrics.handoff_committed(payload_bytes=1, handoff_s=0.1, exposed_s=0.1, max_abs_error=0.1)
    metrics.handoff_ended("cancelled")
    metrics.witnesses_refused()
    metrics.canary_ran(passed=False)
    metrics.pair_quarantined("data_loss")
    metrics.differences_found([difference()])
    load = WorkerLoad(
        running_requests=0, waiting_requests=0, blocks=BlockCounts(total=2, free=1), draining=False
    )
    text = metrics.exposition(pairs=["accept"], loads=[(Role.DECODE, "decode-0", load)]).decode()
    families = list(text_string_to_metric_families(text))
    return {sample.name: frozenset(sample.labels) for family in families for sample in family.samples}


def difference() -> Difference:
    """Some difference."""
    return Difference(
        field="inv_freq",
        layers=(),
        writer="a",
        reader="b",
        relation=Relation.INCOMPATIBLE,
        action=DifferenceAction.REJECT,
        remedy="",
    )


def alerts() -> list[dict[str, Any]]:
    """The rules of the rendered ConfigMap."""
    text = only(documents("base"), "ConfigMap", "kvpact-alerts")["data"]["alerts.yaml"]
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels."""
    text = only(documents("base"), "ConfigMap", "kvpact-dashboard")["data"]["dashboard.json"]
    found: list[dict[str, Any]] = json.loads(text)["panels"]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """Every query with where it stands."""
    yield from ((rule["alert"], rule["expr"]) for rule in alerts())
    for panel in panels():
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])


EXPRESSIONS = [pytest.param(expr, id=f"{where} {place}") for place, (where, expr) in enumerate(expressions())]


def unknown(expr: str) -> list[str]:
    """Metrics, labels and values of a query that nobody exposes."""
    known = exposed()
    bare = STRING.sub('""', expr)
    grouped = set(re.findall(r"\w+", ",".join(LABEL_LIST.findall(bare))))
    rest = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", LABEL_LIST.sub(" ", bare))
    names = set(NAME.findall(rest)) - WORDS
    found = [name for name in names if name not in known]
    labels = {label for name in names for label in known.get(name, ())}
    found += [f"by {label}" for label in grouped - labels]
    for name, matchers in MATCHERS.findall(expr):
        for label, value in MATCHER.findall(matchers):
            if label not in known.get(name, ()):
                found.append(f"{name}{{{label}}}")
            found += [f"{label}={each}" for each in value.split("|") if each not in VALUES.get(label, {each})]
    return found


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_a_query_asks_for_what_is_exposed(expr: str) -> None:
    assert unknown(expr) == []


@pytest.mark.parametrize(
    "expr",
    [
        "sum(rate(kvpact_handofs_total[5m]))",
        "kvpact_blocks_total",
        'kvpact_pairs{word="accept"}',
        'kvpact_pairs{verdict="accepted"}',
        "sum by (worker_name) (kvpact_blocks)",
        "histogram_quantile(0.9, sum by (le) (rate(kvpact_time_to_first_token_bucket[5m])))",
        'rate(kvpact_requests_total{code="no_pair"}[5m])',
    ],
)
def test_a_query_for_what_nobody_exposes_is_found(expr: str) -> None:
    assert unknown(expr) != []


def sections(text: str) -> dict[str, str]:
    """Anchor -> text of each section of a document."""
    parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)[1:]
    anchors = (re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in parts[::2])
    return dict(zip(anchors, parts[1::2], strict=True))


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_and_has_a_runbook(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]
    document, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert document == "docs/operations.md"
    found = sections(OPERATIONS.read_text(encoding="utf-8"))
    assert anchor in found, f"docs/operations.md has no section for {rule['alert']}"
    for part in ("**Means.**", "**Look at.**", "**Do.**"):
        assert part in found[anchor], f"{rule['alert']}: the runbook lacks {part}"


def test_every_runbook_belongs_to_an_alert() -> None:
    found = sections(OPERATIONS.read_text(encoding="utf-8"))
    runbooks = {name for name, text in found.items() if "**Means.**" in text}
    assert runbooks == {rule["alert"].lower() for rule in alerts()}


def test_panels_lie_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
