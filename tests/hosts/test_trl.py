"""TRL's losses through ours: against its arithmetic, and against the installed trainers where there are any."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid as ls

from parallel_rl.hosts.trl import DPO_KINDS, DPOLossMixin, GRPOLossMixin, dpo_loss, grpo_loss, grpo_options

B, A = 6, 5
BETA, EPS = 0.3, 0.1


def completions(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([5, 2, 4, 3, 1, 5])[:, None]
    fields = {name: torch.randn(B, A, generator=g, dtype=torch.float64) * 0.3 - 1 for name in ("new", "old", "ref")}
    return {**fields, "mask": (torch.arange(A) < lengths).long(), "advantages": torch.randn(B, generator=g).double()}


DPO_BY_HAND: dict[
    str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
] = {  # D of chosen and rejected, their lengths
    "sigmoid": lambda c, r, n, m: -ls(BETA * (c - r)),
    "hinge": lambda c, r, n, m: (1 - BETA * (c - r)).clamp(min=0),
    "ipo": lambda c, r, n, m: (c / n - r / m - 1 / (2 * BETA)) ** 2,
    "exo_pair": lambda c, r, n, m: (
        torch.sigmoid(BETA * (c - r)) * (ls(BETA * (c - r)) - math.log(1 - EPS))
        + torch.sigmoid(BETA * (r - c)) * (ls(BETA * (r - c)) - math.log(EPS))
    ),
    "nca_pair": lambda c, r, n, m: -ls(BETA * c) - 0.5 * ls(-BETA * c) - 0.5 * ls(-BETA * r),
    "robust": lambda c, r, n, m: (-(1 - EPS) * ls(BETA * (c - r)) + EPS * ls(BETA * (r - c))) / (1 - 2 * EPS),
    "bco_pair": lambda c, r, n, m: -ls(BETA * c) - ls(-BETA * r),
    "sppo_hard": lambda c, r, n, m: (c - 0.5 / BETA) ** 2 + (r + 0.5 / BETA) ** 2,
    "apo_zero": lambda c, r, n, m: 1 - torch.sigmoid(BETA * c) + torch.sigmoid(BETA * r),
    "apo_down": lambda c, r, n, m: torch.sigmoid(BETA * c) + 1 - torch.sigmoid(BETA * (c - r)),
    "discopop": lambda c, r, n, m: (
        -ls(BETA * (c - r)) * (1 - torch.sigmoid(BETA * (c - r) / 0.05))
        + torch.exp(-BETA * (c - r)) * torch.sigmoid(BETA * (c - r) / 0.05)
    ),
}


@pytest.mark.parametrize("kind", DPO_KINDS)
def test_dpo_by_hand(kind: str) -> None:
    data = completions()
    new = data["new"].clone().requires_grad_()
    ref = (data["ref"] * data["mask"]).sum(1)
    c, r = ((new * data["mask"]).sum(1) - ref).chunk(2)
    n, m = data["mask"].sum(1).chunk(2)
    want = DPO_BY_HAND[kind](c, r, n, m).mean()
    loss, ratios = dpo_loss(new, data["mask"], ref, {kind: 1.0}, beta=BETA, label_smoothing=EPS)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(torch.autograd.grad(loss, new), torch.autograd.grad(want, new))
    torch.testing.assert_close(ratios, torch.cat([c, r]).detach())


@pytest.mark.parametrize("kind", ["discopop", "sppo_hard", "nca_pair"])
def test_dpo_of_float32_log_probs_starts_at_the_reference(kind: str) -> None:
    """A sum in another precision than the reference's leaves a log-ratio of 1e-6 where there is none; a steep gate shows it."""
    data = completions(4)
    new = (20 * data["new"]).float().requires_grad_()
    ref = (new.detach() * data["mask"]).sum(1)  # as TRL sums the reference's
    loss, _ = dpo_loss(new, data["mask"], ref, {kind: 1.0}, beta=BETA)
    exact = new.detach().double().requires_grad_()
    sums = (exact * data["mask"]).sum(1)
    c, r = (sums - sums.detach()).chunk(2)
    want = DPO_BY_HAND[kind](c, r, *data["mask"].sum(1).chunk(2)).mean()
    gradient, right = torch.autograd.grad(loss, new)[0].double(), torch.autograd.grad(want, exact)[0]
    assert (gradient - right).norm() <= 2e-7 * right.norm()


def arguments(kind: str, **more: object) -> SimpleNamespace:
    args = {
        "loss_type": kind, "epsilon": 0.2, "epsilon_high": 5.0 if kind == "cispo" else 0.28, "delta": None, "beta": 0.0,
        "importance_sampling_level": "token", "use_bias_correction_kl": True, "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0, **more,
    }  # fmt: skip
    return SimpleNamespace(args=SimpleNamespace(**args), max_completion_length=7)


