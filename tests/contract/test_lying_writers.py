"""A writer whose header lies is caught before a token reaches the user; taken on trust, each lie corrupts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from decode_worker.service import add_decode_service
from kvpact.cli.pair import InProcessPair, PairToken
from kvpact.contract.contract import Contract
from kvpact.contract.rotation import rotate, rotation_at
from kvpact.engine.engine import Engine
from kvpact.engine.requests import ChunkComputed, EngineEvent, TokenComputed
from kvpact.errors import DataLoss, UnknownHandoff
from kvpact.handoff.grpc_transport import GrpcReaderPort
from kvpact.handoff.messages import Buffer
from kvpact.handoff.service import add_worker_service
from kvpact.types import HandoffId, LaneOrder, Sampling
from prefill_worker.computation import Computation
from tests.factories import make_inv_freq, with_group, with_rotary
from tests.fakes import identified_engine, make_request, make_tiny_model, prompt_of
from tests.references import golden

PROMPT = prompt_of(37)
SAMPLING = Sampling(max_output_tokens=6, ignore_eos=True)
READERS = {
    "accepts": {},
    "converts": {"key_state": "raw", "axis_order": "HND", "block_size": 24},
}
Change = Callable[
    [torch.Tensor, torch.Tensor, Contract, int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[dict[str, Engine]]:
    forms = {"rotated": {}, "raw": {"key_state": "raw"}} | READERS
    made = {
        name: identified_engine(folder, blocks=32, prefix_cache=False, **form) for name, form in forms.items()
    }
    for engine in made.values():
        engine.start()
    yield made
    for engine in made.values():
        engine.close()


class Liar:
    """A writer's engine that lies once a test says so."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self._patch = patch

    def computes_as(self, contract: Contract) -> None:
        """From here on it computes, stores and attends by another contract than it names."""
        self._patch.setattr(self.engine.cache, "contract", contract)

    def shifts_positions(self) -> None:
        """From here on it computes every prompt one position further on."""
        submit = self.engine.submit

        def shifted(request: Any, on_event: Any) -> Any:
            positions = request.positions or range(len(request.token_ids))
            return submit(replace(request, positions=tuple(p + 1 for p in positions)), on_event)

        self._patch.setattr(self.engine, "submit", shifted)
        admission, scheduler = self.engine._admission, self.engine._scheduler
        larger = replace(admission, context_tokens=admission.context_tokens + 1)
        self._patch.setattr(self.engine, "_admission", larger)
        self._patch.setattr(scheduler, "_context_tokens", scheduler._context_tokens + 1)

    def cache_of(self, prompt: tuple[int, ...]) -> list[tuple[bytearray, bytearray]]:
        """Keys and values of a prompt in each layer, as stored."""
        done, blocks = threading.Event(), []

        def on_event(event: EngineEvent) -> None:
            if isinstance(event, ChunkComputed):
                blocks.extend(event.blocks)
            elif isinstance(event, TokenComputed):
                done.set()

        request = make_request(prompt, stop_after_first=True, hold_blocks=True)
        sequence_id = self.engine.submit(request, on_event)
        assert done.wait(10)
        read = [self.engine.cache.read_blocks(layer, torch.tensor(blocks)) for layer in range(2)]
        self.engine.release(sequence_id)
        return [(bytearray(keys), bytearray(values)) for keys, values in read]

    def sends(self, change: Change) -> None:
        """From here on it sends changed keys and values [T, H, D], with right checksums."""
        read, size = Computation._read, self.engine.contract.layout.block_size
        engine = self.engine

        def changed(computation: Computation, layer: int, blocks: range) -> tuple[Buffer, Buffer]:
            heads = engine.contract.group_of(layer).kv_heads
            k_THD, v_THD = (
                torch.frombuffer(bytearray(part), dtype=torch.float32).view(-1, heads, 16)
                for part in read(computation, layer, blocks)
            )
            index = torch.arange(blocks.start * size, blocks.stop * size)
            given = computation._request.positions
            last = len(computation._request.token_ids) - 1
            positions_T = index if given is None else torch.tensor(given)[index.clamp(max=last)]
            lied = change(k_THD, v_THD, engine.contract, layer, positions_T)
            keys, values = (x.contiguous().numpy().reshape(-1).view("uint8").data for x in lied)
            return keys, values

        self._patch.setattr(Computation, "_read", changed)


