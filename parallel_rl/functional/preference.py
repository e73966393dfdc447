"""Losses of preference pairs and of labelled responses, one number per pair or response.

Legend: `chosen` and `rejected` [n] are log-ratios D = log π(y) − log π_ref(y) of a whole response, D_w and D_l in the
formulas, and h = D_w − D_l; for a loss without a reference they are log-probs. log σ is one stable function and 1 − σ(x) is
σ(−x): nothing here overflows or cancels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from parallel_rl.functional.ratio import safe_exp


def dpo(chosen: Tensor, rejected: Tensor, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """DPO, and with label smoothing ε conservative DPO: −(1 − ε)·log σ(β·h) − ε·log σ(−β·h), [n] from two [n].

    On log-probs in place of log-ratios it is the preference term of CPO (arXiv 2401.08417).

    >>> dpo(torch.tensor([2.0, 0.0]), torch.tensor([-2.0, 0.0]), beta=0.5)
    tensor([0.1269, 0.6931])

    Papers: arXiv 2305.18290; cDPO: ericmitchell.ai/cdpo.pdf.
    """
    h = beta * (chosen - rejected)
    if label_smoothing == 0:
        return -logsigmoid(h)
    return -(1 - label_smoothing) * logsigmoid(h) - label_smoothing * logsigmoid(-h)


def robust_dpo(chosen: Tensor, rejected: Tensor, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Robust DPO: [−(1 − ε)·log σ(β·h) + ε·log σ(−β·h)] / (1 − 2ε), [n]; ε < ½; falls without bound as h grows where ε > 0.

    >>> robust_dpo(torch.tensor([2.0]), torch.tensor([-2.0]), beta=0.5, label_smoothing=0.1)
    tensor([-0.1231])

    Paper: arXiv 2403.00409.
    """
    h = beta * (chosen - rejected)
    return (label_smoothing * logsigmoid(-h) - (1 - label_smoothing) * logsigmoid(h)) / (1 - 2 * label_smoothing)


