"""Break the library in one line at a time and see which of the quick tests notices.

    PYTHONPATH=. python benchmarks/breaks.py [NUMBER ...]

Every break is made in a copy of the tree, of which the named tests are run until one fails. Prints the table of
docs/reliability.md and ends with 1 where a break was not noticed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from fl_lightning.sheet import markdown_head, markdown_row

ROOT = Path(__file__).parents[1]
COLUMNS = ("#", "what is broken", "where", "test that fails first")


class Break(NamedTuple):
    """A line that is changed, which stands once in its file, and the tests that should notice."""

    what: str
    path: str
    line: str
    changed: str
    tests: str

    def apply(self, root: Path) -> None:
        """Change the line in a copy of the tree."""
        path = root / "fl_lightning" / self.path
        text = path.read_text()
        if text.count(self.line) != 1:
            raise SystemExit(
                f"{self.path} has {self.line!r} {text.count(self.line)} times: bring breaks.py up to date."
            )
        path.write_text(text.replace(self.line, self.changed))


BREAKS = [
    Break(
        "SCAFFOLD corrects with the sum of the control variates, not their difference",
        "methods/scaffold.py",
        "state.pop(SERVER + name) - state[OWN + name]",
        "state.pop(SERVER + name) + state[OWN + name]",
        "methods/test_scaffold.py",
    ),
    Break(
        "SCAFFOLD's server moves c by the mean over the cohort, not over all clients",
        "methods/scaffold.py",
        ".sum(0) / len(self.roster))",
        ".sum(0) / len(messages))",
        "methods/test_scaffold.py",
    ),
    Break(
        "FedProx pushes clients away from the server's model",
        "methods/fedprox.py",
        "g + self.mu * (state[name]",
        "g - self.mu * (state[name]",
        "methods/test_fedprox.py",
    ),
    Break(
        "the mean weighs clients all alike where it should go by samples, and the other way round",
        "wire.py",
        'if weighting == "samples" else 1.0',
        'if weighting != "samples" else 1.0',
        "methods/test_fedavg.py",
    ),
    Break(
        "random streams do not depend on their purpose",
        "seeding.py",
        "(seed, zlib.crc32(purpose.encode()), round, client)",
        "(seed, 0, round, client)",
        "test_core.py",
    ),
    Break(
        "a round's clients are drawn with replacement",
        "datamodules/sampling.py",
        "size, replace=False",
        "size, replace=True",
        "datamodules/test_base.py",
    ),
    Break(
        "clients of a class are dealt the same rows",
        "datamodules/partitions/deal.py",
        "self.segments(np.cumsum(size, axis=0) - size, size)",
        "self.segments(0 * size, size)",
        "datamodules/test_properties.py",
    ),
    Break(
        "Krum counts a neighbour too many",
        "robust.py",
        "near = len(values) - hostile - 2",
        "near = len(values) - hostile - 1",
        "test_robust.py",
    ),
    Break(
        "updates are scaled up to the clipping norm, and larger ones pass",
        "privacy/defence.py",
        "factor = min(1.0, bound /",
        "factor = max(1.0, bound /",
        "privacy/test_defence.py",
    ),
    Break(
        "central noise hides the client of the smallest weight only",
        "privacy/defence.py",
        "bound * max(weights) /",
        "bound * min(weights) /",
        "privacy/test_defence.py",
    ),
    Break(
        "noise has standard deviation 1, whatever was asked for",
        "privacy/defence.py",
        "v.double() + std * normal(",
        "v.double() + normal(",
        "privacy/test_defence.py",
    ),
    Break(
        "epsilon takes the noise for its square",
        "privacy/accounting.py",
        "one.number / one.noise**2",
        "one.number / one.noise",
        "privacy/test_accounting.py",
    ),
    Break(
        "secure aggregation masks with zeros",
        "privacy/secure.py",
        "SecretStream(new_key()).words(len(rows[client]))",
        "0 * SecretStream(new_key()).words(len(rows[client]))",
        "privacy/test_secure.py",
    ),
    Break(
        "the analytic attack multiplies where it should divide",
        "privacy/gradients.py",
        "weight[row] / bias[row]",
        "weight[row] * bias[row]",
        "privacy/test_leakage.py",
    ),
    Break(
        "the ledger forgets how many bytes an entry has",
        "callbacks/ledger.py",
        "size = sum(entry[3] for entry in layout)",
        "size = len(layout)",
        "callbacks/test_ledger.py",
    ),
    Break(
        "the last, partial byte of a mask is not counted",
        "wire.py",
        "(t.numel() + 7) // 8",
        "t.numel() // 8",
        "test_core.py",
    ),
    Break(
        "masks are packed the other way round than they are read",
        "wire.py",
        "(bits << torch.arange(8, dtype=torch.uint8, device=mask.device))",
        "(bits << torch.arange(8, dtype=torch.uint8, device=mask.device).flip(0))",
        "methods/test_fedbps.py",
    ),
    Break(
        "the worst tenth is rounded down",
        "metrics/clients.py",
        "math.ceil(len(scores) / 10)",
        "max(1, math.floor(len(scores) / 10))",
        "metrics/test_per_client.py metrics/test_fairness.py",
    ),
    Break(
        "more of every metric is better",
        "tasks.py",
        "return bool(metric.higher_is_better)",
        "return True",
        "test_tasks.py test_own_task.py",
    ),
    Break(
        "a resumed run begins a round early",
        "persistence.py",
        'module.completed_rounds, module.summary = saved["rounds"]',
        'module.completed_rounds, module.summary = saved["rounds"] - 1',
        "test_resume.py",
    ),
    Break(
        "a resumed run has lost what its server holds besides the model",
        "persistence.py",
        'module.load_server_extras(saved.get("server", {}))',
        "pass",
        "test_resume.py",
    ),
    Break(
        "a checkpoint with another checksum is read",
        "checkpoints.py",
        ".encode() != tail[len(MARK) :]",
        ".encode() == b''",
        "test_checkpoints.py",
    ),
    Break(
        "IFCA's clients choose the model with the largest loss",
        "methods/ifca.py",
        "losses.index(min(losses))",
        "losses.index(max(losses))",
        "methods/test_ifca.py",
    ),
    Break(
        "the divergence of WAFFLe's sticks has a wrong sign",
        "distributions.py",
        "- math.log(alpha) - (d - 1) / d",
        "- math.log(alpha) + (d - 1) / d",
        "test_distributions.py",
    ),
    Break(
        "WAFFLe's bound weighs the prior as for one sample",
        "methods/waffle.py",
        'return self.posterior.kl_weight / batch.scalars["samples"] *',
        "return self.posterior.kl_weight *",
        "methods/test_waffle.py",
    ),
    Break(
        "q-FFL multiplies by the learning rate where the Lipschitz constant is its inverse",
        "methods/qffl.py",
        "/ self.local.lr",
        "* self.local.lr",
        "methods/test_qffl.py",
    ),
    Break(
        "APFL's mixing weight grows by its penalty",
        "methods/apfl.py",
        "(slope + self.alpha_reg * state[ALPHA])",
        "(slope - self.alpha_reg * state[ALPHA])",
        "methods/test_apfl.py",
    ),
    Break(
        "infinite entries of a site's message are let in",
        "message_checks.py",
        "if not bool(value.isfinite().all()):",
        "if bool(value.isnan().any()):",
        "test_message_checks.py",
    ),
    Break(
        "a server's certificate may name other hosts",
        "flower/keys.py",
        "missing = [name for name in names if name not in known]",
        "missing = []",
        "flower/test_keys.py",
    ),
    Break(
        "an envelope of another format is opened",
        "remote/envelope.py",
        'if said["format"] != FORMAT:',
        'if said["format"] is None:',
        "remote/test_remote.py",
    ),
]


def noticed(root: Path, tests: list[str]) -> str | None:
    """The first of the tests that fails in a copy of the tree, run in a process that has PyTorch already."""
    said = root / "said.txt"
    pid = os.fork()
    if pid == 0:
        import pytest

        os.chdir(root)
        sys.path[:] = [str(root), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
        for name in [name for name in sys.modules if name.split(".")[0] in ("fl_lightning", "tests")]:
            del sys.modules[name]
        options = ["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", "-rfE", "--tb=no", "--disable-warnings"]
        try:
            with said.open("w") as file, redirect_stdout(file), redirect_stderr(file):
                pytest.main([*options, *tests])
                import fl_lightning

                print("of", Path(str(fl_lightning.__file__)).parents[1])
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    text = said.read_text()
    if f"of {root}\n" not in text:
        raise SystemExit(f"The tests did not run in {root}:\n{text}")
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    return found[1] if found else None


def main() -> None:
    import lightning.pytorch  # noqa: F401  # once, for all processes that are forked
    import torch

    torch.set_num_threads(1)
    chosen = [int(number) for number in sys.argv[1:]] or range(1, len(BREAKS) + 1)
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    unnoticed = 0
    print(markdown_head(COLUMNS, left=len(COLUMNS)))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "tree"
        for name in filter(None, files.split("\0")):
            if (ROOT / name).is_file() and not name.startswith(("docs/pictures", "results", "data/")):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        for number in chosen:
            one = BREAKS[number - 1]
            path = root / "fl_lightning" / one.path
            whole = path.read_text()
            one.apply(root)
            test = noticed(root, [f"tests/{tests}" for tests in one.tests.split()])
            path.write_text(whole)
            unnoticed += test is None
            where = f"`{one.path}`"
            print(markdown_row([str(number), one.what, where, f"`{test}`" if test else "**none**"]), flush=True)
    sys.exit(1 if unnoticed else 0)


if __name__ == "__main__":
    main()
