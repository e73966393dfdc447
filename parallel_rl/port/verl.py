"""A config of verl (0.9.1) in our keys."""

from __future__ import annotations

from collections.abc import Mapping

from parallel_rl.config.strict import configure
from parallel_rl.losses.policy_config import PolicyLossConfig
from parallel_rl.port import verl_keys
from parallel_rl.port.ported import Ported, Reader, Tree, layout_of
from parallel_rl.port.verl_advantages import advantages_of, dynamic_sampling, kl_in_reward, weigh_baseline

_SEQUENCE_MEAN = ("sapo", "geo_mean")
# gspo bounds the sum of its exponent from above alone; the others leave the log-ratio
_CLAMPED = ("vanilla", "sapo", "cispo", "dppo_tv", "dppo_kl")


def from_verl(config: Mapping[str, object]) -> Ported:
    """See `options_of`.

    >>> ported = from_verl({"actor_rollout_ref": {"actor": {"clip_ratio_high": 0.28}}})
    >>> ported.config["rl"]["loss"]["options"]["surrogate"]
    {'name': 'ppo', 'clip_low': 0.2, 'clip_high': 0.28, 'dual_clip': 3.0}
    """
    said: dict[str, list[str]] = {"dropped": [], "differs": [], "left": [], "unknown": []}
    root = Reader("", config, said)
    joint = root.below("actor_rollout_ref")
    actor, rollout, data = joint.below("actor"), joint.below("rollout"), root.below("data")
    algorithm = root.below("algorithm")
    options = _loss(actor, data)
    _correction(algorithm.below("rollout_correction"), options)
    configure(PolicyLossConfig, options, actor.where)
    advantages = advantages_of(algorithm)
    weigh_baseline(advantages, options.get("importance"), algorithm)
    rl: Tree = {"loss": {"name": "policy", "options": options}, "advantages": advantages}
    rl |= kl_in_reward(algorithm, advantages)
    if advantages["name"] == "gae":
        rl["critic"] = _critic(root.below("critic"), actor, data) | _given(
            root.below("trainer"), {"warmup_steps": "critic_warmup"}
        )
    prompts, group = data.get("train_batch_size", 1024), rollout.get("n", 1)
    rl |= {"prompts": prompts, "group_size": group}
    mini = actor.get("ppo_mini_batch_size", 256)
    if isinstance(prompts, int) and isinstance(mini, int) and mini and prompts % mini == 0:
        rl["updates"] = prompts // mini
    if actor.get("ppo_epochs", 1) != 1:
        actor.leave("ppo_epochs", "the samples of a step are read once here")
    for section, key in ((root.below("distillation"), "enabled"), (algorithm, "use_pf_ppo")):
        if section.flag(key):
            section.leave(key, "not carried over by this port")
    rl |= dynamic_sampling(algorithm)
    ours: Tree = {"rl": rl}
    if joint.below("model").get("path"):
        ours["model"] = {"hf": joint.below("model").get("path")}
    layout = layout_of(actor.below("megatron")) if actor.get("strategy") == "megatron" else {}
    if layout:
        ours["parallel"] = layout
    if actor.flag("use_dynamic_bsz"):
        of_a_rank, ranks = actor.get("ppo_max_token_len_per_gpu", 16384), layout.get("context", 1)
        tokens = of_a_rank * ranks if isinstance(of_a_rank, int) and isinstance(ranks, int) else of_a_rank
        ours["batch"] = {"packing": True, "tokens": tokens}
    elif actor.get("ppo_micro_batch_size_per_gpu"):
        ours["batch"] = {"micro_batch_size": actor.get("ppo_micro_batch_size_per_gpu")}
    actor.seen |= {"ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu"}
    sampling: Tree = {
        "max_new_tokens": data.get("max_response_length", 512),
        "temperature": rollout.get("temperature", 1.0),
    }
    if rollout.get("top_k", -1) not in (None, -1, 0):
        sampling["top_k"] = rollout.get("top_k")
    if rollout.get("top_p", 1) not in (None, 1):
        sampling["top_p"] = rollout.get("top_p")
    ours["sampling"] = sampling
    for section, known in (
        (root, verl_keys.ROOT), (joint, verl_keys.JOINT), (actor, verl_keys.ACTOR), (rollout, verl_keys.ROLLOUT),
        (data, verl_keys.DATA), (algorithm, verl_keys.ALGORITHM),
    ):  # fmt: skip
        section.close(known)
    return Ported("verl", ours, **{kind: tuple(lines) for kind, lines in said.items()})


