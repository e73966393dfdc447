"""Tokenizers and chat templates of Hugging Face folders against transformers' ids, and every fault of a folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from parallel_rl.config.strict import configure
from parallel_rl.training.config.model import TokenizerConfig
from parallel_rl.training.tokenizer.chat_template import ChatOptions, ChatTemplate
from parallel_rl.training.tokenizer.protocol import Message, Tokenizer
from tests.training.tokenizer.folders import ANSWER, CONVERSATIONS, ENDS, write_tokenizer

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("chat_golden.json").read_text())
USER = [{"role": "user", "content": "How many?"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("tokenizers")
    return {form: write_tokenizer(tmp_path_factory.mktemp(form), form) for form in ENDS}


def build(folder: Path, **options: object) -> Tokenizer:
    return configure(TokenizerConfig, {"hf": str(folder), **options}).build()


def answered(tokenizer: Tokenizer, messages: Sequence[Message], text: str) -> list[int]:
    target = tokenizer.target(messages, [{"role": "assistant", "content": text}])
    assert target.mask is None
    return list(target.tokens)


@pytest.mark.parametrize("name", [name for name in GOLDEN if name != "transformers"])
def test_ids_are_those_of_apply_chat_template(name: str, folders: dict[str, Path]) -> None:
    """The ids that a policy was trained on elsewhere are those that it is asked with here."""
    golden, folder = GOLDEN[name], folders[name.split()[0]]
    tokenizer = build(folder, variables=golden["variables"])
    for case, messages in CONVERSATIONS.items():
        wanted = golden["cases"][case]
        prompt, answer = tokenizer.render(messages), answered(tokenizer, messages, ANSWER)
        assert prompt == wanted["prompt"], case
        assert [*prompt, *answer] == wanted["answered"][: len(prompt) + len(answer)], case
        # Qwen's form has a line break behind the end token, which no policy is asked for
        assert len(wanted["answered"]) - len(prompt) - len(answer) == name.startswith("qwen3"), case
        assert answer[-1] in tokenizer.vocabulary.ends and tokenizer.decode(answer).endswith(ANSWER)
    plain = build(folder, chat=False)
    end = answered(plain, USER, "x")[-1]
    assert plain.render(USER) == golden["plain"] and plain.document("How many?") == [*golden["plain"], end]


def test_a_first_token_that_is_also_the_end_token_stays(tmp_path: Path) -> None:
    """OPT's kind: without its first token the first real token of a document would carry no loss."""
    processors = pytest.importorskip("tokenizers").processors
    folder = write_tokenizer(tmp_path, "llama3")
    path = folder / "tokenizer.json"
    tokenizer = sys.modules["tokenizers"].Tokenizer.from_file(str(path))
    end = tokenizer.token_to_id("<|eot_id|>")
    for template in ("<|eot_id|> $A", "<|eot_id|> $A <|end_of_text|>", "$A <|eot_id|>"):
        special = [(name, tokenizer.token_to_id(name)) for name in ("<|eot_id|>", "<|end_of_text|>")]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
        tokenizer.save(str(path))
        plain = build(folder, chat=False)
        begin = [end] if template.startswith("<") else []
        assert plain.document("ab") == [*begin, *plain.encode("ab"), end]


def test_an_answer_ends_on_any_end_token(folders: dict[str, Path]) -> None:
    from tokenizers import Tokenizer as Read

    for form, folder in folders.items():
        ids = [Read.from_file(str(folder / "tokenizer.json")).token_to_id(name) for name in ENDS[form]]
        tokenizer = build(folder)
        assert tokenizer.vocabulary.ends == set(ids) and answered(tokenizer, USER, "42")[-1] == ids[0]
        for end in ids:
            assert tokenizer.decode([*tokenizer.encode("It is 42."), end, *tokenizer.encode("more")]) == "It is 42."
        assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.vocabulary.size + 7]) == "a\ufffd"


