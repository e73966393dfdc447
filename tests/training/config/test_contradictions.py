"""Options of one recipe that do not go together: each pair is refused by name before anything is loaded."""

from __future__ import annotations

import pytest

from parallel_rl.training.config.load import load_config
from tests.training.helpers import DATA, run

ROLLOUTS = f"{{rollouts: {DATA}/arithmetic_rollouts.jsonl}}"
RECORDED = {"data": ROLLOUTS, "warmup": "null", "evaluation": "null"}
WARMUP = "{steps: 1, batch_size: 2, optimizer: {lr: 1}}"
SERVER = "{url: 'http://x', model: m}"
EXAMPLES = f"{DATA}/arithmetic_careless.jsonl"


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("sft", {"warmup": WARMUP}, "the section 'warmup' has no effect with 'sft'"),
        ("grpo", {"data__system": "be brief"}, "data.system = 'be brief' needs a chat template"),
        ("grpo", {"rl__group_size": 1, "rl__advantages__singleton": "error"}, "rl.group_size = 1 makes groups of one"),
        ("grpo", {**RECORDED, "rl__record": "true"}, "rl.record = True has no effect with data.rollouts"),
        ("grpo", {**RECORDED, "rl__server": SERVER}, "rl.server = .* has no effect with data.rollouts"),
        (
            "remax",
            RECORDED,
            "rl.advantages.name = 'remax' reads the rewards of greedy answers, which data.rollouts lacks",
        ),
        (
            "dpo",
            {"batch__micro_batch_size": 3},
            "batch.micro_batch_size = 3 must be even: rows of one record stay together",
        ),
        (
            "grpo",
            {"batch": "{share_prefixes: true}"},
            "batch: share_prefixes = True stores sequences in one row; set packing to true",
        ),
        (
            "grpo",
            {
                "batch": "{share_prefixes: true, packing: true}",
                "model__experts": "{number: 4, ffn_hidden: 16}",
                "model__aux_loss": 0.1,
            },
            "batch.share_prefixes = True with model.aux_loss = 0.1 would count a shared token once",
        ),
        ("ppo", {"model__tie_embeddings": "true"}, "model.tie_embeddings = True is incompatible with a scalar head"),
        (
            "reward_model",
            {"evaluation": "{}", "data__held_out": EXAMPLES},
            "the section 'evaluation' has no effect on a reward model",
        ),
        (
            "reward_model",
            {"warmup": WARMUP, "data__examples": EXAMPLES},
            "the section 'warmup' has no effect on a reward model",
        ),
        (
            "reward_model",
            {"model__fused_head": "true"},
            "model.fused_head = True is incompatible with preference.loss.name",
        ),
        (
            "sft",
            {"parallel": "{use_distributed_optimizer: true}", "run__dtype": "float64"},
            "incompatible with run.dtype",
        ),
        (
            "ppo",
            {"rl__critic__loss": "{name: nll}"},
            "rl.critic: loss.name = 'nll' reads logits; a critic has a scalar head",
        ),
        ("ppo", {"rl__critic": "null"}, "advantages.name = 'gae' reads values, which 'critic' gives; it is missing"),
        (
            "grpo",
            {"rl__failed_samples": "{timeout: 5}", "reward": "http://judge:80"},
            "rl.failed_samples.timeout = 5 has no effect on a server, which reward.timeout limits",
        ),
        (
            "grpo",
            {"rl__failed_samples": "{timeout: 600}"},
            "rl.failed_samples.timeout = 600 must be below run.timeout = 600",
        ),
        ("grpo", {"rl__reward_kl": "k1"}, "reward_kl = 'k1' has no effect with advantages.kl_coefficient = 0"),
        ("grpo", {"rl__advantages__kl_coefficient": 0.1}, "kl_coefficient = 0.1 needs reward_kl, the estimator"),
        ("grpo", {"rl__experts": 8}, "experts = 8 has no effect with loss.name = 'policy', which reads no expert_mask"),
        (
            "grpo",
            {"rl__updates": 2, "rl__loss__options__on_policy": "true"},
            "loss 'policy' on policy is incompatible with updates = 2",
        ),
        (
            "distillation_topk",
            {"distillation__teacher": "x", "distillation__loss": "{name: nll}"},
            "top_k = 8 has no effect with loss.name = 'nll'",
        ),
        ("sft", {"parallel__expert_tensor": 0}, "parallel: expert_tensor = 0 must be at least 1"),
        ("sft", {"sft__optimizer__final_fraction": 2}, r"final_fraction = 2.0 must lie in \[0, 1\]"),
        ("sft", {"sft__optimizer__final_fraction": ".nan"}, r"final_fraction = nan must lie in \[0, 1\]"),
        ("grpo", {"evaluation__passing": ".nan"}, "evaluation: passing = nan must be a finite number"),
        (
            "grpo",
            {"rl__loss__options__log_ratio_clamp": 0},
            "log_ratio_clamp = 0.0 must be positive, or None for no clamp",
        ),
        (
            "gpg",
            {"rl__loss__options__on_policy": "true"},
            "on_policy = True has no effect with the surrogate .*, which has no ratio",
        ),
    ],
)
def test_a_recipe_with_what_does_not_fit_it(recipe: str, overrides: dict[str, object], message: str) -> None:
    path, *arguments = run(f"recipes/{recipe}.yaml", **overrides)
    with pytest.raises(ValueError, match=message):
        load_config(path, arguments)