def _loss(actor: Reader, data: Reader) -> Tree:
    policy = actor.below("policy_loss")
    mode = str(policy.get("loss_mode", "vanilla"))
    clip = actor.get("clip_ratio", 0.2)
    low, high = (clip if actor.get(key) is None else actor.get(key) for key in ("clip_ratio_low", "clip_ratio_high"))
    dual, bounds = actor.get("clip_ratio_c", 3.0), {"clip_low": low, "clip_high": high}
    options: Tree = {"surrogate": {"name": "ppo", **bounds}}
    tau = {ours: actor.get(ours, default) for ours, default in (("tau_pos", 1.0), ("tau_neg", 1.05))}
    if mode == "vanilla":
        options["surrogate"] = {"name": "ppo", **bounds, "dual_clip": dual}
        actor.differ(
            f"clip_ratio_c = {dual}: on by default in verl, off here: bounds the gradient of tokens with A < 0"
        )
    elif mode == "gspo":
        options |= {"ratio_level": "sequence-mean", "ratio_gradient": "token"}
        actor.differ(
            "gspo has each token's own gradient (ratio_gradient: token); ours takes it through the sequence's mean"
        )
    elif mode == "sapo":
        options["surrogate"] = {"name": "sapo", **tau}
    elif mode == "gpg":
        options["surrogate"] = {"name": "reinforce"}
    elif mode == "cispo":
        options["surrogate"] = {"name": "cispo", **bounds}
    elif mode == "geo_mean":
        options["surrogate"] = {"name": "gmpo", **bounds}
        actor.differ(
            "geo_mean ignores the step's counts in verl, so that its loss depends on the micro-batches; ours does not"
        )
    elif mode == "clip_cov":
        names = {"fraction": "clip_cov_ratio", "low": "clip_cov_lb", "high": "clip_cov_ub"}
        options["surrogate"] = {"name": "clip_cov", **bounds, **_given(policy, names)}
    elif mode == "kl_cov":
        options["surrogate"] = {
            "name": "kl_cov",
            **_given(policy, {"fraction": "kl_cov_ratio", "coefficient": "ppo_kl_coef"}),
        }
    elif mode in ("dppo_tv", "dppo_kl"):
        divergence = "tv" if mode == "dppo_tv" else "binary_kl"
        region = {"divergence": divergence, "low": low, "high": high, "ratio_max": dual, "detached": True}
        options["surrogate"] = {"name": "dppo", **region}
        actor.differ(
            f"{mode}: clip_ratio bounds a divergence and clip_ratio_c = {dual} the ratio (ratio_max, off here by default)"
        )
    elif mode == "dro":
        if actor.flag("use_kl_loss"):
            raise ValueError(
                f"{policy.where}.loss_mode = 'dro' with use_kl_loss has two penalties, of the old policy and of the "
                "reference; a policy loss has one here: set use_kl_loss: false"
            )
        options["surrogate"] = {"name": "reinforce"}
        penalty = {"estimator": "k2", "gradient": "plain", "against": "prev"}
        options["kl"] = {"coefficient": policy.get("dro_beta"), **penalty}
    else:
        raise ValueError(
            f"{policy.where}.loss_mode = {mode!r} is not carried over; supported are vanilla, gspo, sapo, gpg, cispo, "
            "geo_mean, clip_cov, kl_cov, dppo_tv, dppo_kl and dro"
        )
    if mode in _CLAMPED:
        options["log_ratio_clamp"] = 20.0
        actor.differ(
            "verl clamps each log-ratio into ±20 (log_ratio_clamp); ours does not: beyond it there is no gradient"
        )
    if mode not in ("vanilla", "dppo_tv", "dppo_kl") and "clip_ratio_c" in actor.section:
        actor.drop("clip_ratio_c", f"with loss_mode = {mode!r}")
    for key in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta", "_target_"):
        policy.get(key)
    policy.close(("rollout_correction",))
    return options | _averaged(actor, data, mode) | _entropy_and_kl(actor)


