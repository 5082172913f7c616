"""Gives a backbone a language-modelling head that fits a collection.

T packed tokens, N texts, V vocabulary.
"""

import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np
import torch
from rich.console import Console
from torch import nn
from transformers import PreTrainedTokenizerFast

from sparton.arguments import ArgumentError
from sparton.datasets.permutation import derive_key, permute
from sparton.datasets.tokenization import PackedTokenizer
from sparton.digests import texts_digest
from sparton.evaluation import choose_device
from sparton.kernels.boundaries import ranges_within
from sparton.models.backbone import Backbone
from sparton.models.backbones import minilm_folder
from sparton.models.body import EncoderBody
from sparton.models.causal_lm import is_causal_lm
from sparton.models.folders import save_encoder
from sparton.models.heads import SpartonHead
from sparton.models.logits import start_logits
from sparton.models.lora import merged
from sparton.models.places import content_of, holds_model
from sparton.models.splade import SpladeEncoder
from sparton.packing import ranges_of
from sparton.pipelines.identity import model_identity
from sparton.pipelines.language_loss import predict
from sparton.pipelines.language_models import load_language_model
from sparton.pipelines.masked_language import (
    CHOSEN,
    MaskedLanguageStep,
    Masking,
    Plan,
    masked_batches,
)
from sparton.retrieval.batches import ahead
from sparton.training.distributed import World
from sparton.training.loggers import open_loggers
from sparton.training.loop import LoopSettings, Trainer
from sparton.training.manifest import describe_environment
from sparton.training.optimization import build_optimizer
from sparton.training.precision import Precision
from sparton.training.schedules import LinearSchedule
from sparton.training.sharding import place_weights
from sparton.training.state import frozen_identity
from sparton.training.status import only_writer
from sparton.training.throughput import ThroughputMeter
from sparton.types import BodyOptions, TokenBatch

HELD_OUT, FEWEST_HELD_OUT, ONE_HELD_OUT_OF = 256, 32, 10
_TOKENIZED_AT_ONCE = 2048
_LOG_LINES = 20


class HeldOut(NamedTuple):
    """Mean loss of tokens of held-out texts, and the share of those that are predicted rightly.
    These are a tenth of the texts and 256 at most; of a plan that reads fewer, as many as it reads,
    but 32 at least. Of fewer than 320 texts none is held out: the model is judged by some that it
    learns from."""

    loss: float
    accuracy: float


class Adaptation(NamedTuple):
    """What came of an adaptation.

    Attributes:
        texts: how many there were, those held out included.
        before, after: of the training, on the same held-out texts with the same tokens hidden.
        shift: what was added to the decoder's bias in the end.
    """

    texts: int
    before: HeldOut
    after: HeldOut
    shift: float


