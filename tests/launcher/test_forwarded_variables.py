"""The environment variables that are forwarded to other machines: a list of names, and those in two files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xds.launcher.command_line.forwarded_variables import forwarded_variables
from xds.utils.errors import UsageError


def test_only_what_is_on_the_list_goes_along(tmp_path: Path) -> None:
    goes = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/a b", "UCX_TLS": "rc", "MLFLOW_RUN": "1"}
    goes |= {"XDS_TIMEOUT_SECONDS": "60", "OMP_NUM_THREADS": "4", "LD_LIBRARY_PATH": "/lib"}
    goes |= {"TOKENIZERS_PARALLELISM": "false", "HF_HOME": "/data\nhf"}
    stays = {"PATH": "/bin", "HOME": "/home/me", "CUDA_VISIBLE_DEVICES": "3", "XDS_SSH": "/x"}
    stays |= {"XDS_RUN_FOLDER": "/tmp/x", "XDS_RANK_FILES": "x", "TORCHELASTIC_RUN_ID": "7"}
    stays |= {"HF_TOKEN": "hf_secret", "WANDB_API_KEY": "secret", "SLURM_JOB_ID": "7"}
    stays |= {"BASH_FUNC_ml%%": "() { :; }", "NCCL bad": "1"}
    assert forwarded_variables(goes | stays, tmp_path, tmp_path) == goes


def test_files_add_what_they_name_and_the_working_folder_wins(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (home / ".deepspeed_env").write_text("# mine\n\nA=home\nHF_TOKEN = t=1 \r\nNCCL_DEBUG=WARN\n")
    (work / ".deepspeed_env").write_bytes(b"\xef\xbb\xbfexport A=work\n  \n")
    (work / ".xds_env").write_text("B=$(touch x) 'q'\nA=xds")
    assert forwarded_variables({"NCCL_DEBUG": "INFO"}, work, home) == {
        "NCCL_DEBUG": "WARN",
        "A": "xds",
        "B": "$(touch x) 'q'",
        "HF_TOKEN": "t=1",
    }


def test_another_file_is_named_by_a_variable(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("A=1")
    (tmp_path / ".deepspeed_env").write_text("B=1")
    by_path = {"DS_ENV_FILE": str(tmp_path / "mine")}
    assert forwarded_variables(by_path, tmp_path, tmp_path) == {"A": "1"}
    assert forwarded_variables({"XDS_ENV_FILE": "mine"}, tmp_path, tmp_path) == {"A": "1", "B": "1"}
    with pytest.raises(UsageError, match="nowhere': No such file"):
        forwarded_variables({"XDS_ENV_FILE": "nowhere"}, tmp_path, tmp_path)


def test_a_file_that_another_user_may_change_is_ignored_unless_its_path_is_given(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shared" / ".deepspeed_env"
    file.parent.mkdir()
    file.write_text("PYTHONPATH=/home/other")
    file.chmod(0o666)
    assert forwarded_variables({}, file.parent, tmp_path) == {}
    told = capfd.readouterr().err
    assert f"{file} is ignored: every user may write to {file}; to use it" in told
    assert f"name it: DS_ENV_FILE={file}" in told
    named = {"DS_ENV_FILE": str(file)}
    assert forwarded_variables(named, file.parent, tmp_path) == {"PYTHONPATH": "/home/other"}
    file.chmod(0o644)
    file.parent.chmod(0o1777)  # as /tmp: others may add files, but not replace this one
    assert forwarded_variables({}, file.parent, tmp_path) == {"PYTHONPATH": "/home/other"}
    if os.getuid() == 0:
        os.chown(file, 65534, 65534)
        assert forwarded_variables({}, file.parent, tmp_path) == {}
        assert "belongs to user 65534" in capfd.readouterr().err


def test_a_line_that_sets_nothing_is_an_error_with_its_number_and_without_its_value(
    tmp_path: Path,
) -> None:
    for line in ("A", "=1", "MY KEY=hunter2", "1A=1", "A\0=1", "A=\0"):
        (tmp_path / ".xds_env").write_text(f"# fine\n\n{line}\n")
        said = r"\.xds_env', line 3: .* is not KEY=value"
        with pytest.raises(UsageError, match=said) as told:
            forwarded_variables({}, tmp_path, tmp_path)
        assert "hunter2" not in str(told.value)
    (tmp_path / ".xds_env").write_bytes(b"A=\xff\xfe\n")
    with pytest.raises(UsageError, match="not UTF-8 text"):
        forwarded_variables({}, tmp_path, tmp_path)
