"""Recognise an error that refuses a layout by name, and the line of the user's code that raised it."""

from __future__ import annotations

import dis
import re
from pathlib import Path
from types import TracebackType

import torch

_PREFIX = "Inapplicable: "
_OWNERS = ("megatron.core.", "parallel_rl.")
# words of Megatron's and this library's refusals; their other errors are failures
_BY_NAME = re.compile(r"\bsupport|divisible|takes padded ones only|on a CPU give|without also enabling", re.IGNORECASE)
_FRAME = re.compile(r'File "(?P<file>[^"<>]+)", line (?P<line>\d+),? in (?P<function>\S+)')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", str(Path(__file__).parents[2]) + "/")

_RANK = re.compile(r'testing/worker\.py", line \d+,? in _call')
_CUDA = ("Torch not compiled with CUDA", "Found no NVIDIA driver", "No CUDA GPUs are available", "_cuda_")


class Inapplicable(ValueError):
    """A layout that the model's sizes, its provider or Megatron refuses: it is not run and is no failure.

    >>> issubclass(Inapplicable, ValueError)
    True
    """


def refusal(error: BaseException) -> str:
    """Return the text of an error that refuses a layout by name; empty for any other error.

    Megatron and this library refuse with a raise or an assertion whose text names what is not supported.

    >>> refusal(Inapplicable("num_layers = 2 at test size is not divisible by 4"))
    'num_layers = 2 at test size is not divisible by 4'
    >>> refusal(KeyError("hidden"))
    ''
    """
    if isinstance(error, Inapplicable):
        return str(error)
    if not isinstance(error, ValueError | AssertionError | NotImplementedError) or error.__traceback__ is None:
        return ""
    last: TracebackType = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    code, module = last.tb_frame.f_code, str(last.tb_frame.f_globals.get("__name__", ""))
    raised = dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    return str(error) if raised and module.startswith(_OWNERS) and _BY_NAME.search(str(error)) else ""


def needs_gpu(error: BaseException) -> bool:
    """Return whether CUDA raised the error on a machine without a GPU.

    >>> needs_gpu(AssertionError("Torch not compiled with CUDA enabled"))
    True
    """
    return not torch.cuda.is_available() and any(text in str(error) for text in _CUDA)


def refused(text: str) -> str:
    """Return the reason in a rank's error "Inapplicable: reason"; empty for any other error.

    >>> refused("Inapplicable: rows cannot be cut"), refused("ValueError: x")
    ('rows cannot be cut', '')
    """
    return text.removeprefix(_PREFIX) if text.startswith(_PREFIX) else ""


def user_place(trace: str, *, innermost_first: bool = False) -> str:
    """Return `file:line (function)` of the user's innermost frame in a printed traceback, or "".

    >>> user_place('File "/home/me/model.py", line 12, in provider')
    '/home/me/model.py:12 (provider)'
    """
    task = _RANK.split(trace)[0] if innermost_first else trace  # a forked rank's stack ends in the caller's script
    frames = [frame for frame in _FRAME.finditer(task) if not any(part in frame["file"] for part in _LIBRARIES)]
    if not frames:
        return ""
    frame = frames[0] if innermost_first else frames[-1]
    return f"{frame['file']}:{frame['line']} ({frame['function']})"
