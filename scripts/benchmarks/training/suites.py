"""What is measured, as data: lengths of texts, cells, suites of cells, and how long each runs."""

from typing import Any, NamedTuple

from benchmarks.training.decoders import DECODERS

OURS, IN_FP8, THEIRS = "sparton", "sparton_fp8", "sentence_transformers"
# Their records have the kernels of a window of steps, too.
PROFILED, PROFILED_IN_FP8 = f"{OURS}_profiled", f"{IN_FP8}_profiled"
# Theirs with drop-ins of sparton.integrations: the scores fused, all fused, and scores in 16 bits.
SCORES, FUSED, IN_16_BIT = (f"{THEIRS}_{how}" for how in ("scores", "fused", "bf16"))
SYSTEMS = (OURS, IN_FP8, PROFILED, PROFILED_IN_FP8, THEIRS, SCORES, FUSED, IN_16_BIT)
SPLADE, COLBERT, JOINT = "splade", "colbert", "joint"
# Others are in benchmarks/training/decoders.py.
BERT_BASE, MODERNBERT_BASE = "bert-base", "modernbert-base"
BERT, XLM_ROBERTA, MODERNBERT = 30_522, 250_002, 50_368  # terms
OWN_WORDS, ALL_TERMS = "words", "all"  # active in the untrained representation of a text
WARM_UP_WINDOWS = 2
FEWEST_WINDOWS, MOST_WINDOWS = 3, 20
WINDOW_PAIRS = 4096  # of one GPU
ROUGH_RATE = 2000  # pairs per second of one GPU, to choose the number of windows by


class Lengths(NamedTuple):
    """Shortest and longest number of tokens of a text, special ones included; uniform between."""

    query: tuple[int, int]
    document: tuple[int, int]


EQUAL = "equal"
LENGTHS = {
    SPLADE: Lengths((6, 64), (62, 256)),
    COLBERT: Lengths((4, 32), (40, 180)),
    EQUAL: Lengths((64, 64), (192, 192)),
}
MINIATURE_LENGTHS = {
    SPLADE: Lengths((4, 8), (6, 16)),
    COLBERT: Lengths((4, 6), (6, 12)),
    EQUAL: Lengths((6, 6), (12, 12)),
}
MINIATURE_VOCABULARY = 400


class Cell(NamedTuple):
    """One training, in a process of its own, or in one per GPU.

    Attributes:
        system: one of :data:`SYSTEMS`.
        model: splade, colbert or joint.
        head: a file of configs/head; sentence-transformers has one of its own for each model.
        batch: pairs of an optimizer step, over all GPUs.
        micro_batch: pairs encoded at once on each GPU; 0 for all. What others call cached.
        compiled: the backbone, or all of sentence-transformers' model, through torch.compile.
        half_residual: ours, with bfloat16 between the layers too.
        gpus: processes, one on each.
        vocabulary: terms.
        lengths: of the texts, a key of :data:`LENGTHS`.
        activity: which terms of a text are active at the start.
        backbone: whose sizes the model has.
        lora: rank of adapters, which learn in the place of the weights; 0 for none.
        checkpointed: layers are computed again in the backward pass.
        sharded: each GPU has a part of every weight.
    """

    system: str
    model: str
    head: str
    batch: int
    micro_batch: int = 0
    compiled: bool = False
    half_residual: bool = False
    gpus: int = 1
    vocabulary: int = BERT
    lengths: str = SPLADE
    activity: str = OWN_WORDS
    backbone: str = BERT_BASE
    lora: int = 0
    checkpointed: bool = False
    sharded: bool = False

    @property
    def label(self) -> str:
        parts = [self.system, self.model, self.head, str(self.batch)]
        parts += [self.backbone] if self.backbone != BERT_BASE else []
        parts += [f"LoRA {self.lora}"] if self.lora else []
        parts += ["checkpointed"] if self.checkpointed else []
        parts += ["sharded"] if self.sharded else []
        parts += [f"in {self.micro_batch}s"] if self.micro_batch else []
        parts += ["compiled"] if self.compiled else []
        parts += ["half residual"] if self.half_residual else []
        parts += [f"{self.gpus} GPUs"] if self.gpus > 1 else []
        of_bert = self.backbone == BERT_BASE
        parts += [f"{self.vocabulary} terms"] if of_bert and self.vocabulary != BERT else []
        usual = SPLADE if self.model == SPLADE else COLBERT
        usual = EQUAL if self.backbone in DECODERS else usual
        parts += [f"{self.lengths} lengths"] if self.lengths != usual else []
        parts += ["all terms active"] if self.activity == ALL_TERMS else []
        return " ".join(part for part in parts if part)

    @property
    def trainer(self) -> str:
        """Whose: ours or theirs."""
        return OURS if self.system in (OURS, IN_FP8) or self.profiled else THEIRS

    @property
    def profiled(self) -> bool:
        return self.system in (PROFILED, PROFILED_IN_FP8)

    @property
    def in_fp8(self) -> bool:
        return self.system in (IN_FP8, PROFILED_IN_FP8)

    @property
    def local_batch(self) -> int:
        """Pairs of a step on one GPU."""
        return self.batch // self.gpus


