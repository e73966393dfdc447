"""A loss as compute_loss_func of Hugging Face's Trainer: its arithmetic, and the installed Trainer's steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from parallel_rl import NLLLoss, PolicyLossFn
from parallel_rl.hosts.transformers import compute_loss_func

V = 40


def test_the_trainers_arithmetic_over_micro_batches() -> None:
    """A sum over the micro-batches of the accumulation, whose tokens are counted together; −100 at NaN."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, V, generator=g, dtype=torch.float64)
    labels = torch.randint(0, V, (4, 6), generator=g)
    labels[0, :5], labels[1, 3:], labels[2] = -100, -100, -100
    logits[2] = torch.nan
    leaf = logits.clone().requires_grad_()
    call, count = compute_loss_func(NLLLoss()), (labels[:, 1:] != -100).sum()
    total = sum(
        call(SimpleNamespace(logits=leaf[c]), labels[c], num_items_in_batch=count) for c in (slice(1), slice(1, 4))
    )
    clean = logits.nan_to_num(0.0).requires_grad_()
    want = cross_entropy(clean[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / count
    torch.testing.assert_close(total, want)
    torch.testing.assert_close(torch.autograd.grad(total, leaf)[0], torch.autograd.grad(want, clean)[0])
    alone = call(SimpleNamespace(logits=leaf[:2]), labels[:2])  # evaluation: the tokens of the call
    torch.testing.assert_close(alone, cross_entropy(clean[:2, :-1].flatten(0, 1), labels[:2, 1:].flatten()))


def test_the_installed_trainer(tmp_path: Path) -> None:
    """Three steps with an accumulation of two over rows of different lengths end in the weights of the model's own loss."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed")
    pytest.importorskip("accelerate")
    g = torch.Generator().manual_seed(1)
    rows = []
    for length in (3, 8, 5, 8, 2, 7, 8, 4, 6, 8, 3, 5):
        ids = torch.randint(3, V, (8,), generator=g)
        place = torch.arange(8)
        scored = (place >= 1) & (place < length)
        rows.append({"input_ids": ids, "labels": torch.where(scored, ids, -100)})
    ends = []
    for loss in (None, compute_loss_func(NLLLoss())):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).double()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=1e-2, report_to=[], use_cpu=True, save_strategy="no", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, compute_loss_func=loss)
        trainer.train()
        ends.append(([one["loss"] for one in trainer.state.log_history if "loss" in one], list(model.parameters())))
    (want, right), (losses, weights) = ends
    assert losses == pytest.approx(want, rel=1e-6)
    for x, y in zip(weights, right, strict=True):
        assert (x - y).norm() <= 1e-6 * y.norm()


def test_what_does_not_fit() -> None:
    with pytest.raises(
        ValueError, match="reads advantages, prev_logprobs, which Hugging Face's Trainer does not hand over"
    ):
        compute_loss_func(PolicyLossFn())
    with pytest.raises(ValueError, match="divided by sequences; Hugging Face's Trainer counts tokens only"):
        compute_loss_func(NLLLoss({"aggregation": "seq-mean-token-mean"}))
    call, outputs = compute_loss_func(NLLLoss()), SimpleNamespace(logits=torch.zeros(2, 3, V))
    with pytest.raises(ValueError, match="labels = None: the batches must have labels"):
        call(outputs, None)
    with pytest.raises(ValueError, match=r"logits have shape \[2, 3, 40\], labels \[2, 4\]"):
        call(outputs, torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"one count a device of nn.DataParallel"):
        call(outputs, torch.zeros(2, 3, dtype=torch.int64), torch.tensor([4, 4]))
