"""Checkpoint files are written atomically, rejected if changed, and fits fall back to earlier ones."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from fl_lightning import checkpoints
from fl_lightning.checkpoints import CheckedCheckpointIO, SafeCheckpointIO, readable
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, FedProx
from fl_lightning.optim import FedAdam
from tests.support import blobs, fit, largest_difference, mlp, trainer, weights


def run(folder: Path, rounds: int = 2, ckpt_path: str | None = None, data: Any = None, **options: Any) -> FedAvg:
    method = FedAvg(mlp(), **{"lr": 0.1, "engine": "stacked", **options})
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last=True, enable_version_counter=False)
    fit(method, data or blobs(), rounds, ckpt_path, enable_checkpointing=True, callbacks=[saver])
    return method


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("saved")
    run(folder, 3)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    for path in saved.glob("*.ckpt"):
        shutil.copy2(path, tmp_path / path.name)
    return tmp_path


def load(path: Path) -> Any:
    return CheckedCheckpointIO(SafeCheckpointIO()).load_checkpoint(path, weights_only=True)


def test_other_programs_read_it(saved: Path) -> None:
    assert "fl_lightning" in torch.load(saved / "last.ckpt", weights_only=True)
    assert "fl_lightning" in torch.load(saved / "last.ckpt", weights_only=True, mmap=True)
    with zipfile.ZipFile(saved / "last.ckpt") as archive:
        assert archive.testzip() is None
        assert archive.comment.startswith(checkpoints.MARK)


def test_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    """All bits of the two ends, where the format is, and one of every 97 between them."""
    path = tmp_path / "small.ckpt"
    SafeCheckpointIO().save_checkpoint({"state_dict": {"w": torch.arange(9.0)}, "pytorch-lightning_version": "2"}, path)
    good = path.read_bytes()
    assert load(path)["state_dict"]["w"].sum() == 36
    total = 8 * len(good)
    places = [
        *range(64),
        *range(64, total, 97),
        *range(total - 8 * (checkpoints.COMMENT + checkpoints.END_SIZE), total),
    ]
    for place in places:
        flipped = bytearray(good)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(FederationError, match="cannot be read, it is damaged"):
            load(path)


@pytest.mark.parametrize("left", [0, 3, 21, 22, 100, -1, -85, -106, -107])
def test_a_torn_file_is_refused(left: int, folder: Path) -> None:
    content = (folder / "last.ckpt").read_bytes()
    (folder / "last.ckpt").write_bytes(content[:left])
    with pytest.raises(FederationError, match="cannot be read, it is damaged"):
        load(folder / "last.ckpt")


def test_a_file_of_torch_save_itself_is_read_without_a_checksum(folder: Path) -> None:
    path = folder / "last.ckpt"
    torch.save(torch.load(path, weights_only=True), path)
    assert load(path)["fl_lightning"]["rounds"] == 3
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FederationError, match="its end is missing or changed"):
        load(path)


def test_a_flipped_weight_is_refused_by_load_from_checkpoint(folder: Path) -> None:
    content = bytearray((folder / "last.ckpt").read_bytes())
    value = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]["net.fc1.weight"]
    content[content.index(value.numpy().tobytes()) + 5] ^= 4
    (folder / "last.ckpt").write_bytes(content)
    torch.load(folder / "last.ckpt", weights_only=True)  # PyTorch does not notice
    with pytest.raises(FederationError, match="its checksum differs"):
        FedAvg.load_from_checkpoint(folder / "last.ckpt")


def test_wrong_checkpoints_are_named(folder: Path) -> None:
    path = folder / "last.ckpt"
    with pytest.raises(FederationError, match="is of FedAvg, not of FedProx"):
        FedProx.load_from_checkpoint(path)
    with pytest.raises(FederationError, match="is a folder: give a checkpoint"):
        FedAvg.load_from_checkpoint(folder)
    with pytest.raises(FederationError, match="has 3 rounds already: set max_epochs to more than that, not 2"):
        run(folder / "again", 2, str(path))
    error = ValueError("Errors:\n  - FedBPS has no option 'laplace_samples'; did you mean laplace.samples?\n")
    with (
        pytest.raises(FederationError, match="of another version of the library \\(FedBPS has no option"),
        readable(path),
    ):
        raise error


@pytest.mark.parametrize("name", ["last.ckpt", "epoch=2.ckpt"])
def test_a_fit_falls_back_to_the_newest_intact_checkpoint_with_a_warning(
    name: str, folder: Path, tmp_path: Path
) -> None:
    whole = run(tmp_path / "whole", 5)
    for damaged in {"last.ckpt", "epoch=2.ckpt"}:
        (folder / damaged).write_bytes((folder / damaged).read_bytes()[:999])
    method = FedAvg(mlp(), lr=0.1, engine="stacked")
    with pytest.warns(
        UserWarning, match=rf"{name} cannot be read.*resumes from .*epoch=1\.ckpt, the newest intact one"
    ):
        trainer(5).fit(method, datamodule=blobs(), ckpt_path=str(folder / name))
    assert largest_difference(weights(method), weights(whole)) == 0.0
    with pytest.raises(FederationError, match="cannot be read"):  # an evaluation is of what was asked for
        trainer().test(FedAvg(mlp()), datamodule=blobs(), ckpt_path=str(folder / name), verbose=False)


def test_no_intact_checkpoint_to_fall_back_to(folder: Path) -> None:
    for path in folder.glob("*.ckpt"):
        path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(FederationError, match=r"last\.ckpt cannot be read"):
        run(folder, 5, str(folder / "last.ckpt"))


def forked(act: Callable[[], Any]) -> str:
    """The child's FederationError, or its other outcome."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        said = "nothing"
        try:
            act()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def test_a_full_disk_ends_the_run_and_keeps_earlier_checkpoints(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        run(folder, 5, str(folder / "last.ckpt"))

    said = forked(full)
    assert said.startswith(f"FederationError: The checkpoint {folder}")
    assert f"cannot be written ({os.strerror(errno.EFBIG)}): make room" in said
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before  # and nothing half written


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's folder is made by root")
def test_a_folder_without_permission_ends_the_run(folder: Path) -> None:
    def as_nobody() -> None:
        os.chdir("/")
        os.seteuid(65534)
        io = CheckedCheckpointIO(SafeCheckpointIO())
        io.save_checkpoint({"a": 1}, folder / "last.ckpt")

    assert "last.ckpt cannot be written (Permission denied)" in forked(as_nobody)


def test_a_folder_that_cannot_be_made_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FederationError, match=r"cannot be written \(Not a directory\)"):
        run(tmp_path / "file" / "runs")


