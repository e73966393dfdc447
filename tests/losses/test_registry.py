"""A user's objective in a few lines is a loss like those that are shipped."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from parallel_rl import (
    ClippedPGLossFn,
    DPOLossFn,
    LossFn,
    Metrics,
    NLLLoss,
    ObjectiveConfig,
    PreferenceLoss,
    SequencePackingLossWrapper,
    Statistics,
    TokenBatch,
    count_valid,
    get_loss,
    reduce_metrics,
    register_loss,
    register_objective,
)
from parallel_rl.losses.choice import LossConfig
from parallel_rl.losses.core.options import NoConfig
from parallel_rl.losses.registry import Level, losses
from parallel_rl.metrics import Mean, MinMax, Sum
from tests.losses import test_golden as golden

ROWS, WIDTH, VOCAB = 5, 9, 7
LENGTHS = [9, 4, 7, 2, 6]


def make() -> tuple[Tensor, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(11)
    inside = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    data = {
        "input_ids": torch.randint(0, VOCAB, (ROWS, WIDTH), generator=g),
        "token_mask": (inside & (torch.rand(ROWS, WIDTH, generator=g) < 0.8)).float(),
        "sample_mask": torch.tensor([1, 1, 0, 1, 1]),
        "rewards": torch.randn(ROWS, generator=g, dtype=torch.float64),
    }
    for name in ("advantages", "prev_logprobs", "generation_logprobs"):
        data[name] = torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64)
        data[name] = -data[name].abs() if name.endswith("logprobs") else data[name]
    return torch.randn(ROWS, WIDTH, VOCAB, generator=g, dtype=torch.float64), data


def run(loss_fn: LossFn, logits: Tensor, data: dict[str, Tensor]) -> tuple[float, Tensor, dict[str, float]]:
    leaf = logits.clone().requires_grad_()
    loss, metrics = loss_fn(leaf, data, *count_valid(data))
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad, {name: value.item() for name, value in reduce_metrics([metrics]).items()}


@register_objective("doc_reinforce", token_fields=("advantages",))
def Reinforce(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """REINFORCE."""
    return -batch["advantages"] * logprobs


@register_objective("doc_likelihood", level="sequence", sequence_fields=("rewards",))
def Likelihood(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """A sequence's likelihood, weighed by its reward."""
    return -batch.per_sequence("rewards") * (logprobs / 5).exp()


@register_objective("doc_entropy", needs_entropy=True)
def Entropy(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """The mean entropy, to be raised."""
    return -batch.entropy


def test_the_shipped_losses_are_there_by_name() -> None:
    shipped = {"clipped_pg": ClippedPGLossFn, "nll": NLLLoss, "preference": PreferenceLoss, "dpo": DPOLossFn}
    assert losses().items() >= shipped.items()
    assert get_loss("dpo") is DPOLossFn
    losses().clear()  # type: ignore[attr-defined]
    assert get_loss("nll") is NLLLoss  # what one gets is a copy


def test_the_decorator_gives_a_loss_class() -> None:
    assert issubclass(Reinforce, LossFn) and get_loss("doc_reinforce") is Reinforce
    assert Reinforce.__name__ == "Reinforce" and Reinforce.__doc__ == "REINFORCE."
    assert Reinforce.__module__ == __name__


@pytest.mark.parametrize(("aggregation", "token_level"), [("token-mean", True), ("seq-mean-token-mean", False)])
def test_a_token_objective_equals_the_shipped_loss(aggregation: str, token_level: bool) -> None:
    logits, data = make()
    config = {"disable_ppo_ratio": True, "reference_policy_kl_penalty": 0.0, "token_level_loss": token_level}
    loss, gradient, metrics = run(Reinforce({"aggregation": aggregation}, temperature=0.7), logits, data)
    want, want_gradient, _ = run(ClippedPGLossFn(config, temperature=0.7), logits, data)
    assert loss == pytest.approx(want, rel=1e-14) and loss != 0
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-12, atol=1e-15)
    assert metrics == {"loss": loss, "num_valid_samples": 4.0}