def ipo(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """IPO: (h − 1/(2β))², [n]. The paper's authors give it means over tokens, not sums. Paper: arXiv 2310.12036.

    >>> ipo(torch.tensor([2.0, 5.0]), torch.tensor([0.0, 0.0]), beta=0.1)
    tensor([9., 0.])
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


def hinge(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """SLiC's hinge: max(0, 1 − β·h), [n]. Paper: arXiv 2305.10425.

    >>> hinge(torch.tensor([2.0, 20.0]), torch.tensor([0.0, 0.0]), beta=0.1)
    tensor([0.8000, 0.0000])
    """
    return relu(1 - beta * (chosen - rejected))


def exo(chosen: Tensor, rejected: Tensor, beta: float = 0.1, label_smoothing: float = 1e-3) -> Tensor:
    """EXO of pairs: KL(q ‖ p) of q = (σ(β·h), σ(−β·h)) and p = (1 − ε, ε), [n]; ε > 0. Paper: arXiv 2402.00856.

    >>> exo(torch.tensor([2.0]), torch.tensor([-2.0]), beta=0.5)
    tensor([0.4590])
    """
    h = beta * (chosen - rejected)
    to_chosen = h.sigmoid() * (logsigmoid(h) - math.log1p(-label_smoothing))
    return to_chosen + (-h).sigmoid() * (logsigmoid(-h) - math.log(label_smoothing))


def nca(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """NCA of pairs: −log σ(β·D_w) − ½·log σ(−β·D_w) − ½·log σ(−β·D_l), [n]. Paper: arXiv 2402.05369.

    >>> nca(torch.tensor([2.0]), torch.tensor([-2.0]), beta=0.5)
    tensor([1.1265])
    """
    return -logsigmoid(beta * chosen) - (logsigmoid(-beta * chosen) + logsigmoid(-beta * rejected)) / 2


def bco(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """BCO of pairs: −log σ(β·D_w) − log σ(−β·D_l), [n]. Paper: arXiv 2404.04656 (without its shift of the rewards).

    >>> bco(torch.tensor([2.0]), torch.tensor([-2.0]), beta=0.5)
    tensor([0.6265])
    """
    return -logsigmoid(beta * chosen) - logsigmoid(-beta * rejected)


def sppo_hard(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """SPPO with hard labels: (D_w − 1/(2β))² + (D_l + 1/(2β))², [n]. Paper: arXiv 2405.00675.

    >>> sppo_hard(torch.tensor([5.0]), torch.tensor([-4.0]), beta=0.1)
    tensor([1.])
    """
    return (chosen - 1 / (2 * beta)).square() + (rejected + 1 / (2 * beta)).square()


def apo_zero(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """APO-zero, chosen up and rejected down: 1 − σ(β·D_w) + σ(β·D_l), [n]. Paper: arXiv 2408.06266.

    >>> apo_zero(torch.tensor([2.0, 0.0]), torch.tensor([-2.0, 0.0]), beta=0.5)
    tensor([0.5379, 1.0000])
    """
    return (-beta * chosen).sigmoid() + (beta * rejected).sigmoid()


def apo_down(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """APO-down, both down, rejected further: σ(β·D_w) + 1 − σ(β·h), [n]. Paper: arXiv 2408.06266.

    >>> apo_down(torch.tensor([2.0, 0.0]), torch.tensor([-2.0, 0.0]), beta=0.5)
    tensor([0.8503, 1.0000])
    """
    return (beta * chosen).sigmoid() + (-beta * (chosen - rejected)).sigmoid()


def discopop(chosen: Tensor, rejected: Tensor, beta: float = 0.1, temperature: float = 0.05) -> Tensor:
    """DiscoPOP: (1 − g)·(−log σ(β·h)) + g·e^{−β·h} with the gate g = σ(β·h/τ), [n]. Paper: arXiv 2406.08414.

    >>> discopop(torch.tensor([2.0]), torch.tensor([-2.0]), beta=0.5)
    tensor([0.1353])
    """
    h = beta * (chosen - rejected)
    gate = (h / temperature).sigmoid()
    return gate * safe_exp(-h) - (-h / temperature).sigmoid() * logsigmoid(h)


def simpo(
    chosen: Tensor, rejected: Tensor, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0
) -> Tensor:
    """SimPO: −log σ(β·(a_w − a_l) − γ), [n], of mean log-probs a a token; smoothed like `dpo`. Paper: arXiv 2405.14734.

    >>> simpo(torch.tensor([-0.5]), torch.tensor([-1.5]))
    tensor([0.3133])
    """
    return dpo(beta * chosen - gamma, beta * rejected, 1.0, label_smoothing)


def log1mexp(a: Tensor, eps: float | None = None) -> Tensor:
    """log(1 − e^a) for a < 0, exact at both ends: log(−expm1(a)) above −ln 2, log1p(−e^a) below; a is capped at −ε.

    Above the cap the gradient is 0. ε is that of a's dtype, or `eps` where a was computed with fewer digits than it has.

    >>> log1mexp(torch.tensor([-1e-4, -0.6931472, -30.0]))
    tensor([-9.2104e+00, -6.9315e-01, -9.3576e-14])
    """
    a = a.clamp(max=-(torch.finfo(a.dtype).eps if eps is None else eps))
    near = a > -math.log(2)
    return torch.where(near, (-torch.where(near, a, -1).expm1()).log(), (-torch.where(near, -1, a).exp()).log1p())


def log_odds(a: Tensor, eps: float | None = None) -> Tensor:
    """log(p / (1 − p)) of a log-prob a = log p ≤ 0, [n]; see `log1mexp` for a near 0.

    >>> log_odds(torch.tensor([0.5, 0.9]).log())
    tensor([0.0000, 2.1972])
    """
    return a - log1mexp(a, eps)


def orpo_odds_ratio(chosen: Tensor, rejected: Tensor, beta: float = 0.1, eps: float | None = None) -> Tensor:
    """ORPO's term beside the likelihood: −β·log σ(log odds_w − log odds_l), [n], of mean log-probs. Paper: arXiv 2403.07691.

    eps: of the dtype in which the log-probs were computed, if their means have more digits; see `log1mexp`.

    >>> orpo_odds_ratio(torch.tensor([-0.5]), torch.tensor([-1.5]), beta=1.0)
    tensor([0.1709])
    """
    return -beta * logsigmoid(log_odds(chosen, eps) - log_odds(rejected, eps))


def kto_desirable(log_ratio: Tensor, baseline: Tensor | float, beta: float = 0.1) -> Tensor:
    """KTO of desirable responses: 1 − σ(β·(D − z₀)), [n]; z₀ ≥ 0, a constant. Paper: arXiv 2402.01306.

    >>> kto_desirable(torch.tensor([0.0, 4.0]), baseline=0.0, beta=0.5)
    tensor([0.5000, 0.1192])
    """
    return (beta * (baseline - log_ratio)).sigmoid()


def kto_undesirable(log_ratio: Tensor, baseline: Tensor | float, beta: float = 0.1) -> Tensor:
    """KTO of undesirable responses: 1 − σ(β·(z₀ − D)), [n]; z₀ ≥ 0, a constant. Paper: arXiv 2402.01306.

    >>> kto_undesirable(torch.tensor([0.0, 4.0]), baseline=0.0, beta=0.5)
    tensor([0.5000, 0.8808])
    """
    return (beta * (log_ratio - baseline)).sigmoid()
