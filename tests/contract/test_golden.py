"""Every recorded handoff, replayed through a real receiver, ends as the corpus's table says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvpact.contract.contract import Contract
from kvpact.contract.convert import TORCH_DTYPES
from kvpact.contract.jsonform import contract_from_json
from kvpact.errors import ContractRefused, DataLoss
from kvpact.handoff.capture import Capture, Reserved
from kvpact.handoff.capture_file import read_capture
from kvpact.handoff.messages import PairAnswer
from kvpact.types import Dtype, KeyState
from tests.contract.golden.cases import CASES, Case
from tests.contract.golden.make import FOLDER, TABLE_FILE, case_bytes, reader_file, table_bytes, truth_bytes
from tests.contract.golden.model import KV_HEADS, QUERY_HEADS, SCALE
from tests.contract.golden.reader import READER, GoldenReader, RowLanding, WorkerLanding, golden_reader
from tests.handoff_fakes import stream
from tests.reference_cache import attend, pair_norms, turned_THD

torch.set_num_threads(1)
Kind = type[RowLanding] | type[WorkerLanding]
FILE_CAP, CORPUS_CAP = 100_000, 1_500_000
TABLE = json.loads((FOLDER / TABLE_FILE).read_text(encoding="utf-8"))
TRUTH = load_file(FOLDER / TABLE["truth"])
ENTRIES = [pytest.param(entry, id=entry["file"].removesuffix(".kvpact")) for entry in TABLE["cases"]]
ATTENTION_TOLERANCE = {Dtype.FLOAT32: 1e-5, Dtype.BFLOAT16: 0.05}
SAME_NUMBERS = "other_weights.kvpact"
"""Its bytes are the right ones under another model's name, so that the name alone decides."""


def entries(*landings: str) -> list[Any]:
    return [param for param in ENTRIES if param.values[0]["landing"] in landings]


def reader_of(entry: dict[str, Any]) -> Contract:
    return contract_from_json(json.loads((FOLDER / entry["reader"]).read_text(encoding="utf-8")))


def reserved_of(capture: Capture) -> Reserved:
    assert capture.reserved is not None
    return capture.reserved


def nonce_of(capture: Capture) -> bytes:
    reservation = reserved_of(capture).reservation
    assert reservation is not None
    return reservation.nonce


async def push(reader: GoldenReader, capture: Capture) -> PairAnswer:
    """Pairs, reserves as recorded and pushes every part."""
    answer = await reader.receiver.pair(capture.offer)
    asked = reserved_of(capture)
    assert await reader.receiver.reserve(asked.terms, asked.max_output_tokens) == asked.reservation
    await reader.receiver.push(stream(capture.parts))
    return answer


def gap_to_truth(reader: GoldenReader, capture: Capture, contract: Contract) -> float:
    """Largest difference of landed keys and values to what the reader's own prefill stores."""
    narrow, worst = TORCH_DTYPES[capture.writer_contract().layout.key_dtype], 0.0
    keys, values = reader.landing.keys, reader.landing.values
    assert keys, "something landed"
    for (layer, token), key_HD in keys.items():
        raw = contract.group_of(layer).rotary.key_state is KeyState.RAW
        own_HD = TRUTH[f"{layer}.{'raw' if raw else 'rotated'}_key"][token]
        own_HD = own_HD if raw else own_HD * contract.group_of(layer).rotary.tables[0].amplitude
        landed = (key_HD, own_HD), (values[layer, token], TRUTH[f"{layer}.value"][token])
        worst = max(
            worst, *(float((found.float() - own.to(narrow).float()).abs().max()) for found, own in landed)
        )
    return worst


def tolerance_of(contract: Contract, exactness: str) -> float:
    """0 for bit_exact; else nine epsilons of the largest pair of lanes, for a turn or a table's rounding."""
    if exactness == "bit_exact":
        return 0.0
    rotary = contract.layer_groups[0].rotary
    return float(max(pair_norms(TRUTH[f"{layer}.raw_key"], rotary).max() for layer in (0, 1))) * 9 * 2.0**-23


