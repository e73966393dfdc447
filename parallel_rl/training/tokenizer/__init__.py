"""Text to token ids and back: protocol, character tokenizer, Hugging Face tokenizers and chat templates."""
