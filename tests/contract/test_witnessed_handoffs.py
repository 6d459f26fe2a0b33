"""Honest writers pass their witnesses in every cache form; those who show too little are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpact.cli.pair import InProcessPair, PairToken
from kvpact.config import HandoffConfig
from kvpact.contract.witness_places import budget_bytes
from kvpact.engine.engine import Engine
from kvpact.errors import DataLoss
from kvpact.handoff.capture import Capture
from kvpact.handoff.messages import Commit, Witness, WitnessReport
from kvpact.handoff.outgoing import Shown
from kvpact.handoff.push_codec import push_to_bytes
from kvpact.types import Sampling, VerdictWord
from prefill_worker.computation import Computation
from tests.fakes import identified_engine, make_tiny_model, prompt_of
from tests.references import golden

LENGTHS = (1, 2, 15, 16, 17, 512)
SAMPLING = Sampling(max_output_tokens=3, ignore_eos=True)
FORMS = [
    {"key_state": state, "axis_order": order, "block_size": size, "stored_lane_order": lanes}
    for state, order, size, lanes in itertools.product(
        ("rotated", "raw"), ("NHD", "HND"), (16, 24), ("half_split", "adjacent")
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


def started(folder: Path, **form: Any) -> Engine:
    engine = identified_engine(folder, blocks=40, **form)
    engine.start()
    return engine


async def collect(pair: InProcessPair, prompt: tuple[int, ...]) -> list[PairToken]:
    return [token async for token in pair.generate(prompt, SAMPLING, want_logits=True)]


def report_of(captures: list[Capture]) -> WitnessReport:
    """What the newest handoff's witnesses showed."""
    receipt = captures[-1].receipt
    assert receipt is not None
    return receipt.witnesses


def other_forms(form: dict[str, Any]) -> list[dict[str, Any]]:
    """The same, one that differs in everything, and one that differs in key state only."""
    opposite = {"rotated": "raw", "raw": "rotated", "NHD": "HND", "HND": "NHD", 16: 24, 24: 16}
    opposite |= {"half_split": "adjacent", "adjacent": "half_split"}
    far = {key: opposite[value] for key, value in form.items()}
    return [form, far, form | {"key_state": far["key_state"]}]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
async def test_an_honest_writer_passes_at_every_length(
    folder: Path, form: dict[str, Any], dtype: str
) -> None:
    writer = started(folder, dtype=dtype, **form)
    for other in other_forms(form):
        reader = started(folder, dtype=dtype, **other)
        captures: list[Capture] = []
        async with InProcessPair(writer, reader, on_capture=captures.append) as pair:
            verdict = await pair.connect()
            assert verdict.word is not VerdictWord.REJECT
            assert pair.canary is not None
            assert pair.canary.passed, pair.canary
            for length in LENGTHS:
                tokens = await collect(pair, prompt_of(length))
                report = report_of(captures)
                assert report.row_count >= 2
                assert report.shows_rotation == (length > 1)
                if dtype == "float32":
                    expected = golden(folder, prompt_of(length), 3)
                    assert tuple(token.token_id for token in tokens) == expected.token_ids
        reader.close()
        assert reader.pool.counts().free == reader.pool.counts().total
    writer.close()


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")], ids="-".join)
async def test_a_cache_of_another_dtype_passes_where_it_is_allowed(
    folder: Path, dtypes: tuple[str, str]
) -> None:
    writer, reader = (started(folder, dtype=dtype) for dtype in dtypes)
    captures: list[Capture] = []
    async with InProcessPair(
        writer, reader, handoff=HandoffConfig(lossy="allow"), on_capture=captures.append
    ) as pair:
        verdict = await pair.connect()
        assert verdict.word is VerdictWord.CONVERT
        for length in LENGTHS:
            tokens = await collect(pair, prompt_of(length))
            assert report_of(captures).row_count >= 2
            assert tokens[0].committed is not None
            error = tokens[0].committed.max_abs_error
            assert error is None if dtypes[0] == "bfloat16" else error is not None and 0 < error < 0.1
    writer.close()
    reader.close()


