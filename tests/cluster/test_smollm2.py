"""The real checkpoint through actor processes: its answer, and caches that convert to the same tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.clusters import demo

pytestmark = pytest.mark.timeout(300)
MIXED = [
    pytest.param("key_state=rotated", "key_state=raw", marks=pytest.mark.acceptance),
    pytest.param(
        "key_state=raw,axis_order=HND",
        "key_state=rotated,axis_order=NHD",
        marks=pytest.mark.acceptance,
    ),
    pytest.param("block_size=24", "block_size=16,axis_order=HND", marks=pytest.mark.acceptance),
    ("key_state=raw,axis_order=NHD,block_size=16", "key_state=rotated,axis_order=HND,block_size=24"),
]
"""The last differs in every way; the others run with the long lists."""


@pytest.fixture(scope="module")
def unconverted() -> dict[str, Any]:
    code, report = demo()
    assert code == 0
    return report


def test_the_capital_of_france_is_paris(unconverted: dict[str, Any]) -> None:
    assert "Paris" in unconverted["text"]
    assert unconverted["verdict"] == "accept"
    assert unconverted["prefill_pid"] != unconverted["decode_pid"]


@pytest.mark.parametrize(("prefill", "decode"), MIXED)
def test_mixed_caches_convert_to_the_tokens_of_the_unconverted_run(
    unconverted: dict[str, Any], prefill: str, decode: str
) -> None:
    code, report = demo("--prefill-cache", prefill, "--decode-cache", decode)
    assert code == 0
    assert report["verdict"] == "convert"
    assert report["token_ids"] == unconverted["token_ids"]
    assert all(step["exactness"] in ("bit_exact", "rounding") for step in report["plan"])
    assert len(report["plan"]) == len(report["differences"])


@pytest.mark.acceptance
def test_another_theta_is_refused_with_one_difference(unconverted: dict[str, Any]) -> None:
    code, report = demo("--decode-override", "rope_theta=10000")
    assert code == 20
    assert [difference["field"] for difference in report["differences"]] == ["inv_freq"]
    assert report["prefill_computed_tokens"] == 0
    assert all(pool["free"] == pool["total"] for pool in report["blocks"].values())