def test_files_are_written_in_their_folder_and_stale_parts_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(number))
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    host = os.uname().nodename
    dead, alive = (tmp_path / f".last.ckpt.{host}.{process}.part" for process in (gone, os.getppid()))
    dead.touch()
    alive.touch()
    SafeCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "last.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == [alive.name, "last.ckpt"]
    assert len(synced) == 2  # the file and its folder


def test_checkpoints_that_cannot_be_resumed(folder: Path) -> None:
    path = folder / "other.ckpt"
    good = torch.load(folder / "last.ckpt", weights_only=True)
    part = {name: value for name, value in good["fl_lightning"].items() if name != "clients"}
    forgotten = {**good["fl_lightning"]["clients"], "private": {}}
    cases: list[tuple[Any, str]] = [
        ({n: v for n, v in good.items() if n not in checkpoints.NEEDED}, "contains only a model .*save_weights_only"),
        ({"w": torch.ones(3)}, "is not a checkpoint of a Trainer"),
        (torch.ones(3), "is not a checkpoint of a Trainer"),
        ({**good, "fl_lightning": part}, "lacks part of the state of a federated run.*'clients'"),
        ({**good, "fl_lightning": {**good["fl_lightning"], "bytes": 3}}, "has it in another form"),
        (
            {**good, "fl_lightning": {**good["fl_lightning"], "rounds": 10**6}},
            "has it in another form .*1000000 rounds",
        ),
        ({**good, "fl_lightning": {**good["fl_lightning"], "rounds": "a"}}, "rounds is not a whole number"),
        ({**good, "fl_lightning": {**good["fl_lightning"], "clients": forgotten}}, "of different clients"),
        ({**good, "loops": 3}, "its loops is of type int, not dict"),
        ({**good, "loops": {}}, "has no progress of a fit"),
        ({n: v for n, v in good.items() if n != "lr_schedulers"}, "contains only a model"),
    ]
    for content, sentence in cases:
        torch.save(content, path)
        with pytest.raises(FederationError, match=sentence):
            run(folder, 5, str(path))
    torch.save(cases[0][0], path)  # a model can be evaluated
    trainer().test(FedAvg(mlp()), datamodule=blobs(), ckpt_path=str(path), verbose=False)


@pytest.mark.parametrize(
    ("options", "data", "says"),
    [
        ({}, {}, None),
        ({"engine": "sequential", "clients_per_stack": 3}, {}, None),
        ({"lr": 0.2, "epochs": 2}, {}, r"lr 0\.2 \(was 0\.1\), epochs 2 \(was 1\)\."),
        ({"batch_size": 5, "momentum": 0.5, "weighting": "uniform"}, {}, r"batch_size 5 \(was 10\), momentum 0\.5"),
        ({}, {"fraction": 0.5}, r"fraction 0\.5 \(was 1\.0\)\."),
    ],
)
def test_other_settings_are_named_once(options: Any, data: Any, says: str | None, folder: Path) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(folder / "again", 4, str(folder / "last.ckpt"), blobs(**data), **options)
    found = [str(one.message) for one in told if "other settings" in str(one.message)]
    assert len(found) == (says is not None)
    if says is not None:
        assert re.search(says, found[0])


def test_other_settings_of_the_servers_optimizer_are_named(tmp_path: Path) -> None:
    run(tmp_path, 2, server_optimizer=lambda p: FedAdam(p, lr=0.02))
    with pytest.warns(UserWarning, match=r"server_optimizer lr 0\.5, which is ignored \(0\.02\)"):
        run(tmp_path / "more", 3, str(tmp_path / "last.ckpt"), server_optimizer=lambda p: FedAdam(p, lr=0.5))


def test_lightnings_checkpoint_io_is_used_if_the_effect_is_disabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FL_LIGHTNING_LEAVE", "checkpoints")
    run(tmp_path)
    assert checkpoints.MARK not in (tmp_path / "last.ckpt").read_bytes()
