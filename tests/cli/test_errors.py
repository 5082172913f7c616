"""What is said of errors of the system."""

import os
import signal
import subprocess
import sys

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from sparton.cli.errors import explain, one_sentence


def raised(make):
    with pytest.raises(OSError) as caught:
        make()
    return caught.value


def test_a_place_that_cannot_be_used_is_named(tmp_path):
    denied = PermissionError(13, os.strerror(13), str(tmp_path / "out"))
    said = explain(denied)
    assert (
        said == f"{tmp_path}/out: permission denied; change who may use it, or name another place"
    )


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        said = explain(raised((tmp_path / place).mkdir))
        assert said.startswith(f"{tmp_path}/{place}: a file lies where a folder is needed")
    (tmp_path / "link").symlink_to("nowhere")
    said = explain(raised((tmp_path / "link").mkdir))
    assert said.startswith(f"{tmp_path}/link: a link to nothing lies where a folder is needed")


def test_a_reader_who_leaves_ends_a_command_quietly():
    work = """
from sparton.cli.errors import one_sentence
with one_sentence("sparton"):
    while True:
        print("a line", flush=True)
"""
    command = [sys.executable, "-c", work]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"a line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_a_pipe_of_its_own_that_breaks_is_an_error():
    with pytest.raises(SystemExit, match=r"sparton: .*Broken pipe"), one_sentence("sparton"):
        raise BrokenPipeError(32, "Broken pipe")


def test_sentences_of_our_own_stay_as_they_are():
    assert explain(FileExistsError("output=x exists: name another")).startswith("output=x exists")


def test_the_setting_of_a_variable_that_is_not_set_is_named():
    cfg = OmegaConf.create({"data": {"root": "${oc.env:NOWHERE_SET}"}})
    with pytest.raises(InterpolationResolutionError) as caught:
        OmegaConf.to_container(cfg, resolve=True)
    assert explain(caught.value) == "data.root: \"Environment variable 'NOWHERE_SET' not found\""
