"""From documents to packed token sequences on disk; the WordPiece vocabulary.

    .jsonl .jsonl.zst .jsonl.gz     one JSON object per line, its text under "text"
    .parquet                        rows, the column "text"
    .txt and any other              paragraphs, separated by blank lines
    a folder                        all of these inside it, in the order of their names
    NAME or NAME:SPLIT              a dataset of the hub, streamed

What cannot be used is passed over, counted by reason, and the first of each kind is named with its file and line. A line
is never held in memory beyond `MAX_RECORD_BYTES`.

    documents -> WordPiece -> trash filter -> joined by [SEP] -> cut into sequences of 128 -> order of reading

Nothing is held but the documents at hand: tokens go to a file as 16-bit numbers, and training reads them from there. Work
that was interrupted is taken up at the last checkpoint and ends in the same bytes.

    FOLDER/tokenizer/            the vocabulary, as AutoTokenizer reads it
    FOLDER/train.bin             uint16, one sequence after the other
    FOLDER/validation.bin        the same, of documents held out
    FOLDER/order.bin             uint32, the order of reading, where it is not that of the file
    FOLDER/corpus.json           what was counted; written last, so that it means: finished
"""

import gzip
import hashlib
import io
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy
from numpy.typing import NDArray

from oversmooth.analysis import Stage
from oversmooth.data.raw import load_hub_rows, name_and_split, require_there
from oversmooth.environment.files import folder_whole, make_folder, write_text_whole
from oversmooth.errors import BadValue, MissingDependency, UnknownName, UnreadableData, first_line
from oversmooth.results import Progress, no_progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer


MAX_RECORD_BYTES = 32 * 2**20
"""Longest line of a .jsonl file, and longest paragraph of a .txt file, that is read as one document."""
NAMED_PER_REASON = 5
ENDINGS = (".jsonl", ".jsonl.zst", ".json.zst", ".jsonl.gz", ".parquet", ".txt", ".md", ".rst")

NO_JSON, NO_TEXT, EMPTY, TOO_LONG, CUT = "not JSON", "no text", "empty", "too long for one line", "cut in pieces"


@dataclass
class Tally:
    """How many records were read and which were passed over, for what reason, and where the first of them are."""

    records: int = 0
    """Lines, rows or paragraphs, used or not: the position at which reading can be taken up again."""
    skipped: Counter[str] = field(default_factory=Counter)
    named: list[str] = field(default_factory=list)
    """The first of every reason, in words: file, line, what is wrong."""

    def skip(self, reason: str, where: str, detail: str = "") -> None:
        self.skipped[reason] += 1
        if self.skipped[reason] <= NAMED_PER_REASON:
            self.named.append(f"{where}: {reason}{f' ({detail})' if detail else ''}")


def corpus_files(source: str) -> list[Path]:
    """The files that a local source consists of, in reading order; empty where it is no local path."""
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(ENDINGS))
    if not files:
        raise UnreadableData(source, f"files that end in {', '.join(ENDINGS)}", "a folder with none of them")
    return files


