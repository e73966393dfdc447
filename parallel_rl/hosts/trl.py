"""Losses inside TRL's own trainers (1.16): GRPO's and DPO's, with the options of the trainer's config.

    class Trainer(DPOLossMixin, trl.DPOTrainer): ...

TRL's hidden factors: DDP averages over processes, and GRPOTrainer itself, or for DPO Hugging Face's Trainer, over
micro-batches. Its losses are means of the micro-batches' means; dapo, cispo and vespo divide by the whole step's tokens. The
mixins divide by the same counts, so a run gives TRL's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parallel_rl.hosts.function_loss import FunctionLoss, on_rows
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.policy import PolicyLossFn
from parallel_rl.losses.preference import DPOLossFn
from parallel_rl.metrics import Metrics

#: TRL's kinds of DPO by ours; ipo takes a response's mean
DPO_KINDS = {
    "sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "exo_pair": "exo", "nca_pair": "nca", "robust": "robust",
    "bco_pair": "bco", "sppo_hard": "sppo-hard", "apo_zero": "apo-zero", "apo_down": "apo-down", "discopop": "discopop",
}  # fmt: skip
_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "bnpo": "token-mean", "dr_grpo": "constant-length",
    "luspo": "seq-mean-token-sum", "dapo": "token-mean", "cispo": "token-mean", "vespo": "token-mean",
}  # fmt: skip


def _refuse(options: Mapping[str, object], supported: str) -> None:
    for name, value in options.items():
        if value:
            raise ValueError(f"{name} = {value!r} is not supported here; supported are {supported}")


def _check_trainer(cls: type, mixin: type) -> None:
    """Refuse a trainer that never calls the mixin's loss."""
    theirs = [base for base in cls.__mro__ if base is not cls and base.__module__.partition(".")[0] == "trl"]
    if theirs and not any("_compute_loss" in vars(base) for base in theirs):
        raise ValueError(
            f"{theirs[0].__name__} of this TRL has no _compute_loss, so that {mixin.__name__} would be without effect; "
            "supported is TRL 1.16"
        )


def _check_has(trainer: object, *names: str) -> None:
    lacking = [name for name in names if not hasattr(trainer, name)]
    if lacking:
        raise ValueError(f"{type(trainer).__name__} of this TRL has no {', '.join(lacking)}; supported is TRL 1.16")