def omits_all(rows: tuple[Witness, ...]) -> tuple[Witness, ...]:
    return ()


def omits_one(rows: tuple[Witness, ...]) -> tuple[Witness, ...]:
    return rows[:-1]


def shows_one_twice(rows: tuple[Witness, ...]) -> tuple[Witness, ...]:
    return (*rows[:-1], rows[0])


def picks_rows_of_its_own(rows: tuple[Witness, ...]) -> tuple[Witness, ...]:
    return (*rows[:-1], replace(rows[-1], position=rows[-1].position - 1))


def shows_one_more(rows: tuple[Witness, ...]) -> tuple[Witness, ...]:
    return (*rows, rows[0])


def shortens_keys(rows: tuple[Witness, ...]) -> tuple[Witness, ...]:
    return tuple(replace(row, raw_key=row.raw_key[:-4]) for row in rows)


def shortens_values(rows: tuple[Witness, ...]) -> tuple[Witness, ...]:
    return tuple(replace(row, value=b"") for row in rows)


def shows_not_a_number(rows: tuple[Witness, ...]) -> tuple[Witness, ...]:
    return (replace(rows[0], attended_key=b"\xff" * len(rows[0].attended_key)), *rows[1:])


SHORTFALLS: dict[Callable[[tuple[Witness, ...]], tuple[Witness, ...]], str] = {
    omits_all: "shows 0 witness rows where 6 were asked for",
    omits_one: "shows 5 witness rows where 6 were asked for",
    shows_one_twice: "is missing",
    picks_rows_of_its_own: "is missing",
    shows_one_more: "shows 7 witness rows where 6 were asked for",
    shortens_keys: "raw_key has 124 bytes; 2 heads of 16 lanes take 128",
    shortens_values: "value has 0 bytes",
    shows_not_a_number: "off by inf",
}


@pytest.mark.parametrize("shortfall", SHORTFALLS, ids=lambda shortfall: shortfall.__name__.replace("_", " "))
async def test_a_writer_that_shows_too_little_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shortfall: Callable[[Any], tuple[Witness, ...]]
) -> None:
    writer, reader = started(folder), started(folder)
    async with InProcessPair(writer, reader) as pair:
        await pair.connect()
        shown = Computation._shown
        monkeypatch.setattr(Computation, "_shown", lambda self: Shown(rows=shortfall(shown(self).rows)))
        with pytest.raises(DataLoss, match=SHORTFALLS[shortfall]) as refused:
            await collect(pair, prompt_of(100))
        assert refused.value.check == "witness"
        assert pair.receiver.counters().committed == 0
    for engine in (writer, reader):
        assert engine.pool.counts().free == engine.pool.counts().total
        engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_witnesses_take_at_most_one_percent_of_a_512_token_handoff(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    writer, reader = started(folder, dtype=dtype), started(folder, dtype=dtype)
    taken: list[tuple[Witness, ...]] = []
    shown = Computation._shown

    def noted(computation: Computation) -> Shown:
        found = shown(computation)
        taken.append(found.rows)
        return found

    monkeypatch.setattr(Computation, "_shown", noted)
    async with InProcessPair(writer, reader) as pair:
        tokens = await collect(pair, prompt_of(512))
    committed = tokens[0].committed
    assert committed is not None
    bare = Commit(chunk_count=9, payload_bytes=committed.payload_bytes, first_token_id=7)
    rows_bytes = len(push_to_bytes(replace(bare, witnesses=taken[-1]))) - len(push_to_bytes(bare))
    assert 0 < rows_bytes <= budget_bytes(writer.contract) <= committed.payload_bytes / 100
    assert {witness.layer for witness in taken[-1]} == {0, 1}
    for engine in (writer, reader):
        engine.close()
