"""Conversations of several turns: which tokens are learned, and preferences between conversations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallel_rl.config.strict import configure
from parallel_rl.losses.core.requirements import Field
from parallel_rl.testing.pool import run_world
from parallel_rl.training.config.data import DataConfig
from parallel_rl.training.config.model import TokenizerConfig
from parallel_rl.training.data.examples import parse_example, parse_pair, parse_prompt
from parallel_rl.training.data.format import Format, Row
from parallel_rl.training.tokenizer.protocol import CharTokenizer
from tests.training.helpers import run, train_rows
from tests.training.tokenizer.folders import write_tokenizer

SYSTEM, FIRST, SECOND, OTHER = "Be careful.", "The sum is 42.", "Half of that is 21.", "There are 7 apples left."


def said(*turns: str) -> list[Row]:
    """A conversation, the user first."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)]


TALK = said("The sum of 12 and 30?", FIRST, "half of that", SECOND)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("tokenizers")
    return {form: write_tokenizer(tmp_path_factory.mktemp(form), form) for form in ("qwen3", "llama3")}


def form(folder: Path, mask_history: bool = False) -> Format:
    return Format(TokenizerConfig(hf=str(folder)).build(), mask_history=mask_history)


def test_each_answer_is_learned_and_nothing_else(folders: dict[str, Path]) -> None:
    """The tokens are those of the text that the template writes, spelled out here; answers and their ends are learned."""
    llama = form(folders["llama3"])
    encode, asking = llama.tokenizer.encode, "<|start_header_id|>user<|end_header_id|>\n\n"
    begin = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    example = parse_example({"messages": TALK}, llama)
    prompt = encode(f"<|begin_of_text|>{asking}The sum of 12 and 30?<|eot_id|>{begin}")
    parts = [
        encode(f"{FIRST}<|eot_id|>"),
        encode(f"{asking}half of that<|eot_id|>{begin}"),
        encode(f"{SECOND}<|eot_id|>"),
    ]
    assert list(example.prompt) == prompt and list(example.target.tokens) == [*parts[0], *parts[1], *parts[2]]
    assert list(example.target.mask or ()) == [1] * len(parts[0]) + [0] * len(parts[1]) + [1] * len(parts[2])
    # a field of one's own: a value for each answer, or one for all
    own = replace(llama, user_fields=(Field("bonus"), Field("row_weight", per="sequence")))
    [bonus, weight] = parse_example({"messages": TALK, "bonus": [0.5, 2], "row_weight": 3}, own).user_values
    values = [0.5] * len(parts[0]) + [0] * len(parts[1]) + [2] * len(parts[2])
    assert (list(bonus), weight) == (values, 3)  # type: ignore[arg-type]
    [bonus, _] = parse_example({"messages": TALK, "bonus": 7, "row_weight": 3}, own).user_values
    assert list(bonus) == [7 * learned for learned in example.target.mask or ()]  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="'bonus' has 3 values for 2 learned answers; a number for all or one for each"
    ):
        parse_example({"messages": TALK, "bonus": [1, 2, 3], "row_weight": 3}, own)
    text = parse_example({"text": "half of that", "bonus": 7, "row_weight": 3}, own)
    assert text.user_values == ((7,) * len(text.target.tokens), 3)
    # the last one alone: what the rest of the conversation asks is its prompt
    last = parse_example({"messages": TALK}, form(folders["llama3"], mask_history=True))
    assert list(last.prompt) == prompt + parts[0] + parts[1]
    assert (list(last.target.tokens), last.target.mask) == (parts[2], None)
    assert parse_example({"messages": TALK[:3], "answer": SECOND}, llama) == last
    assert parse_example({"prompt": TALK[:3], "answer": TALK[3:]}, llama) == last
    # what the assistant says before it is asked is no answer
    greeted = parse_example({"messages": [{"role": "assistant", "content": OTHER}, *TALK[:2]]}, llama)
    assert llama.tokenizer.decode(greeted.target.tokens) == FIRST and greeted.target.mask is None


