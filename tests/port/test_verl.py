"""What a config of verl says of rewards, of the sampler and of batches that its cluster does not share evenly."""

from __future__ import annotations

import pytest

from parallel_rl.port.options import options_of
from tests.port.test_port import of_verl


@pytest.mark.parametrize(("kind", "importance"), [("ppo_clip", None), ("reinforce", {"mode": "tis", "high": 2.0})])
def test_the_sampler_as_the_old_policy_of_verl(kind: str, importance: dict | None) -> None:
    """An importance weight came over that verl does not apply there, and the sampler's log-probs did not."""
    given = {
        "bypass_mode": True,
        "loss_type": kind,
        "rollout_is": "token",
        "rollout_rs": "k1",
        "rollout_rs_threshold": 2.0,
    }
    ported = of_verl({"rollout_correction": given}, actor={"policy_loss": {"loss_mode": "gspo"}})
    plain = of_verl({"rollout_correction": given}, actor={"policy_loss": {"loss_mode": "vanilla"}})
    assert not plain.unknown and not ported.unknown
    rl: dict = ported.config["rl"]  # type: ignore[assignment]
    options = rl["loss"]["options"]
    kinds = {row.key.rpartition(".")[2]: row.kind for row in ported.rows}
    if importance is None:
        assert rl["prev_logprobs"] == "generation" and "importance" not in options and "ratio_level" not in options
        assert (kinds["rollout_is"], kinds["rollout_rs"], kinds["loss_mode"]) == (
            "no_effect",
            "unsupported",
            "no_effect",
        )
    else:
        assert "prev_logprobs" not in rl and options["importance"] == {"level": "token", **importance}
        assert (kinds["bypass_mode"], kinds["loss_type"], kinds["rollout_rs_threshold"]) == (
            "unsupported", "unsupported", "yours",
        )  # fmt: skip


@pytest.mark.parametrize("place", ["reward", "reward_model", "overlong_buffer"])
def test_the_overlong_penalty_of_verl(place: str) -> None:
    """DAPO's penalty stood in a section of rewards whose keys all counted as switched off."""
    buffer = {"enable": True, "len": 128, "penalty_factor": 0.5, "log": False}
    of_kwargs = {"reward_kwargs": {"overlong_buffer_cfg": buffer, "max_resp_len": 512}}
    sections: dict = {
        "reward_model": {"enable": False, "reward_manager": "dapo"},
        "reward": {"reward_manager": {"name": "dapo"}},
    }
    if place == "overlong_buffer":
        sections["reward_model"]["overlong_buffer"] = buffer
    else:
        sections[place] |= of_kwargs
    base = {"actor_rollout_ref": {}, "algorithm": {"adv_estimator": "grpo"}}
    ported = options_of({**base, **sections})
    overlong = {"name": "dapo", "bounded": False, "max_length": 512, "buffer": 128, "factor": 0.5}
    assert ported.config["rl"]["overlong"] == overlong and not ported.unknown  # type: ignore[index]
    kinds = {row.key: row.kind for row in ported.rows}
    assert kinds["reward_model.reward_manager"] == "yours" and kinds["reward_model.enable"] == "equal"
    sections["reward_model"]["reward_manager"] = "naive"
    assert "overlong" not in options_of({**base, **sections}).config["rl"]  # type: ignore[operator]
    sections["reward_model"]["reward_manager"], buffer["enable"] = None, False
    assert "overlong" not in options_of({**base, **sections}).config["rl"]  # type: ignore[operator]
