"""Every message of the corpus of hostile ones is still read or refused as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpact.handoff import codec
from tests.corpus.make import CONTRACT, FOLDER, STATUS, Case, cases, readme
from tests.hostile import READERS, outcome, read_status

CASES = cases()


def result(case: Case, data: bytes) -> str:
    """What reading it gives."""
    if case.message == STATUS:
        return type(read_status(data)).__name__
    if case.message == CONTRACT:
        return outcome(lambda found: codec.contract_from_bytes(found, schema_major=1), data)
    return outcome(READERS[case.message], data)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.path))
def test_a_message_gives_what_it_gave(case: Case) -> None:
    data = (FOLDER / case.path).read_bytes()
    assert data == case.data, "write the corpus anew: python -m tests.corpus.make"
    assert result(case, data) == case.expected


@pytest.mark.parametrize("name", READERS)
def test_no_message_of_the_corpus_harms_another_reader(name: str) -> None:
    for path in sorted(FOLDER.rglob("*.bin")):
        outcome(READERS[name], path.read_bytes())


def test_the_list_names_every_file_and_no_other() -> None:
    files = {path.relative_to(FOLDER) for path in FOLDER.rglob("*.bin")}
    assert files == {case.path for case in CASES}
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == readme(CASES)


def test_a_reader_that_fails_otherwise_is_noticed(tmp_path: Path) -> None:
    def careless(data: bytes) -> object:
        return data[10]

    with pytest.raises(IndexError):
        outcome(careless, b"")
    assert outcome(careless, b"x" * 11) == "read"
