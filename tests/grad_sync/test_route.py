"""The way gradients take: chosen by predicted time, or forced."""

from __future__ import annotations

import pytest

from dsjax.config.exchange import GradSyncConfig
from dsjax.grad_sync import choose_route, make_codec
from dsjax.mesh.topology import FAR, NEAR, Link

NODES = [(8, NEAR), (4, FAR)]
INT4 = make_codec(GradSyncConfig(codec="int4"))


def test_slow_links_between_nodes_are_used_once_a_node():
    route = choose_route(NODES, 10**9, None, "auto")
    assert (route.name, route.parts, route.inner, route.outer, route.replicas) == (
        "hierarchical",
        (8, 4),
        8,
        4,
        32,
    )
    flat = choose_route(NODES, 10**9, None, "flat")
    # 24 of 31 peers are far; with two levels 3 of 4 pieces of an eighth are.
    want = (24 / 32 / 50 + 7 / 32 / 450) / (7 / 8 / 450 + 3 / 4 / 8 / 50)
    assert flat.seconds / route.seconds == pytest.approx(want, rel=0.01)


def test_few_numbers_go_at_once_where_latency_counts():
    assert choose_route([(2, Link(1e9, 1e-3)), (2, Link(1e9, 1e-3))], 10, None, "auto").name == "flat"


def test_a_codec_makes_the_far_links_cheaper():
    dense, coded = (choose_route(NODES, 10**11, codec, "hierarchical").seconds for codec in (None, INT4))
    near = 2 * 4e11 * 7 / 8 / 450e9
    assert (coded - near) / (dense - near) == pytest.approx((64 + 2) / 128 / 4, rel=0.01)


def test_three_levels_make_a_tree():
    levels = [(2, NEAR), (4, FAR), (3, Link(5e9, 1e-5))]
    assert choose_route(levels, 10**9, None, "auto").parts == (2, 4, 3)
    # A codec on all far links is worth more than leaving the farthest ones to fewer.
    assert choose_route(levels, 10**9, INT4, "auto").parts == (2, 12)
    assert choose_route(levels, 10**9, INT4, "hierarchical").parts == (2, 12)
    assert choose_route(NODES[:1], 10**9, INT4, "tree").name == "flat"


def test_a_sparse_codec_is_sent_whole_to_every_peer():
    topk = make_codec(GradSyncConfig(codec="topk"))
    one, two = (choose_route([(n, FAR)], 10**9, topk, "auto").seconds for n in (2, 3))
    assert two / one == pytest.approx(2, rel=0.01)
