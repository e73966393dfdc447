"""What a record holds that is not read is listed, and a slip of a name is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_rl.config.strict import configure
from parallel_rl.training.config.data import DataConfig
from parallel_rl.training.data.conversations import messages_of
from parallel_rl.training.data.datasets import find_data
from parallel_rl.training.data.forms import left_aside
from tests.training.data.test_forms import ASKED, GOOD, talk, written


def test_what_is_not_read_is_listed_and_a_slip_refused(tmp_path: Path) -> None:
    """`system` beside data.columns and a misspelt weight were dropped without a line."""
    row = {"question": ASKED, "answer": GOOD, "system": "Be brief.", "tools": "[]", "id": 7}
    path = written(tmp_path, "examples", row).examples
    config = configure(DataConfig, {"examples": path, "columns": {"prompt": "question"}}, "data")
    assert left_aside(config, find_data(config)) == {"examples": "system, tools, id ignored"}
    written(tmp_path, "examples", {"question": ASKED, "anwser": GOOD})
    with pytest.raises(ValueError, match="the column 'anwser' is nearly 'answer', which is missing"):
        left_aside(config, find_data(config))
    config = written(tmp_path, "examples", {"messages": [{**turn, "train": 1} for turn in talk(ASKED, GOOD)]})
    assert left_aside(config, find_data(config)) == {"examples": "of messages, train left to the chat template"}
    with pytest.raises(ValueError, match=r"messages\[1\] has the unknown key 'wieght'; did you mean 'weight'"):
        messages_of([*talk(ASKED, GOOD)[:1], {**talk(ASKED, GOOD)[1], "wieght": 0}], "messages")
