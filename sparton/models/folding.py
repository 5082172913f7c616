"""Terms that count as one: a representation's weight of a term is the largest of those folded into
it, and the others have none.

N texts, V vocabulary, F terms that are folded or folded into, G groups of them.
"""

import functools
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sparton.models.damage import read_tensors
from sparton.reading import read_json, shown

NOWHERE = -1
FILE = "folding.safetensors"  # of a model's folder


class Folding(nn.Module):
    """Folds representations; V stays what it is, and terms keep their numbers.

    Args:
        columns: integers ``[V]``, the term that each is folded into, itself for most; -1 where it
            is left out.

    Raises:
        ValueError: a term is folded into one that is folded or left out itself, or does not exist.
    """

    columns: Tensor
    members: Tensor
    groups: Tensor
    targets: Tensor
    emptied: Tensor

    def __init__(self, columns: Tensor) -> None:
        super().__init__()
        columns = columns.long()
        V = len(columns)
        kept = columns[columns != NOWHERE]
        if V and not (columns.amin() >= NOWHERE and columns.amax() < V):
            raise ValueError(f"terms are folded into others than the {V} of the vocabulary")
        if not torch.equal(columns[kept], kept):
            wrong = int(kept[(columns[kept] != kept).nonzero()[0]])
            raise ValueError(
                f"terms are folded into term {wrong}, which is folded or left out itself: fold "
                "them into the last one"
            )
        folded = columns != torch.arange(V)
        of_group = torch.zeros(V, dtype=torch.bool)
        of_group[columns[folded & (columns != NOWHERE)]] = True
        members = ((folded | of_group) & (columns != NOWHERE)).nonzero().flatten()
        targets = columns[members]
        self.num_groups = int(of_group.sum())
        for name, tensor in {
            "columns": columns,
            "members": members,
            "groups": (of_group.long().cumsum(0) - 1)[targets],
            "targets": targets,
            "emptied": (folded | of_group).nonzero().flatten(),
        }.items():
            # What tells models apart are their weights: a folding is one of them.
            self.register_buffer(name, tensor, persistent=name == "columns")

    def forward(self, reps: Tensor) -> Tensor:
        """Fold ``reps [N, V]``, none below zero. The gradient of a maximum goes to the term that
        has it, of equal ones to the first of the vocabulary."""
        values = reps.index_select(1, self.members)
        groups = self.groups.expand_as(values)
        shape = (len(reps), self.num_groups)
        best = values.new_zeros(shape).scatter_reduce(1, groups, values.detach(), "amax")
        F = values.shape[1]
        places = torch.arange(F, device=reps.device).expand_as(values)
        largest = (values == best.gather(1, groups)) | values.isnan()
        wins = torch.where(largest, places, F)
        first = places.new_full(shape, F).scatter_reduce(1, groups, wins, "amin")
        values = torch.where(first.gather(1, groups) == places, values, 0.0)
        return reps.index_fill(1, self.emptied, 0.0).index_add(1, self.targets, values)


def same_folding(one: Folding | None, other: Folding | None) -> bool:
    """Whether two foldings, or none, fold alike."""
    if one is None or other is None:
        return one is other
    return torch.equal(one.columns.cpu(), other.columns.cpu())


def read_folding(folding: str | Path, tokenizer: PreTrainedTokenizerFast, rows: int) -> Folding:
    """A folding of the terms of a tokenizer.

    Args:
        folding: "case" for :func:`fold_case`; or the path of a JSON object of terms as the
            tokenizer names them, each with the term it is folded into or null where it is left out;
            or of what :func:`write_folding` wrote.
        tokenizer: of the model.
        rows: V.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or names what the tokenizer does not know.
    """
    if folding == "case":
        return Folding(fold_case(tokenizer, rows))
    path = Path(folding)
    if not path.is_file():
        raise FileNotFoundError(
            f"folding={str(folding)!r}: no such file; it is 'case', or a file that says which term "
            "is folded into which"
        )
    try:
        if path.suffix == ".json":
            return Folding(_read_names(path, tokenizer, rows))
        columns = read_columns(path)
        if len(columns) != rows:
            raise ValueError(f"it folds {len(columns)} terms, and the model has {rows}")
        return Folding(columns)
    except ValueError as error:
        raise ValueError(f"folding={str(folding)!r}: {error}") from None


def write_folding(folding: Folding, folder: Path) -> None:
    """Write it as FILE, int32 ``columns [V]``."""
    save_file({"columns": folding.columns.int().cpu()}, folder / FILE, metadata={"format": "pt"})


def read_columns(path: Path) -> Tensor:
    """The ``columns [V]`` that :func:`write_folding` wrote.

    Raises:
        ValueError: the file is damaged.
    """
    columns = read_tensors(path).get("columns")
    if columns is None or columns.ndim != 1 or columns.is_floating_point():
        raise ValueError(f"{path} must hold integers [V] as 'columns'")
    return columns


def fold_case(tokenizer: PreTrainedTokenizerFast, rows: int) -> Tensor:
    """Columns ``[rows]`` that fold terms into those that differ in case alone: into the one in
    lower case, or where the vocabulary has none into the first of them. Marks of words and of their
    parts are kept, special tokens are not folded."""
    special = set(tokenizer.all_special_tokens)
    lower = _lower_bytes if _is_byte_level(tokenizer) else str.lower
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    names = {name: row for name, row in vocabulary if name not in special}
    columns = torch.arange(rows)
    first: dict[str, int] = {}
    for name, row in names.items():
        small = lower(name)
        first.setdefault(small, row)
        columns[row] = names.get(small, first[small])
    return columns


def _is_byte_level(tokenizer: PreTrainedTokenizerFast) -> bool:
    return '"type":"ByteLevel"' in tokenizer.backend_tokenizer.to_str()


def _lower_bytes(name: str) -> str:
    """A term, whose characters stand for bytes, in lower case; one that ends within a letter stays
    as it is, lest it become another."""
    letters, numbers = _letters_of_bytes()
    try:
        text = bytes(numbers[letter] for letter in name).decode()
    except (KeyError, UnicodeDecodeError):
        return name
    return "".join(letters[byte] for byte in text.lower().encode())


@functools.cache
def _letters_of_bytes() -> tuple[dict[int, str], dict[str, int]]:
    """The characters that stand for bytes, and the bytes that they stand for."""
    letters = bytes_to_unicode()
    return letters, {letter: number for number, letter in letters.items()}


def _read_names(path: Path, tokenizer: PreTrainedTokenizerFast, rows: int) -> Tensor:
    names = read_json(path)
    if not isinstance(names, dict):
        raise ValueError('it must hold a JSON object of terms, such as {"Paris": "paris"}')
    vocabulary = tokenizer.get_vocab()
    columns = torch.arange(rows)
    for name, target in names.items():
        for each in (name, target):
            if each is not None and (not isinstance(each, str) or each not in vocabulary):
                raise ValueError(
                    f"{shown(each)} is no term of the tokenizer: write terms as its vocabulary has "
                    "them"
                )
        if names.get(target, target) != target:
            raise ValueError(
                f"{shown(name)} is folded into {shown(target)}, which is folded or left out "
                "itself: fold it into the last one"
            )
        columns[vocabulary[name]] = NOWHERE if target is None else vocabulary[target]
    return columns
