"""Text to token ids and back: a protocol, a tokenizer of characters, those of Hugging Face folders with their templates.

Nothing here knows of models or of data; which tokenizer a run has is config/'s.
"""
