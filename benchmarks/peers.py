"""Cross-entropies of logits that the benchmarks compare with: how each is called, and what its source says of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

CrossEntropy = Callable[[Tensor, Tensor], Tensor]
_broken: dict[str, str] = {}  # module → why it cannot be imported


@dataclass(frozen=True)
class Peer:
    """`loss(logits [T, V/tp], targets [T])` gives −log-prob [T]; with `shards` over the ranks of the default group.

    Every gradient comes in the logits' dtype.
    """

    name: str
    loss: CrossEntropy
    module: str = "torch"  # what it imports
    shards: bool = False  # it knows vocabulary shards
    card: bool = False  # its kernels want a card
    bfloat16_gradient: bool = False  # it rounds the gradient to bfloat16 whatever the logits' dtype
    bfloat16_loss: bool = False  # where logits are bfloat16, its log-probs are too


def _plain(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="none")


def _compiled(logits: Tensor, targets: Tensor) -> Tensor:
    return _compile_plain()(logits, targets)


@cache
def _compile_plain() -> CrossEntropy:
    """Compile on first use, not at import: the compiler takes two seconds to load."""
    return torch.compile(_plain)


def _megatron(logits: Tensor, targets: Tensor) -> Tensor:
    """Overwrites float32 logits, takes a float32 copy of others; the group is parallel_state's (`join_megatron`)."""
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    return vocab_parallel_cross_entropy(logits[:, None], targets[:, None])[:, 0]  # [S, B, V/tp] with B = 1


def _megatron_fused(logits: Tensor, targets: Tensor) -> Tensor:
    """Compiled; it wants a group even of one, and its gradient has gone through bfloat16."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    return fused_vocab_parallel_cross_entropy(logits[:, None], targets[:, None], dist.group.WORLD)[:, 0]


def _transformer_engine(logits: Tensor, targets: Tensor) -> Tensor:
    """float32 in a kernel, on [B, S, V/tp]; where the version can (2.20 does), its gradient takes the logits' memory."""
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    giving_up = {"overwrite_input": True} if _can_overwrite(parallel_cross_entropy) else {}
    return parallel_cross_entropy(logits[None], targets[None], 0.0, False, _world(), **giving_up)[0]


@cache
def _can_overwrite(function: Callable[..., Tensor]) -> bool:
    return "overwrite_input" in signature(function).parameters


def _liger(logits: Tensor, targets: Tensor) -> Tensor:
    """Forward writes the gradient over the logits; the loss has the logits' dtype."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy(logits, targets, reduction="none")


def _liger_shards(logits: Tensor, targets: Tensor) -> Tensor:
    """Leaves the logits alone; exponentials, then the gradient, are in a float32 buffer of their size."""
    from liger_kernel.transformers import LigerVocabParallelCrossEntropy

    return LigerVocabParallelCrossEntropy()(logits[:, None], targets[:, None], _world())[:, 0]


def _trl(logits: Tensor, targets: Tensor) -> Tensor:
    """A loop over rows on a CPU, a float32 kernel with the entropy on a card (where its log-probs are float32)."""
    from trl.trainer.utils import selective_log_softmax

    return -selective_log_softmax(logits, targets).float()


PLAIN, COMPILED = "torch cross_entropy", "torch cross_entropy, compiled"
MEGATRON, MEGATRON_FUSED = "Megatron cross-entropy", "Megatron fused cross-entropy"
_OF_MEGATRON = "megatron.core.tensor_parallel.cross_entropy"
_PEERS = (
    Peer(PLAIN, _plain),
    Peer(COMPILED, _compiled),
    Peer(MEGATRON, _megatron, _OF_MEGATRON, shards=True),
    Peer(MEGATRON_FUSED, _megatron_fused, _OF_MEGATRON, shards=True, bfloat16_gradient=True),
    Peer(
        "Transformer Engine cross-entropy",
        _transformer_engine,
        "transformer_engine.pytorch.cross_entropy",
        shards=True,
        card=True,
    ),
    Peer("Liger cross-entropy", _liger, "liger_kernel.transformers.functional", card=True, bfloat16_loss=True),
    Peer("Liger vocab-parallel cross-entropy", _liger_shards, "liger_kernel.transformers", shards=True, card=True),
    Peer("TRL selective_log_softmax", _trl, "trl.trainer.utils", bfloat16_loss=True),
)


def peers(device: str, tp: int = 1) -> list[Peer]:
    """Peers that are installed and run on the device; on more than one rank those that know shards."""
    fit = [peer for peer in _PEERS if (device == "cuda" or not peer.card) and (tp == 1 or peer.shards)]
    return [peer for peer in fit if imports(peer.module)]


@cache
def imports(module: str) -> bool:
    """Return whether a peer's module can be imported; print why an installed one cannot."""
    package = module.split(".")[0]
    if find_spec(package) is None:
        return False
    try:
        import_module(module)
    except Exception as error:  # a package may raise anything without its dependency or a card
        _broken[module] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        print(f"not run: {package}: {_broken[module]}", flush=True)
        return False
    return True


def broken() -> Mapping[str, str]:
    """List installed peers whose import failed, and why."""
    return dict(_broken)


def results_of(methods: Sequence[Any], check: Callable[[Any], Any], device: str) -> dict[str, Any]:
    """What the check gives of each method, by name. On a card, which may not be there again, a peer that fails is a line."""
    found = {}
    for method in methods:
        try:
            found[method.name] = check(method)
        except Exception as error:  # its kernel is not built, or wrong
            if device != "cuda" or method.kind != "peer":
                raise
            print(f"not run: {method.name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}", flush=True)
    return found


def join_megatron(tp: int = 1) -> None:
    """Makes Megatron's groups, of the ranks that there are or else of this process alone."""
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's Transformer Engine fallbacks do not matter here
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)


def _world() -> ProcessGroup | None:
    """The ranks that share the vocabulary, None where there is one."""
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
