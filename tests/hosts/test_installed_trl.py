"""TRL's own trainers, where they are installed, beside ours in them: one call, and whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from parallel_rl.hosts.trl import DPO_KINDS, DPOLossMixin, GRPOLossMixin
from tests.hosts.test_trl import BETA, EPS, GRPO, A, B, completions


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
