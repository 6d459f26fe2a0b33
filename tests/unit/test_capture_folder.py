"""A capture folder shows whole files only, stays within its bounds, and belongs to its owner alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpact.handoff.capture_codec import Record, RecordKind, encode_capture
from kvpact.handoff.capture_file import capture_to_bytes, read_capture
from kvpact.handoff.capture_folder import CaptureBounds, CaptureFolder, OpenCapture
from tests.unit.test_capture_file import full_capture

WHOLE_BYTES = len(capture_to_bytes(full_capture()))
RECORDS = list(encode_capture(full_capture()))


def folder_at(path: Path, **bounds: int) -> CaptureFolder:
    folder = CaptureFolder(path, CaptureBounds(**bounds))
    folder.prepare()
    return folder


def write(folder: CaptureFolder, label: str, now_ms: int = 0) -> OpenCapture:
    """Everything but the end."""
    file = folder.create(label, now_ms)
    for record in RECORDS:
        file.add(record)
    return file


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def test_a_file_has_its_name_only_once_it_is_whole(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "decode-0")
    file = write(folder, "a" * 32, 1_700_000_000_123)
    assert names(folder.path) == [f".20231114T221320.123Z-{'a' * 32}.kvpact.part"]
    file.finish()
    assert names(folder.path) == [f"20231114T221320.123Z-{'a' * 32}.kvpact"]
    assert read_capture(next(folder.path.iterdir())) == full_capture()


def test_names_sort_by_time_even_if_the_clock_stands_still_or_goes_back(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "decode-0")
    for label, now_ms in (("c", 2000), ("b", 2000), ("a", 1000)):
        write(folder, label, now_ms).finish()
    assert [name.split("-")[1] for name in names(folder.path)] == ["c.kvpact", "b.kvpact", "a.kvpact"]


def test_what_a_crash_left_goes_at_the_next_start_and_whole_files_stay(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "decode-0")
    write(folder, "whole").finish()
    write(folder, "left")
    assert len(names(folder.path)) == 2
    folder_at(tmp_path / "decode-0")
    assert [name.split("-")[1] for name in names(folder.path)] == ["whole.kvpact"]


def test_nobody_else_can_read_them(tmp_path: Path) -> None:
    (tmp_path / "decode-0").mkdir(mode=0o755)
    folder = folder_at(tmp_path / "decode-0")
    write(folder, "a").finish()
    (file,) = folder.path.iterdir()
    assert (folder.path.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    made = folder_at(tmp_path / "new" / "decode-0")
    assert made.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "decode-0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is a link"):
        folder_at(tmp_path / "decode-0")


def test_the_oldest_files_go_before_a_byte_would_pass_the_bound(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "decode-0", max_bytes=3 * WHOLE_BYTES)
    for number in range(5):
        file = write(folder, str(number), number)
        assert sum(each.stat().st_size for each in folder.path.iterdir()) <= 3 * WHOLE_BYTES
        file.finish()
    assert [name.split("-")[1] for name in names(folder.path)] == ["2.kvpact", "3.kvpact", "4.kvpact"]
    assert folder.removed == 2


def test_the_oldest_files_go_when_there_are_too_many_those_of_an_earlier_life_too(tmp_path: Path) -> None:
    earlier = folder_at(tmp_path / "decode-0")
    for number in range(4):
        write(earlier, str(number), number).finish()
    folder = folder_at(tmp_path / "decode-0", max_files=3)
    assert len(names(folder.path)) == 3
    write(folder, "4", 10).finish()
    assert [name.split("-")[1] for name in names(folder.path)] == ["2.kvpact", "3.kvpact", "4.kvpact"]


def test_several_files_at_once_end_within_the_bound(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "decode-0", max_files=1)
    for file in [write(folder, str(number), number) for number in range(3)]:
        file.finish()
    assert len(names(folder.path)) == 1


def test_a_handoff_larger_than_the_bound_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "decode-0", max_bytes=2 * WHOLE_BYTES)
    write(folder, "kept", 1).finish()
    file = write(folder, "large", 2)
    with pytest.raises(OSError, match="take more than"):
        file.add(Record(RecordKind.PUSH_REQUEST, bytes(2 * WHOLE_BYTES)))
    file.abandon()
    assert names(folder.path) == []
    write(folder, "next", 3).finish()
    assert len(names(folder.path)) == 1


def test_a_folder_that_was_taken_away_is_made_again(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "decode-0")
    folder.path.rmdir()
    write(folder, "a").finish()
    assert len(names(folder.path)) == 1
