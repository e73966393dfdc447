"""Compare one optimizer step of a user's Megatron model, on every layout, with one process: `check_step`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from parallel_rl.testing.whole_step.layouts import StepLayout

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from parallel_rl.testing.whole_step.check import WholeStepReport
    from parallel_rl.testing.whole_step.subject import Provider


def check_step(
    provider: Provider | TransformerConfig,
    config: TransformerConfig | Callable[[], TransformerConfig] | None = None,
    *,
    layouts: Sequence[StepLayout] | None = None,
    forward_step: Callable[..., object] | None = None,
    loss_callback: Callable[..., object] | None = None,
    setup: Callable[[TransformerConfig], object] | None = None,
    timeout: float = 120.0,
    show: Callable[[str], None] | None = None,
) -> WholeStepReport:
    """Run one optimizer step of a model on every layout and compare it with one process.

    The model's provider builds it at test size. Rows are ragged and unevenly masked. The check compares loss, metrics, each
    weight's gradient, the norm of Megatron's optimizer, and the weights after a clipped step.

        report = check_step(model_provider, config)
        print(report)

    Args:
        provider: a function that returns a GPTModel or this rank's chunks; it takes `config` and, if it has them, pre_process,
            post_process, vp_stage, vocab_size and max_sequence_length; or a config with `provide()`, as in Megatron-Bridge.
        config: at full size, or a function that returns it; None: `provider` is both.
        layouts: None is `default_layouts`.
        forward_step: of a Megatron script: (data_iterator, model) → (output, loss callback); None: this library's step.
        loss_callback: of a Megatron script, (loss_mask, losses[, model]), for a model that is run on labels.
        setup: called with the config on each rank before the model is built, such as Megatron-LM's `set_args`.
        timeout: seconds for one layout.
        show: called with a line as each layout ends.

    Raises:
        ValueError: the provider returns no model or needs a missing Transformer Engine, the config cannot shrink, sizes do not
            divide each other, or one process cannot run the step.
    """
    from parallel_rl.testing.whole_step.check import check_subject
    from parallel_rl.testing.whole_step.ranks import PoolRanks
    from parallel_rl.testing.whole_step.subject import StepSubject

    subject = StepSubject(provider, config, forward_step, loss_callback, setup)
    return check_subject(subject, PoolRanks(timeout), layouts, show)
