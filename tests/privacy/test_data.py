"""Whose rows an attack uses: disjoint from the target's and from the evaluation's, of the same classes."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from fl_lightning.datamodules import Digits, LabelSkew, TensorFederation, Unimodal
from fl_lightning.errors import FederationError
from fl_lightning.federation import Federation
from fl_lightning.privacy import AttackData, attack_data
from fl_lightning.privacy.data import deal_shadows
from tests.support.privacy import CLIENTS, noise


def check(federation: Federation, data: AttackData) -> None:
    """Everything that must hold of the rows of an attack."""
    train = set(federation.train.flat.tolist())
    own = [set(data.pool.tolist()), set(data.reference.tolist())]
    for one, other in combinations(own, 2):
        assert not one & other
    adversary = set().union(*own)
    assert sum(map(len, own)) == len(adversary)
    assert not adversary & train
    for client, rows in data.members.items():
        members, others = set(rows.tolist()), set(data.nonmembers[client].tolist())
        assert len(members) == len(rows) == len(others) == len(data.nonmembers[client])
        assert members <= set(federation.train[client].tolist())
        assert not others & train
        assert not others & adversary
        counts = [torch.bincount(federation.targets[r], minlength=10) for r in (rows, data.nonmembers[client])]
        assert torch.equal(*counts)


def test_rows_are_disjoint_and_of_the_same_classes() -> None:
    federation = noise().federation
    data = attack_data(federation, range(CLIENTS), seed=1, samples=90)
    check(federation, data)
    assert data.source == "unowned"
    assert not set(federation.test.flat.tolist()) & set(torch.cat([*data.nonmembers.values(), data.reference]).tolist())
    assert all(80 <= len(rows) <= 90 for rows in data.members.values())
    again, other = (attack_data(federation, range(CLIENTS), seed=s, samples=90) for s in (1, 2))
    assert torch.equal(again.reference, data.reference)
    assert all(torch.equal(again.members[c], data.members[c]) for c in range(CLIENTS))
    assert not torch.equal(other.reference, data.reference)


def test_without_rows_of_nobody_held_out_ones_are_used() -> None:
    federation = Digits(partition=Unimodal(10, 2)).federation
    data = attack_data(federation, range(10), seed=0)
    check(federation, data)
    assert data.source == "held out"


def test_official_test_rows_and_validation_rows() -> None:
    module = Digits(partition=LabelSkew("C"), val_fraction=0.2)
    federation = module.federation
    data = attack_data(federation, range(3), seed=0)
    check(federation, data)
    assert federation.val is not None
    used = torch.cat([*data.nonmembers.values(), data.reference, data.pool])
    assert not set(federation.val.flat.tolist()) & set(used.tolist())


def test_too_few_rows_are_refused() -> None:
    x, y = torch.randn(44, 3), torch.arange(44) % 2
    small = TensorFederation(x, y, train=[range(20), range(20, 40)], test=[[40, 41], [42, 43]]).federation
    with pytest.raises(FederationError, match="are needed: give the partition fewer samples"):
        attack_data(small, [0], seed=0)


def test_of_every_two_shadow_federations_each_row_is_in_one() -> None:
    rows = torch.arange(100, 500)
    dealt = deal_shadows(rows, 4, 5, 40, seed=1)
    assert [[len(part) for part in parts] for parts in dealt] == [[40] * 5] * 4
    unions = [set(torch.cat(parts).tolist()) for parts in dealt]
    assert all(len(union) == 200 for union in unions)
    for first, second in (unions[:2], unions[2:]):
        assert not first & second
        assert first | second == set(rows.tolist())
    assert 70 < len(unions[0] & unions[2]) < 130
    assert [p.tolist() for p in dealt[3]] == [p.tolist() for p in deal_shadows(rows, 4, 5, 40, seed=1)[3]]


def test_wanted_rows_are_dealt_first_and_few_rows_give_fewer_clients() -> None:
    wanted = torch.arange(80)
    dealt = deal_shadows(torch.arange(100, 1000), 2, 4, 40, seed=0, wanted=wanted)
    assert set(wanted.tolist()) <= set(torch.cat([part for parts in dealt for part in parts]).tolist())
    few = deal_shadows(torch.arange(150), 1, 10, 100, seed=0)
    assert [len(part) for part in few[0]] == [38, 37]
    with pytest.raises(FederationError, match="too few for shadows"):
        deal_shadows(torch.arange(12), 1, 10, 100, seed=0)
