"""Whole workers over real engines: what handoff.transport comes to, and the same tokens over each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from decode_worker.worker import DecodeWorker
from kvpact.clock import new_handoff_id
from kvpact.config import parse_config
from kvpact.engine.engine import Engine
from kvpact.errors import Unavailable
from kvpact.handoff.capture_file import read_capture
from kvpact.handoff.jobs import Committed, DecodeJob, FirstToken, Partner, PrefillJob
from kvpact.handoff.nixl_agent import why_not
from kvpact.handoff.shm_segment import SUPPORTED
from kvpact.types import Sampling
from prefill_worker.worker import PrefillWorker
from tests.fakes import identified_engine, make_tiny_model, prompt_of
from tests.references import golden

SAMPLING = Sampling(max_output_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engines(folder: Path) -> Iterator[tuple[Engine, Engine]]:
    writer = identified_engine(folder, blocks=64, prefill_chunk_tokens=16)
    reader = identified_engine(folder, blocks=64, key_state="raw", block_size=24)
    yield writer, reader
    for engine in (writer, reader):
        engine.close()


@asynccontextmanager
async def workers(
    engines: tuple[Engine, Engine], prefill: dict[str, Any], decode: dict[str, Any]
) -> AsyncIterator[tuple[PrefillWorker, Partner, DecodeWorker]]:
    """Both workers, served on ephemeral ports, and the decode worker as a partner."""
    writer, reader = engines
    settings = [parse_config({"handoff": handoff}) for handoff in (prefill, decode)]
    writing = PrefillWorker(settings[0], writer, worker="prefill-0", coordinator=None)
    reading = DecodeWorker(settings[1], reader, worker="decode-0", coordinator=None)
    endpoint = await reading.start()
    await writing.start()
    try:
        yield writing, Partner(life=reading.description().life, endpoint=endpoint), reading
    finally:
        await writing.stop()
        await reading.stop()


async def handed_over(writing: PrefillWorker, partner: Partner, reading: DecodeWorker) -> tuple[int, ...]:
    """Tokens of one prompt, prefilled by one worker and decoded by the other."""
    prompt, handoff_id = prompt_of(40), new_handoff_id()
    job = PrefillJob(
        handoff_id=handoff_id,
        prefill=writing.description().life,
        decode=partner,
        token_ids=prompt,
        original_prompt_tokens=len(prompt),
        table_length=len(prompt) + SAMPLING.max_output_tokens,
        sampling=SAMPLING,
        request_id="r",
    )
    events = [event async for event in writing._prefiller.prefill(job)]
    assert any(isinstance(event, Committed) for event in events)
    (first,) = (event.token_id for event in events if isinstance(event, FirstToken))
    order = DecodeJob(
        handoff_id=handoff_id,
        decode=partner.life,
        token_ids=(*prompt, first),
        sampling=SAMPLING,
        original_prompt_tokens=len(prompt),
        request_id="r",
    )
    rest = [token async for item in reading._decoder.decode(order) for token in item.token_ids]
    return (first, *rest)


@pytest.mark.parametrize("wanted", ["auto", "grpc", "shm", "nixl"])
async def test_every_transport_gives_the_same_tokens(
    folder: Path, engines: tuple[Engine, Engine], wanted: str
) -> None:
    problem = why_not()
    if wanted == "nixl" and problem is not None:
        pytest.skip(problem)
    settings = {"transport": wanted, "staging_bytes": 16 << 20}
    async with workers(engines, settings, settings) as (writing, partner, reading):
        connection = await writing._partners.connect(partner)
        assert connection.transport is not None
        expected = ("shm" if SUPPORTED else "grpc") if wanted == "auto" else wanted
        assert connection.transport.name == expected
        tokens = await handed_over(writing, partner, reading)
    assert tokens == golden(folder, prompt_of(40), SAMPLING.max_output_tokens).token_ids


async def test_a_transport_that_only_one_side_wants_refuses_the_pair_and_says_why(
    engines: tuple[Engine, Engine],
) -> None:
    async with workers(engines, {"transport": "shm"}, {"transport": "grpc"}) as (writing, partner, _):
        with pytest.raises(Unavailable, match=r"decode side: its handoff\.transport is grpc"):
            await writing._partners.connect(partner)


@pytest.mark.skipif(not SUPPORTED, reason="sealed memory files are a thing of Linux")
async def test_a_capture_holds_the_payloads_that_travelled_in_shared_memory(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    async with workers(engines, {}, {"capture": str(tmp_path)}) as (writing, partner, reading):
        connection = await writing._partners.connect(partner)
        assert connection.transport is not None
        assert connection.transport.name == "shm"
        await handed_over(writing, partner, reading)
    captures = [read_capture(path) for path in sorted(tmp_path.rglob("*.kvpact"))]  # noqa: ASYNC240
    chunks = [chunk for capture in captures for chunk in capture.chunks()]
    assert chunks
    for chunk in chunks:
        assert chunk.region_offset is None
        assert (len(chunk.keys), len(chunk.values)) == (chunk.header.key_bytes, chunk.header.value_bytes)
