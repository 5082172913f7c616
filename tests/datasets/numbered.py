"""A source for tests of mixtures."""

from sparton.types import Example


class Numbers:
    """A source whose examples say what they are."""

    def __init__(self, name: str, size: int, negatives: int = 0, scored: bool = False) -> None:
        self.name, self.size, self.negatives, self.scored = name, size, negatives, scored

    def __len__(self) -> int:
        return self.size

    def example(self, index: int, draw: int, num_negatives: int) -> Example:
        negatives = tuple(f"n{number}" for number in range(min(self.negatives, num_negatives)))
        scores = tuple(1.0 for _ in range(1 + len(negatives))) if self.scored else ()
        return Example(f"{self.name} {index}", str(draw), negatives, scores)
