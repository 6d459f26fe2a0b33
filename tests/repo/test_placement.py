"""Ray, gRPC, generated messages and torch are named only in the files that are there for them."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.repo.tree import imported_modules, package_files, within


class Placement(NamedTuple):
    """Modules that may be imported only in files whose path fits one of the patterns."""

    why: str
    modules: tuple[str, ...]
    files: tuple[str, ...]


PLACEMENTS = {
    "ray": Placement(
        why="worker logic runs without Ray: workers alone, in tests, on Kubernetes",
        modules=("ray",),
        files=("*/actor.py", "*/supervisor.py", "*/__main__.py", "kvpact/cli/*"),
    ),
    "grpc": Placement(
        why="everything else runs in process, under the same suite",
        modules=("grpc", "grpc_status", "grpc_health"),
        files=("*_transport.py", "*/service.py", "kvpact/handoff/status.py"),
    ),
    "messages": Placement(
        why="the rest speaks in frozen dataclasses; absent and unset are refused in one place",
        modules=("kvpact.v1", "google"),
        files=("*codec.py", "*codec_fields.py", "*_transport.py", "*/service.py", "kvpact/handoff/status.py"),
    ),
    # Modules that carry torch count as torch, so that whoever imports them is found as well.
    "torch": Placement(
        why="other engines and the coordinator compare contracts without torch",
        modules=(
            "torch",
            "transformers",
            "accelerate",
            "kvpact.contract.rotation",
            "kvpact.contract.convert",
            "kvpact.contract.convert_blocks",
            "kvpact.contract.convert_fast",
            "kvpact.contract.convert_numbers",
            "kvpact.contract.convert_shards",
            "kvpact.contract.witness",
            "kvpact.kvcache.paged_cache",
            "kvpact.engine",
        ),
        files=(
            "kvpact/contract/rotation.py",
            "kvpact/contract/convert*.py",
            "kvpact/contract/witness.py",
            "kvpact/kvcache/paged_cache.py",
            "kvpact/engine/*",
            "kvpact/serving/description.py",
            "kvpact/serving/engine_factory.py",
            "kvpact/cli/*",
            "prefill_worker/*",
            "decode_worker/*",
        ),
    ),
}


def misplaced(placement: Placement, file: Path) -> list[str]:
    """One complaint for each import that has no place in the file."""
    if any(fnmatch(str(file), pattern) for pattern in placement.files):
        return []
    return [
        f"{file}:{line} imports {name}; {placement.why}"
        for name, line in imported_modules(file)
        if any(within(name, module) for module in placement.modules)
    ]


@pytest.mark.parametrize("rule", PLACEMENTS)
def test_a_dependency_is_imported_only_where_it_belongs(rule: str) -> None:
    assert [complaint for file in package_files() for complaint in misplaced(PLACEMENTS[rule], file)] == []


@pytest.mark.parametrize("rule", PLACEMENTS)
def test_each_rule_finds_an_import_when_no_file_is_allowed(rule: str) -> None:
    nowhere = PLACEMENTS[rule]._replace(files=())
    assert [complaint for file in package_files() for complaint in misplaced(nowhere, file)]
