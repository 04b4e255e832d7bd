"""Data sets that a program writes: ListOps expressions with their values, and sequences to be copied.

python -m benchmarks.synthetic listops train.jsonl --rows 96000
python -m benchmarks.synthetic copy valid.jsonl --rows 1000 --seed 1
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from hf_rfa.errors import InputError
from hf_rfa.io.atomic_io import new_file

#: The operators of ListOps, a character each, so that a byte tokenizer reads a token a symbol: largest, smallest, median
#: (rounded down) and sum modulo 10.
OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "M": max,
    "m": min,
    "D": lambda values: int(median(values)),
    "S": lambda values: sum(values) % 10,
}
CLOSE = "]"
#: Most nested lists, and most elements of one, as in the Long Range Arena (the outermost may have two more, to fit a length).
MAX_DEPTH, MAX_ELEMENTS = 10, 10
#: What separates a sequence from its copy.
SEPARATOR = "|"


def evaluate_listops(text: str) -> int:
    """Return the value of a ListOps expression, 0 to 9; raise a `ValueError` if the text is none.

    A character is a symbol: an operator opens a list, "]" closes it. ``M25m71]9]`` is 9.
    """
    lists: list[tuple[str, list[int]]] = [("", [])]
    for symbol in text:
        if symbol in OPERATORS:
            lists.append((symbol, []))
        elif symbol.isdecimal():
            lists[-1][1].append(int(symbol))
        elif symbol == CLOSE and len(lists) > 1 and lists[-1][1]:
            operator, values = lists.pop()
            lists[-1][1].append(OPERATORS[operator](values))
        else:
            raise ValueError(f"{text!r} is no ListOps expression.")
    if len(lists) != 1 or len(lists[0][1]) != 1:
        raise ValueError(f"{text!r} is no ListOps expression.")
    return lists[0][1][0]


def listops(rows: int, *, min_length: int, max_length: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield ListOps expressions (Nangia & Bowman 2018) with ``text`` and ``label``, the digit that they are worth.

    A target length in symbols is drawn uniformly, and digits are replaced by lists, wherever there is room, until it is
    reached. Lengths that no expression has raise an `InputError`.
    """
    if not 4 <= min_length <= max_length:
        raise InputError(f"min_length and max_length must be 4 <= {min_length} <= {max_length}.")
    if max_length > 10_000:
        raise InputError(f"max_length must be at most 10000, got {max_length}: depth and width are bounded.")
    draws = random.Random(seed)
    for _ in range(rows):
        text = _expression(draws, draws.randint(min_length, max_length))
        yield {"text": text, "label": evaluate_listops(text)}


def _expression(draws: random.Random, length: int) -> str:
    """Return an expression of exactly ``length`` symbols."""
    # A list of n elements takes n + 2 symbols, in the place of one digit: it adds n + 1.
    first = draws.randint(2, min(MAX_ELEMENTS, length - 2))
    root: list[Any] = [draws.choice("MmDS"), *[None] * first]
    leaves = [(root, place, 1) for place in range(1, first + 1)]  # (list, place in it, depth)
    used = first + 2
    while used < length:
        room = length - used
        if room < 3:  # too little for a list of two: lengthen a list instead
            root.extend([None] * room)
            break
        chosen = draws.randrange(len(leaves))
        leaves[chosen], leaves[-1] = leaves[-1], leaves[chosen]
        parent, place, depth = leaves.pop()
        count = draws.randint(2, min(MAX_ELEMENTS, room - 1))
        parent[place] = [draws.choice("MmDS"), *[None] * count]
        used += count + 1
        if depth + 1 < MAX_DEPTH:
            leaves += [(parent[place], each, depth + 1) for each in range(1, count + 1)]

    def written(node: list[Any]) -> str:
        elements = (str(draws.randrange(10)) if each is None else written(each) for each in node[1:])
        return node[0] + "".join(elements) + CLOSE

    return written(root)


def copy_task(rows: int, *, min_length: int, max_length: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield sequences of digits to be copied (Katharopoulos et al. 2020), of lengths drawn uniformly.

    ``prompt`` is the sequence and "|", ``text`` its copy. Lengths that are none raise an `InputError`.
    """
    if not 1 <= min_length <= max_length:
        raise InputError(f"min_length and max_length must be 1 <= {min_length} <= {max_length}.")
    draws = random.Random(seed)
    for _ in range(rows):
        text = "".join(draws.choice("0123456789") for _ in range(draws.randint(min_length, max_length)))
        yield {"prompt": text + SEPARATOR, "text": text}


#: Data sets by name, with their default lengths.
DATA_SETS: dict[str, tuple[Any, int, int]] = {"listops": (listops, 500, 2000), "copy": (copy_task, 1, 63)}


def main() -> None:
    """Write a data set."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=[*DATA_SETS])
    parser.add_argument("output", type=Path, help="file to write, .jsonl")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--min-length", type=int, help="least symbols; default: 500 for listops, 1 for copy")
    parser.add_argument("--max-length", type=int, help="most symbols; default: 2000 for listops, 63 for copy")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make, least, most = DATA_SETS[args.name]
    rows = make(args.rows, min_length=args.min_length or least, max_length=args.max_length or most, seed=args.seed)
    if args.output.exists() or args.output.is_symlink():
        parser.error(f"{args.output} exists and is kept. Choose another name, or remove it.")
    try:
        with new_file(args.output) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
