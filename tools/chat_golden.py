"""Writes tests/training/tokenizer/chat_golden.json: what transformers' apply_chat_template gives for the tests' folders.

python -m tools.chat_golden, where `transformers` and `tokenizers` are installed (torch is not needed).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.training.tokenizer.folders import ANSWER, CONVERSATIONS, FORMS, write_tokenizer

TARGET = Path(__file__).parents[1] / "tests" / "training" / "tokenizer" / "chat_golden.json"
VARIABLES: dict[str, dict[str, object]] = {
    "qwen3": {},
    "qwen3 without thinking": {"enable_thinking": False, "persona": "You are brief."},
    "llama3": {},
}


def main(target: Path = TARGET) -> None:
    from transformers import AutoTokenizer, __version__

    golden: dict[str, object] = {"transformers": __version__}
    for name, variables in VARIABLES.items():
        form = name.split()[0]
        assert form in FORMS
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(Path(folder), form))  # nosec B615 # a local folder
            cases: dict[str, object] = {}
            for case, messages in CONVERSATIONS.items():
                answered = [*messages, {"role": "assistant", "content": ANSWER}]
                prompt, whole = (
                    tokenizer.apply_chat_template(
                        list(said), add_generation_prompt=asks, return_dict=False, **variables
                    )
                    for said, asks in ((messages, True), (answered, False))
                )
                cases[case] = {"prompt": prompt, "answered": whole}
            golden[name] = {"variables": variables, "plain": tokenizer("How many?")["input_ids"], "cases": cases}
    target.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")).replace('],"', '],\n"') + "\n")


if __name__ == "__main__":
    main()
