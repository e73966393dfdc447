"""Records in the forms of other frameworks, read as the fields that they mean, and those that are of no form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from parallel_rl.config.strict import configure
from parallel_rl.training.config.data import DataConfig
from parallel_rl.training.config.load import load_config
from parallel_rl.training.config.model import TokenizerConfig
from parallel_rl.training.data.datasets import find_data
from parallel_rl.training.data.examples import parse_example, parse_pair, parse_prompt
from parallel_rl.training.data.format import Format, Row
from parallel_rl.training.data.forms import find_forms, read_of
from parallel_rl.training.data.reading import read_datasets
from parallel_rl.training.tokenizer.protocol import Tokenizer
from tests.training.helpers import run
from tests.training.tokenizer.folders import write_tokenizer

PARSE = {"train": parse_prompt, "examples": parse_example, "pairs": parse_pair}
ASKED, GOOD, BAD = "How many apples?", "The sum is 42.", "There are 7 left."


def talk(*turns: str) -> list[dict[str, object]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)]


def dialogue(*turns: str) -> str:
    return "".join(f"\n\n{('Human', 'Assistant')[place % 2]}: {text}" for place, text in enumerate(turns))


# form: source, record, the same in our own fields, the description
CASES: dict[str, tuple[str, Row, Row, str]] = {
    "prompt and completion": (
        "examples",
        {"prompt": ASKED, "completion": GOOD},
        {"prompt": ASKED, "answer": GOOD},
        "TRL's prompt and completion form: prompt, completion",
    ),
    "prompt and completion as messages": (
        "examples",
        {"prompt": talk(ASKED), "completion": [{"role": "assistant", "content": GOOD}]},
        {"prompt": ASKED, "answer": GOOD},
        "TRL's prompt and completion form: prompt, completion",
    ),
    "Alpaca": (
        "examples",
        {"instruction": "Sum up.", "input": "12 and 30", "output": GOOD, "system": "Be brief."},
        {"prompt": "Sum up.\n12 and 30", "answer": GOOD, "system": "Be brief."},
        "Alpaca's form: instruction, input, output, system",
    ),
    "Alpaca without input": (
        "examples",
        {"instruction": "Sum up.", "input": "", "output": GOOD, "text": "Below is ..."},
        {"prompt": "Sum up.", "answer": GOOD},
        "Alpaca's form: instruction, input, output; text ignored",
    ),
    "ShareGPT": (
        "examples",
        {
            "id": "7",
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": ASKED},
                {"from": "gpt", "value": GOOD},
            ],
        },
        {"messages": [{"role": "system", "content": "Be brief."}, *talk(ASKED, GOOD)]},
        "ShareGPT's form: conversations; id ignored",
    ),
    "UltraChat": (
        "examples",
        {"prompt": ASKED, "prompt_id": "7f", "messages": talk(ASKED, GOOD)},
        {"messages": talk(ASKED, GOOD)},
        "UltraChat's form: prompt, prompt_id, messages",
    ),
    "parts, a weight and the text of arguments": (
        "examples",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "How many"}, {"type": "text", "text": "apples?"}],
                },
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}],
                },
                {"role": "assistant", "content": GOOD, "weight": 1},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "How many\napples?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
                },
                {"role": "assistant", "content": GOOD},
            ]
        },
        "",
    ),
    "UltraFeedback": (
        "pairs",
        {
            "prompt": ASKED,
            "prompt_id": "x",
            "chosen": talk(ASKED, GOOD),
            "rejected": talk(ASKED, BAD),
            "messages": talk(ASKED, GOOD),
            "score_chosen": 8.5,
            "score_rejected": 7.0,
        },
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        "UltraFeedback's form: prompt, chosen, rejected; prompt_id, messages, score_chosen, score_rejected ignored",
    ),
    "a weight of ShareGPT's": (
        "examples",
        {
            "conversations": [
                {"from": "human", "value": ASKED},
                {"from": "gpt", "value": GOOD, "weight": 0},
                {"from": "human", "value": ASKED},
                {"from": "gpt", "value": BAD},
            ]
        },
        {"messages": [*talk(ASKED), {"role": "assistant", "content": GOOD, "weight": 0}, *talk(ASKED, BAD)]},
        "ShareGPT's form: conversations",
    ),
    "HH with CRLF and a text before": (
        "pairs",
        {
            "chosen": "Be kind." + dialogue(ASKED, GOOD).replace("\n", "\r\n"),
            "rejected": "Be kind." + dialogue(ASKED, BAD),
        },
        {"prompt": ASKED, "system": "Be kind.", "chosen": GOOD, "rejected": BAD},
        "HH's dialogues as texts form: chosen, rejected",
    ),
    "HH": (
        "pairs",
        {"chosen": dialogue("Hi", "Yes?", ASKED, GOOD), "rejected": dialogue("Hi", "Yes?", ASKED, BAD)},
        {"prompt": talk("Hi", "Yes?", ASKED), "chosen": GOOD, "rejected": BAD},
        "HH's dialogues as texts form: chosen, rejected",
    ),
    "texts with a common beginning": (
        "pairs",
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        "HH's dialogues as texts form: chosen, rejected",
    ),
    "NeMo-RL's preferences": (
        "pairs",
        {
            "context": talk(ASKED),
            "completions": [
                {"rank": 1, "completion": [{"role": "assistant", "content": BAD}]},
                {"rank": 0, "completion": [{"role": "assistant", "content": GOOD}]},
            ],
        },
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        "NeMo-RL's preference form: context, completions",
    ),
    "verl": (
        "train",
        {
            "data_source": "gsm8k",
            "prompt": talk(ASKED),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": ["42", 42]},
            "extra_info": {"index": 3},
        },
        {"prompt": ASKED, "answer": ["42", 42], "source": "gsm8k"},
        "verl's form: data_source, prompt, reward_model; ability, extra_info ignored",
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    pytest.importorskip("tokenizers")
    folder = write_tokenizer(tmp_path_factory.mktemp("qwen3"))
    (folder / "chat_template.jinja").write_text(
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.tool_calls | tojson if m.tool_calls else m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return TokenizerConfig(hf=str(folder)).build()


def written(folder: Path, source: str, *rows: Row) -> DataConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(**{source: str(path)})  # type: ignore[arg-type]  # one source


@pytest.mark.parametrize("name", CASES)
def test_a_form_is_recognised_and_read_as_what_it_means(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    source, row, ours, description = CASES[name]
    config = written(tmp_path, source, row)
    forms = find_forms(config, find_data(config))
    assert forms.get(source, (None, ""))[1] == description
    theirs = PARSE[source](row, Format(tokenizer, convert=read_of(forms, source)))
    wanted = PARSE[source](ours, Format(tokenizer))
    if source == "train":
        theirs.extra.clear(), wanted.extra.clear()  # type: ignore[union-attr]  # prompts
    assert theirs == wanted


def test_a_reward_gets_what_a_form_leaves_aside(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = written(tmp_path, "train", CASES["verl"][1])
    form = Format(tokenizer, convert=read_of(find_forms(config, find_data(config)), "train"))
    extra = parse_prompt(CASES["verl"][1], form).extra
    assert extra == {"ability": "math", "extra_info": {"index": 3}, "source": "gsm8k"}


def test_an_answer_with_weight_0_is_not_learned(tokenizer: Tokenizer) -> None:
    """OpenAI's form: the ids stay, the loss leaves."""
    messages = talk(ASKED, GOOD, "And then?", BAD)
    whole = parse_example({"messages": messages}, Format(tokenizer)).target
    messages[1]["weight"] = 0
    part = parse_example({"messages": messages}, Format(tokenizer)).target
    assert part.tokens == whole.tokens and part.mask is not None and whole.mask is not None
    first = len(tokenizer.encode(f"{GOOD}<|im_end|>"))
    assert sum(whole.mask[:first]) == first and part.mask == (*[0] * first, *whole.mask[first:])
    messages[3]["weight"] = 0
    with pytest.raises(ValueError, match="no answer is learned: each has weight 0"):
        parse_example({"messages": messages}, Format(tokenizer))


