"""One optimizer step, token by token: what the loss read, made and left out, in a dump and on a page."""

from parallel_rl.explain.dump import DumpError as DumpError
from parallel_rl.explain.dump import StepInfo as StepInfo
from parallel_rl.explain.dump import dump_step as dump_step
from parallel_rl.explain.read import Step as Step
from parallel_rl.explain.read import read_step as read_step
