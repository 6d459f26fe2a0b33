"""A captured handoff, replayed to an engine of the reader's model, ends and decodes as it did."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from kvpact.cli.main import app
from kvpact.cli.pair import InProcessPair
from kvpact.handoff.capture import Capture
from kvpact.handoff.capture_file import read_capture, write_capture
from kvpact.types import Sampling
from tests.fakes import identified_engine, make_tiny_model, prompt_of
from tests.references import golden

TOKENS = 6
READER_CACHE = "key_state=raw,block_size=24"


class Recorded(NamedTuple):
    """A model and two files of one pair: its probe, and a prompt."""

    model: Path
    other: Path
    probe: Path
    prompt: Path
    longer: Path
    """The prompt and more, of which the reader held the beginning."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("replays")
    model = make_tiny_model(folder / "tiny")
    writer = identified_engine(model, blocks=64)
    reader = identified_engine(model, blocks=64, key_state="raw", block_size=24)
    captures: list[Capture] = []

    async def hand_over() -> None:
        async with InProcessPair(writer, reader, on_capture=captures.append) as pair:
            sampling = Sampling(max_output_tokens=TOKENS, ignore_eos=True)
            for prompt in (prompt_of(100), (*prompt_of(100), *range(3, 40))):
                async for _ in pair.generate(prompt, sampling):
                    pass

    for engine in (writer, reader):
        engine.start()
    asyncio.run(hand_over())
    for engine in (writer, reader):
        engine.close()
    other = make_tiny_model(folder / "other", seed=1)
    files = [folder / f"{name}.kvpact" for name in ("probe", "prompt", "longer")]
    for file, capture in zip(files, captures, strict=True):
        write_capture(file, capture)
    return Recorded(model, other, *files)


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["handoff", "replay", *arguments, "--json"])
    return result.exit_code, dict(json.loads(result.stdout))


def test_the_prompt_ends_as_it_did_and_decodes_the_same_tokens(recorded: Recorded) -> None:
    model = ("--model", str(recorded.model), "--cache", READER_CACHE)
    code, facts = run(str(recorded.prompt), *model, "--tokens", str(TOKENS))
    assert (code, facts["differences"]) == (0, [])
    assert tuple(facts["token_ids"]) == golden(recorded.model, prompt_of(100), TOKENS).token_ids
    assert isinstance(facts["text"], str)


def test_the_probe_is_judged_by_the_engine(recorded: Recorded) -> None:
    code, facts = run(str(recorded.probe), "--model", str(recorded.model), "--cache", READER_CACHE)
    assert (code, facts["replayed"]["canary"], facts["token_ids"]) == (0, "passed", [])


@pytest.mark.parametrize("file", ["probe", "prompt"])
def test_without_a_model_a_cache_of_the_recorded_form_will_do(recorded: Recorded, file: str) -> None:
    code, facts = run(str(getattr(recorded, file)))
    assert (code, facts["differences"]) == (0, [])


def test_a_reader_with_another_cache_ends_otherwise_and_says_in_what(recorded: Recorded) -> None:
    code, facts = run(str(recorded.prompt), "--model", str(recorded.model), "--tokens", "2")
    assert code == 20
    assert {each["fact"] for each in facts["differences"]} >= {"verdict", "plan", "receipt.plan"}
    assert facts["replayed"]["outcome"] == "committed"
    assert len(facts["token_ids"]) == 2


def test_a_reader_of_another_model_refuses(recorded: Recorded) -> None:
    code, facts = run(str(recorded.prompt), "--model", str(recorded.other), "--cache", READER_CACHE)
    assert code == 20
    assert facts["replayed"]["reason"] == "CONTRACT_REFUSED"
    assert "function_digest reject" in facts["replayed"]["differences"]


@pytest.mark.parametrize("with_model", [True, False])
def test_a_prefix_that_the_reader_held_is_granted_again_and_said_to_be_blank(
    recorded: Recorded, with_model: bool
) -> None:
    capture = read_capture(recorded.longer)
    assert capture.reserved is not None
    assert capture.reserved.reservation is not None
    held = capture.reserved.reservation.held_prefix_tokens
    assert held > 0
    model = ("--model", str(recorded.model), "--cache", READER_CACHE, "--tokens", "4") if with_model else ()
    code, facts = run(str(recorded.longer), *model)
    assert (code, facts["differences"], facts["token_ids"]) == (0, [], [])
    assert [note for note in facts["notes"] if f"the first {held} tokens" in note]
    assert not [note for note in facts["notes"] if "this reader granted" in note]


def test_the_files_are_those_of_one_pair(recorded: Recorded) -> None:
    probe, prompt = read_capture(recorded.probe), read_capture(recorded.prompt)
    assert probe.reserved is not None
    assert prompt.reserved is not None
    assert (probe.reserved.terms.canary, prompt.reserved.terms.canary) == (True, False)
