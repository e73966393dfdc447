"""Configs of NeMo-RL and verl in our keys: what is carried over, dropped, said; what cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from parallel_rl.cli import main
from parallel_rl.config.strict import configure
from parallel_rl.hosts.ported import Ported
from parallel_rl.losses.choice import LossConfig
from parallel_rl.port.options import options_of, read_host_config
from parallel_rl.training.config.algorithms import RLConfig
from tests.port.test_nemo_rl import NEMO

VERL = {
    "actor_rollout_ref": {
        "actor": {
            "clip_ratio_high": 0.28, "use_kl_loss": True, "kl_loss_type": "low_var_kl", "ppo_mini_batch_size": 64,
            "use_dynamic_bsz": True, "loss_agg_mode": "seq-mean-token-sum-norm", "clip_ratoi": 1,
        },
        "rollout": {"n": 8, "top_k": -1},
    },
    "data": {"train_batch_size": 256, "max_response_length": 1024},
    "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}},
}  # fmt: skip


NEMO_PPO = {
    "ppo": {
        "num_prompts_per_step": 8, "num_generations_per_prompt": 4, "policy_training_start_step": 3,
        "adv_estimator": {"name": "gae", "gae_lambda": 0.95, "gae_gamma": 1, "normalize_advantages": True,
                          "gae_lambda_value": 1.0, "gae_lambda_policy": None, "length_adaptive_alpha": 0.05},
    },
    "loss_fn": {"reference_policy_kl_penalty": 0}, "value_loss_fn": {"scale": 0.4, "cliprange": 0.2},
    "value": {"optimizer": {"kwargs": {"lr": 3e-6}}},
}  # fmt: skip
VERL_PPO = {
    "algorithm": {"adv_estimator": "gae", "lam": 0.9},
    "actor_rollout_ref": {"actor": {"loss_agg_mode": "seq-mean-token-mean", "ppo_mini_batch_size": 8}, "rollout": {"n": 4}},
    "data": {"train_batch_size": 8}, "trainer": {"critic_warmup": 2},
    "critic": {"optim": {"lr": 3e-6}, "cliprange_valeu": 0.5},
}  # fmt: skip


def test_a_value_function() -> None:
    """A run with GAE is refused without its critic, and whitened advantages are another gradient than those as they are."""
    shared = {"steps": 1, "optimizer": {"lr": 1e-3}}
    nemo, verl = (options_of(given).config["rl"] for given in (NEMO_PPO, VERL_PPO))
    made = configure(RLConfig, {**nemo, **shared})  # type: ignore[dict-item]
    assert made.critic is not None and made.critic.optimizer.lr == 3e-6 and made.critic.warmup_steps == 3
    assert made.critic.loss.options == {"scale": 0.4, "cliprange": 0.2}
    plain = options_of({**NEMO_PPO, "value_loss_fn": {"cliprange": 0}}).config["rl"]["critic"]  # type: ignore[index]
    assert plain["loss"]["options"] == {}  # ours takes null for none
    wanted = {"name": "gae", "gamma": 1, "length_adaptive": 0.05, "value_lam": 1.0, "whiten": "unbiased"}
    assert nemo["advantages"] == wanted  # type: ignore[index]
    made = configure(RLConfig, {**verl, **shared})  # type: ignore[dict-item]
    assert made.critic is not None and made.critic.optimizer.lr == 3e-6 and made.critic.warmup_steps == 2
    assert made.critic.loss.options == {"cliprange": 0.5, "aggregation": "seq-mean-token-mean"}
    assert verl["advantages"] == {"name": "gae", "gamma": 1.0, "lam": 0.9, "whiten": "unbiased"}  # type: ignore[index]
    assert "critic.cliprange_valeu = 0.5 (did you mean 'cliprange_value'?)" in options_of(VERL_PPO).unknown


def test_verl() -> None:
    ported = options_of(VERL)
    rl = ported.config["rl"]
    assert rl["loss"]["options"] == {  # type: ignore[index]
        "surrogate": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}, "log_ratio_clamp": 20.0,
        "aggregation": "constant-length", "max_length": 1024,
        "kl": {"coefficient": 0.001, "estimator": "low_var_kl", "gradient": "plain"},
        "importance": {"level": "token", "mode": "tis", "high": 2.0},
    }  # fmt: skip
    assert (rl["prompts"], rl["group_size"], rl["updates"]) == (256, 8, 4)  # type: ignore[index]
    assert ported.config["batch"] == {"packing": True, "tokens": 16384}
    configure(LossConfig, rl["loss"])  # type: ignore[index]
    said = "\n".join(ported.lines())
    assert "clip_ratio_c = 3.0: on by default in verl, off here" in said and "clip_ratoi = 1 (did you mean" in said


@pytest.mark.parametrize(
    "mode", ["gspo", "sapo", "gpg", "cispo", "geo_mean", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "dro"]
)
def test_every_loss_mode_of_verl_is_a_loss(mode: str) -> None:
    policy = {"loss_mode": mode, "clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "dro_beta": 0.1}
    actor = {"policy_loss": policy}
    ported = options_of({"actor_rollout_ref": {"actor": actor}})
    rl = ported.config["rl"]
    configure(LossConfig, rl["loss"])  # type: ignore[index]
    if mode == "sapo":  # has an aggregation of its own, but its entropy has not
        shaped = {"policy_loss": policy, "loss_agg_mode": "token-mean", "entropy_coeff": 0.1}
        assert (
            "averages each sequence, KL and entropy by this"
            in options_of({"actor_rollout_ref": {"actor": shaped}}).left[0]
        )
    mean = rl["loss"]["options"]["aggregation"] == "seq-mean-token-mean"  # type: ignore[index]
    assert mean == (mode in ("sapo", "geo_mean"))


def of_verl(algorithm: dict | None = None, **sections: dict) -> Ported:
    """A config with what is in the text of each section; its rl must be one that this trainer takes."""
    ported = options_of({"actor_rollout_ref": sections, "algorithm": {"adv_estimator": "grpo", **(algorithm or {})}})
    required = {"steps": 1, "optimizer": {"lr": 1e-3}, "prompts": 8, "group_size": 4, "updates": 1}
    configure(RLConfig, {**ported.config["rl"], **required})  # type: ignore[dict-item]
    return ported


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({}, {"reward_kl": "k1"}),
        ({"kl_penalty": "mse", "kl_ctrl": {"kl_coef": 0.1, "target_kl": 9}}, {"reward_kl": "k2"}),
        (
            {"kl_penalty": "k3+", "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1}},
            {"reward_kl": "low_var_kl", "kl_controller": {"target": 0.1, "horizon": 10000}},
        ),
    ],
)
def test_a_kl_in_the_reward_of_verl(given: dict, ours: dict, estimator: str) -> None:
    ported = of_verl({"use_kl_in_reward": True, "adv_estimator": estimator, **given})
    rl: dict = ported.config["rl"]  # type: ignore[assignment]
    assert {key: rl[key] for key in rl if "kl" in key} == ours
    assert rl["advantages"]["kl_coefficient"] == given.get("kl_ctrl", {}).get("kl_coef", 0.001)
    assert any("whole KL taken off" in line for line in ported.differs) == (estimator == "grpo") and not ported.unknown
    assert any("here of the mean over tokens" in line for line in ported.differs) == ("kl_controller" in ours)


def test_a_kl_in_the_reward_that_weighs_nothing() -> None:
    ported = of_verl({"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.0, "typ": "adaptive"}})
    assert ported.dropped == ("algorithm.use_kl_in_reward = True has no effect with kl_ctrl.kl_coef = 0",)
    assert ported.unknown == ("algorithm.kl_ctrl.typ = 'adaptive' (did you mean 'type'?)",)


@pytest.mark.parametrize(
    ("threshold", "ours"),
    [
        ("0.5_5.0", {"mode": "icepop", "low": 0.5, "high": 5.0}),
        (3.0, {"mode": "tis", "high": 3.0}),
        ("2.0", {"mode": "tis", "high": 2.0}),
    ],
)
def test_importance_weights_of_verl(threshold: object, ours: dict) -> None:
    given = {
        "rollout_is": "sequence",
        "rollout_is_threshold": threshold,
        "rollout_is_batch_normalize": True,
        "rollout_rs": "k1",
    }
    ported = of_verl({"rollout_correction": given})
    options = ported.config["rl"]["loss"]["options"]  # type: ignore[index]
    assert options["importance"] == {"level": "sequence-sum", "normalize": True, **ours}
    assert any("by their mean over sequences; ours by that over tokens" in line for line in ported.differs)
    assert ported.left == ("algorithm.rollout_correction.rollout_rs = 'k1': write it as rejection.rules by hand",)


def test_estimators_as_verl_has_them() -> None:
    """Ours of the same names scale by other counts, and have a baseline where the longest answer is alone."""
    made = {
        name: of_verl({"adv_estimator": name}).config["rl"]["advantages"] for name in ("gpg", "optimal_token_baseline")
    }  # type: ignore[index]
    assert made["gpg"] == {"name": "gpg", "scale": "nonzero"}
    assert made["optimal_token_baseline"] == {"name": "optimal_token_baseline", "handle_zero_tail": True}
    weights = {"rollout_is": "token", "rollout_is_threshold": 1.5}
    weighed = of_verl({"adv_estimator": "optimal_token_baseline", "rollout_correction": weights})
    assert weighed.config["rl"]["advantages"]["importance_cap"] == 1.5  # type: ignore[index]
    weights["rollout_is"] = "sequence"
    left = of_verl({"adv_estimator": "optimal_token_baseline", "rollout_correction": weights}).left
    assert left[0].endswith("optimal_token_baseline reads weights of tokens with one bound here (importance_cap)")


def test_dynamic_sampling_of_verl() -> None:
    """DAPO came out without it, and nothing said so; nor of what this trainer lacks."""
    ported = of_verl({"filter_groups": {"enable": True, "metric": "acc", "max_num_gen_batches": 5}, "use_pf_ppo": True})
    assert ported.config["rl"]["dynamic_sampling"] == {"max_rounds": 5} and not ported.unknown  # type: ignore[index]
    assert any("filter_groups keeps prompts whose rewards differ" in line for line in ported.differs)
    assert ported.left == ("algorithm.use_pf_ppo = True: not carried over by this port",)
    unbounded = of_verl({"filter_groups": {"enable": True, "max_num_gen_batches": 0}}).config["rl"]
    assert unbounded["dynamic_sampling"] == {}  # type: ignore[index]
    assert "dynamic_sampling" not in of_verl({"filter_groups": {"enable": False}}).config["rl"]  # type: ignore[operator]


def test_what_else_a_config_of_verl_holds() -> None:
    actor = {"entropy_coeff": 0.01, "ppo_epochs": 2, "ppo_micro_batch_size_per_gpu": 4, "clip_ratio_c": 5.0}
    actor |= {"use_kl_loss": True, "kl_loss_coef": 0.0, "policy_loss": {"loss_mode": "cispo"}}
    ported = of_verl(
        {"norm_adv_by_std_in_grpo": False, "adv_estimator": "rloo"},
        actor=actor, model={"path": "/m"}, rollout={"top_k": 40, "top_p": 0.9},
    )  # fmt: skip
    assert ported.config["model"] == {"hf": "/m"} and ported.config["batch"] == {"micro_batch_size": 4}
    assert ported.config["sampling"] == {"max_new_tokens": 512, "temperature": 1.0, "top_k": 40, "top_p": 0.9}
    assert ported.config["rl"]["loss"]["options"]["entropy_bonus"] == 0.01  # type: ignore[index]
    assert ported.left == ("actor_rollout_ref.actor.ppo_epochs = 2: the samples of a step are read once here",)
    assert [line.split(" = ")[0].rpartition(".")[2] for line in ported.dropped] == [
        "clip_ratio_c", "use_kl_loss", "norm_adv_by_std_in_grpo",
    ]  # fmt: skip
    advantages = of_verl({"norm_adv_by_std_in_grpo": False}).config["rl"]["advantages"]  # type: ignore[index]
    assert advantages == {"name": "dr_grpo"}
    assert of_verl({"adv_estimator": "reinforce_plus_plus", "gamma": 0.9}).config["rl"]["advantages"]["gamma"] == 0.9  # type: ignore[index]


def test_the_layout_of_megatron_in_verl() -> None:
    """The model stayed whole on every rank, without a word; a row holds what its context ranks have room for together."""
    megatron = {"tensor_model_parallel_size": 2, "context_parallel_size": 4, "expert_model_parallel_size": 1}
    megatron |= {"expert_tensor_parallel_size": None, "sequence_parallel": True, "use_dist_checkpointing": False}
    actor = {"megatron": megatron, "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 1000}
    ported = of_verl(actor={**actor, "strategy": "megatron"})
    assert ported.config["parallel"] == {"tensor": 2, "context": 4, "sequence_parallel": True}
    assert ported.config["batch"] == {"packing": True, "tokens": 4000} and not ported.unknown
    again = of_verl(actor={"fsdp_config": {"ulysses_sequence_parallel_size": 4}, "ulysses_sequence_parallel_size": 1})
    assert again.config["parallel"] == {"context": 4}  # the actor's key is the older one
    router = {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss", "moe_grouped_gemm": True}
    moe = of_verl(actor={"strategy": "megatron", "megatron": {"override_transformer_config": router}})
    kinds = [row.kind for row in moe.rows if ".override_transformer_config." in row.key]
    assert moe.config["model"]["aux_loss"] == 0.01 and kinds == ["carried", "equal", "no_effect"]  # type: ignore[index]
    fsdp = of_verl(actor={**actor, "strategy": "fsdp"}).config
    assert "parallel" not in fsdp and fsdp["batch"] == {"packing": True, "tokens": 1000}


def test_unknown_keys_of_verl_in_any_section() -> None:
    """A misspelt length or temperature would leave the default in its place, silently."""
    config = {
        "actor_rollout_ref": {"rollout": {"temprature": 0.7}, "rolout": {}}, "data": {"max_respons_length": 9},
        "algorithm": {"kl_ctrl": {"kl_coeff": 1}}, "datta": {},
    }  # fmt: skip
    unknown = " ".join(options_of(config).unknown)
    for key in ("rollout.temprature", "rolout", "data.max_respons_length", "kl_ctrl.kl_coeff", "datta"):
        assert key in unknown


def test_files_defaults_and_references(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("policy: {rows: 4, size: 2}\nloss_fn: {ratio_clip_min: 0.1}\n")
    (tmp_path / "run.yaml").write_text(
        "defaults: base.yaml\npolicy: {size: 8, twice: '${.size}', whole: '${policy.twice}', mul: '${mul:2, ${.twice}}', "
        "text: 'at-${.size}', gone: '${oc.env:HOME}'}\n"
    )
    tree = read_host_config(tmp_path / "run.yaml")
    assert tree["policy"] == {
        "rows": 4,
        "size": 8,
        "twice": 8,
        "whole": 8,
        "mul": 16,
        "text": "at-8",
        "gone": "${oc.env:HOME}",
    }


def test_references_with_another_value_as_verl_writes_them(tmp_path: Path) -> None:
    """Its own config of a run with a critic, whose aggregation is such a text, was refused."""
    select = "${oc.select:actor_rollout_ref.actor.%s}"
    critic = {"loss_agg_mode": select % "loss_agg_mode,token-mean", "cliprange_value": select % "clip_value, 0.25"}
    skip = {
        "gone": select % "gone", "near": "${oc.select:.none,null}", "here": "${oc.select:.steps,7}", "steps": 5,
        "nested": f"${{oc.select:a.b, {select % 'clip_value'}}}", "other": "${oc.select:a.b,${oc.select:.steps, null}}",
        "both": "${oc.select:a,${b}}/${oc.select:c,${d}}",
    }  # fmt: skip
    text = {**VERL_PPO, "critic": critic, "skip": skip}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(text))
    tree = read_host_config(tmp_path / "config.yaml")
    both = skip.pop("both")  # a text of two references stays
    assert tree["skip"] == {"gone": None, "near": None, "here": 5, "steps": 5, "nested": None, "other": 5, "both": both}
    made = configure(RLConfig, {**options_of(tree).config["rl"], "steps": 1, "optimizer": {"lr": 1e-3}})  # type: ignore[dict-item]
    assert made.critic is not None
    assert made.critic.loss.options == {"cliprange": 0.25, "aggregation": "seq-mean-token-mean"}


def test_many_references_to_many_references(tmp_path: Path) -> None:
    """Resolved once each: 2**40 copies would not end."""
    links = "".join(f"k{i}: {{a: '${{k{i + 1}}}', b: '${{k{i + 1}}}'}}\n" for i in range(40))
    (tmp_path / "run.yaml").write_text(links + "k40: 1\n")
    assert read_host_config(tmp_path / "run.yaml")["k39"] == {"a": 1, "b": 1}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "grpo.yaml", tmp_path / "ours.yaml"
    file.write_text(yaml.safe_dump(NEMO))
    assert main(["port", str(file), "--out", str(out)]) == 0
    assert yaml.safe_load(out.read_text())["rl"]["group_size"] == 16 and "dropped" in capsys.readouterr().err
    assert main(["port", str(file)]) == 0
    assert capsys.readouterr().out.startswith("# From NeMo-RL: grpo.yaml\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {}\ntrainer: {}", "model, trainer, which are of no framework known here; supported are NeMo-RL"),
        ("- 1", "must hold a mapping"),
        ("a: [", "is not YAML"),
        ("defaults: run.yaml", "its defaults lead back to itself"),
        ("defaults: [{actor: dp}]", "a group that Hydra joins"),
        ("a: ${b}", "a = ${b}: there is no b"),
        ("a: ${b}\nb: ${a}", "leads to itself"),
        ("actor_rollout_ref: 3", "actor_rollout_ref = 3 must be a mapping"),
        ("loss_fn: {}\ngrpo: {adv_estimator: [gae]}", "grpo.adv_estimator = ['gae'] must be a mapping"),
        ("loss_fn: {ratio_clip_min: -1}", "ratio_clip_min = -1.0 must be at least 0"),
        ("actor_rollout_ref: {actor: {policy_loss: {loss_mode: magic}}}", "supported are vanilla, gspo"),
        ("actor_rollout_ref: {actor: {policy_loss: {loss_mode: dro}, use_kl_loss: true}}", "has two penalties"),
        ("actor_rollout_ref: {actor: {loss_agg_mode: token-max}}", "'token-max' is not carried over"),
        (
            "actor_rollout_ref: {actor: {use_kl_loss: true, kl_loss_type: full}}",
            "kl_loss_type = 'full' is not carried over",
        ),
        ("actor_rollout_ref: {}\nalgorithm: {use_kl_in_reward: true, kl_penalty: full}", "kl_penalty = 'full' is not"),
        ("actor_rollout_ref: {}\nalgorithm: {adv_estimator: magic}", "algorithm.adv_estimator = 'magic'"),
        (
            "actor_rollout_ref: {}\nalgorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: low}}",
            "algorithm.rollout_correction.rollout_is_threshold = 'low' is not valid; a bound is needed, or two as",
        ),
    ],
)
def test_what_cannot_be_carried_over(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert main(["port", str(tmp_path / "run.yaml")]) == 2
    assert said in capsys.readouterr().err