class DPOLossMixin:
    """A `trl.DPOTrainer` whose loss is `DPOLossFn`: eleven kinds, and weighted sums of them.

    ValueError for a trainer of a TRL without this loss; in the first step for another kind, divergence or option.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _check_trainer(cls, DPOLossMixin)

    def _compute_loss(self, model, inputs, return_outputs=False):  # type: ignore[no-untyped-def]
        trainer: Any = self
        _check_has(
            self, "f_divergence_type", "ld_alpha", "use_weighting", "aux_loss_enabled", "precompute_ref_logps", "loss_types",
            "loss_weights", "beta", "label_smoothing",
        )  # fmt: skip
        _refuse(
            {
                "f_divergence_type": trainer.f_divergence_type != "reverse_kl" and trainer.f_divergence_type,
                "ld_alpha": trainer.ld_alpha,
                "use_weighting": trainer.use_weighting,
                "return_outputs": return_outputs,
            },
            "reverse_kl without length desensitization, weighting and outputs",
        )
        fields_of_loss = {"completion_mask", "ref_chosen_logps", "ref_rejected_logps"}
        kwargs = {name: x for name, x in inputs.items() if name not in fields_of_loss} | {"use_cache": False}
        if trainer.aux_loss_enabled:
            kwargs["output_router_logits"] = True
        mask = inputs["completion_mask"][:, 1:]
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        outputs = model(**kwargs, labels=labels, fused_lm_head=True)
        if trainer.precompute_ref_logps:
            reference = inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]
        else:
            reference = trainer.compute_ref_log_probs(
                trainer.model if trainer.ref_model is None else trainer.ref_model, inputs
            )
        config = {name: getattr(trainer, name) for name in ("beta", "label_smoothing")}
        kinds = dict(zip(trainer.loss_types, trainer.loss_weights, strict=True))
        logprobs = outputs.log_probs[:, -mask.shape[1] :]
        loss, ratios = dpo_loss(logprobs, mask, torch.cat(list(reference)), kinds, **config)
        if trainer.aux_loss_enabled:
            loss = loss + trainer.router_aux_loss_coef * outputs.aux_loss
        chosen, rejected = (trainer.beta * ratios).chunk(2)
        _log(trainer, {
            "rewards/chosen": chosen.mean(), "rewards/rejected": rejected.mean(),
            "rewards/accuracies": (chosen > rejected).double().mean(), "rewards/margins": (chosen - rejected).mean(),
        })  # fmt: skip
        return loss


def dpo_loss(
    logprobs: Tensor,
    mask: Tensor,
    reference: Tensor,
    kinds: Mapping[str, float],
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute TRL's DPO loss of rows [chosen; rejected], a mean over pairs, and the rows' log-ratios [2P].

    Policy and reference are summed in the precision of the log-probs, so that rounding errors cancel, which kinds with a steep
    gate (discopop) need.

    >>> logprobs, mask = torch.tensor([[-1.0], [-3.0]]), torch.ones(2, 1)
    >>> loss, _ = dpo_loss(logprobs, mask, torch.tensor([-2.0, -2.0]), {"hinge": 1.0}, beta=0.1)
    >>> round(loss.item(), 4)
    0.8

    Args:
        logprobs, mask: [2P, A] of completions. reference: [2P] sums of the reference's log-probs.
        kinds: TRL's names of the kinds to sum, with their weights; ValueError for one outside `DPO_KINDS`.
    """
    if not len(mask) == len(logprobs) == len(reference) or len(mask) % 2:
        raise ValueError(
            f"logprobs, mask and reference have {len(logprobs)}, {len(mask)} and {len(reference)} rows; pairs need the same "
            "even number of rows, the chosen ones first"
        )
    ratios = torch.where(mask != 0, logprobs, 0).sum(1) - reference
    means = ratios / mask.sum(1).clamp(min=1)
    order = torch.arange(len(mask), device=mask.device).view(2, -1).T.flatten()  # pairs are (even, odd) rows here
    total = torch.zeros_like(ratios[0])
    seqs = torch.tensor(len(mask), device=mask.device)
    for kind, weight in kinds.items():
        if kind not in DPO_KINDS:
            raise ValueError(f"loss_type = {kind!r} is not supported here; supported are {', '.join(DPO_KINDS)}")
        smoothed = {"label_smoothing": label_smoothing} if kind in ("robust", "exo_pair") else {}
        loss_fn = DPOLossFn({"kind": DPO_KINDS[kind], "reference_policy_kl_penalty": beta, **smoothed})
        # one token per row holds its log-ratio, a positive one as 0 minus a reference below 0
        row = (means if kind == "ipo" else ratios)[order, None]
        above = row.detach().clamp(min=0)
        data = {"response_mask": torch.ones_like(row), "reference_policy_logprobs": -above}
        loss, _ = loss_fn.from_logprobs(row - above, data=data, global_valid_seqs=seqs, global_valid_toks=seqs)
        total = total + weight * loss
    return total, ratios.detach()


class GRPOLossMixin:
    """`trl.GRPOTrainer` on `PolicyLossFn`: grpo, bnpo, dr_grpo, dapo, luspo, cispo, sapo and vespo.

    ValueError for a trainer of a TRL without this loss; in the first step for another kind or option.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _check_trainer(cls, GRPOLossMixin)

    def _compute_loss(self, model, inputs):  # type: ignore[no-untyped-def]
        trainer: Any = self
        _check_has(
            self, "top_entropy_quantile", "off_policy_mask_threshold", "_entropy_bonus_enabled", "aux_loss_enabled",
            "current_gradient_accumulation_steps", "_get_per_token_logps_and_entropies", "loss_type", "beta",
        )  # fmt: skip
        _refuse(
            {
                "top_entropy_quantile": trainer.top_entropy_quantile < 1 and trainer.top_entropy_quantile,
                "off_policy_mask_threshold": trainer.off_policy_mask_threshold,
                "entropy_coef": trainer._entropy_bonus_enabled,
                "vllm_importance_sampling_correction": trainer.use_vllm and trainer.vllm_importance_sampling_correction,
                "router_aux_loss_coef": trainer.aux_loss_enabled,
            },
            "the losses without entropy filter and bonus, off-policy mask, vLLM's correction and router loss",
        )
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        mask = inputs["completion_mask"]
        mask = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
        logprobs, entropy, _ = trainer._get_per_token_logps_and_entropies(
            model, ids, attention, mask.shape[1], compute_entropy=True
        )
        steps = trainer.current_gradient_accumulation_steps if trainer.model.training else 1
        data = {"response_mask": mask, "advantages": inputs["advantages"]}
        data["prev_logprobs"] = inputs.get("old_per_token_logps")
        if trainer.beta:
            data["reference_policy_logprobs"] = inputs["ref_per_token_logps"]
        tokens = mask.sum().clamp(min=1) * steps
        if trainer.loss_type in ("cispo", "dapo", "vespo"):
            tokens = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
            if trainer.model.training:
                tokens = tokens * steps / trainer.args.steps_per_generation
        counts = torch.tensor(len(mask) * steps, device=mask.device), tokens
        loss, metrics = grpo_loss(logprobs, entropy, data, counts, grpo_options(trainer))
        named = {"kl": "kl_penalty", "policy_loss": "policy_loss"}
        _log(trainer, {name: metrics[ours] * steps for name, ours in named.items() if ours in metrics})
        with torch.no_grad():
            _log(trainer, {"entropy": (entropy * mask).sum() / mask.sum().clamp(min=1)})
        return loss


def grpo_options(trainer: object) -> dict[str, object]:
    """Map a `trl.GRPOTrainer`'s arguments to options of `PolicyLossFn`; refuse an unsupported kind."""
    args = trainer.args  # type: ignore[attr-defined]
    kind = args.loss_type
    if kind not in _AGGREGATIONS:
        raise ValueError(f"loss_type = {kind!r} is not supported here; supported are {', '.join(_AGGREGATIONS)}")
    if args.importance_sampling_level not in ("token", "sequence"):
        raise ValueError(
            f"importance_sampling_level = {args.importance_sampling_level!r} is not supported here; supported are token and "
            "sequence"
        )
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    surrogate: dict[str, object] = {"name": "ppo", "clip_low": args.epsilon, "clip_high": high, "dual_clip": args.delta}
    if kind == "cispo":
        surrogate = {"name": "cispo", "clip_low": 1.0, "clip_high": high - 1}  # TRL bounds the ratio itself
    elif kind == "sapo":
        surrogate = {"name": "sapo", "tau_pos": args.sapo_temperature_pos, "tau_neg": args.sapo_temperature_neg}
    elif kind == "vespo":
        names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
        surrogate = {"name": "vespo"} | {name: getattr(args, f"vespo_{name}") for name in names}
    options: dict[str, object] = {"surrogate": surrogate, "aggregation": _AGGREGATIONS[kind]}
    if kind == "dr_grpo":
        options["max_length"] = trainer.max_completion_length  # type: ignore[attr-defined]
    if args.importance_sampling_level == "sequence" and kind != "vespo":
        options["ratio_level"] = "sequence-mean"
    if args.beta:
        corrected = "ratio" if args.importance_sampling_level == "sequence" else "old"
        options["kl"] = {
            "coefficient": args.beta, "estimator": "k3", "gradient": corrected if args.use_bias_correction_kl else "plain",
        }  # fmt: skip
    return options


