"""halfbyte.load: every tensor of a file finds its place in a model, or an error names it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import halfbyte
from halfbyte.checkpoints.convert import ConvertRequest, convert_checkpoint
from halfbyte.checkpoints.family import is_same_tensor
from halfbyte.checkpoints.key_map import KeyMap
from halfbyte.errors import CheckpointError, FormatError, UsageError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.halfbyte_file import write_halfbyte_file
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.nn import W4A4Linear, save_model
from tests.random_linears import LinearShape, make_input, make_linear

WIDTH = 128
BF16 = torch.bfloat16
NUNCHAKU = ("nvfp4", "nvfp4_nunchaku")


class Attention(nn.Module):
    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        if is_fused:
            self.qkv_proj = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "qkv_proj"):
            q, k, v = self.qkv_proj(x).chunk(3, -1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        y: torch.Tensor = q * k.sigmoid() + v
        return y


class Net(nn.Module):
    """A tied embedding and head, one block with fused or separate q, k, v and gate, up."""

    def __init__(self, is_fused: bool = False, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.attn = Attention(is_fused)
        self.head = nn.Linear(WIDTH, 30, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.attn(self.norm(self.embed(tokens))))
        return y


TOKENS = torch.arange(30)


def make_net(seed: int = 0, is_fused: bool = False, is_tied: bool = True) -> Net:
    torch.manual_seed(seed)
    return Net(is_fused, is_tied).eval()


def make_records() -> dict[str, QuantizedLinear]:
    """Return q, k, v: x is seen alike, global scales, ranks and biases differ."""
    first = make_linear(LinearShape(WIDTH, WIDTH), NUNCHAKU)
    records = {}
    for index, name in enumerate("qkv"):
        linear = make_linear(LinearShape(WIDTH, WIDTH, 16 + 8 * index), NUNCHAKU, seed=index)
        scale = torch.tensor(0.01 * (1 + index))
        weight = replace(linear.weight, global_scale=scale)
        records[f"attn.{name}_proj"] = replace(linear, weight=weight, smooth=first.smooth)
    return records


def write_net(path: Path, net: Net | None = None, prefix: str = "") -> Path:
    """Write the net's file with its q, k, v quantized, and return it."""
    net = make_net(7) if net is None else net
    state = {
        prefix + name: value.clone()
        for name, value in net.state_dict().items()
        if not name.startswith("attn.") and name != "head.weight"
    }
    records = {prefix + name: record for name, record in make_records().items()}
    write_halfbyte_file(path, records, state, None)
    return path


def copy_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    assert model.state_dict().keys() == state.keys()
    for name, value in model.state_dict().items():
        assert is_same_tensor(value, state[name]), name


def test_every_tensor_of_the_file_is_in_the_model(tmp_path: Path) -> None:
    origin = make_net(7)
    net = halfbyte.load(write_net(tmp_path / "net.safetensors", origin), make_net())
    for name, record in make_records().items():
        linear = net.get_submodule(name)
        assert isinstance(linear, W4A4Linear)
        assert torch.equal(linear.weight_data, record.weight.data)
        assert linear.bias is not None
        assert torch.equal(linear.bias, record.bias)
    assert torch.equal(net.embed.weight, origin.embed.weight)
    assert net.head.weight is net.embed.weight
    assert not net.training
    assert not net.attn.q_proj.training


def test_loading_twice_changes_nothing(tmp_path: Path) -> None:
    path = write_net(tmp_path / "net.safetensors")
    net = halfbyte.load(path, make_net())
    before, logits = copy_state(net), net(TOKENS)
    halfbyte.load(path, net)
    assert_same_state(net, before)
    assert torch.equal(net(TOKENS), logits)


def test_a_model_on_meta_takes_no_memory_until_it_is_loaded(tmp_path: Path) -> None:
    path = write_net(tmp_path / "net.safetensors")
    with torch.device("meta"):
        empty = Net()
    net = halfbyte.load(path, empty.eval())
    assert not any(value.is_meta for value in (*net.parameters(), *net.buffers()))
    assert net.head.weight is net.embed.weight
    assert torch.equal(net(TOKENS), halfbyte.load(path, make_net())(TOKENS))