def grpo_by_hand(data: dict[str, Tensor], new: Tensor, args: SimpleNamespace) -> Tensor:
    """Formulas of TRL 1.16, two micro-batches a step and 30 items in it."""
    mask, a = data["mask"], data["advantages"][:, None]
    y = new - data["old"]
    level = y if args.importance_sampling_level == "token" else ((y * mask).sum(-1) / mask.sum(-1))[:, None]
    rho = level.exp()
    kl = (data["ref"] - new).exp() - (data["ref"] - new) - 1
    kl = kl * rho if args.use_bias_correction_kl else kl
    if args.loss_type == "cispo":
        x = -rho.clamp(max=args.epsilon_high).detach() * a * new
    elif args.loss_type == "sapo":
        t = torch.where(a > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
        x = -torch.sigmoid(t * (rho - 1)) * 4 / t * a
    elif args.loss_type == "vespo":
        w = (y.detach() * mask).sum(-1, keepdim=True)
        k, lam = torch.where(a >= 0, 2.0, 3.0), torch.where(a >= 0, 3.0, 2.0)
        x = -(lam + k * w - lam * w.exp()).exp() * a * new
    else:
        top = rho if args.delta is None else rho.clamp(max=args.delta)
        x = -torch.minimum(top * a, rho.clamp(1 - args.epsilon, 1 + args.epsilon_high) * a)
    x = (x + args.beta * kl) * mask
    if args.loss_type in ("grpo", "sapo"):
        return (x.sum(-1) / mask.sum(-1)).mean() / 2
    if args.loss_type == "bnpo":
        return x.sum() / mask.sum() / 2
    if args.loss_type == "dr_grpo":
        return x.sum() / (B * 7) / 2
    return x.sum(-1).mean() / 2 if args.loss_type == "luspo" else x.sum() / 30


GRPO = [
    *(arguments(kind) for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")),
    arguments("grpo", beta=0.1), arguments("dapo", beta=0.1, use_bias_correction_kl=False), arguments("grpo", delta=1.5),
    arguments("luspo", importance_sampling_level="sequence"),
    arguments("grpo", importance_sampling_level="sequence", beta=0.1),
    arguments("cispo", importance_sampling_level="sequence", beta=0.1),
]  # fmt: skip


@pytest.mark.parametrize(
    "trainer", GRPO, ids=lambda x: f"{x.args.loss_type}-{x.args.importance_sampling_level}-{x.args.beta}"
)
def test_grpo_by_hand(trainer: SimpleNamespace) -> None:
    data = completions(1)
    new = data["new"].clone().requires_grad_()
    want = grpo_by_hand(data, new, trainer.args)
    tokens = data["mask"].sum() * 2 if trainer.args.loss_type == "bnpo" else torch.tensor(30.0)
    fields = {"response_mask": data["mask"], "advantages": data["advantages"], "prev_logprobs": data["old"]}
    fields["reference_policy_logprobs"] = data["ref"]
    loss, _ = grpo_loss(new, None, fields, (torch.tensor(2 * B), tokens), grpo_options(trainer))
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(torch.autograd.grad(loss, new), torch.autograd.grad(want, new))


def test_kinds_that_are_not_there() -> None:
    data = completions()
    with pytest.raises(ValueError, match="loss_type = 'aot' is not supported here; supported are sigmoid, hinge"):
        dpo_loss(data["new"], data["mask"], data["ref"].sum(1), {"aot": 1.0}, beta=0.1)
    with pytest.raises(ValueError, match="loss_type = 'dg' is not supported here; supported are grpo"):
        grpo_options(arguments("dg"))


def _tiny() -> tuple[object, object]:
    transformers = pytest.importorskip("transformers", reason="needs trl and transformers, which are not installed")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double(), transformers.LlamaForCausalLM(config).double()


def _same(
    ours: Callable[[], Tensor], theirs: Callable[[], Tensor], model: torch.nn.Module, tolerance: float = 1e-6
) -> None:
    found = []
    for call in (theirs, ours):
        model.zero_grad()
        loss = call()
        loss.backward()
        found.append(
            (loss.detach().double(), [p.grad.double().clone() for p in model.parameters() if p.grad is not None])
        )
    (want, right), (loss, gradients) = found
    assert abs(loss - want) <= tolerance * max(1.0, abs(want))
    for x, y in zip(gradients, right, strict=True):
        assert (x - y).norm() <= 2 * tolerance * max(1.0, y.norm())


def test_the_installed_dpo_trainer() -> None:
    """Loss and every gradient of TRL's own `_compute_loss` on its own batch, for each kind."""
    trl = pytest.importorskip("trl", reason="needs trl and transformers, which are not installed")
    theirs = trl.DPOTrainer._compute_loss
    model, reference = _tiny()
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 40, (4, 9), generator=g)
    mask = torch.zeros(4, 9, dtype=torch.int64)
    for row, (start, end) in enumerate([(3, 9), (4, 7), (2, 9), (5, 8)]):
        mask[row, start:end] = 1
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}

    class Ours(DPOLossMixin, trl.DPOTrainer):
        pass

    trainer = Ours.__new__(Ours)
    read = ("log_probs", "entropy", "mean_logits", "is_top1")
    trl_model = _fused(model, *read), _fused(reference, "log_probs")
    trainer.__dict__.update(_dpo_state(trl_model[0], trl_model[1]))
    for kind in DPO_KINDS:
        trainer.loss_types, trainer.loss_weights = [kind], [1.0]
        _same(
            lambda: trainer._compute_loss(trl_model[0], inputs, False),
            lambda: theirs(trainer, trl_model[0], inputs, False),
            trl_model[0],
        )


