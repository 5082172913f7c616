"""Cross-encoders as teachers, beside what ranks collections."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from sparton.arguments import refuse_below
from sparton.evaluation import check_model
from sparton.pipelines.mining.miners import BM25Miner, Setup, TrainedModel
from sparton.pipelines.mining.pairs import Pairs, Scores, Teach

if TYPE_CHECKING:
    import sentence_transformers

CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True)
class CrossEncoder:
    """Any cross-encoder with one output that sentence-transformers loads.

    Attributes:
        model: folder, or name on the Hugging Face hub.
        activation: apply the activation that the model asks for, often a sigmoid, which flattens
            the margins that distillation learns; by default scores are the logits.
        batch: pairs scored at once.
        length: tokens of a pair; None for what the model says.

    Raises:
        FileNotFoundError: neither a folder nor a name on the hub.
        ArgumentError: a number out of range.
    """

    model: str | Path
    activation: bool = False
    batch: int = 64
    length: int | None = None

    def __post_init__(self) -> None:
        refuse_below(1, batch=self.batch, length=self.length)
        check_model(self.model)

    def load(self, setup: Setup, name: str) -> Teach:
        """What scores pairs of a query and a document, whatever the collection.

        Raises:
            ValueError: sentence-transformers is missing, or the model cannot be loaded, is no
                trained classifier, or has not exactly one output.
        """
        model = self._load(setup.device)
        activation = None if self.activation else torch.nn.Identity()

        def score(queries: Sequence[str], pairs: Pairs) -> Scores:
            asked = [queries[number] for number in pairs.queries.tolist()]
            scores = model.predict(
                list(zip(asked, pairs.read())),
                batch_size=self.batch,
                show_progress_bar=False,
                activation_fn=activation,
            )
            return np.asarray(scores, np.float32).reshape(len(asked))

        return lambda queries: partial(score, queries)

    def _load(self, device: torch.device) -> "sentence_transformers.CrossEncoder":
        name = str(self.model)
        try:
            import sentence_transformers
        except ImportError as error:
            raise ValueError(
                f"the teacher {name} needs sentence-transformers ({error}): "
                "pip install 'sentence-transformers>=6.0,<7', or a TrainedModel as teacher"
            ) from error
        try:
            model = sentence_transformers.CrossEncoder(
                name, device=str(device), max_length=self.length
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{name} is no cross-encoder that sentence-transformers can load ({error}): give "
                "its folder or its name on the hub"
            ) from error
        if model.num_labels != 1:
            raise ValueError(
                f"{name} has {model.num_labels} outputs: a teacher must have one, the relevance of "
                "the document"
            )
        stored, built = model.config.architectures or (), type(model.model).__name__
        trained = any(each.endswith(CLASSIFIER) for each in stored)
        if stored and built.endswith(CLASSIFIER) and not trained:
            raise ValueError(
                f"{name} is a {stored[0]}, whose classifier would start at random: give a "
                "cross-encoder, or take it for a retriever (a TrainedModel)"
            )
        return model


Teacher = CrossEncoder | TrainedModel | BM25Miner