def adapt_lm(
    texts: Iterable[str],
    output: str | Path,
    *,
    backbone: str | Path | Backbone | None = None,
    plan: Plan = Plan(),  # noqa: B008 (frozen)
    precision: str | None = None,
    device: str | None = None,
    checkpoint_every: int | None = 500,
    progress: bool = True,
    **options: Unpack[BodyOptions],
) -> Adaptation:
    """Train a language model on texts, masked or causal, and write it as a SPLADE folder.

    Language modelling leaves the level of the logits open (softmax does not see a constant), while
    SPLADE cuts them at zero; the decoder's bias is therefore shifted at the end so that held-out
    texts have ``plan.active_terms`` terms on average. The decoder of a causal language model is
    centred before (:func:`~sparton.models.logits.start_logits`), and gets a bias; its texts are
    read without special tokens.

    With adapters, all that learns are these, at the rate ``plan.lr``, and they are merged into the
    weights before all this. Where they are saved alone, the bias of a causal language model lies
    beside them, but the decoder is that of the model which they belong to and is not centred.

    The folder ``<output>.run`` has the log and, until the model is written, checkpoints: the same
    call goes on from the last of them.

    Args:
        texts: those of nothing but white space are left out.
        output: folder of the model, where nothing is yet.
        backbone: a language model, or its folder or hub name, masked for the objective "mlm" and
            causal for the others; None for all-MiniLM-L6-v2 with a head that starts as the
            identity. A loaded one must be bidirectional for "mntp" and causal for "clm", is
            trained where it is, and must be loaded anew for a call that goes on.
        plan: how it is trained.
        precision: see :class:`~sparton.training.precision.Precision`; None for bf16 on a GPU and
            fp32 on a CPU.
        device: where it is trained; None for a GPU if there is one.
        checkpoint_every: steps between two checkpoints; None for none.
        progress: show the log on standard output.
        options: see :class:`~sparton.types.BodyOptions`; a loaded backbone has chosen. The frozen
            matrices beside adapters are in fp32 if the precision is, unless ``lora`` has a
            ``dtype``, which the precision follows.

    Raises:
        ArgumentError: the folder of the model has something in it.
        ValueError: there are no texts, or the model is no complete language model, or not of the
            kind and attention that the objective asks for, or a masked one without a bias of its
            decoder. Or adapters are asked of MiniLM, whose head is new; or in a precision that does
            not keep them; or they are to be saved alone where no file has the other weights, or
            the decoder has a bias of its own.
        OSError: there is no such model, the disk is full or not writable, or another process
            writes the same.
        CheckpointError: the run folder has checkpoints of another plan, other texts or another
            model.
        NonFiniteLossError: the loss, a gradient or a weight is no longer finite.
    """
    _refuse_content(Path(output))
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError("there are no texts to learn from")
    started_from = model_identity(minilm_folder() if backbone is None else backbone)
    identity = {name: str(value) for name, value in asdict(plan).items()}
    identity |= {"texts": texts_digest(texts), "backbone": started_from}
    torch.manual_seed(plan.seed)
    world = World(0, 1, choose_device(device))
    loaded, number_format = load_language_model(
        backbone, plan.objective, precision, world.device, options
    )
    encoder = SpladeEncoder(loaded, SpartonHead())
    if plan.frozen:
        _freeze_body(loaded)
    identity |= frozen_identity(encoder) | {"precision": number_format.name}
    if loaded.lora is not None:
        identity["lora"] = str(loaded.lora)
    place_weights(encoder, world, number_format)
    length = min(plan.length, encoder.backbone.max_length)
    training, held_out = split(tokenize(texts, encoder.tokenizer, length), plan)
    model = _Model(encoder, held_out, length, plan, number_format, Path(output))
    before = model.measure()
    settings = LoopSettings(
        plan.steps, max(1, plan.steps // _LOG_LINES), checkpoint_every=checkpoint_every
    )
    trainer = _build_trainer(model, settings, world, identity)
    with only_writer(trainer.folder):
        _train(trainer, training, plan, progress)
    return Adaptation(len(texts), before, model.measure(), model.shift)


def _run_folder(output: Path) -> Path:
    return output.with_name(f"{output.name}.run")


def _refuse_content(output: Path) -> None:
    """Refuse a folder with something in it, but for what an adaptation that was stopped while it
    wrote its model left there."""
    if not (lies_there := content_of(output)) or (_run_folder(output) / "checkpoints").exists():
        return
    what = "holds a model" if holds_model(output) else "is a folder with something in it"
    raise ArgumentError(
        f"{{output}} {what}, {{}} for one: name another folder, or delete this one",
        lies_there,
        output=str(output),
    )


@dataclass
class _Model:
    """What learns, and the texts that it is judged by."""

    encoder: SpladeEncoder
    held_out: TokenBatch
    length: int
    plan: Plan
    precision: Precision
    output: Path
    shift: float = 0.0

    @torch.no_grad()
    def measure(self) -> HeldOut:
        """Loss and accuracy on the held-out texts, always with the same tokens hidden."""
        backbone, generator = self.encoder.backbone.eval(), torch.Generator().manual_seed(0)
        masking = Masking(self.plan.objective, backbone.tokenizer)
        sums, count = torch.zeros(2), 0
        for part in _parts(self.held_out, self.plan):
            masked = masking(part, generator).to(self.encoder.device)
            with self.precision.autocast():
                states = backbone(masked.tokens)[masked.places]
                found = predict(backbone.decoder, states, masked.targets)
            sums += torch.tensor([each.item() for each in found])
            count += len(states)
        return HeldOut(*(sums / max(count, 1)).tolist())

    def save(self, _: nn.Module, __: Path) -> None:
        """Write the model to ``output`` and not into the folder of the run, with its active terms
        levelled."""
        encoder, device = self.encoder, self.encoder.device
        alone = encoder.backbone.saves_adapters_alone
        if encoder.backbone.lora is not None:  # in fp32, lest 16 bits round what comes now
            encoder = merged(encoder).to(device)
            encoder.backbone.lora = None
        backbone = encoder.backbone
        if is_causal_lm(backbone.model.config) and not alone:
            start_logits(backbone, center=True)
        bias = backbone.need_bias()
        parts = [part.to(device) for part in _parts(self.held_out, self.plan)]
        self.shift = level_active_terms(backbone, parts, self.plan.active_terms)
        if alone:
            encoder = self.encoder
            encoder.backbone.need_bias().copy_(bias)
        lengths = {"query_length": self.length, "document_length": self.length}
        save_encoder(encoder, self.output, **lengths)


def _freeze_body(backbone: Backbone) -> None:
    if backbone.lora is not None:
        raise ArgumentError(
            "{frozen} leaves the body as it is, and {lora} are what learns in it: leave one of "
            "them out",
            frozen=True,
            lora=backbone.lora._asdict(),
        )
    backbone.model.base_model.requires_grad_(False)


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> TokenBatch:
    """All texts, special tokens included, cut at ``length``."""
    packed = PackedTokenizer(tokenizer, length, length)
    parts = ranges_of(len(texts), _TOKENIZED_AT_ONCE)
    return TokenBatch.concatenate([packed.documents([texts[row] for row in p]) for p in parts])


def split(tokens: TokenBatch, plan: Plan) -> tuple[TokenBatch, TokenBatch]:
    """Texts to learn from, all where there are few, and texts by chance to be judged by: a tenth,
    HELD_OUT at most, or as many as the plan reads where it reads fewer, lest judging take longer
    than learning."""
    size = tokens.num_sequences
    read = plan.steps * plan.batch_tokens * size // max(tokens.num_tokens, 1)
    held = min(HELD_OUT, max(FEWEST_HELD_OUT, read))
    order = torch.from_numpy(permute(np.arange(size), size, derive_key(plan.seed, HELD_OUT)))
    if size < ONE_HELD_OUT_OF * FEWEST_HELD_OUT:
        return tokens.take(order), tokens.take(order[:held])
    held = min(held, size // ONE_HELD_OUT_OF)
    return tokens.take(order[held:]), tokens.take(order[:held])


def _build_trainer(
    model: _Model, settings: LoopSettings, world: World, identity: dict[str, str]
) -> Trainer[MaskedLanguageStep]:
    """The head, and what else is not the body, learns at a rate of its own; adapters do not."""
    encoder, backbone, plan = model.encoder, model.encoder.backbone, model.plan
    head_learns = plan.objective == "mlm" and backbone.lora is None
    adamw = partial(
        torch.optim.AdamW,
        lr=plan.head_lr if head_learns else plan.lr,
        betas=(0.9, 0.98),
        fused=world.device.type == "cuda",
    )
    body = f"backbone.model.{backbone.model.base_model_prefix}"
    rates = {body: plan.lr} if backbone.lora is None and not plan.frozen else {}
    return Trainer(
        step=MaskedLanguageStep(encoder, plan, world, model.precision),
        optimizer=build_optimizer(encoder, adamw, 0.01, rates),
        schedule=LinearSchedule(plan.warmup),
        settings=settings,
        folder=_run_folder(model.output),
        meter=ThroughputMeter(world.device, lambda mean, _: _flops_per_token(backbone, plan, mean)),
        save_model=model.save,
        identity=identity,
    )


def _flops_per_token(backbone: Backbone, plan: Plan, sequence_length: float) -> float:
    """Model FLOPs per real token of a step, of which few may pass through the decoder."""
    weight = backbone.decoder.weight
    decoder = (6.0 if weight.requires_grad else 4.0) * weight.numel()
    body = EncoderBody.flops_per_token(backbone, sequence_length, training=not plan.frozen)
    return body + CHOSEN[plan.objective] * decoder


def _train(
    trainer: Trainer[MaskedLanguageStep], tokens: TokenBatch, plan: Plan, progress: bool
) -> None:
    """Go on where the run folder says, to the end; its checkpoints are then of no more use."""
    start = trainer.resume()
    manifest = describe_environment() | {"config": dict(trainer.identity)}
    loggers = open_loggers(
        trainer.folder, manifest, plan.steps, start, console=Console(quiet=not progress)
    )
    masking = Masking(plan.objective, trainer.step.encoder.backbone.tokenizer)
    batches = masked_batches(tokens, masking, plan, start)
    if trainer.world.device.type == "cuda":  # a copy from memory that is not pinned waits for it
        batches = (batch.pin_memory() for batch in batches)
    try:
        with ahead(batches) as coming:
            trainer.run(coming, loggers)
    finally:
        for logger in loggers:
            logger.close()
    shutil.rmtree(trainer.folder / "checkpoints", ignore_errors=True)


def _parts(texts: TokenBatch, plan: Plan) -> list[TokenBatch]:
    """The texts in parts of about as many tokens as the plan learns from at once."""
    ranges = ranges_within(texts.cu_seqlens, plan.batch_tokens)
    return [texts.take(torch.arange(first, last)) for first, last in ranges]


@torch.no_grad()
def level_active_terms(backbone: Backbone, parts: Iterable[TokenBatch], active_terms: int) -> float:
    """Shift the decoder's bias so that the texts have ``active_terms`` active terms on average.

    Returns:
        What was added to every entry of the bias.
    """
    backbone.eval()
    pieces = [
        backbone.decoder(piece).amax(0)
        for texts in parts
        for piece in backbone(texts).split(texts.cu_seqlens.diff().tolist())
    ]
    highest = torch.cat(pieces)
    rank = min(active_terms * len(pieces), highest.numel() - 1)
    threshold = highest.kthvalue(highest.numel() - rank).values
    backbone.decoder.bias.sub_(threshold)
    return -threshold.item()
