"""The table of measured choices: what replaces what, and how it is read."""

from dataclasses import replace
from pathlib import Path

import pytest

from halfbyte.bench.speed.tune_table import (
    TunedChoice,
    choose_fastest,
    merge_choices,
    read_table,
    write_table,
)
from halfbyte.errors import CheckpointError, UsageError

CHOICE = TunedChoice(
    gpu="NVIDIA H200",
    mode="fp8",
    weight="e2m1",
    out_dtype="bfloat16",
    m=1,
    n=3072,
    k=3840,
    rank=128,
    tokens=16,
    stages=4,
    cluster=1,
    splits=4,
    gemm_us=5.7,
    quantize_us=3.0,
    total_us=7.9,
    bf16_us=10.4,
    fastest="kernel",
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "table.jsonl"
    assert read_table(path) == []
    write_table(path, [CHOICE, replace(CHOICE, m=16)])
    assert read_table(path) == [CHOICE, replace(CHOICE, m=16)]
    assert [entry.name for entry in path.parent.iterdir()] == ["table.jsonl"]


def test_a_measured_line_replaces_the_one_about_the_same_product() -> None:
    other = replace(CHOICE, gpu="another GPU")
    again = replace(CHOICE, tokens=32, total_us=7.0)
    more = replace(CHOICE, m=200)
    assert merge_choices([CHOICE, other], [more, again]) == [again, more, other]


def test_never_slower_than_the_16_bit_product() -> None:
    assert choose_fastest(10.5, 10.4) == "bf16"
    assert choose_fastest(10.4, 10.4) == "kernel"


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    write_table(path, [CHOICE])
    path.write_text(path.read_text() + '{"gpu": "a"}\n')
    with pytest.raises(CheckpointError, match="line 2"):
        read_table(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="line 1"):
        read_table(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_table(tmp_path)
