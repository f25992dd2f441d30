"""All ten sets of SuperGLUE as small jsonl files of the official format, written by the tests.

Every toy version can be learned from its words: the right answer contains or follows a word of joy, the wrong one does
not, so that a model which really sees the texts, the choices, the entities and the marked words gets nearly all right.
With `shuffled`, labels are drawn without looking, so nothing can be learned.
"""

import json
import random
from pathlib import Path

GOOD = ["glad", "happy", "sunny", "bright", "sweet"]
BAD = ["grim", "awful", "gloomy", "bitter", "rotten"]
FILLER = ["house", "river", "stone", "table", "winter", "garden", "window", "paper", "street", "morning"]
QUEENS, KINGS = ["Ada", "Clara", "Edith"], ["Boris", "Dmitri", "Felix"]
NAMES = [*QUEENS, *KINGS]


class Toy:
    """Writes one record after the other from one stream of random numbers."""

    def __init__(self, seed: int, shuffled: bool):
        self.random, self.shuffled = random.Random(seed), shuffled

    def sentence(self, is_good: bool) -> str:
        words = [self.random.choice(FILLER) for _ in range(4)]
        words.insert(self.random.randrange(4), self.random.choice(GOOD if is_good else BAD))
        return "The " + " ".join(words) + "."

    def truth(self) -> tuple[bool, bool]:
        """What the text says, and what the label says."""
        said = self.random.random() < 0.5
        return said, self.random.random() < 0.5 if self.shuffled else said

    def boolq(self, idx):
        said, label = self.truth()
        return {"question": "is it good", "passage": self.sentence(said), "idx": idx, "label": label}

    def cb(self, idx):
        said, label = self.random.randrange(3), self.random.randrange(3)
        text = [self.sentence(True), self.sentence(False), " ".join(self.random.choices(FILLER, k=5))][said]
        names = ["entailment", "contradiction", "neutral"]
        return {
            "premise": text,
            "hypothesis": "it is good",
            "label": names[label if self.shuffled else said],
            "idx": idx,
        }

    def copa(self, idx):
        said, label = self.truth()
        texts = [self.sentence(not said), self.sentence(said)]
        question = self.random.choice(["cause", "effect"])
        ends = {"choice1": texts[0], "choice2": texts[1], "question": question, "label": int(label), "idx": idx}
        return {"premise": "The day was long.", **ends}

    def multirc(self, idx):
        questions = []
        for number in range(2):
            answers = []
            for answer in range(3):
                said, label = self.truth()
                answers.append({"text": self.sentence(said), "idx": idx * 6 + number * 3 + answer, "label": int(label)})
            questions.append({"question": "Which is good?", "answers": answers, "idx": idx * 2 + number})
        return {"idx": idx, "version": 1.1, "passage": {"text": "Here is a long day.", "questions": questions}}

    def record(self, idx):
        """Of three people one is a queen, and it is always she."""
        names = [self.random.choice(QUEENS), *self.random.sample(KINGS, 2)]
        right = names[self.random.randrange(3) if self.shuffled else 0]
        self.random.shuffle(names)
        text, entities = "", []
        for name in names:
            entities.append({"start": len(text), "end": len(text) + len(name) - 1})
            text += f"{name} came home. "
        query = {"query": "On that day @placeholder was seen", "idx": 10 * idx}
        query["answers"] = [{**entities[names.index(right)], "text": right}]
        return {"source": "toy", "passage": {"text": text, "entities": entities}, "qas": [query], "idx": idx}

    def rte(self, idx):
        said, label = self.truth()
        name = "entailment" if label else "not_entailment"
        return {"premise": self.sentence(said), "hypothesis": "it is good", "label": name, "idx": idx}

    def axb(self, idx):
        record = self.rte(idx)
        return {"sentence1": record["premise"], "sentence2": record["hypothesis"], "label": record["label"], "idx": idx}

    def axg(self, idx):
        return {**self.rte(idx), "pair_id": 500 + idx // 2}

    def wic(self, idx):
        """The same kind of word is marked in both sentences, among words of both kinds."""
        said, label = self.truth()
        kinds = [GOOD, GOOD] if said else [GOOD, BAD]
        record = {"word": "it", "idx": idx, "label": label, "version": 1.1}
        for number, kind in enumerate(kinds, start=1):
            marked, other = self.random.choice(kind), self.random.choice(BAD if kind is GOOD else GOOD)
            words = [self.random.choice(FILLER), marked, self.random.choice(FILLER), other]
            text = " ".join(words)
            start = len(words[0]) + 1
            record |= {f"sentence{number}": text, f"start{number}": start, f"end{number}": start + len(marked)}
        return record

    def wsc(self, idx):
        """One of two marked words; the sentence has words of both kinds, so only the mark tells."""
        said, label = self.truth()
        words = self.random.sample(FILLER, 6)
        good, bad = self.random.sample(range(1, 5), 2)
        words[good], words[bad] = self.random.choice(GOOD), self.random.choice(BAD)
        marked = good if said else bad
        target = {"span1_index": marked, "span1_text": words[marked], "span2_index": 5, "span2_text": words[5]}
        return {"text": " ".join(words), "target": target, "idx": idx, "label": label}


FOLDERS = {
    "boolq": "BoolQ",
    "cb": "CB",
    "copa": "COPA",
    "multirc": "MultiRC",
    "record": "ReCoRD",
    "rte": "RTE",
    "wic": "WiC",
    "wsc": "WSC",
    "axb": "AX-b",
    "axg": "AX-g",
}


def unlabelled(record):
    """A record as test sets have it."""
    record = json.loads(json.dumps(record))
    record.pop("label", None)
    for question in record.get("passage", {}).get("questions", []) if isinstance(record.get("passage"), dict) else []:
        for answer in question["answers"]:
            del answer["label"]
    for query in record.get("qas", []):
        del query["answers"]
    return record


def write_superglue(root: Path, train=24, val=12, test=6, *, names=tuple(FOLDERS), shuffled=False, seed=0) -> Path:
    """The official folders, with so many records in each split."""
    for name in names:
        folder = root / FOLDERS[name]
        folder.mkdir(parents=True)
        toy = Toy(seed, shuffled)
        make = getattr(toy, name)
        if name in ("axb", "axg"):
            splits = {f"{FOLDERS[name]}.jsonl": [make(i) for i in range(val)]}
        else:
            counts = {"train.jsonl": train, "val.jsonl": val, "test.jsonl": test}
            splits = {file: [make(i) for i in range(count)] for file, count in counts.items()}
            splits["test.jsonl"] = [unlabelled(record) for record in splits["test.jsonl"]]
        for file, records in splits.items():
            (folder / file).write_text("".join(json.dumps(record) + "\n" for record in records))
    return root
