"""The models that trainings begin with: whether they are there, and what their configurations tell,
before any work."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from omegaconf import DictConfig, OmegaConf

from sparton.models.places import check_place

if TYPE_CHECKING:
    from sparton.models.repository import Source


class StartingModel(NamedTuple):
    """A model that a training begins with.

    Attributes:
        setting: that names it.
        name: a folder, or a name on the hub.
        revision, cache_dir: of the hub; "" for the usual ones.
    """

    setting: str
    name: str
    revision: str
    cache_dir: str

    @property
    def source(self) -> "Source":
        from sparton.models.repository import Source  # imports what a refusal need not wait for

        return Source(self.name, self.revision or None, self.cache_dir or None)


def check_places(cfg: DictConfig) -> None:
    """Refuse models that are neither folders nor names on the hub.

    Raises:
        MissingMandatoryValue: one of them has no name.
        OSError: names the setting, and what would be right.
    """
    for model in _models(cfg):
        with _errors_of(model):
            check_place(model.name)


def find_models(cfgs: Iterable[DictConfig]) -> None:
    """Look on the hub for the models that are no folders.

    Raises:
        OSError: names the setting, and what would be right.
    """
    for model in sorted({model for cfg in cfgs for model in _models(cfg)}):
        if not Path(model.name).is_dir():
            from sparton.models.folders import find_model

            with _errors_of(model):
                find_model(model.source)


def check_lengths(cfgs: Iterable[DictConfig]) -> None:
    """Refuse lengths beyond the positions of the models, where their ``config.json`` has that
    number; what else bounds a length shows when the model is built.

    Raises:
        ValueError: names the setting and the model.
    """
    positions = cache(_positions)
    for cfg in cfgs:
        for model in _models(cfg):
            if OmegaConf.select(cfg, f"{model.setting.removesuffix('.name')}.config_args"):
                continue  # which may say otherwise
            most = positions(model)
            for length in ("query_length", "document_length"):
                if most is not None and cfg[length] > most:
                    raise ValueError(
                        f"{length}={cfg[length]} is more than the {most} positions of "
                        f"{model.setting}={model.name}: set {length} to {most} or less"
                    )


def _positions(model: StartingModel) -> int | None:
    return model.source.fields("config.json").get("max_position_embeddings", int)


def _models(cfg: DictConfig) -> Iterator[StartingModel]:
    for setting in ("init_from", "backbone.name", "query_encoder.backbone.name"):
        if setting == "backbone.name" and cfg.init_from is not None:
            continue
        name = OmegaConf.select(cfg, setting, throw_on_missing=True)
        if name is not None:
            revision, cache_dir = (
                str(OmegaConf.select(cfg, f"{setting.removesuffix('.name')}.{key}") or "")
                for key in ("revision", "cache_dir")
            )
            yield StartingModel(setting, str(name), revision, cache_dir)


@contextmanager
def _errors_of(model: StartingModel) -> Iterator[None]:
    """They name the setting that named the model."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{model.setting}={error}") from error
