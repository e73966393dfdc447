"""Result of a port: our config, and remarks about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parallel_rl.config.json_text import brief
from parallel_rl.config.strict import nearest

Tree = dict[str, object]

# of dynamic sampling
OF_DIFFERENT_REWARDS = (
    "{} keeps prompts whose rewards differ; ours those with a mean reward between low = 0 and high = 1: set both to the least "
    "and the largest reward"
)


@dataclass(frozen=True)
class Ported:
    """A config in our keys, and what its reader should know.

    >>> Ported("verl", {"rl": {"prompts": 8}}, unknown=("actor.clip",)).lines()
    ['unknown   actor.clip: not read by this port']

    Attributes:
        framework: whose config it was.
        config: our keys; what is missing there (run, data, tokenizer, reward) has no counterpart in the other's file.
        dropped: options without effect in the other's config, and why.
        differs: where our default is another than the value that the other's config means, and what that does to the gradient.
        left: options whose counterpart this trainer lacks.
        unknown: keys that the other framework's release, as it was read, does not have.
    """

    framework: str
    config: Tree
    dropped: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """One line of text for each remark."""
        remarks = {"dropped": self.dropped, "differs": self.differs, "left": self.left}
        said = [f"{kind:<9} {text}" for kind, texts in remarks.items() for text in texts]
        return said + [f"{'unknown':<9} {key}: not read by this port" for key in self.unknown]


@dataclass
class Reader:
    """Keys of one section of another framework's config; what is never asked for is unknown.

    Attributes:
        where: dotted path of the section.
        section: its mapping.
        said: remarks by their kind, shared by the sections of a config.
    """

    where: str
    section: Mapping[str, object]
    said: dict[str, list[str]]
    seen: set[str] = field(default_factory=set)

    def get(self, key: str, default: object = None) -> object:
        """The value of a key."""
        self.seen.add(key)
        return self.section.get(key, default)

    def flag(self, key: str) -> bool:
        """The value of a key that is true or false, by default false."""
        return bool(self.get(key, False))

    def below(self, key: str) -> Reader:
        """A section in this one; empty where it is not there, or null.

        Raises:
            ValueError: anything else but a mapping.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{self.path(key)} = {brief(value)} must be a mapping of its keys")
        return Reader(self.path(key), value or {}, self.said)

    def path(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def drop(self, key: str, why: str) -> None:
        """Say that an option has no effect."""
        self.seen.add(key)
        self.said["dropped"].append(f"{self.path(key)} = {self.section.get(key)!r} has no effect {why}")

    def leave(self, key: str, why: str = "this trainer has no counterpart") -> None:
        """Say that an option that does something is not carried over."""
        self.said["left"].append(f"{self.path(key)} = {self.get(key)!r}: {why}")

    def differ(self, text: str) -> None:
        self.said["differs"].append(text)

    def close(self, also: tuple[str, ...] = ()) -> None:
        """Say which keys nobody asked for; `also` are known and concern no number of the loss."""
        for key in self.section:
            if key not in self.seen and key not in also:
                near = nearest(str(key), sorted(self.seen | set(also)))
                self.said["unknown"].append(f"{self.path(str(key))} = {self.section[key]!r} ({near})")


def layout_of(megatron: Reader) -> Tree:
    """Our section `parallel`, from Megatron's names of its sizes.

    >>> layout_of(Reader("megatron", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}))
    {'tensor': 2, 'sequence_parallel': True}
    """
    names = {name: f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert")}
    given = {name: megatron.get(key) for name, key in {**names, "context": "context_parallel_size"}.items()}
    sizes = {name: size for name, size in given.items() if isinstance(size, int)}
    of_experts = megatron.get("expert_tensor_parallel_size")
    found: Tree = {name: sizes[name] for name in ("tensor", "context", "pipeline") if name in sizes}
    if sizes.get("expert", 1) > 1:  # files of models without experts have both sizes as well
        found["expert"] = sizes["expert"]
        found |= {"expert_tensor": of_experts} if isinstance(of_experts, int) else {}
    if megatron.flag("sequence_parallel") and sizes.get("tensor", 1) > 1:
        found["sequence_parallel"] = True
    elif megatron.flag("sequence_parallel"):
        megatron.drop("sequence_parallel", "on one tensor rank")
    return found
