"""clusterlaunchcontrol: a running cluster takes over one that has not started (sm_100)."""

from halfbyte.ptx.instruction_form import InstructionForm

_FAMILY = "cluster_launch_control"


def _list_requests() -> list[InstructionForm]:
    forms = []
    for space, address, number in (("", "[b64]", 1), (".shared::cta", "[b32]", 0)):
        for multicast, is_multicast in (("", 0), (".multicast::cluster::all", 1)):
            forms.append(
                InstructionForm(
                    f"clusterlaunchcontrol.try_cancel.async{space}"
                    f".mbarrier::complete_tx::bytes{multicast}.b128",
                    _FAMILY,
                    f"{address} {address}",
                    "clusterlaunchcontrol.try_cancel",
                    (number, is_multicast),
                )
            )
    return forms


# Attributes of get_first_ctaid: first dimension, number of results.
FORMS: tuple[InstructionForm, ...] = (
    *_list_requests(),
    InstructionForm(
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128",
        _FAMILY,
        "=pred b128",
        "clusterlaunchcontrol.is_canceled",
    ),
    InstructionForm(
        "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128",
        _FAMILY,
        "=b32*4 b128",
        "clusterlaunchcontrol.get_first_ctaid",
        (0, 4),
    ),
    *(
        InstructionForm(
            f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{dimension}.b32.b128",
            _FAMILY,
            "=b32 b128",
            "clusterlaunchcontrol.get_first_ctaid",
            (number, 1),
        )
        for number, dimension in enumerate("xyz")
    ),
)
