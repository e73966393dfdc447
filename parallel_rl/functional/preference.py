"""Losses of preference pairs, labelled responses and reward models, one number per pair, response or step.

`chosen` and `rejected` [n] are log-ratios D = log π(y) − log π_ref(y) of a whole response (log-probs without a reference); in
formulas D_w and D_l, with h = D_w − D_l.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from parallel_rl.functional.ratio import safe_exp


def dpo(chosen: Tensor, rejected: Tensor, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Compute DPO, conservative with label smoothing ε: −(1 − ε)·log σ(β·h) − ε·log σ(−β·h), [n].

    On log-probs it is the preference term of CPO (arXiv 2401.08417). Papers: arXiv 2305.18290; ericmitchell.ai/cdpo.pdf.

    >>> dpo(torch.tensor([2.0, 0.0]), torch.tensor([-2.0, 0.0]), beta=0.5)
    tensor([0.1269, 0.6931])
    """
    h = beta * (chosen - rejected)
    if label_smoothing == 0:
        return -logsigmoid(h)
    return -(1 - label_smoothing) * logsigmoid(h) - label_smoothing * logsigmoid(-h)


def robust_dpo(chosen: Tensor, rejected: Tensor, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Compute robust DPO: [−(1 − ε)·log σ(β·h) + ε·log σ(−β·h)] / (1 − 2ε), [n], ε < ½.

    For ε > 0 it falls without bound as h grows. Paper: arXiv 2403.00409.

    >>> robust_dpo(torch.tensor([2.0]), torch.tensor([-2.0]), beta=0.5, label_smoothing=0.1)
    tensor([-0.1231])
    """
    h = beta * (chosen - rejected)
    return (label_smoothing * logsigmoid(-h) - (1 - label_smoothing) * logsigmoid(h)) / (1 - 2 * label_smoothing)


def ipo(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Compute IPO: (h − 1/(2β))², [n]; the authors use means over tokens. Paper: arXiv 2310.12036.

    >>> ipo(torch.tensor([2.0, 5.0]), torch.tensor([0.0, 0.0]), beta=0.1)
    tensor([9., 0.])
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


def hinge(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Compute SLiC's hinge: max(0, 1 − β·h), [n]. Paper: arXiv 2305.10425.

    >>> hinge(torch.tensor([2.0, 20.0]), torch.tensor([0.0, 0.0]), beta=0.1)
    tensor([0.8000, 0.0000])
    """
    return relu(1 - beta * (chosen - rejected))


def exo(chosen: Tensor, rejected: Tensor, beta: float = 0.1, label_smoothing: float = 1e-3) -> Tensor:
    """Compute EXO: KL(q ‖ p), q = (σ(β·h), σ(−β·h)), p = (1 − ε, ε), [n]; ε > 0. Paper: arXiv 2402.00856.

    >>> exo(torch.tensor([2.0]), torch.tensor([-2.0]), beta=0.5)
    tensor([0.4590])
    """
    h = beta * (chosen - rejected)
    to_chosen = h.sigmoid() * (logsigmoid(h) - math.log1p(-label_smoothing))
    return to_chosen + (-h).sigmoid() * (logsigmoid(-h) - math.log(label_smoothing))


def nca(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Compute NCA: −log σ(β·D_w) − ½·log σ(−β·D_w) − ½·log σ(−β·D_l), [n]. Paper: arXiv 2402.05369.

    >>> nca(torch.tensor([2.0]), torch.tensor([-2.0]), beta=0.5)
    tensor([1.1265])
    """
    return -logsigmoid(beta * chosen) - (logsigmoid(-beta * chosen) + logsigmoid(-beta * rejected)) / 2


def bco(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Compute BCO: −log σ(β·D_w) − log σ(−β·D_l), [n], without reward shift. Paper: arXiv 2404.04656.

    >>> bco(torch.tensor([2.0]), torch.tensor([-2.0]), beta=0.5)
    tensor([0.6265])
    """
    return -logsigmoid(beta * chosen) - logsigmoid(-beta * rejected)


def sppo_hard(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Compute hard SPPO: (D_w − 1/(2β))² + (D_l + 1/(2β))², [n]. Paper: arXiv 2405.00675.

    >>> sppo_hard(torch.tensor([5.0]), torch.tensor([-4.0]), beta=0.1)
    tensor([1.])
    """
    return (chosen - 1 / (2 * beta)).square() + (rejected + 1 / (2 * beta)).square()


def apo_zero(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Compute APO-zero, chosen up, rejected down: 1 − σ(β·D_w) + σ(β·D_l), [n]. Paper: arXiv 2408.06266.

    >>> apo_zero(torch.tensor([2.0, 0.0]), torch.tensor([-2.0, 0.0]), beta=0.5)
    tensor([0.5379, 1.0000])
    """
    return (-beta * chosen).sigmoid() + (beta * rejected).sigmoid()


def apo_down(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Compute APO-down, rejected further down: σ(β·D_w) + 1 − σ(β·h), [n]. Paper: arXiv 2408.06266.

    >>> apo_down(torch.tensor([2.0, 0.0]), torch.tensor([-2.0, 0.0]), beta=0.5)
    tensor([0.8503, 1.0000])
    """
    return (beta * chosen).sigmoid() + (-beta * (chosen - rejected)).sigmoid()


def discopop(chosen: Tensor, rejected: Tensor, beta: float = 0.1, temperature: float = 0.05) -> Tensor:
    """Compute DiscoPOP: (1 − g)·(−log σ(β·h)) + g·e^{−β·h}, g = σ(β·h/τ), [n]. Paper: arXiv 2406.08414.

    >>> discopop(torch.tensor([2.0]), torch.tensor([-2.0]), beta=0.5)
    tensor([0.1353])
    """
    h = beta * (chosen - rejected)
    gate = (h / temperature).sigmoid()
    return gate * safe_exp(-h) - (-h / temperature).sigmoid() * logsigmoid(h)


def simpo(
    chosen: Tensor, rejected: Tensor, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0
) -> Tensor:
    """Compute SimPO: −log σ(β·(a_w − a_l) − γ), [n], of mean log-probs a. Paper: arXiv 2405.14734.

    >>> simpo(torch.tensor([-0.5]), torch.tensor([-1.5]))
    tensor([0.3133])
    """
    return dpo(beta * chosen - gamma, beta * rejected, 1.0, label_smoothing)


def log1mexp(a: Tensor, eps: float | None = None) -> Tensor:
    """Compute log(1 − e^a) for a < 0: log(−expm1(a)) above −ln 2, log1p(−e^a) below.

    a is capped at −`eps` (default: the ε of its dtype), with gradient 0 above; pass `eps` if a has fewer correct digits.

    >>> log1mexp(torch.tensor([-1e-4, -0.6931472, -30.0]))
    tensor([-9.2104e+00, -6.9315e-01, -9.3576e-14])
    """
    a = a.clamp(max=-(torch.finfo(a.dtype).eps if eps is None else eps))
    near = a > -math.log(2)
    return torch.where(near, (-torch.where(near, a, -1).expm1()).log(), (-torch.where(near, -1, a).exp()).log1p())


def log_odds(a: Tensor, eps: float | None = None) -> Tensor:
    """Compute log(p / (1 − p)) of a = log p ≤ 0, [n]; see `log1mexp` for a near 0.

    >>> log_odds(torch.tensor([0.5, 0.9]).log())
    tensor([0.0000, 2.1972])
    """
    return a - log1mexp(a, eps)


def orpo_odds_ratio(chosen: Tensor, rejected: Tensor, beta: float = 0.1, eps: float | None = None) -> Tensor:
    """Compute ORPO's −β·log σ(log odds_w − log odds_l), [n], of mean log-probs. Paper: arXiv 2403.07691.

    `eps` is that of the dtype in which the log-probs were computed, if their means are of a wider dtype; see `log1mexp`.

    >>> orpo_odds_ratio(torch.tensor([-0.5]), torch.tensor([-1.5]), beta=1.0)
    tensor([0.1709])
    """
    return -beta * logsigmoid(log_odds(chosen, eps) - log_odds(rejected, eps))


def kto_desirable(log_ratio: Tensor, baseline: Tensor | float, beta: float = 0.1) -> Tensor:
    """Compute desirable KTO: 1 − σ(β·(D − z₀)), [n]; z₀ ≥ 0 is constant. Paper: arXiv 2402.01306.

    >>> kto_desirable(torch.tensor([0.0, 4.0]), baseline=0.0, beta=0.5)
    tensor([0.5000, 0.1192])
    """
    return (beta * (baseline - log_ratio)).sigmoid()


def kto_undesirable(log_ratio: Tensor, baseline: Tensor | float, beta: float = 0.1) -> Tensor:
    """Compute undesirable KTO: 1 − σ(β·(z₀ − D)), [n]; z₀ ≥ 0 is constant. Paper: arXiv 2402.01306.

    >>> kto_undesirable(torch.tensor([0.0, 4.0]), baseline=0.0, beta=0.5)
    tensor([0.5000, 0.8808])
    """
    return (beta * (log_ratio - baseline)).sigmoid()


def log_sigmoid(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Compute Bradley-Terry with margin m: −log σ(r_w − r_l − m), [n]; m is a number or [n].

    Papers: Bradley & Terry 1952; arXiv 2203.02155; margins: arXiv 2307.09288.

    >>> log_sigmoid(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0]), margin=torch.tensor([0.0, 1.0]))
    tensor([0.6931, 0.6931])
    """
    return -logsigmoid(chosen - rejected - margin)


def log_exp(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Compute log(1 + e^{r_l − r_w}), [n]: `log_sigmoid` without margin, as in arXiv 2204.05862.

    >>> log_exp(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 0.0]))
    tensor([0.6931, 0.0486])
    """
    return -logsigmoid(chosen - rejected)


def hps(chosen: Tensor, rejected: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute the human preference score: −log σ((r_w − r_l)/T), [n]. Paper: arXiv 2303.14420.

    >>> hps(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 0.0]), temperature=2.0)
    tensor([0.6931, 0.2014])
    """
    return -logsigmoid((chosen - rejected) / temperature)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Compute −Σ_k q_k·log softmax(z)_k, [n], from logits and target probabilities [n, K].

    >>> cross_entropy(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
    tensor([0.6931])
    """
    return -torch.where(target == 0, 0, target * logits.log_softmax(-1)).sum(-1)
