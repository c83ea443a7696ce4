"""Layouts of layers over pipeline chunks as text, the way Megatron-LM writes them.

``Et*2|(t*2|)*34,t*3|(t*2|)*3,tL``: E is the embedding, t a layer, m a layer that predicts a further
token, L the loss; ``*n`` repeats what stands before it, ``|`` ends a chunk, ``,`` only separates.
Chunk c is a stage of its own, on rank c mod ranks.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from simcore.errors import PlanError

SYMBOLS = "EtmL"
MAX_SYMBOLS = 2**20
_TOKEN = re.compile(r"\(([^()]*)\)|([EtmL|])")
_TIMES = re.compile(r"\*([0-9]{1,7})")
_WORDS = {"E": "the embedding", "m": "prediction layers", "L": "the loss"}


def parse_layout(text: str) -> tuple[str, ...]:
    """Returns what each chunk holds, one letter each: ``("Ett", "tt", ..., "tL")``.

    Raises:
        PlanError: the text is malformed or far too long.
    """
    return tuple("".join(_unrolled(text, text)).split("|"))


def _unrolled(text: str, whole: str) -> Iterator[str]:
    """Yields letters and bars without repeats, separators and brackets."""
    position = length = 0
    while position < len(text):
        if text[position] in ", ":
            position += 1
            continue
        token = _TOKEN.match(text, position)
        if token is None:
            raise PlanError(f"layout {whole[:80]!r}: cannot read {text[position:][:20]!r}")
        inner = "".join(_unrolled(token[1], whole)) if token[2] is None else token[2]
        times = _TIMES.match(text, token.end())
        count = int(times[1]) if times else 1
        length += count * len(inner)
        if length > MAX_SYMBOLS:
            raise PlanError(f"layout {whole[:80]!r}: more than 2**20 letters")
        if count == 0:
            raise PlanError(f"layout {whole[:80]!r}: repeats {token[0]!r} no times")
        yield inner * count
        position = times.end() if times else token.end()


def format_layout(chunks: Sequence[str]) -> str:
    """Returns the shortest way to write chunks; `parse_layout` reads it back.

    Raises:
        PlanError: there are none, or one holds another letter.
    """
    if not chunks or not set("".join(chunks)) <= set(SYMBOLS):
        raise PlanError(f"layout: chunks of the letters {', '.join(SYMBOLS)} are wanted")
    text = ""
    for chunk, times in _runs(chunks[:-1]):
        written = _letters(chunk) + "|"
        text += f"({written})*{times}," if times > 1 else written
    return text + _letters(chunks[-1])


def _letters(chunk: str) -> str:
    return "".join(f"{letter}*{times}" if times > 1 else letter for letter, times in _runs(chunk))


def _runs(items: Sequence[str]) -> list[tuple[str, int]]:
    return [(item, len(list(group))) for item, group in groupby(items)]


def check_layout(
    chunks: Sequence[str], *, num_ranks: int, num_layers: int, stages_per_rank: int | None = None
) -> None:
    """Accepts a layout that Megatron-LM runs on so many ranks and layers.

    Args:
        chunks: as `parse_layout` returns them.
        num_ranks: pipeline ranks.
        num_layers: layers of the model, the letters t.
        stages_per_rank: chunks of each rank; any number where None.

    Raises:
        PlanError: the wrong number of chunks or layers, or letters in the wrong place.
    """
    held = "".join(chunks)
    if stages_per_rank is not None and len(chunks) != num_ranks * stages_per_rank:
        raise PlanError(
            f"layout has {len(chunks)} chunks; {num_ranks} ranks with {stages_per_rank} each need "
            f"{num_ranks * stages_per_rank}"
        )
    if len(chunks) % num_ranks:
        raise PlanError(f"layout has {len(chunks)} chunks, not a multiple of {num_ranks} ranks")
    if held.count("t") != num_layers:
        raise PlanError(f"layout has {held.count('t')} layers; the model has {num_layers}")
    if not re.fullmatch(r"Et*m*L", held):
        raise PlanError("layout must be E first, then t, then m, then L last, each of E and L once")


def layers_per_chunk(chunks: Sequence[str]) -> list[int]:
    """Returns the number of layers (letters t) of each chunk."""
    return [chunk.count("t") for chunk in chunks]


def explain_layout(chunks: Sequence[str]) -> str:
    """Returns in words where a layout departs from an even one."""
    layers = layers_per_chunk(chunks)
    usual = max(sorted(set(layers)), key=layers.count)
    words = [f"{len(chunks)} chunks, {sum(layers)} layers, {usual} to a chunk"]
    for number, chunk in enumerate(chunks):
        other = [_WORDS[letter] for letter, _ in _runs(chunk) if letter in _WORDS]
        if layers[number] != usual or other:
            holds = [f"{layers[number]} layer{'s' * (layers[number] != 1)}", *other]
            words.append(f"chunk {number} has {' and '.join(holds)}")
    return "; ".join(words)