def _averaged(actor: Reader, data: Reader, mode: str) -> Tree:
    given, factor = str(actor.get("loss_agg_mode", "token-mean")), actor.get("loss_scale_factor")
    if mode in _SEQUENCE_MEAN:
        if given != "seq-mean-token-mean" and (actor.flag("use_kl_loss") or actor.get("entropy_coeff")):
            actor.leave(
                "loss_agg_mode",
                f"{mode} averages each sequence, KL and entropy by this; here one aggregation is of all",
            )
        elif given != "seq-mean-token-mean":
            actor.drop("loss_agg_mode", f"with loss_mode = {mode!r}, which averages each sequence")
        return {"aggregation": "seq-mean-token-mean"}
    if given not in verl_keys.AGGREGATIONS:
        raise ValueError(
            f"{actor.path('loss_agg_mode')} = {given!r} is not carried over; supported are {', '.join(verl_keys.AGGREGATIONS)}"
        )
    if given == "seq-mean-token-sum-norm":
        length = data.get("max_response_length", 512) if factor is None else factor
        return {"aggregation": "constant-length", "max_length": length}
    return {"aggregation": verl_keys.AGGREGATIONS[given]}


def _entropy_and_kl(actor: Reader) -> Tree:
    out: Tree = {}
    if actor.get("entropy_coeff", 0):
        out["entropy_bonus"] = actor.get("entropy_coeff")
    kind, coefficient = str(actor.get("kl_loss_type", "low_var_kl")), actor.get("kl_loss_coef", 0.001)
    if not actor.flag("use_kl_loss"):
        return out
    estimator = verl_keys.KL.get(kind.removesuffix("+"))
    if estimator is None:
        raise ValueError(
            f"{actor.path('kl_loss_type')} = {kind!r} is not carried over; supported are {', '.join(verl_keys.KL)}, each with +"
        )
    if not coefficient:
        actor.drop("use_kl_loss", "with kl_loss_coef = 0")
        return out
    gradient = "straight-through" if kind.endswith("+") and estimator != "k2" else "plain"
    actor.differ(
        f"kl_loss_type = {kind}: the gradient is the estimate's own ({gradient}); ours by default is that of the true KL "
        "(score-function)"
    )
    return {**out, "kl": {"coefficient": coefficient, "estimator": estimator, "gradient": gradient}}


def _correction(given: Reader, options: Tree) -> None:
    """rollout_is and rollout_rs of verl's rollout correction."""
    weights, high = given.get("rollout_is"), given.get("rollout_is_threshold", 2.0)
    if weights in ("token", "sequence"):
        level = "token" if weights == "token" else "sequence-sum"
        try:
            *low, most = map(float, str(high).split("_"))
        except ValueError:
            raise ValueError(
                f"{given.path('rollout_is_threshold')} = {high!r} is not valid; a bound is needed, or two as 'low_high'"
            ) from None
        bounds: Tree = {"mode": "icepop", "low": low[0]} if low else {"mode": "tis"}
        options["importance"] = {"level": level, **bounds, "high": most}
        if given.flag("rollout_is_batch_normalize"):
            options["importance"]["normalize"] = True  # type: ignore[index]
            if weights == "sequence":
                given.differ(
                    "rollout_is_batch_normalize: verl divides weights of sequences by their mean over sequences; ours by that "
                    "over tokens"
                )
        given.differ(
            f"{given.where}.rollout_is = {weights}: an importance weight of trainer and sampler, off here by default"
        )
    for key in ("rollout_rs", "bypass_mode"):
        if given.get(key):
            given.leave(key, "write it as rejection.rules by hand" if key == "rollout_rs" else "no counterpart")
    for key in ("rollout_rs_threshold", "loss_type", "rollout_is_batch_normalize"):
        given.get(key)
    given.close(("_target_",))


def _critic(critic: Reader, actor: Reader, data: Reader) -> Tree:
    """The value function of gae; what averages the policy's loss averages its own, unless it says otherwise."""
    rates = critic.below("optim")
    clip = critic.get("cliprange_value", 0.5)
    averaged = _averaged(critic if "loss_agg_mode" in critic.section else actor, data, "vanilla")
    critic.differ(
        f"critic.cliprange_value = {clip}: on in verl, off here by default: bounds how far a value moves in a step"
    )
    critic.close(verl_keys.CRITIC)
    optimizer = {"lr": rates.get("lr", 1e-5), "weight_decay": rates.get("weight_decay", 0.01)}
    return {"loss": {"name": "value", "options": {"cliprange": clip, **averaged}}, "optimizer": optimizer}


def _given(section: Reader, names: Mapping[str, str]) -> Tree:
    """Options of ours for keys that are there."""
    return {ours: section.get(theirs) for ours, theirs in names.items() if section.get(theirs) is not None}
