"""What is refused before it is made may not stand when it is made."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disco_hlo.compiled import compiled
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.baselines import unfused
from disco_hlo.plan.read import read
from disco_hlo.search import layout as at
from disco_hlo.search.hashing import draw, seeded
from disco_hlo.search.kernels import (
    adopt_orphans,
    all_stand,
    drop_idle_copies,
    join,
    most_owned,
    part,
    read_again,
    recompute,
)
from disco_hlo.search.layout import open_draws, open_views
from disco_hlo.search.moves.duplicate import needed
from disco_hlo.search.moves.refusals import never_joined, never_recomputed, never_without
from disco_hlo.search.moves.table import random_move
from disco_hlo.search.moves.unfuse import stays
from disco_hlo.search.ordering import reseat, settle
from disco_hlo.search.state import new_scratch, roll_back
from disco_hlo.search.strategies import prepare
from tests.search.kinds import DUPLICATE, FUSE, SIBLING, UNFUSE

ROOT = Path(__file__).parents[2]
KINDS = np.array([FUSE, SIBLING, UNFUSE, DUPLICATE])
FORESEEN, WRONGLY, MISSED, STANDING = range(4)


@compiled
def make_all(
    step: Any,
    state: Any,
    scratch: Any,
    apart: Any,
    generator: Any,
    pools: Any,
    kinds: Any,
    count: Any,
    fates: Any,
) -> None:
    """Make what random proposals ask for, whether it is foreseen to be refused or not; keep what stands and was
    not. ``fates[i]``: how many of kind i were foreseen and did not stand, or did, and so for those not foreseen.
    Working space ``apart`` is foresight's own, so that no verdict of one is taken for the other."""
    g, s, w = open_views(step, state, scratch)
    _, _, f = open_views(step, state, apart)
    source, pool = open_draws(generator, pools)
    for _ in range(count):
        row = draw(source, kinds.size)
        kind = kinds[row]
        a, b = random_move(g, s, w, source, pool, kind)
        if a < 0:
            continue
        w.number[at.LOGGED] = w.number[at.CHANGES] = 0
        low, settled = np.int64(0), False
        if kind == UNFUSE:
            owned = s.owner[b] == a
            if owned and (s.count[a] == 1 or stays(g, s, a, b)):
                continue
            foreseen, low = never_without(g, s, f, a, b), s.place[a]
            if owned:
                drop_idle_copies(g, s, w, part(g, s, w, b), b)
            else:
                read_again(g, s, w, a, b)
                drop_idle_copies(g, s, w, a, b)
            stands = all_stand(g, s, w, 0)
            settled = stands and (reseat(g, s, w, b, low) if owned else reseat(g, s, w, a, 0))
        else:
            low = s.place[b]
            if not g.flags[a] & g.flags[b] & at.FUSIBLE or low > s.place[a]:
                continue
            if kind == DUPLICATE:
                added, members = needed(g, s, w, a, b)
                foreseen = never_recomputed(g, s, w, a, members, added)  # it reads what ``needed`` wrote
                if added == 0 or not recompute(g, s, w, a, w.needed, added):
                    roll_back(w, 0)
                    continue
                unit, first = adopt_orphans(g, s, w, a)
            else:
                if s.count[a] + s.count[b] > most_owned(g):
                    continue
                foreseen = never_joined(g, s, f, a, b)
                unit, first = adopt_orphans(g, s, w, join(g, s, w, b, a))
            stands = all_stand(g, s, w, 0)
            settled = stands and settle(g, s, w, unit, min(low, first), s.place[unit])
        fates[row, 2 * (1 - foreseen) + stands] += 1
        if not settled or foreseen:
            roll_back(w, 0)


@pytest.mark.parametrize("fused", [True, False])
def test_what_is_foreseen_to_be_refused_is_refused_when_it_is_made(fused: bool) -> None:
    module = ROOT / "tests/data/h200_transformer_default.hlo.pb.gz"
    source = canonicalize(gzip.decompress(module.read_bytes()))
    start = read(source) if fused else unfused(source.graph)
    starts = prepare(source.graph, [start])
    step, (state,), scratch = starts.step, starts.states, new_scratch(starts.step)
    fusible = np.flatnonzero(step.node[at.FLAGS] & at.FUSIBLE)
    pools = (fusible.astype(np.int64), np.array(source.graph.all_reduces, np.int64))
    fates = np.zeros((KINDS.size, 4), np.int64)
    apart = new_scratch(step)
    make_all(step, state, scratch, apart, seeded(1), pools, KINDS, 60_000 if fused else 20_000, fates)
    assert not np.any(fates[:, WRONGLY])
    assert np.all(fates[:, FORESEEN] > 0) or not fused
    assert np.all(fates[:, STANDING] > 0)
