"""Mining of hard negatives.

N documents of the collection, E positives outside of it, V terms, K ranks.
"""

from sparton.pipelines.mining.miners import BM25Miner, ModelMiner
from sparton.pipelines.mining.pipeline import mine_hard_negatives
from sparton.pipelines.mining.selection import Rule
from sparton.pipelines.mining.teachers import CrossEncoderTeacher, RetrieverTeacher

__all__ = [
    "BM25Miner",
    "CrossEncoderTeacher",
    "ModelMiner",
    "RetrieverTeacher",
    "Rule",
    "mine_hard_negatives",
]
