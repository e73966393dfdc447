"""A teacher's term for each sampled token, added to any estimator's advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel_rl.functional.kl import KLType, kl_estimate

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TeacherKL:
    """−c·k per sampled token, k an estimate of KL(policy ‖ teacher); k1 gives the reverse KL's gradient.

        A_t += −c·clamp(k(log π_old, log p_teacher), ±loss_max_clamp)

    It is added before whitening and clipping, and not accumulated over following tokens. Papers: arXiv 2306.13649,
    2601.02780; the clamps are verl's, the sum is slime's `opd_kl_coef`.

    >>> import torch
    >>> TeacherKL(0.5)(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -0.5]))
    tensor([-0.2500,  0.7500])

    Attributes:
        coefficient: c, above 0.
        estimator: k1, k2, k3, abs or low_var_kl, see `functional.kl`. As an advantage only k1 has the gradient of the KL.
        log_prob_min_clamp: lower bound < 0 of both log-probs; None: none.
        loss_max_clamp: bound of |k|; None: none.
    """

    coefficient: float = 1.0
    estimator: KLType = "k1"
    log_prob_min_clamp: float | None = None
    loss_max_clamp: float | None = None

    def __post_init__(self) -> None:
        if not self.coefficient > 0:
            raise ValueError(f"coefficient = {self.coefficient} must be above 0")
        if self.log_prob_min_clamp is not None and not self.log_prob_min_clamp < 0:
            raise ValueError(
                f"log_prob_min_clamp = {self.log_prob_min_clamp} must be below 0, as log-probs are; None: none"
            )
        if self.loss_max_clamp is not None and not self.loss_max_clamp > 0:
            raise ValueError(f"loss_max_clamp = {self.loss_max_clamp} must be above 0; None: none")

    def __call__(self, policy: Tensor, teacher: Tensor) -> Tensor:
        """Return the term added to the advantages, from log-probs of the sampled tokens, of one shape."""
        if self.log_prob_min_clamp is not None:
            policy, teacher = (x.clamp(min=self.log_prob_min_clamp) for x in (policy, teacher))
        return -self.coefficient * kl_estimate(policy, teacher, self.estimator, output_clamp=self.loss_max_clamp)
