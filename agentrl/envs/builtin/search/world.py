"""A synthetic world to ask questions about: people, companies and places, and how they are related.

A world is a pure function of its seed. It holds about 37,000 entities, each described by one passage, and
relations that point only inside one split: which split an entity belongs to is a stable hash of its name, so
no entity that occurs in a training question (as subject, bridge or answer) occurs in a test question, in this
or in any other world.
"""

from __future__ import annotations

import functools
import hashlib
import random
from dataclasses import dataclass
from typing import NamedTuple

from agentrl.envs.builtin.search import names
from agentrl.loading import toml_beside
from agentrl.retrieval import Index, MemoryIndex, Passage

SPLITS = ("train", "test")
TEST_PERMILLE = 200
"""Share of the entities, in thousandths, that belong to the test split."""

NUM_PEOPLE = 30_000
NUM_QUESTIONS = {"train": 65_536, "test": 1_024}
TWO_HOP_SHARE = 0.64


class Relation(NamedTuple):
    """A function from entities of kind ``domain`` to entities of kind ``range``; see ``relations.toml``."""

    domain: str
    range: str
    question: str
    phrase: str


_KNOWN = toml_beside(__file__, "relations.toml")
RELATIONS: dict[str, Relation] = {name: Relation(**relation) for name, relation in _KNOWN["relations"].items()}
PASSAGES: dict[str, str] = _KNOWN["passages"]
"""By kind of entity, what is told of one."""
KINDS = tuple(PASSAGES)
ONE_HOP_PATHS: tuple[tuple[str, ...], ...] = tuple((name,) for name in RELATIONS)
TWO_HOP_PATHS: tuple[tuple[str, ...], ...] = tuple(
    (inner, outer)
    for inner, to in RELATIONS.items()
    for outer, onward in RELATIONS.items()
    if to.range == onward.domain
)


def question_text(path: tuple[str, ...], subject: str) -> str:
    """The question whose answer is found by following ``path`` from ``subject``."""
    *inner, outer = path
    for name in inner:
        subject = RELATIONS[name].phrase.format(subject)
    return RELATIONS[outer].question.format(subject)


def split_of(name: str) -> str:
    """The split an entity belongs to: a stable hash of its name, the same on every machine."""
    digest = hashlib.blake2b(name.encode("utf-8"), digest_size=8, person=b"agentrl-split").digest()
    return "test" if int.from_bytes(digest, "big") % 1000 < TEST_PERMILLE else "train"


@dataclass(frozen=True)
class Question:
    """A question with its answer and the way to it: ``chain[0]`` is the subject, ``chain[-1]`` the answer."""

    text: str
    answer: str
    path: tuple[str, ...]
    chain: tuple[str, ...]

    @property
    def hops(self) -> int:
        return len(self.path)


class World:
    """All entities and facts of one seed. Use :func:`get_world`, which builds each world once a process.

    Attributes:
        entities: kind and split -> names, in a fixed order.
        facts: entity name -> {relation name -> name of the value}. Names are unique over all kinds.
        passages: one passage an entity, in index order.
    """

    def __init__(self, seed: int = 0, *, num_people: int = NUM_PEOPLE) -> None:
        self.seed = seed
        rng = random.Random(f"agentrl-world-{seed}")
        self.entities: dict[tuple[str, str], list[str]] = {(kind, split): [] for kind in KINDS for split in SPLITS}
        for kind, all_names in _draw_names(rng, num_people).items():
            for name in all_names:
                self.entities[kind, split_of(name)].append(name)
        self.facts: dict[str, dict[str, str]] = {}
        self.passages: list[Passage] = []
        for kind in KINDS:
            for split in SPLITS:
                self._draw_facts(rng, kind, split)

    def _draw_facts(self, rng: random.Random, kind: str, split: str) -> None:
        pools = [(name, self.entities[to.range, split]) for name, to in RELATIONS.items() if to.domain == kind]
        sizes = [(name, pool, len(pool)) for name, pool in pools]
        for name in self.entities[kind, split]:
            facts = {}
            for relation, pool, size in sizes:
                value = pool[int(rng.random() * size)]
                while value == name:
                    value = pool[int(rng.random() * size)]
                facts[relation] = value
            self.facts[name] = facts
            self.passages.append(
                Passage(f"{kind}-{len(self.passages)}", name, PASSAGES[kind].format(name=name, **facts))
            )

    def question(self, split: str, index: int, *, two_hop_share: float = TWO_HOP_SHARE) -> Question:
        """Question ``index`` of a split: the same one for the same world, on every machine.

        Any run of consecutive indices holds two-hop questions in the share asked for, and every path
        equally often among them.

        Raises IndexError: ``index`` is outside ``range(NUM_QUESTIONS[split])``."""
        if not 0 <= index < NUM_QUESTIONS[split]:
            raise IndexError(f"question index {index} of split {split!r}: expected 0 to {NUM_QUESTIONS[split] - 1}")
        two_hop_before = int(index * two_hop_share)
        is_two_hop = int((index + 1) * two_hop_share) > two_hop_before
        paths = TWO_HOP_PATHS if is_two_hop else ONE_HOP_PATHS
        rank = two_hop_before if is_two_hop else index - two_hop_before
        path = paths[rank % len(paths)]
        pool = self.entities[RELATIONS[path[0]].domain, split]
        offset = _offset(self.seed, split, path, len(pool))
        return self.follow(path, pool[(offset + rank // len(paths)) % len(pool)])

    def follow(self, path: tuple[str, ...], subject: str) -> Question:
        """The question that follows ``path`` from ``subject``."""
        chain = [subject]
        for relation in path:
            chain.append(self.facts[chain[-1]][relation])
        return Question(question_text(path, subject), chain[-1], path, tuple(chain))


@functools.lru_cache(maxsize=1024)
def _offset(seed: int, split: str, path: tuple[str, ...], size: int) -> int:
    return random.Random(f"agentrl-question-{seed}-{split}-{'/'.join(path)}").randrange(size)


def _draw_names(rng: random.Random, num_people: int) -> dict[str, list[str]]:
    surnames = names.SURNAMES
    people = [
        f"{names.FIRST_NAMES[i // len(surnames)]} {surnames[i % len(surnames)]}"
        for i in rng.sample(range(len(names.FIRST_NAMES) * len(surnames)), num_people)
    ]
    companies = [f"{word} {kind}" for word in names.COMPANY_WORDS for kind in names.COMPANY_KINDS]
    places = [f"{kind} {word}" for word in names.PLACE_WORDS for kind in names.PLACE_KINDS]
    rng.shuffle(companies)
    rng.shuffle(places)
    return {"person": people, "company": companies, "place": places}


@functools.lru_cache(maxsize=4)
def get_world(seed: int = 0) -> World:
    """The world of a seed, built once a process (about 0.3 s)."""
    return World(seed)


@functools.lru_cache(maxsize=4)
def world_index(seed: int = 0) -> Index:
    """The index over the passages of a world, built once a process (about a second)."""
    return MemoryIndex(get_world(seed).passages)
