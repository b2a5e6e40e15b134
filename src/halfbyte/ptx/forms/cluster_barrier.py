"""barrier.cluster: the barrier of a cluster's threads, split into arrive and wait."""

from halfbyte.ptx.instruction_form import InstructionForm

FORMS: tuple[InstructionForm, ...] = tuple(
    InstructionForm(
        f"barrier.cluster.{operation}{order}{'.aligned' if is_aligned else ''}",
        "cluster_barrier",
        "",
        f"barrier.cluster.{operation}",
        (is_aligned,),
        "aligned" if is_aligned else "none",
    )
    for operation, orders in (("arrive", ("", ".release", ".relaxed")), ("wait", ("", ".acquire")))
    for order in orders
    for is_aligned in (0, 1)
)
