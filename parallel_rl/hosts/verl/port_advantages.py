"""Advantages from a verl (0.9.1) config: the estimator, the KL in the reward, dynamic sampling."""

from __future__ import annotations

from collections.abc import Mapping

from parallel_rl.hosts.ported import OF_DIFFERENT_REWARDS, Reader, Tree
from parallel_rl.hosts.verl.keys import KL

_OTB = "optimal_token_baseline"
_ESTIMATORS = (
    "gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo", "gpg", "gdpo", _OTB,
)  # fmt: skip
# estimators that subtract the KL from returns, token by token
_OF_RETURNS = ("gae", "reinforce_plus_plus", "remax", _OTB)
_WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def advantages_of(algorithm: Reader, group: object) -> Tree:
    """Make the estimator with its options, for groups of `group` samples."""
    ours = "rl.advantages"
    name = str(algorithm.get("adv_estimator", "gae", f"{ours}.name"))
    if name not in _ESTIMATORS:
        raise ValueError(
            f"algorithm.adv_estimator = {name!r} is not carried over; supported are {', '.join(_ESTIMATORS)}"
        )
    out: Tree = {"name": name}
    gamma, lam = algorithm.get("gamma", 1.0, f"{ours}.gamma"), algorithm.get("lam", 1.0, f"{ours}.lam")
    for key, readers in (("gamma", ("gae", "reinforce_plus_plus")), ("lam", ("gae",))):
        if name not in readers:
            algorithm.note(key, "no_effect", why=f"with adv_estimator = {name!r}")
    if name == "gae":
        out |= {"gamma": gamma, "lam": lam}
    elif name == "reinforce_plus_plus":
        out["gamma"] = gamma
    elif name == "gpg":
        out["scale"] = "nonzero"
        algorithm.differ(
            "gpg: scaled up for rewards of 0 (scale: nonzero); ours for groups whose rewards are all alike"
        )
    elif name == _OTB:
        out["handle_zero_tail"] = True
        algorithm.differ(f"{name}: none where the longest answer is alone (handle_zero_tail); ours has one there")
    elif name == "gdpo":
        algorithm.leave(
            "adv_estimator", "gdpo needs several rewards a sample, and this trainer has one", f"{ours}.name"
        )
        out["name"] = "grpo"
    if name in _WHITENED:
        out["whiten"] = "unbiased"
        default = "not at all" if name == "gae" else "by the population's deviation"
        algorithm.differ(
            f"{name}: whitened over the step by the unbiased deviation (whiten); ours by default {default}"
        )
    algorithm.note(
        "norm_adv_by_std_in_grpo", "equal" if name == "grpo" else "no_effect", f"{ours}.name", f"{name} has its own"
    )
    if not algorithm.get("norm_adv_by_std_in_grpo", True):
        if name == "grpo":
            out["name"] = "dr_grpo"
            algorithm.note("norm_adv_by_std_in_grpo", "carried", f"{ours}.name")
        else:
            algorithm.drop("norm_adv_by_std_in_grpo", f"with adv_estimator = {name!r}")
    if name == "grpo" and not (isinstance(group, int) and group > 1):
        algorithm.differ("a group of one keeps its reward in verl; here it is an error (advantages.singleton: reward)")
    return out


def weigh_baseline(advantages: Tree, weights: object, algorithm: Reader) -> None:
    """Give the optimal token baseline the importance weights of rollout_correction, as in verl."""
    if advantages["name"] != _OTB or not isinstance(weights, dict):
        return
    if (weights["level"], weights["mode"]) == ("token", "tis") and "normalize" not in weights:
        advantages["importance_cap"] = weights["high"]
    else:
        algorithm.leave("rollout_correction", f"{_OTB} reads weights of tokens with one bound here (importance_cap)")


