"""Records in TRL's forms: ids and learned tokens are those of TRL's own code, from JSONL, Parquet and `datasets`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parallel_rl.config.strict import configure
from parallel_rl.training.config.data import DataConfig
from parallel_rl.training.config.model import TokenizerConfig
from parallel_rl.training.data.datasets import find_data
from parallel_rl.training.data.examples import Answer, Example, Pair, parse_answer, parse_example, parse_pair
from parallel_rl.training.data.format import Format
from parallel_rl.training.data.forms import find_forms, read_of
from parallel_rl.training.data.parsers import Solution, parse_solution
from parallel_rl.training.data.records.source import Records, index_of
from parallel_rl.training.tokenizer.protocol import Target, Tokenizer
from tests.training.data.trl_cases import FORMS, SEPARATOR, TOKENIZERS, WORD_IN_TWO
from tests.training.tokenizer.folders import write_tokenizer

datasets = pytest.importorskip("datasets")
pytest.importorskip("tokenizers")
pytestmark = pytest.mark.filterwarnings("ignore")

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("trl_golden.json").read_text())
SOURCES: dict[str, tuple[str, Callable[..., object]]] = {
    "prompt_completion": ("examples", parse_example),
    "messages": ("examples", parse_example),
    "pairs": ("pairs", parse_pair),
    "implicit_pairs": ("pairs", parse_pair),
    "answers": ("answers", parse_answer),
    "solutions": ("solutions", parse_solution),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = {}
    for name, (form, messages) in TOKENIZERS.items():
        options = {"hf": str(write_tokenizer(tmp_path_factory.mktemp(form), form)), "chat": messages}
        made[name] = configure(TokenizerConfig, options).build()
    return made


def write(folder: Path, records: list[dict[str, object]]) -> list[object]:
    """Write the records in each kind of file; JSONL with a mark before it, CRLF, and no line break at its end."""
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    (folder / "a.jsonl").write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    rows = datasets.Dataset.from_list(records)
    rows.to_parquet(str(folder / "a.parquet"))
    rows.save_to_disk(str(folder / "saved"))
    return [str(folder / "a.jsonl"), str(folder / "a.parquet"), {"dataset": str(folder / "saved")}]


def learned(prompt: tuple[int, ...], target: Target) -> dict[str, list[int]]:
    mask = target.mask or [1] * len(target.tokens)
    places = [len(prompt) + place for place, kept in enumerate(mask) if kept]
    return {"ids": [*prompt, *target.tokens], "learned": places}


def sides(record: object) -> dict[str, dict[str, list[int]]]:
    """Return ids and learned places of a record's sequences, by TRL's names."""
    if isinstance(record, Pair):
        return {"chosen": learned(record.prompt, record.chosen), "rejected": learned(record.prompt, record.rejected)}
    assert isinstance(record, Example | Answer | Solution)
    side = learned(record.prompt, record.target)
    if isinstance(record, Solution):
        side["labels"] = [int(label) for label in record.labels]
    return {"completion" if isinstance(record, Answer) else "": side}


def refused(form: str, name: str, case: str) -> bool:
    """Return whether the template changes earlier answers, which TRL learns as changed and `parse_example` refuses."""
    return (form, name, case) == ("messages", "qwen3, messages", "several turns")


def without_tail(side: dict[str, list[int]], last: int) -> dict[str, list[int]]:
    """Cut what a template has behind the end token, which TRL learns and no policy is asked for."""
    ids = side["ids"][: last + 1]
    return {**side, "ids": ids, "learned": [place for place in side["learned"] if place < len(ids)]}


@pytest.mark.parametrize("form", list(FORMS))
def test_ids_and_learned_tokens_are_those_of_trl(form: str, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    source, parse = SOURCES[form]
    for name in GOLDEN[form].keys() - {"trl"}:
        tokenizer, (folder_form, messages) = tokenizers[name], TOKENIZERS[name]
        records, folder = FORMS[form](messages), tmp_path / name
        folder.mkdir()
        assert list(records) == list(GOLDEN[form][name])
        for place in write(folder, list(records.values())):
            config = configure(DataConfig, {source: place}, "data")
            files = find_data(config)
            fields = Format(tokenizer, convert=read_of(find_forms(config, files), source))
            options = {"separator": tokenizer.encode(SEPARATOR)} if source == "solutions" else {}
            read = Records(files[source], index_of(files[source], source), partial(parse, form=fields, **options))
            for number, (case, wanted) in enumerate(GOLDEN[form][name].items()):
                if refused(form, name, case):
                    with pytest.raises(ValueError, match="differently once the conversation continues"):
                        read[number]
                    continue
                got = sides(record := read[number])
                if isinstance(record, Answer):
                    assert record.desirable == records[case]["label"]
                for side, want in wanted.items():
                    if case == WORD_IN_TWO and form != "solutions":  # TRL encodes both texts as one
                        assert got[side]["ids"] != want["ids"]
                        assert tokenizer.decode(got[side]["ids"]) == tokenizer.decode(want["ids"])
                        continue
                    last = len(got[side]["ids"]) - 1
                    assert len(want["ids"]) - 1 - last == (messages and folder_form != "llama3"), (name, case, place)
                    assert got[side] == without_tail(want, last), (name, case, place)