def test_a_model_that_is_not_tied_takes_the_file_of_a_tied_one(tmp_path: Path) -> None:
    quantized = halfbyte.load(write_net(tmp_path / "net.safetensors"), make_net())
    save_model(quantized, tmp_path / "tied.safetensors")
    net = halfbyte.load(tmp_path / "tied.safetensors", make_net(is_tied=False))
    assert net.head.weight is not net.embed.weight
    assert torch.equal(net(TOKENS), quantized(TOKENS))


def test_a_tied_model_refuses_two_different_tensors(tmp_path: Path) -> None:
    path = write_net(tmp_path / "net.safetensors")
    loose = halfbyte.load(path, make_net(is_tied=True))
    loose.head.weight = nn.Parameter(loose.embed.weight * 2)
    save_model(loose, tmp_path / "loose.safetensors")
    with pytest.raises(CheckpointError, match=r"'embed\.weight' and 'head\.weight' are one tensor"):
        halfbyte.load(tmp_path / "loose.safetensors", make_net())


@pytest.mark.parametrize("is_fused", [True, False], ids=["to fused", "to separate"])
def test_fused_and_separate_linears_hold_the_same_layer(tmp_path: Path, is_fused: bool) -> None:
    path = write_net(tmp_path / "separate.safetensors")
    separate = halfbyte.load(path, make_net())
    fused = halfbyte.load(path, make_net(is_fused=True))
    if not is_fused:  # and back again: the file of the fused model
        save_model(fused, tmp_path / "fused.safetensors")
        fused = halfbyte.load(tmp_path / "fused.safetensors", make_net())
        for name in ("q", "k", "v"):
            parts = [net.get_submodule(f"attn.{name}_proj") for net in (separate, fused)]
            assert parts[0].rank == parts[1].rank
            assert torch.equal(parts[0].weight_data, parts[1].weight_data)
    wanted, got = separate(TOKENS).double(), fused(TOKENS).double()
    assert (got - wanted).norm() <= 1e-6 * wanted.norm()  # float32, in another order of factors


def test_unquantized_linears_are_fused_and_split_too(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self, is_fused: bool) -> None:
            super().__init__()
            self.down = nn.Linear(WIDTH, WIDTH)
            if is_fused:
                self.gate_up_proj = nn.Linear(8, 12)
            else:
                self.gate_proj, self.up_proj = nn.Linear(8, 6), nn.Linear(8, 6)

    records = {"down": make_linear(LinearShape(WIDTH, WIDTH), NUNCHAKU)}
    separate = Pair(False)
    state = {n: t for n, t in separate.state_dict().items() if not n.startswith("down")}
    write_halfbyte_file(tmp_path / "separate.safetensors", records, state, None)
    fused = halfbyte.load(tmp_path / "separate.safetensors", Pair(True))
    wanted = torch.cat([separate.gate_proj.weight, separate.up_proj.weight])
    assert torch.equal(fused.gate_up_proj.weight, wanted)
    save_model(fused, tmp_path / "fused.safetensors")
    again = halfbyte.load(tmp_path / "fused.safetensors", Pair(False))
    assert torch.equal(again.up_proj.weight, separate.up_proj.weight)
    assert torch.equal(again.up_proj.bias, separate.up_proj.bias)


def test_a_fused_linear_wants_all_its_parts(tmp_path: Path) -> None:
    records = make_records()
    del records["attn.k_proj"]
    state = {n: t for n, t in make_net().state_dict().items() if not n.startswith("attn.")}
    del state["head.weight"]
    write_halfbyte_file(tmp_path / "net.safetensors", records, state, None)
    with pytest.raises(CheckpointError, match=r"no k_proj"):
        halfbyte.load(tmp_path / "net.safetensors", make_net(is_fused=True))


def test_parts_with_other_smoothing_are_not_fused(tmp_path: Path) -> None:
    records = make_records()
    smooth = records["attn.k_proj"].smooth
    assert smooth is not None
    records["attn.k_proj"] = replace(records["attn.k_proj"], smooth=smooth * 2)
    state = {n: t for n, t in make_net().state_dict().items() if not n.startswith("attn.")}
    del state["head.weight"]
    write_halfbyte_file(tmp_path / "net.safetensors", records, state, None)
    net = make_net(is_fused=True)
    before = copy_state(net)
    with pytest.raises(CheckpointError, match=r"attn\.qkv_proj.*smooth is up to"):
        halfbyte.load(tmp_path / "net.safetensors", net)
    assert_same_state(net, before)


