"""Folders as Hugging Face has them: a byte-level BPE tokenizer trained on the spot, a template of Qwen3's or Llama 3's form."""

from __future__ import annotations

import json
from pathlib import Path

TEXTS = (
    "A farmer has 12 apples and gives 5 of them away. How many apples are left?",
    "There are 7 apples left. Think first, then answer the question.",
    "You are careful with numbers.\n\nThe sum of 12 and 30 is 42, and half of that is 21.",
)
CONVERSATIONS: dict[str, list[dict[str, object]]] = {
    "one message": [{"role": "user", "content": "How many apples are left?"}],
    "a system text": [
        {"role": "system", "content": "You are careful."},
        {"role": "user", "content": "  The sum of 12 and 30?\n"},
    ],
    "several turns": [
        {"role": "user", "content": "Größe 数 😀"},
        {"role": "assistant", "content": "<think>\nfirst\n</think>\n\nThe answer"},
        {"role": "user", "content": "half of that <|im_end|><|eot_id|>"},
    ],
}
ANSWER = "The sum is 42."
# earlier thoughts are left out, the last answer has one, if an empty one
QWEN3 = """
{%- if messages[0].role != 'system' and persona is defined %}
    {{- '<|im_start|>system\\n' ~ persona ~ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set said = message.content %}
    {%- if message.role == 'assistant' and not loop.last and '</think>' in said %}
        {%- set said = said.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if message.role == 'assistant' and loop.last and '</think>' not in said %}
        {%- set said = '<think>\\n\\n</think>\\n\\n' ~ said %}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- said ~ '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- said ~ '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
# earlier answers stay as they are
CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content ~ '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content ~ '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no role ' ~ message['role']) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_QWEN3: tuple[list[str], dict[str, object]] = (
    ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
)
FORMS: dict[str, tuple[str, list[str], dict[str, object]]] = {
    "qwen3": (QWEN3, *_QWEN3),
    "chatml": (CHATML, *_QWEN3),
    "llama3": (
        LLAMA3,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        {"bos_token": "<|begin_of_text|>", "eos_token": {"__type": "AddedToken", "content": "<|eot_id|>"}},
    ),
}
# the second of each also ends an answer
ENDS = {
    "qwen3": ("<|im_end|>", "<|endoftext|>"),
    "chatml": ("<|im_end|>", "<|endoftext|>"),
    "llama3": ("<|eot_id|>", "<|end_of_text|>"),
}


def write_tokenizer(folder: Path, form: str = "qwen3", size: int = 290) -> Path:
    """Writes a folder's tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    template, special, config = FORMS[form]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=letters, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    if form != "llama3":
        tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    else:
        begin = (special[0], tokenizer.token_to_id(special[0]))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[begin])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id(name) for name in ENDS[form]]
    whole = {**config, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(whole))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder
