"""Give MiniLM a masked-language-modelling head by training on the documents of BEIR-layout folders.

    python scripts/adapt_mlm.py --output models/minilm-mlm data/squad data/acl_title_abstract

The result is a masked-LM folder: python train.py backbone=bert_base backbone.name=models/minilm-mlm

Only corpus files are read, no queries and no judgments. Masked-language modelling leaves the level
of the logits open (softmax does not see a constant), while SPLADE cuts them at zero; the decoder's
bias is therefore shifted at the end so that held-out texts have --active-terms terms on average.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sparton.datasets.collection import beir_file, read_texts
from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.backbone import Backbone
from sparton.models.backbones import minilm, pretrained
from sparton.models.folders import save_encoder
from sparton.models.heads import SpartonHead
from sparton.models.splade import SpladeEncoder
from sparton.types import TokenBatch

HELD_OUT = 256


class Masked(NamedTuple):
    """Tokens with some of them hidden: their places int64 [M], and what stood there int64 [M]."""

    tokens: TokenBatch
    places: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> "Masked":
        places, targets = (
            part.to(device, non_blocking=True) for part in (self.places, self.targets)
        )
        return Masked(self.tokens.to(device, non_blocking=True), places, targets)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="folders with corpus.jsonl[.gz]")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--backbone", help="start from this masked-LM folder instead of MiniLM")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--length", type=int, default=256, help="longest text in tokens")
    parser.add_argument("--lr", type=float, default=2e-4, help="of the pretrained weights")
    parser.add_argument("--head-lr", type=float, default=1e-3, help="of the new head")
    parser.add_argument("--warmup", type=float, default=0.06, help="share of the steps")
    parser.add_argument("--active-terms", type=int, default=400)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    torch.manual_seed(arguments.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        texts = read_corpora(arguments.folders)
        backbone = build_backbone(arguments.backbone, arguments.compile).to(device)
    except (OSError, ValueError) as error:
        raise SystemExit(f"adapt_mlm.py: {error}") from error
    length = min(arguments.length, backbone.max_length)
    console.print(f"{len(texts):,} texts, {backbone.num_parameters():,} parameters, {device}")
    sequences = tokenise(texts, backbone.tokenizer, length)
    generator = torch.Generator().manual_seed(arguments.seed)
    order = torch.randperm(len(sequences), generator=generator).tolist()
    held_out, training = order[:HELD_OUT], order[HELD_OUT:] or order
    probe = TokenBatch.from_lists([sequences[row] for row in held_out])

    report(backbone, probe, device, console, "before")
    train(backbone, [sequences[row] for row in training], arguments, device, console)
    report(backbone, probe, device, console, "after")
    shift = level_active_terms(backbone, probe.to(device), arguments.active_terms)
    console.print(f"decoder bias shifted by {shift:+.2f}: {arguments.active_terms} active terms")
    encoder = SpladeEncoder(backbone, SpartonHead())
    save_encoder(encoder, arguments.output, query_length=length, document_length=length)
    console.print(f"written to {arguments.output}")


def build_backbone(name: str | None, compile: bool) -> Backbone:
    return pretrained(name, compile=compile) if name else minilm(compile=compile)


def read_corpora(folders: list[Path]) -> list[str]:
    """Documents of all folders that hold any text, in the order of the files."""
    return [
        text
        for folder in folders
        for _, _, text in read_texts(beir_file(folder, "corpus.jsonl"))
        if text.strip()
    ]


def tokenise(
    texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int, chunk: int = 2048
) -> list[list[int]]:
    """Token ids of every text, special tokens included, cut at ``length``."""
    packed = PackedTokenizer(tokenizer, length, length)
    sequences: list[list[int]] = []
    for start in range(0, len(texts), chunk):
        tokens = packed.documents(texts[start : start + chunk])
        sizes = tokens.cu_seqlens.diff().tolist()
        sequences.extend(piece.tolist() for piece in tokens.input_ids.split(sizes))
    return sequences


def batches(
    sequences: list[list[int]], batch_tokens: int, generator: torch.Generator
) -> Iterator[TokenBatch]:
    """Endless shuffled batches of at most ``batch_tokens`` tokens (one sequence at the least)."""
    chosen: list[list[int]] = []
    size = 0
    while True:
        for row in torch.randperm(len(sequences), generator=generator).tolist():
            if chosen and size + len(sequences[row]) > batch_tokens:
                yield TokenBatch.from_lists(chosen)
                chosen, size = [], 0
            chosen.append(sequences[row])
            size += len(sequences[row])


def hide(
    tokens: TokenBatch, tokenizer: PreTrainedTokenizerFast, generator: torch.Generator
) -> Masked:
    """Choose 15 % of the tokens, special ones excepted; replace 80 % of these by the mask token
    and 10 % by a random one, and leave 10 % as they are (Devlin et al., 2019)."""
    ids = tokens.input_ids
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    chosen = (torch.rand(ids.shape, generator=generator) < 0.15) & ~special
    places = chosen.nonzero().squeeze(1)
    fate = torch.rand(places.shape, generator=generator)
    noise = torch.randint(len(tokenizer), places.shape, generator=generator)
    targets = ids[places]
    shown = torch.where(fate < 0.8, tokenizer.mask_token_id, noise)
    shown = torch.where(fate < 0.9, shown, targets)
    return Masked(tokens._replace(input_ids=ids.index_copy(0, places, shown)), places, targets)


def masked_logits(backbone: Backbone, masked: Masked) -> Tensor:
    """Logits ``[M, V]`` at the hidden places alone: 15 % of the decoder's work and memory."""
    device = masked.places.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return backbone.decoder(backbone(masked.tokens)[masked.places])


