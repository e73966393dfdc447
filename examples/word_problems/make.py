"""Make the files of `make demo-hf`: word problems like GSM8K's, and a tiny random Qwen3 with a tokenizer trained on them.

    python examples/word_problems/make.py runs/word_problems

FOLDER/model has the files that transformers' `save_pretrained` writes: config.json, model.safetensors,
tokenizer.json, a chat template. FOLDER/{train,held_out,hasty}.jsonl have the columns question and answer. In
hasty.jsonl two of three answers are the first number of the question.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

NAMES = ("Ada", "Ben", "Carla", "Dan", "Emma", "Finn")
THINGS = ("apples", "books", "coins", "eggs", "pens")
# what happens, and its sign
EVENTS = (
    ("{name} has {a} {thing} and buys {b} more.", 1),
    ("{name} has {a} {thing} and finds {b}.", 1),
    ("{name} has {a} {thing} and loses {b}.", -1),
    ("{name} has {a} {thing} and sells {b}.", -1),
)
LAYERS, HIDDEN, HEADS, GROUPS, HEAD, FFN = 2, 64, 4, 2, 32, 192
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def problems() -> Iterator[tuple[str, int, int]]:
    """Questions, the first number of each, and the answer: 0 to 14."""
    for event, sign in EVENTS:
        for name in NAMES:
            for thing in THINGS:
                for a in range(1, 10):
                    for b in range(1, 6 if sign > 0 else min(a, 5) + 1):
                        yield event.format(name=name, thing=thing, a=a, b=b) + " How many now?", a, a + sign * b


def write_data(folder: Path, dice: random.Random) -> list[str]:
    """Writes the three files; all questions."""
    found = list(problems())
    dice.shuffle(found)
    true = [(question, answer) for question, _, answer in found]
    hasty = [(question, dice.choice((answer, first, first))) for question, first, answer in found[:-64]]
    for name, rows in (("held_out", true[-64:]), ("train", true[:-64]), ("hasty", hasty)):
        lines = [json.dumps({"question": question, "answer": str(answer)}) + "\n" for question, answer in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return [question for question, _ in true]


def write_tokenizer(folder: Path, texts: list[str]) -> int:
    """Byte-level BPE that keeps digits apart, as Qwen's does; the number of tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(splits), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, show_progress=False)
    )
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": special[2], "pad_token": special[0], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ends = [tokenizer.token_to_id(name) for name in (special[2], special[0])]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return tokenizer.get_vocab_size()


def write_model(folder: Path, words: int) -> None:
    """A random Qwen3 in config.json and model.safetensors."""
    from safetensors.torch import save_file

    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": words,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    draws = torch.Generator().manual_seed(0)
    sizes = {"model.embed_tokens.weight": (words, HIDDEN), "lm_head.weight": (words, HIDDEN)}
    norms = {"model.norm.weight": HIDDEN}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            sizes[f"{at}.self_attn.{name}_proj.weight"] = (rows * HEAD, HIDDEN)
        sizes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
        sizes |= {f"{at}.mlp.{name}_proj.weight": (FFN, HIDDEN) for name in ("gate", "up")}
        sizes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, FFN)
        norms |= {f"{at}.{name}_layernorm.weight": HIDDEN for name in ("input", "post_attention")}
        norms |= {f"{at}.self_attn.{name}_norm.weight": HEAD for name in ("q", "k")}
    tensors = {name: 0.02 * torch.randn(size, generator=draws) for name, size in sizes.items()}
    tensors |= {name: torch.ones(size) for name, size in norms.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main(folder: Path) -> None:
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    questions = write_data(folder, random.Random(0))
    write_model(model, write_tokenizer(model, questions))
    print(
        f"wrote {folder}: {', '.join(sorted(path.name for path in (*folder.iterdir(), *model.iterdir()) if path.is_file()))}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/word_problems"))
