"""What the grid varies: factors, their values, and values not to meet (tests/test_grid.py).

None means: the layout has no such thing. Precision is no factor: a comparison to 1e-5 needs fp32.
"""

from dataclasses import replace
from typing import Any

from tests.support.cover import Case, Rule, Space, cover
from tests.support.grid import GPT, HYBRID, LLAMA, ONE_KV_HEAD, SAMPLES, SHARED, SIGMOID, STRADDLING, Layout

MODELS = {
    "llama": LLAMA,
    "gpt": GPT,  # a tied embedding, learned positions, dropout
    "one_kv_head": ONE_KV_HEAD,  # fewer than tp; tied
    "straddling": STRADDLING,  # the query heads of a key/value head lie on two ranks
    "shared": replace(SHARED, moe=replace(SHARED.moe, num_experts=5)),  # more on one of two ranks than on the other
    "sigmoid": SIGMOID,
    "hybrid": HYBRID,
}
DENSE = ("llama", "gpt", "one_kv_head", "straddling")
# Schedules with the number of stages on a rank. The others have the bits of 1f1b, says a test of their own.
STAGES_ON_A_RANK = {"1f1b": 1, "zb-v": 2}

FACTORS = {
    "tp": (None, "2", "2 with sequence parallelism"),
    "cp": (None, "gather", "ring", "ulysses"),
    "dp": (None, 2),
    "schedule": (None, *STAGES_ON_A_RANK),
    "model": tuple(MODELS),
    "experts": (None, "as tp", "ep 2", "etp 2"),
    "zero_stage": (None, 0, 1, 2, 3),
    "overlap": (None, False, True),
    # Two replicas have as many micro-batches, the first has one more, the second has none.
    "micro_batch_size": (3, 4, SAMPLES),
    "tp_overlap_chunks": (None, 1, 3),
    "recompute": ("none", "selective", "full"),
    "loss_chunk": (0, 7),
    "packed": (False, True),
    "order": ("tp-cp-dp-pp", "pp-dp-cp-tp"),
    "partition": (None, (1, 3)),
}


def axes(tp: Any, cp: Any, dp: Any, schedule: Any) -> int:
    """The number of axes, of two ranks each."""
    return sum(axis is not None for axis in (tp, cp, dp, schedule))