def turned(k_THD: torch.Tensor, contract: Contract, layer: int, positions_T: torch.Tensor) -> torch.Tensor:
    rotary = contract.group_of(layer).rotary
    return rotate(k_THD, rotation_at(rotary, rotary.tables[0], positions_T))


def rotates_before_sending(liar: Liar) -> None:
    liar.sends(lambda k, v, contract, layer, positions: (turned(k, contract, layer, positions), v))


def swaps_lanes(liar: Liar) -> None:
    def swapped(k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return k.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2), v

    liar.sends(swapped)


def stores_another_lane_order(liar: Liar) -> None:
    liar.computes_as(with_rotary(liar.engine.contract, stored_lane_order=LaneOrder.ADJACENT))


def swaps_keys_and_values(liar: Liar) -> None:
    liar.sends(lambda k, v, *_: (v, k))


def sends_values_head_first(liar: Liar) -> None:
    size = liar.engine.contract.layout.block_size

    def head_first(k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return k, v.unflatten(0, (-1, size)).transpose(1, 2).reshape(v.shape)

    liar.sends(head_first)


def sends_other_values(liar: Liar) -> None:
    liar.sends(lambda k, v, *_: (k, v * 1.01))


def counts_positions_from_one(liar: Liar) -> None:
    liar.shifts_positions()


def runs_another_table(liar: Liar) -> None:
    contract = liar.engine.contract
    table = replace(contract.layer_groups[0].rotary.tables[0], inv_freq=make_inv_freq(theta=500.0))
    liar.computes_as(with_rotary(contract, tables=(table,)))


def attends_with_an_amplitude(liar: Liar) -> None:
    contract = liar.engine.contract
    table = replace(contract.layer_groups[0].rotary.tables[0], amplitude=1.1)
    liar.computes_as(with_rotary(contract, tables=(table,)))


def sends_bytes_of_another_prompt(liar: Liar) -> None:
    """Blocks that hold what an earlier prompt left in them."""
    stale = liar.cache_of(prompt_of(64, seed=9))

    def older(
        k: torch.Tensor, v: torch.Tensor, contract: Contract, layer: int, _: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (torch.frombuffer(part, dtype=torch.float32) for part in stale[layer])
        return keys.view(-1, *k.shape[1:])[: len(k)], values.view(-1, *v.shape[1:])[: len(v)]

    liar.sends(older)


def scales_logits_otherwise(liar: Liar) -> None:
    liar.computes_as(with_group(liar.engine.contract, softmax_scale=0.2))


LIES: list[tuple[str, Callable[[Liar], None]]] = [
    ("raw", rotates_before_sending),
    ("rotated", rotates_before_sending),
    ("rotated", swaps_lanes),
    ("rotated", stores_another_lane_order),
    ("rotated", swaps_keys_and_values),
    ("rotated", sends_values_head_first),
    ("rotated", sends_other_values),
    ("rotated", counts_positions_from_one),
    ("rotated", runs_another_table),
    ("raw", runs_another_table),
    ("rotated", attends_with_an_amplitude),
    ("rotated", sends_bytes_of_another_prompt),
]
"""Key state that the writer names, and a lie that rows show: sending rotated keys as raw ones, or rotating
rotated ones again; running another table, whether the keys that are sent carry it or not; and so on."""
BY_CANARY: list[tuple[str, Callable[[Liar], None]]] = [*LIES, ("rotated", scales_logits_otherwise)]


def names(lie: object) -> str:
    return getattr(lie, "__name__", str(lie)).replace("_", " ")


@contextlib.asynccontextmanager
async def joined(
    writer: Engine, reader: Engine, *, transport: str = "in process", checked: bool = True
) -> AsyncIterator[InProcessPair]:
    """A pair whose handoffs cross a gRPC server where `transport` says so."""
    async with InProcessPair(writer, reader, checked=checked) as pair:
        if transport == "in process":
            yield pair
            return
        server = grpc.aio.server()
        add_decode_service(server, pair.receiver, pair.decoder)
        add_worker_service(server, pair.receiver)  # type: ignore[arg-type]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pair._partners._open_port = lambda partner: GrpcReaderPort(f"127.0.0.1:{port}", partner.life)
        yield pair
        await pair._partners.close()
        await server.stop(None)


async def collect(pair: InProcessPair, seen: list[PairToken]) -> list[PairToken]:
    async for token in pair.generate(PROMPT, SAMPLING, want_logits=True):
        seen.append(token)
    return seen


def all_free(*engines: Engine) -> bool:
    return all(engine.pool.counts().free == engine.pool.counts().total for engine in engines)


@pytest.mark.parametrize("transport", ["in process", "grpc"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("state", "lie"), LIES, ids=names)
async def test_a_lie_is_caught_by_its_witnesses_before_a_token_is_seen(
    engines: dict[str, Engine],
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    lie: Callable[[Liar], None],
    reader: str,
    transport: str,
) -> None:
    seen: list[PairToken] = []
    async with joined(engines[state], engines[reader], transport=transport) as pair:
        await pair.connect()
        assert pair.canary is not None
        assert pair.canary.passed
        lie(Liar(engines[state], monkeypatch))
        with pytest.raises(DataLoss, match="witness of layer") as caught:
            await collect(pair, seen)
        assert caught.value.check == "witness"
        assert seen == []
        assert pair.receiver.counters().failed == 1
        assert pair.receiver.held() == 0
        with pytest.raises(DataLoss, match="the probe of prefill-0 with decode-0 failed: witness"):
            await collect(pair, seen)
        assert seen == []
    assert all_free(engines[state], engines[reader])


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("state", "lie"), BY_CANARY, ids=names)
async def test_a_lie_fails_the_pairs_probe(
    engines: dict[str, Engine],
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    lie: Callable[[Liar], None],
    reader: str,
) -> None:
    lie(Liar(engines[state], monkeypatch))
    async with joined(engines[state], engines[reader]) as pair:
        await pair.connect()
        assert pair.canary is not None
        assert not pair.canary.passed
        with pytest.raises(DataLoss) as caught:
            await collect(pair, [])
        assert caught.value.check == "canary"
        assert pair.receiver.counters().committed == 0
    assert all_free(engines[state], engines[reader])


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("state", "lie"), BY_CANARY, ids=names)
async def test_taken_on_trust_each_lie_corrupts_what_the_user_gets(
    folder: Path,
    engines: dict[str, Engine],
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    lie: Callable[[Liar], None],
    reader: str,
) -> None:
    lie(Liar(engines[state], monkeypatch))
    async with joined(engines[state], engines[reader], checked=False) as pair:
        tokens = await collect(pair, [])
    expected = golden(folder, PROMPT, SAMPLING.max_output_tokens)
    assert float((tokens[1].logits - expected.logits_NV[1]).abs().max()) > 1e-2


async def test_a_refused_handoff_is_gone_for_good(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[HandoffId] = []
    async with joined(engines["rotated"], engines["accepts"]) as pair:
        await pair.connect()
        reserve = pair.receiver.reserve

        async def noting(terms: Any, max_output_tokens: int) -> Any:
            ids.append(terms.handoff_id)
            return await reserve(terms, max_output_tokens)

        monkeypatch.setattr(pair.receiver, "reserve", noting)
        swaps_keys_and_values(Liar(engines["rotated"], monkeypatch))
        with pytest.raises(DataLoss):
            await collect(pair, [])
        with pytest.raises(UnknownHandoff, match="ended: witness of layer"):
            pair.receiver.take(ids[0], pair._partner.life, PROMPT)
