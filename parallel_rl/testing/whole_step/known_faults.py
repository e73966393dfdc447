"""Known faults of megatron-core that silently change numbers, and which runs reach them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run's config that decide which faults it reaches."""

    tensor: int = 1
    context: int = 1
    sequence_parallel: bool = False
    per_token: bool = True  # calculate_per_token_loss
    heads: bool = False  # multi-token prediction heads
    balanced: bool = False  # routers add losses
    sequence_balance: bool = False  # routers add losses within each sequence
    masked_experts: bool = False  # routers get a padding mask
    packed: bool = False
    sinks: bool = False  # learnable attention sinks
    recompute: bool = False  # of whole layers
    smoothing: bool = False  # label smoothing in Megatron's cross-entropy
    gathers: bool = False  # logits are gathered over tensor ranks


@dataclass(frozen=True)
class KnownFault:
    name: str  # its subject
    reference: str  # the thread that describes it
    reaches: Callable[[RunFacts], bool]  # whether a config shows the fault
    avoided: str  # how this library's step avoids it


FAULTS: Sequence[KnownFault] = (
    KnownFault(
        "label smoothing", "Megatron-LM #5522", lambda run: run.tensor > 1 and run.smoothing, "its losses do not call it",
    ),
    KnownFault(
        "callbacks of three values", "Megatron-LM #7513", lambda run: run.context > 1 and not run.per_token,
        "its callback returns what every context rank scales alike",
    ),
    KnownFault(
        "gathered logits", "Megatron-LM #7452", lambda run: run.gathers and run.tensor > 1,
        "a model with parallel_output = False is refused",
    ),
    KnownFault(
        "loss of multi-token prediction", "Megatron-LM #7498, #3159",
        lambda run: run.heads,
        "forward_backward(mtp_loss=) divides by the counts of the step",
    ),
    KnownFault(
        "recomputed heads with distributed activations", "Megatron-LM #7403",
        lambda run: run.heads and run.recompute and run.tensor > 1, "build_config leaves distribute_saved_activations off",
    ),
    KnownFault(
        "padding mask of experts", "Megatron-LM #5563", lambda run: run.masked_experts and run.sequence_parallel,
        "no padding mask is passed",
    ),
    KnownFault(
        "attention sinks", "Megatron-LM #7530", lambda run: run.sinks and run.tensor > 1, "wrap_model marks them",
    ),
    KnownFault(
        "routers' own losses", "Megatron-LM #7481",
        lambda run: run.balanced and run.per_token and (run.sequence_parallel or run.context > 1),
        "forward_backward scales them by the tokens that routers see",
    ),
    KnownFault(
        "balance within packed sequences", "Megatron-LM #5996, #6115",
        lambda run: run.sequence_balance and run.packed, "forward_backward computes seq_aux_loss and global_aux_loss itself",
    ),
)  # fmt: skip


def gate_line(facts: RunFacts) -> str:
    """Name the faults that a run's config reaches in stock Megatron, in one line for the gate.

    >>> gate_line(RunFacts(tensor=2, sinks=True))
    "megatron-core's known faults: this config reaches 1 (attention sinks), avoided by forward_backward"
    """
    names = [fault.name for fault in FAULTS if fault.reaches(facts)]
    if not names:
        return "megatron-core's known faults: this config reaches none"
    reached = f"{len(names)} ({', '.join(names)})"
    return f"megatron-core's known faults: this config reaches {reached}, avoided by forward_backward"