RULES = [
    Rule(
        "a layout has ranks, and at most four", ("tp", "cp", "dp", "schedule"), lambda *values: 1 <= axes(*values) <= 2
    ),
    # No such run
    Rule(
        "dense models have no experts",
        ("model", "experts"),
        lambda model, experts: (model in DENSE) == (experts is None),
    ),
    Rule(
        "ep and etp deal experts to ranks of tp, cp and dp",
        ("tp", "cp", "dp", "experts"),
        lambda tp, cp, dp, experts: experts not in ("ep 2", "etp 2") or axes(tp, cp, dp, None) > 0,
    ),
    Rule(
        "replicas that share experts have as many micro-batches",
        ("dp", "experts", "micro_batch_size"),
        lambda dp, experts, size: dp is None or experts is None or size == 3,
    ),
    Rule(
        "chunks hide messages of tp", ("tp", "tp_overlap_chunks"), lambda tp, chunks: (tp is None) == (chunks is None)
    ),
    Rule(
        "ZeRO shards over dp and cp",
        ("cp", "dp", "zero_stage"),
        lambda cp, dp, stage: (stage is None) == (cp is None and dp is None),
    ),
    Rule(
        "without dp and cp no sum of gradients is hidden",
        ("zero_stage", "overlap"),
        lambda stage, overlap: (stage is None) == (overlap is None),
    ),
    # The same run under another name
    Rule(
        "experts are cut by tp if nothing is said",
        ("tp", "experts"),
        lambda tp, experts: tp is None or experts != "etp 2",
    ),
    Rule(
        "one axis has one order",
        ("tp", "cp", "dp", "schedule", "order"),
        lambda tp, cp, dp, schedule, order: order == "tp-cp-dp-pp" or axes(tp, cp, dp, schedule) > 1,
    ),
    # Left to others
    Rule(
        "tp alone shows what is wrong without sequence parallelism",
        ("tp", "cp", "dp", "schedule"),
        lambda tp, cp, dp, schedule: tp != "2" or axes(None, cp, dp, schedule) == 0,
    ),
    Rule(
        "ring and ulysses meet tp; their gradients are summed as those of gather",
        ("cp", "dp"),
        lambda cp, dp: dp is None or cp in (None, "gather"),
    ),
    Rule(
        "a pipeline does not see how attention gets its keys",
        ("cp", "schedule"),
        lambda cp, schedule: None in (cp, schedule) or (cp, schedule) == ("gather", "1f1b"),
    ),
    Rule(
        "attention does not see experts; states pass over ranks in the same way with gather and ring",
        ("cp", "model"),
        lambda cp, model: cp not in ("ring", "ulysses") or model in DENSE or (cp, model) == ("ulysses", "hybrid"),
    ),
    Rule(
        "heads straddle ranks only where tp or cp deals them",
        ("tp", "cp", "dp", "schedule", "model"),
        lambda tp, cp, dp, schedule, model: (
            model != "straddling" or (axes(tp, cp, None, None) and not axes(None, None, dp, schedule))
        ),
    ),
    Rule(
        "tests/test_zero.py compares ZeRO 2 and 3 with ZeRO 1 on pipelines",
        ("schedule", "zero_stage"),
        lambda schedule, stage: schedule is None or stage not in (2, 3),
    ),
    Rule(
        "without ZeRO a pipeline needs one schedule",
        ("schedule", "zero_stage"),
        lambda schedule, stage: stage != 0 or schedule in (None, "1f1b"),
    ),
    Rule(
        "stages of unequal length need four layers, and meet one schedule and no other axis",
        ("tp", "cp", "dp", "schedule", "model", "partition"),
        lambda tp, cp, dp, schedule, model, partition: (
            partition is None or (schedule == "1f1b" and model in DENSE and not axes(tp, cp, dp, None))
        ),
    ),
    Rule(
        "chunks meet no other axis than tp",
        ("cp", "dp", "schedule", "tp_overlap_chunks"),
        lambda cp, dp, schedule, chunks: chunks != 3 or not axes(None, cp, dp, schedule),
    ),
    Rule(
        "ZeRO does not see heads",
        ("model", "zero_stage"),
        lambda model, stage: model != "straddling" or stage in (None, 1),
    ),
]
SPACE = Space(FACTORS, RULES)


def layout_of(case: Case) -> Layout:
    """The layout of a case of SPACE."""
    return Layout(
        MODELS[case["model"]],
        tp=1 if case["tp"] is None else 2,
        sequence_parallel=case["tp"] == "2 with sequence parallelism",
        tp_overlap_chunks=case["tp_overlap_chunks"] or 1,
        cp=1 if case["cp"] is None else 2,
        cp_attention=case["cp"] or "gather",
        dp=case["dp"] or 1,
        pp=1 if case["schedule"] is None else 2,
        schedule=case["schedule"] or "1f1b",
        vpp=STAGES_ON_A_RANK[case["schedule"] or "1f1b"],
        ep=2 if case["experts"] == "ep 2" else 1,
        etp={"ep 2": 1, "etp 2": 2}.get(case["experts"], 0),
        zero_stage=1 if case["zero_stage"] is None else case["zero_stage"],
        overlap=case["overlap"] is not False,
        micro_batch_size=case["micro_batch_size"],
        recompute=case["recompute"],
        loss_chunk=case["loss_chunk"],
        packed=case["packed"],
        order=case["order"],
        partition=case["partition"] or (),
    )


def cost(case: Case) -> float:
    """Four ranks take less than twice the time of two."""
    ranks = 2 ** axes(case["tp"], case["cp"], case["dp"], case["schedule"])
    return float(ranks**0.7)


# Of 30 seeds the one with the fewest ranks, 120 in 45 layouts.
COVER = cover(SPACE, 14, cost)
