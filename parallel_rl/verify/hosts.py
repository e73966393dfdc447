"""Losses of this library inside the calls of other frameworks, as subjects of the check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING

from parallel_rl.hosts import nemo_rl, skyrl, slime, torchtitan, transformers, trl, verl
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.policy import PolicyLoss, PolicyLossFn
from parallel_rl.testing import hosts

if TYPE_CHECKING:
    from torch import Tensor

    from parallel_rl.testing.cases import Subject
    from parallel_rl.testing.subjects import FunctionLoss

_VERL = {"constant-length": "seq-mean-token-sum-norm"}


def through_host(host: str, subject: Subject) -> Subject:
    """Return the loss of a subject as `host` calls it, over data ranks and micro-batches.

    >>> from parallel_rl.testing import Case
    >>> through_host("verl", Case("policy")).name
    'policy through verl'

    Raises:
        ValueError: an unknown host; a loss that it cannot feed.
    """
    if host not in HOSTS:
        raise ValueError(f"--through {host}: unknown host; supported are {', '.join(HOSTS)}")
    loss_fn = subject.build()
    if not isinstance(loss_fn, LossFn):
        raise ValueError(f"--through {host} takes a LossFn, which {subject.name} is not")
    found = HOSTS[host](loss_fn)
    found.call.__name__ = f"{subject.name} through {host}"
    return found


def _verl(loss_fn: LossFn) -> FunctionLoss:
    mode, length = "token-mean", None
    if isinstance(loss_fn, PolicyLoss):
        mode = _VERL.get(loss_fn.policy.aggregation, loss_fn.policy.aggregation)
        length = loss_fn.policy.max_length
    call = verl.policy_loss(loss_fn)

    def with_length(*arguments: object) -> tuple[Tensor, dict[str, float]]:
        config: SimpleNamespace = arguments[-1]  # type: ignore[assignment]
        config.global_batch_info["loss_scale_factor"] = length
        return call(*arguments)

    return hosts.verl(with_length, None, mode)


def _nemo_rl(loss_fn: LossFn) -> FunctionLoss:
    return hosts.nemo_rl(nemo_rl.HostLoss(loss_fn), loss_fn.requirements.names)


def _slime(loss_fn: LossFn) -> FunctionLoss:
    whole = not isinstance(loss_fn, PolicyLoss) or loss_fn.policy.aggregation == "token-mean"
    args = SimpleNamespace(calculate_per_token_loss=whole)
    return hosts.slime(slime.custom_loss(loss_fn), args, loss_fn.requirements.names)


def _skyrl(loss_fn: LossFn) -> FunctionLoss:
    return hosts.skyrl(skyrl.policy_loss(loss_fn))


def _torchtitan(loss_fn: LossFn) -> FunctionLoss:
    return hosts.torchtitan(torchtitan.HostLoss(loss_fn))


def _transformers(loss_fn: LossFn) -> FunctionLoss:
    return hosts.hugging_face(transformers.compute_loss_func(loss_fn))


def _trl(loss_fn: LossFn) -> FunctionLoss:
    if not isinstance(loss_fn, PolicyLossFn):
        raise ValueError(f"--through trl takes the losses of GRPOTrainer, name: policy; got {type(loss_fn).__name__}")
    options = vars(loss_fn.config)

    def rows(logprobs: Tensor, mask: Tensor, data: Mapping[str, Tensor], seqs: Tensor, toks: Tensor) -> Tensor:
        fields = {name: data[name] for name in loss_fn.requirements.names}
        return trl.grpo_loss(logprobs, None, {"response_mask": mask, **fields}, (seqs, toks), options)[0]

    return hosts.on_rows(rows, loss_fn.requirements.names)


#: hosts that `parallel-rl verify --through` knows
HOSTS: dict[str, Callable[[LossFn], FunctionLoss]] = {
    "nemo_rl": _nemo_rl, "verl": _verl, "slime": _slime, "trl": _trl, "transformers": _transformers, "skyrl": _skyrl,
    "torchtitan": _torchtitan,
}  # fmt: skip
