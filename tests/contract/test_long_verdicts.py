"""A verdict of 128 layers that all differ: refusals arrive as what they are, the rest by GetVerdict."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.grpc_transport import GrpcTransport
from kvpact.clock import ManualClock, new_handoff_id
from kvpact.contract.contract import Contract
from kvpact.errors import ContractRefused
from kvpact.handoff import codec
from kvpact.handoff.grpc_transport import GrpcReaderPort
from kvpact.handoff.jobs import Partner, PrefillJob
from kvpact.handoff.status import DETAILS_CAP_BYTES, STATUS_KEY, to_status
from kvpact.types import LayerKind, Sampling, Verdict, VerdictWord
from prefill_worker.partners import Partners
from prefill_worker.prefiller import Prefiller
from prefill_worker.service import add_prefill_service
from tests.factories import make_contract, make_group, make_rotary
from tests.fakes import load_engine, make_tiny_model
from tests.handoff_fakes import MAX_OUTPUT_TOKENS, READER, WRITER, Wire, grpc_wire, make_reader

LAYERS = 128
OTHERS = {
    "architecture": "gpt_neox",
    "function_digest": b"f" * 32,
    "tokenizer_digest": b"t" * 32,
    "block_size": 24,
}
TRAILERS_CAP_BYTES = 2 * DETAILS_CAP_BYTES
"""From here to twice as much gRPC may put another error in the place of one with such trailers."""


def every_layer(theta: float, window: int, lanes: int = 16, **facts: Any) -> Contract:
    """A contract whose layers have a table, an amplitude, a window and a scale of their own each."""
    groups = tuple(
        make_group(
            layers=range(layer, layer + 1),
            kind=LayerKind.SLIDING,
            window=window + layer,
            kv_heads=lanes // 8,
            key_dim=lanes,
            value_dim=lanes,
            rotary=make_rotary(theta=theta + layer, rotary_dim=16, amplitude=1 + (theta + layer) / 1e7),
            softmax_scale=0.25 + window / 1000 + layer / 10000,
        )
        for layer in range(LAYERS)
    )
    return make_contract(layer_groups=groups, **facts)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with grpc_wire(
        contract=every_layer(1e4, 8), reader=make_reader(contract=every_layer(1e6, 500, lanes=32, **OTHERS))
    ) as wire:
        yield wire


def whole(verdict: Verdict) -> None:
    assert verdict.word is VerdictWord.REJECT
    assert {layer for difference in verdict.differences for layer in difference.layers} == set(range(LAYERS))
    assert codec.encode_verdict(verdict).ByteSize() > TRAILERS_CAP_BYTES


async def test_reserve_is_refused_with_the_whole_verdict_of_128_layers(wire: Wire) -> None:
    answer = await wire.sender().pair(READER)
    whole(answer.verdict)
    with pytest.raises(ContractRefused, match="inv_freq") as refused:
        await wire.port.reserve(wire.terms(), MAX_OUTPUT_TOKENS)
    assert refused.value.verdict == answer.verdict


async def test_connect_and_prefill_are_refused_with_it_and_get_verdict_gives_it(
    wire: Wire, tmp_path: Path
) -> None:
    assert isinstance(wire.port, GrpcReaderPort)
    engine = load_engine(make_tiny_model(tmp_path))
    partners = Partners(
        life=WRITER,
        contract=wire.contract,
        clock=ManualClock(),
        open_port=lambda partner: GrpcReaderPort(partner.endpoint, partner.life),
        probe=None,
    )
    prefiller = Prefiller(engine=engine, life=WRITER, partners=partners, slots=1)
    partner = Partner(life=READER, endpoint=wire.port.endpoint)
    server = grpc.aio.server()
    add_prefill_service(server, prefiller, partners)
    port = GrpcTransport().prefill_port(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    try:
        paired = await port.connect(partner)
        whole(paired.verdict)
        job = PrefillJob(
            handoff_id=new_handoff_id(),
            prefill=WRITER,
            decode=partner,
            token_ids=(5, 6, 7),
            original_prompt_tokens=3,
            table_length=8,
            sampling=Sampling(max_output_tokens=4),
            request_id="request",
        )
        with pytest.raises(ContractRefused) as refused:
            await anext(aiter(port.prefill(job)))
        told = refused.value.verdict
        assert {difference.field for difference in told.differences} >= {"inv_freq", "softmax_scale"}
        assert await wire.port.verdict(told.writer_digest, told.reader_digest) == paired.verdict
        assert engine.counters().computed_prompt_tokens == 0
    finally:
        await port.close()
        await partners.close()
        await server.stop(None)
        engine.close()


async def test_the_status_of_such_a_refusal_stays_small(wire: Wire) -> None:
    verdict = (await wire.sender().pair(READER)).verdict
    error = ContractRefused("x" * 20_000, verdict=verdict)
    assert to_status(error).ByteSize() < DETAILS_CAP_BYTES


@pytest.mark.parametrize(
    ("details_bytes", "code"),
    [
        (DETAILS_CAP_BYTES, grpc.StatusCode.FAILED_PRECONDITION),
        (3 * TRAILERS_CAP_BYTES, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_details_beyond_8_kib_would_arrive_as_another_error(
    details_bytes: int, code: grpc.StatusCode
) -> None:
    async def refuse(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        trailers = ((STATUS_KEY, b"x" * details_bytes),)
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "refused", trailing_metadata=trailers)
        raise AssertionError("abort always raises")

    server = grpc.aio.server()
    handlers = {"Refuse": grpc.unary_unary_rpc_method_handler(refuse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await channel.unary_unary("/test.Service/Refuse")(b"")
    assert failed.value.code() is code
    await server.stop(None)
