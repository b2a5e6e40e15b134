"""Fences, prefetches, cache policies and hints, and elect.sync, nanosleep, setmaxnreg."""

from halfbyte.ptx.instruction_form import InstructionForm

_FAMILY = "scheduling_hints"
_SCOPES = ("cta", "cluster", "gpu", "sys")
_PROXIES = ("alias", "async", "async.global", "async.shared::cta", "async.shared::cluster")
# Values of a whole-fraction policy as CUTLASS spells them (cute/arch/copy_sm90_desc.hpp,
# TMA::CacheHintSm90); evict_unchanged is not listed there, programs cannot look inside.
_POLICIES = {
    "L2::evict_normal": 0x1000000000000000,
    "L2::evict_first": 0x12F0000000000000,
    "L2::evict_last": 0x14F0000000000000,
    "L2::evict_unchanged": 0x16F0000000000000,
}
_SECONDARY_POLICIES = ("", ".L2::evict_first", ".L2::evict_unchanged")


def _hint(name: str, operands: str = "") -> InstructionForm:
    return InstructionForm(name, _FAMILY, operands, "hint")


def _list_fences() -> list[InstructionForm]:
    names = [
        f"fence{order}.{scope}"
        for order in ("", ".sc", ".acq_rel", ".acquire", ".release")
        for scope in _SCOPES
    ]
    names += [
        "fence.acquire.sync_restrict::shared::cluster.cluster",
        "fence.release.sync_restrict::shared::cta.cluster",
        "fence.mbarrier_init.release.cluster",
        *(f"membar.{level}" for level in ("cta", "gl", "sys")),
    ]
    return [InstructionForm(name, _FAMILY, "", "fence") for name in names]


def _list_proxy_fences() -> list[InstructionForm]:
    names = [f"{fence}.proxy.{proxy}" for fence in ("fence", "membar") for proxy in _PROXIES]
    names += [
        "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster",
        "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster",
        *(f"fence.proxy.tensormap::generic.release.{scope}" for scope in _SCOPES),
    ]
    forms = [InstructionForm(name, _FAMILY, "", "fence.proxy") for name in names]
    for scope in _SCOPES:  # address of the tensor map and its size, 128 bytes
        name = f"fence.proxy.tensormap::generic.acquire.{scope}"
        forms.append(InstructionForm(name, _FAMILY, "[b64] imm", "fence.proxy"))
    return forms


def _list_cache_hints() -> list[InstructionForm]:
    prefetches = [
        f"prefetch{space}.{level}" for space in ("", ".global", ".local") for level in ("L1", "L2")
    ]
    prefetches += [
        "prefetch.global.L2::evict_last",
        "prefetch.global.L2::evict_normal",
        "prefetchu.L1",
    ]
    prefetches += [f"prefetch{space}.tensormap" for space in ("", ".const", ".param")]
    forms = [_hint(name, "[b64]") for name in prefetches]
    for space in ("", ".global"):
        forms.append(_hint(f"applypriority{space}.L2::evict_normal", "[b64] imm"))
        forms.append(InstructionForm(f"discard{space}.L2", _FAMILY, "[b64] imm", "discard"))
    return forms


def _list_policies() -> list[InstructionForm]:
    forms = []
    for primary, value in _POLICIES.items():
        for secondary in _SECONDARY_POLICIES:
            suffix = f"{primary}{secondary}.b64"
            spellings = [(f"createpolicy.fractional.{suffix}", "=b64 ?b32")]
            spellings += [
                (f"createpolicy.range{space}.{suffix}", "=b64 [b64] b32 b32")
                for space in ("", ".global")
            ]
            forms += [
                InstructionForm(name, _FAMILY, operands, "createpolicy", (value,))
                for name, operands in spellings
            ]
    name, value = "createpolicy.cvt.L2.b64", _POLICIES["L2::evict_normal"]
    forms.append(InstructionForm(name, _FAMILY, "=b64 b64", "createpolicy", (value,)))
    return forms


FORMS: tuple[InstructionForm, ...] = (
    *_list_fences(),
    *_list_proxy_fences(),
    *_list_cache_hints(),
    *_list_policies(),
    _hint("griddepcontrol.launch_dependents"),
    _hint("griddepcontrol.wait"),
    _hint("pmevent", "imm"),
    _hint("pmevent.mask", "imm"),
    InstructionForm("nanosleep.u32", _FAMILY, "b32", "nanosleep"),
    InstructionForm("setmaxnreg.inc.sync.aligned.u32", _FAMILY, "imm", "setmaxnreg", (), "aligned"),
    InstructionForm("setmaxnreg.dec.sync.aligned.u32", _FAMILY, "imm", "setmaxnreg", (), "aligned"),
    InstructionForm("elect.sync", _FAMILY, "=b32|pred b32", "elect.sync", (), "membermask"),
)
