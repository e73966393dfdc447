"""A config of verl (0.9.1) in our keys."""

from __future__ import annotations

from collections.abc import Mapping

from parallel_rl.advantages import AdvantageEstimator
from parallel_rl.config.strict import configure
from parallel_rl.hosts.ported import Ported, Reader, Tree, ported, reader_of
from parallel_rl.hosts.verl import keys
from parallel_rl.hosts.verl.keys import TABLE
from parallel_rl.hosts.verl.port_advantages import (
    advantages_of,
    dynamic_sampling,
    kl_in_reward,
    overlong,
    weigh_baseline,
)
from parallel_rl.hosts.verl.port_run import optimizer_of, ranks_of, run_of, steps_of
from parallel_rl.losses.policy_config import PolicyLossConfig

_SEQUENCE_MEAN = ("sapo", "geo_mean")
# gspo bounds only the upper side of its exponent; the others clamp the log-ratio
_CLAMPED = ("vanilla", "sapo", "cispo", "dppo_tv", "dppo_kl")


SECTIONS = "verl (actor_rollout_ref)"


def recognises(config: Mapping[str, object]) -> bool:
    """Return whether a config is verl's, by its sections."""
    return "actor_rollout_ref" in config


def convert(config: Mapping[str, object]) -> Ported:
    """Convert a config of verl, see `options_of`.

    >>> ported = convert({"actor_rollout_ref": {"actor": {"clip_ratio_high": 0.28}}})
    >>> ported.config["rl"]["loss"]["options"]["surrogate"]
    {'name': 'ppo', 'clip_low': 0.2, 'clip_high': 0.28, 'dual_clip': 3.0}
    """
    root = reader_of(config)
    joint = root.below("actor_rollout_ref")
    actor, rollout, data = joint.below("actor"), joint.below("rollout"), root.below("data")
    algorithm = root.below("algorithm")
    correction = algorithm.below("rollout_correction")
    bypassed = _bypassed(correction, actor.below("policy_loss"))
    options = _loss(actor, data, bypassed)
    _correction(correction, options, bypassed)
    configure(PolicyLossConfig, options, actor.where)
    prompts, group = data.get("train_batch_size", 1024, "rl.prompts"), rollout.get("n", 1, "rl.group_size")
    advantages = advantages_of(algorithm, group)
    weigh_baseline(advantages, options.get("importance"), algorithm)
    rl: Tree = {"loss": {"name": "policy", "options": options}, "advantages": advantages}
    rl |= {"prev_logprobs": "generation"} if bypassed else {}
    rl |= kl_in_reward(algorithm, advantages)
    rl |= {key: size for key, size in (("prompts", prompts), ("group_size", group)) if size is not None}
    if (
        group == 1
        and "n" in rollout.section
        and hasattr(AdvantageEstimator.variants[str(advantages["name"])], "singleton")
    ):
        advantages["singleton"] = "reward"  # verl's rule
    mini, updates = actor.get("ppo_mini_batch_size", 256, "rl.updates"), 1
    if isinstance(prompts, int) and isinstance(mini, int) and mini and prompts % mini == 0:
        updates = prompts // mini
        rl["updates"] = updates
    elif "ppo_mini_batch_size" in actor.section:
        actor.leave("ppo_mini_batch_size", f"{prompts} prompts are no multiple of it", "rl.updates")
    trainer = root.below("trainer")
    rl |= steps_of(trainer)
    rl["optimizer"] = optimizer_of(actor, "rl.optimizer", updates, rl.get("steps"))
    _critic_of(root, rl, updates)
    actor.note("ppo_epochs", "equal", why="one")
    if actor.get("ppo_epochs", 1) != 1:
        actor.leave("ppo_epochs", "the samples of a step are read once here")
    for section, key in ((root.below("distillation"), "enabled"), (algorithm, "use_pf_ppo")):
        if section.flag(key):
            section.leave(key, "not carried over by this port")
    if not algorithm.flag("use_pf_ppo"):
        algorithm.below("pf_ppo").off("without use_pf_ppo")
    rl |= dynamic_sampling(algorithm) | overlong(root)
    return ported("verl", config, {"rl": rl} | run_of(root), root, TABLE, ranks_of(trainer))


def _critic_of(root: Reader, rl: Tree, updates: int) -> None:
    joint, trainer = root.below("actor_rollout_ref"), root.below("trainer")
    warmup, advantages = trainer.get("critic_warmup", ours="rl.critic.warmup_steps"), rl["advantages"]
    root.below("critic").get("cliprange_value", ours="rl.critic.loss.options.cliprange")
    if not isinstance(advantages, Mapping) or advantages["name"] != "gae":
        for section in (root.below("critic"), root.below("critic").below("optim")):
            section.off("without adv_estimator = 'gae'")
        trainer.note("critic_warmup", "no_effect", why="without a critic")
        return
    critic = _critic(root.below("critic"), joint.below("actor"), root.below("data"))
    critic["optimizer"] = optimizer_of(root.below("critic"), "rl.critic.optimizer", updates, rl.get("steps"), 1e-5)
    rl["critic"] = critic | ({"warmup_steps": warmup} if warmup is not None else {})


