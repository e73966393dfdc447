"""A NaN of a valid token: the loss is NaN, and the norm of the gradient, which an optimizer's guard looks at, is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from parallel_rl import set_validation
from parallel_rl.compat import openrlhf, trinity
from parallel_rl.losses.choice import LossConfig
from parallel_rl.validation import get_validation
from parallel_rl.vocab.linear.lm_head import LMHeadInput

ROWS, WIDTH, WORDS, HIDDEN = 2, 4, 6, 8
CASES: list[tuple[str, dict, str]] = [
    ("policy", {}, "prev_logprobs"),
    ("policy", {"log_ratio_clamp": 20.0}, "prev_logprobs"),
    ("policy", {"ratio_level": "sequence-mean"}, "prev_logprobs"),
    ("policy", {"surrogate": {"name": "dppo"}}, "prev_logprobs"),
    ("policy", {"kl": {"coefficient": 0.1, "output_clamp": 10.0}}, "reference_policy_logprobs"),
    ("clipped_pg", {"ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "reference_policy_kl_penalty": 0.0}, "prev_logprobs"),
    ("nll", {}, "output"),
    ("policy", {}, "output"),
]


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    """As on a GPU, where nobody looks at values before."""
    mode = get_validation()
    set_validation("never")
    yield
    set_validation(mode)


@pytest.mark.parametrize("form", ["logits", "hidden states", "log-probs"])
@pytest.mark.parametrize(("name", "options", "field"), CASES)
def test_the_gradient_of_a_loss_that_is_nan_is_not_finite(name: str, options: dict, field: str, form: str) -> None:
    """Clamps of ratios make a gradient of 0 of it, with which an optimizer would go on; a NaN in a masked place is nothing."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def run(place: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        generator.manual_seed(3)
        data = {
            "input_ids": torch.randint(0, WORDS, (ROWS, WIDTH), generator=generator),
            "token_mask": torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]]),
            "sample_mask": torch.ones(ROWS),
            "advantages": draw(ROWS, WIDTH),
            **{key: -1 - draw(ROWS, WIDTH).abs() for key in ("prev_logprobs", "generation_logprobs")},
            "reference_policy_logprobs": -1 - draw(ROWS, WIDTH).abs(),
        }
        sizes = {"logits": (WORDS,), "hidden states": (HIDDEN,), "log-probs": ()}[form]
        output, weight = draw(ROWS, WIDTH, *sizes), draw(WORDS, HIDDEN)
        output = -output.abs() if form == "log-probs" else output
        if field == "output":
            output[place[0], place[1] - (form != "log-probs")] = torch.nan  # predicts the token, or is its log-prob
        else:
            data[field][place] = torch.nan
        output.requires_grad_()
        loss_fn = LossConfig(name, options).build()
        counts = {"global_valid_seqs": torch.tensor(ROWS), "global_valid_toks": torch.tensor(5)}
        if form == "log-probs":
            loss, _ = loss_fn.from_logprobs(output, data=data, **counts)
        else:
            loss, _ = loss_fn(LMHeadInput(output, weight) if form == "hidden states" else output, data, **counts)
        loss.backward()
        assert output.grad is not None
        return loss.detach(), output.grad

    loss, gradient = run((0, 2))
    assert loss.isnan() and not gradient.norm().isfinite()
    loss, gradient = run((1, 3))
    assert loss.isfinite() and gradient.isfinite().all() and gradient.norm() > 0


def test_the_losses_of_other_projects_have_it_too() -> None:
    """Their ratios are clamped as their origins' are; a NaN of the current log-probs must not end as a gradient of 0."""
    old, advantages, mask = -torch.ones(1, 3), torch.ones(1, 3), torch.ones(1, 3)

    def gradient(call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        leaf = torch.tensor([[-1.0, torch.nan, -1.0]], requires_grad=True)
        (found,) = torch.autograd.grad(call(leaf), leaf)
        return found

    ppo = trinity.PPOPolicyLossFn(clip_range=0.2)
    assert not gradient(lambda x: ppo(x, old, mask, advantages)[0]).norm().isfinite()
    clipped = openrlhf.PolicyLoss()
    assert not gradient(lambda x: clipped(x, old, advantages, mask)[0]).norm().isfinite()
