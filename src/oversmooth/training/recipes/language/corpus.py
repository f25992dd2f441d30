"""A corpus as sequences of tokens on the disk, made once and found again by the hash of what it was made from.

    documents -> WordPiece -> trash filter -> joined by [SEP] -> cut into sequences of 128 -> order of reading

Nothing is held but the documents at hand: tokens go to a file as 16-bit numbers, and training reads them from there. Work
that was interrupted is taken up at the last checkpoint and ends in the same bytes.

    FOLDER/tokenizer/            the vocabulary, as AutoTokenizer reads it
    FOLDER/train.bin             uint16, one sequence after the other
    FOLDER/validation.bin        the same, of documents held out
    FOLDER/order.bin             uint32, the order of reading, where it is not that of the file
    FOLDER/corpus.json           what was counted; written last, so that it means: finished
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from oversmooth.errors import BadValue, UnknownName, UnreadableData
from oversmooth.output.whole_files import folder_whole, make_folder, write_whole
from oversmooth.training.recipes.language.documents import Progress, Tally, corpus_files, documents
from oversmooth.training.recipes.language.packing import Packer, batches_of_texts, chunks, pieces, sentence_length_order
from oversmooth.training.recipes.language.wordpiece import save_tokenizer, train_wordpiece

ORDERS = ("sentence-length", "as-read")
CHECKPOINT_BATCHES = 64
"""Batches of documents between two checkpoints of the work."""
FORMAT = 1
"""Part of every hash: raise it when the same input would give other bytes."""
Report = Callable[[str, Progress], None]
"""Called with the name of the stage and how far it has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSettings:
    """Everything that the bytes of a corpus depend on, besides its documents."""

    source: str
    """File, folder or hub id."""
    vocab_size: int = 32768
    length: int = 128
    trash_cutoff: float | None = 0.25
    """Documents with more tokens per character are dropped: tables, hashes, broken encodings."""
    order: str = "sentence-length"
    """`sentence-length`: sequences with the most full stops, so the shortest sentences, first; `as-read`: no curriculum."""
    english_keyboard: bool = True
    validation_fraction: float = 0.005
    """Share of documents that are held out, chosen by their number."""
    max_documents: int | None = None
    max_sequences: int | None = None
    tokenizer_documents: int | None = None
    """The vocabulary is trained on so many documents; all of them without it."""

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise UnknownName("order", self.order, ORDERS)
        if not 8 <= self.vocab_size <= 2**16:
            raise BadValue("vocab_size", self.vocab_size, "between 8 and 65536, so that a token fits 16 bits")
        if self.length < 2:
            raise BadValue("length", self.length, "at least 2")
        if not 0 <= self.validation_fraction < 1:
            raise BadValue("validation_fraction", self.validation_fraction, "at least 0 and below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A finished corpus; its sequences are read from the disk as they are asked for."""

    folder: Path
    facts: dict[str, Any]
    """What `corpus.json` says: settings, hash, counts, what was passed over, the unigram entropy."""

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def length(self) -> int:
        return int(self.facts["settings"]["length"])

    def sequences(self, split: str) -> NDArray[numpy.uint16]:
        """(sequence, token) of `train` or `validation`, mapped and not read."""
        path = self.folder / f"{split}.bin"
        count = int(self.facts["sequences"][split])
        if not count:
            return numpy.empty((0, self.length), numpy.uint16)
        return numpy.memmap(path, numpy.uint16, "r", shape=(count, self.length))

    def order(self) -> NDArray[numpy.uint32] | None:
        """The order in which training reads its sequences, where there is a curriculum."""
        path = self.folder / "order.bin"
        return numpy.memmap(path, numpy.uint32, "r") if path.exists() else None


def prepare_corpus(settings: CorpusSettings, cache: Path, report: Report = lambda stage, progress: None) -> Corpus:
    """The corpus from the cache, or made now; one process makes it and others wait for it."""
    from filelock import FileLock

    make_folder(cache)
    key = corpus_hash(settings, cache)
    folder = cache / key
    finished = folder / "corpus.json"
    with FileLock(cache / f"{key}.lock"):
        if not finished.exists():
            folder.mkdir(exist_ok=True)
            facts = _make(settings, key, folder, report)
            text = json.dumps(facts, indent=2) + "\n"
            write_whole(finished, lambda partial: partial.write_text(text, encoding="utf-8"))
            (folder / "checkpoint.json").unlink(missing_ok=True)
    return Corpus(folder=folder, facts=json.loads(finished.read_text(encoding="utf-8")))


# --- identity -------------------------------------------------------------------------------------------------------


def corpus_hash(settings: CorpusSettings, cache: Path) -> str:
    """Hash of the settings and of the content of every file; where files lie does not matter.

    The hash of a file is kept beside the cache under its path, size and time, so that terabytes are read for it once.
    """
    said = {name: value for name, value in asdict(settings).items() if name != "source"}
    files = corpus_files(settings.source)
    said["content"] = [file_hash(file, cache) for file in files] if files else f"hub:{settings.source}"
    said["format"] = FORMAT
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:20]