def test_a_key_map_tells_names_that_differ(tmp_path: Path) -> None:
    path = write_net(tmp_path / "net.safetensors", prefix="model.diffusion.")
    with pytest.raises(CheckpointError, match=r"3 quantized layer\(s\) have no place"):
        halfbyte.load(path, make_net())
    net = halfbyte.load(path, make_net(), key_map={"model.diffusion": ""})
    plain = halfbyte.load(write_net(tmp_path / "plain.safetensors"), make_net())
    assert_same_state(net, copy_state(plain))


def test_a_key_map_tells_other_fused_names(tmp_path: Path) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(WIDTH, 2 * WIDTH)

    records = make_records()
    pair = {"first": records["attn.q_proj"], "second": records["attn.k_proj"]}
    write_halfbyte_file(tmp_path / "pair.safetensors", pair, {}, None)
    names = KeyMap(fused={"projection": ("second", "first")})
    model = halfbyte.load(tmp_path / "pair.safetensors", Other(), key_map=names)
    data = model.projection.weight_data
    assert isinstance(data, torch.Tensor)
    assert torch.equal(data[:WIDTH], pair["second"].weight.data)


def change_state(change: Callable[[dict[str, torch.Tensor]], object], path: Path) -> Path:
    """Write the net's file with its other tensors changed."""
    state = {n: t for n, t in make_net(7).state_dict().items() if not n.startswith("attn.")}
    del state["head.weight"]
    change(state)
    write_halfbyte_file(path, make_records(), state, None)
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("norm.running_var"), r"nothing.*fills 1 tensor.*running_var"),
        (lambda state: state.update(extra=torch.ones(2)), r"of the file have no place: 'extra'"),
        (
            lambda state: state.update({"embed.weight": torch.ones(31, WIDTH)}),
            r"'embed\.weight' is \[31, 128\] in the file",
        ),
        (
            lambda state: state.update({"embed.weight": torch.ones(30, WIDTH).to(torch.int8)}),
            r"'embed\.weight' is I8 in the file",
        ),
        (
            lambda state: state.update({"norm.num_batches_tracked": torch.tensor(1.0)}),
            r"num_batches_tracked' is F32 in the file.*int64",
        ),
    ],
    ids=["missing", "left over", "shape", "dtype", "float for integer"],
)
def test_what_does_not_fit_is_named_and_the_model_untouched(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    path = change_state(change, tmp_path / "net.safetensors")
    net = make_net()
    before = copy_state(net)
    with pytest.raises(CheckpointError, match=words):
        halfbyte.load(path, net)
    assert_same_state(net, before)


def test_a_tensor_that_is_not_wanted_is_said_so(tmp_path: Path) -> None:
    path = change_state(lambda s: s.update(extra=torch.ones(2)), tmp_path / "net.safetensors")
    halfbyte.load(path, make_net(), key_map={"extra": None})


@pytest.mark.parametrize(
    ("replacement", "words"),
    [
        (nn.Linear(WIDTH, 64), r"128 -> 128 in the file.*128 -> 64 in the model"),
        (nn.Identity(), r"is a Identity, wanted torch\.nn\.Linear"),
    ],
)
def test_a_layer_that_is_no_such_linear_is_refused(
    tmp_path: Path, replacement: nn.Module, words: str
) -> None:
    net = make_net()
    net.attn.q_proj = replacement
    with pytest.raises(CheckpointError, match=words):
        halfbyte.load(write_net(tmp_path / "net.safetensors"), net)


def test_a_bias_that_the_file_does_not_have_is_missed(tmp_path: Path) -> None:
    record = replace(make_linear(LinearShape(WIDTH, WIDTH), NUNCHAKU), bias=None)
    write_halfbyte_file(tmp_path / "one.safetensors", {"0": record}, {}, None)
    with pytest.raises(CheckpointError, match="'0' of the model has a bias, the file has none"):
        halfbyte.load(tmp_path / "one.safetensors", nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    halfbyte.load(tmp_path / "one.safetensors", nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)))