def documents(
    source: str,
    tally: Tally,
    *,
    skip: int = 0,
    report: Progress = no_progress,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[str]:
    """The texts of a source; `skip` passes over that many records unread, `tally` says what was passed over.

    `report` hears of bytes of the files as they lie on the disk.
    """
    files = corpus_files(source)
    if not files:
        yield from _hub(source, tally, skip)
        return
    total, before = sum(file.stat().st_size for file in files), 0
    for file in files:
        with file.open("rb") as raw:
            for number, where, text in _records(file, raw, tally, max_record_bytes):
                tally.records += 1
                if tally.records > skip and (found := _usable(text, where, tally)):
                    yield found
                if number % 64 == 0:
                    report(before + raw.tell(), total)
        before += file.stat().st_size
    report(total, total)


Record = tuple[int, str, Callable[[], Any]]
"""Number within its file, where it is in words, and what gives its text: a record that is passed over is never decoded."""


def _records(file: Path, raw: io.BufferedIOBase, tally: Tally, limit: int) -> Iterator[Record]:
    name = file.name
    if name.endswith(".parquet"):
        return _parquet(file, raw)
    stream: Any = raw
    if name.endswith(".zst"):
        pyarrow = _pyarrow("reading .zst files")
        stream = io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd"), 2**20)
    elif name.endswith(".gz"):
        stream = gzip.GzipFile(fileobj=raw)
    if ".jsonl" in name or ".json." in name:
        return _jsonl(file, stream, limit)
    return _paragraphs(file, stream, tally, limit)


def _pyarrow(needed_for: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency("pyarrow", "hf", needed_for) from error
    return pyarrow


def _usable(text: Callable[[], Any], where: str, tally: Tally) -> str | None:
    """The text without what cannot be encoded, or `None` where there is none; then it is counted."""
    try:
        found = text()
    except _Unusable as error:
        tally.skip(error.reason, where, error.detail)
        return None
    if not isinstance(found, str):
        tally.skip(NO_TEXT, where, f"a {type(found).__name__} under 'text'")
        return None
    if not found or found.isspace():
        tally.skip(EMPTY, where)
        return None
    try:
        found.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write and no tokenizer takes
        return found.encode("utf-8", "replace").decode("utf-8")
    return found


class _Unusable(Exception):
    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def _lines(file: Path, stream: io.BufferedIOBase, limit: int) -> Iterator[tuple[int, bytes, bool]]:
    """Number, bytes and whether the line ends there; a line beyond the limit comes in pieces of that size."""
    number, ends = 1, True
    try:
        while chunk := stream.readline(limit):
            ends = chunk.endswith(b"\n")
            yield number, chunk, ends
            number += ends
    except (OSError, EOFError) as error:
        found = f"damaged data after line {number} ({first_line(error)})"
        raise UnreadableData(str(file), "a file that can be read to its end", found) from error


# Not with `json_rows`, which refuses a file with one bad line: in a corpus of the web there always is one.
def _jsonl(file: Path, stream: io.BufferedIOBase, limit: int) -> Iterator[Record]:
    lines = _lines(file, stream, limit)
    for number, line, ends in lines:
        where = f"{file}, line {number}"
        if ends or len(line) < limit:
            yield number, where, partial(_text_of_json, line)
            continue
        size = len(line)
        for _, rest, ends_now in lines:
            size += len(rest)
            if ends_now:
                break
        yield number, where, partial(_refuse, TOO_LONG, f"{size:,} bytes; at most {limit:,}")


def _refuse(reason: str, detail: str) -> str:
    raise _Unusable(reason, detail)


def _text_of_json(line: bytes) -> Any:
    if not line.strip():
        return ""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _Unusable(NO_JSON, str(error)) from error
    if not isinstance(record, dict) or "text" not in record:
        keys = ", ".join(map(str, list(record)[:5])) if isinstance(record, dict) else type(record).__name__
        raise _Unusable(NO_TEXT, f"found {keys or 'no keys'}")
    return record["text"]


def _paragraphs(file: Path, stream: io.BufferedIOBase, tally: Tally, limit: int) -> Iterator[Record]:
    """Lines up to a blank one; more than the limit, also without any line break, is cut there."""
    held: list[bytes] = []
    size, first, count = 0, 1, 0
    for number, line, ends in _lines(file, stream, limit):
        is_blank = ends and not line.strip()
        if held and (is_blank or size + len(line) > limit):
            count += 1
            where = f"{file}, line {first}"
            yield count, where, partial(_decoded, b"".join(held), None if is_blank else (tally, where))
            held, size = [], 0
        if not is_blank:
            first = first if held else number
            held.append(line)
            size += len(line)
    if held:
        yield count + 1, f"{file}, line {first}", partial(_decoded, b"".join(held), None)


def _decoded(data: bytes, cut: tuple[Tally, str] | None) -> str:
    if cut is not None:
        cut[0].skip(CUT, cut[1], f"after {len(data):,} bytes")
    return data.decode("utf-8", "replace").strip()


# Not with the datasets library, as other tables: that holds a row group at a time, which may be a gigabyte of text.
def _parquet(file: Path, raw: io.BufferedIOBase) -> Iterator[Record]:
    pyarrow = _pyarrow("reading .parquet files")
    try:
        table = pyarrow.parquet.ParquetFile(raw, pre_buffer=False)
    except pyarrow.ArrowException as error:
        raise UnreadableData(str(file), "a Parquet file", first_line(error)) from error
    if "text" not in table.schema_arrow.names:
        raise UnreadableData(str(file), "a column 'text'", f"the columns {', '.join(table.schema_arrow.names)}")
    values = (value for batch in table.iter_batches(batch_size=64, columns=["text"]) for value in batch.column(0))
    for number, value in enumerate(values, start=1):
        yield number, f"{file}, row {number}", value.as_py


def _hub(source: str, tally: Tally, skip: int) -> Iterator[str]:
    name, split = name_and_split(source)
    require_there(source)
    expected = "a file, a folder or a dataset of the hub (NAME or NAME:SPLIT)"
    rows = load_hub_rows(source, expected, name, split=split, streaming=True)
    rows = rows.skip(skip) if skip else rows
    tally.records = skip
    for row in rows:
        tally.records += 1
        where = f"{source}, row {tally.records}"
        if "text" not in row:
            raise UnreadableData(source, "a column 'text'", f"the columns {', '.join(row)}")
        if found := _usable(partial(row.get, "text"), where, tally):
            yield found


# --- normalisation and WordPiece, trained on the corpus itself: lower case, no accents, 32768 pieces ---

PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""In this order at the front of every vocabulary: the padding is 0."""
ALPHABET = 1000
"""Most single characters that get a piece of their own; the rest of the world's scripts is unknown."""


def untrained_wordpiece(english_keyboard: bool) -> "Tokenizer":
    """The rules before any vocabulary: quotes made plain, lower case, accents taken off.

    `english_keyboard` also takes out every character beyond ASCII, as the published corpus was made.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    steps: list[normalizers.Normalizer] = [
        normalizers.Replace("``", '"'),
        normalizers.Replace("''", '"'),
        normalizers.NFD(),
        normalizers.Lowercase(),
        normalizers.StripAccents(),
    ]
    steps += [normalizers.Replace(Regex(r"[^\x00-\x7F]+"), "")] if english_keyboard else []
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def train_wordpiece(texts: Callable[[], Iterable[str]], vocab_size: int, english_keyboard: bool) -> "Tokenizer":
    """A vocabulary of at most `vocab_size` pieces; a small corpus gives fewer. The same texts give the same pieces.

    `texts` is called twice. The trainer numbers the pieces that continue a word in the order of a randomly seeded hash
    table, and that order decides between equally frequent merges; it keeps the numbers of special tokens, so single
    characters are handed to it as such, in an order of ours, and become ordinary pieces again afterwards.
    """
    from tokenizers import models, processors, trainers

    tokenizer = untrained_wordpiece(english_keyboard)
    alphabet = _alphabet(tokenizer, texts(), min(ALPHABET, vocab_size // 3))
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *(f"##{character}" for character in alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer=trainer)
    vocabulary = tokenizer.get_vocab()
    tokenizer = untrained_wordpiece(english_keyboard)
    tokenizer.model = models.WordPiece(vocabulary, unk_token=UNKNOWN)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B {SEP}",
        special_tokens=[(token, vocabulary[token]) for token in (CLS, SEP)],
    )
    return tokenizer


def _alphabet(tokenizer: "Tokenizer", texts: Iterable[str], most: int) -> list[str]:
    """The most frequent characters after normalisation, in the order of their code points."""
    raw: Counter[str] = Counter()
    for text in texts:
        raw.update(text)
    counts: Counter[str] = Counter({'"': 1})  # what paired quotes become
    for character, count in raw.items():
        for normal in tokenizer.normalizer.normalize_str(character):
            counts[normal] += count if not normal.isspace() else 0
    frequent = sorted((c for c in counts if counts[c] > 0), key=lambda c: (-counts[c], c))
    return sorted(frequent[:most])


def save_tokenizer(tokenizer: "Tokenizer", folder: Path, length: int) -> None:
    """Beside the weights, as `AutoTokenizer` reads it; sequences are cut at `length`."""
    from transformers import PreTrainedTokenizerFast

    names = {"pad_token": PAD, "unk_token": UNKNOWN, "cls_token": CLS, "sep_token": SEP, "mask_token": MASK}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=length,
        model_input_names=["input_ids", "attention_mask"],
        **names,
    )
    wrapped.save_pretrained(folder)


# --- documents into sequences of equal length, appended to a file ---

BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 2**19
"""Texts that are tokenized together; a longer one goes in pieces of this size, cut at a space."""
CHUNK = 2**22
"""Tokens of a file that are looked at together."""
SEP_ID = SPECIAL_TOKENS.index(SEP)
Tokens = NDArray[numpy.uint16]


def batches_of_texts(tokenizer: Any, texts: Iterator[str]) -> Iterator[list[tuple[Tokens, int]]]:
    """Tokens and number of characters of each document, batch by batch, so that memory does not grow with the corpus.

    Never reads ahead: when a batch is given out, every text that was read is in it or in one before.
    """
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield _tokenized(tokenizer, batch)
            batch, size = [], 0
    if batch:
        yield _tokenized(tokenizer, batch)


def _tokenized(tokenizer: Any, batch: list[str]) -> list[tuple[Tokens, int]]:
    def ids(texts: list[str]) -> list[Tokens]:
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [numpy.asarray(each.ids, numpy.uint16) for each in encoded]

    short = iter(ids([text for text in batch if len(text) <= BATCH_CHARACTERS]))
    found = []
    for text in batch:
        is_long = len(text) > BATCH_CHARACTERS
        tokens = numpy.concatenate([ids([piece])[0] for piece in pieces(text)]) if is_long else next(short)
        found.append((tokens, len(text)))
    return found


def pieces(text: str) -> Iterator[str]:
    """A long text in parts, cut at spaces: tokenizers keep some eighty bytes per character of what they work on."""
    start = 0
    while start < len(text):
        end = start + BATCH_CHARACTERS
        space = text.rfind(" ", start + 1, end) if end < len(text) else -1
        end = space if space > start else end
        yield text[start:end]
        start = end


class Packer:
    """Joins documents by [SEP] and writes whole sequences; what is left over waits for the next document."""

    def __init__(self, file: BinaryIO, length: int, sequences: int, left: list[int]):
        self._file, self._length, self.sequences = file, length, sequences
        self._left: Tokens = numpy.asarray(left, numpy.uint16)

    @classmethod
    @contextmanager
    def open(cls, path: Path, length: int, state: Mapping[str, Any]) -> Iterator["Packer"]:
        """Continues at a state: whatever was written after it is cut off."""
        sequences = int(state.get("sequences", 0))
        with path.open("r+b" if sequences else "wb") as file:
            file.truncate(sequences * length * 2)
            file.seek(0, os.SEEK_END)
            yield cls(file, length, sequences, list(state.get("left", ())))

    def add(self, tokens: Tokens) -> None:
        joined = numpy.concatenate([self._left, tokens, numpy.asarray([SEP_ID], numpy.uint16)])
        whole = len(joined) // self._length
        self._file.write(joined[: whole * self._length].tobytes())
        self._left = joined[whole * self._length :]
        self.sequences += whole

    def cut(self, sequences: int) -> None:
        self._file.flush()
        self._file.truncate(sequences * self._length * 2)
        self.sequences, self._left = sequences, self._left[:0]

    def state(self) -> dict[str, Any]:
        """Where to continue; everything up to here is on the disk before this returns."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"sequences": self.sequences, "left": self._left.tolist()}


def chunks(path: Path, size: int = CHUNK) -> Iterator[Tokens]:
    """The tokens of a file, so many at a time; read and not mapped, since mapped pages stay in memory."""
    with path.open("rb") as file:
        while len(tokens := numpy.fromfile(file, numpy.uint16, size)):
            yield tokens


def sentence_length_order(path: Path, sequences: int, length: int, stop: int | None, out: Path) -> None:
    """Writes the numbers of the sequences by falling number of full stops, equal ones in reading order.

    A counting sort in two passes over the file, since a sequence has at most `length` full stops.
    """
    step = max(1, CHUNK // length)
    counts = numpy.zeros(sequences, numpy.uint16)
    for number, tokens in enumerate(chunks(path, step * length)):
        part = tokens.reshape(-1, length)
        counts[number * step : number * step + len(part)] = (part == (-1 if stop is None else stop)).sum(1)
    sizes = numpy.bincount(counts, minlength=length + 1)
    begins = numpy.cumsum(sizes[::-1])[::-1] - sizes  # most full stops first
    partial = out.with_suffix(".partial")
    order = numpy.memmap(partial, numpy.uint32, "w+", shape=(sequences,))
    for start in range(0, sequences, step):
        part = counts[start : start + step]
        for value in numpy.unique(part):
            found = numpy.flatnonzero(part == value)
            order[begins[value] : begins[value] + len(found)] = found + start
            begins[value] += len(found)
    order.flush()
    del order
    os.replace(partial, out)


# --- A corpus as sequences of tokens on the disk ---

ORDERS = ("sentence-length", "as-read")
CHECKPOINT_BATCHES = 64
"""Batches of documents between two checkpoints of the work."""
FORMAT = 1
"""Part of every hash: raise it when the same input would give other bytes."""


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
        count = int(self.facts["sequences"][split])
        if not count:
            return numpy.empty((0, self.length), numpy.uint16)
        return numpy.memmap(self.folder / f"{split}.bin", numpy.uint16, "r", shape=(count, self.length))

    def order(self) -> NDArray[numpy.uint32] | None:
        """The order in which training reads its sequences, where there is a curriculum."""
        path = self.folder / "order.bin"
        return numpy.memmap(path, numpy.uint32, "r") if path.exists() else None


def prepare_corpus(settings: CorpusSettings, cache: Path, stage: Stage = lambda name: no_progress) -> Corpus:
    """The corpus from the cache, or made now; one process makes it and others wait for it."""
    from filelock import FileLock

    make_folder(cache)
    key = corpus_hash(settings, cache)
    folder = cache / key
    finished = folder / "corpus.json"
    with FileLock(cache / f"{key}.lock"):
        if not finished.exists():
            folder.mkdir(exist_ok=True)
            facts = _make(settings, key, folder, stage)
            write_text_whole(finished, json.dumps(facts, indent=2) + "\n")
            (folder / "checkpoint.json").unlink(missing_ok=True)
    return Corpus(folder=folder, facts=json.loads(finished.read_text(encoding="utf-8")))


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
        write_text_whole(known_path, json.dumps(known, indent=1))
    return str(known[key])


def _make(settings: CorpusSettings, key: str, folder: Path, stage: Stage) -> dict[str, Any]:
    tokenizer = _tokenizer(settings, folder, stage)
    state = _packed(settings, folder, tokenizer, stage)
    sequences = {split: state["splits"][split]["sequences"] for split in ("train", "validation")}
    if not sequences["train"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in state["skipped"].items()) or "too little text"
        found = f"{state['records']} records that give none ({reasons})"
        raise UnreadableData(settings.source, f"text for one sequence of {settings.length} tokens", found)
    if settings.order == "sentence-length":
        stop = tokenizer.token_to_id(".")
        stage("Ordering sequences")
        sentence_length_order(folder / "train.bin", sequences["train"], settings.length, stop, folder / "order.bin")
    return {
        "hash": key,
        "settings": asdict(settings),
        "vocabulary": tokenizer.get_vocab_size(),
        "sequences": sequences,
        **{name: state[name] for name in ("records", "documents", "skipped", "named")},
        "unigram_entropy": unigram_entropy(folder / "train.bin", tokenizer.get_vocab_size()),
    }


def _tokenizer(settings: CorpusSettings, folder: Path, stage: Stage) -> Any:
    from tokenizers import Tokenizer

    path = folder / "tokenizer" / "tokenizer.json"
    if not path.exists():
        limits = [limit for limit in (settings.tokenizer_documents, settings.max_documents) if limit is not None]

        def texts() -> Iterator[str]:
            found = documents(settings.source, Tally(), report=stage("Training the vocabulary"))
            return (piece for text in islice(found, min(limits, default=None)) for piece in pieces(text))

        trained = train_wordpiece(texts, settings.vocab_size, settings.english_keyboard)
        with folder_whole(folder / "tokenizer") as partial:
            save_tokenizer(trained, partial, settings.length)
    return Tokenizer.from_file(str(path))


def _packed(settings: CorpusSettings, folder: Path, tokenizer: Any, stage: Stage) -> dict[str, Any]:
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
            write_text_whole(checkpoint, json.dumps(now))
            return now

        most = None if settings.max_documents is None else settings.max_documents - read
        texts = islice(documents(settings.source, tally, skip=skip, report=stage("Packing sequences")), most)
        for number, batch in enumerate(batches_of_texts(tokenizer, texts), start=1):
            for tokens, characters in batch:
                if settings.trash_cutoff is not None and len(tokens) > settings.trash_cutoff * characters:
                    tally.skip("too many tokens per character", f"{settings.source}, around record {tally.records}")
                elif len(tokens):
                    spread = (read * 2654435761 + 1) % 2**32 / 2**32  # of consecutive numbers evenly over [0, 1)
                    (validation if spread >= 1 - settings.validation_fraction else train).add(tokens)
                read += 1
            if number % CHECKPOINT_BATCHES == 0:
                save()
            if settings.max_sequences is not None and train.sequences >= settings.max_sequences:
                train.cut(settings.max_sequences)
                break
        return save()


def unigram_entropy(path: Path, vocabulary: int) -> float:
    """Entropy in nats of the tokens by themselves: the loss of guessing every masked token by its frequency alone.

    Special tokens are left out, as masking leaves them out.
    """
    counts = numpy.zeros(vocabulary, numpy.int64)
    for tokens in chunks(path):
        counts += numpy.bincount(tokens, minlength=vocabulary)
    counts[: len(SPECIAL_TOKENS)] = 0
    p = counts[counts > 0] / max(counts.sum(), 1)
    return -math.fsum((p * numpy.log(p)).tolist()) + 0.0