def dynamic_sampling(algorithm: Reader) -> Tree:
    filters = algorithm.below("filter_groups")
    on = filters.flag("enable", "rl.dynamic_sampling")
    rounds = filters.get("max_num_gen_batches", 0, "rl.dynamic_sampling.max_rounds")
    if not on:
        filters.off("without filter_groups.enable")
        return {}
    algorithm.differ(OF_DIFFERENT_REWARDS.format("filter_groups"))
    return {"dynamic_sampling": {"max_rounds": max(rounds, 2)} if isinstance(rounds, int) and rounds > 0 else {}}


def overlong(root: Reader) -> Tree:
    """Read the reward manager "dapo"'s penalty of long completions, at its place in each release."""
    older, longest = root.below("reward_model"), root.below("data").get("max_response_length", 512)
    places = [(older.below("overlong_buffer"), longest)]
    for section in (older, root.below("reward")):
        options = section.below("reward_kwargs")
        places.append(
            (options.below("overlong_buffer_cfg"), options.get("max_resp_len", ours="rl.overlong.max_length"))
        )
        if not options.below("overlong_buffer_cfg").flag("enable"):
            options.off("without overlong_buffer_cfg.enable")
    tree: Tree = {}
    manager = _reward_manager(root)
    for section, most in places:
        names = {"buffer": "len", "factor": "penalty_factor"}
        values = {key: section.get(name, ours=f"rl.overlong.{key}") for key, name in names.items()}
        section.note("log", "no_effect", why="of its reports")
        if not section.flag("enable", "rl.overlong"):
            section.off(f"without {section.where}.enable")
        elif manager not in (None, "dapo"):
            section.off(f"with the reward manager {manager!r}, which has no such penalty")
        elif not tree:
            tree = {"overlong": {"name": "dapo", "bounded": False, "max_length": most, **values}}
            section.differ(f"{section.where}: its penalty keeps growing beyond the longest response (bounded: false)")
    return tree


def _reward_manager(root: Reader) -> object:
    owners = [root.below("reward_model"), root.below("reward"), root]
    values = [owner.section.get("reward_manager") for owner in owners]
    names = [value.get("name") if isinstance(value, Mapping) else value for value in values]
    return next((name for name in names if name), None)


def kl_in_reward(algorithm: Reader, advantages: Tree) -> Tree:
    """Make the options of the section rl; the coefficient joins the estimator's."""
    control, kind = algorithm.below("kl_ctrl"), str(algorithm.get("kl_penalty", "kl", "rl.reward_kl"))
    coefficient = control.get("kl_coef", 0.001, "rl.advantages.kl_coefficient")
    adaptive = control.get("type", "fixed", "rl.kl_controller") == "adaptive"
    target = "rl.kl_controller"
    controller = {
        "target": control.get("target_kl", 0.1, f"{target}.target"),
        "horizon": control.get("horizon", 10000, f"{target}.horizon"),
    }
    if not adaptive:
        for key in ("target_kl", "horizon"):
            control.note(key, "no_effect", why="with kl_ctrl.type = 'fixed'")
    if not algorithm.flag("use_kl_in_reward", "rl.reward_kl") or not coefficient:
        control.off("without a KL in the reward")
        algorithm.note("kl_penalty", "no_effect", why="without a KL in the reward")
    if not algorithm.flag("use_kl_in_reward"):
        return {}
    if not coefficient:
        algorithm.drop("use_kl_in_reward", "with kl_ctrl.kl_coef = 0")
        return {}
    estimator = KL.get(kind.removesuffix("+"))  # rewards have no gradient
    if estimator is None:
        raise ValueError(
            f"{algorithm.path('kl_penalty')} = {kind!r} is not carried over; supported are {', '.join(KL)}, each with +"
        )
    advantages["kl_coefficient"] = coefficient
    if adaptive:
        algorithm.differ(
            "kl_ctrl: its target is one of the mean over sequences of their means in verl; here of the mean over tokens"
        )
    if advantages["name"] not in _OF_RETURNS:
        algorithm.differ(
            "use_kl_in_reward: the samples of a group are compared with their whole KL taken off; here each token pays for "
            "its own and all that follow"
        )
    return {"reward_kl": estimator, **({"kl_controller": controller} if adaptive else {})}
