"""``fl-lightning partition``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fl_lightning.cli.partition import main
from fl_lightning.datamodules import Digits, Multimodal
from fl_lightning.errors import FederationError

DIGITS = ["--data", "Digits", "--data.partition", "Unimodal", "--data.partition.clients", "20"]


def test_prints_a_table_and_writes_manifest_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["partition", *DIGITS, "--out", str(tmp_path / "out"), "--rows", "3"])
    printed = capsys.readouterr().out
    for figure in ("clients", "samples per client", "classes per client", "label entropy", "spread"):
        assert figure in printed
    assert "and 17 more clients" in printed
    assert (tmp_path / "out" / "partition.png").stat().st_size > 5000
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["scheme"]["settings"]["clients"] == 20
    assert manifest["indices"] is None


def test_indices_and_seed(tmp_path: Path) -> None:
    main([*DIGITS, "--data.seed", "4", "--out", str(tmp_path), "--indices", "--rows", "0"])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["seed"] == 4
    assert len(manifest["indices"]["train"]) == 20
    again = Digits(manifest=str(tmp_path / "manifest.json"))
    assert again.dealt.index_hash == manifest["index_hash"]


def test_modes_are_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scheme = "--data.partition Multimodal --data.partition.modes [[0,1],[2,3]] --data.partition.clients [4,2]"
    main(["--data", "Digits", *scheme.split(), "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "mode 0" in printed
    assert "mode 1" in printed
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["meta"]["mode"] == [0] * 4 + [1] * 2
    assert Digits(manifest=str(tmp_path / "manifest.json")).manifest.build_scheme() == Multimodal(  # type: ignore[union-attr]
        [[0, 1], [2, 3]], [4, 2]
    )


def test_a_scheme_within_a_scheme_and_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "data:\n  class_path: Digits\n  init_args:\n    partition:\n      class_path: ConceptShift\n"
        "      init_args:\n        partition:\n          class_path: LabelSkew\n          init_args: {base: B}\n"
    )
    main(["--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path), "--rows", "0"])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["scheme"]["settings"]["partition"]["settings"]["base"] == "B"
    assert len(manifest["label_maps"]) == 10


def test_an_existing_manifest_is_shown_and_copied(tmp_path: Path) -> None:
    main([*DIGITS, "--out", str(tmp_path / "a"), "--rows", "0"])
    source = tmp_path / "a" / "manifest.json"
    main(["--data", "Digits", "--data.manifest", str(source), "--out", str(tmp_path / "b"), "--rows", "0"])
    assert (tmp_path / "b" / "manifest.json").read_text() == source.read_text()


def test_an_impossible_partition_is_the_callers_to_report(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="use 20 clients"):
        main(
            [
                "--data",
                "Digits",
                "--data.partition",
                "Unimodal",
                "--data.partition.clients",
                "19",
                "--out",
                str(tmp_path),
            ]
        )


def test_the_whole_command_line_ends_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fl_lightning.cli import main as cli

    for wrong in (
        ["--data.partition.clients", "19"],
        ["--data.partition.classes_per_client", "12"],
        ["--data.fraction", "0"],
    ):
        with pytest.raises(SystemExit) as caught:
            cli(["partition", *DIGITS, *wrong, "--out", str(tmp_path)])
        assert caught.value.code == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith("fl-lightning: error:")
        assert "\n" not in error
