"""Safe renderings of foreign texts, addresses and keys, for every message, log and record."""

from __future__ import annotations

import json
import os
import re
from urllib.parse import urlsplit

_PIECE = 8  # so many characters of a key in a row are hidden wherever they stand
_PRIVATE = re.compile(r"(?<=://)[^\s?#'\"]*@|[?#][^\s'\"]*")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"]*")


def printable(text: str) -> str:
    """Escape the characters that would steer a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def shown(value: object) -> str:
    """Show the `repr` of a config's value; addresses lose user, password, query and fragment.

    >>> shown({"url": "http://me:secret@judge:80/score?key=abc"})
    "{'url': 'http://judge:80/score'}"
    """
    return without_private(repr(value))


def without_private(text: str) -> str:
    """Remove user, password, query and fragment from the addresses of a text.

    >>> without_private("--reward http://me:secret@judge/score?key=abc --run.seed 1")
    '--reward http://judge/score --run.seed 1'
    """
    return _ADDRESS.sub(lambda match: _PRIVATE.sub("", match[0]), text)


def check_address(url: str) -> None:
    """Refuse, without quoting secrets, any address but a public HTTP one.

    ValueError: another scheme, no host, or a user, password, query or fragment, which records and logs would show.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url = {shown(url)} must start with http:// or https://")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError("url is not an address; http://host:port/path is needed") from None
    if not host:
        raise ValueError(f"url = {shown(url)} names no host; http://host:port/path is needed")
    if "@" in parts.netloc or "?" in url or "#" in url:
        raise ValueError(
            f"url = {shown(url)} has a user, a password, a query or a fragment, which would be saved with the run. Leave it "
            "out, and set api_key_env to the name of the environment variable that holds the key"
        )
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"url = {shown(url)} has a space or another character that a URL cannot have")


class Secret:
    """A key that shows as *** and hides itself in messages of others.

    >>> key = Secret("sk-1234567890")
    >>> f"{key}", key.hide("wrong key sk-1234567890, or sk-123456...")
    ('***', 'wrong key ***, or ***...')
    """

    def __init__(self, value: str) -> None:
        self._value = value
        width = min(_PIECE, len(value))
        self._pieces = {value[at : at + width] for at in range(len(value) - width + 1)}
        self._width = width

    @classmethod
    def of_environment(cls, name: str) -> Secret:
        """Read a key from an environment variable; ValueError, without the key, if unset or malformed."""
        value = os.environ.get(name)
        if not value:
            raise ValueError(f"api_key_env = {name!r}: the environment has no such variable, or it is empty")
        if not all("!" <= char <= "~" for char in value):
            raise ValueError(
                f"api_key_env = {name!r}: the variable has a space, a line end or another character that a key cannot "
                "have (its value is not shown)"
            )
        return cls(value)

    def __repr__(self) -> str:
        return "***"

    def __reduce__(self) -> str:
        raise TypeError("a key is not written anywhere")

    def reveal(self) -> str:
        """Return the key itself, for a request."""
        return self._value

    def cover(self, answer: bytes) -> bytes:
        """Replace the key in an answer, plain or JSON-escaped, before the answer is cut."""
        escaped = json.dumps(self._value)[1:-1]
        for form in {self._value, escaped, escaped.replace("/", "\\/")}:
            answer = answer.replace(form.encode(), b"***")
        return answer

    def hide(self, text: str) -> str:
        """Replace any eight consecutive characters of the key in a text."""
        hidden = bytearray(len(text))
        for at in range(len(text) - self._width + 1):
            if text[at : at + self._width] in self._pieces:
                hidden[at : at + self._width] = b"\1" * self._width
        parts, last = [], 0
        for char, covered in zip(text, hidden, strict=True):
            if not covered:
                parts.append(char)
            elif not last:
                parts.append("***")
            last = covered
        return "".join(parts)
