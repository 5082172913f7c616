"""GTE's encoders (Zhang et al., arXiv 2407.19669), whose checkpoints name code of their own.

Their configurations say ``model_type: new``. transformers' model of type ``gte`` computes the same
and renames their weights, so that none of that code is needed: a configuration is translated here.
"""

from typing import Any, NoReturn

from transformers import __version__ as installed
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sparton.reading import Fields, shown

KIND, WITH_CODE = "gte", "new"  # model types
# What that code can do otherwise, and transformers' model cannot.
_FIXED = {
    "hidden_act": "gelu",
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "pack_qkv": True,
    "position_embedding_type": "rope",
}
# What that code takes for granted where nothing is said, and transformers' model takes otherwise.
_DEFAULTS = {"vocab_size": 30528, "max_position_embeddings": 2048, "pad_token_id": None}
_THETA = 10000.0
_MOST = 1000  # the largest factor of the base


def translated(config: Fields) -> dict[str, Any] | None:
    """The configuration of a checkpoint with code of its own, as transformers' model has it; None
    for that of any other model.

    Args:
        config: the object in ``config.json``.

    Raises:
        ValueError: the installed transformers has no such model, or the checkpoint needs something
            that this model does not compute.
    """
    kind, content = config.get("model_type", str), config.as_dict()
    if kind in (KIND, WITH_CODE) and KIND not in CONFIG_MAPPING:
        raise ValueError(
            f"{config.place} describes a GTE model, which transformers {installed} does not have: "
            "install transformers 5.18 or a later one"
        )
    if kind != WITH_CODE:
        return None
    for name, value in _FIXED.items():
        if content.get(name, value) != value:
            _refuse(config, name, repr(value))
    known = CONFIG_MAPPING[KIND]().to_dict().keys() | {"torch_dtype"}
    kept = {name: value for name, value in content.items() if name in known}
    own = {"model_type": KIND, "rope_parameters": _rotation(config)}
    return _DEFAULTS | kept | own


def _rotation(config: Fields) -> dict[str, Any]:
    """The angles of positions: "ntk" multiplies their base by a factor f, and divides all of them
    by ``f ** (2 / d)``, d the width of a head."""
    theta = config.get("rope_theta", float, _THETA)
    scaling = config.object("rope_scaling")
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    kind, mixed = scaling.get("type", str), scaling.get("mixed_b", float)
    factor = scaling.get("factor", float, 0.0)
    if kind != "ntk" or mixed is not None or not 1 <= factor <= _MOST:
        _refuse(config, "rope_scaling", f"the type 'ntk' without mixed_b, by 1 to {_MOST}")
    heads = config.count("num_attention_heads") or 12
    width = max(1, (config.count("hidden_size") or 768) // heads)
    factors = {"rope_theta": theta * factor, "factor": factor ** (2 / width)}
    return {"rope_type": "linear", **factors}


def _refuse(config: Fields, name: str, wanted: str) -> NoReturn:
    raise ValueError(
        f"{config.place} has {name}={shown(config.as_dict()[name])}, and transformers' GTE model "
        f"has only {wanted}: choose another checkpoint"
    )
