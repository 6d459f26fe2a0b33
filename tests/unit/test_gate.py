"""The rollout gate: what a cluster answers about a worker that isn't there yet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.api.admin import NOTHING, gate_answer, partners_of
from coordinator.ports import RegisteredWorker
from coordinator.registry import WorkerState
from kvpact.cli.coordinator_client import CoordinatorClient, read_key
from kvpact.cli.drain import requests_left
from kvpact.cli.gate import ask_gate, exit_code_of, lines_of, write_termination_message
from kvpact.clock import ManualClock
from kvpact.config import Config
from kvpact.contract.contract import Contract
from kvpact.contract.jsonform import contract_to_json
from kvpact.errors import BadRequest, KvpactError, Unavailable, UnreadableSource
from kvpact.types import KeyState, Role, VerdictWord
from tests.coordinator_fakes import FakeCluster, fake_cluster, make_life, make_load, make_text_folder
from tests.factories import make_contract

OURS = make_contract()
OTHER_FORM = make_contract(key_state=KeyState.RAW, block_size=8)
OTHER_TABLE = make_contract(theta=1e5)


def state(name: str, role: Role, contract: Contract) -> WorkerState:
    worker = RegisteredWorker(life=make_life(name), role=role, endpoint="h:1", contract=contract, pid=1)
    return WorkerState(worker=worker, load=make_load(), assigned=0, last_seen_s=0.0)


def words(
    role: Role, contract: Contract, *states: WorkerState, config: Config | None = None
) -> dict[str, VerdictWord]:
    return {name: found.word for name, found in partners_of(role, contract, states, config or Config())}


def test_only_workers_of_the_other_role_are_partners() -> None:
    there = (state("prefill-0", Role.PREFILL, OURS), state("decode-0", Role.DECODE, OURS))
    assert words(Role.DECODE, OURS, *there) == {"prefill-0": VerdictWord.ACCEPT}
    assert words(Role.PREFILL, OURS, *there) == {"decode-0": VerdictWord.ACCEPT}


def test_another_form_is_converted_and_another_table_refused() -> None:
    there = state("prefill-0", Role.PREFILL, OURS)
    assert words(Role.DECODE, OTHER_FORM, there) == {"prefill-0": VerdictWord.CONVERT}
    assert words(Role.DECODE, OTHER_TABLE, there) == {"prefill-0": VerdictWord.REJECT}


def test_the_gate_judges_by_the_policy_of_the_deployment() -> None:
    there = state("prefill-0", Role.PREFILL, OURS)
    strict = Config.model_validate({"handoff": {"on_convertible": "reject"}})
    assert words(Role.DECODE, OTHER_FORM, there, config=strict) == {"prefill-0": VerdictWord.REJECT}


def test_the_new_worker_is_writer_or_reader_by_its_role() -> None:
    ((_, verdict),) = partners_of(Role.PREFILL, OTHER_FORM, [state("d", Role.DECODE, OURS)], Config())
    block_size = next(each for each in verdict.differences if each.field == "block_size")
    assert (block_size.writer, block_size.reader) == ("8", "16")


def test_people_read_the_plan_and_accept_may_be_required() -> None:
    answer = gate_answer(
        partners_of(Role.DECODE, OTHER_FORM, [state("prefill-0", Role.PREFILL, OURS)], Config())
    )
    assert lines_of(answer) == ["prefill-0: convert (unrotate: rounding; reblock: bit_exact)"]
    assert (exit_code_of(answer), exit_code_of(answer, accept=True)) == (0, 10)
    both = [state("p0", Role.PREFILL, OURS), state("p1", Role.PREFILL, OTHER_FORM)]
    good = gate_answer(partners_of(Role.DECODE, OURS, both, Config()))
    assert lines_of(good)[0] == "p0: accept"
    assert exit_code_of(good, accept=True) == 0
    assert exit_code_of(gate_answer([]), accept=True) == 0


def test_one_partner_is_enough_and_none_at_all_is_nothing_to_compare_with() -> None:
    good, bad = state("p0", Role.PREFILL, OURS), state("p1", Role.PREFILL, OTHER_TABLE)

    def usable(*states: WorkerState) -> tuple[bool, str]:
        answer = gate_answer(partners_of(Role.DECODE, OURS, states, Config()))
        return answer["usable"], answer["note"]

    assert usable(good, bad) == (True, "")
    assert usable(bad) == (False, "")
    assert usable() == (True, NOTHING)


def test_people_read_what_refuses_and_what_to_do(tmp_path: Path) -> None:
    answer = gate_answer(
        partners_of(Role.DECODE, OTHER_TABLE, [state("prefill-0", Role.PREFILL, OURS)], Config())
    )
    lines = lines_of(answer)
    assert lines[0] == "prefill-0: reject"
    assert lines[1].startswith("  inv_freq: prefill ")
    assert len(lines) == 4
    assert exit_code_of(answer) == 20
    log = tmp_path / "termination-log"
    write_termination_message(log, lines)
    assert log.read_text().splitlines() == lines
    write_termination_message(log, ["ä" * 5000])
    assert len(log.read_bytes()) <= 4096


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with fake_cluster(make_text_folder(tmp_path)) as running:
        yield running


async def posted(url: str, body: Any, key: str | None = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers) as http:
        return await http.post("/admin/check", json=body)


async def test_a_cluster_answers_for_the_workers_that_it_has(cluster: FakeCluster) -> None:
    theirs = cluster.prefill.contract
    same = await posted(cluster.url, {"role": "decode", "contract": contract_to_json(theirs)})
    assert same.json()["usable"] is True
    assert [partner["verdict"] for partner in same.json()["partners"]] == ["accept"]
    model = replace(theirs.model, function_digest=b"o" * 32)
    other = contract_to_json(replace(theirs, model=model))
    refused = await posted(cluster.url, {"role": "decode", "contract": other})
    assert refused.json()["usable"] is False
    assert [each["field"] for each in refused.json()["partners"][0]["differences"]] == ["function_digest"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"role": "decode", "contract": {}}, "schema"),
        ({"role": "neither", "contract": {}}, "role"),
        ({"role": "decode"}, "contract"),
    ],
)
async def test_a_body_that_is_no_worker_is_refused(cluster: FakeCluster, body: Any, param: str) -> None:
    answer = await posted(cluster.url, body)
    assert answer.status_code == 400
    assert param in answer.text


async def test_with_admin_keys_only_they_open_admin_routes(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"api_keys": ("user",), "admin_keys": ("operator",)}
    async with fake_cluster(make_text_folder(tmp_path), **keys) as cluster:
        body = {"role": "decode", "contract": contract_to_json(cluster.prefill.contract)}
        statuses = [(await posted(cluster.url, body, key)).status_code for key in (None, "user", "operator")]
        assert statuses == [401, 401, 200]
        async with httpx.AsyncClient(base_url=cluster.url) as http:
            for path, key, status in (
                ("/admin/pairs", "user", 401),
                ("/admin/pairs", "operator", 200),
                ("/v1/models", "operator", 200),
                ("/v1/models", "user", 200),
                ("/v1/models", "stranger", 401),
            ):
                answer = await http.get(path, headers={"Authorization": f"Bearer {key}"})
                assert (path, key, answer.status_code) == (path, key, status)


async def test_a_client_that_a_proxy_here_names_is_not_on_this_machine(cluster: FakeCluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.url) as http:
        order = {"worker": cluster.decode.life.worker}
        for client, status in (("203.0.113.9", 403), ("127.0.0.1, 203.0.113.9", 403), ("127.0.0.1", 200)):
            answer = await http.post("/admin/drain", json=order, headers={"X-Forwarded-For": client})
            assert (client, answer.status_code) == (client, status)
        assert cluster.decode.drains == 1


async def test_a_site_whose_name_leads_here_is_not_on_this_machine(cluster: FakeCluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.url) as http:
        order = {"worker": cluster.decode.life.worker}
        strange = ("evil.example", "evil_x.example:80", "127.0.0.1.example", "[", "")
        for host in (*strange, "localhost:1", "[::1]:1"):
            status = 403 if host in strange else 200
            answer = await http.post("/admin/drain", json=order, headers={"Host": host})
            assert (host, answer.status_code) == (host, status)


async def test_drain_reaches_the_worker_that_is_named(cluster: FakeCluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.url) as http:
        name = cluster.decode.life.worker
        drained = await http.post("/admin/drain", json={"worker": name})
        assert (drained.status_code, drained.json()) == (
            200,
            {"workers": [{"worker": name, "running_requests": 0}]},
        )
        assert cluster.decode.drains == 1
        unknown = await http.post("/admin/drain", json={"worker": "nobody"})
        assert unknown.status_code == 400
        assert name in unknown.text


class Script:
    """A coordinator that answers by a script; the clock moves with each pause."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.clock = ManualClock()

    def ask(self, wait_s: float) -> dict[str, Any]:
        transport = httpx.MockTransport(self._answer)
        with CoordinatorClient("http://c", "key", transport=transport) as client:
            return ask_gate(
                client, Role.DECODE, OURS, wait_s=wait_s, now=self.clock.now, sleep=self.clock.advance
            )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer key"
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_coordinator_that_isn_t_there_yet_is_waited_for() -> None:
    away = httpx.ConnectError("refused")
    late = Script(
        away,
        httpx.Response(502, text="<html>"),
        httpx.Response(503, json={}),
        httpx.Response(200, json={"usable": True}),
    )
    with pytest.raises(Unavailable, match="no coordinator answers"):
        Script(away).ask(wait_s=3.0)
    assert late.ask(wait_s=10.0) == {"usable": True}