def _bypassed(correction: Reader, policy: Reader) -> bool:
    """Return whether the sampler's log-probs replace the old policy's; only the plain clipped loss may."""
    kind = correction.get("loss_type", "ppo_clip")
    correction.note("loss_type", "no_effect", why="without bypass_mode")
    if not correction.flag("bypass_mode", "rl.prev_logprobs"):
        return False
    correction.note("loss_type", "equal", "rl.prev_logprobs", "clipped ratio of the policy and the sampler")
    if kind != "ppo_clip":
        correction.leave("loss_type", "a ratio of the policy and the sampler weighs no other loss here")
        correction.leave("bypass_mode", f"with loss_type = {kind!r}")
        return False
    policy.note("loss_mode", "equal", "rl.loss.options.surrogate.name", "the clipped ratio")
    if policy.get("loss_mode", "vanilla") != "vanilla":
        policy.drop("loss_mode", "with rollout_correction.bypass_mode")
    return True


def _loss(actor: Reader, data: Reader, bypassed: bool) -> Tree:
    policy = actor.below("policy_loss")
    ours = "rl.loss.options.surrogate"
    mode = "vanilla" if bypassed else str(policy.get("loss_mode", "vanilla", f"{ours}.name"))
    clip = actor.get("clip_ratio", 0.2)
    bounds = {f"clip_{side}": actor.get(f"clip_ratio_{side}", ours=f"{ours}.clip_{side}") for side in ("low", "high")}
    actor.note("clip_ratio", "no_effect", why="with clip_ratio_low and clip_ratio_high")
    if None in bounds.values():
        actor.note("clip_ratio", "carried", f"{ours}.clip_low")
    bounds = {side: clip if bound is None else bound for side, bound in bounds.items()}
    low, high, dual = bounds["clip_low"], bounds["clip_high"], actor.get("clip_ratio_c", 3.0, f"{ours}.dual_clip")
    options: Tree = {"surrogate": {"name": "ppo", **bounds}}
    tau = {key: actor.get(key, default, f"{ours}.{key}") for key, default in (("tau_pos", 1.0), ("tau_neg", 1.05))}
    if mode != "sapo":
        for key in tau:
            actor.note(key, "no_effect", why=f"with loss_mode = {mode!r}")
    if mode in ("gpg", "sapo", "dro", "dppo_tv", "dppo_kl", "kl_cov"):
        targets = {"low": "low", "high": "high"} if mode.startswith("dppo") else {}
        for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            target = targets.get(key.rpartition("_")[2])
            actor.note(
                key,
                "carried" if target else "no_effect",
                f"{ours}.{target}" if target else "",
                "" if target else f"with {mode}",
            )
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
        options["surrogate"] = {"name": "clip_cov", **bounds, **_options_of(policy, names, ours)}
    elif mode == "kl_cov":
        options["surrogate"] = {
            "name": "kl_cov",
            **_options_of(policy, {"fraction": "kl_cov_ratio", "coefficient": "ppo_kl_coef"}, ours),
        }
    elif mode in ("dppo_tv", "dppo_kl"):
        divergence = "tv" if mode == "dppo_tv" else "binary_kl"
        region = {"divergence": divergence, "low": low, "high": high, "ratio_max": dual, "detached": True}
        options["surrogate"] = {"name": "dppo", **region}
        actor.note("clip_ratio_c", "carried", f"{ours}.ratio_max")
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
        options["kl"] = {"coefficient": policy.get("dro_beta", ours="rl.loss.options.kl.coefficient"), **penalty}
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
    return options | _averaged(actor, data, mode) | _entropy_and_kl(actor)


def _averaged(actor: Reader, data: Reader, mode: str) -> Tree:
    ours = "rl.critic.loss.options" if actor.where == "critic" else "rl.loss.options"
    loss_mode = str(actor.get("loss_agg_mode", "token-mean", f"{ours}.aggregation"))
    factor = actor.get("loss_scale_factor", ours=f"{ours}.max_length")
    if mode in _SEQUENCE_MEAN:
        if loss_mode != "seq-mean-token-mean" and (actor.flag("use_kl_loss") or actor.get("entropy_coeff")):
            actor.leave(
                "loss_agg_mode",
                f"{mode} averages each sequence, KL and entropy by this; here one aggregation is of all",
            )
        elif loss_mode != "seq-mean-token-mean":
            actor.drop("loss_agg_mode", f"with loss_mode = {mode!r}, which averages each sequence")
        return {"aggregation": "seq-mean-token-mean"}
    if loss_mode not in keys.AGGREGATIONS:
        raise ValueError(
            f"{actor.path('loss_agg_mode')} = {loss_mode!r} is not carried over; supported are {', '.join(keys.AGGREGATIONS)}"
        )
    if loss_mode == "seq-mean-token-sum-norm":
        length = data.get("max_response_length", 512) if factor is None else factor
        return {"aggregation": "constant-length", "max_length": length}
    if factor is not None:
        actor.drop("loss_scale_factor", f"with loss_agg_mode = {loss_mode!r}")
    return {"aggregation": keys.AGGREGATIONS[loss_mode]}


