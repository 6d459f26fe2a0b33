"""`kvpact demo` through two actor processes: accepted, converted, refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.cluster.clusters import demo
from tests.fakes import CHAT_TEMPLATE
from tests.references import golden

PROMPT = "What is the capital of France?"


def chat_tokens(folder: Path) -> tuple[int, ...]:
    """The prompt as the tiny model's chat template has it."""
    import jinja2

    text = jinja2.Template(CHAT_TEMPLATE).render(
        messages=[{"role": "user", "content": PROMPT}], add_generation_prompt=True
    )
    return tuple(
        Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    )


@pytest.mark.timeout(240)
def test_an_accepted_handoff_reports_processes_verdict_bytes_and_times(tiny_llama: Path) -> None:
    code, report = demo("--model", str(tiny_llama), "--prompt", PROMPT, "--max-tokens", "24")
    prompt = chat_tokens(tiny_llama)
    expected = golden(tiny_llama, prompt, 24).token_ids
    assert code == 0
    assert tuple(report["token_ids"]) == expected[: len(report["token_ids"])]
    assert len(report["token_ids"]) > 1
    assert report["prefill_pid"] != report["decode_pid"]
    assert report["verdict"] == "accept"
    assert (report["differences"], report["plan"]) == ([], [])
    assert report["prefill_computed_tokens"] == len(prompt)
    assert report["decode_computed_tokens"] == len(report["token_ids"]) - 1
    whole_blocks = -(-len(prompt) // 16) * 16
    assert report["handoff_bytes"] == whole_blocks * 2 * 2 * 2 * 16 * 4
    assert report["ttft_s"] > 0
    assert report["handoff_s"] > 0
    assert report["blocks"] == {
        "prefill": {"free": 1024, "total": 1024},
        "decode": {"free": 1024, "total": 1024},
    }


@pytest.mark.timeout(240)
def test_another_theta_is_refused_before_any_prefill(tiny_llama: Path) -> None:
    code, report = demo("--model", str(tiny_llama), "--decode-override", "rope_theta=500000")
    assert code == 20
    assert report["verdict"] == "reject"
    (difference,) = report["differences"]
    assert difference["field"] == "inv_freq"
    assert difference["layers"] == [0, 1]
    assert difference["writer"] != difference["reader"]
    assert "rope_theta" in difference["remedy"]
    assert "rad at position" in difference["explanation"]
    assert report["prefill_computed_tokens"] == 0
    assert report["decode_computed_tokens"] == 0
    assert [report[key] for key in ("text", "token_ids", "handoff_bytes", "ttft_s", "handoff_s")] == [
        None
    ] * 5
    for pool in report["blocks"].values():
        assert pool["free"] == pool["total"]


@pytest.mark.timeout(240)
def test_an_override_that_names_no_field_is_a_usage_error(tiny_llama: Path) -> None:
    code, report = demo("--model", str(tiny_llama), "--decode-override", "rope_teta=1")
    assert code == 2
    assert "rope_theta" in report["error"]["message"]
