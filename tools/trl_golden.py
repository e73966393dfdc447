"""Writes tests/training/data/trl_golden.json: ids and learned tokens that TRL's own code makes of the tests' records.

python -m tools.trl_golden [FORM ...], where trl, datasets and tokenizers are installed. Other forms keep their ids: "solutions"
is from TRL 0.29, whose trainer of steps later versions lack, and the others are from 1.16.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.training.data.trl_cases import FORMS, SEPARATOR, TOKENIZERS, Records
from tests.training.tokenizer.folders import write_tokenizer

TARGET = Path(__file__).parents[1] / "tests" / "training" / "data" / "trl_golden.json"
TRAINERS = {
    "prompt_completion": ("trl.trainer.sft_trainer", "SFTTrainer"),
    "messages": ("trl.trainer.sft_trainer", "SFTTrainer"),
    "pairs": ("trl.trainer.dpo_trainer", "DPOTrainer"),
    "implicit_pairs": ("trl.trainer.dpo_trainer", "DPOTrainer"),
    "answers": ("trl.trainer.kto_trainer", "KTOTrainer"),
    "solutions": ("trl.experimental.prm", "PRMTrainer"),
}
_ARGUMENTS = {
    "dataset_num_proc": None,
    "max_length": None,
    "truncation_mode": "keep_start",
    "dataset_text_field": "text",
    "assistant_only_loss": False,
    "shuffle_dataset": False,
}


def main(forms: Sequence[str], target: Path = TARGET) -> None:
    import accelerate
    from transformers import AutoTokenizer
    from trl import __version__

    accelerate.PartialState()
    golden: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    for form in forms or TRAINERS:
        module, name = TRAINERS[form]
        trainer = getattr(importlib.import_module(module), name)
        cases = golden[form] = {"trl": __version__}
        for tokenizer_name, (folder_form, messages) in TOKENIZERS.items():
            records = FORMS[form](messages)
            if not records or (form == "messages" and folder_form == "llama3"):  # without {% generation %}
                continue
            with tempfile.TemporaryDirectory() as folder:
                tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(Path(folder), folder_form))  # nosec B615 # a local folder
                cases[tokenizer_name] = dict(zip(records, _made(form, trainer, tokenizer, records), strict=True))
    target.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")).replace('],"', '],\n"') + "\n")


def _made(form: str, trainer: Any, tokenizer: Any, records: Records) -> list[object]:
    """Return ids and learned places of the records by TRL's preparation of a data set."""
    if form == "solutions":
        return [_solution(trainer, tokenizer, record) for record in records.values()]
    from datasets import Dataset

    whole = form == "messages"
    made = trainer.__new__(trainer)
    made.__dict__ |= {
        "_tokenizer": tokenizer,
        "chat_template": None,
        "completion_only_loss": not whole,
        "calculate_KL": False,
        "_is_vlm": False,
        "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
    }
    arguments = SimpleNamespace(**{**_ARGUMENTS, "assistant_only_loss": whole})
    options = {"packing": False, "formatting_func": None} if trainer.__name__ == "SFTTrainer" else {}
    rows = Dataset.from_list(list(records.values()))
    prepared = made._prepare_dataset(rows, tokenizer, arguments, dataset_name="train", **options)
    return [_sides(row) for row in prepared]


def _sides(row: dict[str, Any]) -> dict[str, object]:
    if "labels" in row:
        return {"": {"ids": row["input_ids"], "learned": [n for n, label in enumerate(row["labels"]) if label != -100]}}
    sides = {}
    for side in ("chosen", "rejected", "completion"):
        if f"{side}_ids" in row:
            ids = [*row["prompt_ids"], *row[f"{side}_ids"]]
            sides[side] = {"ids": ids, "learned": [*range(len(row["prompt_ids"]), len(ids))]}
    return sides


def _solution(trainer: Any, tokenizer: Any, record: dict[str, object]) -> dict[str, object]:
    row = trainer.tokenize_row(record, tokenizer, SEPARATOR, None, None, False, False)
    learned = [place for place, label in enumerate(row["labels"]) if label != -100]
    return {"": {"ids": row["input_ids"], "learned": learned, "labels": [row["labels"][place] for place in learned]}}


if __name__ == "__main__":
    main(sys.argv[1:])
