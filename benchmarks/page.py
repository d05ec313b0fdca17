"""Write the tables of docs/performance.md from the JSON files beside this script: python benchmarks/page.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fl_lightning.sheet import markdown

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
NAMES = {
    "mnist-mlp": "MNIST perceptron, 10 of 100 clients, E = 5, B = 10",
    "waffle-mlp": "WAFFLe, same net and clients, against a plain loop of WAFFLe",
    "fmnist-cnn": "Fashion-MNIST network, same clients, E = 3",
    "lenet5": "LeNet-5, E = 5, B = 32",
    "resnet18": "ResNet-18, B = 32, 2 of 4 clients",
}


def read(name: str) -> Any:
    path = HERE / name
    return json.loads(path.read_text()) if path.exists() else {}


def table(head: str, rows: list[list[Any]]) -> str:
    return markdown([column.strip() for column in head.split("|")], rows).rstrip("\n")


def speed() -> str:
    one, two = read("speed.json").get("workloads", {}), read("speed2.json").get("workloads", {})
    rows = [
        [
            NAMES[name],
            f"{row['ratio']:.2f}",
            f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}",
            f"{two[name]['ratio']:.2f}" if name in two else "",
            row["engine"],
            f"{row['validation_share']:.0%}",
        ]
        for name, row in one.items()
    ]
    return table("workload | one core | repeats | two workers | engine | validation", rows)


def methods() -> str:
    rows = [
        [name, f"{row['ratio']:.2f}", f"{row['server_share']:.0%}" if "server_share" in row else "", row["engine"]]
        for name, row in sorted(read("methods.json").items())
    ]
    return table("method | ratio | server | engine", rows)


def scaling() -> str:
    rows = [
        [
            f"{row['method']}, {row['clients']:,} clients, {row['cohort']:,} in a round"
            + (f", {row['workers']} workers" if row["workers"] > 1 else "")
            + (", store on disk" if row["store"] == "disk" else ""),
            row["seconds_per_round"],
            row["milliseconds_per_client"],
            f"{row['peak_memory_mb']:,}",
        ]
        for row in read("scaling.json")
    ]
    return table("run | seconds per round | ms per client | peak memory (MB)", rows)


def anatomy() -> str:
    rows = [
        [
            NAMES[name],
            f"{row['round_seconds']:.2f}",
            ", ".join(f"{kind} {share:.0%}" for kind, share in row["shares"].items()),
            f"{row['floor_seconds'] / row['round_seconds']:.0%}" if row["floor_seconds"] else "",
            f"{row['first_round_seconds']:.1f}",
        ]
        for name, row in read("anatomy.json").items()
        if name in NAMES
    ]
    head = "workload | seconds per round | breakdown | bare matrix products | seconds of the first round, all included"
    return table(head, rows)


def peers() -> str:
    rows = [
        [name, row.get("version", ""), f"{row['ratio']:.2f}" if row.get("ratio") else row.get("reason", "")]
        for name, row in read("peers.json").get("simulators", {}).items()
    ]
    return table("simulator | version | ratio", rows)


def kernels() -> str:
    rows = [[name, row["products"], row["groups"]] for name, row in read("kernels.json").items()]
    return table("layer | matrix products | in groups", rows)


def written(text: str) -> str:
    """The page with its tables as the files have them."""
    for name, make in (
        ("speed", speed), ("methods", methods), ("anatomy", anatomy), ("scaling", scaling), ("peers", peers),
        ("kernels", kernels),
    ):  # fmt: skip
        begin, end = f"<!-- {name}: written by benchmarks/page.py -->", f"<!-- end of {name} -->"
        text = re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n\n{make()}\n\n{end}", text, flags=re.DOTALL)  # noqa: B023
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