def next_attention(reader: GoldenReader, contract: Contract, layer: int, tokens: int) -> torch.Tensor:
    """Attention of the token behind the prompt over landed rows and its own, [Q, D]."""
    group = contract.group_of(layer)
    seen = [token for token in range(tokens) if group.window is None or tokens - token < group.window]
    landed_keys, landed_values = reader.landing.keys, reader.landing.values
    keys = torch.stack([landed_keys[layer, token] for token in seen]).float()
    values = torch.stack([landed_values[layer, token] for token in seen]).float()
    if group.rotary.key_state is KeyState.RAW:
        keys = turned_THD(keys, group.rotary, seen)
    own_key = turned_THD(TRUTH[f"{layer}.raw_key"][tokens][None], group.rotary, [tokens])
    keys = torch.cat((keys.double(), own_key)).repeat_interleave(QUERY_HEADS // KV_HEADS, dim=1)
    values = torch.cat((values, TRUTH[f"{layer}.value"][tokens][None]))
    values = values.repeat_interleave(QUERY_HEADS // KV_HEADS, dim=1)
    query = turned_THD(TRUTH[f"{layer}.raw_query"][tokens][None], group.rotary, [tokens])[0]
    return attend(query, keys, values, SCALE)


@pytest.mark.parametrize("entry", ENTRIES)
async def test_the_verdict_is_the_table_s(entry: dict[str, Any]) -> None:
    capture, contract = read_capture(FOLDER / entry["file"]), reader_of(entry)
    async with golden_reader(contract, nonce_of(capture)) as reader:
        verdict = (await reader.receiver.pair(capture.offer)).verdict
    assert verdict.word.value == entry["verdict"]
    assert {each.field: each.action.value for each in verdict.differences} == entry["differences"]
    assert [step.op.value for step in verdict.plan] == entry["plan"]
    if entry["verdict"] != "reject":
        assert verdict.exactness.value == entry["exactness"]


@pytest.mark.parametrize("kind", [RowLanding, WorkerLanding])
@pytest.mark.parametrize("entry", entries("equal"))
async def test_a_good_handoff_lands_what_the_reader_would_have_made(
    entry: dict[str, Any], kind: Kind
) -> None:
    capture, contract = read_capture(FOLDER / entry["file"]), reader_of(entry)
    async with golden_reader(contract, nonce_of(capture), kind) as reader:
        await push(reader, capture)
        assert capture.receipt is not None
        assert capture.receipt.exactness.value == entry["exactness"]
        tokens = entry["prompt_tokens"]
        assert gap_to_truth(reader, capture, contract) <= tolerance_of(contract, entry["exactness"])
        terms = reserved_of(capture).terms
        commit = capture.commit()
        assert commit is not None
        order = (*terms.token_ids, commit.first_token_id)
        taken = reader.receiver.take(terms.handoff_id, READER, order)
        assert (taken.token_ids, taken.next_position) == (terms.token_ids, tokens)
    narrow = capture.writer_contract().layout.key_dtype
    for layer in range(contract.layer_count()):
        window = contract.group_of(layer).window
        name = f"{layer}.attention" + ("" if window is None else f".window{window}")
        found = next_attention(reader, contract, layer, tokens)
        torch.testing.assert_close(
            found, TRUTH[name][tokens].double(), atol=ATTENTION_TOLERANCE[narrow], rtol=0
        )


@pytest.mark.parametrize("entry", entries("refused"))
async def test_a_refused_contract_gets_no_room(entry: dict[str, Any]) -> None:
    capture = read_capture(FOLDER / entry["file"])
    async with golden_reader(reader_of(entry), nonce_of(capture)) as reader:
        with pytest.raises(ContractRefused) as refused:
            await push(reader, capture)
        assert reader.landing.keys == {}
    rejecting = {field for field, action in entry["differences"].items() if action == "reject"}
    assert set(refused.value.metadata()["fields"].split(",")) == rejecting


@pytest.mark.parametrize("kind", [RowLanding, WorkerLanding])
@pytest.mark.parametrize("entry", entries("caught"))
async def test_a_lie_fails_its_witnesses_and_is_never_taken(entry: dict[str, Any], kind: Kind) -> None:
    capture, contract = read_capture(FOLDER / entry["file"]), reader_of(entry)
    async with golden_reader(contract, nonce_of(capture), kind) as reader:
        with pytest.raises(DataLoss) as caught:
            await push(reader, capture)
        assert caught.value.check == entry["check"] == "witness"
        assert reader.receiver.held() == 0
        assert reader.receiver.counters().committed == 0
        assert gap_to_truth(reader, capture, contract) > 0.01, "the bytes are wrong, so the catch is right"
    assert isinstance(capture.error, DataLoss)
    assert capture.receipt is None


@pytest.mark.parametrize(
    "entry", [param for param in entries("refused") if param.values[0]["file"] != SAME_NUMBERS]
)
async def test_a_refused_cache_would_have_been_wrong(entry: dict[str, Any]) -> None:
    capture, contract = read_capture(FOLDER / entry["file"]), reader_of(entry)
    async with golden_reader(contract, nonce_of(capture)) as reader:
        handle = reader.landing.prepare(contract, capture.answer.verdict, reserved_of(capture).terms, ())
        for chunk in capture.chunks():
            handle.land(chunk.header, chunk.keys, chunk.values)
        assert gap_to_truth(reader, capture, contract) > 0.01


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[7]], ids=lambda case: case.name)
def test_the_same_code_makes_the_same_bytes(case: Case) -> None:
    assert case_bytes(case) == (FOLDER / f"{case.name}.kvpact").read_bytes()


def test_the_table_and_the_truth_are_what_the_code_makes() -> None:
    assert (FOLDER / TABLE_FILE).read_bytes() == table_bytes()
    assert (FOLDER / TABLE["truth"]).read_bytes() == truth_bytes()


def test_no_file_of_the_folder_is_left_out_of_the_table() -> None:
    assert {path.name for path in FOLDER.glob("*.kvpact")} == {entry["file"] for entry in TABLE["cases"]}
    listed = {reader_file(case.reader) for case in CASES}
    assert {f"readers/{path.name}" for path in (FOLDER / "readers").iterdir()} == listed


def test_the_corpus_stays_small_enough_to_commit() -> None:
    sizes = [path.stat().st_size for path in FOLDER.rglob("*") if path.suffix in (".kvpact", ".json")]
    assert max(sizes) < FILE_CAP
    assert sum(sizes) < CORPUS_CAP
