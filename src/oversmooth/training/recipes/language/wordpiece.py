"""Normalisation and WordPiece, trained on the corpus itself: lower case, no accents, 32768 pieces."""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
