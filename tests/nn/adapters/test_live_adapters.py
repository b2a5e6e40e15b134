"""Adapters are stacked, weighed, removed and merged; weights and states stay what they were."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.errors import CheckpointError, FormatError, UsageError
from halfbyte.formats.halfbyte_file import read_halfbyte_file
from halfbyte.nn import W4A4Linear, load_model, quantize_model, save_model
from halfbyte.nn.adapters import (
    add_adapter,
    list_adapters,
    merge_adapters,
    merge_into_records,
    read_adapter,
    remove_adapter,
    set_adapter_strength,
)
from halfbyte.nn.low_rank_stack import (
    LowRankDelta,
    bake_deltas,
    remove_delta,
    set_delta_strength,
    stack_delta,
)
from halfbyte.ops import blackwell
from halfbyte.virtual.driver.availability import find_absent_packages, find_missing_parts
from tests.nn.adapters.adapter_files import (
    TARGETS,
    Tower,
    lengthen,
    make_factors,
    make_layer,
    make_tower_factors,
    spell,
    write,
)
from tests.random_linears import LinearShape, make_input, make_linear
from tests.tolerance import assert_close_to_reference

MISSING = [*find_missing_parts(), *find_absent_packages()]
needs_virtual_gpu = pytest.mark.skipif(bool(MISSING), reason=f"needs {'; '.join(MISSING)}")
N, K = 48, 80


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "style.safetensors", spell("diffusers", make_tower_factors()))


def make_x() -> torch.Tensor:
    return make_input(6, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("own_rank", "ranks"),
    [(0, [16]), (0, [24]), (16, [0, 8]), (24, [96]), (32, [96]), (96, [32, 1]), (128, [128])],
)
def test_any_ranks_equal_the_unfused_layer(
    own_rank: int, ranks: list[int], dtype: torch.dtype
) -> None:
    record = make_linear(LinearShape(n=N, k=K, rank=own_rank, dtype=dtype))
    module, x = W4A4Linear.from_record(record), make_input(9, K, dtype)
    plain = module(x)
    deltas = []
    for index, rank in enumerate(ranks):
        one = make_factors(N, K, rank, seed=index)
        stack_delta(module, str(index), LowRankDelta(one.down.to(dtype), one.up.to(dtype)), 0.75)
        factor = torch.tensor(0.75)
        deltas.append((type(one)(one.down.to(dtype), one.up.to(dtype)), float(factor)))
    assert module.adapted_down is not None
    assert module.adapted_down.shape == (own_rank + sum(ranks), K)
    assert_close_to_reference(module(x), x, lengthen(record, *deltas))
    for index in range(len(ranks)):
        set_delta_strength(module, str(index), 0.0)
    assert torch.equal(module(x), plain)
    for index in range(len(ranks)):
        remove_delta(module, str(index))
    assert torch.equal(module(x), plain)
    assert module.adapted_up is None


def test_several_adapters_add_up_and_come_off_in_any_order(path: Path) -> None:
    model, plain, x = Tower(), Tower(), make_x()
    add_adapter(model, path, "a", strength=0.5)
    add_adapter(model, path, "b", strength=-2.0)
    add_adapter(model, path, "c", strength=1.0)
    assert set(list_adapters(model)) == {"a", "b", "c"}
    assert set(list_adapters(model)["a"]) == set(make_tower_factors())
    twice = Tower()
    add_adapter(twice, path, "d", strength=-0.5)
    torch.testing.assert_close(model(x), twice(x), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(model(x), plain(x), rtol=1e-2)
    assert remove_adapter(model, "b") == len(make_tower_factors())
    set_adapter_strength(twice, "d", 1.5)
    torch.testing.assert_close(model(x), twice(x), rtol=1e-3, atol=1e-3)
    remove_adapter(model, "a")
    remove_adapter(model, "c")
    assert torch.equal(model(x), plain(x))
    assert list_adapters(model) == {}
    linear = model.get_submodule("transformer_blocks.0.txt_mod.1")
    assert not linear._forward_hooks
    assert not list(linear.buffers())


def test_a_strength_change_writes_no_weight(path: Path) -> None:
    model, x = Tower(), make_x()
    add_adapter(model, path, "a")
    before = {name: (t._version, t.data_ptr()) for name, t in model.state_dict().items()}
    linear = model.get_submodule("transformer_blocks.0.attn.to_q")
    assert isinstance(linear, W4A4Linear)
    stacked = linear.adapted_up
    first = model(x)
    with torch.inference_mode():
        set_adapter_strength(model, "a", 0.25)
    assert linear.adapted_up is stacked
    assert not torch.equal(model(x), first)
    set_adapter_strength(model, "a", 1.0)
    assert torch.equal(model(x), first)
    after = {name: (t._version, t.data_ptr()) for name, t in model.state_dict().items()}
    extra = {name for name in before if name.endswith("_extra_state")}  # made anew on every call
    assert {k: v for k, v in after.items() if k not in extra} == {
        k: v for k, v in before.items() if k not in extra
    }


def test_states_and_files_are_those_without_adapters(path: Path, tmp_path: Path) -> None:
    model, plain, x = Tower(), Tower(), make_x()
    add_adapter(model, path, "a")
    adapted = model(x)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[name], part) for name, part in plain.state_dict().items())
    save_model(model, tmp_path / "with.safetensors")
    save_model(plain, tmp_path / "plain.safetensors")
    files = [(tmp_path / f"{name}.safetensors").read_bytes() for name in ("with", "plain")]
    assert files[0] == files[1]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), adapted)
        set_adapter_strength(twin, "a", 0.0)
        assert torch.equal(twin(x), plain(x))
        assert torch.equal(model(x), adapted)
    other = Tower(seed=3)
    model.load_state_dict(other.state_dict())
    add_adapter(other, path, "a")
    assert torch.equal(model(x), other(x))
    for assign in (True, False):
        model.load_state_dict(plain.state_dict(), assign=assign)
        assert torch.equal(model(x), adapted)


def test_merged_adapters_are_part_of_record_and_file(path: Path, tmp_path: Path) -> None:
    model, x = Tower(), make_x()
    add_adapter(model, path, "a", strength=0.5)
    add_adapter(model, path, "b", strength=0.0)
    name = "transformer_blocks.1.attn.to_q"
    live = model.get_submodule(name)(x)
    weight = model.get_submodule(name).weight_data
    all_live = model(x)
    assert merge_adapters(model) == len(make_tower_factors())
    assert list_adapters(model) == {}
    merged = model.get_submodule(name)
    assert isinstance(merged, W4A4Linear)
    assert torch.equal(merged(x), live)
    assert merged.weight_data is weight
    assert (merged.rank, merged.to_record().rank) == (20, 20)  # strength 0 adds no rank
    torch.testing.assert_close(model(x), all_live, rtol=1e-4, atol=1e-4)
    save_model(model, tmp_path / "merged.safetensors")
    again = load_model(Tower(), tmp_path / "merged.safetensors")
    assert torch.equal(again(x), model(x))
    # The same from records alone, without a model.
    records = {
        place: m.to_record() for place, m in Tower().named_modules() if isinstance(m, W4A4Linear)
    }
    baked = merge_into_records(records, read_adapter(path, ignore=["*txt_mod*"]), strength=0.5)
    file = read_halfbyte_file(tmp_path / "merged.safetensors")
    for place, record in baked.items():
        assert record.weight is records[place].weight
        assert record.lora_up is not None
        assert torch.equal(record.lora_up, file.linears[place].lora_up)  # type: ignore[arg-type]


def test_some_of_several_are_merged(path: Path) -> None:
    model, x = Tower(), make_x()
    add_adapter(model, path, "a")
    add_adapter(model, path, "b", strength=0.5)
    both = model(x)
    merge_adapters(model, ["b"])
    assert set(list_adapters(model)) == {"a"}
    torch.testing.assert_close(model(x), both, rtol=1e-4, atol=1e-4)


def test_a_tied_weight_is_not_merged(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(32, 64), "head": nn.Linear(64, 32, bias=False)})
    model["head"].weight = model["embed"].weight
    file = write(tmp_path / "t.safetensors", spell("diffusers", {"head": make_factors(32, 64)}))
    add_adapter(model, file)
    with pytest.raises(UsageError, match="shared with 'embed'"):
        merge_adapters(model)
    assert list_adapters(model) == {"t": ["head"]}


def test_misuse_changes_nothing(path: Path) -> None:
    model, x = Tower(), make_x()
    add_adapter(model, path, "a")
    first = model(x)
    with pytest.raises(UsageError, match="'a' is on the model already"):
        add_adapter(model, path, "a")
    for call in (remove_adapter, merge_one, set_to_one):
        with pytest.raises(UsageError, match="'b' is not on the model; on it: 'a'"):
            call(model, "b")
    wrong: Any
    for wrong in (float("nan"), float("inf"), "1", True, None):
        with pytest.raises(UsageError, match="wanted a finite number"):
            set_adapter_strength(model, "a", wrong)
        with pytest.raises(UsageError, match="wanted a finite number"):
            add_adapter(model, path, "c", strength=wrong)
    with pytest.raises(UsageError, match="wanted a text"):
        add_adapter(model, path, "")
    assert set(list_adapters(model)) == {"a"}
    assert torch.equal(model(x), first)


def merge_one(model: nn.Module, name: str) -> int:
    return merge_adapters(model, [name])


def set_to_one(model: nn.Module, name: str) -> int:
    return set_adapter_strength(model, name, 1.0)


def test_numbers_that_float16_cannot_hold_are_refused_and_small_ones_kept() -> None:
    module = W4A4Linear.from_record(make_linear(LinearShape(n=N, k=K, dtype=torch.float16)))
    one = make_factors(N, K)
    tiny = LowRankDelta(one.down * 64, one.up * 1e-7)  # 1e-7 alone is almost nothing in float16
    stack_delta(module, "tiny", tiny)
    x = make_input(9, K, torch.float16)
    record = lengthen(module.to_record(), (type(one)(tiny.down, tiny.up), 1.0))
    assert module.adapted_up is not None
    assert module.adapted_down is not None
    product = module.adapted_up.double() @ module.adapted_down.double()
    wanted = record.lora_up.double() @ record.lora_down.double()  # type: ignore[union-attr]
    own = module.lora_up.double() @ module.lora_down.double()  # type: ignore[operator]
    assert (product - wanted).norm() < 1e-3 * (wanted - own).norm()
    assert module(x).isfinite().all()
    with pytest.raises(FormatError, match=r"does not fit torch\.float16"):
        stack_delta(module, "huge", LowRankDelta(one.down * 1e6, one.up * 1e6))
    with pytest.raises(FormatError, match=r"does not fit torch\.float16"):
        set_delta_strength(module, "tiny", 1e12)
    with pytest.raises(FormatError, match="delta of"):
        stack_delta(module, "wide", LowRankDelta(one.up.T, one.up))


def test_casts_reach_the_stack(path: Path) -> None:
    model, x = Tower(), make_x()
    add_adapter(model, path, "a")
    model.to(torch.bfloat16)
    layer = model.get_submodule("transformer_blocks.0.attn.to_q")
    assert isinstance(layer, W4A4Linear)
    assert layer.adapted_down is not None
    assert layer.adapted_down.dtype == torch.bfloat16
    set_adapter_strength(model, "a", 0.5)
    assert model(x.bfloat16()).dtype == torch.bfloat16


def test_torch_compile_follows_live_changes(path: Path) -> None:
    model, x = Tower(), make_x()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for change in (
            lambda: None,
            lambda: add_adapter(model, path, "a"),
            lambda: set_adapter_strength(model, "a", 0.25),
            lambda: add_adapter(model, path, "b"),
            lambda: remove_adapter(model, "a"),
            lambda: merge_adapters(model),
        ):
            change()
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


@needs_virtual_gpu
def test_blackwell_places_the_low_rank_branch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_layer(40, 96, rank=20).to(torch.bfloat16)
    module.backend = "virtual-b200"
    x = make_input(33, 96, torch.bfloat16)
    module(x)
    record = module.to_record()

    def refuse(*_: Any) -> None:
        raise AssertionError("the weight was packed again")

    monkeypatch.setattr(blackwell, "place_linear", refuse)
    one = make_factors(40, 96, rank=12)
    one = type(one)(one.down.bfloat16(), one.up.bfloat16())
    stack_delta(module, "a", LowRankDelta(one.down, one.up))
    for strength in (1.0, 0.5):
        set_delta_strength(module, "a", strength)
        assert_close_to_reference(module(x), x, lengthen(record, (one, strength)))
    bake_deltas(module)
    assert_close_to_reference(module(x), x, module.to_record())


def test_targets_of_the_tower_are_all_kinds() -> None:
    kinds = {type(Tower().get_submodule(f"transformer_blocks.0.{name}")) for name in TARGETS}
    assert kinds == {W4A4Linear, nn.Linear}


def test_an_adapter_of_other_layers_leaves_the_model_alone(tmp_path: Path) -> None:
    factors = make_tower_factors() | {"no.such": make_factors(8, 8)}
    model, plain, x = Tower(), Tower(), make_x()
    with pytest.raises(CheckpointError, match=r"no\.such"):
        add_adapter(model, write(tmp_path / "x.safetensors", spell("diffusers", factors)))
    assert torch.equal(model(x), plain(x))


def test_a_module_with_adapters_is_not_replaced(path: Path, tmp_path: Path) -> None:
    model, file = Tower(), tmp_path / "plain.safetensors"
    save_model(model, file)
    add_adapter(model, path, "a")
    with pytest.raises(UsageError, match=r"has adapters \(a\); merge or remove"):
        load_model(model, file)
    with pytest.raises(UsageError, match=r"has adapters \(a\); merge or remove"):
        quantize_model(model, "nvfp4_plain", progress=False)
    remove_adapter(model, "a")
    load_model(model, file)
