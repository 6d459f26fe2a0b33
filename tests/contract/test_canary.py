"""The probe of a new pair: what it finds that witnesses can't, when it runs, and that it leaves no trace."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

import decode_worker.canary
import prefill_worker.canary
from coordinator.grpc_transport import GrpcTransport
from coordinator.ports import RegisteredWorker
from decode_worker.canary import EngineJudge
from kvpact.cli.pair import InProcessPair
from kvpact.contract.contract import Contract
from kvpact.engine.engine import Engine
from kvpact.engine.requests import EngineCounters
from kvpact.errors import DataLoss, Exhausted, UnknownHandoff
from kvpact.handoff.codec import decode_canary, encode_canary
from kvpact.handoff.handoff_table import ReceiverCounters
from kvpact.handoff.messages import HandoffTerms
from kvpact.handoff.trust import TakenOnTrust
from kvpact.types import Role, Sampling
from prefill_worker.service import add_prefill_service
from tests.factories import make_contract, with_group, with_rotary
from tests.fakes import identified_engine, make_tiny_model, prompt_of

SAMPLING = Sampling(max_output_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("qwen3"),
        model_type="qwen3",
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=1,
        layer_types=["sliding_attention", "full_attention"],
    )


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[tuple[Engine, Engine]]:
    made = identified_engine(folder, blocks=32), identified_engine(folder, blocks=32)
    for engine in made:
        engine.start()
    yield made
    for engine in made:
        engine.close()


@contextlib.asynccontextmanager
async def unwitnessed(writer: Engine, reader: Engine) -> AsyncIterator[InProcessPair]:
    """A pair that has nothing but its probe."""
    async with InProcessPair(writer, reader) as pair:
        pair.receiver._arrival._verifier = TakenOnTrust()
        yield pair


def all_free(*engines: Engine) -> bool:
    return all(engine.pool.counts().free == engine.pool.counts().total for engine in engines)


async def emptied(engine: Engine) -> None:
    """Returns when every block is back."""
    freed, loop = asyncio.Event(), asyncio.get_running_loop()
    stop = engine.pool.on_free(lambda: loop.call_soon_threadsafe(freed.set))
    async with asyncio.timeout(5):
        while not all_free(engine):
            freed.clear()
            if not all_free(engine):
                await freed.wait()
    stop()


def another_scale(contract: Contract) -> Contract:
    return with_group(contract, softmax_scale=0.3)


def slow_lanes_slower(contract: Contract) -> Contract:
    """What a wrong scaling does: the slowest lanes turn otherwise, the fast ones as they were."""
    table = contract.layer_groups[0].rotary.tables[0]
    slowest = table.inv_freq[-1]
    lied = replace(table, inv_freq=(*table.inv_freq[:-1], slowest * 0.99))
    return with_rotary(contract, tables=(lied,))


def forgets_the_window(contract: Contract) -> Contract:
    groups = tuple(
        replace(group, window=None if group.window is None else group.window * 64)
        for group in contract.layer_groups
    )
    return replace(contract, layer_groups=groups)


@pytest.mark.parametrize("lie", [another_scale, slow_lanes_slower, forgets_the_window])
async def test_a_writer_that_computes_otherwise_fails_by_its_logits(
    engines: tuple[Engine, Engine],
    monkeypatch: pytest.MonkeyPatch,
    lie: Callable[[Contract], Contract],
) -> None:
    monkeypatch.setattr(engines[0].cache, "contract", lie(engines[0].contract))
    async with unwitnessed(*engines) as pair:
        await pair.connect()
    assert pair.canary is not None
    assert not pair.canary.passed
    assert pair.canary.max_abs_error > pair.canary.tolerance == 1e-4
    assert "logits off by" in pair.canary.finding
    assert all_free(*engines)


@pytest.mark.parametrize(
    ("lie", "blind"), [(another_scale, False), (slow_lanes_slower, True), (forgets_the_window, True)]
)
async def test_a_contiguous_short_probe_is_blind_to_scaling_and_windows(
    engines: tuple[Engine, Engine],
    monkeypatch: pytest.MonkeyPatch,
    lie: Callable[[Contract], Contract],
    blind: bool,
) -> None:
    for module in (prefill_worker.canary, decode_worker.canary):
        monkeypatch.setattr(module, "probe_positions", lambda *_: tuple(range(17)))
    monkeypatch.setattr(engines[0].cache, "contract", lie(engines[0].contract))
    async with unwitnessed(*engines) as pair:
        await pair.connect()
    assert pair.canary is not None
    assert pair.canary.passed is blind


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("part", ["first_V", "next_V", "noise"])
async def test_a_reader_whose_own_numbers_arent_finite_passes_nobody(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch, part: str, number: float
) -> None:
    computed = EngineJudge._computed

    async def broken(judge: EngineJudge, terms: HandoffTerms) -> Any:
        own = await computed(judge, terms)
        if part == "noise":
            return replace(own, noise=number)
        logits_V = getattr(own, part).clone()
        logits_V[3] = number
        return replace(own, **{part: logits_V})

    monkeypatch.setattr(EngineJudge, "_computed", broken)
    async with unwitnessed(*engines) as pair:
        await pair.connect()
    assert pair.canary is not None
    assert not pair.canary.passed
    assert "own logits aren't finite" in pair.canary.finding
    assert decode_canary(encode_canary(pair.canary)) == pair.canary
    assert all_free(*engines)


async def test_a_first_token_that_the_reader_would_not_pick_fails(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _ = engines
    sample = writer._runner.sample
    monkeypatch.setattr(
        writer._runner, "sample", lambda logits: {key: token ^ 1 for key, token in sample(logits).items()}
    )
    async with InProcessPair(*engines) as pair:
        await pair.connect()
    assert pair.canary is not None
    assert not pair.canary.passed
    assert pair.canary.max_abs_error <= pair.canary.tolerance
    assert "the writer's first token is" in pair.canary.finding


async def test_a_probe_leaves_no_trace_in_counters_and_pools(folder: Path) -> None:
    writer, reader = identified_engine(folder, blocks=8), identified_engine(folder, blocks=8)
    writer.start()
    reader.start()
    async with InProcessPair(writer, reader) as pair:
        await pair.connect()
        assert pair.canary is not None
        assert pair.canary.passed
        assert writer.counters() == reader.counters() == EngineCounters()
        assert pair.receiver.counters() == ReceiverCounters()
        assert pair.prefiller.tally().committed == 0
        assert pair.receiver.held() == 0
        assert all_free(writer, reader)
    writer.close()
    reader.close()


async def test_a_probe_runs_once_until_a_handoff_of_the_pair_is_refused(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with InProcessPair(*engines) as pair:
        probe, runs = pair._partners._probe, []
        assert probe is not None
        run = probe.run

        async def noted(*arguments: Any) -> Any:
            runs.append(arguments)
            return await run(*arguments)

        monkeypatch.setattr(probe, "run", noted)
        await pair.connect()
        await pair.connect()
        assert len(runs) == 1
        read = engines[0].cache.read_blocks
        with monkeypatch.context() as lying:
            lying.setattr(engines[0].cache, "read_blocks", lambda *place: tuple(reversed(read(*place))))
            with pytest.raises(DataLoss, match="witness"):
                await anext(pair.generate(prompt_of(20), SAMPLING))
            for _ in range(2):
                await pair.connect()
                assert pair.canary is not None
                assert not pair.canary.passed
        assert len(runs) == 3
        await pair.connect()
        assert pair.canary.passed
        tokens = [token async for token in pair.generate(prompt_of(20), SAMPLING)]
    assert len(runs) == 4
    assert len(tokens) == 3


async def test_a_writer_that_runs_no_probe_gets_nothing_reserved(engines: tuple[Engine, Engine]) -> None:
    async with InProcessPair(*engines) as pair:
        pair._partners._probe = None
        await pair.connect()
        with pytest.raises(DataLoss, match="hasn't passed its probe") as caught:
            await anext(pair.generate(prompt_of(20), SAMPLING))
        assert caught.value.check == "canary"
        assert pair.receiver.counters().committed == 0
    assert all_free(*engines)


async def test_a_writer_whose_reader_alone_forgot_probes_the_pair_again(
    engines: tuple[Engine, Engine],
) -> None:
    async with InProcessPair(*engines) as pair:
        await pair.connect()
        pair.receiver._pairs._writers.clear()
        await pair.connect()
        with pytest.raises(DataLoss, match="hasn't passed its probe"):
            await anext(pair.generate(prompt_of(20), SAMPLING))
        tokens = [token async for token in pair.generate(prompt_of(20), SAMPLING)]
    assert len(tokens) == 3
    assert all_free(*engines)


async def test_decode_never_gets_a_probe(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    async with InProcessPair(*engines) as pair:
        judge = pair.receiver._arrival._judge
        assert judge is not None
        real = judge.judge

        async def tempted(writer: Any, terms: Any, blocks: Any, first: int) -> Any:
            ids.append(terms.handoff_id)
            with pytest.raises(UnknownHandoff, match="isn't committed"):
                pair.receiver.take(terms.handoff_id, pair._partner.life, (*terms.token_ids, first))
            found.append("refused")
            return await real(writer, terms, blocks, first)

        ids: list[Any] = []
        monkeypatch.setattr(judge, "judge", tempted)
        await pair.connect()
        with pytest.raises(UnknownHandoff, match="it was a canary"):
            pair.receiver.take(ids[0], pair._partner.life, prompt_of(17))
    assert found == ["refused"]


async def test_a_reader_without_room_for_the_probe_says_so_and_keeps_nothing(
    engines: tuple[Engine, Engine],
) -> None:
    _, reader = engines
    held = reader.pool.allocate(31, "test")
    async with InProcessPair(*engines) as pair:
        with pytest.raises(Exhausted):
            await pair.connect()
        reader.pool.free(held, "test")
        await pair.connect()
        assert pair.canary is not None
        assert pair.canary.passed
    assert all_free(*engines)


async def test_a_cancelled_connect_gives_every_block_back(engines: tuple[Engine, Engine]) -> None:
    async with InProcessPair(*engines) as pair:
        for turns in (1, 5, 20, 60):
            connecting = asyncio.ensure_future(pair.connect())
            for _ in range(turns):
                await asyncio.sleep(0)
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
    for engine in engines:
        await emptied(engine)


@pytest.mark.parametrize("lies", [False, True], ids=["honest", "another softmax scale"])
async def test_connect_answers_how_the_probe_went(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch, lies: bool
) -> None:
    if lies:
        monkeypatch.setattr(engines[0].cache, "contract", another_scale(engines[0].contract))
    async with InProcessPair(*engines) as pair:
        server = grpc.aio.server()
        add_prefill_service(server, pair.prefiller, pair._partners)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        remote = GrpcTransport().prefill_port(f"127.0.0.1:{port}")
        partner = RegisteredWorker(
            life=pair._partner.life, role=Role.DECODE, endpoint="127.0.0.1:1", contract=make_contract(), pid=1
        )
        if lies:
            with pytest.raises(DataLoss, match="the pair's probe failed: a token decoded from") as failed:
                await remote.connect(partner)
            assert failed.value.check == "canary"
        else:
            paired = await remote.connect(partner)
            assert paired.canary is not None
            assert paired.canary.passed
        await remote.close()
        await server.stop(None)
