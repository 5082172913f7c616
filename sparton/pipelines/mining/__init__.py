"""Mining of hard negatives.

N documents of the collection, E positives outside of it, V terms, K ranks.
"""

from sparton.pipelines.mining.miners import BM25Miner, TrainedModel
from sparton.pipelines.mining.pipeline import mine_hard_negatives
from sparton.pipelines.mining.selection import Rule
from sparton.pipelines.mining.teachers import CrossEncoder

__all__ = ["BM25Miner", "CrossEncoder", "Rule", "TrainedModel", "mine_hard_negatives"]