def _fused(model: torch.nn.Module, *outputs: str) -> torch.nn.Module:
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, outputs=outputs)
    return model


def _dpo_state(model: torch.nn.Module, reference: torch.nn.Module) -> dict[str, object]:
    from collections import defaultdict

    accelerate = pytest.importorskip("accelerate")
    return {
        "accelerator": accelerate.Accelerator(cpu=True), "model": model, "ref_model": reference, "beta": BETA,
        "label_smoothing": EPS, "f_divergence_type": "reverse_kl", "ld_alpha": None, "use_weighting": False,
        "aux_loss_enabled": False, "precompute_ref_logps": False, "_tp_size": 1, "_total_train_tokens": 0,
        "_metrics": {mode: defaultdict(list) for mode in ("train", "eval")},
        "args": SimpleNamespace(discopop_tau=0.05, gradient_checkpointing_kwargs=None),
    }  # fmt: skip


def test_the_installed_grpo_trainer() -> None:
    """The same for each kind of GRPO, at both levels of the ratio, with a KL whose bias is corrected and without."""
    trl = pytest.importorskip("trl", reason="needs trl and transformers, which are not installed")
    from collections import defaultdict

    import accelerate

    theirs = trl.GRPOTrainer._compute_loss
    model = _fused(_tiny()[0], "log_probs", "entropy")
    g = torch.Generator().manual_seed(2)
    data = completions(2)
    inputs = {
        "prompt_ids": torch.randint(3, 40, (B, 3), generator=g), "prompt_mask": torch.ones(B, 3, dtype=torch.int64),
        "completion_ids": torch.randint(3, 40, (B, A), generator=g), "completion_mask": data["mask"],
        "advantages": data["advantages"], "num_items_in_batch": torch.tensor(40.0),
        "old_per_token_logps": data["old"] - 2.6, "ref_per_token_logps": data["ref"] - 2.6,
    }  # fmt: skip

    class Ours(GRPOLossMixin, trl.GRPOTrainer):
        pass

    trainer = Ours.__new__(Ours)
    trainer.__dict__.update({
        "accelerator": accelerate.Accelerator(cpu=True), "model": model, "top_entropy_quantile": 1.0, "use_vllm": False,
        "aux_loss_enabled": False, "off_policy_mask_threshold": None, "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 2, "max_completion_length": 7, "_entropy_bonus_enabled": False,
        "_metrics": {mode: defaultdict(list) for mode in ("train", "eval")}, "model_kwarg_keys": set(),
    })  # fmt: skip
    for case in GRPO:
        args = SimpleNamespace(**vars(case.args), steps_per_generation=4, report_to=[])
        trainer.args, trainer.epsilon_low, trainer.epsilon_high = args, args.epsilon, args.epsilon_high
        for name in ("loss_type", "importance_sampling_level", "beta"):
            setattr(trainer, name, getattr(args, name))
        _same(lambda: trainer._compute_loss(model, inputs), lambda: theirs(trainer, model, inputs), model)


def test_whole_runs_of_the_installed_dpo_trainer(tmp_path: Path) -> None:
    """`train()` of two accumulated steps: each step's loss, and every gradient that the optimizer sees."""
    trl = pytest.importorskip("trl", reason="needs trl and transformers, which are not installed")
    transformers, datasets = pytest.importorskip("transformers"), pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(37))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    model, _ = _tiny()
    model.save_pretrained(tmp_path / "model")  # type: ignore[attr-defined]
    tokenizer.save_pretrained(tmp_path / "model")
    g = torch.Generator().manual_seed(0)

    def text(length: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(0, 37, (length,), generator=g).tolist())

    rows = [{"prompt": text(3), "chosen": " " + text(2 + i % 4), "rejected": " " + text(6 - i % 4)} for i in range(8)]

    class Seen(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.gradients: list[Tensor] = []

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):  # type: ignore[no-untyped-def]
            self.gradients += [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]

    found = []
    for trainer_class in (trl.DPOTrainer, type("Ours", (DPOLossMixin, trl.DPOTrainer), {})):
        arguments = trl.DPOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, beta=BETA,
            learning_rate=1e-2, report_to=[], use_cpu=True, bf16=False, save_strategy="no", logging_steps=1,
            disable_tqdm=True, gradient_checkpointing=False,
        )  # fmt: skip
        seen = Seen()
        policy = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
        trainer = trainer_class(
            model=policy, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
            callbacks=[seen],
        )  # fmt: skip
        trainer.train()
        found.append(([one["loss"] for one in trainer.state.log_history if "loss" in one], seen.gradients))
    (want, right), (losses, gradients) = found
    assert len(losses) == 2 and losses == pytest.approx(want, rel=1e-6) and len(gradients) == len(right) > 0
    for x, y in zip(gradients, right, strict=True):
        assert (x - y).norm() <= 1e-6 * max(1.0, y.norm())