def grpo_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    data: Mapping[str, Tensor | None],
    counts: tuple[Tensor, Tensor],
    options: Mapping[str, object],
) -> tuple[Tensor, Metrics]:
    """Compute TRL's GRPO loss of completions [B, A], divided by the counts of the call.

    data: response_mask and the fields of `PolicyLossFn`; advantages may be [B], prev_logprobs None (on policy). counts:
    sequences and tokens; TRL's fraction of the step's tokens may be below those of the call. options: see `grpo_options`.
    """
    fields = {name: x for name, x in data.items() if x is not None}
    advantages = fields["advantages"]
    if advantages.dim() == 1:
        fields["advantages"] = advantages[:, None].expand(logprobs.shape)
    fields.setdefault("prev_logprobs", logprobs.detach())
    seqs, tokens = counts
    divisor = torch.maximum(tokens, (fields["response_mask"] != 0).sum()).clamp(min=1)
    loss, metrics = PolicyLossFn(options).from_logprobs(
        logprobs, data=fields, global_valid_seqs=seqs, global_valid_toks=divisor, entropy=entropy
    )
    parts = {name: metrics.parts(name) for name in metrics}
    scaled = {name: x._replace(value=x.value * (divisor / tokens)) for name, x in parts.items() if x.per == "tokens"}
    return loss * (divisor / tokens), Metrics({**parts, **scaled})


def _log(trainer: object, numbers: Mapping[str, Tensor]) -> None:
    """Append each number's mean over processes to the trainer's metrics."""
    mode = "train" if trainer.model.training else "eval"  # type: ignore[attr-defined]
    for name, x in numbers.items():
        mean = trainer.accelerator.gather(x.detach().double().reshape(1)).mean().item()  # type: ignore[attr-defined]
        trainer._metrics[mode][name].append(mean)  # type: ignore[attr-defined]


def through(loss_fn: LossFn) -> FunctionLoss:
    """Run a loss of this library in the framework's call, as a subject of the law."""
    if not isinstance(loss_fn, PolicyLossFn):
        raise ValueError(f"--through trl takes the losses of GRPOTrainer, name: policy; got {type(loss_fn).__name__}")
    options = vars(loss_fn.config)

    def rows(logprobs: Tensor, mask: Tensor, data: Mapping[str, Tensor], seqs: Tensor, toks: Tensor) -> Tensor:
        fields = {name: data[name] for name in loss_fn.requirements.names}
        return grpo_loss(logprobs, None, {"response_mask": mask, **fields}, (seqs, toks), options)[0]

    return on_rows(rows, loss_fn.requirements.names)