def _entropy_and_kl(actor: Reader) -> Tree:
    out: Tree = {}
    ours = "rl.loss.options.kl"
    if actor.get("entropy_coeff", 0, "rl.loss.options.entropy_bonus"):
        out["entropy_bonus"] = actor.get("entropy_coeff")
    kind = str(actor.get("kl_loss_type", "low_var_kl", f"{ours}.estimator"))
    coefficient = actor.get("kl_loss_coef", 0.001, f"{ours}.coefficient")
    if not actor.flag("use_kl_loss", ours):
        for key in ("kl_loss_type", "kl_loss_coef"):
            actor.note(key, "no_effect", why="without use_kl_loss")
        return out
    estimator = keys.KL.get(kind.removesuffix("+"))
    if estimator is None:
        raise ValueError(
            f"{actor.path('kl_loss_type')} = {kind!r} is not carried over; supported are {', '.join(keys.KL)}, each with +"
        )
    if not coefficient:
        actor.drop("use_kl_loss", "with kl_loss_coef = 0")
        actor.note("kl_loss_type", "no_effect", why="with kl_loss_coef = 0")
        return out
    gradient = "straight-through" if kind.endswith("+") and estimator != "k2" else "plain"
    actor.differ(
        f"kl_loss_type = {kind}: the gradient is the estimate's own ({gradient}); ours by default is that of the true KL "
        "(score-function)"
    )
    return {**out, "kl": {"coefficient": coefficient, "estimator": estimator, "gradient": gradient}}


def _correction(section: Reader, options: Tree, bypassed: bool) -> None:
    ours, rules = "rl.loss.options.importance", "rl.loss.options.rejection.rules"
    section.note("rollout_rs_threshold", "yours" if section.get("rollout_rs") else "no_effect", rules, "of rollout_rs")
    if section.get("rollout_rs") and bypassed:
        section.leave(
            "rollout_rs", "with bypass_mode of the policy and the sampler; here of the old policy and the sampler"
        )
    elif section.get("rollout_rs"):
        section.leave("rollout_rs", "write it as rejection.rules by hand", rules)
    if bypassed:
        for key in ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize"):
            section.note(key, "no_effect", why="with bypass_mode, whose ratio has it")
        return
    weights = section.get("rollout_is", ours=f"{ours}.level")
    high = section.get("rollout_is_threshold", 2.0, f"{ours}.high")
    normalized = section.flag("rollout_is_batch_normalize", f"{ours}.normalize")
    if weights in ("token", "sequence"):
        level = "token" if weights == "token" else "sequence-sum"
        try:
            *low, most = map(float, str(high).split("_"))
        except ValueError:
            raise ValueError(
                f"{section.path('rollout_is_threshold')} = {high!r} is not valid; a bound is needed, or two as 'low_high'"
            ) from None
        bounds: Tree = {"mode": "icepop", "low": low[0]} if low else {"mode": "tis"}
        options["importance"] = {"level": level, **bounds, "high": most}
        if normalized:
            options["importance"]["normalize"] = True  # type: ignore[index]
            if weights == "sequence":
                section.differ(
                    "rollout_is_batch_normalize: verl divides weights of sequences by their mean over sequences; ours by that "
                    "over tokens"
                )
        section.differ(
            f"{section.where}.rollout_is = {weights}: an importance weight of trainer and sampler, off here by default"
        )
    elif weights is not None:
        raise ValueError(
            f"{section.path('rollout_is')} = {weights!r} is not carried over; supported are token, sequence and null"
        )
    else:
        for key in ("rollout_is_threshold", "rollout_is_batch_normalize"):
            section.note(key, "no_effect", why="without rollout_is")


def _critic(critic: Reader, actor: Reader, data: Reader) -> Tree:
    """Make the value function's loss; its aggregation defaults to the policy's."""
    clip = critic.get("cliprange_value", 0.5, "rl.critic.loss.options.cliprange")
    averaged = _averaged(critic if "loss_agg_mode" in critic.section else actor, data, "vanilla")
    critic.differ(
        f"critic.cliprange_value = {clip}: on in verl, off here by default: bounds how far a value moves in a step"
    )
    return {"loss": {"name": "value", "options": {"cliprange": clip, **averaged}}}


def _options_of(section: Reader, names: Mapping[str, str], where: str) -> Tree:
    read = {key: section.get(theirs, ours=f"{where}.{key}") for key, theirs in names.items()}
    return {key: value for key, value in read.items() if value is not None}
