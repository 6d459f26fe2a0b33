"""Clusters under mutual TLS: prompts are served, certificates renewed meanwhile, and strangers refused."""

from __future__ import annotations

import json
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpact.cli.worker_source import describe_worker
from kvpact.errors import UnreadableSource
from tests.cluster.clusters import UpCluster, up
from tests.cluster.test_standalone import process
from tests.cluster.waiting import eventually
from tests.fakes import prompt_of
from tests.references import golden
from tests.tls_files import make_certificates

pytestmark = pytest.mark.timeout(180)


def complete(url: str, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Token ids of a completion that ignores end tokens."""
    body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": tokens} | {
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        (choice,) = json.load(answer)["choices"]
    return tuple(choice["token_ids"])


def test_up_serves_under_mutual_tls_before_and_after_new_certificates(
    tiny_llama: Path, tmp_path: Path
) -> None:
    folder = make_certificates(tmp_path / "certs")
    settings = tmp_path / "kvpact.yaml"
    settings.write_text(f"tls: {{directory: {folder}}}\n")
    log = tmp_path / "up.log"
    with up(tiny_llama, "--config", str(settings), log=log) as cluster:
        prompt = prompt_of(33)
        assert complete(cluster.url, prompt, 9) == golden(tiny_llama, prompt, 9).token_ids
        workers = cluster.first_line["workers"]
        for worker, endpoint in workers.items():
            with pytest.raises(UnreadableSource, match="only callers with a certificate"):
                describe_worker(endpoint)
            assert describe_worker(endpoint, folder).life.worker == worker
        make_certificates(folder)
        prompt = prompt_of(20)
        assert complete(cluster.url, prompt, 9) == golden(tiny_llama, prompt, 9).token_ids
        assert cluster.get("/ready")["ready"]
        stranger = make_certificates(tmp_path / "stranger")
        with pytest.raises(UnreadableSource, match="was it made by another CA"):
            describe_worker(workers["decode-0"], stranger)
    assert "Traceback" not in log.read_text()


def test_up_with_certificates_that_do_not_fit_says_which_before_it_starts(
    tiny_llama: Path, tmp_path: Path
) -> None:
    folder = make_certificates(tmp_path / "certs")
    (folder / "decode.key").write_bytes((folder / "prefill.key").read_bytes())
    settings = tmp_path / "kvpact.yaml"
    settings.write_text(f"tls: {{directory: {folder}}}\n")
    with (
        pytest.raises(AssertionError, match=r"decode\.key can't be used"),
        up(tiny_llama, "--config", str(settings), log=tmp_path / "up.log"),
    ):
        pass


def test_processes_with_the_files_of_their_own_role_serve_a_completion(
    tiny_llama: Path, tmp_path: Path
) -> None:
    folder = make_certificates(tmp_path / "certs")

    def settings(role: str) -> tuple[str, ...]:
        """One role's files, in a folder of their own, as a mounted secret names them."""
        secret = tmp_path / role
        secret.mkdir()
        for name, source in (("tls.crt", f"{role}.crt"), ("tls.key", f"{role}.key"), ("ca.crt", "ca.crt")):
            (secret / name).write_bytes((folder / source).read_bytes())
        file = tmp_path / f"{role}.json"
        paths = {"cert": f"{secret}/tls.crt", "key": f"{secret}/tls.key", "ca": f"{secret}/ca.crt"}
        file.write_text(json.dumps({"model": str(tiny_llama), "tls": {role: paths}}))
        return ("--config", str(file))

    with ExitStack() as stack:
        coordinator = process("coordinator", *settings("coordinator"), "--port", "0", says="http://")
        line, pid = stack.enter_context(coordinator)
        url, endpoint = line.split(" workers ")
        for role in ("prefill", "decode"):
            flags = (*settings(role), "--coordinator", endpoint)
            stack.enter_context(process(f"{role}_worker", *flags, says="serving "))
        cluster = UpCluster(url=url, pid=pid, first_line={})
        eventually(lambda: cluster.get("/ready")["ready"])
        prompt = prompt_of(20)
        assert complete(url, prompt, 9) == golden(tiny_llama, prompt, 9).token_ids
