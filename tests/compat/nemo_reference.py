"""What NeMo-RL's losses compute, once more from their formulas: row by row on valid tokens, no code shared with the package."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Data = dict[str, Tensor]
Answer = tuple[Tensor, dict[str, float]]
ROWS, WIDTH, WORDS = 6, 8, 8


def batch(seed: int, *, poison: bool = True) -> Data:
    """[6, 8] token-aligned data with holes, row 3 without a token, pair (4, 5) masked; what is masked is NaN or inf."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(ROWS, WIDTH, generator=g) < 0.7
    mask[3], mask[0, 1:3] = False, True
    data = {"input_ids": torch.randint(0, WORDS, (ROWS, WIDTH), generator=g), "token_mask": mask.long()}
    data["sample_mask"] = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    valid = mask & data["sample_mask"].bool()[:, None]
    valid[:, 0] = False
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.float64)[torch.arange(ROWS * WIDTH) % 3]
    for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        data[name] = -1.5 * torch.rand(ROWS, WIDTH, generator=g, dtype=torch.float64)
    for name in ("advantages", "returns", "values"):
        data[name] = torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64)
    if poison:
        for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "advantages"):
            data[name] = torch.where(valid, data[name], bad.view(ROWS, WIDTH))
    data["rewards"] = torch.tensor([1.0, -1.0, 0.5, 1.0, 2.0, -2.0], dtype=torch.float64)
    data["logits"] = torch.randn(ROWS, WIDTH, WORDS, generator=g, dtype=torch.float64)
    data["teacher_topk_logits"] = torch.randn(ROWS, WIDTH, 3, generator=g, dtype=torch.float64)
    order = torch.rand(ROWS, WIDTH, WORDS, generator=g).argsort(-1)
    return {**data, "teacher_topk_indices": order[..., :3]}


def pairs(seed: int) -> Data:
    """`batch` with the reference's log-probs at the predictor, as DPO has them."""
    data = batch(seed)
    return {**data, "reference_policy_logprobs": data["reference_policy_logprobs"].roll(-1, 1)}


def logprobs_of(logits: Tensor, data: Data) -> Tensor:
    """[B, S − 1] from whole logits."""
    rows = [
        torch.stack([z[t] - z.logsumexp(0) for z, t in zip(logits[i, :-1], ids[1:], strict=True)])
        for i, ids in enumerate(data["input_ids"])
    ]
    return torch.stack(rows)


def places(data: Data, i: int) -> Tensor:
    """Columns of [S − 1] whose token is valid in row i, whatever its sample_mask."""
    return data["token_mask"][i, 1:].nonzero()[:, 0]


def clipped_pg(logprobs: Tensor, data: Data, o: dict, seqs: float, toks: float) -> Answer:
    """The loss and its metrics."""
    count = len(logprobs)
    s = [bool(x) for x in data["sample_mask"]]
    by_token, sequence = o.get("token_level_loss", True), o.get("sequence_level_importance_ratios", False)
    low, high = o.get("ratio_clip_min", 0.2), o.get("ratio_clip_max", 0.2)
    beta = 0.0 if o.get("use_kl_in_reward") else o.get("reference_policy_kl_penalty", 0.01)
    actor, kl_rows, nll, positive = [], [], torch.zeros((), dtype=torch.float64), 0
    means: dict[str, list[Tensor]] = {}
    ratios, clips, products, outside = [], [], [], 0.0
    for i in range(count):
        t = places(data, i)
        old, beh, ref, a = (
            data[key][i, 1:][t]
            for key in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "advantages")
        )
        logp = logprobs[i, t]
        if not s[i] or not len(t):
            products.append(1.0)
            continue
        old = logp.detach() if o.get("force_on_policy_ratio") else old
        if o.get("force_on_policy_ratio"):
            r = c = (logp - logp.detach()).exp()
        elif o.get("disable_ppo_ratio"):
            r = c = logp
        else:
            r = (logp - old).mean().exp().expand(len(t)) if sequence else (logp - old).exp()
            c = r.clamp(1 - low, 1 + high)
        x = -a * c.detach() * logp if o.get("use_cispo") else torch.maximum(-a * r, -a * c)
        if o.get("ratio_clip_c"):
            x = torch.where(a < 0, torch.minimum(x, -a * o["ratio_clip_c"]), x)
        weights, dropped = importance(old, beh, o)
        products.append(weights[0].item())
        outside += dropped
        actor.append(x * weights if o.get("use_importance_sampling_correction") else x)
        kl_rows.append(kl(logp, ref, beh, o) if beta else torch.zeros_like(logp))
        if data["rewards"][i] > 0:
            nll, positive = nll - logp.sum(), positive + len(t)
        mix = (0.5 * old.exp() + 0.5 * beh.exp()).log()
        found = {
            "probs_ratio": r,
            "probs_ratio_clamped": c,
            "token_mult_prob_error": (beh - old).abs().exp(),
            "gen_kl_error": estimate(old - beh, o.get("reference_policy_kl_type", "k3")),
            "policy_kl_error": estimate(beh - old, o.get("reference_policy_kl_type", "k3")),
            "js_divergence_error": (estimate(old - mix, "k3") + estimate(beh - mix, "k3")) / 2,
            "approx_entropy": -(logp - beh).exp() * logp,
        }
        if not sequence:
            found["sampling_importance_ratio"] = weights
        for key, value in found.items():
            means.setdefault(key, []).append(value.detach())
        ratios, clips = [*ratios, *r.tolist()], [*clips, *c.tolist()]

    def mean(rows: list[Tensor]) -> Tensor:
        return sum(row.sum() for row in rows) / toks if by_token else sum(row.mean() for row in rows) / seqs

    mu = o.get("positive_example_nll_weight", 0.0)
    penalty, nll = mean(kl_rows), nll / max(positive, 1) if mu else torch.zeros(())
    loss = mean(actor) + beta * penalty + mu * nll
    metrics = {key: torch.cat(values).sum().item() / toks for key, values in means.items()}
    metrics |= {"loss": loss.item(), "kl_penalty": penalty.item() if beta else 0.0, "positive_nll_loss": nll.item()}
    metrics |= {"probs_ratio_min": min(ratios), "probs_ratio_max": max(ratios), "num_valid_samples": sum(s)}
    metrics |= {"probs_ratio_clamped_min": min(clips), "probs_ratio_clamped_max": max(clips)}
    if sequence:  # Q2
        metrics["sampling_importance_ratio"] = sum(products) * sum(s) / seqs
    if (kind := o.get("truncated_importance_sampling_type")) is not None:
        metrics["is_oob_ratio"] = outside / (seqs if kind == "seq-mask-tis" else toks)
    return loss, metrics


