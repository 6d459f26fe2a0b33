"""Replays of a capture file: reads it, makes the reader, tells how it ended, decodes where asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from decode_worker.decoder import Decoder
from kvpact.cli.flags import cluster_config
from kvpact.cli.handoff_reader import blocks_needed, engine_reader, recorded_reader
from kvpact.cli.output import progress
from kvpact.config import Config
from kvpact.engine.engine import Engine
from kvpact.engine.weights import resolve_model
from kvpact.handoff.capture import Capture
from kvpact.handoff.capture_file import read_capture
from kvpact.handoff.jobs import DecodeJob
from kvpact.handoff.receiver import Receiver
from kvpact.handoff.replay import Replay, replay
from kvpact.serving.engine_factory import load_engine
from kvpact.types import Sampling

LONG = 200
"""Parts from which on a replay tells how far it is, in tenths."""
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOrder:
    """What the command was asked for; model None replays to a cache of the recorded form."""

    file: Path
    model: str | None
    cache: str | None
    override: list[str] | None
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A replay and the output tokens that were decoded from it, the writer's own first."""

    replay: Replay
    token_ids: tuple[int, ...] = ()
    text: str | None = None
    """None where nothing was decoded or the model has no tokenizer."""

    def to_json(self) -> dict[str, Any]:
        """One object; facts by name."""
        differences = self.replay.differences()
        return {
            "same": not differences,
            "recorded": self.replay.recorded.facts(),
            "replayed": self.replay.replayed.facts(),
            "differences": [
                {"fact": each.fact, "recorded": each.recorded, "replayed": each.replayed}
                for each in differences
            ],
            "notes": list(self.replay.notes),
            "token_ids": list(self.token_ids),
            "text": self.text,
        }


def replay_file(order: ReplayOrder) -> Replayed:
    """Replays the file that `order` names.

    Raises:
        UnreadableSource: the file is damaged or of another version, the model can't be read, or the recorded
            reader's cache can't be made here.
        BadRequest: a cache setting or an override that there isn't.
    """
    capture = read_capture(order.file)
    if order.model is None:
        return asyncio.run(_to_recorded_form(capture))
    with _engine(capture, order) as (engine, folder):
        return asyncio.run(_to_engine(capture, engine, folder, order.tokens))


async def _to_recorded_form(capture: Capture) -> Replayed:
    async with recorded_reader(capture) as reader:
        return Replayed(replay=await replay(capture, reader, _on_part(capture)))


async def _to_engine(capture: Capture, engine: Engine, folder: Path, tokens: int) -> Replayed:
    async with engine_reader(capture, engine) as reader:
        done = await replay(capture, reader, _on_part(capture))
        if tokens == 0 or not _can_decode(done):
            return Replayed(replay=done)
        token_ids = tuple([token async for token in _decoded(capture, engine, reader, tokens)])
    return Replayed(replay=done, token_ids=token_ids, text=_text(folder, token_ids))


def _can_decode(done: Replay) -> bool:
    """Whether the whole prompt's cache lies there and waits for Decode."""
    receipt, reservation = done.replayed.receipt, done.reservation
    whole = reservation is not None and reservation.held_prefix_tokens == 0
    return whole and receipt is not None and receipt.canary is None


async def _decoded(
    capture: Capture, engine: Engine, reader: Receiver, tokens: int
) -> AsyncGenerator[int, None]:
    asked, commit = capture.reserved, capture.commit()
    assert asked is not None, "a receipt follows a reservation"
    assert commit is not None, "a receipt follows a commit"
    yield commit.first_token_id
    if tokens == 1:
        return
    prompt, life = asked.terms.token_ids, capture.offer.reader
    job = DecodeJob(
        handoff_id=asked.terms.handoff_id,
        decode=life,
        token_ids=(*prompt, commit.first_token_id),
        sampling=Sampling(max_output_tokens=tokens, ignore_eos=True),
        original_prompt_tokens=len(prompt),
        request_id="replay",
    )
    async with contextlib.aclosing(Decoder(engine, reader, life).tokens(job)) as decoded:
        async for token in decoded:
            yield token.token_id


@contextlib.contextmanager
def _engine(capture: Capture, order: ReplayOrder) -> Iterator[tuple[Engine, Path]]:
    """A started engine with room for the handoff, and its model's folder."""
    config = _config(order)
    progress(f"model {config.model}")
    blocks = blocks_needed(capture, config.decode.cache.block_size)
    cache = config.decode.cache.model_copy(update={"blocks": max(blocks, config.decode.cache.blocks)})
    engine = load_engine(config, config.decode.model_copy(update={"cache": cache}))
    engine.start()
    try:
        yield engine, resolve_model(config.model)
    finally:
        engine.close()


def _config(order: ReplayOrder) -> Config:
    return cluster_config(
        model=order.model,
        config=None,
        prefill_cache=None,
        decode_cache=order.cache,
        prefill_override=None,
        decode_override=order.override,
    )


def _on_part(capture: Capture) -> Any:
    total = len(capture.parts)
    step = max(1, total // 10)

    def tell(done: int) -> None:
        if total >= LONG and done % step == 0:
            progress(f"{done} of {total} messages")

    return tell


def _text(folder: Path, token_ids: tuple[int, ...]) -> str | None:
    if not (folder / TOKENIZER_FILE).is_file():
        return None
    text: str = Tokenizer.from_file(str(folder / TOKENIZER_FILE)).decode(list(token_ids))
    return text