def dense_logprobs(logits: Tensor, data: dict[str, Tensor]) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """Log-probs and entropies [ROWS, WIDTH], token-aligned, and the (row, column) of the valid tokens."""
    log_p = torch.log_softmax(logits, -1).roll(1, 1)
    picked = log_p.gather(-1, data["input_ids"][..., None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    valid = [
        (i, t)
        for i in range(ROWS)
        for t in range(1, WIDTH)
        if data["sample_mask"][i] != 0 and data["token_mask"][i, t] != 0
    ]
    return picked, entropy, valid


def test_a_sequence_objective() -> None:
    logits, data = make()
    leaf = logits.clone().requires_grad_()
    picked, _, valid = dense_logprobs(leaf, data)
    terms = [
        -data["rewards"][i]
        * (sum([picked[place] for place in valid if place[0] == i], start=torch.zeros(())) / 5).exp()
        for i in range(ROWS)
        if data["sample_mask"][i] != 0
    ]
    want = torch.stack(terms).mean()
    want.backward()
    loss, gradient, _ = run(Likelihood(), logits, data)
    assert loss == pytest.approx(want.item(), rel=1e-13)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-11, atol=1e-14)


def test_entropy() -> None:
    logits, data = make()
    leaf = logits.clone().requires_grad_()
    _, entropy, valid = dense_logprobs(leaf, data)
    want = -torch.stack([entropy[place] for place in valid]).mean()
    want.backward()
    loss, gradient, _ = run(Entropy(), logits, data)
    assert loss == pytest.approx(want.item(), rel=1e-13)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", ["doc_reinforce", "doc_likelihood", "doc_entropy"])
def test_it_packs_like_any_loss(name: str) -> None:
    logits, data = make()
    loss, gradient, _ = run(get_loss(name)(), logits, data)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    leaf = logits.clone().requires_grad_()
    row = torch.cat([leaf[i, :length] for i, length in enumerate(LENGTHS)])[None]
    packed, _ = SequencePackingLossWrapper(get_loss(name)(), bounds)(row, data, *count_valid(data))
    packed.backward()
    assert packed.item() == pytest.approx(loss, rel=1e-13)
    torch.testing.assert_close(leaf.grad, gradient, rtol=1e-11, atol=1e-15)


def test_a_field_that_it_declares_is_asked_for() -> None:
    logits, data = make()
    with pytest.raises(ValueError, match="data lacks the field 'advantages'"):
        run(Reinforce(), logits, {name: value for name, value in data.items() if name != "advantages"})
    with pytest.raises(ValueError, match="data lacks the field 'rewards'"):
        run(Likelihood(), logits, {name: value for name, value in data.items() if name != "rewards"})


def test_a_class_of_a_user_is_registered_as_ours_are() -> None:
    @register_loss("doc_doubled")
    class Doubled(NLLLoss):
        def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
            loss, metrics = super().compute(batch)
            return 2 * loss, metrics

    assert get_loss("doc_doubled") is Doubled and losses()["doc_doubled"] is Doubled
    logits, data = make()
    assert run(LossConfig("doc_doubled").build(), logits, data)[0] == 2 * run(NLLLoss(), logits, data)[0]
    with pytest.raises(ValueError, match="a loss is registered as 'doc_doubled' already"):
        register_loss("doc_doubled")(Doubled)
    with pytest.raises(
        ValueError, match=r"takes a subclass of LossFn, got .*; a function is registered with @register_obj"
    ):
        register_loss("doc_function")(make)  # type: ignore[type-var]
    assert "doc_function" not in losses()


def test_an_objective_returns_metrics_beside_its_value() -> None:
    @register_objective("doc_measured", token_fields=("advantages",))
    def Measured(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Mean | MinMax | Sum]]:
        high, values = batch["advantages"] > 0, -batch["advantages"] * logprobs
        return values, {"high": Mean(high), "logprob": MinMax(logprobs), "number": Sum(high)}

    logits, data = make()
    loss, gradient, metrics = run(Measured(), logits, data)
    want, want_gradient, _ = run(Reinforce(), logits, data)
    assert loss == want and torch.equal(gradient, want_gradient)
    valid = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:].bool()
    chosen = logits.log_softmax(-1)[:, :-1].gather(-1, data["input_ids"][:, 1:, None])[..., 0][valid]
    high = (data["advantages"][:, 1:][valid] > 0).double()
    assert metrics["high"] == pytest.approx(high.mean().item()) and metrics["number"] == high.sum().item()
    assert metrics["logprob_min"] == pytest.approx(chosen.min().item())
    assert metrics["logprob_max"] == pytest.approx(chosen.max().item())


def test_metrics_of_an_objective_that_do_not_do() -> None:
    logits, data = make()
    for name, measure, message in (
        ("x", torch.ones(()), "'doc_wrong_x' returns x = Tensor as a metric; it must be a Mean, Sum or MinMax"),
        ("loss", Mean(torch.ones(())), "'doc_wrong_loss' returns the metric 'loss', which every loss has"),
        # a mean of its own would be this rank's, not the step's
        (
            "mine",
            Mean(torch.ones(())),
            r"'doc_wrong_mine' returns the metric 'mine' with shape \[\]; it must have one value",
        ),
    ):
        wrong = register_objective(f"doc_wrong_{name}")(lambda logprobs, batch, m={name: measure}: (logprobs, m))
        with pytest.raises(ValueError, match=message):
            run(wrong(), logits, data)


