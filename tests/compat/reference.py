"""What the origins compute, once more from their formulas: row by row on valid tokens, no code shared with the package."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Row = tuple[Tensor, dict[str, Tensor]]  # loss of each token, and numbers of each token that are metrics as means


def aggregate(rows: list[Tensor], mode: str, width: int) -> Tensor:
    """Trinity's four modes over rows of valid tokens, empty ones among them."""
    total, n = torch.stack([row.sum() for row in rows]), [max(len(row), 1) for row in rows]
    if mode == "token-mean":
        return total.sum() / max(sum(len(row) for row in rows), 1)
    if mode == "seq-mean-token-sum":
        return total.sum() / len(rows)
    if mode == "seq-mean-token-mean":
        return sum(total[i] / n[i] for i in range(len(rows))) / len(rows)
    return total.sum() / width


def ppo(logp: Tensor, old: Tensor, a: Tensor, o: dict) -> Row:
    low, high = o.get("clip_range_low", o.get("clip_range")), o.get("clip_range_high", o.get("clip_range"))
    lr = logp - logp.detach() if o.get("fallback_to_policy_gradient") else (logp - old).clamp(-20, 20)
    plain, clipped = -a * lr.exp(), -a * lr.exp().clamp(1 - low, 1 + high)
    x = torch.maximum(plain, clipped)
    bound = -a * o.get("clip_ratio_c", 3.0)
    metrics = {
        "pg_clipfrac": (clipped > plain).double(),
        "pg_clipfrac_lower": ((x > bound) & (a < 0)).double(),
        "ppo_kl": -lr,
    }
    x = torch.where(a < 0, torch.minimum(x, bound), x)
    if o.get("enable_sequence_masking") and len(logp) and -lr.mean() > o.get("delta_sequence_masking", 0.1):
        x = torch.where(a < 0, 0, x)
    return x, metrics


def gspo(logp: Tensor, old: Tensor, a: Tensor, o: dict) -> Row:
    low, high = o.get("clip_range_low", o.get("clip_range")), o.get("clip_range_high", o.get("clip_range"))
    s = (logp - old).mean().detach() if len(logp) else 0.0
    r = (logp - logp.detach() + s).exp()
    plain, clipped = -a * r, -a * r.clamp(1 - low, 1 + high)
    return torch.maximum(plain, clipped), {"pg_clipfrac": (clipped > plain).double(), "ppo_kl": old - logp}


def cispo(logp: Tensor, old: Tensor, a: Tensor, o: dict) -> Row:
    r = (logp - old).exp().detach()
    keep = torch.ones_like(a)
    if o.get("enable_mask_clip"):
        for t in range(len(logp)):
            if (r[t] > 1 + o.get("mask_clip_range_high", 0.28) and a[t] > 0) or (
                r[t] < 1 - o.get("mask_clip_range_low", 1.0) and a[t] < 0
            ):
                keep[t] = 0
    weight = r.clamp(1 - o.get("clip_range_low", 1.0), 1 + o.get("clip_range_high", 0.28)) * keep
    return -a * weight * logp, {"ppo_kl": old - logp, "unmasked_frac": keep}


def topr(logp: Tensor, old: Tensor, a: Tensor, o: dict) -> Row:
    r = (logp - old).exp().detach()
    alpha = torch.where(a <= o.get("advantage_threshold", 0.0), r.clamp(0, 1), 1.0)
    return -alpha * a * logp, {"avg_alpha": alpha, "avg_ratio": r}


def sapo(logp: Tensor, old: Tensor, a: Tensor, o: dict) -> Row:
    r = (logp - old).exp().detach()
    tau = torch.full_like(a, o.get("tau_neg", 1.05)).masked_fill(a > 0, o.get("tau_pos", 1.0))
    gate = 4 / tau / (1 + torch.exp(-tau * (r - 1)))
    metrics = {"ppo_kl": old - logp, "avg_soft_gate": gate, "avg_ratio": r, "pos_adv_frac": (a > 0).double()}
    return -a * gate * logp, metrics


def sppo(logp: Tensor, old: Tensor, a: Tensor, o: dict) -> Row:
    r, e = (logp - old).exp().detach(), o.get("epsilon", 0.3)
    inside = (r >= 1 / (1 + e)) & (r <= 1 + e)
    return torch.where(inside, -a * (logp - old), 0), {"pg_clipfrac": (~inside).double()}