def test_one_of_several_templates(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / "chat_template.jinja").unlink()
    with_end = "{{ messages[-1].content }}"
    named = [{"name": "default", "template": with_end}, {"name": "short", "template": "{{ messages[-1].content[:3] }}"}]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    assert build(folder).decode(build(folder).render(USER)) == "How many?"
    assert build(folder).decode(build(folder, template="short").render(USER)) == "How"
    with pytest.raises(ValueError, match=r"tokenizer.template = 'shrt': .* did you mean 'short'"):
        build(folder, template="shrt")
    with pytest.raises(
        ValueError, match=r"renders an answer without its prompt before it.*, which ends in 'How many\?'"
    ):
        answered(build(folder), USER, "42")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for", "is no Jinja template: .* \\(line 1\\)"),
        ("{{ raise_exception('no turn of ' ~ messages[0].role) }}", "refuses the conversation: no turn of user"),
        ("{{ messages[0].content + 1 }}", "fails: TypeError"),
        ("{{ strftime_now('%d') }}", "refuses the conversation: it reads the date.*set tokenizer.date"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "tries what the sandbox forbids"),
        ("{{ ''.__class__ }}", "tries what the sandbox forbids"),
        ("{{ messages.append(1) }}", "tries what the sandbox forbids"),
        ("{{ raise_exception.__globals__ }}", "tries what the sandbox forbids"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "tries what the sandbox forbids"),
        ("{% for i in range(1000000000) %}{% endfor %}", "fails: OverflowError"),
        ("{% include '/etc/passwd' %}", "fails: TypeError"),
        ("{{ messages | random }}", "is no Jinja template: No filter named 'random'"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: RecursionError"),
        ("{% if 1 %}" * 5000 + "{% endif %}" * 5000, "is no Jinja template: it nests deeper than Python compiles"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "is no Jinja template: it nests deeper than Python compiles"),
        ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "is no Jinja template: Python does not compile it"),
    ],
)
def test_a_template_that_fails_or_breaks_out_is_an_error(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"the chat template of here {message}"):
        ChatTemplate(source, "here").render(USER, answered=False)


def test_what_a_template_reads() -> None:
    options = ChatOptions(variables={"mood": "ö"}, today=date(2026, 1, 31))
    assert ChatTemplate("{{ '=' * 3 }}{{ 2 * 3 }}", "").render(USER, answered=True) == "===6"
    source = "{{ strftime_now('%d %b %Y') }} {{ mood | tojson }} {{ bos_token }}{% if tools is none %}!{% endif %}"
    assert ChatTemplate(source, "", {"bos_token": "<s>"}, options).render(USER, answered=True) == '31 Jan 2026 "ö" <s>!'


def test_a_folder_that_is_no_tokenizers(folders: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    def broken(**files: str | None) -> Path:
        folder = write_tokenizer(tmp_path / str(len(list(tmp_path.iterdir()))))
        for name, text in files.items():
            path = folder / name.replace("__", ".")
            path.unlink() if text is None else path.write_text(text)
        return folder

    nothing = "{}"
    for folder, message in (
        (tmp_path / "nowhere", "nowhere' is not a folder"),
        (broken(tokenizer__json=None), "has no tokenizer.json; transformers writes one"),
        (broken(tokenizer__json='{"version": "1.0"'), r"tokenizer.json cannot be read: "),
        (broken(tokenizer_config__json="[]"), "tokenizer_config.json holds no JSON object"),
        (broken(generation_config__json="{"), "generation_config.json is not valid JSON"),
        (broken(tokenizer_config__json=nothing, generation_config__json=nothing), "has no end token"),
        (broken(generation_config__json='{"eos_token_id": [151645]}'), r"151645 lies outside the vocabulary \[0, 29"),
    ):
        with pytest.raises(ValueError, match=message):
            build(folder)
    bare = broken(chat_template__jinja=None)
    with pytest.raises(ValueError, match="has no chat template, neither in"):
        build(bare, chat=True)
    with pytest.raises(ValueError, match=r"has no chat template, or .* messages of \['system', 'user'\]"):
        build(bare).render([{"role": "system", "content": "x"}, *USER])
    with pytest.raises(ValueError, match=r"the text 'a\\ud800' cannot be tokenized"):
        build(bare).encode("a\ud800")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        build(bare)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "exactly one of alphabet and hf is needed; neither is given"),
        ({"alphabet": "ab", "hf": "x"}, "both are given"),
        ({"alphabet": "ab", "chat": True}, "chat = True has no effect with alphabet"),
        ({"hf": "x", "chat": False, "template": "a"}, "template = 'a' has no effect with chat = False"),
        ({"hf": "x", "variables": {"messages": 1}}, "variables.messages is not valid"),
        ({"hf": "x", "date": "31.1."}, "tokenizer.date = '31.1.' is not valid; a value of type date"),
        ({"hf": "x", "templat": "a"}, "unknown key tokenizer.templat .* did you mean 'template'"),
    ],
)
def test_options_that_contradict(section: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(TokenizerConfig, section, "tokenizer")


def test_an_alphabet_that_is_not_known_yet_is_told() -> None:
    with pytest.raises(ValueError, match=r"'auto' is known when a run has seen its data; give the config.yaml"):
        TokenizerConfig("auto").build()


def test_the_weights_of_a_checkpoint_rest_on_tokenizer_json(folders: dict[str, Path], tmp_path: Path) -> None:
    """A run must not go on with ids of another meaning; another template does not change them."""
    first = TokenizerConfig(hf=str(folders["qwen3"])).identity
    same = write_tokenizer(tmp_path / "same")
    (same / "chat_template.jinja").write_text("{{ messages }}")
    assert TokenizerConfig(hf=str(same)).identity == first
    assert TokenizerConfig(hf=str(write_tokenizer(tmp_path / "other", size=289))).identity != first
    assert TokenizerConfig("ab").identity == {"tokenizer.alphabet": "ab", "tokenizer.hf": None}