class Plan(NamedTuple):
    """A cell in numbers.

    Attributes:
        log_every: steps of a window, the same for all cells of one local batch: the losses that
            they log are then those of the same steps.
        windows: number of them, warm-up included.
    """

    batch: int
    micro_batch: int
    vocabulary: int
    lengths: Lengths
    log_every: int
    windows: int

    @property
    def steps(self) -> int:
        return self.log_every * self.windows


def plan(cell: Cell, seconds: float, miniature: bool = False) -> Plan:
    """The steps that take about ``seconds`` after the warm-up, at a rough rate."""
    if miniature:
        batch = min(max(cell.local_batch // 48, 4), 12) * cell.gpus
        micro_batch = min(max(cell.micro_batch // 48, 3), 5) if cell.micro_batch else 0
        lengths, windows = MINIATURE_LENGTHS[cell.lengths], WARM_UP_WINDOWS + FEWEST_WINDOWS
        return Plan(batch, micro_batch, MINIATURE_VOCABULARY, lengths, 2, windows)
    window, rate = (WINDOW_PAIRS, ROUGH_RATE) if cell.backbone == BERT_BASE else (1, 100)
    log_every = max(window // cell.local_batch, 1)
    wanted = round(seconds * rate / (log_every * cell.local_batch))
    windows = WARM_UP_WINDOWS + min(max(wanted, FEWEST_WINDOWS), MOST_WINDOWS)
    lengths = LENGTHS[cell.lengths]
    return Plan(cell.batch, cell.micro_batch, cell.vocabulary, lengths, log_every, windows)


def _splade(head: str, batch: int, **others: Any) -> Cell:
    return Cell(OURS, SPLADE, head, batch, **others)


def _late(system: str, model: str, head: str, **others: Any) -> Cell:
    return Cell(system, model, head, 384, lengths=COLBERT, **others)


def _modernbert(system: str, head: str, batch: int, **others: Any) -> Cell:
    others |= {"backbone": MODERNBERT_BASE, "vocabulary": MODERNBERT}
    return Cell(system, SPLADE, head, batch, **others)


def _decoder(system: str, backbone: str, micro_batch: int, **others: Any) -> Cell:
    head = "sparton" if system == OURS else ""
    vocabulary = DECODERS[backbone].sizes["vocab_size"]
    batch = 512 * others.get("gpus", 1)
    return Cell(
        system, SPLADE, head, batch, micro_batch, vocabulary=vocabulary, lengths=EQUAL,
        backbone=backbone, **others,
    )  # fmt: skip


# A head that claims the mathematics of another comes after it: the first is what the losses of the
# others are compared with.
SUITES: dict[str, list[Cell]] = {
    # What a trainer of SPLADE gets.
    "splade": [
        _splade("eager", 384),
        _splade("sparton", 384),
        _splade("sparton", 384, half_residual=True),
        Cell(IN_FP8, SPLADE, "sparton", 384),
        Cell(IN_FP8, SPLADE, "sparton", 384, half_residual=True),
        _splade("sparton", 384, compiled=True),
        _splade("sparton", 384, compiled=True, half_residual=True),
        Cell(THEIRS, SPLADE, "", 384),
        _splade("sparton", 512),
        _splade("sparton", 512, compiled=True),
        _splade("sparton", 512, compiled=True, half_residual=True),
        Cell(THEIRS, SPLADE, "", 384, micro_batch=64),
        Cell(THEIRS, SPLADE, "", 256),
        Cell(THEIRS, SPLADE, "", 128),
        Cell(THEIRS, SPLADE, "", 384, compiled=True),
        _splade("tiled", 384),
        _splade("compiled", 384),
        _splade("compiled", 384, compiled=True),
        _splade("sparton_hybrid", 384),
        _splade("sparton", 384, micro_batch=64),
        _splade("sparton", 384, compiled=True, activity=ALL_TERMS),
    ],
    # The same of ModernBERT-base.
    "modernbert": [
        *(
            _modernbert(OURS, "sparton", batch, compiled=compiled, half_residual=half)
            for batch in (384, 256)
            for compiled in (False, True)
            for half in (False, True)
        ),
        *(_modernbert(THEIRS, "", batch) for batch in (384, 256, 128)),
        _modernbert(THEIRS, "", 384, micro_batch=64),
    ],
    # Late interaction; the joint model beside each of its halves, on the same texts.
    "colbert": [
        _late(OURS, COLBERT, "colbert"),
        _late(OURS, COLBERT, "colbert", half_residual=True),
        _late(IN_FP8, COLBERT, "colbert"),
        _late(IN_FP8, COLBERT, "colbert", half_residual=True),
        _late(OURS, COLBERT, "colbert", compiled=True),
        _late(OURS, COLBERT, "colbert", compiled=True, half_residual=True),
        _late(THEIRS, COLBERT, ""),
        _late(OURS, SPLADE, "sparton"),
        _late(OURS, SPLADE, "sparton", compiled=True),
        _late(OURS, SPLADE, "sparton", compiled=True, half_residual=True),
        _late(OURS, JOINT, "sparton_colbert"),
        _late(OURS, JOINT, "sparton_colbert", compiled=True),
        _late(OURS, JOINT, "sparton_colbert", compiled=True, half_residual=True),
        _late(THEIRS, COLBERT, "", micro_batch=64),
        _late(OURS, COLBERT, "colbert", micro_batch=64),
        _late(THEIRS, COLBERT, "", compiled=True),
    ],
    # Where the time of a step goes.
    "profile": [
        Cell(system, SPLADE, "sparton", 384, half_residual=half_residual)
        for system in (PROFILED, PROFILED_IN_FP8)
        for half_residual in (False, True)
    ],
    # The same step in micro-batches, whose gradient is that of all at once.
    "parts": [
        _splade("sparton", 384, micro_batch=size, compiled=compiled)
        for compiled in (False, True)
        for size in (0, 192, 128, 64)
    ],
    # The same work on each of several GPUs.
    "gpus": [
        _splade("sparton", local_batch * gpus, compiled=True, gpus=gpus, micro_batch=micro_batch)
        for local_batch, micro_batch in ((384, 0), (4096, 512))
        for gpus in (1, 2, 4)
    ],
    # Batches beyond a GPU's memory, and a vocabulary beyond it.
    "any_batch": [
        _splade("sparton", 512, compiled=True),
        _splade("sparton", 4096, compiled=True, micro_batch=512),
        _splade("sparton", 16384, compiled=True, micro_batch=512),
        _splade("sparton", 512, compiled=True, vocabulary=XLM_ROBERTA),
        _splade("sparton", 16384, compiled=True, micro_batch=512, vocabulary=XLM_ROBERTA),
        Cell(THEIRS, SPLADE, "", 32, vocabulary=XLM_ROBERTA),
    ],
    # Causal language models, attended to as they are built.
    "decoders": [
        _decoder(OURS, "qwen3-0.6b", 64),
        _decoder(OURS, "qwen3-0.6b", 128),
        _decoder(OURS, "qwen3-0.6b", 128, compiled=True),
        _decoder(THEIRS, "qwen3-0.6b", 16),
        _decoder(OURS, "llama-3.2-1b", 64),
        _decoder(OURS, "llama-3.2-1b", 64, compiled=True),
        _decoder(THEIRS, "llama-3.2-1b", 16),
        _decoder(OURS, "mistral-7b", 24, lora=16),
        _decoder(OURS, "mistral-7b", 24, lora=16, compiled=True),
        _decoder(OURS, "mistral-7b", 64, lora=16, checkpointed=True),
        _decoder(THEIRS, "mistral-7b", 16, lora=16),
    ],
    # The same work on each of two GPUs, whole and sharded.
    "decoders_gpus": [
        _decoder(OURS, "llama-3.2-1b", 64),
        _decoder(OURS, "llama-3.2-1b", 64, gpus=2),
        _decoder(OURS, "llama-3.2-1b", 64, gpus=2, sharded=True),
        _decoder(OURS, "mistral-7b", 24, lora=16),
        _decoder(OURS, "mistral-7b", 24, lora=16, gpus=2, sharded=True),
    ],
    # What sentence-transformers' own training gains from drop-ins.
    "integrations": [
        Cell(THEIRS, SPLADE, "", 384),
        Cell(FUSED, SPLADE, "", 384),
        *(_late(system, COLBERT, "") for system in (THEIRS, SCORES, FUSED, IN_16_BIT)),
    ],
}