def test_a_template_that_rewrites_earlier_answers_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """Qwen3's leaves out earlier thoughts: what it asks a policy with is no prefix of the conversation that is learned."""
    with pytest.raises(
        ValueError, match=r"renders the answer messages\[1\] differently .* Set data.mask_history: true to learn"
    ):
        parse_example({"messages": TALK}, form(folders["qwen3"]))
    last = parse_example({"messages": TALK}, form(folders["qwen3"], mask_history=True))
    assert last.target.mask is None
    keeps = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    keeps += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    folder = write_tokenizer(tmp_path)
    for source, message in (
        (keeps.replace("<|im_end|>\n", "\n"), "writes no end token after earlier answers"),
        (
            keeps.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else m.content[:3] }}"),
            r"the answer messages\[1\] differently",
        ),
        (keeps.replace(">assistant", ">model"), "renders an answer without its prompt before it"),
    ):
        (folder / "chat_template.jinja").write_text(source)
        with pytest.raises(ValueError, match=message):
            parse_example({"messages": TALK}, form(folder))
    named = folder / "additional_chat_templates" / "training.jinja"
    named.parent.mkdir()
    named.write_text(keeps)
    other = Format(configure(TokenizerConfig, {"hf": str(folder), "template": "training"}).build())
    target = parse_example({"messages": TALK}, other).target
    kept = [token for token, mine in zip(target.tokens, target.mask or (), strict=True) if mine]
    assert kept == other.tokenizer.encode(f"{FIRST}<|im_end|>{SECOND}<|im_end|>")


def test_preferences_between_conversations(folders: dict[str, Path]) -> None:
    """TRL's and OpenRLHF's forms of a pair are the ids of its texts."""
    llama = form(folders["llama3"])
    asked, answers = TALK[:3], [[{"role": "assistant", "content": text}] for text in (SECOND, OTHER)]
    pair = parse_pair({"messages": asked, "chosen": SECOND, "rejected": OTHER}, llama)
    both = [[*asked, *answer] for answer in answers]
    for row in (
        {"prompt": asked, "chosen": answers[0], "rejected": answers[1]},  # TRL, explicit prompt
        {"chosen": both[0], "rejected": both[1]},  # TRL, implicit prompt; OpenRLHF
        {"messages": asked, "chosen": both[0], "rejected": OTHER},
    ):
        assert parse_pair(row, llama) == pair
    # UltraFeedback's: the question as a text, and again in both conversations
    short = [said("How many apples?", text) for text in (FIRST, OTHER)]
    texts = {"prompt": "How many apples?", "chosen": FIRST, "rejected": OTHER}
    for row in ({**texts, "chosen": short[0], "rejected": short[1]}, {**texts, "system": SYSTEM, "chosen": short[0]}):
        asking = {name: row[name] for name in ("system",) if name in row}
        assert parse_pair(row, llama) == parse_pair({**texts, **asking}, llama)
    # several turns behind the prompt: those of the user carry no loss
    longer = parse_pair({"chosen": TALK, "rejected": [*TALK[:1], *answers[1]]}, llama)
    assert longer.chosen == parse_example({"messages": TALK}, llama).target and longer.rejected.mask is None
    assert parse_prompt({"prompt": asked, "answer": "21"}, llama).tokens == pair.prompt


