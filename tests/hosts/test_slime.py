"""Losses in slime's call against its arithmetic, whole and cut zigzag over two context ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import DPOLossFn, ParallelGroups, PolicyLossFn
from parallel_rl.hosts.slime import custom_loss
from parallel_rl.testing.pool import run_world

V, TEMPERATURE = 7, 0.8
SAMPLES = ((5, 3), (9, 4), (2, 1), (6, 5))  # tokens, and of them the response's
PPO = {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28}
KL = {"coefficient": 0.1, "estimator": "k3", "gradient": "plain"}
CASES = (
    ({"surrogate": PPO, "aggregation": "token-mean"}, True),
    ({"surrogate": PPO, "aggregation": "seq-mean-token-mean", "kl": KL}, False),
    ({"surrogate": PPO, "aggregation": "seq-mean-token-mean", "ratio_level": "sequence-mean"}, False),
)


def rollouts() -> tuple[list[Tensor], dict[str, list]]:
    """Logits [n_i, V] of each sample, and slime's batch of whole responses; the last token of each sample is masked."""
    g = torch.Generator().manual_seed(0)
    logits = [torch.randn(total, V, generator=g, dtype=torch.float64) for total, _ in SAMPLES]
    batch: dict[str, list] = {
        "unconcat_tokens": [torch.randint(0, V, (total,), generator=g) for total, _ in SAMPLES],
        "total_lengths": [total for total, _ in SAMPLES],
        "response_lengths": [response for _, response in SAMPLES],
        "loss_masks": [torch.tensor([1.0] * (r - 1) + [0.0 if r > 1 else 1.0]) for _, r in SAMPLES],
    }
    for name in ("log_probs", "ref_log_probs", "advantages"):
        scale = 1.0 if name == "advantages" else 0.3
        batch[name] = [torch.randn(r, generator=g, dtype=torch.float64) * scale - (scale < 1) * 2 for _, r in SAMPLES]
    return logits, batch


def by_hand(logits: list[Tensor], batch: dict[str, list], options: dict, whole: bool) -> Tensor:
    """Σ over samples of the mean over their mask, or Σ over tokens; slime divides it by the step's count after the call."""
    total = torch.zeros((), dtype=torch.float64)
    for i, (n, r) in enumerate(SAMPLES):
        ids, mask = batch["unconcat_tokens"][i], batch["loss_masks"][i]
        new = (logits[i] / TEMPERATURE).log_softmax(-1)[n - r - 1 : n - 1].gather(-1, ids[n - r :, None])[:, 0]
        log_ratio, a = new - batch["log_probs"][i], batch["advantages"][i]
        if "ratio_level" in options:
            log_ratio = ((log_ratio * mask).sum() / mask.sum()).expand(r)
        ratio = log_ratio.exp()
        x = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
        if "kl" in options:
            d = batch["ref_log_probs"][i] - new
            x = x + 0.1 * (d.exp() - d - 1)
        total = total + (x * mask).sum() / (1 if whole else mask.sum())
    return total