@pytest.mark.parametrize(
    ("held", "given"), [(NUNCHAKU, ("int4", "int4")), (("int4", "int4"), NUNCHAKU)]
)
def test_fp4_and_int4_are_never_taken_for_each_other(
    tmp_path: Path, held: tuple[str, str], given: tuple[str, str]
) -> None:
    shape = LinearShape(WIDTH, WIDTH)
    write_halfbyte_file(tmp_path / "one.safetensors", {"0": make_linear(shape, given)}, {}, None)
    model = nn.Sequential(W4A4Linear(make_linear(shape, held)))
    both = rf"{'/'.join(given)}/128 in the file.*{'/'.join(held)}/128 in the model"
    with pytest.raises(CheckpointError, match=both):
        halfbyte.load(tmp_path / "one.safetensors", model)


def test_a_file_of_one_family_is_not_read_as_another(tmp_path: Path) -> None:
    path = write_net(tmp_path / "net.safetensors")
    with pytest.raises(CheckpointError, match="has no layer of family nunchaku"):
        halfbyte.load(path, make_net(), family="nunchaku")
    with pytest.raises(UsageError, match="family 'nunchuck' is unknown"):
        halfbyte.load(path, make_net(), family="nunchuck")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_are_converted_once_at_load(tmp_path: Path, dtype: torch.dtype) -> None:
    """float16 x with bfloat16 scales, low-rank factors and smooth, and a float32 bias."""
    record = make_linear(LinearShape(WIDTH, WIDTH, dtype=BF16), ("int4", "int4"))
    assert record.bias is not None
    weight = replace(record.weight, scales=record.weight.scales.bfloat16())
    record = replace(record, weight=weight, bias=record.bias.float())
    write_halfbyte_file(tmp_path / "one.safetensors", {"0": record}, {}, None)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    halfbyte.load(tmp_path / "one.safetensors", model, dtype=dtype)
    linear = model[0]
    assert isinstance(linear, W4A4Linear)
    parts = (linear.smooth, linear.lora_down, linear.lora_up, linear.bias)
    assert {part.dtype for part in parts if part is not None} == {dtype}
    assert linear.weight_scales.dtype == BF16  # what encodes the weight stays
    y = linear(make_input(5, WIDTH, dtype))
    assert y.dtype == dtype
    assert torch.isfinite(y).all()


def test_the_models_dtype_is_kept_and_a_given_one_reaches_all_parameters(tmp_path: Path) -> None:
    path = write_net(tmp_path / "net.safetensors")
    half = halfbyte.load(path, make_net().half())
    assert half.embed.weight.dtype == half.attn.q_proj.bias.dtype == torch.float16
    net = halfbyte.load(path, make_net(), dtype=BF16)
    assert {p.dtype for p in net.parameters()} == {BF16}
    assert net.norm.running_mean is not None
    assert net.norm.running_mean.dtype == torch.float32  # a buffer keeps its dtype
    assert net.head.weight is net.embed.weight


def test_a_value_that_does_not_fit_the_dtype_is_named(tmp_path: Path) -> None:
    record = make_linear(LinearShape(WIDTH, WIDTH), NUNCHAKU)
    assert record.bias is not None
    record = replace(record, bias=record.bias * 1e6)
    write_halfbyte_file(tmp_path / "one.safetensors", {"0": record}, {}, None)
    with pytest.raises(CheckpointError, match=r"'0': bias: torch\.float32 up to .* torch\.float16"):
        halfbyte.load(
            tmp_path / "one.safetensors",
            nn.Sequential(nn.Linear(WIDTH, WIDTH)),
            dtype=torch.float16,
        )
    path = change_state(lambda s: s["embed.weight"].mul_(1e6), tmp_path / "net.safetensors")
    with pytest.raises(CheckpointError, match=r"'embed\.weight'.*does not fit torch\.float16"):
        halfbyte.load(path, make_net(), dtype=torch.float16)
    with pytest.raises(FormatError, match="dtype"):
        halfbyte.load(path, make_net(), dtype=torch.int8)