@pytest.mark.parametrize("url", ["http://h:x", "localhost:8000", "ftp://h", ""])
def test_what_is_no_url_is_told_at_once(url: str) -> None:
    with pytest.raises(BadRequest, match="expected a URL such as"):
        CoordinatorClient(url, None)


def test_what_isn_t_a_coordinator_is_told_with_the_flag_that_names_it() -> None:
    for foreign in (httpx.Response(404, json={"detail": "Not Found"}), httpx.Response(404, text="<html>")):
        transport = httpx.MockTransport(lambda _, answer=foreign: answer)
        client = CoordinatorClient("http://c", None, flag="--against-cluster", transport=transport)
        with client, pytest.raises(KvpactError, match="isn't a kvpact coordinator; see --against-cluster"):
            client.get("/ready")
    own = httpx.MockTransport(lambda _: httpx.Response(404, json={"error": {"message": "no such worker"}}))
    with CoordinatorClient("http://c", None, transport=own) as client, pytest.raises(BadRequest) as told:
        client.get("/ready")
    assert "no such worker" in str(told.value)
    assert "isn't" not in str(told.value)


def test_an_empty_key_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(" \n")
    with pytest.raises(UnreadableSource, match="is empty"):
        read_key(path)
    path.write_text("secret\n")
    assert read_key(path) == "secret"


def test_a_worker_that_doesn_t_answer_is_not_taken_for_idle() -> None:
    silent = {"worker": "a", "role": "decode", "endpoint": "h:1", "trouble": "no answer in time"}
    idle = {"worker": "b", "role": "decode", "running_requests": 0, "waiting_requests": 0}
    assert requests_left([silent, idle], {"a": 2, "b": 1, "gone": 3}) == {"a": 2, "b": 0, "gone": 0}


def test_a_wrong_admin_key_isn_t_tried_again() -> None:
    script = Script(httpx.Response(401, json={"error": {"message": "a valid admin key is needed"}}))
    with pytest.raises(BadRequest, match="--admin-key-file"):
        script.ask(wait_s=100.0)
    assert script.clock.now() == 0.0
