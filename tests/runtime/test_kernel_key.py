"""A key changes with everything that decides what is compiled, and with nothing else."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from halfbyte.errors import UsageError
from halfbyte.runtime import kernel_key
from halfbyte.runtime.kernel_key import Toolchain, make_cache_key, make_source_key
from tests.runtime.scaled_sum import ScaledSumConfig, make_source

TOOLS = Toolchain("4.8.1", ("nvidia-cutlass-dsl 4.8.1",), "0.1.15")


def test_equal_sources_have_equal_keys() -> None:
    assert make_source_key(make_source()) == make_source_key(make_source())


def test_name_config_and_target_change_the_key() -> None:
    source = make_source()
    changed = [
        replace(source, name="other"),
        make_source(ScaledSumConfig(2.0)),
        replace(source, target="sm_103a"),
        replace(source, modules=source.modules[:1]),
    ]
    keys = [make_source_key(one) for one in (source, *changed)]
    assert len(set(keys)) == len(keys)


def test_source_text_changes_the_key_and_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "some_device_code.py"
    module.write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    source = replace(make_source(), modules=("some_device_code",))
    before = make_source_key(source)
    assert "some_device_code" not in sys.modules
    module.write_text("raise AssertionError('imported')  # and changed\n")
    assert make_source_key(source) != before


@pytest.mark.parametrize("name", ["halfbyte.no_such_module", "no_such_package.module", "sys"])
def test_a_module_without_text_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        make_source_key(replace(make_source(), modules=(name,)))


def test_tools_and_their_settings_change_the_cache_key() -> None:
    others = [
        replace(TOOLS, cute_dsl="4.8.2"),
        replace(TOOLS, wheels=("nvidia-cutlass-dsl-libs-cu13 4.8.1",)),
        replace(TOOLS, tvm_ffi="0.1.16"),
        replace(TOOLS, settings=(("CUTE_DSL_LINEINFO", "1"),)),
    ]
    keys = [make_cache_key("source", tools) for tools in (TOOLS, *others)]
    keys.append(make_cache_key("another source", TOOLS))
    assert len(set(keys)) == len(keys)


def test_the_format_of_entries_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = make_source_key(make_source())
    monkeypatch.setattr(kernel_key, "FORMAT_VERSION", kernel_key.FORMAT_VERSION + 1)
    assert make_source_key(make_source()) != before


def test_settings_that_only_print_or_place_files_do_not_count() -> None:
    harmless = {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_LOG_LEVEL": "9", "CUTE_DSL_DUMP_DIR": "/x"}
    assert kernel_key._list_settings({**harmless, "PATH": "/bin"}) == ()
    assert kernel_key._list_settings({"CUTE_DSL_LINEINFO": "1"}) == (("CUTE_DSL_LINEINFO", "1"),)
