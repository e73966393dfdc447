"""KL controllers: the values of the rule, bounds, and a state that goes on."""

from __future__ import annotations

import pytest

from parallel_rl.experience import AdaptiveKLController, FixedKLController, kl_controller


@pytest.mark.parametrize(
    ("current", "steps", "expected"),
    [
        (6.0, 256, 0.2),  # on target
        (6.6, 1000, 0.2 * (1 + 0.1 * 0.1)),
        (5.4, 1000, 0.2 * (1 - 0.1 * 0.1)),
        (60.0, 1000, 0.2 * (1 + 0.2 * 0.1)),  # the error is cut to 0.2
        (0.0, 1000, 0.2 * (1 - 0.2 * 0.1)),
        (-5.0, 1000, 0.2 * (1 - 0.2 * 0.1)),  # k1 can be below 0
        (9.0, 0, 0.2),
    ],
)
def test_one_update(current: float, steps: int, expected: float) -> None:
    controller = AdaptiveKLController(0.2, 6.0, 10000)
    controller.update(current, steps)
    assert controller.value == pytest.approx(expected, rel=1e-14)


def test_updates_add_up_and_a_state_goes_on() -> None:
    whole, first = (AdaptiveKLController(0.1, 1.0, 100) for _ in range(2))
    for kl in (1.1, 1.2, 0.5, 3.0):
        whole.update(kl, 10)
    for kl in (1.1, 1.2):
        first.update(kl, 10)
    second = AdaptiveKLController(0.7, 1.0, 100)
    second.load_state_dict(first.state_dict())
    for kl in (0.5, 3.0):
        second.update(kl, 10)
    assert second.value == whole.value == pytest.approx(0.1 * 1.01 * 1.02 * 0.98 * 1.02)


def test_a_fixed_one_stays() -> None:
    controller = kl_controller(0.3)
    controller.update(100.0, 10)
    assert type(controller) is FixedKLController and controller.value == 0.3
    assert controller.state_dict() == {"value": 0.3}
    adaptive = kl_controller(0.3, 2.0)
    assert isinstance(adaptive, AdaptiveKLController) and adaptive.horizon == 10000


def test_bad_input() -> None:
    for arguments, message in (
        ((0.1, 0.0, 10), "target = 0.0 of an adaptive KL controller must be above 0"),
        ((0.1, 1.0, 0), "horizon = 0 of an adaptive"),
        ((0.1, -1.0, 10), "target = -1.0"),
        ((0.0, 1.0, 10), "value = 0.0 of an adaptive"),
        ((float("nan"), 1.0, 10), "KL coefficient = nan must be at least 0"),
        ((0.1, float("inf"), 10), "target = inf"),
    ):
        with pytest.raises(ValueError, match=message.replace(".", r"\.")):
            AdaptiveKLController(*arguments)
    with pytest.raises(ValueError, match=r"KL coefficient = -0\.1 must be at least 0"):
        FixedKLController(-0.1)
    with pytest.raises(ValueError, match="horizon = 10 has no effect without a target"):
        kl_controller(0.1, None, 10)
    controller = AdaptiveKLController(0.1, 1.0, 10)
    with pytest.raises(ValueError, match="the KL = nan is not finite"):
        controller.update(float("nan"), 1)
    with pytest.raises(ValueError, match="n_steps = 50 must be at least 0 and below 5 × horizon = 50"):
        controller.update(1.0, 50)
    with pytest.raises(ValueError, match="is not one of a KL controller"):
        controller.load_state_dict({"coef": 1.0})
