"""A pair of engines in one process records what it hands over, and the recording is a whole file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpact.cli.handoff_facts import handoff_facts
from kvpact.cli.pair import InProcessPair
from kvpact.engine.engine import Engine
from kvpact.handoff.capture import Capture
from kvpact.handoff.capture_file import read_capture, write_capture
from kvpact.types import Sampling
from tests.fakes import identified_engine, make_tiny_model, prompt_of


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[Engine, Engine]]:
    folder = make_tiny_model(tmp_path / "tiny")
    pair = identified_engine(folder, blocks=16), identified_engine(folder, blocks=16, key_state="raw")
    for engine in pair:
        engine.start()
    yield pair
    for engine in pair:
        engine.close()


async def test_what_two_engines_hand_over_is_recorded(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    captures: list[Capture] = []
    prompt = prompt_of(20)
    async with InProcessPair(*engines, on_capture=captures.append) as pair:
        sampling = Sampling(max_output_tokens=2, ignore_eos=True)
        tokens = [token async for token in pair.generate(prompt, sampling)]
    capture = captures[-1]
    assert capture.reserved is not None
    assert capture.reserved.terms.token_ids == prompt
    write_capture(tmp_path / "tiny.kvpact", capture)
    read = read_capture(tmp_path / "tiny.kvpact")
    assert read == capture
    facts = handoff_facts(read, None)
    assert facts.outcome() == "committed"
    assert all(facts.checksum_holds(chunk) for chunk in read.chunks())
    committed = tokens[0].committed
    assert committed is not None
    assert facts.costs is not None
    assert committed.payload_bytes == facts.costs.handoff_bytes