def train(
    backbone: Backbone,
    sequences: list[list[int]],
    arguments: argparse.Namespace,
    device: torch.device,
    console: Console,
) -> None:
    """AdamW with linear warm-up and decay; the new head learns faster than the rest."""
    generator = torch.Generator().manual_seed(arguments.seed)
    optimizer = build_optimizer(backbone, arguments.lr, arguments.head_lr)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: schedule(step, arguments.steps, arguments.warmup)
    )
    stream = batches(sequences, arguments.batch_tokens, generator)
    backbone.train()
    log_every = max(1, arguments.steps // 20)
    with Progress(console=console) as progress:
        bar = progress.add_task("masked-language modelling", total=arguments.steps)
        for step, tokens in zip(range(1, arguments.steps + 1), stream):
            masked = hide(tokens, backbone.tokenizer, generator).to(device)
            loss = F.cross_entropy(masked_logits(backbone, masked).float(), masked.targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(backbone.parameters(), 1.0)
            optimizer.step()
            rates.step()
            progress.advance(bar)
            if step % log_every == 0:
                value = loss.item()
                if not math.isfinite(value):
                    raise SystemExit(f"the loss is {value} at step {step}: lower --lr or --head-lr")
                progress.console.print(f"step {step:6d}  loss {value:.3f}")


def schedule(step: int, steps: int, warmup: float) -> float:
    """Factor of the learning rate at a step (from 0)."""
    ramp = max(1, round(warmup * steps))
    return min((step + 1) / ramp, (steps - step) / max(1, steps - ramp + 1))


def build_optimizer(backbone: Backbone, lr: float, head_lr: float) -> torch.optim.AdamW:
    """Head and body apart, weight decay on matrices only."""
    body = {id(parameter) for parameter in backbone.model.base_model.parameters()}
    groups: dict[tuple[bool, bool], list[Tensor]] = {}
    for parameter in backbone.parameters():
        groups.setdefault((id(parameter) in body, parameter.ndim > 1), []).append(parameter)
    settings = [
        {"params": each, "lr": lr if in_body else head_lr, "weight_decay": 0.01 * is_matrix}
        for (in_body, is_matrix), each in groups.items()
    ]
    fused = all(parameter.is_cuda for parameter in backbone.parameters())
    return torch.optim.AdamW(settings, betas=(0.9, 0.98), fused=fused)


@torch.no_grad()
def report(
    backbone: Backbone, probe: TokenBatch, device: torch.device, console: Console, when: str
) -> None:
    """Loss and accuracy on held-out texts, always with the same tokens hidden."""
    backbone.eval()
    masked = hide(probe, backbone.tokenizer, torch.Generator().manual_seed(0)).to(device)
    logits = masked_logits(backbone, masked).float()
    loss = F.cross_entropy(logits, masked.targets).item()
    right = (logits.argmax(1) == masked.targets).float().mean().item()
    console.print(f"{when}: held-out loss {loss:.3f}, {right:.1%} of hidden tokens right")


@torch.no_grad()
def level_active_terms(backbone: Backbone, probe: TokenBatch, active_terms: int) -> float:
    """Shift the decoder's bias so that the texts have ``active_terms`` active terms on average.

    Returns:
        What was added to every entry of the bias.
    """
    backbone.eval()
    hidden = backbone(probe)
    pieces = hidden.split(probe.cu_seqlens.diff().tolist())
    highest = torch.cat([backbone.decoder(piece).amax(0) for piece in pieces])
    rank = min(active_terms * len(pieces), highest.numel() - 1)
    threshold = highest.kthvalue(highest.numel() - rank).values
    backbone.decoder.bias.sub_(threshold)
    return -threshold.item()


if __name__ == "__main__":
    main()