def importance(old: Tensor, beh: Tensor, o: dict) -> tuple[Tensor, float]:
    """Each token's weight in one row, and how many of its tokens (its sequences) are out of bounds."""
    sequence = o.get("sequence_level_importance_ratios", False)
    w = (old - beh).sum().exp().expand(len(old)) if sequence else (old - beh).exp()
    prefix = "truncated_importance_sampling_"
    kind, low, high = (o.get(prefix + name) for name in ("type", "ratio_min", "ratio"))
    if kind is None:
        return w, 0.0
    low = low or 0.0
    if kind == "seq-mask-tis":
        keep = low <= math.exp((old - beh).mean().item()) <= high
        return w * keep, float(not keep)
    out = (w < low) | (w > high)
    return (w.clamp(low, high) if kind == "tis" else torch.where(out, 0, w)), out.sum().item()


def estimate(d: Tensor, kind: str) -> Tensor:
    """k1, k2 or k3 of d, the log of the reference over the policy."""
    return {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - 1 - d}[kind]


def kl(logp: Tensor, ref: Tensor, beh: Tensor, o: dict) -> Tensor:
    """The KL of each token of a row, with its score function."""
    d, inner, outer = ref - logp, o.get("kl_input_clamp_value", 20.0), o.get("kl_output_clamp_value", 10.0)
    w = (logp - (beh if o.get("use_on_policy_kl_approximation") else logp.detach())).exp()
    if inner is not None:
        w = torch.where(d.abs() > inner, w.detach(), w)
        d = d.clamp(-inner, inner)
    k = w * estimate(d, o.get("reference_policy_kl_type", "k3"))
    return k if outer is None else k.clamp(-outer, outer)


def dpo(logprobs: Tensor, data: Data, o: dict, seqs: float) -> Answer:
    """The loss and its metrics; the reference's log-probs stand at the predictor."""
    sums, nlls = [], []
    for i in range(len(logprobs)):
        t, pair_counts = places(data, i), bool(data["sample_mask"][i - i % 2])
        d = (logprobs[i, t] - data["reference_policy_logprobs"][i, :-1][t]) if pair_counts else logprobs[i, t] * 0
        n = max(len(t), 1)
        sums.append(d.sum() / (n if o.get("preference_average_log_probs") else 1))
        nlls.append(-logprobs[i, t].sum() * pair_counts / (n if o.get("sft_average_log_probs") else 1))
    pairs = [i for i in range(0, len(logprobs), 2) if data["sample_mask"][i]]
    beta, half = o.get("reference_policy_kl_penalty", 0.05), seqs / 2
    preferred = sum(torch.log1p((-beta * (sums[i] - sums[i + 1])).exp()) for i in pairs) / half
    sft = sum(nlls[i] for i in pairs) / half if o.get("sft_loss_weight", 0.0) > 0 else torch.zeros(())
    loss = o.get("preference_loss_weight", 1.0) * preferred + o.get("sft_loss_weight", 0.0) * sft
    return loss, {
        "loss": loss.item(),
        "sft_loss": sft.item(),
        "preference_loss": preferred.item(),
        "accuracy": sum(bool(sums[i] > sums[i + 1]) for i in pairs) / half,
        "rewards_chosen_mean": sum(sums[i].item() for i in pairs) / half,
        "rewards_rejected_mean": sum(sums[i + 1].item() for i in pairs) / half,
        "num_valid_samples": data["sample_mask"].sum().item() / 2,
    }


def distillation(logits: Tensor, data: Data, o: dict, toks: float) -> Answer:
    """The loss and its metrics; the teacher's top-k stand at the predictor."""
    w = {"forward": 1.0, "reverse": 0.0, "mixed": o.get("mixed_kl_weight", 0.5)}[o.get("kl_type", "mixed")]
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(logits)):
        for t in places(data, i).tolist() if data["sample_mask"][i] else []:
            ids, z = data["teacher_topk_indices"][i, t], logits[i, t]
            p = data["teacher_topk_logits"][i, t].softmax(0)
            whole = z.softmax(0)
            q = whole[ids] if o.get("zero_outside_topk") else z[ids].softmax(0)
            value = w * (p * (p / q).log()).sum() + (1 - w) * (q * (q / p).log()).sum()
            if o.get("zero_outside_topk"):  # what the teacher does not know has log-prob −100
                rest = [v for v in range(len(z)) if v not in ids.tolist()]
                value = value + (1 - w) * sum(whole[v] * (whole[v].log() + 100) for v in rest)
            total = total + value
    loss = total / toks
    return loss, {"loss": loss.item(), "num_valid_samples": len(logits)}
