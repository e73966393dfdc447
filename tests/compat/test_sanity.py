"""Where the origins give NaN, crash or say nothing: empty batches, empty sides, overflow, options that contradict."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parallel_rl.compat import lightrft, openrlhf, trinity
from tests.compat.cases import responses

CPU = torch.device("cpu")


def on_responses() -> dict[str, Callable[[dict[str, Tensor]], Tensor]]:
    """Every loss on [B, A] tensors, from one batch to its scalar."""

    def of(fn: Callable, *names: str, first: bool = False) -> Callable[[dict[str, Tensor]], Tensor]:
        return lambda d: fn(*(d[name] for name in names))[0] if first else fn(*(d[name] for name in names))

    policy = ("logprob", "old_logprob", "advantages", "action_mask")
    value = ("values", "old_values", "returns", "action_mask")
    losses = {
        "lightrft PolicyLoss": of(lightrft.PolicyLoss(), *policy),
        "lightrft CPGD": of(lightrft.PolicyLoss(use_cpg_loss=True), *policy),
        "lightrft ValueLoss": of(lightrft.ValueLoss(0.2), *value),
        "openrlhf PolicyLoss": of(openrlhf.PolicyLoss(dual_clip=3.0), *policy, first=True),
        "openrlhf GSPO": of(openrlhf.PolicyLoss(policy_loss_type="gspo"), *policy, first=True),
        "openrlhf rows corrected": of(
            openrlhf.PolicyLoss(token_level_loss=False, is_correction_level="seq", is_correction_threshold=[0.5, 2.0]),
            *policy,
            "rollout",
            first=True,
        ),
        "openrlhf ValueLoss": of(openrlhf.ValueLoss(0.2, token_level_loss=False), *value),
        "openrlhf SFTLoss": of(openrlhf.SFTLoss(), "logprob", "action_mask"),
    }
    for name, cls in trinity.POLICY_LOSS_FN.items():
        for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
            options = cls.default_args()
            if "loss_agg_mode" in options:
                options["loss_agg_mode"] = mode
            fn = cls(**options)
            losses[f"trinity {name} {mode}"] = lambda d, fn=fn: fn(**d)[0]
    return losses


LOSSES = on_responses()


def scalar_and_gradient(name: str, data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    leaf = "values" if "Value" in name else "logprob"
    data = {**data, leaf: data[leaf].clone().requires_grad_()}
    loss = LOSSES[name](data)
    return loss, torch.autograd.grad(loss, data[leaf])[0]  # raises where the loss is not connected


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_masked_never_matters(name: str) -> None:
    dirty, clean = responses(5), responses(5, poison=False)
    dirty, clean = (scalar_and_gradient(name, data) for data in (dirty, clean))
    torch.testing.assert_close(dirty, clean, rtol=0, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_valid_is_an_exact_zero(name: str) -> None:
    for data in (responses(6), {key: value[:0] for key, value in responses(6).items()}):
        data["action_mask"] = torch.zeros_like(data["action_mask"])
        loss, grad = scalar_and_gradient(name, data)
        assert loss.item() == (pytest.approx(math.log(2)) if "dpo" in name else 0.0)  # DPO of no difference
        assert grad.eq(0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_low_precision_runs_in_float32(name: str) -> None:
    data = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in responses(7, torch.float32).items()
    }
    loss, grad = scalar_and_gradient(name, data)
    exact, _ = scalar_and_gradient(name, {k: v.double() if v.is_floating_point() else v for k, v in data.items()})
    assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss.double(), exact, rtol=1e-4, atol=1e-5)


def test_pairs_without_a_pair() -> None:
    x = torch.zeros(0, requires_grad=True)
    for loss in (
        lightrft.PairWiseLoss()(x, x),
        lightrft.LogExpLoss()(x, x),
        lightrft.HPSLoss()(x, x),
        lightrft.DPOLoss(0.1)(x, x, x, x)[0],
        lightrft.VanillaKTOLoss(0.1)(x, x, x, x)[0],
        lightrft.KTOLoss(0.1, 1.0, 1.0, 1, CPU)(x, x, x, x, x, x)[0],
    ):
        assert loss.item() == 0
        loss.backward()


def test_scores_far_apart_do_not_overflow() -> None:
    chosen, rejected = torch.tensor([-500.0], requires_grad=True), torch.tensor([500.0])
    for loss_fn in (lightrft.LogExpLoss(), openrlhf.LogExpLoss(), lightrft.HPSLoss(), lightrft.PairWiseLoss()):
        loss = loss_fn(chosen, rejected)
        assert loss.item() == 1000
        assert torch.autograd.grad(loss, chosen)[0].item() == -1


def test_kto_without_samples_of_the_kl() -> None:
    x, none = torch.tensor([-1.0, -2.0], requires_grad=True), torch.zeros(0)
    loss, chosen, rejected, kl = openrlhf.KTOLoss(0.1, 1.0, 1.0, 1, CPU)(x, none, none, x.detach() - 1, none, none)
    assert kl.item() == 0 and rejected.numel() == 0 and chosen.tolist() == pytest.approx([0.1, 0.1])
    assert loss.item() == pytest.approx(1 - torch.tensor(0.1).sigmoid().item())


@pytest.mark.parametrize("origin", [lightrft, openrlhf])
def test_logits_without_a_label(origin: object) -> None:
    logits = torch.full((2, 3, 5), torch.nan).requires_grad_()
    ignored = torch.full((2, 3), -100)
    for loss in (
        origin.GPTLMLoss()(logits, ignored),
        origin.KDLoss()(logits, logits.detach(), ignored),
        origin.PRMLoss(7)(ignored, logits, ignored),
        origin.PRMLoss(7, [1, 2])(ignored, logits, ignored),
        origin.PRMLoss(7, [1, 2])(ignored, logits, ignored.double()),
    ):
        assert loss.item() == 0
        assert torch.autograd.grad(loss, logits)[0].eq(0).all()
    assert origin.PRMLoss(7)(ignored, logits, ignored, return_acc=True)[1].item() == 0


ERRORS: list[tuple[Callable[[], object], str]] = [
    (lambda: trinity.PPOPolicyLossFn(), "clip_range_low = None and clip_range_high = None"),
    (lambda: trinity.GSPOLossFn(clip_range_low=0.1), "clip_range_high = None"),
    (lambda: trinity.PPOPolicyLossFn(clip_range=0.2, clip_ratio_c=0.9), "dual_clip = 0.9 must exceed 1"),
    (lambda: trinity.SFTLossFn(loss_agg_mode="token_mean"), "did you mean 'token-mean'"),
    (lambda: trinity.SFTPhiLossFn(cutoff_prob=1.5), "cutoff_prob = 1.5"),
    (lambda: trinity.SAPOPolicyLossFn(tau_neg=0.5), "tau_neg = 0.5"),
    (lambda: trinity.RECPolicyLossFn(epsilon_low=1.5), "epsilon_low = 1.5 must lie in"),
    (lambda: trinity.RECPolicyLossFn(clip_mode="both"), "clip_mode = 'both' is not valid"),
    (
        lambda: trinity.MIXPolicyLossFn(clip_range=0.2, ngpus_trainer=4, train_batch_size_expert=2),
        "train_batch_size_.* // ngpus_trainer = 0",
    ),
    (
        lambda: openrlhf.PolicyLoss(policy_loss_type="grpo"),
        "policy_loss_type = 'grpo' is not valid; did you mean 'gspo'",
    ),
    (lambda: openrlhf.PolicyLoss(is_correction_level="geo"), "is_correction_level = 'geo' is not valid"),
    (lambda: openrlhf.PolicyLoss(is_correction_gating="kl"), "is_correction_gating = 'kl' is not valid"),
    (lambda: openrlhf.PolicyLoss(is_correction_mode="drop"), "is_correction_mode = 'drop' is not valid"),
    (
        lambda: openrlhf.PolicyLoss(is_correction_level="seq", is_correction_mode="clip"),
        "it needs is_correction_level = 'token'",
    ),
    (lambda: openrlhf.PolicyLoss(is_correction_level="token", is_correction_gating="tv"), "an upper bound only"),
    (lambda: openrlhf.PolicyLoss(is_correction_threshold=[2.0, 0.5]), r"\[2.0, 0.5\] must be \[low, high\]"),
    (lambda: openrlhf.PolicyLoss(dual_clip=0.9), "dual_clip = 0.9 must exceed 1"),
    (lambda: lightrft.PolicyLoss(1.0, use_cpg_loss=True), "clip_low = 1.0"),
]


@pytest.mark.parametrize(("make", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_options_that_cannot_be_right_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_calls_that_cannot_be_right_are_refused() -> None:
    data = responses(0)
    policy = [data[key] for key in ("logprob", "old_logprob", "advantages")]
    with pytest.raises(ValueError, match="global_valid_toks is given without global_valid_seqs"):
        lightrft.PolicyLoss()(*policy, global_valid_toks=3)
    with pytest.raises(ValueError, match=r"advantages has shape \[6, 7\]"):
        lightrft.PolicyLoss()(*policy[:2], policy[2][:, 1:])
    with pytest.raises(ValueError, match=r"log-probs must be floating point \[B, A\]"):
        lightrft.PolicyLoss()(*(x[0] for x in policy))
    with pytest.raises(ValueError, match="give one or the other"):
        openrlhf.PolicyLoss(token_level_loss=True)(
            *policy, batch_num_tokens=4, global_valid_seqs=3, global_valid_toks=4
        )
    with pytest.raises(ValueError, match="is_correction_level = 'seq' needs rollout_log_probs"):
        openrlhf.PolicyLoss(is_correction_level="seq")(*policy)
    for fn in (trinity.DPOLossFn(), trinity.MIXPolicyLossFn(clip_range=0.2)):
        with pytest.raises(ValueError, match=r"statistics=.*it is missing"):
            fn(**data, global_valid_seqs=3, global_valid_toks=4)
    soft = torch.full((1, 2), 0.5)
    with pytest.raises(ValueError, match="soft labels need two reward_token_ids"):
        lightrft.PRMLoss(0, [1, 2, 3])(torch.zeros(1, 2), torch.zeros(1, 2, 5), soft)
    with pytest.raises(ValueError, match=r"labels \[4\] at placeholders are neither reward tokens"):
        lightrft.PRMLoss(0, [1, 2])(torch.zeros(1, 2), torch.zeros(1, 2, 5), torch.tensor([[1, 4]]))
