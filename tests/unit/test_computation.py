"""A computation that is left gives its blocks back, whenever whoever leaves it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpact.engine.engine import Engine
from prefill_worker.computation import Computation
from tests.fakes import load_engine, make_request, make_tiny_model, prompt_of
from tests.handoff_fakes import make_handoff_id


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = load_engine(make_tiny_model(tmp_path))
    engine.start()
    yield engine
    engine.close()


@pytest.mark.parametrize("cancelled", [True, False])
async def test_leaving_gives_the_held_blocks_back_even_when_it_is_cancelled(
    engine: Engine, cancelled: bool
) -> None:
    request = make_request(prompt_of(40), stop_after_first=True, hold_blocks=True)

    async def compute() -> None:
        task = asyncio.current_task()
        assert task is not None
        async with Computation(engine, make_handoff_id(), request) as computation:
            await computation.first_token()
            assert engine.pool.held() == {"sequence": 3}
            if cancelled:
                asyncio.get_running_loop().call_soon(task.cancel)

    computing = asyncio.create_task(compute())
    (outcome,) = await asyncio.gather(computing, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError) is cancelled
    assert engine.pool.held() == {}
