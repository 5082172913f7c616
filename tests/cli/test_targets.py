"""Settings of objects are held against the parameters of what makes them: names and types."""

import functools
from typing import TYPE_CHECKING, Literal

import pytest

from sparton.cli.checks import check
from sparton.cli.evaluation_checks import check_evaluation
from sparton.cli.targets import parameters, refuse_wrong_settings
from tests.composing import composed

if TYPE_CHECKING:
    from nowhere import Unknown  # type: ignore[import-not-found]


def test_settings_that_no_object_takes_are_refused_wherever_they_come_from():
    cfg = composed("loss=infonce_margin_mse", "+loss.losses.infonce.temprature=3")
    refuse_wrong_settings(cfg, ["optimizer", "data"])
    with pytest.raises(ValueError, match=r"^loss\.losses\.infonce\.temprature: .*no temprature;"):
        refuse_wrong_settings(cfg, ["optimizer", "loss"])
    cfg = composed("+data.sources.x._target_=sparton.nothing.here", "data=quickstart")
    with pytest.raises(ValueError, match=r"data\.sources\.x\._target_=sparton\.nothing\.here: "):
        refuse_wrong_settings(cfg, ["data"])


def test_a_module_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "mine_for_this_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "losses.py").write_text("import missing_here\n")
    with pytest.raises(ValueError, match=r"mine_for.*\.Loss: No module named 'missing_here'$"):
        parameters("mine_for_this_test.losses.Loss", "loss")
    (folder / "broken.py").write_text("def f(:\n")
    with pytest.raises(ValueError, match=r"\.Loss: invalid syntax"):
        parameters("mine_for_this_test.broken.Loss", "loss")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere.Loss", "No module named 'nowhere'"),
        ("torch.nn.Lineer", "module 'torch.nn' has no attribute 'Lineer'; did you mean Linear?"),
        ("a..b", "invalid format: 'a..b'"),
    ],
)
def test_what_is_nowhere_is_refused_in_one_line(target, words, caplog):
    with pytest.raises(ValueError) as refused:
        parameters(target, "loss")
    assert str(refused.value) == f"loss._target_={target}: {words}"
    assert not caplog.records


WRONG = [
    ("data.limit=abc", "must be a whole number, or null"),
    ("data.limit=true", "must be a whole number, or null"),
    ("data.limit=1e6", "must be a whole number, or null"),
    ("data.alpha=abc", "must be a number, or null"),
    ("data.files=5", "must be text, or a list, as in [a,b], or values with names, as in {a: b}"),
    ("data.root=2024", "must be text, or null; as text it is \"data.root='2024'\""),
    ("data.homogeneous=no", "must be true or false"),
    ("data.on_error=ignore", "must be stop or skip"),
    ("data.weights={mine: heavy}", "must be values with names, as in {a: b}, or null"),
    ("data.columns=5", "must be a list, as in [a,b], or values with names, as in {a: b}, or null"),
    ("loss.symmetric=no", "must be true or false"),
    ("loss.temperature=high", "must be a number"),
    ("loss.temperature=null", "must be a number"),
    ("document_regularizer.flops.ramp=null", "must be an object, of a class that its _target_"),
    ("document_regularizer.flops.weight=null", "must be a number"),
    ("data.on_error=null", "must be stop or skip"),
    ("backbone.compile=yes", "must be true or false"),
    ("+backbone.revision=5", "must be text, or null"),
    ("head.widths=[64,wide]", "must be a list, as in [a,b], or null"),
    ("scheduler.warmup=long", "must be a number"),
    ("optimizer.betas=3", "must be a list of 2 values"),
    ("optimizer.betas=[0.9]", "must be a list of 2 values"),
    ("refresh.rule.depth=deep", "must be a whole number"),
    ("evaluation.holdout.share=some", "must be a number"),
    ("evaluation.holdout.most=some", "must be a whole number from 1 on"),
    ("seed=18446744073709551616", "must be a number of 64 bits"),
]  # fmt: skip
OF_FILES = ("data=text_files", "data.files=mine.csv", "head=colbert", "loss=infonce")
MINED = ("refresh=negatives", "num_negatives=7")


