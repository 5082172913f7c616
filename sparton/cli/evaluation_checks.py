"""What an evaluation's configuration is refused for, before any work; first without PyTorch."""

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from sparton.arguments import refuse_below
from sparton.cli.overrides import changed_groups, overrides_in
from sparton.cli.targets import refuse_wrong_settings
from sparton.models.places import check_place
from sparton.retrieval.settings import check_metrics, check_search, check_term_bounds

TERM_BOUNDS = ("max_query_terms", "max_document_terms")


def check_evaluation(cfg: DictConfig, typed: Sequence[str]) -> None:
    """Refuse what does not exist, and what the system that is evaluated would ignore.

    Args:
        typed: the overrides of the command line.

    Raises:
        ValueError: names the setting, its value, and what would be right.
        MissingMandatoryValue: a setting has no value.
        OSError: there is no such model.
    """
    refuse_missing(cfg)
    refuse_missing_values(cfg)
    refuse_below(1, gpus=cfg.gpus)
    splits = [split for split in ("dev", "test") if cfg.evaluation.get(split)]
    if cfg.split not in splits:
        remedy = (
            f"try {' or '.join(splits)}"
            if splits
            else "choose one with collections, such as evaluation=beir_folder"
        )
        raise ValueError(f"split={cfg.split} has no tasks in this evaluation: {remedy}")
    if cfg.model == "bm25":
        of_models = (
            "encoder", "index", "query_length", "document_length", "documents", "width", "gpus"
        )  # fmt: skip
        ignored = overrides_in(typed, of_models)
        refuse_ignored("model=bm25 is no encoder and", ignored)
        _check_metrics(cfg, "bm25")
    else:
        asked = cfg.encoder
        check_term_bounds(**{f"encoder.{name}": asked[name] for name in TERM_BOUNDS})
        check_search(asked.search, asked.rerank_depth)
        _check_metrics(cfg, "encoder")
        check_place(cfg.model)
    refuse_wrong_settings(cfg, changed_groups(typed))  # imports PyTorch


def refuse_missing(cfg: DictConfig) -> None:
    """Refuse an evaluation without all of its values, by the names of its own settings and not by
    those that lead to them.

    Raises:
        MissingMandatoryValue: names the setting.
    """
    for key in map(str, cfg.evaluation):
        if not OmegaConf.is_interpolation(cfg.evaluation, key):
            OmegaConf.select(cfg, f"evaluation.{key}", throw_on_missing=True)


def refuse_missing_values(cfg: DictConfig) -> None:
    """Refuse a configuration in which a setting has no value.

    Raises:
        MissingMandatoryValue: names the setting.
    """
    own = OmegaConf.masked_copy(cfg, [str(name) for name in cfg if name != "hydra"])
    OmegaConf.to_container(own, resolve=True, throw_on_missing=True)


def refuse_ignored(because: str, overrides: Sequence[str]) -> None:
    """Refuse overrides that would have no effect.

    Raises:
        ValueError: names them.
    """
    if overrides:
        raise ValueError(f"{because} ignores {', '.join(overrides)}: leave that out")


def _check_metrics(cfg: DictConfig, system: str) -> None:
    check_metrics(cfg.metrics)
    asked = cfg[system]
    check_metrics(asked.metrics, asked.k, f"{system}.k", f"{system}.metrics")