def test_device_maps_are_honoured_or_refused_by_name(tmp_path: Path) -> None:
    path = write_net(tmp_path / "net.safetensors")
    with torch.device("meta"):
        empty = Net()
    everything = {"embed": "cpu", "norm": torch.device("cpu"), "attn": "cpu", "head": "cpu"}
    net = halfbyte.load(path, empty.eval(), device_map=everything)
    assert torch.equal(net(TOKENS), halfbyte.load(path, make_net(), device_map="cpu")(TOKENS))
    for device_map, words in (
        ({"": "cpu", "norm": "disk"}, r"device map 'norm': 'disk' means weights outside of memory"),
        ({"": torch.device("meta")}, "outside of memory"),
        ({"embed": "cpu"}, r"says nothing of \d+ tensors, of which the first are norm\.weight"),
        ({"": "cpu", "layers.0": 0}, r"the model has no 'layers\.0'"),
        ({"": "gpu"}, "'gpu' is no device of this machine"),
        ("auto", "'auto' is no device of this machine"),
        ({"": True}, "wanted an index"),
    ):
        with pytest.raises(UsageError, match=words):
            halfbyte.load(path, make_net(), device_map=device_map)


def test_buffers_that_a_model_builds_itself_must_have_values(tmp_path: Path) -> None:
    class Rotary(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.ones(4), persistent=False)

    path = write_net(tmp_path / "net.safetensors")
    halfbyte.load(path, Rotary())
    with torch.device("meta"):
        empty = Rotary()
    with pytest.raises(CheckpointError, match=r"buffer\(s\) 'angles' of the model are on the meta"):
        halfbyte.load(path, empty)


def test_a_linear_with_a_hook_of_accelerate_is_refused(tmp_path: Path) -> None:
    net = make_net()
    net.attn.q_proj._hf_hook = object()  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match="load first, then call accelerate"):
        halfbyte.load(write_net(tmp_path / "net.safetensors"), net)


def make_power_of_two_layer() -> QuantizedLinear:
    """Return a layer whose smoothing is exact and whose floats are bfloat16: nothing is rounded."""
    linear = make_linear(LinearShape(WIDTH, WIDTH, 16, dtype=BF16), NUNCHAKU)
    weight = replace(linear.weight, global_scale=torch.tensor(0.0371).bfloat16().float())
    draw = torch.Generator().manual_seed(3)
    smooth = torch.exp2(torch.randint(-2, 3, (WIDTH,), generator=draw).float()).bfloat16()
    return replace(linear, weight=weight, channel_scale=None, smooth=smooth)


def write_as(folder: Path, record: QuantizedLinear, family: str) -> Path:
    folder.mkdir()
    source = folder / "source.safetensors"
    write_halfbyte_file(source, {"mlp.up_proj": record}, {"mlp.norm": torch.ones(3)}, None)
    convert_checkpoint(ConvertRequest(source, folder / "made", family))
    return folder / "made"


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.norm = nn.Parameter(torch.zeros(3))
        self.mlp.up_proj = nn.Linear(WIDTH, WIDTH)


def run_loaded(path: Path, x: torch.Tensor, *, quantizes_x: bool = True) -> torch.Tensor:
    model = halfbyte.load(path, Mlp())
    linear = model.get_submodule("mlp.up_proj")
    assert isinstance(linear, W4A4Linear)
    record = linear.to_record()
    if not quantizes_x:  # ModelOpt's x has a calibrated scale, nunchaku's none
        record = replace(record, activation=None, activation_global_scale=None)
    y: torch.Tensor = W4A4Linear(record)(x)
    return y


OLD_KEYS = {"proj_down": "lora_down", "proj_up": "lora_up", "smooth_factor": "smooth"}


def write_old_keys(path: Path, folder: Path) -> Path:
    """Write a nunchaku file with the keys of its older releases."""
    folder.mkdir()
    [file] = path.glob("*.safetensors") if path.is_dir() else [path]
    tensors = {}
    for name, tensor in load_file(file).items():
        layer, _, part = name.rpartition(".")
        tensors[f"{layer}.{OLD_KEYS.get(part, part)}"] = tensor
    assert any(name.endswith(".lora_down") for name in tensors)
    save_file(tensors, folder / "old.safetensors")
    return folder / "old.safetensors"


