"""Workers that compute nothing: real gRPC servers that answer by a script of tokens and faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from coordinator.coordinator import Coordinator
from coordinator.scaling import Crew
from kvpact.clock import ManualClock
from kvpact.config import ApiConfig, Config
from kvpact.errors import KvpactError, Unavailable
from kvpact.handoff import codec
from kvpact.handoff.jobs import DecodedTokens, DecodeJob, GenerateJob, Paired
from kvpact.handoff.messages import CanaryOutcome, WorkerDescription
from kvpact.handoff.status import answering
from kvpact.handoff.verdict_codec import EXACTNESSES
from kvpact.types import (
    BlockCounts,
    ContractDigest,
    Difference,
    DifferenceAction,
    Exactness,
    FinishReason,
    IdentityRelation,
    Relation,
    Role,
    Sampling,
    Verdict,
    VerdictWord,
    WorkerCounters,
    WorkerLife,
    WorkerLoad,
)
from kvpact.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    decode_pb2_grpc,
    handoff_pb2,
    handoff_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from tests.factories import make_contract

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 0
VOCAB_SIZE = 264
"""Rows of the model's embedding, of which the tokenizer uses all but five."""
TOKENS = 259
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _token_of_byte() -> dict[int, int]:
    """Token of each byte: after the special tokens, in the order of GPT-2's alphabet."""
    order = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in printable]
    character = {byte: chr(byte) for byte in printable} | {b: chr(0x100 + i) for i, b in enumerate(hidden)}
    return {byte: len(SPECIAL) + order.index(character[byte]) for byte in range(0x100)}


TOKEN_OF_BYTE = _token_of_byte()


def make_text_folder(folder: Path, *, context: int = 128, template: str | None = CHAT_TEMPLATE) -> Path:
    """A model folder without weights: one token per byte, three special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": VOCAB_SIZE, "max_position_embeddings": context}
    files: dict[str, Any] = {
        "config.json": config | {"eos_token_id": EOS},
        "generation_config.json": {"eos_token_id": EOS},
        "tokenizer_config.json": {"bos_token": SPECIAL[0], "eos_token": SPECIAL[0]},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def make_verdict(
    word: VerdictWord = VerdictWord.ACCEPT, *, fields: Iterable[str] = (), digest: int = 1
) -> Verdict:
    """A verdict whose differences all lead to its word."""
    relation, action = {
        VerdictWord.ACCEPT: (Relation.NOTED, DifferenceAction.ACCEPT),
        VerdictWord.CONVERT: (Relation.CONVERTIBLE, DifferenceAction.CONVERT),
        VerdictWord.REJECT: (Relation.INCOMPATIBLE, DifferenceAction.REJECT),
    }[word]
    return Verdict(
        word=word,
        identity=IdentityRelation.EQUAL,
        differences=tuple(
            Difference(
                field=name,
                layers=(0, 1),
                writer=f"{name} of the writer",
                reader=f"{name} of the reader",
                relation=relation,
                action=action,
                remedy=f"serve both with one {name}",
                explanation=f"{name} matters",
            )
            for name in fields
        ),
        plan=(),
        exactness=Exactness.BIT_EXACT,
        writer_digest=ContractDigest(bytes([digest]) * 32),
        reader_digest=ContractDigest(bytes([digest + 1]) * 32),
    )


def make_life(worker: str, number: int = 1) -> WorkerLife:
    """The `number`th life of a worker."""
    return WorkerLife(worker=worker, incarnation=bytes([number]) * 16)


def make_load(*, running: int = 0, waiting: int = 0, free: int = 64, draining: bool = False) -> WorkerLoad:
    """A worker with 64 blocks."""
    return WorkerLoad(
        running_requests=running,
        waiting_requests=waiting,
        blocks=BlockCounts(free=free, total=64),
        draining=draining,
    )


@dataclass(slots=True)
class Script:
    """What workers answer: output token i of every request is reply[i]. Nobody reaches lives in `dead`."""

    reply: list[int] = field(default_factory=lambda: list(range(10, 60)))
    dead: list[WorkerLife] = field(default_factory=list)

    def check_reachable(self, life: WorkerLife) -> None:
        """Raises what a worker finds that calls a dead one."""
        if life in self.dead:
            raise Unavailable(f"can't reach {life.worker}")

    def say(self, text: str | bytes, *, ends: bool = True) -> None:
        """Answers these bytes, one token each, and then the end token."""
        data = text.encode() if isinstance(text, str) else text
        self.reply = [TOKEN_OF_BYTE[byte] for byte in data] + ([EOS] if ends else [])

    def output(self, index: int, sampling: Sampling) -> tuple[int, FinishReason | None]:
        """Output token `index`, counted from the original prompt's end, and whether it is the last."""
        token = self.reply[index]
        own = frozenset() if sampling.ignore_eos else frozenset({EOS})
        if token in sampling.stop_token_ids | own:
            return token, FinishReason.STOP
        return token, FinishReason.LENGTH if index + 1 == sampling.max_output_tokens else None