def importance_sampling(logp: Tensor, old: Tensor, a: Tensor, o: dict) -> Row:
    lr = (logp - old).clamp(-20, 20)
    return -a * lr.exp(), {"ratio/mean": lr.exp(), "approx_kl": -lr}


def opmd(logp: Tensor, old: Tensor, a: Tensor, o: dict) -> Row:
    return -a * logp / (1 + o.get("tau", 1.0)), {}


def sft(logp: Tensor, old: Tensor, a: Tensor, o: dict) -> Row:
    return -logp, {}


def sft_is(logp: Tensor, old: Tensor, a: Tensor, o: dict) -> Row:
    return -logp.detach().exp() * logp, {}


def sft_phi(logp: Tensor, old: Tensor, a: Tensor, o: dict) -> Row:
    p = logp.detach().exp()
    return -p * (1 - p) * logp.clamp(max=math.log(o.get("cutoff_prob", 1.0))), {}


def rec(logp: Tensor, old: Tensor, a: Tensor, o: dict) -> Row:
    r = (logp - old).exp().detach()
    geo = (logp - old).mean().exp().detach() if len(logp) else torch.ones(())
    low, high = o.get("epsilon_low", 0.2), o.get("epsilon_high", 0.2)
    low2, high2 = o.get("epsilon_low_prime", 0.4), o.get("epsilon_high_prime", 0.4)
    mode, keep = o.get("clip_mode", "none"), torch.zeros_like(a)
    for t in range(len(logp)):
        rho = geo if mode == "gspo-one-side" else r[t]
        one_side = (a[t] >= 0 and rho <= 1 + high) or (a[t] <= 0 and rho >= 1 - low)
        two_side = 1 - low <= rho <= 1 + high
        ring = two_side or (a[t] >= 0 and rho <= 1 - low2) or (a[t] <= 0 and rho >= 1 + high2)
        keep[t] = {"none": True, "two-side": two_side, "ring": ring}.get(mode, one_side)
    weights = {
        "importance_sampling": r,
        "gspo_importance_sampling": geo,
        "advantage": (a / o.get("temp", 1.0)).exp(),
    }
    x = -a * weights.get(o.get("weight", "none"), 1.0) * logp * keep
    c = o.get("regularizer_coef", 0.0)
    x = x + {"k2": c * (logp - old) ** 2, "forward-kl": -c * logp}.get(o.get("regularizer", "none"), 0.0)
    return x, {"pg_clipfrac": 1 - keep}


#: class → (its objective, the name of its loss among the metrics, its default aggregation)
TRINITY: dict[str, tuple[Callable[[Tensor, Tensor, Tensor, dict], Row], str, str]] = {
    "PPOPolicyLossFn": (ppo, "pg_loss", "token-mean"),
    "GSPOLossFn": (gspo, "pg_loss", "seq-mean-token-mean"),
    "CISPOPolicyLossFn": (cispo, "cispo_loss", "token-mean"),
    "TOPRPolicyLossFn": (topr, "topr_loss", "token-mean"),
    "SAPOPolicyLossFn": (sapo, "sapo_loss", "token-mean"),
    "sPPOPolicyLossFn": (sppo, "pg_loss", "token-mean"),
    "ImportanceSamplingLossFn": (importance_sampling, "pg_loss", "token-mean"),
    "OPMDPolicyLossFn": (opmd, "opmd_loss", "token-mean"),
    "SFTLossFn": (sft, "sft_loss", "token-mean"),
    "SFTISLossFn": (sft_is, "sft_is_loss", "token-mean"),
    "SFTPhiLossFn": (sft_phi, "sft_phi_loss", "token-mean"),
    "RECPolicyLossFn": (rec, "pg_loss", "token-mean"),
}


