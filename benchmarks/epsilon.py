"""Epsilon by kind of cohort, beside dp-accounting where that is installed.

python benchmarks/epsilon.py
"""

from __future__ import annotations

from fl_lightning.privacy.accounting import Release, epsilon, gaussian_epsilon
from fl_lightning.sheet import markdown_head, markdown_row

SETTINGS = [
    (1.0, 0.1, 100, 1e-3),
    (2.0, 0.05, 500, 1e-5),
    (0.7, 0.3, 20, 1e-4),
    (1.5, 0.5, 10, 1e-3),
    (1.0, 0.01, 3000, 1e-5),
]


def outside(noise: float, rate: float, number: int, delta: float) -> str:
    """Epsilon of Poisson sampling by dp-accounting."""
    try:
        import dp_accounting
        from dp_accounting import pld
    except ImportError:
        return "not installed"
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, number))
    return f"{accountant.get_epsilon(delta):.4f}"


def main() -> None:
    columns = ["noise", "rate", "rounds", "delta", "Poisson", "dp-accounting", "fixed size", "public, rate * rounds"]
    print(markdown_head(columns, left=0))
    for noise, rate, number, delta in SETTINGS:
        poisson, fixed = (epsilon([Release(kind, noise, rate, number)], delta) for kind in ("poisson", "fixed"))
        public = gaussian_epsilon(noise / (rate * number) ** 0.5, delta)
        theirs = outside(noise, rate, number, delta)
        found = (f"{poisson:.4f}", theirs, f"{fixed:.4f}", f"{public:.4f}")
        print(markdown_row([noise, rate, number, delta, *found]))


if __name__ == "__main__":
    main()
