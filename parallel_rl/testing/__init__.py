"""Check the law: any loss, on every layout, on real ranks, against one float64 process, with a diagnosis.

    from parallel_rl.testing import check_law
    print(check_law(MyLoss))

`law_test` makes a one-line test of it, and `parallel_rl.testing.pytest_plugin` a fixture. `check_step` checks one optimizer
step of your Megatron model; `run_world` runs your tests on real gloo ranks.
"""

from parallel_rl.hosts.function_loss import FunctionLoss, on_rows
from parallel_rl.hosts.nemo_rl.loss import nemo_rl
from parallel_rl.hosts.skyrl import skyrl
from parallel_rl.hosts.slime.law import slime
from parallel_rl.hosts.torchtitan import torchtitan
from parallel_rl.hosts.transformers import hugging_face
from parallel_rl.hosts.verl.loss import verl
from parallel_rl.testing.cases import Case
from parallel_rl.testing.check import Limits, check_law, law_test
from parallel_rl.testing.diagnosis import Finding
from parallel_rl.testing.layouts import Layout
from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.testing.report import LawBroken, Report
from parallel_rl.testing.whole_step import check_step
from parallel_rl.testing.whole_step.layouts import StepLayout

__all__ = [
    "check_law",
    "law_test",
    "check_step",
    "StepLayout",
    "Case",
    "FunctionLoss",
    "on_rows",
    "verl",
    "nemo_rl",
    "slime",
    "skyrl",
    "torchtitan",
    "hugging_face",
    "Layout",
    "Limits",
    "Report",
    "Finding",
    "LawBroken",
    "run_world",
    "WorldError",
]
