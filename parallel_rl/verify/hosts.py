"""Losses of this library inside the calls of other frameworks, as subjects of the check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel_rl.hosts.registry import FRAMEWORKS, part
from parallel_rl.losses.core.base import LossFn

if TYPE_CHECKING:
    from parallel_rl.hosts.function_loss import FunctionLoss
    from parallel_rl.testing.cases import Subject


def through_host(host: str, subject: Subject) -> Subject:
    """Return the loss of a subject as `host` calls it, over data ranks and micro-batches.

    >>> from parallel_rl.testing import Case
    >>> through_host("verl", Case("policy")).name
    'policy through verl'

    Raises:
        ValueError: an unknown host; a loss that it cannot feed.
    """
    if host not in FRAMEWORKS:
        raise ValueError(f"--through {host}: unknown host; supported are {', '.join(FRAMEWORKS)}")
    loss_fn = subject.build()
    if not isinstance(loss_fn, LossFn):
        raise ValueError(f"--through {host} takes a LossFn, which {subject.name} is not")
    found: FunctionLoss = part(FRAMEWORKS[host].law).through(loss_fn)
    found.call.__name__ = f"{subject.name} through {host}"
    return found