class FakeWorker(handoff_pb2_grpc.WorkerServiceServicer):
    """What both roles share: a server, a life, a record of releases."""

    role: Role

    def __init__(self, script: Script, life: WorkerLife) -> None:
        self.script = script
        self.life = life
        self.load = make_load()
        self.contract = make_contract()
        self.requests: list[Any] = []
        self.released: list[tuple[bytes, str]] = []
        self.drains = 0
        self.released_now = asyncio.Event()
        self._seen = asyncio.Event()
        self.cancelled = asyncio.Event()
        """Set when a stream ended before its script did."""
        self.holding = asyncio.Event()
        self.faults: list[KvpactError] = []
        """One is taken and raised at the start of each stream."""
        self.endpoint = ""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handoff_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self._add(self._server)

    def _add(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Serves on a port of its own."""
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def die(self) -> None:
        """Ends at once, as a killed process does."""
        self.script.dead.append(self.life)
        await self._server.stop(None)

    async def register(self, coordinator: str) -> None:
        """Makes itself known as a worker does."""
        async with grpc.aio.insecure_channel(coordinator) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            await stub.Register(
                coordinator_pb2.RegisterRequest(
                    worker=codec.encode_life(self.life),
                    role=codec.encode_role(self.role),
                    endpoint=self.endpoint,
                    contract=codec.encode_contract(self.contract),
                    load=codec.encode_load(self.load),
                    pid=4242,
                )
            )

    async def beat(self, coordinator: str) -> bool:
        """Sends one heartbeat; whether it must register again."""
        async with grpc.aio.insecure_channel(coordinator) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            answer = await stub.Heartbeat(
                coordinator_pb2.HeartbeatRequest(
                    worker=codec.encode_life(self.life), load=codec.encode_load(self.load)
                )
            )
            return bool(answer.register_again)

    async def Release(self, request: Any, context: Any) -> Any:
        self.released.append((request.handoff_id, request.reason))
        self.released_now.set()
        self._seen.set()
        return handoff_pb2.ReleaseResponse()

    async def Drain(self, request: Any, context: Any) -> Any:
        self.drains += 1
        return handoff_pb2.DrainResponse(running_requests=self.load.running_requests)

    async def Describe(self, request: Any, context: Any) -> Any:
        return codec.encode_description(
            WorkerDescription(
                life=self.life,
                role=self.role,
                contract=self.contract,
                counters=WorkerCounters(computed_prompt_tokens=len(self.requests)),
                load=self.load,
                pid=4242,
            )
        )

    async def count(self, seen: list[Any], count: int) -> None:
        """Waits until `requests` or `released` holds this many."""
        while len(seen) < count:
            self._seen.clear()
            await self._seen.wait()

    def take(self, request: Any) -> None:
        """Notes a request and raises the next fault, if there is one."""
        self.requests.append(request)
        self._seen.set()
        if self.faults:
            raise self.faults.pop(0)


class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServiceServicer):
    """Answers Connect by `verdicts`, and Prefill by the script."""

    role = Role.PREFILL

    def __init__(self, script: Script, life: WorkerLife) -> None:
        super().__init__(script, life)
        self.verdicts: Callable[[str], Verdict] = lambda decode_worker: make_verdict()
        self.connect_faults: list[KvpactError] = []
        self.canaries: list[CanaryOutcome] = []
        """Results of probes that coming Connects answer; without one no probe ran."""
        self.connects = 0
        self.hold = False
        """Whether Prefill waits for ever before the first token."""
        self.linger = False
        """Whether Prefill never ends its stream by itself."""

    def _add(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def Connect(self, request: Any, context: Any) -> Any:
        async with answering(context):
            self.connects += 1
            if self.connect_faults:
                raise self.connect_faults.pop(0)
            self.script.check_reachable(codec.decode_life(request.decode))
        verdict = self.verdicts(request.decode.worker)
        canary = self.canaries.pop(0) if self.canaries else None
        return codec.encode_paired(Paired(verdict=verdict, canary=canary))

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[Any]:
        ended = False
        try:
            async with answering(context):
                self.take(request)
                hands_over = request.HasField("decode")
                if hands_over:
                    self.script.check_reachable(codec.decode_life(request.decode))
                    yield prefill_pb2.PrefillResponse(reserved=prefill_pb2.ReservedEvent())
                if self.hold:
                    self.holding.set()
                    await asyncio.Event().wait()
                if hands_over:
                    yield prefill_pb2.PrefillResponse(committed=_committed())
                yield prefill_pb2.PrefillResponse(first_token=self._first(request))
                if self.linger:
                    await asyncio.Event().wait()
            ended = True
        finally:
            if not ended:
                self.cancelled.set()

    def _first(self, request: Any) -> Any:
        sampling, original = codec.decode_sampling(request.sampling)
        token, reason = self.script.output(len(request.token_ids) - original, sampling)
        return prefill_pb2.FirstTokenEvent(token_id=token, finish_reason=codec.encode_finish_reason(reason))


class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServiceServicer):
    """Streams the rest of the script."""

    role = Role.DECODE

    def __init__(self, script: Script, life: WorkerLife) -> None:
        super().__init__(script, life)
        self.fail_after: int | None = None
        """Tokens of its own after which a stream fails, once."""
        self.hold_after: int | None = None
        """Tokens of its own after which a stream waits for `go_on`."""
        self.local_requests: list[Any] = []
        """Of `requests`, the prompts that it was to compute itself."""
        self.go_on = asyncio.Event()
        self.outputs = script.output

    def _add(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[Any]:
        ended = False
        try:
            async with answering(context):
                self.take(request)
                async for tokens in self._tokens(codec.decode_decode_job(request)):
                    yield codec.encode_decoded_tokens(tokens)
            ended = True
        finally:
            if not ended:
                self.cancelled.set()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        ended = False
        try:
            async with answering(context):
                self.local_requests.append(request)
                self.take(request)
                async for tokens in self._tokens(codec.decode_generate_job(request)):
                    yield codec.encode_generated_tokens(tokens)
            ended = True
        finally:
            if not ended:
                self.cancelled.set()

    async def _tokens(self, job: DecodeJob | GenerateJob) -> AsyncIterator[DecodedTokens]:
        index = len(job.token_ids) - job.original_prompt_tokens
        sent, reason = 0, None
        while reason is None:
            if sent == self.fail_after:
                self.fail_after = None
                raise Unavailable("the script says that this worker dies here")
            if sent == self.hold_after:
                self.holding.set()
                await self.go_on.wait()
            token, reason = self.outputs(index + sent, job.sampling)
            sent += 1
            yield DecodedTokens(token_ids=(token,), finish_reason=reason)


@dataclass(slots=True, kw_only=True)
class FakeCluster:
    """A coordinator that serves, with its fake workers."""

    coordinator: Coordinator
    clock: ManualClock
    """The coordinator's."""
    url: str
    grpc_endpoint: str
    script: Script
    prefills: list[FakePrefill]
    decodes: list[FakeDecode]

    @property
    def prefill(self) -> FakePrefill:
        """The first prefill worker."""
        return self.prefills[0]

    @property
    def decode(self) -> FakeDecode:
        """The first decode worker."""
        return self.decodes[0]

    async def register_all(self) -> None:
        """Makes all workers known and waits until every pair has a verdict."""
        for worker in [*self.prefills, *self.decodes]:
            await worker.register(self.grpc_endpoint)
        if self.prefills and self.decodes:
            await self.coordinator.wait_paired()


@contextlib.asynccontextmanager
async def fake_cluster(
    folder: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    register: bool = True,
    prepare: Callable[[FakeCluster], None] = lambda cluster: None,
    local_prefill_max_tokens: int = 0,
    crew: Crew | None = None,
    **api: Any,
) -> AsyncIterator[FakeCluster]:
    """Starts everything on free ports and ends it; `prepare` may change the fakes before they register."""
    config = Config(
        model="fake",
        api=ApiConfig(port=0, **api),
        local_prefill_max_tokens=local_prefill_max_tokens,
    )
    clock = ManualClock()  # fakes don't beat and must not expire
    coordinator = Coordinator(config, folder, clock=clock, crew=crew)
    http_port, endpoint = await coordinator.start()
    script = Script()
    cluster = FakeCluster(
        coordinator=coordinator,
        clock=clock,
        url=f"http://127.0.0.1:{http_port}",
        grpc_endpoint=endpoint,
        script=script,
        prefills=[FakePrefill(script, make_life(f"prefill-{index}")) for index in range(prefill)],
        decodes=[FakeDecode(script, make_life(f"decode-{index}")) for index in range(decode)],
    )
    workers = [*cluster.prefills, *cluster.decodes]
    try:
        for worker in workers:
            await worker.start()
        prepare(cluster)
        if register:
            await cluster.register_all()
        yield cluster
    finally:
        await coordinator.stop()
        for worker in workers:
            await worker.die()


def _committed() -> prefill_pb2.CommittedEvent:
    return prefill_pb2.CommittedEvent(
        payload_bytes=1000,
        exactness=EXACTNESSES.encode(Exactness.BIT_EXACT),
        handoff_s=0.01,
        exposed_s=0.001,
    )