@pytest.mark.parametrize(("override", "message"), WRONG)
def test_a_value_of_another_type_is_refused_before_any_work(override, message):
    typed = [*OF_FILES, *MINED, override]
    with pytest.raises(ValueError) as caught:
        check(composed(*typed), 1, typed)
    said = str(caught.value)
    assert said.startswith(f"{override.split('=')[0].lstrip('+')}=") and message in said
    assert "\n" not in said
    check(composed(*typed[:-1]), 1, typed[:-1])


@pytest.mark.parametrize(
    "override",
    [
        "data.limit=null", "data.limit=${batch}", "data.alpha=1", "data.files=[a.csv,b.csv]",
        "data.files={a: a.csv, b: {files: [b.csv], limit: 5}}", "data.root='2024'",
        "data.columns=[query,positive]", "data.columns={frage: query}", "data.root=${missing}",
        "loss.temperature=1", "loss.temperature=${weight_decay}", "head.widths=[128,64]",
        "head.skiplist=[a,b]", "optimizer.betas=[0.8,0.9]", "+optimizer.amsgrad=true",
        "backbone.lora={rank: 4}", "seed=-9223372036854775808", "seed=18446744073709551615",
    ],
)  # fmt: skip
def test_what_a_parameter_takes_is_let_through(override):
    typed = [*OF_FILES, override]
    check(composed(*typed), 1, typed)


def test_the_name_of_a_backbone_that_is_replaced_may_be_null():
    typed = ["init_from=runs/x/model", "backbone.compile=true"]
    check(composed(*typed, "backbone.name=null"), 1, typed)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("encoder.timed_queries=few", "encoder.timed_queries=few: must be a whole number"),
        ("encoder.progress=no", "encoder.progress=no: must be true or false"),
        ("bm25.k1=high", "bm25.k1=high: must be a number"),
        ("index.nbits=x", "index.nbits=x: must be a whole number"),
        ("evaluation.exclude_self=no", "evaluation.exclude_self=no: must be true or false"),
    ],
)
def test_of_an_evaluation(override, message, tmp_path):
    typed = ["evaluation=beir_folder", "evaluation.path=x", "index=compressed", override]
    model = "bm25" if override.startswith("bm25") else str(tmp_path)
    typed = typed[:2] + typed[3:] if model == "bm25" else typed
    with pytest.raises(ValueError) as caught:
        check_evaluation(composed(*typed, f"model={model}", name="evaluate"), typed)
    assert str(caught.value).startswith(message)


def of_checkers(model: "Unknown", k: int, names: "list[str]") -> None: ...


def of_text(k: "int", mode: "Literal['a']" = "a", seed: "int | None" = None) -> None: ...


part = functools.partial(of_text, mode="a")


def test_annotations_that_are_text_are_read_and_those_that_lead_nowhere_are_not_judged():
    here = {"_target_": f"{__name__}.of_checkers", "_partial_": True}
    cfg = composed()
    cfg.logger = {"mine": {**here, "model": 3, "k": 3, "names": 3}}
    refuse_wrong_settings(cfg, ["logger"])  # text is not judged beside what nothing can read
    cfg.logger.mine.k = "three"
    with pytest.raises(ValueError, match=r"logger\.mine\.k=three: must be a whole number$"):
        refuse_wrong_settings(cfg, ["logger"])
    for name in ("of_text", "part"):
        taken = parameters(f"{__name__}.{name}", "logger")
        assert taken == {"k": int, "mode": Literal["a"], "seed": int | None}
        cfg.logger = {"mine": {"_target_": f"{__name__}.{name}", "k": 3, "mode": "a", "seed": None}}
        refuse_wrong_settings(cfg, ["logger"])
        cfg.logger.mine.mode = "b"
        with pytest.raises(ValueError, match=r"logger\.mine\.mode=b: must be a$"):
            refuse_wrong_settings(cfg, ["logger"])
    assert parameters("builtins.dict", "logger") is None
