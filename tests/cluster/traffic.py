"""Requests that run all the time against a cluster, each answer compared with transformers' tokens."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from tests.fakes import prompt_of
from tests.references import golden

DEADLINE_S = 90.0
DATA, DONE = b"data: ", b"[DONE]"


@dataclass(slots=True)
class Asked:
    """One completion that ignores end tokens. `started` is set by its first token."""

    prompt: tuple[int, ...]
    tokens: int
    streamed: bool
    started: threading.Event = field(default_factory=threading.Event)

    def of(self, url: str) -> tuple[int, ...]:
        """Token ids of a whole answer. Anything else, an error or an early end, fails the test."""
        body = {"model": "tiny-llama", "prompt": self.prompt, "max_tokens": self.tokens, "temperature": 0}
        body |= {"stream": self.streamed, "ignore_eos": True, "return_token_ids": True}
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200 or not self.streamed:
                text = answer.read().decode()
                assert answer.status == 200, text
                return _whole([json.loads(text)], self.tokens)
            return _whole(self._events(answer), self.tokens)

    def _events(self, answer: http.client.HTTPResponse) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for line in answer:
            if line.startswith(DATA):
                if line[len(DATA) :].strip() == DONE:
                    return events
                events.append(json.loads(line[len(DATA) :]))
                assert "error" not in events[-1], events[-1]
                self.started.set()
        raise AssertionError(f"the stream was cut after {len(events)} events")


def _whole(events: list[dict[str, Any]], tokens: int) -> tuple[int, ...]:
    choices = [choice for event in events for choice in event["choices"]]
    assert choices[-1]["finish_reason"] == "length", choices[-1:]
    found = tuple(token for choice in choices for token in choice["token_ids"])
    assert len(found) == tokens
    return found


@dataclass(slots=True)
class Traffic:
    """What was answered so far."""

    right: int = 0
    failures: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Fails the test where an answer was wrong, cut or an error."""
        assert self.failures == []


@contextlib.contextmanager
def traffic(url: str, model: Path, *, threads: int = 3) -> Iterator[Traffic]:
    """`threads` clients that ask one thing after the other, streams and whole answers by turns."""
    prompts = [prompt_of(length, seed=5) for length in (9, 24, 33, 70)]
    expected = {prompt: golden(model, prompt, 20).token_ids for prompt in prompts}
    told, stopping, lock = Traffic(), threading.Event(), threading.Lock()

    def ask(first: int) -> None:
        for number, prompt in enumerate(cycle(prompts[first:] + prompts[:first])):
            if stopping.is_set():
                return
            try:
                found = Asked(prompt, 20, streamed=(number + first) % 2 == 0).of(url)
                assert found == expected[prompt], f"other tokens than transformers': {found}"
            except (AssertionError, OSError, http.client.HTTPException, ValueError) as error:
                with lock:
                    told.failures.append(f"{type(error).__name__}: {error}")
            else:
                with lock:
                    told.right += 1

    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(ask, index) for index in range(threads)]
        try:
            yield told
        finally:
            stopping.set()
            wait(running)
    for each in running:
        each.result()