def test_one_layer_under_three_key_sets_gives_identical_outputs(tmp_path: Path) -> None:
    record = make_power_of_two_layer()
    scale = torch.tensor(0.0017)
    static = get_activation_format("nvfp4_static")
    calibrated = replace(record, activation=static, activation_global_scale=scale)
    made = write_as(tmp_path / "nunchaku", record, "nunchaku")
    x = make_input(9, WIDTH, BF16)
    wanted = run_loaded(made, x)
    for path in (
        write_old_keys(made, tmp_path / "old"),
        write_as(tmp_path / "lite", record, "nunchaku_lite"),
        write_as(tmp_path / "ours", record, "halfbyte"),
    ):
        assert torch.equal(run_loaded(path, x), wanted), path
    modelopt = write_as(tmp_path / "modelopt", calibrated, "modelopt")
    assert torch.equal(
        run_loaded(modelopt, x, quantizes_x=False), run_loaded(made, x, quantizes_x=False)
    )
    bare = replace(calibrated, smooth=None, lora_down=None, lora_up=None)
    outputs = [
        run_loaded(write_as(tmp_path / f"bare-{name}", bare, name), x)
        for name in ("modelopt", "compressed-tensors", "comfyui", "torchao", "halfbyte")
    ]
    assert all(torch.equal(y, outputs[0]) for y in outputs)


@pytest.mark.parametrize("family", ["nunchaku", "modelopt", "compressed-tensors"])
def test_reciprocals_are_inverted_once_however_often_a_file_is_loaded(
    tmp_path: Path, family: str
) -> None:
    record = replace(make_power_of_two_layer(), smooth=None, lora_down=None, lora_up=None)
    if family != "nunchaku":
        static = get_activation_format("nvfp4_static")
        record = replace(record, activation=static, activation_global_scale=torch.tensor(0.0017))
    path = write_as(tmp_path / family, record, family)
    model = halfbyte.load(path, Mlp())
    before = copy_state(model)
    halfbyte.load(path, model)
    assert_same_state(model, before)


def test_wtscale_survives_and_its_absence_means_one(tmp_path: Path) -> None:
    record = make_power_of_two_layer()
    weight = replace(record.weight, global_scale=torch.tensor(0.37))
    path = write_as(tmp_path / "scaled", replace(record, weight=weight), "nunchaku")
    model = halfbyte.load(path, Mlp())
    held = model.get_submodule("mlp.up_proj").weight_global_scale
    assert isinstance(held, torch.Tensor)
    assert float(held) == float(torch.tensor(0.37))
    [file] = path.glob("*.safetensors") if path.is_dir() else [path]
    tensors = {n: t for n, t in load_file(file).items() if not n.endswith(("wtscale", "wcscales"))}
    assert len(tensors) < len(load_file(file))
    (tmp_path / "bare").mkdir()
    save_file(tensors, tmp_path / "bare" / "bare.safetensors")
    plain = halfbyte.load(tmp_path / "bare" / "bare.safetensors", Mlp())
    held = plain.get_submodule("mlp.up_proj").weight_global_scale
    assert isinstance(held, torch.Tensor)
    assert float(held) == 1.0


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_gguf_file_whose_tensors_were_changed_is_refused(
    tmp_path: Path, architecture: str
) -> None:
    """llama.cpp puts rows of q and k in another order: the model would talk, and be wrong."""
    record = make_power_of_two_layer()
    metadata = {"general.architecture": architecture}
    path = tmp_path / "changed.safetensors"
    write_halfbyte_file(path, {"mlp.up_proj": record}, {"mlp.norm": torch.ones(3)}, metadata)
    with pytest.raises(CheckpointError, match=rf"architecture '{architecture}', whose tensors"):
        halfbyte.load(path, Mlp())


def test_a_gguf_file_is_loaded(tmp_path: Path) -> None:
    record = replace(
        make_power_of_two_layer(), activation=None, smooth=None, lora_down=None, lora_up=None
    )
    source, made = tmp_path / "source.safetensors", tmp_path / "made.gguf"
    write_halfbyte_file(source, {"mlp.up_proj": record}, {"mlp.norm": torch.ones(3)}, None)
    convert_checkpoint(ConvertRequest(source, made, "gguf"))
    x = make_input(5, WIDTH)
    assert torch.equal(run_loaded(made, x), run_loaded(source, x))


def test_ties_that_are_no_map_are_refused(tmp_path: Path) -> None:
    state = {n: t for n, t in make_net().state_dict().items() if not n.startswith("attn.")}
    del state["head.weight"]
    metadata = {"halfbyte_tied_tensors": json.dumps({"head.weight": "nowhere"})}
    write_halfbyte_file(tmp_path / "net.safetensors", make_records(), state, metadata)
    with pytest.raises(CheckpointError, match="is not a map of tensor names"):
        halfbyte.load(tmp_path / "net.safetensors", make_net())
