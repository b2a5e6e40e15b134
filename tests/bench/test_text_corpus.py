import hashlib
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.bench.text_corpus import (
    describe_protocol,
    hash_tokens,
    make_evaluation_windows,
    make_windows,
    read_topics_text,
    split_tokens,
)
from halfbyte.errors import FormatError


def test_protocol_slices_are_disjoint_and_cover_the_text() -> None:
    slices = split_tokens(torch.arange(3000))
    assert slices.calibration.tolist() == list(range(512))
    assert slices.evaluation.tolist() == list(range(512, 2560))
    assert slices.spare.tolist() == list(range(2560, 3000))


def test_protocol_windows_predict_each_evaluated_token_once_from_the_token_before() -> None:
    windows = make_evaluation_windows(split_tokens(torch.arange(3000)))
    assert [len(window.targets) for window in windows] == [512] * 4
    assert torch.cat([window.targets for window in windows]).tolist() == list(range(512, 2560))
    for window in windows:  # token ids are positions here
        assert torch.equal(window.inputs + 1, window.targets)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 40), st.integers(1, 13))
def test_windows_partition_the_targets_for_any_length(before: int, count: int, length: int) -> None:
    text = torch.arange(before + count)
    windows = make_windows(text[:before], text[before:], length)
    targets = [int(token) for window in windows for token in window.targets]
    assert targets == text[before:].tolist()
    assert all(torch.equal(window.inputs + 1, window.targets) for window in windows)
    assert all(1 <= len(window.targets) <= length for window in windows)


def test_hash_is_that_of_little_endian_int32() -> None:
    tokens = torch.tensor([1, 49151, 0])
    expected = hashlib.sha256(struct.pack("<3i", 1, 49151, 0)).hexdigest()
    assert hash_tokens(tokens) == expected
    # sha256 of 01000000 ffbf0000 00000000, the same on every machine
    assert expected.startswith(
        hashlib.sha256(bytes.fromhex("01000000ffbf000000000000")).hexdigest()
    )


def test_hashes_differ_between_slices_and_are_shown() -> None:
    slices = split_tokens(torch.arange(3000))
    digests = slices.sha256
    assert list(digests) == ["calibration", "evaluation", "spare"]
    assert len(set(digests.values())) == 3
    lines = "\n".join(describe_protocol(slices))
    assert all(digest in lines for digest in digests.values())
    assert "tokens 0-511 calibrate, 512-2559 are evaluated in windows of 512" in lines


def test_text_too_short_or_empty_slices_are_errors() -> None:
    with pytest.raises(FormatError, match=r"\(2559,\).*>= 2560"):
        split_tokens(torch.arange(2559))
    with pytest.raises(FormatError, match="num_evaluation=0"):
        split_tokens(torch.arange(2559), num_evaluation=0)
    with pytest.raises(FormatError, match="at least 1"):
        make_windows(torch.arange(0), torch.arange(4))


def test_topics_are_joined_in_key_order_by_blank_lines() -> None:
    from pydoc_data.topics import topics

    first, second = sorted(topics)[:2]
    text = read_topics_text()
    assert text.startswith(topics[first] + "\n\n" + topics[second])
    assert text.endswith(topics[max(topics)])