@pytest.mark.parametrize("level", ["token", "sequence", "pair"])
def test_values_of_an_objective_that_do_not_do(level: Level) -> None:
    """A mean was broadcast to every token, and trained on another loss without a word; others died of raw errors."""
    logits, data = make()
    logits, data = logits[:4], {name: field[:4] for name, field in data.items()}
    n = {"token": 4 * WIDTH, "sequence": 4, "pair": 2}[level]
    good = f"a tensor of shape [{n}]"
    for index, (wrong, found) in enumerate(
        [
            (lambda x: -x.mean(), "a tensor of shape []"),
            (lambda x: x[1:], f"a tensor of shape [{n - 1}]"),
            (lambda x: x[:, None], f"a tensor of shape [{n}, 1]"),
            (lambda x: None, "NoneType"),
            (lambda x: 3.0, "float"),
            (lambda x: [x], "list"),
            (lambda x: (x, None), f"{good}, NoneType"),
            (lambda x: (x, {}, x), f"{good}, dict, {good}"),
        ]
    ):
        name = f"doc_misshapen_{level}_{index}"
        loss_fn = register_objective(name, level=level)(lambda x, batch, wrong=wrong, n=n: wrong(x[:n]))()
        told = (
            f"objective '{name}' returns {found}; on level '{level}' it must return {good}, one loss a {level} and not"
        )
        with pytest.raises(ValueError, match=re.escape(told)):
            loss_fn(logits, data, *count_valid(data))
    mean = get_loss(f"doc_misshapen_{level}_0")()
    with pytest.raises(ValueError, match=r"shape \[\]; .* shape \[0\]"):  # a rank without rows
        mean(logits[:0], {name: field[:0] for name, field in data.items()}, *count_valid(data))


def test_names_and_levels_that_do_not_do() -> None:
    for taken in ("nll", "doc_reinforce"):
        with pytest.raises(ValueError, match=f"a loss is registered as '{taken}' already"):
            register_objective(taken)
    with pytest.raises(ValueError, match="level = 'word' is not valid; choose 'token', 'sequence' or 'pair'"):
        register_objective("doc_word", level="word")  # type: ignore[arg-type]
    assert "doc_word" not in losses()
    with pytest.raises(
        ValueError,
        match=r"'gspo' is not valid: it is a recipe, a loss with options; `parallel-rl train --recipe gspo` runs it",
    ):
        get_loss("gspo")  # "did you mean 'simpo'?"
    with pytest.raises(ValueError, match=r"loss = 'cliped_pg' is not valid; did you mean 'clipped_pg'\?"):
        get_loss("cliped_pg")
    with pytest.raises(ValueError, match=r"loss = '\?' is not valid; valid: .*clipped_pg"):
        get_loss("?")


def test_options_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown key aggregation = 'token-mean'"):
        Likelihood({"aggregation": "token-mean"})
    with pytest.raises(ValueError, match="max_length = 3 goes with aggregation 'constant-length' only"):
        Reinforce({"max_length": 3})


@dataclass(frozen=True)
class MarginConfig(ObjectiveConfig):
    margin: float = 1.0


def test_an_objective_with_options_of_its_own() -> None:
    @register_objective("doc_margin", config=MarginConfig)
    def Margin(logprobs: Tensor, batch: TokenBatch, config: MarginConfig) -> Tensor:
        return torch.relu(config.margin + logprobs)

    logits, data = golden.make()
    options = {"margin": 0.7, "aggregation": "seq-mean-token-mean"}
    loss, _ = get_loss("doc_margin")(options)(logits, data, *count_valid(data))
    rows = [[0.2, 0, 0], [0, 0.5, 0, 0.4], [0.3, 0.3]]
    assert loss.item() == pytest.approx(sum(sum(row) / len(row) for row in rows) / 3, abs=1e-12)
    with pytest.raises(ValueError, match="unknown key margn = 1 in MarginConfig; did you mean 'margin'"):
        get_loss("doc_margin")({"margn": 1})
    with pytest.raises(ValueError, match="config = NoConfig must extend ObjectiveConfig"):
        register_objective("doc_other", config=NoConfig)


def test_an_objective_on_the_whole_step() -> None:
    def collect(batch: TokenBatch) -> Statistics:
        return Statistics({"sum": batch.token_mean(batch.logprobs).value})

    @register_objective("doc_centred", collect=collect)
    def Centred(logprobs: Tensor, batch: TokenBatch) -> Tensor:
        return logprobs - batch.statistics["sum"]

    logits, data = golden.make()
    loss_fn, counts = get_loss("doc_centred")(), count_valid(data)
    loss, _ = loss_fn(logits, data, *counts, statistics=loss_fn.collect(logits, data, *counts).reduce())
    assert loss.item() == pytest.approx(0.0, abs=1e-15)
    with pytest.raises(ValueError, match="needs statistics="):
        loss_fn(logits, data, *counts)