def trinity(name: str, data: dict[str, Tensor], options: dict, rows: list[int] | None = None) -> tuple[Tensor, dict]:
    """(loss, metrics) of a class of `TRINITY` on `data`, of some of its rows."""
    objective, loss_name, mode = TRINITY[name]
    mode = options.get("loss_agg_mode", mode)
    if options.get("clip_mode") == "gspo-one-side":
        mode = "seq-mean-token-mean"
    found, means, drifts, masked = [], {}, [], 0.0
    rows = list(range(len(data["logprob"]))) if rows is None else rows
    for i in rows:
        t = data["action_mask"][i].nonzero()[:, 0]
        picked = [data[key][i, t] for key in ("logprob", "old_logprob", "advantages")]
        x, metrics = objective(*picked, options)
        found.append(x)
        for key, value in metrics.items():
            means.setdefault(key, []).append(value)
        drift = -metrics["ppo_kl"] if "ppo_kl" in metrics else picked[0] - picked[1]
        drifts.append((-drift).mean().item() if len(t) else 0.0)
        if drifts[-1] > options.get("delta_sequence_masking", 0.1):
            masked += (data["advantages"][i] < 0).sum().item()
    loss = aggregate(found, mode, data["logprob"].shape[1])
    count = max(sum(len(x) for x in found), 1)
    result = {key: torch.cat(values).sum().item() / count for key, values in means.items()} | {loss_name: loss.item()}
    if options.get("enable_sequence_masking"):
        result |= {"seq_mask/masked_tokens": masked / count, "seq_mask/mean_sequence_kl": sum(drifts) / len(drifts)}
    if name == "GSPOLossFn":
        result["ppo_kl_seq"] = sum(drifts) / len(drifts)
    return loss, result


def openrlhf_rows(data: dict[str, Tensor], o: dict) -> tuple[list[Tensor], list[Tensor], list[bool]]:
    """OpenRLHF's policy loss row by row: each token's loss, whether the clip held, and which units its correction drops."""
    found, clips, filtered = [], [], []
    level, gspo = o.get("is_correction_level", "off"), o.get("policy_loss_type") == "gspo"
    for i in range(len(data["logprob"])):
        t = data["action_mask"][i].nonzero()[:, 0]
        logp, old, beh, a = (data[key][i, t] for key in ("logprob", "old_logprob", "rollout", "advantages"))
        if gspo:
            r = (logp - (old if level == "off" else beh)).mean().exp().expand(len(t)) if len(t) else logp
        else:
            r = (logp - old).clamp(-20, 20).exp()
        plain, clipped = r * a, r.clamp(1 - o.get("clip_eps_low", 0.2), 1 + o.get("clip_eps_high", 0.2)) * a
        gain = torch.minimum(plain, clipped)
        if o.get("dual_clip"):
            gain = torch.where(a < 0, torch.maximum(gain, o["dual_clip"] * a), gain)
        x = -gain
        if level != "off" and not gspo and len(t):
            w, drop = openrlhf_weight(old, beh, o)
            x, filtered = x * w, filtered + drop
        found.append(x)
        clips.append((clipped < plain).double())
    return found, clips, filtered


def openrlhf_weight(old: Tensor, rollout: Tensor, o: dict) -> tuple[Tensor, list[bool]]:
    """OpenRLHF's importance weight of each token of a row, and for each unit, token or row, whether it is outside."""
    low, high = o.get("is_correction_threshold", (0.5, 5.0))
    weights, statistics = [], []
    for l_old, l_rollout in zip(old.tolist(), rollout.tolist(), strict=True):
        p, q = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (l_rollout, l_old))
        binary_kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        weights.append(math.exp(l_old - l_rollout))
        gating = o.get("is_correction_gating", "ratio")
        statistics.append({"ratio": l_old - l_rollout, "binary_kl": binary_kl, "tv": abs(p - q)}[gating])
    if o["is_correction_level"] == "seq":
        statistics = [sum(statistics) / len(statistics)]
    if o.get("is_correction_gating", "ratio") == "ratio":
        statistics = [math.exp(x) for x in statistics]
    outside = [not low <= x <= high for x in statistics]
    if o.get("is_correction_mode") == "clip":
        weights = [min(max(w, low), high) for w in weights]
    else:
        drop = outside * len(weights) if o["is_correction_level"] == "seq" else outside
        weights = [0.0 if gone else w for w, gone in zip(weights, drop, strict=True)]
    return torch.tensor(weights, dtype=old.dtype), outside


def openrlhf_mean(rows: list[Tensor], token_level: bool, count: float | None = None) -> Tensor:
    """OpenRLHF's aggregation: tokens, or rows that have one."""
    rows = [row for row in rows if len(row)]
    if token_level:
        return sum(row.sum() for row in rows) / (count or sum(len(row) for row in rows))
    return sum(row.mean() for row in rows) / (count or len(rows))
