"""What precision, adapters and sharding exclude among each other, and of other settings; each check
raises ValueError with the setting, its value and what would be right."""

from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from sparton.errors import MissingExtraError
from sparton.training.settings import FITTING, PRECISIONS, SHARDINGS


def check_precision(cfg: DictConfig) -> None:
    """A precision that does not exist, or that parts do not multiply in."""
    if cfg.precision not in PRECISIONS:
        raise ValueError(f"precision={cfg.precision}: choose from {', '.join(PRECISIONS)}")
    if cfg.precision == "fp8":
        _check_fp8(cfg)
    for name in ("head.fp8", "head.sparse.fp8", "query_encoder.head.fp8"):
        if OmegaConf.select(cfg, name) and cfg.precision == "fp32":
            raise ValueError(
                f"{name}=True needs products in 16 bit, got precision=fp32: set precision=bf16 or "
                f"{name}=false"
            )


def _check_fp8(cfg: DictConfig) -> None:
    """What does not multiply in FP8."""
    for place in ("backbone", "query_encoder.backbone"):
        if OmegaConf.select(cfg, f"{place}.compile"):
            raise ValueError(
                f"precision=fp8 is not compiled: set {place}.compile=false, or precision=bf16"
            )
        if OmegaConf.select(cfg, f"{place}.lora"):
            raise ValueError(
                f"precision=fp8 has no products with the adapters of {place}.lora: set "
                f"precision=bf16, or {place}.lora=null to train all weights"
            )


def check_lora(cfg: DictConfig) -> None:
    """Adapters without their library, and precisions that would not keep them and the frozen
    weights in their dtypes."""
    for name in ("backbone.lora", "query_encoder.backbone.lora"):
        lora = OmegaConf.select(cfg, name)
        if not OmegaConf.is_dict(lora):
            continue
        if find_spec("peft") is None:
            raise MissingExtraError(
                f"{name} needs peft, which is an extra: pip install 'sparton[lora]'"
            )
        if cfg.precision == "bf16_pure":
            raise ValueError(
                f"precision=bf16_pure would keep the adapters of {name} in 16 bits, in which small "
                "updates are lost: set precision=bf16; the frozen weights are in bf16 there, too"
            )
        if cfg.precision == "fp32" and lora.get("dtype", "bf16") != "fp32":
            raise ValueError(
                f"precision=fp32 has no products with the frozen weights of {name}, which are in "
                f"bf16: add dtype: fp32 to {name}, or set precision=bf16"
            )


def check_sharding(cfg: DictConfig) -> None:
    """What cannot be where each GPU has a part of the weights."""
    if cfg.sharding not in SHARDINGS:
        raise ValueError(f"sharding={cfg.sharding}: choose from {', '.join(SHARDINGS)}")
    if cfg.sharding == "none":
        return
    if cfg.micro_batch == FITTING:
        raise ValueError(
            f"micro_batch={FITTING} is found by running out of memory, as no GPU may that others "
            f"wait for: with sharding={cfg.sharding} set micro_batch=N, such as 16, or null"
        )
    for name in ("backbone.compile", "query_encoder.backbone.compile"):
        if OmegaConf.select(cfg, name):
            raise ValueError(
                f"{name}=true compiles layers with all of their weights: with sharding="
                f"{cfg.sharding} set {name}=false"
            )
    if cfg.precision == "fp16":
        raise ValueError(
            f"precision=fp16 scales gradients, which sharded ones cannot be: with sharding="
            f"{cfg.sharding} set precision=bf16"
        )
    if cfg.precision == "fp8":
        raise ValueError(
            f"precision=fp8 rounds whole weights, and with sharding={cfg.sharding} a GPU has none: "
            "set precision=bf16, or sharding=none"
        )
    if cfg.refresh:
        raise ValueError(
            f"refresh mines with the whole model on one GPU, and sharding={cfg.sharding} has none: "
            "set refresh=none and mine before the training, with sparton mine, or sharding=none"
        )