def zigzag(x: Tensor, total: int, rank: int, fill: float) -> Tensor:
    """Two chunks of a sample [n, ...], the sample filled up to 4 of them."""
    chunk = -(-total // 4)
    padded = torch.cat([x, x.new_full((4 * chunk - total, *x.shape[1:]), fill)])
    return torch.cat([padded[at * chunk : (at + 1) * chunk] for at in (rank, 3 - rank)])


def cut_field(values: list[Tensor], rank: int) -> list[Tensor]:
    """A rank's pieces of whole responses."""
    pieces = []
    for x, (n, r) in zip(values, SAMPLES, strict=True):
        at_predictors = torch.cat([x.new_full((n - r - 1,), torch.nan), x, x.new_full((1,), torch.nan)])
        mine = zigzag(at_predictors, n, rank, torch.nan)
        pieces.append(mine[~mine.isnan()])
    return pieces


def cut(logits: list[Tensor], batch: dict[str, list], rank: int) -> tuple[Tensor, dict[str, list]]:
    """A rank's logits, its rows and a tail of alignment, all NaN where nothing is scored; its pieces of the responses."""
    own = dict(batch)
    for name in ("log_probs", "ref_log_probs", "advantages"):
        own[name] = cut_field(batch[name], rank)
    rows = [zigzag(z, n, rank, torch.nan) for z, (n, _) in zip(logits, SAMPLES, strict=True)]
    return torch.cat([*rows, torch.full((3, V), torch.nan, dtype=torch.float64)])[None], own


def _of_rank(rank: int) -> list[tuple[float, list[Tensor]]]:
    found = []
    for options, whole in CASES:
        logits, batch = rollouts()
        leaves = [z.requires_grad_() for z in logits]
        flat, own = cut(leaves, batch, rank)
        args = SimpleNamespace(calculate_per_token_loss=whole, rollout_temperature=TEMPERATURE, allgather_cp=False)
        call = custom_loss(PolicyLossFn(options), ParallelGroups(context=dist.group.WORLD))
        loss, metrics = call(args, own, flat, None)
        loss.backward()
        assert float(metrics["loss"]) == pytest.approx(loss.item())
        found.append((loss.item(), [z.grad for z in leaves]))
    return found


def test_slimes_arithmetic_whole_and_over_context_ranks() -> None:
    """A sample of two tokens has nothing on one rank; padding and prompts hold NaN; chunks of the same sample need a sum."""
    ranks = run_world(2, _of_rank, timeout=60)
    for i, (options, whole) in enumerate(CASES):
        logits, batch = rollouts()
        leaves = [z.requires_grad_() for z in logits]
        want = by_hand(leaves, batch, options, whole)
        right = torch.autograd.grad(want, leaves)
        args = SimpleNamespace(calculate_per_token_loss=whole, rollout_temperature=TEMPERATURE)
        loss, _ = custom_loss(PolicyLossFn(options))(args, batch, torch.cat(leaves)[None], None)
        assert loss.item() == pytest.approx(want.item(), rel=1e-9)
        for x, y in zip(torch.autograd.grad(loss, leaves), right, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)
        assert sum(rank[i][0] for rank in ranks) == pytest.approx(want.item(), rel=1e-9)
        for sample, y in enumerate(right):
            torch.testing.assert_close(sum(rank[i][1][sample].nan_to_num(0) for rank in ranks), y, rtol=1e-8, atol=1e-9)


def _with_a_token_of_no_word(rank: int) -> str:
    logits, batch = rollouts()
    flat, own = cut(logits, batch, rank)
    ids = own["unconcat_tokens"][1].clone()
    ids[5] = V  # which rank 1 alone predicts
    own["unconcat_tokens"] = [own["unconcat_tokens"][0], ids, *own["unconcat_tokens"][2:]]
    call = custom_loss(PolicyLossFn(), ParallelGroups(context=dist.group.WORLD))
    with pytest.raises(ValueError) as caught:
        call(SimpleNamespace(calculate_per_token_loss=True), own, flat, None)
    return str(caught.value)


def test_a_token_outside_the_vocabulary_is_an_error_on_every_context_rank() -> None:
    """The rank that does not look at it waited for the other in its next collective."""
    told = run_world(2, _with_a_token_of_no_word, timeout=30)
    assert told[0] == told[1] and told[0].startswith("rank 1: target 7 at ")


def test_masks_are_of_the_response_alone() -> None:
    """Masks of whole sequences were cut to their first values, without a word."""
    logits, batch = rollouts()
    batch["loss_masks"] = [torch.ones(total) for total in batch["total_lengths"]]
    args = SimpleNamespace(calculate_per_token_loss=True)
    loss = custom_loss(PolicyLossFn({"surrogate": PPO, "aggregation": "token-mean"}))
    with pytest.raises(ValueError, match=r"loss_masks\[0\] has 5 values, its response 3 tokens"):
        loss(args, batch, torch.cat(logits)[None], None)


def test_on_policy_without_recorded_log_probs() -> None:
    logits, batch = rollouts()
    args = SimpleNamespace(calculate_per_token_loss=True)
    loss, metrics = custom_loss(PolicyLossFn({"surrogate": PPO}))(
        args, {**batch, "log_probs": []}, torch.cat(logits)[None], None
    )
    want = -sum((a * m).sum() for a, m in zip(batch["advantages"], batch["loss_masks"], strict=True))
    assert loss.item() == pytest.approx(want.item()) and float(metrics["approx_kl"]) == 0


def test_what_does_not_fit() -> None:
    logits, batch = rollouts()
    flat, mean = torch.cat(logits)[None], SimpleNamespace(calculate_per_token_loss=False)
    policy = custom_loss(PolicyLossFn({"aggregation": "seq-mean-token-mean"}))
    with pytest.raises(
        ValueError, match="divided by tokens, slime with calculate_per_token_loss = False divides by samples"
    ):
        custom_loss(PolicyLossFn())(mean, batch, flat, None)
    with pytest.raises(ValueError, match="supported is the zigzag of each sample"):
        policy(SimpleNamespace(allgather_cp=True), batch, flat, None)
    summed = custom_loss(PolicyLossFn({"aggregation": "seq-mean-token-sum"}))
    with pytest.raises(
        ValueError, match=r"rollout_mask_sums = \[9.0, 9.0, 9.0, 9.0\] divides several samples of one rollout"
    ):
        summed(mean, {**batch, "rollout_mask_sums": [torch.tensor(9.0)] * 4}, flat, None)
    with pytest.raises(ValueError, match="batch has no 'advantages'"):
        policy(mean, {**batch, "advantages": None}, flat, None)
    with pytest.raises(ValueError, match=r"\[1, T, V/tp\] with T ≥ 22 for total_lengths, got \[1, 21, 7\]"):
        policy(mean, batch, flat[:, 1:], None)
    with pytest.raises(ValueError, match="replay of the sampler's top-p is not supported"):
        policy(mean, {**batch, "rollout_top_p_token_ids": [[1]]}, flat, None)
    assert custom_loss(DPOLossFn()), "a loss on pairs of samples is divided by samples, too"
    with pytest.raises(ValueError, match="advantages has shape"):
        policy(mean, {**batch, "advantages": [x[1:] for x in batch["advantages"]]}, flat, None)