def file_hash(file: Path, cache: Path) -> str:
    known_path = cache / "hashes.json"
    known = json.loads(known_path.read_text(encoding="utf-8")) if known_path.exists() else {}
    facts = file.stat()
    key = f"{file.absolute()}|{facts.st_size}|{facts.st_mtime_ns}"
    if key not in known:
        with file.open("rb") as stream:
            known[key] = hashlib.file_digest(stream, "sha256").hexdigest()
        text = json.dumps(known, indent=1)
        write_whole(known_path, lambda partial: partial.write_text(text, encoding="utf-8"))
    return str(known[key])


# --- making it ------------------------------------------------------------------------------------------------------


def _make(settings: CorpusSettings, key: str, folder: Path, report: Report) -> dict[str, Any]:
    tokenizer = _tokenizer(settings, folder, report)
    state = _packed(settings, folder, tokenizer, report)
    sequences = {split: state["splits"][split]["sequences"] for split in ("train", "validation")}
    if not sequences["train"]:
        found = f"{state['records']} records that give none ({_words(state)})"
        raise UnreadableData(settings.source, f"text for one sequence of {settings.length} tokens", found)
    if settings.order == "sentence-length":
        stop = tokenizer.token_to_id(".")
        report("Ordering sequences", Progress(0, 1))
        sentence_length_order(folder / "train.bin", sequences["train"], settings.length, stop, folder / "order.bin")
    return {
        "hash": key,
        "settings": asdict(settings),
        "vocabulary": tokenizer.get_vocab_size(),
        "sequences": sequences,
        "records": state["records"],
        "documents": state["documents"],
        "skipped": state["skipped"],
        "named": state["named"],
        "unigram_entropy": unigram_entropy(folder / "train.bin", tokenizer.get_vocab_size()),
    }


def _words(state: dict[str, Any]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in state["skipped"].items()) or "too little text"


def _tokenizer(settings: CorpusSettings, folder: Path, report: Report) -> Any:
    from tokenizers import Tokenizer

    path = folder / "tokenizer" / "tokenizer.json"
    if not path.exists():
        limits = [limit for limit in (settings.tokenizer_documents, settings.max_documents) if limit is not None]

        def texts() -> Iterator[str]:
            found = documents(settings.source, Tally(), report=lambda done: report("Training the vocabulary", done))
            return (piece for text in islice(found, min(limits, default=None)) for piece in pieces(text))

        trained = train_wordpiece(texts, settings.vocab_size, settings.english_keyboard)
        with folder_whole(folder / "tokenizer") as partial:
            save_tokenizer(trained, partial, settings.length)
    return Tokenizer.from_file(str(path))


def _packed(settings: CorpusSettings, folder: Path, tokenizer: Any, report: Report) -> dict[str, Any]:
    """Tokenizes everything from where the last checkpoint was; the state at the end."""
    checkpoint = folder / "checkpoint.json"
    state = json.loads(checkpoint.read_text(encoding="utf-8")) if checkpoint.exists() else {}
    tally = Tally(skipped=Counter(state.get("skipped", {})), named=state.get("named", []))
    skip, read = state.get("records", 0), state.get("documents", 0)
    splits = state.get("splits", {"train": {}, "validation": {}})
    with (
        Packer.open(folder / "train.bin", settings.length, splits["train"]) as train,
        Packer.open(folder / "validation.bin", settings.length, splits["validation"]) as validation,
    ):

        def save() -> dict[str, Any]:
            now = {"records": tally.records, "documents": read, "skipped": tally.skipped, "named": tally.named}
            now["splits"] = {"train": train.state(), "validation": validation.state()}
            text = json.dumps(now)
            write_whole(checkpoint, lambda partial: partial.write_text(text, encoding="utf-8"))
            return now

        texts: Iterator[str] = documents(
            settings.source, tally, skip=skip, report=lambda progress: report("Packing sequences", progress)
        )
        if settings.max_documents is not None:
            texts = islice(texts, settings.max_documents - read)
        for number, batch in enumerate(batches_of_texts(tokenizer, texts), start=1):
            for tokens, characters in batch:
                if settings.trash_cutoff is not None and len(tokens) > settings.trash_cutoff * characters:
                    tally.skip("too many tokens per character", f"{settings.source}, around record {tally.records}")
                elif len(tokens):
                    held_out = _is_held_out(read, settings.validation_fraction)
                    (validation if held_out else train).add(tokens)
                read += 1
            if number % CHECKPOINT_BATCHES == 0:
                save()
            if settings.max_sequences is not None and train.sequences >= settings.max_sequences:
                train.cut(settings.max_sequences)
                break
        return save()


def _is_held_out(number: int, fraction: float) -> bool:
    """Whether a document is for validation: multiplicative hashing spreads consecutive numbers evenly over [0, 1)."""
    return (number * 2654435761 + 1) % 2**32 / 2**32 >= 1 - fraction


def unigram_entropy(path: Path, vocabulary: int) -> float:
    """Entropy in nats of the tokens by themselves: the loss of guessing every masked token by its frequency alone.

    Special tokens are left out, as masking leaves them out.
    """
    from oversmooth.training.recipes.language.wordpiece import SPECIAL_TOKENS

    counts = numpy.zeros(vocabulary, numpy.int64)
    for tokens in chunks(path):
        counts += numpy.bincount(tokens, minlength=vocabulary)
    counts[: len(SPECIAL_TOKENS)] = 0
    p = counts[counts > 0] / max(counts.sum(), 1)
    return -math.fsum((p * numpy.log(p)).tolist()) + 0.0