def test_null_keys_of_messages_are_left_out(tmp_path: Path) -> None:
    """Parquet gives each message the keys of all; a template that asks for a key, and a comparison, must not see its null."""
    pytest.importorskip("tokenizers")
    folder = write_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name is defined %}<{{ m.name }}>{% endif %}"
        "{% for call in m.tool_calls or [] %}{{ call.function.keys() | list }}{% endfor %}"
        "{{ m.content if m.content is not none else 'NONE' }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    texts = form(folder)
    nulls: list[Row] = [{**message, "name": None, "tool_calls": None} for message in TALK]
    assert parse_example({"messages": nulls}, texts) == parse_example({"messages": TALK}, texts)
    asked = {"prompt": TALK[:3]}
    pair = parse_pair({**asked, "chosen": TALK, "rejected": OTHER}, texts)
    assert parse_pair({**asked, "chosen": nulls, "rejected": OTHER}, texts) == pair
    with pytest.raises(ValueError, match="'chosen' and 'rejected' are both"):
        parse_pair({**asked, "chosen": nulls, "rejected": TALK}, texts)
    call = {"function": {"name": "f", "arguments": None}, "id": None}
    calls: list[Row] = [TALK[0], {"role": "assistant", "content": None, "tool_calls": [call]}, *TALK[2:]]
    prompt = parse_prompt({"messages": calls[:3], "answer": "1"}, texts)
    assert prompt.tokens[len(texts.tokenizer.render(TALK[:1])) :][
        : len(ids := texts.tokenizer.encode("['name']NONE"))
    ] == tuple(ids)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": TALK, "rejected": TALK}, "'chosen' and 'rejected' are both"),
        ({"chosen": TALK, "rejected": said("Why?", FIRST)}, "begin with different messages; without a 'prompt'"),
        ({"chosen": TALK, "rejected": OTHER}, "the field 'prompt' is missing"),
        ({"chosen": TALK[:2], "rejected": [*TALK[:1], "4"]}, r"rejected\[1\] = '4' is not valid; \{role, content\}"),
        ({"chosen": TALK[:2], "rejected": TALK[:1]}, r"'rejected' has messages of \[\] after the prompt"),
        ({"prompt": "Why?", "chosen": TALK, "rejected": OTHER}, r"'chosen' has messages of \['user', .* the first and"),
        ({"prompt": "Why?", "chosen": TALK[1:3], "rejected": OTHER}, r"'chosen' has messages of \['assistant', 'user'\]"),
        ({"prompt": "Why?", "chosen": 3, "rejected": OTHER}, "'chosen' = 3 is not valid; a text"),
        ({"prompt": [], "chosen": SECOND, "rejected": OTHER}, r"'prompt' = \[\] is not valid; a list"),
    ],
)  # fmt: skip
def test_a_pair_that_is_none(row: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_pair(row, Format(CharTokenizer("ab")))


def test_a_mask_without_conversations_has_no_effect() -> None:
    with pytest.raises(ValueError, match="mask_history = True has no effect"):
        configure(DataConfig, {"train": "a", "mask_history": True}, "data")


def _train(rank: int, runs: list[list[str]]) -> list[dict[str, Any]]:
    return [train_rows(rank, arguments)[0] for arguments in runs]


def test_the_loss_of_a_conversation_is_that_of_its_answers(folders: dict[str, Path], tmp_path: Path) -> None:
    """One sequence of two turns gives the loss and the gradient of two sequences, each with one of the answers."""
    talks = [TALK, said("How many apples are left?", OTHER, "half of that", SECOND)]
    rows = {
        "whole": [{"messages": talk} for talk in talks],
        "apart": [{"messages": t[:n]} for t in talks for n in (2, 4)],
    }
    runs = []
    for name, records in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        sft = {"steps": 1, "batch_size": len(records), "optimizer": {"lr": 1e-3}}
        files = {"examples": str(tmp_path / f"{name}.jsonl"), **({"mask_history": True} if name == "apart" else {})}
        small = {"layers": 1, "hidden": 16, "heads": 2, "max_positions": 192, "vocab_multiple": 4}
        given = {"sft": sft, "rl": "null", "warmup": "null", "evaluation": "null", "parallel": {}, "data": files}
        run_section = {"dir": str(tmp_path / name), "dtype": "float64"}
        tokens = {"hf": str(folders["llama3"])}
        runs.append(run("grpo_arithmetic.yaml", **given, model=small, run=run_section, tokenizer=tokens))
    [[whole, apart]] = run_world(1, _train, runs)
    assert {name: whole[name] for name in ("loss", "grad_norm", "tokens")} == pytest.approx(
        {name: apart[name] for name in ("loss", "grad_norm", "tokens")}, rel=1e-9
    )
    assert whole["loss"] > 0
