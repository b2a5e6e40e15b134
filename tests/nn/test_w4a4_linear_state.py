"""W4A4Linear's state: byte-equal round trips, casts that cannot reach bytes, refused formats."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.nn.w4a4_linear import W4A4Linear
from halfbyte.ops import PART_NAMES, list_parts, make_spec
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_input, make_linear, pair_id

EXACT = (
    "weight_data",
    "weight_scales",
    "weight_global_scale",
    "activation_global_scale",
    "channel_scale",
)


def bytes_of(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), raw


def state_bytes(module: nn.Module) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {name: bytes_of(tensor) for name, tensor in module.state_dict().items()}


def record_bytes(record: QuantizedLinear) -> list[tuple[torch.dtype, tuple[int, ...], bytes]]:
    return [bytes_of(part) for part in list_parts(record)]


def make_module(pair: tuple[str, str | None] = FORMAT_PAIRS[0], seed: int = 0) -> W4A4Linear:
    return W4A4Linear(make_linear(LinearShape(n=20, k=100), pair, seed))


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_record_round_trips_byte_equal(pair: tuple[str, str | None]) -> None:
    record = make_linear(LinearShape(n=20, k=100, dtype=torch.bfloat16), pair)
    back = W4A4Linear.from_record(record).to_record()
    assert record_bytes(back) == record_bytes(record)
    assert make_spec(back) == make_spec(record)
    assert back.weight.scales.dtype == record.weight.scales.dtype


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_state_dict_round_trips_byte_equal(pair: tuple[str, str | None], assign: bool) -> None:
    source, target = make_module(pair), make_module(pair, seed=7)
    assert state_bytes(source) != state_bytes(target)
    result = target.load_state_dict(source.state_dict(), strict=True, assign=assign)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert state_bytes(target) == state_bytes(source)
    x = make_input(3, 100)
    assert torch.equal(target(x), source(x))


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_torch_save_with_weights_only_round_trips(pair: tuple[str, str | None]) -> None:
    source = make_module(pair)
    buffer = io.BytesIO()
    torch.save(nn.Sequential(source).state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert state_bytes(W4A4Linear.from_state_dict(state, prefix="0.")) == state_bytes(source)


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_safetensors_round_trips(pair: tuple[str, str | None], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = make_module(pair)
    path = tmp_path / "state.safetensors"
    save_file(source.state_dict(), path)
    assert state_bytes(W4A4Linear.from_state_dict(load_file(path))) == state_bytes(source)


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_pickle_and_deepcopy_round_trip(pair: tuple[str, str | None]) -> None:
    source = make_module(pair)
    x = make_input(3, 100)
    for twin in (pickle.loads(pickle.dumps(source)), copy.deepcopy(source)):
        assert state_bytes(twin) == state_bytes(source)
        assert torch.equal(twin(x), source(x))


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
@pytest.mark.parametrize("cast", ["half", "bfloat16", "to", "parent"])
def test_a_dtype_cast_reaches_no_byte_of_the_weight(
    pair: tuple[str, str | None], cast: str
) -> None:
    module = make_module(pair)
    before = state_bytes(module)
    dtype = torch.float16 if cast == "half" else torch.bfloat16
    if cast == "to":
        module.to(dtype)
    elif cast == "parent":
        nn.Sequential(nn.ModuleList([module])).bfloat16()
    else:
        getattr(module, cast)()
    after = state_bytes(module)
    for name in EXACT:
        assert after.get(name) == before.get(name), name
    for name in ("smooth", "lora_down", "lora_up", "bias"):
        assert after[name][0] == dtype
    assert module(make_input(3, 100, dtype)).dtype == dtype
    module.float()
    assert module.to_record().rank == 16


def test_casting_down_and_up_leaves_results_of_a_bare_layer_unchanged() -> None:
    module = W4A4Linear(make_linear(LinearShape(n=20, k=100, rank=0, parts=False)))
    x = make_input(3, 100)
    before = module(x)
    assert torch.equal(module.half().float()(x), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_a_cast_to_an_unusable_dtype_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(FormatError, match=f"cannot be cast to {dtype}"):
        make_module().to(dtype)


def test_module_type_would_turn_bytes_into_numbers_and_is_refused() -> None:
    with pytest.raises(FormatError, match=r"cannot be cast to torch\.float16: its bytes"):
        make_module().type(torch.float16)


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_module_moves_to_meta_and_back_to_memory(pair: tuple[str, str | None]) -> None:
    source = make_module(pair)
    target = make_module(pair).to("meta")
    assert {buffer.device.type for buffer in target.buffers()} == {"meta"}
    target.to_empty(device="cpu").load_state_dict(source.state_dict())
    assert state_bytes(target) == state_bytes(source)
    meta = make_module(pair).to("meta")
    meta.load_state_dict(source.state_dict(), assign=True)
    assert state_bytes(meta) == state_bytes(source)


def test_state_of_another_format_is_refused_naming_both() -> None:
    int4, nvfp4 = make_module(("int4", "int4")), make_module(("nvfp4", "nvfp4_nunchaku"))
    before = state_bytes(nvfp4)
    for strict in (True, False):
        with pytest.raises(FormatError, match=r"int4/int4/100.*nvfp4/nvfp4_nunchaku/100"):
            nvfp4.load_state_dict(int4.state_dict(), strict=strict)
        with pytest.raises(FormatError, match=r"nvfp4/nvfp4_nunchaku/100.*int4/int4/100"):
            int4.load_state_dict(nvfp4.state_dict(), strict=strict)
    assert state_bytes(nvfp4) == before


def test_same_bytes_under_another_activation_rule_are_refused() -> None:
    weight_only, w4a4 = make_module(("nvfp4", None)), make_module(("nvfp4", "nvfp4_dynamic"))
    with pytest.raises(FormatError, match=r"nvfp4/none/100.*nvfp4/nvfp4_dynamic/100"):
        w4a4.load_state_dict(weight_only.state_dict())


def test_another_width_inside_the_same_padding_is_refused() -> None:
    wide = W4A4Linear(make_linear(LinearShape(20, 48, rank=0, parts=False)))
    narrow = W4A4Linear(make_linear(LinearShape(20, 40, rank=0, parts=False)))
    assert wide.weight_data.shape == narrow.weight_data.shape
    with pytest.raises(FormatError, match=r"/48, this W4A4Linear is .*/40"):
        narrow.load_state_dict(wide.state_dict())


def test_bytes_without_a_format_are_refused() -> None:
    module = make_module()
    state = module.state_dict()
    del state["_extra_state"]
    for strict in (True, False):
        with pytest.raises(FormatError, match="without _extra_state"):
            module.load_state_dict(state, strict=strict)


def test_strict_loading_names_missing_and_unexpected_keys() -> None:
    model = nn.Sequential(make_module())
    state = model.state_dict()
    del state["0.smooth"]
    state["0.wtscale"] = torch.ones(())
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*0\.smooth.*Unexpected.*0\.wtscale"):
        model.load_state_dict(state)
    result = model.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["0.smooth"], ["0.wtscale"])


def test_state_of_a_float_linear_names_its_keys() -> None:
    with pytest.raises(RuntimeError, match=r'(?s)weight_data.*Unexpected.*"weight"'):
        make_module().load_state_dict(nn.Linear(100, 20).state_dict())


def test_a_state_with_parts_the_module_lacks_is_an_error() -> None:
    bare = W4A4Linear(make_linear(LinearShape(n=20, k=100, rank=0, parts=False)))
    with pytest.raises(RuntimeError, match=r"(?s)Unexpected.*lora_down"):
        bare.load_state_dict(make_module().state_dict())


def test_wrong_shape_names_the_key() -> None:
    small = W4A4Linear(make_linear(LinearShape(n=19, k=100)))
    with pytest.raises(RuntimeError, match="size mismatch for weight_data"):
        small.load_state_dict(make_module().state_dict())


def test_scales_of_another_dtype_are_refused_not_converted() -> None:
    model = nn.Sequential(make_module())
    state = model.state_dict()
    before = state_bytes(model)
    state["0.weight_scales"] = state["0.weight_scales"].view(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match=r"0\.weight_scales: dtype torch\.float8_e4m3fn"):
        model.load_state_dict(state)
    state = model.state_dict()
    state["0.bias"] = state["0.bias"].double()
    with pytest.raises(RuntimeError, match=r"0\.bias: dtype torch\.float64"):
        model.load_state_dict(state, assign=True)
    assert state_bytes(model) == before


def test_from_state_dict_names_missing_and_unknown_keys() -> None:
    state = dict(make_module().state_dict())
    with pytest.raises(CheckpointError, match=r"missing keys \['layer\._extra_state'"):
        W4A4Linear.from_state_dict(state, prefix="layer.")
    with pytest.raises(CheckpointError, match=r"unknown keys \['wtscale'\]"):
        W4A4Linear.from_state_dict({**state, "wtscale": torch.ones(())})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("nvfp4", "wanted a 1-D uint8 tensor"),
        (torch.zeros(3), "wanted a 1-D uint8 tensor"),
        (torch.tensor(list(b"other/2 nvfp4"), dtype=torch.uint8), "says 'other/2 nvfp4'"),
        (torch.tensor([0xFF], dtype=torch.uint8), "wanted 'halfbyte.W4A4Linear/1"),
    ],
)
def test_damaged_extra_state_is_named(extra: object, message: str) -> None:
    state = {**make_module().state_dict(), "_extra_state": extra}
    with pytest.raises(CheckpointError, match=message):
        W4A4Linear.from_state_dict(state)
    with pytest.raises(CheckpointError, match=message):
        make_module().load_state_dict(state)


def test_from_state_dict_checks_shapes_against_the_format() -> None:
    state = dict(make_module().state_dict())
    state["weight_data"] = state["weight_data"][:, :-1]
    with pytest.raises(FormatError, match=r"nvfp4 data: shape \(20, 55\), wanted \(20, 56\)"):
        W4A4Linear.from_state_dict(state)


def test_state_holds_tensors_alone_under_the_names_of_the_parts() -> None:
    state = make_module(("nvfp4", "nvfp4_static")).state_dict()
    assert set(state) == {*PART_NAMES, "_extra_state"}
    assert all(isinstance(value, torch.Tensor) for value in state.values())


@pytest.mark.parametrize(
    ("part", "value"),
    [("weight_global_scale", -1.0), ("weight_global_scale", float("nan")), ("smooth", -2.0)],
)
def test_a_state_with_values_that_no_quantizer_writes_is_refused(part: str, value: float) -> None:
    module = make_module()
    state = module.state_dict()
    state[part] = torch.full_like(state[part], value)
    with pytest.raises(RuntimeError, match=part):
        make_module(seed=3).load_state_dict(state)
    with pytest.raises(CheckpointError, match=part):
        W4A4Linear.from_state_dict(state)


def test_a_state_with_a_nan_block_scale_is_refused() -> None:
    state = make_module().state_dict()
    state["weight_scales"] = torch.full_like(state["weight_scales"], 0x7F)  # E4M3 NaN
    with pytest.raises(RuntimeError, match="scale"):
        make_module(seed=3).load_state_dict(state)
