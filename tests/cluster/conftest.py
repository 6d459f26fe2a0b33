"""Tiny models and clusters that several tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.clusters import UpCluster, up
from tests.fakes import make_tiny_model

MIXED = (
    "--prefill-cache",
    "key_state=raw,axis_order=HND,block_size=24",
    "--decode-cache",
    "key_state=rotated,axis_order=NHD,block_size=16",
)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 2 layers with a byte-level tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def mixed_cluster(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpCluster]:
    """A cluster whose sides keep their caches differently in every way that converts."""
    with up(tiny_llama, *MIXED, log=tmp_path_factory.mktemp("logs") / "mixed.log") as cluster:
        yield cluster