def test_tools_go_to_the_chat_template(tokenizer: Tokenizer) -> None:
    """As a list, or as its JSON text, without the nulls of Parquet."""
    tools = [{"type": "function", "function": {"name": "add", "strict": None}}]
    row: dict[str, object] = {"messages": talk(ASKED, GOOD), "tools": tools}
    read = parse_example(row, Format(tokenizer))
    written = '[{"type": "function", "function": {"name": "add"}}]'
    assert list(read.prompt) == tokenizer.encode(
        written + f"<|im_start|>user\n{ASKED}<|im_end|><|im_start|>assistant\n"
    )
    assert parse_example({**row, "tools": written}, Format(tokenizer)) == read
    plain = parse_example({"messages": talk(ASKED, GOOD)}, Format(tokenizer))
    assert plain.target == read.target and parse_example({**row, "tools": []}, Format(tokenizer)) == plain


@pytest.mark.parametrize(
    ("source", "rows", "options", "message"),
    [
        ("examples", [{"prompt": "a", "completion": "b"}, {"prompt": "a", "answer": "b"}], {}, "line 2: the record is not of"),
        ("examples", [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b", "label": 1}], {},
         "line 2: .*the column 'label' is unknown; it has prompt, completion, label. Set data.form"),
        ("examples", [{"prompt": "a", "completion": "b", "instruction": "a", "output": "b"}], {},
         "columns of several forms, prompt_completion, alpaca"),
        ("examples", [{"conversations": [{"from": "alien", "value": "b"}]}], {}, r"conversations\[0\] = .*alien.*from one of"),
        ("examples", [{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}], {},
         r"messages\[0\].content has the part .*image_url.*only texts"),
        ("examples", [{"messages": [*talk("a", "b")], "tools": "{"}], {}, "line 1: "),
        ("examples", [{"messages": [{"role": "user", "content": "a", "weight": 0}]}], {}, r"messages\[0\].weight = 0 is not"),
        ("examples", [{"instruction": "a", "outptu": "b"}], {}, "unknown field 'instruction'.*has instruction, outptu"),
        ("pairs", [{"context": talk("a"), "completions": [{"rank": 0, "completion": "a"}]}], {}, "two of {rank, completion}"),
        ("pairs", [{"chosen": "abc", "rejected": "xbc"}], {}, "begin with different texts"),
        ("pairs", [{"prompt": "a", "chosen": "b", "rejected": "c", "scroe_chosen": 1}], {},
         "UltraFeedback's form, and the unknown column 'scroe_chosen'; correct its name, or set data.form: ultrafeedback"),
        ("examples", [{"instruction": "a", "output": "b", "history": []}], {}, "and the unknown column 'history'"),
        ("pairs", [{"chosen": dialogue("a", "b"), "rejected": "b"}], {}, "one of 'chosen' and 'rejected' has the marks"),
        ("pairs", [{"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c", "weight": 0}]}], {},
         "line 1: no answer is learned: each has weight 0"),
        ("pairs", [{"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "b"}]}], {}, "the same tokens"),
        ("examples", [{"prompt": "a", "answer": "b", "tools": "notjson"}], {}, "'tools' = 'notjson' is no JSON"),
        ("pairs", [{"prompt": "a", "chosen": "b", "rejected": "c"}], {"form": "alpaca"},
         "data.form = 'alpaca' has no effect; only data.examples can have it"),
        ("pairs", [{"prompt": "a", "chosen": "b", "rejected": "c"}], {"form": "ultrafedback"}, "did you mean 'ultrafeedback'"),
        ("pairs", [{"prompt": "a", "chosen": "b"}], {"form": "verl", "columns": {"chosen": "c"}}, "both given"),
    ],
)  # fmt: skip
def test_a_record_of_no_form_is_named(
    source: str, rows: list[Row], options: Mapping[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = {"examples": "sft_arithmetic.yaml", "pairs": "dpo_arithmetic.yaml"}[source]
    with pytest.raises(ValueError, match=message):
        folder = write_tokenizer(tmp_path / "hf")
        given = run(
            kind, data={source: str(path), **options}, evaluation="null", tokenizer={"hf": str(folder)}, warmup="null"
        )
        config = load_config(given[0], given[1:])
        read_datasets(config, config.tokenizer.build(), find_data(config.data))


def test_a_form_that_is_named_leaves_other_columns_aside(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = {**CASES["UltraFeedback"][1], "annotator": "x"}
    config = written(tmp_path, "pairs", row)
    with pytest.raises(ValueError, match="the unknown column 'annotator'"):
        find_forms(config, find_data(config))
    config = configure(DataConfig, {"pairs": config.pairs, "form": "ultrafeedback"}, "data")
    forms = find_forms(config, find_data(config))
    assert "annotator ignored" in forms["pairs"][1]
    pair = parse_pair(row, Format(tokenizer, convert=read_of(forms, "pairs")))
    assert pair == parse_pair(CASES["UltraFeedback"][2], Format(tokenizer))


def test_columns_that_are_not_named_are_not_read_for_their_names(tokenizer: Tokenizer) -> None:
    """UltraFeedback by columns: `messages` is another conversation, which nobody named."""
    row = CASES["UltraFeedback"][1]
    for columns in ({"chosen": "chosen"}, {"prompt": "prompt"}):
        assert parse_pair(row, Format(tokenizer, columns)) == parse_pair(CASES["UltraFeedback"][2], Format(tokenizer))
